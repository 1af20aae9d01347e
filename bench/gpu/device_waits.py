"""Measures what keeps the device tier from the resident pass, with the blocks of FLUX (see device_offload.py).

    PYTHONPATH=python python bench/gpu/device_waits.py [--layers 4] [--repeat 7]

It prints the resident pass, the time to decode all blocks with nothing else on the GPU, and passes of the device tier:
as it is; with a decoding stream of high priority; with three slots; and, only to measure them, with the host's wait for
the decoding moved to the end of the block (late), and without it (none). The variants alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import overwire as ow
import torch
from device_offload import build
from overwire import gpu


def seconds_of(call: Any) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def change(ring: Any, kind: str, usual: Any) -> None:
    """Makes a ring use a variant."""
    torch.cuda.synchronize()
    carrier = ring._carrier
    for name in ("await_decoded", "_decode_block"):
        carrier.__dict__.pop(name, None)
    ring.__dict__.pop("release", None)
    carrier._decoding = torch.cuda.Stream(priority=-1) if kind == "priority" else usual
    if kind not in ("late", "none"):
        return
    decode_block, release = carrier._decode_block, ring.release

    def decode(block: Any, slot: Any, source: int) -> None:
        decode_block(block, slot, source)
        slot.event = carrier._decoding.record_event()

    def release_late(at: int) -> bool:
        slot = ring._slot_of(at)
        if slot.decoding is not None:
            assert not any(isinstance(one, BaseException) for one in slot.decoding.wait())
            slot.decoding = None
        return bool(release(at))

    carrier._decode_block = decode
    carrier.await_decoded = lambda slot: carrier.stream().wait_event(slot.event) if hasattr(slot, "event") else None
    if kind == "late":
        ring.release = release_late


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    with torch.inference_mode(False):
        model, arguments = build("flux", options.layers)
        model.cuda()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    resident = [seconds_of(lambda: model(**arguments)) for _ in range(2 + options.repeat)][2:]
    expected = model(**arguments)
    times: dict[str, list[float]] = {"resident": resident}
    for slots in (2, 3):
        with torch.inference_mode(False):
            offloaded = ow.offload(model, "cuda", where="device", slots=slots)
        ring: Any = offloaded._ring
        usual = ring._carrier._decoding
        kinds = ["usual", "priority", "late", "none"] if slots == 2 else ["slots"]
        for number in range(2 + options.repeat):
            for kind in kinds:
                change(ring, kind, usual)
                model(**arguments)
                took = seconds_of(lambda: model(**arguments))
                assert torch.equal(model(**arguments), expected), kind
                times.setdefault(kind, []).extend([took] if number > 1 else [])
        change(ring, "usual", usual)
        if slots == 2:
            memory = torch.empty(ring._slot_bytes, dtype=torch.uint8, device="cuda")
            stream = torch.cuda.current_stream().cuda_stream
            tasks = [one.stored.pack_tasks(one.stored.memory.address, memory.data_ptr()) for one in offloaded._away]

            def decode_all() -> None:
                for batch in [gpu.decode(0, stream, one, "X16") for one in tasks]:  # noqa: B023
                    batch.wait()

            times["decoding only"] = [seconds_of(decode_all) for _ in range(2 + options.repeat)][2:]
        with torch.inference_mode(False):
            offloaded.close()
    base = statistics.median(resident)
    print(f"{nbytes / 1e9:.2f} GB of weights, {torch.cuda.get_device_name()}")
    for kind, row in times.items():
        took = statistics.median(row)
        print(f"{kind:14} {1e3 * took:7.2f} ms  {took / base:.3f} of the resident pass")


if __name__ == "__main__":
    main()

"""The rows of `overwire-rig --device` that need Python, one measurement a process.

    python rig_device.py BEGAN MODE DEVICE [[PEER] SUMS] FILE...

load, verify, memory, peer, peer-cpu, with get everything ready (torch imported, the
CUDA context made), print "ready", wait for a line, and then do their work: so
that several processes start together and are measured one by one. first,
preload and torch count from BEGAN, nanoseconds of the wall clock at which their
process was started.

Each prints one line of JSON last: figures, {"missing": why not}, or
{"error": what went wrong}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Missing(Exception):
    """A measurement that this machine cannot do."""


def ready() -> None:
    """Tells that everything is prepared, and waits for the word."""
    print("ready", flush=True)
    if not sys.stdin.readline():
        raise SystemExit(0)  # the parent process is gone


def torch_on(device: str) -> tuple[Any, Callable[[], None]]:
    """torch, with its context on the device, and what waits for the device."""
    try:
        import torch
    except ImportError:
        raise Missing("torch is not installed") from None
    if device == "cpu":
        return torch, lambda: None
    if not torch.cuda.is_available():
        raise Missing("this torch sees no CUDA device")
    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    return torch, lambda: torch.cuda.synchronize(device)


def nbytes(tensors: dict[str, Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def twice(
    load: Callable[[], dict[str, Any]], wait: Callable[[], None], check: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """The seconds of a first and of a second load of this process; the first
    one's tensors are gone before the second begins. check gets those of each,
    beside the clock."""
    seconds = []
    for _ in range(2):
        wait()
        start = time.perf_counter()
        tensors = load()
        wait()
        seconds.append(time.perf_counter() - start)
        size = nbytes(tensors)
        if check is not None:
            check(tensors)
        del tensors
    return {"first": seconds[0], "second": seconds[1], "bytes": size}


def load(device: str, files: list[str]) -> dict[str, Any]:
    torch, wait = torch_on(device)
    import overwire

    overwire.load_file  # noqa: B018  # its module is imported before the clock starts
    ready()
    found = twice(lambda: overwire.load_file(files, device=device, mmap=False), wait)
    return {**found, "note": f"torch {torch.__version__}", "stages": (overwire.last_report() or {}).get("stages", {})}


def peer(device: str, files: list[str], through_cpu: bool) -> dict[str, Any]:
    _, wait = torch_on(device)
    try:
        import safetensors
        from safetensors.torch import load_file
    except ImportError:
        raise Missing("safetensors is not installed") from None

    def direct() -> dict[str, Any]:
        return {name: tensor for file in files for name, tensor in load_file(file, device=device).items()}

    def then_to() -> dict[str, Any]:
        return {name: tensor.to(device, copy=True) for file in files for name, tensor in load_file(file).items()}

    ready()
    found = twice(then_to if through_cpu else direct, wait)
    return {**found, "note": f"safetensors {safetensors.__version__}"}


def safetensors_prefetch(files: list[str], device: str) -> dict[str, Any]:
    from safetensors import safe_open

    opened: list[Any] = [safe_open(file, "pt", device) for file in files]
    loaders = [file.prefetch() for file in opened]
    tensors = {name: tensor for loader in loaders for name, tensor in loader}
    for loader in loaders:
        loader.close()
    return tensors


def fastsafetensors(files: list[str], device: str) -> dict[str, Any]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # type: ignore[import-untyped,import-not-found,unused-ignore]

    loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True)
    loader.add_filenames({0: files})
    buffer = loader.copy_files_to_device()
    tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}
    buffer.close()  # tensors outlive it, from 0.4 on
    loader.close()
    return tensors


def instanttensor(files: list[str], device: str) -> dict[str, Any]:
    from instanttensor import safe_open  # type: ignore[import-not-found,unused-ignore]

    with safe_open(files, framework="pt", device=device) as opened:
        return dict(opened.tensors())


def runai(files: list[str], device: str) -> dict[str, Any]:
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found,unused-ignore]

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device=device)
        # What it yields is a view of a buffer that it reuses.
        return {name: tensor.to(device, copy=True) for name, tensor in streamer.get_tensors()}


# Other loaders by the name of their package on PyPI: the module, and a load to
# tensors that are the caller's.
PEERS: dict[str, tuple[str, Callable[[list[str], str], dict[str, Any]]]] = {
    "safetensors": ("safetensors", safetensors_prefetch),
    "fastsafetensors": ("fastsafetensors", fastsafetensors),
    "instanttensor": ("instanttensor", instanttensor),
    "runai-model-streamer": ("runai_model_streamer", runai),
}


def beside(name: str, device: str, sums: str, files: list[str]) -> dict[str, Any]:
    """Another loader's first and second load, every byte of both compared."""
    torch, wait = torch_on(device)
    import importlib
    from importlib.metadata import version

    module, load = PEERS[name]
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"{name} is not installed" if error.name == module else f"{name}: {error}") from None
    if device == "cpu" and name in ("instanttensor", "safetensors"):
        raise Missing(f"{name} {version(name)} loads to GPUs only this way")
    if name == "safetensors" and not hasattr(found.safe_open, "prefetch"):
        raise Missing(f"safetensors {found.__version__} has no prefetch")
    if name == "fastsafetensors" and not hasattr(found, "live_allocation_bytes"):
        raise Missing(f"the tensors of {name} {version(name)} do not outlive it")
    ready()
    measured = twice(lambda: load(files, device), wait, lambda tensors: compare(torch, tensors, sums))
    return {**measured, "note": f"{name} {version(name)}"}


def compare(torch: Any, tensors: dict[str, Any], sums: str) -> None:
    """Raises ValueError unless every tensor's CRC-32 is what was saved."""
    import zlib

    with open(sums, encoding="utf-8") as file:
        want = json.load(file)
    if tensors.keys() != want.keys():
        raise ValueError("other tensors came back than were saved")
    torch.set_num_threads(1)

    def check(name: str) -> str | None:
        data = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return None if zlib.crc32(data.numpy()) == want[name] else name

    with ThreadPoolExecutor(max(1, min(16, os.cpu_count() or 1))) as pool:
        wrong = [name for name in pool.map(check, want) if name is not None]
    if wrong:
        raise ValueError(f"{len(wrong)} tensors did not come back bit for bit, the first {wrong[0]!r}")


def verify(device: str, sums: str, files: list[str], options: Any = None) -> dict[str, Any]:
    """Compares the CRC-32 of every tensor's bytes with what was saved."""
    torch, wait = torch_on(device)
    import overwire

    ready()
    tensors = overwire.load_file(files, device=device, storage_options=options)
    wait()
    compare(torch, tensors, sums)
    return {"bytes": nbytes(tensors), "tensors": len(tensors)}


def tensors_options(how: str, key: str) -> Any:
    """storage_options for a .tensors file: plain, crc32 or key."""
    known: dict[str, dict[str, Any]] = {"crc32": {"verify_crc32": True}, "key": {"decryption_key": key}}
    return known.get(how)


def tensors_load(device: str, how: str, key: str, path: str) -> dict[str, Any]:
    torch, wait = torch_on(device)
    import overwire

    options = tensors_options(how, key)
    overwire.load_file  # noqa: B018
    ready()
    found = twice(lambda: overwire.load_file(path, device=device, mmap=False, storage_options=options), wait)
    return {**found, "note": f"torch {torch.__version__}"}


def tensors_peer(device: str, how: str, key: str, path: str) -> dict[str, Any]:
    _, wait = torch_on(device)
    from rig_tensors import opened, side

    try:
        tensorizer = side("theirs")
    except ImportError as error:
        raise Missing(f"tensorizer: {error}") from None
    if how == "key":
        try:
            tensorizer.DecryptionParams.from_key(bytes.fromhex(key))
        except Exception as error:  # whatever it says where libsodium is not installed
            raise Missing(f"tensorizer's encryption: {error}") from None

    ready()
    found = twice(lambda: dict(opened(tensorizer, path, how, bytes.fromhex(key), device).items()), wait)
    return {**found, "note": f"tensorizer {tensorizer.__version__}"}


def status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise Missing(f"/proc/self/status has no {field}")


def memory(device: str, files: list[str]) -> dict[str, Any]:
    """What a load holds at its peak beside the tensors: on the device, sampled
    while it runs; on the host, by the system's own high-water mark."""
    torch, wait = torch_on(device)
    import overwire

    overwire.load_file  # noqa: B018
    ready()
    peak = before = 0
    stop = threading.Event()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the high-water mark begins anew
    host = status("VmRSS")

    def used() -> int:
        free, total = torch.cuda.mem_get_info(device)
        return int(total - free)

    def sample() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, used())
            time.sleep(0.0005)

    sampler = threading.Thread(target=sample)
    if device != "cpu":
        peak = before = used()
        sampler.start()
    tensors = overwire.load_file(files, device=device, mmap=False)
    wait()
    if device != "cpu":
        stop.set()
        sampler.join()
        peak = max(peak, used())
    size = nbytes(tensors)
    report = overwire.last_report() or {}
    ring = report.get("stages", {}).get("ring_bytes", 0)
    found = {"bytes": size, "host": status("VmHWM") - host, "pinned": ring}
    if device == "cpu":
        found["host"] -= size
    else:
        found["device"] = peak - before - size
    return found


def since(began: str) -> float:
    return (time.time_ns() - int(began)) / 1e9


def first(began: str, device: str, files: list[str]) -> dict[str, Any]:
    """The engine alone, without torch: the first tensor, and all of them."""
    import overwire

    running = overwire.preload(files, device=device)
    while running.progress().tensors == 0 and not running.wait(0.0005):
        pass
    one = since(began)
    running.wait()
    return {"first": one, "second": since(began), "torch": "torch" in sys.modules}


def preload(began: str, device: str, files: list[str]) -> dict[str, Any]:
    """The load begins before torch is imported, and torch takes it over."""
    import overwire

    overwire.preload(files, device=device)
    try:
        import torch
    except ImportError:
        raise Missing("torch is not installed") from None
    imported = since(began)
    tensors = overwire.load_file(files, device=device)
    if device != "cpu":
        torch.cuda.synchronize(device)
    next(iter(tensors.values())).reshape(-1)[0].item()
    return {"first": imported, "second": since(began), "bytes": nbytes(tensors)}


def bare(began: str) -> dict[str, Any]:
    """What importing torch takes, from the start of the process."""
    try:
        import torch  # noqa: F401
    except ImportError:
        raise Missing("torch is not installed") from None
    return {"first": since(began)}


def main(argv: list[str]) -> dict[str, Any]:
    began, mode, device, *files = argv
    if device == "cuda":
        device = "cuda:0"
    modes: dict[str, Callable[[], dict[str, Any]]] = {
        "load": lambda: load(device, files),
        "verify": lambda: verify(device, files[0], files[1:]),
        "peer": lambda: peer(device, files, False),
        "peer-cpu": lambda: peer(device, files, True),
        "with": lambda: beside(files[0], device, files[1], files[2:]),
        "tensors": lambda: tensors_load(device, *files),
        "tensors-peer": lambda: tensors_peer(device, *files),
        "tensors-verify": lambda: verify(device, files[0], files[3:], tensors_options(files[1], files[2])),
        "memory": lambda: memory(device, files),
        "first": lambda: first(began, device, files),
        "preload": lambda: preload(began, device, files),
        "torch": lambda: bare(began),
    }
    return modes[mode]()


def answer(argv: list[str]) -> dict[str, Any]:
    try:
        return main(argv)
    except Missing as why:
        return {"missing": str(why)}
    except Exception as error:  # reported to the rig, which continues with the next row
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    print(json.dumps(answer(sys.argv[1:])), flush=True)
    # Ends without the clean-up of torch and of the driver, which can take
    # longer than the measurement; the system takes everything back.
    os._exit(0)

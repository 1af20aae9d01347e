"""nvCOMP's ANS on the weights that our decoder is measured with: its ratio and its decode rate.

    python cuda/lab/nvcomp_row.py [--size 3GiB] [--wheels FOLDER] [--json]

nvCOMP is NVIDIA's and not ours to hand on: it is used where its wheels
(nvidia-nvcomp-cu13 and nvidia-libnvcomp-cu13, or -cu12) are installed, or lie
in FOLDER, from where they are unpacked. What came back is compared with what
went in, bit for bit, before anything is timed; times are those of CUDA events
around a run of decodes. Where nvCOMP, torch or a GPU is missing, it says so and
ends with 0: there is no row. Anything that goes wrong ends with 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHUNKS = (64 << 10, 256 << 10, 1 << 20)
TIMES, RUNS = 10, 5


def nvcomp_module(wheels: str | None, folder: str) -> Any:
    if wheels is not None:
        for wheel in Path(wheels).glob("nvidia_*nvcomp*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        sys.path.insert(0, folder)
        # torch's wheels own the namespace "nvidia" already, if it was imported.
        if "nvidia" in sys.modules:
            sys.modules["nvidia"].__path__.append(folder + "/nvidia")
    from nvidia import nvcomp

    return nvcomp


def weights(size: str, folder: str) -> Any:
    """The bits of Llama-shaped bf16 weights as one tensor of float16 on the GPU,
    because nvCOMP has a half type and no bf16."""
    import overwire
    import torch

    path = f"{folder}/weights.safetensors"
    command = [sys.executable, "-m", "overwire", "bench", "gen", "llama-bf16", "--size", size, path]
    subprocess.run(command, check=True, capture_output=True)
    tensors = overwire.load_file(path, device="cuda")
    floats = [tensor for tensor in tensors.values() if tensor.dtype == torch.bfloat16]
    return torch.cat([tensor.reshape(-1).view(torch.float16) for tensor in floats])


def rate(nbytes: int, work: Callable[[], Any], times: int = TIMES) -> tuple[float, float, float]:
    """GB/s: median, lowest, highest of RUNS runs."""
    import torch

    rates = []
    for _ in range(RUNS + 1):  # the first warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        rates.append(nbytes * times / begin.elapsed_time(end) / 1e6)
    del rates[0]
    return statistics.median(rates), min(rates), max(rates)


def same(a: Any, b: Any) -> None:
    import torch

    torch.cuda.synchronize()
    if not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        raise ValueError("other bytes came back")


def measure(nvcomp: Any, data: Any, chunk: int) -> dict[str, Any]:
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        on = {"device_id": 0, "cuda_stream": stream.cuda_stream}
        codec = nvcomp.Codec(algorithm="ANS", data_type="<f2", uncomp_chunk_size=chunk, **on)
        packed = codec.encode(nvcomp.as_array(data, cuda_stream=stream.cuda_stream))
        out = torch.empty_like(data)
        config = codec.decompression_config(packed)

        own = True  # decodes into our memory; 5.1 and older allocate theirs each time

        def decode() -> Any:
            if own:
                return codec.decode(packed, data_type="<f2", out=out, decompression_config=config)
            return codec.decode(packed, data_type="<f2", decompression_config=config)

        out.fill_(1)
        try:
            decode()
        except (TypeError, ValueError, RuntimeError) as error:
            print(f"nvCOMP {nvcomp.__version__}: decodes into memory of its own: {error}", file=sys.stderr)
            own = False
            out = torch.as_tensor(decode(), device="cuda")
        same(out, data)
        median, low, high = rate(data.nbytes, decode)
    return {
        "chunk": chunk,
        "bytes": data.nbytes,
        "own_memory": own,
        "ratio": packed.buffer_size / data.nbytes,
        "gb_s": median,
        "low": low,
        "high": high,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="3GiB", help="bytes of weights")
    parser.add_argument("--wheels", help="folder with the wheels, when they are not installed")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()

    def none(why: str) -> int:
        print(json.dumps({"missing": why}) if args.json else f"nvCOMP ANS: not measured: {why}")
        return 0

    with tempfile.TemporaryDirectory() as folder:
        try:
            nvcomp = nvcomp_module(args.wheels, folder)
        except ImportError as error:
            return none(f"nvCOMP is not installed ({error})")
        try:
            import torch
        except ImportError:
            return none("torch is not installed")
        if not torch.cuda.is_available():
            return none("no CUDA device")
        data = weights(args.size, folder)
        rows = []
        for chunk in CHUNKS:
            row = measure(nvcomp, data, chunk)
            rows.append(row)
            if not args.json:
                print(
                    f"nvCOMP {nvcomp.__version__} ANS <f2, chunks of {chunk >> 10} KiB, {row['bytes'] / 1e9:.2f} GB: "
                    f"ratio {row['ratio']:.4f}, decode {row['gb_s'] / 1e3:.3f} TB/s "
                    f"({row['low'] / 1e3:.3f} to {row['high'] / 1e3:.3f})",
                    flush=True,
                )
        if args.json:
            print(json.dumps({"version": nvcomp.__version__, "device": torch.cuda.get_device_name(), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

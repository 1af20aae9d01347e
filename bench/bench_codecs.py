"""Compares overwire's codecs on a GPU with nvCOMP's through nvCOMP's API, in one run.

    python bench/bench_codecs.py [--size 1GiB] [--wheels FOLDER] [--json]

X16 runs against nvCOMP's ANS `<f2` on the same bf16 weights. Both libraries decode LZ4 and Snappy from the same
streams, written by nvCOMP. The cost of one call is measured with small batches, a config and the caller's output. Every
decoder's bytes are compared with the input before it is timed. Rates come from CUDA events around a run of calls, in
bytes of content. nvCOMP belongs to NVIDIA and may not be redistributed. It is used if its wheels (nvidia-nvcomp-cu13
and nvidia-libnvcomp-cu13, or -cu12) are installed, or unpacked from FOLDER. Without it, its rows are left out. Without
a GPU nothing is measured, and the exit status is 0.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMES, RUNS = 10, 5


def nvcomp_module(wheels: str | None, folder: str) -> Any:
    if wheels is not None:
        for wheel in Path(wheels).glob("nvidia_*nvcomp*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        sys.path.insert(0, folder)
        # If torch was imported, its wheels already define the namespace "nvidia".
        if "nvidia" in sys.modules:
            sys.modules["nvidia"].__path__.append(folder + "/nvidia")
    from nvidia import nvcomp

    return nvcomp


def weights(size: str, folder: str) -> Any:
    """Returns the bits of Llama-shaped bf16 weights as one float16 tensor on the GPU, because nvCOMP supports half but
    not bf16."""
    import overwire
    import torch

    path = f"{folder}/weights.safetensors"
    command = [sys.executable, "-m", "overwire", "bench", "gen", "llama-bf16", "--size", size, path]
    subprocess.run(command, check=True, capture_output=True)
    tensors = overwire.load_file(path, device="cuda").values()
    return torch.cat([tensor.reshape(-1).view(torch.float16) for tensor in tensors if tensor.dtype == torch.bfloat16])


def rate(nbytes: int, work: Callable[[], Any], times: int = TIMES) -> tuple[float, float, float]:
    """Returns GB/s: median, lowest, highest of RUNS runs."""
    import torch

    rates = []
    for _ in range(RUNS + 1):  # the first run warms up
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
        raise ValueError("the decoded bytes differ from the input")


def each_call(work: Callable[[], Any], calls: int = 2000) -> tuple[float, float]:
    """Returns the microseconds of a call, without and with a synchronisation after it."""
    import torch

    for _ in range(50):
        work()
    torch.cuda.synchronize()
    queued = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        for _ in range(calls // RUNS):
            work()
        queued.append((time.perf_counter() - begin) / (calls // RUNS) * 1e6)
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls // 10):
        work()
        torch.cuda.synchronize()
    return statistics.median(queued), (time.perf_counter() - begin) / (calls // 10) * 1e6


def text(nbytes: int) -> Any:
    """Returns content that LZ4 and Snappy can compress: words from a small list."""
    import random

    import torch

    r = random.Random(1)
    words = [r.randbytes(r.randrange(3, 24)) for _ in range(2000)]
    piece = b"".join(r.choice(words) for _ in range(1 << 18))[: 2 << 20]
    one = torch.frombuffer(bytearray(piece), dtype=torch.uint8).cuda()
    return one.repeat(nbytes // len(piece))


def codec_pair(api: Any, data: Any, chunk: int, named: dict[str, Any]) -> dict[str, Any]:
    """Measures one library's encoder and decoder on data in GPU memory."""
    import torch

    codec = api.Codec(uncomp_chunk_size=chunk, cuda_stream=torch.cuda.current_stream().cuda_stream, **named)
    torch.cuda.synchronize()
    source = api.as_array(data)
    packed = codec.encode(source)
    config = codec.decompression_config(packed)
    out = torch.empty_like(data)
    out.fill_(1)
    into = api.as_array(out, cuda_stream=torch.cuda.current_stream().cuda_stream)

    def decode() -> Any:
        return codec.decode(packed, out=into, decompression_config=config)

    decode()
    same(out, data)
    found = {"ratio": packed.buffer_size / data.nbytes, "decode": rate(data.nbytes, decode)}
    found["encode"] = rate(data.nbytes, lambda: codec.encode(source), 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="1GiB", help="bytes of weights")
    parser.add_argument("--wheels", help="folder with nvCOMP's wheels, if they are not installed")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args()
    try:
        import torch

        missing = "" if torch.cuda.is_available() else "no CUDA device"
    except ImportError:
        missing = "torch is not installed"
    if missing:
        print(json.dumps({"missing": missing}) if args.json else f"not measured: {missing}")
        return 0
    import overwire.compat.nvcomp as ours

    rows: list[dict[str, Any]] = []

    def say(what: str, who: str, found: dict[str, Any]) -> None:
        rows.append({"what": what, "who": who} | found)
        if args.json:
            return
        line = f"{what:34} {who:14}"
        if "ratio" in found:
            line += f" ratio {found['ratio']:.4f}"
        for verb in ("decode", "encode"):
            if verb in found:
                line += f"  {verb} {found[verb][0]:7.1f} GB/s ({found[verb][1]:.1f} to {found[verb][2]:.1f})"
        if "call" in found:
            line += f"  {found['call'][0]:7.1f} us queued, {found['call'][1]:7.1f} us with a synchronisation"
        if "error" in found:
            line += f"  {found['error']}"
        print(line, flush=True)

    # A separate stream, because nvCOMP takes 0 to mean that none was given.
    with tempfile.TemporaryDirectory() as folder, torch.cuda.stream(torch.cuda.Stream()):
        nvcomp: Any = None
        try:
            nvcomp = nvcomp_module(args.wheels, folder)
        except ImportError as error:
            print(f"nvCOMP is not installed ({error}): its rows are left out", file=sys.stderr)
        theirs = f"nvCOMP {nvcomp.__version__}" if nvcomp is not None else ""
        data = weights(args.size, folder)
        torch.cuda.synchronize()
        failed = 0

        def measured(what: str, who: str, work: Callable[[], dict[str, Any]]) -> None:
            nonlocal failed
            try:
                found = work()
            except (ValueError, RuntimeError, TypeError) as error:
                failed += who == "overwire"
                found = {"error": f"{type(error).__name__}: {error}"}
            say(what, who, found)

        x16, ans = {"algorithm": "X16", "data_type": "bfloat16"}, {"algorithm": "ANS", "data_type": "<f2"}
        for chunk in (64 << 10, 256 << 10, 1 << 20):
            what = f"bf16 weights, chunks of {chunk >> 10} KiB"
            measured(what + ", X16", "overwire", lambda c=chunk: codec_pair(ours, data, c, x16))
            if nvcomp is not None:
                measured(what + ", ANS", theirs, lambda c=chunk: codec_pair(nvcomp, data, c, ans))
        # A decoder with the same output writes as much as a copy, and reads less.
        copied = rate(data.nbytes, functools.partial(torch.empty_like(data).copy_, data))
        say("copy within the device's memory", "torch", {"decode": copied})
        words = text(512 << 20)
        for name in ("LZ4", "Snappy"):
            if nvcomp is not None:
                stream = torch.cuda.current_stream().cuda_stream
                codec = nvcomp.Codec(algorithm=name, uncomp_chunk_size=65536, cuda_stream=stream)
                packed = codec.encode(nvcomp.as_array(words))
                torch.cuda.synchronize()
                stored = torch.as_tensor(packed, device="cuda")
                out = torch.empty_like(words)
                config = codec.decompression_config(packed)

                def decode(codec: Any = codec, packed: Any = packed, out: Any = out, config: Any = config) -> Any:
                    return codec.decode(packed, out=out, decompression_config=config)

                def their(decode: Any = decode, out: Any = out, packed: Any = packed) -> dict[str, Any]:
                    decode()
                    same(out, words)
                    return {"ratio": packed.buffer_size / words.nbytes, "decode": rate(words.nbytes, decode)}

                measured(f"words, {name}", theirs, their)
            else:
                stored = torch.as_tensor(ours.Codec(algorithm=name).encode(ours.as_array(words)), device="cuda")

            def our(stored: Any = stored, name: str = name) -> dict[str, Any]:
                codec = ours.Codec(algorithm=name)
                packed, out = ours.as_array(stored), torch.empty_like(words)
                config = codec.decompression_config(packed)
                codec.decode(packed, out=out, decompression_config=config)
                same(out, words)
                return {
                    "ratio": stored.nbytes / words.nbytes,
                    "decode": rate(words.nbytes, lambda: codec.decode(packed, out=out, decompression_config=config)),
                }

            measured(f"words, {name}", "overwire", our)

        def calls(api: Any, named: dict[str, Any], count: int, nbytes: int) -> dict[str, Any]:
            codec = api.Codec(cuda_stream=torch.cuda.current_stream().cuda_stream, **named)
            plain = [torch.randn(nbytes // 2, device="cuda").mul_(0.02).half() for _ in range(count)]
            packed = codec.encode(api.as_arrays(plain))
            config = codec.decompression_config(packed)
            out = [torch.empty_like(p) for p in plain]
            into = api.as_arrays(out)
            codec.decode(packed, out=into, decompression_config=config)
            for a, b in zip(plain, out, strict=True):
                same(a, b)
            return {"call": each_call(lambda: codec.decode(packed, out=into, decompression_config=config))}

        for count, nbytes in ((1, 4096), (1, 65536), (16, 65536)):
            what = f"decode {count} x {nbytes >> 10} KiB, a call"
            measured(what, "overwire", lambda c=count, n=nbytes: calls(ours, x16 | {"data_type": "<f2"}, c, n))
            if nvcomp is not None:
                measured(what, theirs, lambda c=count, n=nbytes: calls(nvcomp, ans, c, n))
        if args.json:
            print(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

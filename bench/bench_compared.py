"""Compares sizes and speeds on real weights with other lossless compressors, in fresh processes.

    python bench/bench_compared.py [--rounds 3] [--packages DIR] [--folder DIR]

The inputs are plain safetensors files of MiniLM (downloaded by examples/demo.py): the original, cast and quantised.
Each tool gets a whole file and must return every byte. zstandard and ZipNN work in memory, ZipNN with the weights'
dtype. overwire compresses a file to a file, which includes the SHA-256 of the original, and loads the result into
memory. `--packages` is a
folder filled by `pip install --target`. Tools alternate, and figures are medians of all rounds. Processor time includes
all threads, and depends less on other load of the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ZIPNN = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32 that holds bf16": "float32"}
TOOLS = ("overwire", "overwire, smaller", "zstd -3", "ZipNN")


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """Returns a call's result, its seconds, and its seconds of processor time."""
    wall, busy = time.perf_counter(), time.process_time()
    made = call()
    return made, time.perf_counter() - wall, time.process_time() - busy


def overwire_row(path: str, level: str) -> dict[str, Any]:
    import overwire as ow

    small, back = path + ".small.safetensors", path + ".back.safetensors"
    _, *encode = timed(lambda: ow.convert(path, small, level=level))
    tensors, *decode = timed(lambda: ow.load_file(small, framework="bytes"))
    del tensors
    ow.convert(small, back, compress=False)
    try:
        return {"size": os.path.getsize(small), "same": digest(Path(back).read_bytes()), "encode": encode, "decode": decode}
    finally:
        os.unlink(small)
        os.unlink(back)


def coder(tool: str, kind: str) -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]] | None:
    """Returns a tool's functions to compress bytes and to restore them, or None if it does not support the kind."""
    if tool.startswith("zstd"):
        import zstandard

        pack = zstandard.ZstdCompressor(level=int(tool.rpartition("-")[2]), threads=-1)
        return pack.compress, zstandard.ZstdDecompressor().decompress
    if kind not in ZIPNN:
        return None
    import zipnn

    z = zipnn.ZipNN(bytearray_dtype=ZIPNN[kind], input_format="byte", threads=len(os.sched_getaffinity(0)))
    return lambda data: bytes(z.compress(bytearray(data))), lambda data: bytes(z.decompress(data))


def work(tool: str, kind: str, path: str) -> dict[str, Any]:
    """Runs one tool on one file, in this process."""
    if tool.startswith("overwire"):
        return overwire_row(path, "smaller" if "smaller" in tool else "default")
    ways = coder(tool, kind)
    if ways is None:
        return {}
    data = Path(path).read_bytes()
    small, *encode = timed(lambda: ways[0](data))
    again, *decode = timed(lambda: ways[1](small))
    return {"size": len(small), "same": digest(again), "encode": encode, "decode": decode}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def row(tool: str, size: int, want: str, found: list[dict[str, Any]]) -> str:
    if not found[0]:
        return f"| | {tool} | - | - | - | - | - |"
    for one in found:
        assert one["same"] == want, f"{tool}: the restored bytes differ from the input"
    figures = [f"{found[0]['size'] / size:.4f}"]
    for what in ("encode", "decode"):
        figures += [f"{size / 1e9 / statistics.median(one[what][k] for one in found):.2f}" for k in (0, 1)]
    return f"| | {tool} | " + " | ".join(figures) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--packages", help="folder with ZipNN, if it is not installed")
    parser.add_argument("--folder", default="/dev/shm", help="where files are written")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.packages:
        sys.path.append(args.packages)
    if args.work:
        print(json.dumps(work(*args.work)))
        return
    import bench_ratio
    from safetensors.torch import load_file, save_file

    print(
        "| weights | tool | stored / original | compress GB/s | of processor time | decompress GB/s | of processor time |\n"
        + "|---" * 7
        + "|"
    )
    every = bench_ratio.files(load_file(bench_ratio.demo.real_weights()))
    for kind, tensors in every.items():
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            path = os.path.join(folder, "x.safetensors")
            save_file(tensors, path)
            data = Path(path).read_bytes()
            print(f"| {kind}, {len(data) / 1e6:.0f} MB | | | | | | |", flush=True)
            found: dict[str, list[dict[str, Any]]] = {tool: [] for tool in TOOLS}
            more = ["--packages", args.packages] if args.packages else []
            for _ in range(args.rounds):
                for tool, rows in found.items():
                    command = [sys.executable, __file__, *more, "--work", tool, kind, path]
                    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
                    rows.append(json.loads(done.stdout.splitlines()[-1]))
            for tool, rows in found.items():
                print(row(tool, len(data), digest(data), rows), flush=True)


if __name__ == "__main__":
    main()

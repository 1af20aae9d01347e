"""Compares usual loads with loads in which kernels read stored bytes in host memory.

It compares bytes first and then prints a table of GB/s.

    PYTHONPATH=python python bench/gpu/device_coherent.py [--size 8GB] [--repeat 7] [--dir /dev/shm] [--device cuda]

A GPU with a coherent link (Grace, DGX Spark) always loads in place, so both columns measure the same there. Other GPUs
load in place on request, over PCI Express. That shows that the mode is correct, but not how fast it is over a coherent
link. The exit status is 1 if a byte is wrong, or if a load did not use the requested mode.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import overwire as ow
import torch
from overwire import _verbs

KINDS = ["llama-bf16", "fp16", "fp32", "fp8-e4m3", "fp8-e5m2", "int8", "int4", "tied", "hostile"]

wrong: list[str] = []
asked = threading.local()
usual_load = _verbs.load


def load(request: Any, *rest: Any) -> Any:
    """Adds this thread's settings that have no public option to the engine call."""
    return usual_load({**request, **getattr(asked, "more", {})}, *rest)


@contextlib.contextmanager
def asking(**more: object) -> Iterator[None]:
    asked.more = more
    try:
        yield
    finally:
        asked.more = {}


def check(ok: bool, what: str) -> None:
    if not ok:
        wrong.append(what)
        print("WRONG:", what)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and (not a[n].numel() or torch.equal(bits(a[n]), bits(b[n])))
        for n in a
    )


def run(*argv: str) -> None:
    subprocess.run([sys.executable, "-m", "overwire", *argv], check=True, capture_output=True)


def made(folder: Path, kind: str, size: str) -> list[Path]:
    """Writes a file of the given kind in three forms: plain, compressed, and in column parts."""
    plain, packed, parts = (folder / f"{kind}-{way}.safetensors" for way in ("plain", "packed", "parts"))
    run("bench", "gen", kind, "--size", size, str(plain))
    run("compress", str(plain), "-o", str(packed))
    run("compress", str(plain), "--parts", "4", "-o", str(parts))
    return [plain, packed, parts]


def copies(path: Path, device: str, trace: Path, **more: object) -> int:
    """Returns the number of pieces that a load copies to the GPU."""
    with asking(trace=str(trace), **more):
        ow.load_file(path, device=device)
    events = json.loads(trace.read_text())
    return sum(e.get("name") == "copy" for e in (events["traceEvents"] if isinstance(events, dict) else events))


def every_byte(folder: Path, device: str, size: str) -> None:
    """Compares loads of every kind and dtype, casts, pinned models, and simultaneous loads."""
    for kind in KINDS:
        for path in made(folder, kind, size):
            usual = ow.load_file(path, device=device)
            with asking(coherent=True):
                check(same(ow.load_file(path, device=device), usual), f"{path.name} in place")
                check(ow.digest(ow.load_file(path, device=device)) == ow.digest(usual), f"the digests of {path.name} in place")
                cast = ow.load_file(path, device=device, dtype="float16")
                with ow.safe_open(path, "pt", device) as f:
                    rows = {n: f.get_slice(n)[1:3] for n in usual if usual[n].ndim > 1 and usual[n].shape[0] > 3}
                check(same(rows, {n: usual[n][1:3] for n in rows}), f"rows of {path.name} in place")
            check(same(cast, ow.load_file(path, device=device, dtype="float16")), f"{path.name} in place, cast")
            with ow.pin(path, device=device) as pinned, asking(coherent=True):
                check(same(ow.load_file(pinned, device=device), usual), f"{path.name} in place, from pinned memory")
            path.unlink()
        print(f"{kind}: every byte compared", flush=True)


def at_once(folder: Path, device: str) -> None:
    """Runs usual and in-place loads in several threads at the same time."""
    path = made(folder, "fp16", "96MB")[1]
    usual = ow.load_file(path, device=device)

    def many(in_place: bool) -> None:
        with (
            torch.cuda.stream(torch.cuda.Stream()) if device != "cpu" else contextlib.nullcontext(),
            asking(coherent=in_place),
        ):
            for _ in range(5):
                check(same(ow.load_file(path, device=device), usual), f"one of several concurrent loads, in place: {in_place}")

    threads = [threading.Thread(target=many, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("six concurrent threads: every byte compared", flush=True)


def seconds(source: Any, device: str, **more: object) -> float:
    with asking(**more):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        tensors = ow.load_file(source, device=device)
        if device != "cpu":
            torch.cuda.synchronize()
        took = time.perf_counter() - start
    del tensors
    return took


def figures(folder: Path, device: str, size: str, repeat: int) -> None:
    """Prints GB/s of both modes, measured alternately."""
    plain, packed = made(folder, "llama-bf16", size)[:2]
    nbytes = sum(t.nbytes for t in ow.load_file(plain, device=device).values())
    print(f"\n{nbytes / 1e9:.2f} GB of bf16, page cache warm; medians of {repeat}, alternating; GB/s of tensors")
    print(f"{'':34}{'usual':>8}{'in place':>10}")
    with ow.pin(packed, device=device) as pinned_packed:
        for what, source in (("plain", plain), ("compressed", packed), ("compressed, out of pinned memory", pinned_packed)):
            took: dict[bool, list[float]] = {False: [], True: []}
            for round_ in range(repeat + 1):
                for in_place, all_ in took.items():
                    one = seconds(source, device, coherent=in_place)
                    if round_:
                        all_.append(one)
            usual, there = (nbytes / statistics.median(took[way]) / 1e9 for way in (False, True))
            print(f"{what:34}{usual:8.1f}{there:10.1f}", flush=True)


def main() -> None:
    about = argparse.ArgumentParser()
    about.add_argument("--size", default="8GB")
    about.add_argument("--small", default="48MB", help="size of each file whose bytes are compared")
    about.add_argument("--repeat", type=int, default=7)
    about.add_argument("--dir", default="/dev/shm")
    about.add_argument("--device", default="cuda")
    args = about.parse_args()
    _verbs.load = load
    gpu = args.device != "cpu"
    if gpu:
        found = ow.doctor()["gpu"]["devices"][torch.device(args.device).index or 0]
        print(found["name"], "with a coherent link" if found["coherent"] else "without a coherent link")
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder = Path(name)
        every_byte(folder, args.device, args.small)
        at_once(folder, args.device)
        if gpu:
            packed = made(folder, "llama-bf16", "96MB")[1]
            there = copies(packed, args.device, folder / "trace.json", coherent=True)
            usual = copies(packed, args.device, folder / "trace.json")
            print(f"pieces copied to the GPU: {usual} by usual loads, {there} by loads in place")
            check(there == 0 and (usual > 0 or found["coherent"]), "only usual loads copy pieces")
        figures(folder, args.device, args.size, args.repeat)
    sys.exit(f"{len(wrong)} comparisons failed" if wrong else 0)


if __name__ == "__main__":
    main()

"""Compares cold loads, and warm plain reads on two cores, with safetensors in fresh processes.

    python bench/bench_cold.py [--size 1GB] [--repeat 7] [--warm 9] [--folder DIR]

The files are generated bf16, plain and compressed, on a disk. For cold loads the file is dropped from the page cache
before each load, and mincore reports the share that stays. Each round runs the variants in random order, then direct
reads of both files (1 MiB, 16 at a time) and the first touch of the same amount of memory. For warm loads the plain
file is
in the page cache, and each process has two cores. Every process has imported torch and loaded a tiny file before the
clock starts. After each load, torch sums every byte. The first round of each part is discarded. Tensors are compared
once, before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 1 << 20
LOADS = ("overwire compressed", "overwire plain", "safetensors plain")


def resident(path: str) -> float:
    """Returns the share of a file's pages that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY) as m:
        pages = -(-len(m) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        first = ctypes.c_char.from_buffer(m)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(m)), found)
        del first
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
    return sum(b & 1 for b in bytes(found)) / pages


def evict(path: str) -> float:
    """Drops a file from the page cache, and returns the share that stays."""
    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return resident(path)


def direct(path: str) -> float:
    """Reads all whole MiB of a file by direct I/O into memory that was touched before, and returns the seconds."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(fd).st_size // MIB
    buffers = [mmap.mmap(-1, MIB) for _ in range(16)]
    for b in buffers:
        b[:] = bytes(MIB)

    def read(worker: int) -> None:
        for at in range(worker, size, len(buffers)):
            assert os.preadv(fd, [buffers[worker]], at * MIB) == MIB

    with ThreadPoolExecutor(len(buffers)) as pool:
        list(pool.map(time.sleep, [0.01] * len(buffers)))  # starts the threads
        start = time.perf_counter()
        list(pool.map(read, range(len(buffers))))
        took = time.perf_counter() - start
    os.close(fd)
    return took * os.path.getsize(path) / (size * MIB)


def touch(size: int) -> float:
    """Returns the seconds of the first touch of memory, in huge pages if available."""
    with mmap.mmap(-1, size) as m:
        m.madvise(mmap.MADV_HUGEPAGE)
        start = time.perf_counter()
        for at in range(0, size, mmap.PAGESIZE):
            m[at] = 1
        return time.perf_counter() - start


def loader(way: str) -> Any:
    import safetensors.torch
    import torch

    load: Any = safetensors.torch.load_file
    if way.startswith("overwire"):
        import overwire

        load = overwire.load_file
    with tempfile.TemporaryDirectory() as folder:
        tiny = os.path.join(folder, "tiny.safetensors")
        safetensors.torch.save_file({"x": torch.zeros(4)}, tiny)
        total(load(tiny))
    total({"threads": torch.zeros(1 << 20)})  # starts torch's threads
    return load


def total(tensors: dict[str, Any]) -> int:
    """Reads every byte with torch."""
    import torch

    flat = (t.reshape(-1) for t in tensors.values())
    return sum(int((t.view(torch.int64) if t.nbytes % 8 == 0 else t.view(torch.uint8)).sum()) for t in flat)


def worker(way: str, path: str) -> None:
    """Reports that it is ready, and loads when a line arrives. The line says whether to drop the file from the page
    cache."""
    load = loader(way)
    print("ready", flush=True)
    left = evict(path) if sys.stdin.readline().strip() == "cold" else resident(path)
    start, busy = time.perf_counter(), time.process_time()
    tensors = load(path)
    loaded = time.perf_counter()
    total(tensors)
    end = time.perf_counter()
    print(json.dumps([end - start, loaded - start, left, time.process_time() - busy]), flush=True)


def compare(paths: dict[str, str]) -> None:
    import overwire
    import safetensors.torch
    import torch

    want = safetensors.torch.load_file(paths["safetensors plain"])
    for way in LOADS[:2]:
        have = overwire.load_file(paths[way])
        assert have.keys() == want.keys()
        assert all(torch.equal(have[k].view(torch.uint8), t.view(torch.uint8)) for k, t in want.items())


class Turns:
    """Fresh processes that import in groups while nothing is timed, and then load one by one."""

    def __init__(self, turns: list[tuple[str, str, str]], cores: list[int]) -> None:
        self.turns, self.cores = turns, cores
        self.ready: list[subprocess.Popen[str]] = []

    def fill(self) -> None:
        for way, path, _ in self.turns[: max(1, min(8, len(self.cores)))]:
            command = ["taskset", "-c", ",".join(map(str, self.cores)), sys.executable, __file__, "--worker", way, path]
            self.ready.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for process in self.ready:
            assert process.stdout and process.stdout.readline() == "ready\n"

    def next(self) -> tuple[str, list[float]]:
        if not self.ready:
            self.fill()
        way, _, how = self.turns.pop(0)
        found, _ = self.ready.pop(0).communicate(how + "\n", timeout=120)
        row: list[float] = json.loads(found.splitlines()[-1])
        return way, row


def report(name: str, rows: list[float], note: str = "") -> None:
    print(f"{name:<34} {statistics.median(rows):7.3f} s  ({min(rows):.3f} to {max(rows):.3f}, {len(rows)}){note}", flush=True)


def show(found: dict[str, list[list[float]]]) -> dict[str, float]:
    """Prints a row for each variant, and returns the medians."""
    for way, rows in found.items():
        middle = [statistics.median(column) for column in zip(*rows, strict=True)]
        left = [r[2] for r in rows]
        note = f"; load alone {middle[1]:.3f}, processor time {middle[3]:.2f}, resident before: {min(left):.4f} to {max(left):.4f}"
        report(way, [r[0] for r in rows], note)
    return {way: statistics.median(r[0] for r in rows) for way, rows in found.items()}


def cold(paths: dict[str, str], repeat: int, cores: list[int]) -> None:
    rounds = [random.sample(LOADS, len(LOADS)) for _ in range(repeat + 1)]
    turns = Turns([(way, paths[way], "cold") for ways in rounds for way in ways], cores)
    found: dict[str, list[list[float]]] = {way: [] for way in LOADS}
    floors: dict[str, list[float]] = {"direct reads, compressed": [], "direct reads, plain": [], "first touch of memory": []}
    for ways in rounds:
        for _ in ways:
            way, row = turns.next()
            found[way].append(row)
        for name, way in (("direct reads, compressed", LOADS[0]), ("direct reads, plain", LOADS[1])):
            evict(paths[way])
            floors[name].append(direct(paths[way]))
        floors["first touch of memory"].append(touch(os.path.getsize(paths[LOADS[1]])))
    print("cold:")
    middle = show({way: rows[1:] for way, rows in found.items()})
    for name, seconds in floors.items():
        report(name, seconds[1:])
    for way in LOADS[:2]:
        print(f"  {way} / {LOADS[2]}: {middle[way] / middle[LOADS[2]]:.3f}" + (" (goal 0.75)" if way == LOADS[0] else ""))


def warm(path: str, repeat: int, cores: list[int]) -> None:
    with open(path, "rb", buffering=0) as f:
        while f.read(16 * MIB):
            pass
    turns = Turns([(way, path, "warm") for _ in range(repeat + 1) for way in LOADS[1:]], cores)
    found: dict[str, list[list[float]]] = {way: [] for way in LOADS[1:]}
    for _ in range(2 * (repeat + 1)):
        way, row = turns.next()
        found[way].append(row)
    print(f"warm, plain, on cores {cores}:")
    middle = show({way: rows[1:] for way, rows in found.items()})
    print(f"  {LOADS[1]} / {LOADS[2]}: {middle[LOADS[1]] / middle[LOADS[2]]:.3f} (goal 1.05)")


def pair() -> list[int]:
    """Returns two cores that are not hardware threads of one core, if the system reports this."""
    mine = sorted(os.sched_getaffinity(0))
    for other in mine[1:]:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{other}/topology/thread_siblings_list").read_text()
        except OSError:
            break
        if str(mine[0]) not in siblings.strip().replace("-", ",").split(","):
            return [mine[0], other]
    return mine[:2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default="1GB")
    parser.add_argument("--repeat", type=int, default=7, help="counted cold loads of each variant")
    parser.add_argument("--warm", type=int, default=9, help="counted warm loads of each variant")
    parser.add_argument("--folder", help="folder on a disk; default: the temporary folder")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return
    import overwire

    seed = random.randrange(1 << 32)
    random.seed(seed)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        plain, packed = (os.path.join(folder, name) for name in ("plain.safetensors", "packed.safetensors"))
        bench = [sys.executable, "-m", "overwire", "bench", "gen", "llama-bf16", "--size", args.size, plain]
        subprocess.run(bench, check=True, stdout=subprocess.DEVNULL)
        overwire.convert(plain, packed)
        paths = dict(zip(LOADS, (packed, plain, plain), strict=True))
        compare(paths)
        load = os.getloadavg()[0]
        print(f"Linux {os.uname().release}, {len(os.sched_getaffinity(0))} cores, load {load:.1f}, seed {seed}, in {folder}")
        print(f"{os.path.getsize(plain) / 1e9:.3f} GB plain, {os.path.getsize(packed) / 1e9:.3f} compressed", flush=True)
        if (left := evict(plain)) > 0.01:
            print(f"NOT COLD: {left:.3f} of a file remains in the page cache")
        cold(paths, args.repeat, sorted(os.sched_getaffinity(0)))
        warm(plain, args.warm, pair())


if __name__ == "__main__":
    main()

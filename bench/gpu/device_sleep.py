"""Tests sleep and wake on a GPU: compares every byte, then measures times against baselines.

    PYTHONPATH=python python bench/gpu/device_sleep.py [--size 16] [--rounds 20] [--cycles 1000] [--device cuda]
    PYTHONPATH=python python bench/gpu/device_sleep.py --first [--size 16] [--rounds 3]

--size is the GB of bf16 weights, in 291 tensors with a Llama's shapes. The baselines are torch's copies of the same
number of stored bytes between the GPU and pinned memory, in the same run. The exit status is 1 if a byte is wrong or
memory is not freed.

--first measures only the first sleep of fresh processes, alternating between no `prepare_sleep`, one that has ended,
and one begun just before the sleep. Then it measures ways to get new pinned memory, each in a separate process.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import overwire as ow
import torch

GOALS = {"first sleep": 0.35, "later sleep": 0.30, "wake": 0.25}  # seconds for 16 GB


def llama(size: float, device: str) -> dict[str, torch.Tensor]:
    """Returns about `size` GB in the 291 tensors of a Llama with 32 layers."""
    torch.manual_seed(1)
    width = max(256, int((size * 1e9 / 2 / (32 * 12 + 24)) ** 0.5) // 64 * 64)
    shapes: dict[str, tuple[int, ...]] = {"embed": (12 * width, width), "head": (12 * width, width), "norm": (width,)}
    for layer in range(32):
        for name in ("q", "k", "v", "o"):
            shapes[f"{layer}.{name}"] = (width, width)
        for name in ("gate", "up", "down"):
            shapes[f"{layer}.{name}"] = (8 * width // 3 // 64 * 64, width)
        shapes[f"{layer}.norm1"] = shapes[f"{layer}.norm2"] = (width,)
    return {name: (torch.randn(shape, device=device) * 0.02).bfloat16() for name, shape in shapes.items()}


def timed(call: Any) -> tuple[float, Any]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    made = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, made


def in_threads(parts: list[tuple[int, int]], call: Any) -> None:
    threads = [threading.Thread(target=call, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def pages(nbytes: int, way: str, count: int) -> tuple[mmap.mmap, int, float]:
    """Returns new memory, its address, and the seconds until all its pages are allocated, by "populate"
    (MADV_POPULATE_WRITE) or "touch" (memset) in `count` threads, on huge pages unless the method ends in "small"."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE if way.endswith("small") else mmap.MADV_HUGEPAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    step = -(-nbytes // count // (2 << 20)) * (2 << 20)
    parts = [(base + at, min(step, nbytes - at)) for at in range(0, nbytes, step)]
    system = ctypes.CDLL(None)  # calls through ctypes release the GIL
    system.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    system.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    start = time.perf_counter()
    if way.startswith("populate"):
        in_threads(parts, lambda at, n: system.madvise(at, n, 23))
    else:
        in_threads(parts, lambda at, n: system.memset(at, 0, n))
    return memory, base, time.perf_counter() - start


def first_touch(nbytes: int) -> float:
    """Returns the seconds in which all cores allocate that many bytes of huge pages."""
    return pages(nbytes, "populate", os.cpu_count() or 1)[2]


def new_pinned(way: str, count: int, nbytes: int) -> None:
    """Prints the seconds of one method to get new pinned memory, for its pages and for the driver."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    cudart: Any = torch.cuda.cudart()
    if way == "cuMemHostAlloc":
        driver = ctypes.CDLL("libcuda.so.1")
        address = ctypes.c_void_p()
        start = time.perf_counter()
        failed = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), 0)
        print(f"{way:22} {'':10} {'':>9} {time.perf_counter() - start:9.3f} {'failed' if failed else ''}")
        return
    memory, base, there = pages(nbytes, way, count)
    start = time.perf_counter()
    part = 256 << 20
    for at in range(0, nbytes, part):
        if int(cudart.cudaHostRegister(base + at, min(part, nbytes - at), 0)):
            print(f"{way}: not registered")
            break
    took = time.perf_counter() - start
    print(f"{way:22} {count:3} threads {there:9.3f} {took:9.3f}   {nbytes / (there + took) / 1e9:.1f} GB/s in total", flush=True)
    os._exit(0)  # the driver keeps registered pages until the process ends


def first_sleep(mode: str, size: float, device: str) -> None:
    """Prints the seconds of this process's first sleep and of its preparation."""
    tensors = llama(size, device)
    want = {name: tensor.clone() for name, tensor in tensors.items()}
    ready = 0.0
    start = time.perf_counter()
    if mode != "without":
        memory = ow.prepare_sleep(tensors)
        returned = time.perf_counter() - start
        if mode == "ended":
            memory.wait()
            ready = time.perf_counter() - start
    seconds, asleep = timed(lambda: ow.sleep(tensors))
    later = []
    stored = asleep.stored
    asleep.wake()
    if not equal(tensors, want):
        sys.exit("WRONG BYTES")
    for _ in range(3):
        again, asleep = timed(lambda: ow.sleep(tensors))
        later.append(again)
        asleep.wake()
    said = f"prepared in {ready:.3f} s, " if ready else ""
    said += f"the call took {returned:.3f} s, " if mode != "without" else ""
    print(
        f"first sleep, preparation {mode:8} {seconds:.3f} s, later {statistics.median(later):.3f} s; {said}{stored / 1e9:.2f} GB stored",
        flush=True,
    )


def first(size: float, rounds: int, device: str) -> int:
    """Measures the first sleep in fresh processes and the baselines of its memory."""
    me = [sys.executable, __file__, "--device", device, "--size", str(size)]
    for _ in range(rounds):
        for mode in ("without", "ended", "begun"):
            if subprocess.run([*me, "--mode", mode], check=False).returncode:
                return 1
    nbytes = int(size * 1e9 * 0.67) // (2 << 20) * (2 << 20)
    cores = os.cpu_count() or 1
    print(f"\n{nbytes / 1e9:.2f} GB of new pinned memory; seconds for the pages and for the driver")
    for way in ("populate", "touch", "populate, small", "touch, small"):
        for count in sorted({1, 4, min(16, cores), cores}):
            subprocess.run([*me, "--way", way, "--threads", str(count), "--bytes", str(nbytes)], check=False)
    subprocess.run([*me, "--way", "cuMemHostAlloc", "--bytes", str(nbytes)], check=False)
    return 0


def floors(nbytes: int, device: str) -> dict[str, float]:
    """Returns the seconds to copy that many bytes down and up through torch's pinned memory, the best of five."""
    part = 256 << 20
    host, there = (
        torch.empty(part, dtype=torch.uint8, pin_memory=True), torch.empty(part, dtype=torch.uint8, device=device),
    )
    out = {}
    for name, to, of in (("down", host, there), ("up", there, host)):
        best = min(timed(lambda to=to, of=of: [to.copy_(of, non_blocking=True) for _ in range(8)])[0] for _ in range(5))
        out[name] = best * nbytes / (8 * part)
    return out


class Lowest:
    """Records the lowest free memory of the GPU while a block runs."""

    def __enter__(self) -> Lowest:
        self.free, self._over = torch.cuda.mem_get_info()[0], False
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over:
            self.free = min(self.free, torch.cuda.mem_get_info()[0])
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._thread.join()


def resident() -> int:
    with open("/proc/self/statm", encoding="utf-8") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def equal(tensors: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor.view(torch.int16), want[name].view(torch.int16)) for name, tensor in tensors.items())


def many_cycles(count: int, device: str) -> bool:
    """Runs many sleep cycles of a small model of many dtypes, and checks that memory does not grow."""
    torch.manual_seed(2)
    tensors = {
        "a": torch.randn(3000, 1111, device=device).bfloat16(),
        "b": torch.randn(1000, 1000, device=device),
        "c": torch.randint(-40, 40, (2_000_003,), dtype=torch.int8, device=device),
        "d": torch.arange(70_001, device=device),
        "e": torch.randn(5000, 999, device=device).half()[:, 1:-1],
        "f": torch.randn(17, device=device),
    }
    want = {name: tensor.clone() for name, tensor in tensors.items()}
    free = memory = 0
    for cycle in range(count):
        with ow.sleep(tensors):
            pass
        if cycle == 20:
            free, memory = torch.cuda.mem_get_info()[0], resident()
        if not all(torch.equal(tensor, want[name]) for name, tensor in tensors.items()):
            print(f"cycle {cycle}: WRONG BYTES")
            return False
    grown, taken = resident() - memory, free - torch.cuda.mem_get_info()[0]
    print(f"{count} cycles, all bytes right; host memory {grown / 1e6:+.0f} MB, GPU memory {taken / 1e6:+.0f} MB since the 20th")
    return grown < 256 << 20 and taken <= 64 << 20


def beside_a_full_cache(device: str) -> bool:
    """Tests a sleep while torch's allocator holds nearly all GPU memory, so the engine encodes in part of it."""
    tensors = {"a": torch.randn(3000, 1111, device=device).bfloat16()}
    want = tensors["a"].clone()
    part, held = 256 << 20, []
    while torch.cuda.mem_get_info()[0] > 2 * part:
        held.append(torch.empty(part, dtype=torch.uint8, device=device))
    while torch.cuda.mem_get_info()[0] > 24 << 20:
        held.append(torch.empty(20 << 20, dtype=torch.uint8, device=device))
    held.clear()
    with ow.sleep(tensors):
        pass
    torch.cuda.empty_cache()
    print("with a full torch cache:", "right" if torch.equal(tensors["a"], want) else "WRONG BYTES")
    return torch.equal(tensors["a"], want)


def file_of_two_devices(device: str) -> bool:
    """Tests that tensors on the CPU and on the GPU sleep in one file and wake."""
    tensors = {"here": torch.randn(3000, 111).bfloat16(), "there": torch.randn(3000, 1111, device=device).bfloat16()}
    tensors["columns"] = torch.randn(500, 70, device=device)[:, 3:9]
    want = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    with tempfile.TemporaryDirectory() as folder, ow.sleep(tensors, to_file=f"{folder}/both.safetensors"):
        made = ow.load_file(f"{folder}/both.safetensors")
    good = all(
        torch.equal(tensor.cpu(), want[name]) and torch.equal(made[name], want[name])
        for name, tensor in tensors.items()
    )
    print("a file of two devices:", "right" if good else "WRONG BYTES")
    return good


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--first", action="store_true")
    for name in ("--mode", "--way"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    for name in ("--threads", "--bytes"):
        parser.add_argument(name, type=int, default=1, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.mode:
        first_sleep(asked.mode, asked.size, asked.device)
        return 0
    if asked.way:
        new_pinned(asked.way, asked.threads, asked.bytes)
        return 0
    if asked.first:
        return first(asked.size, min(asked.rounds, 5), asked.device)
    good = many_cycles(asked.cycles, asked.device) if asked.cycles else True
    ow.empty_cache()
    good = beside_a_full_cache(asked.device) and file_of_two_devices(asked.device) and good

    tensors = llama(asked.size, asked.device)
    total = sum(tensor.nbytes for tensor in tensors.values())
    want = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.cuda.empty_cache()
    sleeps, wakes, staging, before = [], [], [], resident()
    stored = released = 0
    for number in range(asked.rounds + 1):
        with Lowest() as lowest:
            free = lowest.free
            seconds, asleep = timed(lambda: ow.sleep(tensors))
        sleeps.append(seconds)
        staging.append(free - lowest.free)
        stored, released = asleep.stored, asleep.released
        seconds, _ = timed(asleep.wake)
        wakes.append(seconds)
        if not equal(tensors, want):
            print(f"round {number}: WRONG BYTES")
            return 1
    held = resident() - before
    floor = floors(stored, asked.device)
    report = ow.last_report()
    print(f"\n{torch.cuda.get_device_name()}: {total / 1e9:.2f} GB bf16 in {len(tensors)} tensors, {stored / total:.4f} of it stored,")
    print(f"{released / 1e9:.2f} GB freed; {asked.rounds + 1} rounds, every byte compared; last: {report}")
    print(f"{'':14}{'median s':>10}{'best s':>10}{'floor s':>10}{'goal s':>10}")
    for name, all_, bound in (("first sleep", sleeps[:1], "down"), ("later sleep", sleeps[1:], "down"), ("wake", wakes, "up")):
        goal = GOALS[name] * total / 16e9
        print(f"{name:14}{statistics.median(all_):10.3f}{min(all_):10.3f}{floor[bound]:10.3f}{goal:10.3f}")
    print(f"device memory while going to sleep: first {staging[0] / 1e6:.0f} MB, later {max(staging[1:] or [0]) / 1e6:.0f} MB")
    print(f"host memory kept: {held / 1e9:.2f} GB, {held / total:.3f} of the model (goal 0.68)")
    ow.empty_cache()
    print(f"floor of the first sleep's memory: its first touch by all cores takes {first_touch(stored):.3f} s")
    gc.collect()
    left = resident() - before
    print(f"after empty_cache: {left / 1e6:+.0f} MB")
    return 0 if good and left < 512 << 20 else 1


if __name__ == "__main__":
    sys.exit(main())

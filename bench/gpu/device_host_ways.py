"""Compares ways to copy a sealed memfd to a GPU: reading it into pinned slots, or registering a mapping of it.

    python bench/gpu/device_host_ways.py [--size 16] [--repeat 3] [--limit 80] [--device cuda:0]

Needs torch and the driver, but not overwire. The memfd is filled and sealed like one of the host store, and mapped for
reading. Each kind of memory is measured: ordinary pages, transparent huge pages (MADV_HUGEPAGE, or MADV_COLLAPSE
if the system does not allow that), and MFD_HUGETLB. The bytes are compared on the GPU after each copy, and the exit
status is 1 if some differ. Results are printed one by one. After --limit seconds no further measurement begins.

- "link": copies of one pinned buffer, the upper limit of the other ways
- "pread": 8 threads read blocks of 6 MiB into pinned slots, two for each thread, as loads do today
- "register": 2 threads register blocks of 32 MiB, at most 256 MiB ahead of the copies, and unregister them afterwards
- "register only": the same as "register", but without copies
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import mmap
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

MIB = 1 << 20
BLOCK = 256 * MIB  # bytes of a block of the pattern: block k has the words of block 0 plus k
SLOT = 6 * MIB
PIECE = 32 * MIB
AHEAD = 256 * MIB
READERS, REGISTRARS = 8, 2

SEALS = 1 | 2 | 4 | 8  # seal, shrink, grow, write
ADD_SEALS = 1033
ALLOW_SEALING, HUGETLB, HUGE_2MB = 2, 4, 21 << 26
HUGEPAGE, COLLAPSE = 14, 25  # madvise
HUGE = 2 * MIB
READ_ONLY = 8  # CU_MEMHOSTREGISTER_READ_ONLY


class Driver:
    """The driver's functions. Raises OSError if one fails."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._context = ctypes.c_void_p()

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise OSError(f"{name}: {(text.value or b'?').decode()}")

    def remember_context(self) -> None:
        self.call("cuCtxGetCurrent", ctypes.byref(self._context))

    def enter(self) -> None:
        """Makes the context current in this thread."""
        self.call("cuCtxSetCurrent", self._context)

    def handle(self, name: str) -> ctypes.c_void_p:
        """Returns a new stream or event."""
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), ctypes.c_uint(0))
        return handle

    def pinned(self, size: int) -> int:
        pointer = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(size), ctypes.c_uint(0))
        return pointer.value or 0

    def copy(self, to: int, source: int, size: int, stream: ctypes.c_void_p) -> None:
        self.call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_void_p(source), ctypes.c_size_t(size), stream)

    def register(self, at: int, size: int) -> None:
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(at), ctypes.c_size_t(size), ctypes.c_uint(READ_ONLY))

    def unregister(self, at: int) -> None:
        self.call("cuMemHostUnregister", ctypes.c_void_p(at))


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
MAP_FIXED = 16


def map_memory(at: int | None, size: int, access: int, flags: int, fd: int) -> int:
    result = LIBC.mmap(ctypes.c_void_p(at), ctypes.c_size_t(size), access, flags, fd, ctypes.c_long(0))
    if result in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}")
    return int(result)


class Memory:
    """A sealed memfd with the pattern. kind: "pages", "huge" (transparent) or "hugetlb"."""

    def __init__(self, kind: str, size: int, template: torch.Tensor) -> None:
        flags = ALLOW_SEALING | ((HUGETLB | HUGE_2MB) if kind == "hugetlb" else 0)
        self.size = size
        self._writable = os.memfd_create("ways", os.MFD_CLOEXEC | flags)
        self.fd, self._maps = -1, list[tuple[int, int]]()
        try:
            os.ftruncate(self._writable, size)
            self._fill(kind, template)
            fcntl.fcntl(self._writable, ADD_SEALS, SEALS)
            self.fd = os.open(f"/proc/self/fd/{self._writable}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def _fill(self, kind: str, template: torch.Tensor) -> None:
        if kind == "hugetlb":  # raises OSError if there are too few pages; a write would get SIGBUS
            os.posix_fallocate(self._writable, 0, self.size)
        with mmap.mmap(self._writable, self.size) as memory:
            if kind == "huge":
                memory.madvise(HUGEPAGE)
            write_pattern(torch.frombuffer(memory, dtype=torch.int64), template)
            if kind == "huge" and not huge_pages().shared:
                start = time.perf_counter()
                memory.madvise(COLLAPSE)
                print(f"huge: collapsed in {time.perf_counter() - start:.1f} s")

    def map(self) -> int:
        """Returns the address of a new mapping, for reading. It is aligned for huge pages."""
        size = self.size + HUGE
        base = map_memory(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._maps.append((base, size))
        at = -(-base // HUGE) * HUGE
        return map_memory(at, self.size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, self.fd)

    def unmap(self) -> None:
        while self._maps:
            at, size = self._maps.pop()
            LIBC.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))

    def close(self) -> None:
        self.unmap()
        for fd in (self.fd, self._writable):
            if fd >= 0:
                os.close(fd)


def write_pattern(words: torch.Tensor, template: torch.Tensor) -> None:
    blocks = words.split(BLOCK // 8)
    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(lambda k: torch.add(template, k, out=blocks[k]), range(len(blocks))))


def run_threads(driver: Driver, work: list[Callable[[], None]]) -> None:
    def begin(one: Callable[[], None]) -> None:
        driver.enter()
        one()

    with ThreadPoolExecutor(len(work)) as pool:
        for future in [pool.submit(begin, one) for one in work]:
            future.result()


class Slots:
    """Pinned slots and streams of the readers."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.all = [[(driver.pinned(SLOT), driver.handle("cuEventCreate")) for _ in range(2)] for _ in range(READERS)]
        self.streams = [driver.handle("cuStreamCreate") for _ in range(READERS)]

    def read(self, memory: Memory, to: int) -> None:
        """Copies the memory to a device address."""
        offsets: Iterator[int] = iter(range(0, memory.size, SLOT))
        lock = threading.Lock()

        def reader(number: int) -> None:
            driver, stream = self.driver, self.streams[number]
            slots = [(at, (ctypes.c_char * SLOT).from_address(at), event) for at, event in self.all[number]]
            for turn in range(1 << 60):
                with lock:
                    offset = next(offsets, -1)
                if offset < 0:
                    break
                at, buffer, event = slots[turn % 2]
                if turn > 1:
                    driver.call("cuEventSynchronize", event)
                size = min(SLOT, memory.size - offset)
                read = 0
                while read < size:
                    read += os.preadv(memory.fd, [memoryview(buffer)[read:size]], offset + read)
                driver.copy(to + offset, at, size, stream)
                driver.call("cuEventRecord", event, stream)
            driver.call("cuStreamSynchronize", stream)

        run_threads(self.driver, [partial(reader, number) for number in range(READERS)])


def register_ahead(driver: Driver, memory: Memory, to: int, stream: ctypes.c_void_p | None) -> None:
    """Maps the memory, and copies it to a device address while it is being registered. Without a stream, it only
    registers the memory."""
    at = memory.map()
    pieces = [(off, min(PIECE, memory.size - off)) for off in range(0, memory.size, PIECE)]
    room = threading.Semaphore(AHEAD // PIECE)
    lock, waiting = threading.Lock(), deque(range(len(pieces)))
    registered = [threading.Event() for _ in pieces]
    failure: list[Exception] = []
    # Pieces that were copied. The registrars unregister them, so that the copying thread need not wait.
    copied: deque[tuple[int, ctypes.c_void_p | None]] = deque()

    def unregister(all_of_them: bool) -> None:
        while True:
            with lock:
                if not copied:
                    return
                number, event = copied.popleft()
            if event is not None:
                driver.call("cuEventSynchronize", event)
            driver.unregister(at + pieces[number][0])
            room.release()
            if not all_of_them:
                return

    def registrar() -> None:
        try:
            while not failure:
                while not room.acquire(timeout=0.0002):
                    unregister(False)
                with lock:
                    number = waiting.popleft() if waiting else -1
                if number < 0:
                    room.release()
                    return
                driver.register(at + pieces[number][0], pieces[number][1])
                registered[number].set()
        except Exception as error:
            failure.append(error)
            for event in registered:
                event.set()

    def copier() -> None:
        for number, (off, size) in enumerate(pieces):
            registered[number].wait()
            if failure:
                return
            event = None
            if stream is not None:
                driver.copy(to + off, at + off, size, stream)
                event = events[number]
                driver.call("cuEventRecord", event, stream)
            with lock:
                copied.append((number, event))
        if stream is not None:
            driver.call("cuStreamSynchronize", stream)

    events = [driver.handle("cuEventCreate") for _ in pieces] if stream is not None else []
    try:
        run_threads(driver, [copier, *[registrar] * REGISTRARS])
        unregister(True)
    finally:
        for event in events:
            driver.call("cuEventDestroy_v2", event)
        memory.unmap()
    if failure:
        raise failure[0]


class Measure:
    """Runs and prints the measurements."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.begin, self.arguments, self.wrong = time.perf_counter(), arguments, 0
        self.device = torch.device(arguments.device)
        self.size = int(arguments.size * 1e9) // BLOCK * BLOCK
        self.target = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
        self.template = torch.arange(BLOCK // 8, dtype=torch.int64).mul_(0x9E3779B97F4A7C15 - (1 << 64))
        self.expected = self.template.to(self.device)
        self.driver = Driver(arguments.libcuda)
        self.driver.remember_context()

    def is_late(self) -> bool:
        return time.perf_counter() - self.begin > self.arguments.limit

    def await_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, name: str, copy: Callable[[], None], is_compared: bool = True) -> None:
        rates, note = [], ""
        for _ in range(self.arguments.repeat):
            if self.is_late():
                note = ", stopped by --limit"
                break
            if is_compared:
                self.target.zero_()
            self.await_device()
            start = time.perf_counter()
            try:
                copy()
            except OSError as error:
                print(f"{name}: {error}", flush=True)
                return
            self.await_device()
            rates.append(self.size / (time.perf_counter() - start) / 1e9)
            if is_compared and not self.is_right():
                self.wrong += 1
                note = ", WRONG BYTES"
        if rates:
            rows = " ".join(f"{rate:.1f}" for rate in rates)
            print(f"{name}: {statistics.median(rates):.1f} GB/s (of {rows}){note}", flush=True)

    def is_right(self) -> bool:
        blocks = self.target.view(torch.int64).split(BLOCK // 8)
        return all(torch.equal(block, self.expected + k) for k, block in enumerate(blocks))

    def run(self) -> int:
        driver, to = self.driver, self.target.data_ptr()
        slots, stream = Slots(driver), driver.handle("cuStreamCreate")
        buffer = driver.pinned(BLOCK)

        def link() -> None:
            for off in range(0, self.size, BLOCK):
                driver.copy(to + off, buffer, BLOCK, stream)
            driver.call("cuStreamSynchronize", stream)

        print(f"{self.size / 1e9:.2f} GB, {os.cpu_count()} cores, {torch.__version__}", flush=True)
        for name in ("shmem_enabled", "enabled"):
            path = Path("/sys/kernel/mm/transparent_hugepage") / name
            print(f"{path.name}: {path.read_text().strip() if path.exists() else 'none'}")
        self.time("link", link, False)
        for kind in ("pages", "huge", "hugetlb"):
            if self.is_late():
                print(f"{kind}: stopped by --limit")
                continue
            start = time.perf_counter()
            try:
                memory = Memory(kind, self.size, self.template)
            except OSError as error:
                print(f"{kind}: no memory of this kind: {error}", flush=True)
                continue
            print(f"{kind}: filled in {time.perf_counter() - start:.1f} s, {huge_pages()}", flush=True)
            try:
                self.time(f"{kind}: pread", partial(slots.read, memory, to))
                self.time(f"{kind}: register", partial(register_ahead, driver, memory, to, stream))
                self.time(f"{kind}: register only", partial(register_ahead, driver, memory, to, None), False)
            finally:
                memory.close()
        print(f"took {time.perf_counter() - self.begin:.0f} s; {self.wrong} copies with wrong bytes")
        return int(self.wrong > 0)


class HugePages(NamedTuple):
    """The system's huge pages: kB in shared memory, and the number of pages reserved for MFD_HUGETLB."""

    shared: int
    reserved: int


def huge_pages() -> HugePages:
    rows = dict(row.split(":") for row in Path("/proc/meminfo").read_text().splitlines())
    return HugePages(*(int(rows.get(name, "0").split()[0]) for name in ("ShmemHugePages", "HugePages_Total")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=16, help="GB")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limit", type=float, default=80, help="seconds after which no measurement begins")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--libcuda", default="libcuda.so.1", help="the driver's library")
    sys.exit(Measure(parser.parse_args()).run())


if __name__ == "__main__":
    main()

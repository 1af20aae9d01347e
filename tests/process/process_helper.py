"""Runs programs in separate processes for test_process*.py. Their scripts also import this module."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Tests make only a tenth of their runs under AddressSanitizer and emulators, which are much slower.
FEWER = 10 if os.environ.get("OVERWIRE_TEST_SLOW") else 1

PRELUDE = """
import json, os, signal, sys, threading, time
sys.path.insert(0, %r)
from process_helper import *
import engine_calls as e
from overwire import errors
""" % str(Path(__file__).parent)


def run(
    source: str, *args: object, timeout: float = 240, rc: int | None = 0, small_quarantine: bool = False,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs PRELUDE and then Python source in a fresh interpreter. small_quarantine: for sources that measure memory,
    because AddressSanitizer otherwise keeps freed memory."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OVERWIRE_P", "PRELOAD"))}
    if small_quarantine and "ASAN_OPTIONS" in env:
        env["ASAN_OPTIONS"] += ":quarantine_size_mb=4"
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + source, *map(str, args)],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout * FEWER,
    )
    if rc is not None:
        assert done.returncode == rc, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-6000:]}"
    return done


def write_plain(path: Path | str, tensors: dict[str, tuple[str, list[int], bytes]]) -> str:
    """Writes a plain safetensors file without overwire. `tensors` maps a name to (dtype, shape, bytes)."""
    at, header = 0, {}
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(d for _, _, d in tensors.values()))
    return str(path)


def write_sparse(path: Path | str, size: int, count: int = 1) -> str:
    """Writes a plain file with count U8 tensors of zeros. The tensors take no disk space."""
    shapes = {f"w{i}": {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]} for i in range(count)}
    text = json.dumps(shapes).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + size * count)
    return str(path)


BIG = 16 << 20, 4096  # arguments of write_sparse for LongJob's file


class LongJob:
    """A load that takes many seconds but little memory: it loads thousands of tensors to one address."""

    def __init__(self, path: str) -> None:
        import engine_calls as e

        size, count = BIG
        self.memory = bytearray(size)
        address = ctypes.addressof((ctypes.c_char * size).from_buffer(self.memory))
        self.model = e.open_model(json.dumps({"uris": [path], "map": False}))
        requests = b"".join(struct.pack("=6q", i, address, 0, -1, 0, -1) for i in range(count))
        # With one worker, the test itself has a core on a machine with two.
        self.job = e.load_start(self.model, requests, '{"threads": 1}')

    def end(self) -> None:
        import engine_calls as e
        from overwire import errors

        e.job_cancel(self.job)
        try:
            e.job_wait(self.job, None)
        except errors.CancelledError:
            pass
        e.job_free(self.job)


def load(path: str, raw: bool = False) -> list[tuple[object, int]]:
    """Loads every tensor of a file, and returns job_take's list."""
    import engine_calls as e

    model = e.open_model(json.dumps({"uris": [path]}))
    job = e.load_start(model, None, "{}")
    assert e.job_wait(job, None)
    landed = e.job_take(job, raw)
    e.job_free(job)
    e.close_model(model)
    return landed


def child(body: Callable[[], None], limit: float = 60) -> int:
    """Runs body in a forked child, which exits as a program does. Returns the exit code, or 99 if the child hung."""
    code = _child(body, limit)
    # Before LLVM 18, AddressSanitizer does not hold its own locks during a fork, so a child may inherit a locked one
    # and hang. Such a child is tried again. Without AddressSanitizer, a child must never hang.
    if code == 99 and FEWER > 1:
        code = _child(body, limit)
    return code


def _child(body: Callable[[], None], limit: float) -> int:
    pid = os.fork()
    if pid == 0:
        body()
        sys.exit(0)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        got, status = os.waitpid(pid, os.WNOHANG)
        if got:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return 99


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


AT_FIRST = threads()  # one thread, and the emulator's threads


def rss() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")

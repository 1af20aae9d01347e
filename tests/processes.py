"""Starts programs for tests, each in its own process group, and kills the group when the test ends.

No process keeps running if a test fails or is interrupted.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def end(process: subprocess.Popen[Any]) -> None:
    """Kills what is left of the process group that `process` leads, and waits for `process` to end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def started(argv: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Starts a program in its own process group, and kills the group when the block ends."""
    process = subprocess.Popen(argv, start_new_session=True, **options)
    try:
        yield process
    finally:
        end(process)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def plant_modules(folder: Path) -> list[str]:
    """Writes Python files with the names of modules that the overwire command imports. If one of them runs, it writes
    the file ran-NAME. Returns the start of a command line, as pip installs the command, that might run them."""
    for name in ("torch", "numpy", "json", "argparse", "signal", "subprocess", "overwire", "safetensors"):
        (folder / f"{name}.py").write_text(f"open('ran-{name}', 'w')\n")
    command = folder / "bin" / "overwire"
    command.parent.mkdir()
    command.write_text("from overwire._engine import main\nmain()\n")
    return [sys.executable, str(command)]


@contextlib.contextmanager
def overwire_serve(folder: Path, *options: str) -> Iterator[str]:
    """Runs `overwire serve` on a folder until the block ends, and yields its URL."""
    command = [sys.executable, "-m", "overwire", "serve", str(folder), *options]
    with started(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url: str = server.stdout.readline().strip()
        assert url, "overwire serve did not start"
        yield url


def adopt() -> None:
    """Makes this process the new parent of all its descendants that lose their parent, so that left() finds them."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def left(grace: float) -> list[str]:
    """Kills those descendants of this process that do not end within grace seconds, and returns their command lines."""
    until = time.monotonic() + grace
    while (running := _descendants()) and time.monotonic() < until:
        time.sleep(0.02)
    stayed = list(running.values())
    while running:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running = _descendants()  # includes orphans, which now have this process as parent
    return stayed


def _descendants() -> dict[int, str]:
    """Returns the command line of every running descendant by process id, and reaps children that have ended."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry)] = int(parent)
                elif int(parent) == os.getpid():
                    os.waitpid(int(entry), os.WNOHANG)
    ours, found = {os.getpid()}, {}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
        for pid in more:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if "resource_tracker" not in command:  # Python's own tracker ends with this process
                    found[pid] = command[:300]
    return found

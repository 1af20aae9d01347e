"""Lists the loops and runs one round: `python tests/soak/loops.py NAME SEED DEVICE SECONDS`, in an empty folder."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import processes

from soak.outcomes import KINDS, PATIENCE, STACKS, Failure, Round, end_with_parent, report


class Loop(NamedTuple):
    """A loop: the module and name of its function, its weight in the random choice, whether it can use a GPU, and
    whether `make test` runs it."""

    place: str
    weight: int = 2
    gpu: bool = False
    cheap: bool = True

    def body(self) -> Callable[[Round], None]:
        """Returns the function. This imports its module, which imports torch."""
        module, name = self.place.split(".")
        function: Callable[[Round], None] = getattr(importlib.import_module(f"soak.{module}"), name)
        return function


# Loops by name. The docstring of each function says what the loop checks.
LOOPS: dict[str, Loop] = {
    "threads": Loop("reading.threads", 4, gpu=True),
    "preloads": Loop("reading.preloads"),
    "ranks": Loop("ranks.loads", 3, cheap=False),
    "lost-ranks": Loop("ranks.losses", 2, cheap=False),
    "killed-writers": Loop("writing.kills", 4, cheap=False),
    "checkpoints": Loop("checkpoints.replaced", 3),
    "checkpoint-ranks": Loop("checkpoints.ranks", 2, cheap=False),
    "checkpoint-stores": Loop("checkpoints.stores", 2, cheap=False),
    "full-disks": Loop("writing.full_disks", cheap=False),
    "damage": Loop("damaging.damage", 3),
    "containers": Loop("differing.containers"),
    "tensors-files": Loop("differing.tensors_files"),
    "torch-files": Loop("differing.torch_files"),
    "servers": Loop("serving.servers", 3),
    "stores": Loop("serving.stores", 2, cheap=False),
    "cancels": Loop("interrupting.cancels", 3, gpu=True),
    "signals": Loop("interrupting.signals", cheap=False),
    "forks": Loop("interrupting.forks"),
    "background-saves": Loop("ordering.background_saves", 3),
    "offload-escapes": Loop("offloading.escapes", 3),
    "rewrites": Loop("changing.rewrites"),
    "sleeps": Loop("changing.sleeps", gpu=True, cheap=False),
    "deltas": Loop("changing.deltas", gpu=True),
    "leaks": Loop("leaking.leaks", gpu=True, cheap=False),
}

# These loops always fail. See `planted`.
PLANTED = {f"planted-{kind.replace(' ', '-')}": Loop(f"planted.{kind.replace(' ', '_')}") for kind in KINDS}

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18  # linux/sched.h, linux/mount.h


def _take_shared_memory() -> Path | None:
    """Mounts a separate /dev/shm for this process and its children, so that only their files are in it. Returns None if
    the process may not mount."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        return None
    return None if libc.mount(b"soak", b"/dev/shm", b"tmpfs", 0, b"size=2g") else Path("/dev/shm")


def _watch(seconds: float) -> int:
    """Forks a process that makes this process print its stacks after a time. Returns the id of the fork, which the
    caller kills."""
    if watching := os.fork():
        return watching
    end_with_parent()
    time.sleep(seconds)
    os.kill(os.getppid(), STACKS)
    os._exit(0)


def run(name: str, seed: str, device: str, seconds: float, watching: int) -> Round:
    """Runs one round of a loop in the working folder, and checks that it leaves nothing."""
    import torch

    torch.set_num_threads(1)  # a forked child would have no other threads of torch
    shared, temporary = _take_shared_memory(), Path("temporary").absolute()
    temporary.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    folder = Path("files").absolute()
    folder.mkdir()
    round_ = Round(seed, folder, device, seconds)
    try:
        (LOOPS | PLANTED)[name].body()(round_)
    except BaseException as error:
        round_.fail(error)
    os.kill(watching, signal.SIGKILL)
    grace = min(5.0, PATIENCE)
    stayed = processes.left(grace)
    until = time.monotonic() + grace  # background work may still run
    while (
        rest := [str(path) for place in (shared, temporary) if place for path in place.iterdir()]
    ) and time.monotonic() < until:
        time.sleep(0.05)
    if not round_.failures and (stayed or rest):
        round_.fail(Failure("leak", f"leftover processes: {stayed}; leftover files: {rest}"))
    return round_


if __name__ == "__main__":
    faulthandler.register(STACKS)
    watching = _watch(float(sys.argv[4]) + 3 * PATIENCE)
    processes.adopt()
    done = run(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]), watching)
    print(f"\n{report(done)}", flush=True)

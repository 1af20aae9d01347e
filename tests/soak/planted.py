"""Loops that each fail in one way, to show that the soak test finds this kind of failure. They run only if `--only`
names them."""

from __future__ import annotations

import os
import signal
import tempfile
import time

import overwire as ow

from .models import as_bytes, clones, compare_all, random_tensors, store
from .outcomes import Round


def wrong_bytes(round_: Round) -> None:
    """Loads data and changes one bit of it."""
    stored = store(round_.rng, round_.folder / "model", random_tensors(round_.rng, 1000))
    loaded = clones(ow.load_file(stored.path, framework="pt"))
    as_bytes(loaded["t0"])[0] ^= 1
    compare_all(loaded, stored.tensors)


def hang(round_: Round) -> None:
    """Starts a child process that does not end."""
    round_.in_child(lambda child: time.sleep(3600))


def leak(round_: Round) -> None:
    """Leaves a temporary file."""
    os.close(tempfile.mkstemp()[0])


def untyped_error(round_: Round) -> None:
    """Raises KeyError in a thread, which is not an overwire error."""
    with round_.may_raise(ow.OverwireError):
        round_.beside(lambda thread, rng: {}["missing"])


def unexpected_error(round_: Round) -> None:
    """Raises an unexpected overwire error in a child process."""
    round_.in_child(lambda child: ow.load_file(round_.folder / "none.safetensors"))


def crash(round_: Round) -> None:
    """Ends the process by a signal."""
    os.kill(os.getpid(), signal.SIGSEGV)

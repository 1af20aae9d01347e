"""nyacomp's environment variables: what each means here.

A value that cannot be understood is a warning on the logger "overwire" and
counts as not set; nothing aborts. DEBUG, SILENT, NUM_THREADS, PRELOAD_PATH,
NO_PRELOAD and LOAD_UNCOMPRESSED are settings of overwire itself once this package
is imported; it warns about them, and its own names win (`overwire doctor --env`).
"""

from __future__ import annotations

import logging
import os

from overwire import ArgumentError

log = logging.getLogger("overwire")

_YES = frozenset({"1", "true", "yes", "on", "y", "t"})
_NO = frozenset({"0", "false", "no", "off", "n", "f"})

# Read here: name -> kind.
_FLAGS = (
    "DOWNLOAD",
    "REMOTE_CSV",
    "UNCOMPRESSED",
    "RECOMPRESS",
    "PYTHON_ARGS",
    "REDO_PARTITION",
    "DOWNLOAD_LOG",
    "SKIP_SETPIPE_SZ",
)

#: Accepted, checked, and without an effect, because what they tune is not
#: there: overwire has one ring of slots for all threads, no stream or buffer of
#: a thread's own, and hides no modules. (lowest, highest) of the numbers.
PASSED_OVER: dict[str, tuple[int, int]] = {
    "NUM_STREAMS": (1, 1 << 16),
    "CHUNK_SIZE": (9, 40),  # log2 of bytes
    "NUM_CIRCLE_BUFFERS": (1, 1 << 16),
    "UNPINNED_JOBS": (0, 1 << 16),
    "UNPINNED_THREADS": (0, 1 << 16),
    "SLEEP": (0, 1 << 16),
    **dict.fromkeys(
        "TENSOR_EARLY SYNC_DECOMPRESS SYNC_FREE REUSE_COMP_BUFFER WILLNEED SEQUENTIAL "
        "DEBUG_MALLOC DEBUG_SYNC NOTIME".split(),
        (0, 1),
    ),
}


def flag(name: str) -> bool:
    """Whether a variable says yes."""
    return text(name).lower() in _YES


def number(name: str, low: int, high: int) -> int | None:
    """A variable's number; None if it is not set or is none in that range."""
    value = text(name)
    return int(value) if value.isdecimal() and low <= int(value) <= high else None


def text(name: str, default: str = "") -> str:
    """A variable's text without the blanks around it; empty counts as not set."""
    return os.environ.get(name, "").strip() or default


def num_threads() -> int:
    """Bins to plan for: OVERWIRE_THREADS, NUM_THREADS, or one for each CPU that
    this process may use."""
    return number("OVERWIRE_THREADS", 1, 1024) or number("NUM_THREADS", 1, 1024) or len(os.sched_getaffinity(0))


def host() -> str:
    """What stands before file names in a manifest that is written: HOST if
    DOWNLOAD is set, else nothing."""
    return text("HOST", "http://localhost:8080").rstrip("/") if flag("DOWNLOAD") else ""


def check_algo(algo: int) -> None:
    """ArgumentError unless it is one of nvCOMP's settings, which all mean the same here."""
    if algo not in (0, 1, 2):
        raise ArgumentError(f"overwire: algo: expected 0, 1 or 2, got {algo!r}")


def check() -> list[str]:
    """Warns about every variable whose value is no good; returns the warnings."""
    warnings = []
    for name in _FLAGS:
        if text(name) and text(name).lower() not in _YES | _NO:
            warnings.append(f"{name}={text(name)!r} ignored: neither yes nor no")
    for name, (low, high) in PASSED_OVER.items():
        if text(name) and number(name, low, high) is None:
            warnings.append(f"{name}={text(name)!r} ignored: not a number from {low} to {high}")
    for warning in warnings:
        log.warning("overwire: %s", warning)
    return warnings

"""Reads nyacomp's environment variables, and documents them.

A variable with an invalid value causes a warning on the logger "overwire", and counts as not set. DEBUG, SILENT,
NUM_THREADS, PRELOAD_PATH, NO_PRELOAD and LOAD_UNCOMPRESSED become settings of overwire itself once this package is
imported. overwire warns about them, and its own variables take precedence (`overwire doctor --env`).
"""

from __future__ import annotations

import logging
import os

from overwire import ArgumentError

log = logging.getLogger("overwire")

_YES = frozenset({"1", "true", "yes", "on", "y", "t"})
_NO = frozenset({"0", "false", "no", "off", "n", "f"})

# Flags that this module reads.
_FLAGS = """DOWNLOAD REMOTE_CSV UNCOMPRESSED RECOMPRESS PYTHON_ARGS REDO_PARTITION DOWNLOAD_LOG
    SKIP_SETPIPE_SZ""".split()

#: Maps variables that are checked but have no effect to their lowest and highest value. They have no effect because
#: overwire has one ring of slots for all threads, and no streams or buffers per thread.
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
    """Returns whether a variable is set to a spelling of yes."""
    return text(name).lower() in _YES


def number(name: str, low: int, high: int) -> int | None:
    """Returns a variable's number, or None if it is not set or is not a number in the range."""
    value = text(name)
    return int(value) if value.isdecimal() and low <= int(value) <= high else None


def text(name: str, default: str = "") -> str:
    """Returns a variable's text, stripped of blanks; an empty text counts as not set."""
    return os.environ.get(name, "").strip() or default


def num_threads() -> int:
    """Returns the number of bins for partitions: OVERWIRE_THREADS, NUM_THREADS, or the number of CPUs that
    this process may use."""
    return number("OVERWIRE_THREADS", 1, 1024) or number("NUM_THREADS", 1, 1024) or len(os.sched_getaffinity(0))


def host() -> str:
    """Returns the prefix of file names in a manifest: HOST if DOWNLOAD is set, otherwise nothing."""
    return text("HOST", "http://localhost:8080").rstrip("/") if flag("DOWNLOAD") else ""


def check_algo(algo: int) -> None:
    """Raises ArgumentError unless algo is one of nyacomp's values, which have no effect here."""
    if algo not in (0, 1, 2):
        raise ArgumentError(f"overwire: algo: expected 0, 1 or 2, got {algo!r}")


def check() -> list[str]:
    """Warns about every variable with an invalid value. Returns the warnings."""
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

"""tensorizer._wide_pipes: pipes that hold as much as the system lets them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
from pathlib import Path

F_SETPIPE_SZ = 1031

#: For systems where only new pipes can be widened; here it does nothing.
widen_new_pipes = contextlib.nullcontext


@functools.cache
def get_max_pipe_size() -> int:
    """The most bytes that a pipe may hold."""
    try:
        return int(Path("/proc/sys/fs/pipe-max-size").read_text())
    except (OSError, ValueError):
        return 1 << 20


def widen_pipe(fileno: int, max_size: int | None = None) -> None:
    """Has a pipe hold as much as it may, and max_size at most; what does not work
    is logged."""
    size = min(get_max_pipe_size(), max_size or get_max_pipe_size())
    try:
        fcntl.fcntl(fileno, F_SETPIPE_SZ, size)
    except OSError as error:
        logging.getLogger(__name__).warning("a pipe does not hold %d bytes: %s", size, error.strerror)

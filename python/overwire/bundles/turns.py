"""Locks a bundle for writing, across all processes that can reach its folder.

A writer locks a hidden file in the folder, and removes it at the end. The system releases the lock when the process
ends, so the file of a killed writer does not block others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

from .._order import Saver
from .._undo import after_error
from ..errors import ArgumentError
from ..files import lock_path


class Turn:
    """A lock that a thread of this process holds or waits for. saver: the background save that holds the lock after the
    thread has passed it on."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._file: tuple[int, int] | None = None  # device and inode of the lock file
        self.saver: Saver | None = None

    def claim_file(self, number: int, path: str) -> None:
        """Notes the file that is locked next. Raises ArgumentError if this thread already holds its lock or waits for
        it."""
        state = os.fstat(number)
        self._file = None
        if any(turn._is_own(state.st_dev, state.st_ino) for turn in list(_taken)):
            text = "a signal handler or callback saves a bundle while it interrupts a save of this bundle"
            raise ArgumentError(f"overwire: {path}: {text}")
        self._file = state.st_dev, state.st_ino

    def _is_own(self, device: int, inode: int) -> bool:
        owner = self._thread if self.saver is None else self.saver._thread
        return self._file == (device, inode) and owner == threading.get_ident()


_taken: list[Turn] = []


@contextlib.contextmanager
def turn_of(path: str) -> Iterator[Turn]:
    """Holds the lock of a path inside the context. Waits for other threads and processes that hold it. Raises OSError,
    and ArgumentError if this thread already holds the lock, because it would wait for itself.

    If the file system has no locks, nothing else may write at the same time; see `lock_file`.
    """
    _taken.append(turn := Turn())
    with after_error(_taken.remove, turn):
        number = lock_path(path, 0o666, fcntl.LOCK_EX, lambda number: turn.claim_file(number, path))
    try:
        yield turn
    finally:
        with contextlib.suppress(OSError):  # another process may have removed it
            os.unlink(path)
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_UN)  # closing is not enough if a forked child also has the file open
        _taken.remove(turn)
        os.close(number)

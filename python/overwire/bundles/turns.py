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
from ..files import lock_file


class Turn:
    """A lock that a thread of this process holds or waits for. saver: the background save to which the thread has
    passed it."""

    def __init__(self, device: int, inode: int) -> None:
        self._file, self._thread = (device, inode), threading.get_ident()
        self.saver: Saver | None = None

    def is_own(self, device: int, inode: int) -> bool:
        """Returns whether this is the lock of that file and this thread holds it or waits for it."""
        owner = self._thread if self.saver is None else self.saver._thread
        return self._file == (device, inode) and owner == threading.get_ident()


_taken: list[Turn] = []


@contextlib.contextmanager
def turn_of(path: str) -> Iterator[Turn]:
    """Holds the lock of a path inside the context. Waits for other threads and processes that hold it. Raises OSError,
    and ArgumentError if this thread already holds the lock, because it would wait for itself.

    If the file system has no locks, nothing else may write at the same time; see `lock_file`.
    """
    number, turn = _lock_file(path)
    try:
        yield turn
    finally:
        with contextlib.suppress(OSError):  # another process may have removed it
            os.unlink(path)
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_UN)  # closing is not enough if a forked child also has the file open
        _taken.remove(turn)
        os.close(number)


def _lock_file(path: str) -> tuple[int, Turn]:
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with after_error(os.close, number):
            turn = _note_owner(number, path)
            with after_error(_taken.remove, turn):
                lock_file(number, path, fcntl.LOCK_EX)
                if _is_there(number, path):
                    return number, turn
            _taken.remove(turn)
        os.close(number)  # the previous writer has removed the file


def _note_owner(number: int, path: str) -> Turn:
    state = os.fstat(number)
    if any(turn.is_own(state.st_dev, state.st_ino) for turn in list(_taken)):
        raise ArgumentError(
            f"overwire: {path}: a signal handler or callback saves a bundle while it interrupts a save of this bundle"
        )
    _taken.append(turn := Turn(state.st_dev, state.st_ino))
    return turn


def _is_there(number: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(number), there)

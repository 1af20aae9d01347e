"""Makes writers of one bundle take turns, in all processes that can reach its folder.

A writer locks a hidden file in the folder and removes it at the end. A lock ends
with its process, so a killed writer's file does not block others.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

from .._order import Saver
from ..errors import ArgumentError
from ..files import lock_file


class Turn:
    """A lock file that a thread of this process has, or waits for. `saver` is the background save
    that has taken it over from the thread."""

    def __init__(self, device: int, inode: int) -> None:
        self._file, self._thread = (device, inode), threading.get_ident()
        self.saver: Saver | None = None

    def is_own(self, device: int, inode: int) -> bool:
        """Whether it is the lock of that file, and this thread would wait for itself."""
        owner = self._thread if self.saver is None else self.saver._thread
        return self._file == (device, inode) and owner == threading.get_ident()


_taken: list[Turn] = []


@contextlib.contextmanager
def turn_of(path: str) -> Iterator[Turn]:
    """Waits until no one else is in a `turn_of` with the same path. Raises OSError, and
    ArgumentError if this thread itself is in one, because it would wait for itself.

    If the file system has no locks, only the caller may write: see `lock_file`.
    """
    number, turn = _lock_file(path)
    try:
        yield turn
    finally:
        with contextlib.suppress(OSError):  # another process has removed it
            os.unlink(path)
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_UN)  # a forked child may also have the file open
        _taken.remove(turn)
        os.close(number)


def _lock_file(path: str) -> tuple[int, Turn]:
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            turn = _note_owner(number, path)
        except BaseException:
            os.close(number)
            raise
        try:
            lock_file(number, path, fcntl.LOCK_EX)
            if _is_there(number, path):
                return number, turn
        except BaseException:
            _taken.remove(turn)
            os.close(number)
            raise
        _taken.remove(turn)
        os.close(number)  # the previous writer has removed it


def _note_owner(number: int, path: str) -> Turn:
    state = os.fstat(number)
    if any(turn.is_own(state.st_dev, state.st_ino) for turn in list(_taken)):
        raise ArgumentError(
            f"overwire: {path}: a signal handler, or a callback, saves the bundle whose save it interrupts"
        )
    _taken.append(turn := Turn(state.st_dev, state.st_ino))
    return turn


def _is_there(number: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(number), there)

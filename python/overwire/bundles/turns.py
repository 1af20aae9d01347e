"""Writers of one bundle take turns, in all processes that reach its folder.

A writer locks a hidden file in the folder and removes it when it is done. A lock ends
with its process, so that a file which a killed writer has left is in no one's way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

from ..errors import ArgumentError
from ..files import lock_file

# Lock files that threads of this process have, or wait for: device, inode, and the thread.
_taken: set[tuple[int, int, int]] = set()


@contextlib.contextmanager
def turn_of(path: str) -> Iterator[None]:
    """Waits until no one else is in a `turn_of` the same path. Raises OSError, and
    ArgumentError where the thread itself is in one: it would wait for itself.

    Where there are no locks, the caller alone must write: see `lock_file`.
    """
    number, identity = _lock_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # removed by hand
            os.unlink(path)
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_UN)  # a child of fork may have the file open, too
        _taken.discard(identity)
        os.close(number)


def _lock_file(path: str) -> tuple[int, tuple[int, int, int]]:
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            identity = _note_owner(number, path)
        except BaseException:
            os.close(number)
            raise
        try:
            lock_file(number, path, fcntl.LOCK_EX)
            if _is_there(number, path):
                return number, identity
        except BaseException:
            _taken.discard(identity)
            os.close(number)
            raise
        _taken.discard(identity)
        os.close(number)  # the writer before has removed it


def _note_owner(number: int, path: str) -> tuple[int, int, int]:
    state = os.fstat(number)
    identity = state.st_dev, state.st_ino, threading.get_ident()
    if identity in _taken:
        raise ArgumentError(
            f"overwire: {path}: a signal handler, or a callback, saves the bundle whose save it interrupts"
        )
    _taken.add(identity)
    return identity


def _is_there(number: int, path: str) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(number), there)

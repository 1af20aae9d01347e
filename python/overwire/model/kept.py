"""Keeps a local file open between reads, because libraries open a file for its metadata first, and again for its
tensors."""

from __future__ import annotations

import errno
import os
import stat
import weakref

from .._locks import new_lock
from ..paths import local
from .opened import Model


class Kept:
    """An open file that functions accept as a source. It is closed when its last
    model is gone and `keep` no longer has it."""

    has_bytes = False

    def __init__(self, path: str) -> None:
        self._model = Model(path)
        sources = self._model.info()
        #: Whether it is an overwire container.
        self.compressed = any(part["overwire"] for part in sources)
        #: Whether it is only this file. An index.json names others.
        self.alone = [part["uri"] for part in sources] == [path]

    def shared_model(self) -> Model:
        """Returns the open model."""
        return self._model


_State = tuple[int, int, int, int, int]
_lock = new_lock()
_open: weakref.WeakValueDictionary[tuple[str, _State], Kept] = weakref.WeakValueDictionary()
_last: Kept | None = None  # stays open between one reader and the next


def keep(path: str | os.PathLike[str]) -> Kept:
    """Returns the open file if it has not changed since, else opens it. Raises OSError
    if it is not a regular file, and errors of opening."""
    global _last
    name = local(path)
    now = os.stat(name)
    if not stat.S_ISREG(now.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", name)
    # While it is open, no other file can get its inode number.
    state = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
    with _lock:
        model = _open.get((name, state))
    if model is None:
        model = Kept(name)
        if not model.alone:
            return model
    with _lock:
        _last = _open.setdefault((name, state), model)
        return _last


def forget() -> None:
    """Closes the last file."""
    global _last
    with _lock:
        _last = None

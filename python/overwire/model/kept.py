"""Keeps a local file open between reads, because libraries open a file first for its metadata and then for its
tensors."""

from __future__ import annotations

import errno
import os
import stat
import weakref

from .._locks import new_lock
from ..paths import local
from .opened import Model


class KeptFile:
    """An open file that can be passed as a source. The file is closed when no model uses it and another file was
    opened."""

    has_bytes = False

    def __init__(self, path: str) -> None:
        self._model = Model(path)
        sources = self._model.info()
        #: Whether the file is an overwire container.
        self.compressed = any(part["overwire"] for part in sources)
        #: Whether this file is the whole model. An index.json may name several files.
        self.alone = [part["uri"] for part in sources] == [path]

    def shared_model(self) -> Model:
        """Returns the open model."""
        return self._model

    @classmethod
    def open_file(cls, path: str | os.PathLike[str]) -> KeptFile:
        """Opens a local file, or returns the file if it is already open and unchanged. Raises OSError if the path is
        not a regular file, and the errors of opening a model."""
        global _last
        name = local(path)
        now = os.stat(name)
        if not stat.S_ISREG(now.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        # The inode number identifies the file, because no other file can get the number while this one is open.
        state = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        with _lock:
            model = _open.get((name, state))
        if model is None:
            model = cls(name)
            if not model.alone:
                return model
        with _lock:
            _last = _open.setdefault((name, state), model)
            return _last

    @staticmethod
    def forget_last() -> None:
        """Closes the file that `open_file` returned last, unless a model uses it."""
        global _last
        with _lock:
            _last = None


_State = tuple[int, int, int, int, int]
_lock = new_lock()
_open: weakref.WeakValueDictionary[tuple[str, _State], KeptFile] = weakref.WeakValueDictionary()
_last: KeptFile | None = None  # stays open for the next reader

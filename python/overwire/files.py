"""Opens and reads regular files, and refuses pipes, sockets and devices.

Opening a pipe or a device can block forever. Files are therefore opened with O_NONBLOCK and checked by descriptor, so
nothing can replace the file between check and use. All code that opens a file by name uses this module or the engine.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

from ._undo import after_error
from .errors import (
    ArgumentError,
    FormatError,
    IOFailure,
    NotSupportedError,
    OutOfMemoryError,
    OverwireError,
    error_of_system,
)

# Bytes per read. A read of this size is short, and Ctrl-C is handled between reads.
_STEP = 8 << 20


def regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY | os.O_CLOEXEC) -> int:
    """Opens a regular file for reading and returns its descriptor. Can be the `opener` of `open`.

    flags: as for `os.open`. Raises ArgumentError if the file is not a regular file, and the errors of `os.open`.
    """
    try:
        number = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket, or a device that does not exist
            raise
        raise _refuse_special(path) from None
    with after_error(os.close, number):
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise _refuse_special(path)
    return number


def _refuse_special(path: str | os.PathLike[str]) -> ArgumentError:
    name = os.fsdecode(path)
    return ArgumentError(f"overwire: open {name}: not a regular file", source=name)


# Values of errno if the file system or a sandbox does not support locks. EACCES is not included: some file servers
# return it if another process has the lock.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


def lock_file(number: int, path: str, kind: int) -> None:
    """Locks an open file with `fcntl.flock`. If locks are not supported, logs a warning and continues without a
    lock."""
    import fcntl

    try:
        fcntl.flock(number, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        import logging

        text = "overwire: %s: files cannot be locked here (%s): let one process write at a time"
        logging.getLogger("overwire").warning(text, path, error.strerror)


def lock_path(path: str, mode: int, kind: int, claim: Callable[[int], None] = lambda number: None) -> int:
    """Creates a lock file if necessary, locks it, and returns its descriptor. The holder of the lock may remove the
    file before it releases the lock. Links are refused. mode: the mode of a new file. kind: as for `fcntl.flock`, with
    the same errors. claim: a function that is called with the descriptor before the file is locked."""
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with after_error(os.close, number):
            claim(number)
            lock_file(number, path, kind)
            with contextlib.suppress(FileNotFoundError):  # the last holder of the lock has just removed the file
                if os.path.samestat(os.fstat(number), os.lstat(path)):
                    return number
        os.close(number)


def state_of_file(place: Any) -> tuple[int, ...] | None:
    """Returns the identity of a local file, given by path or descriptor, or None if there is no such file. The
    identity changes if the file is replaced or written."""
    try:
        state = os.stat(place)
    except (OSError, TypeError, ValueError):
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


class AnonymousMemory:
    """A memory file that is closed when the last reference is dropped, without the warning that file objects give."""

    def __init__(self) -> None:
        self.number = os.memfd_create("overwire")

    def __del__(self) -> None:
        if hasattr(self, "number"):  # the attribute is missing if memfd_create failed
            os.close(self.number)


def number_of(file: Any) -> int | None:
    """Returns the descriptor of an open file, or None if the file object may change the descriptor's bytes: the
    `fileno` of some file objects belongs to compressed or encrypted data."""
    plain = file.file if type(file).__module__ == "tempfile" and hasattr(file, "file") else file
    is_buffered = isinstance(plain, (io.BufferedReader, io.BufferedWriter, io.BufferedRandom))
    raw = getattr(plain, "raw", None) if is_buffered else plain
    return None if type(raw) is not io.FileIO or raw.closed else raw.fileno()


def read_file(path: str, limit: int | None = None, name: str | None = None) -> bytes:
    """Reads a whole regular file.

    limit: the maximum size in bytes. A larger file raises FormatError, and is not read if its size is known. None means
    the machine's memory; a larger file then raises OutOfMemoryError.
    name: the file's name in errors; by default its path.

    Raises NotFoundError, AccessError, FormatError for a folder, ArgumentError if it is not a regular file, IOFailure.
    """
    name = path if name is None else name
    try:
        with open(path, "rb", buffering=0, opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if limit is None else limit
            content = io.BytesIO()
            # Reads to the end of the file instead of up to its size, because files in /proc have size 0.
            while max(size, content.tell()) <= most:
                block = file.read(min(_STEP, max(size, content.tell()) - content.tell() + (64 << 10)))
                if block is None:
                    why = "it has no data at present, and reading it could block forever"
                    raise IOFailure(f"overwire: read {name}: {why}", source=name)
                if not block:
                    return content.getvalue()
                content.write(block)
            size = max(size, content.tell())
    except IsADirectoryError as error:
        raise FormatError(f"overwire: open {name}: it is a folder", source=name) from error
    except OverwireError:
        raise
    except OSError as error:
        raise error_of_system(error, "read", name) from error
    except MemoryError as error:
        text = f"overwire: read {name}: {size} bytes do not fit into memory"
        raise OutOfMemoryError(text, source=name, asked=size) from error
    if limit is None:
        text = f"overwire: read {name}: its {size} bytes exceed this machine's memory of {most} bytes"
        raise OutOfMemoryError(text, source=name, asked=size, total=most)
    raise FormatError(f"overwire: read {name}: larger than the limit of {limit} bytes", source=name)


#: Name endings of torch.save files, and of all supported files of other libraries.
TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
FOREIGN_ENDINGS = (*TORCH_ENDINGS, ".nemo", ".npz", ".npy")

# The number of folder levels below a model's folder that are searched.
_DEPTH = 8


def folders_of(path: str, depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    """Yields a folder and all folders below it, each with its relative path. Skips hidden folders and links.
    Raises NotSupportedError if folders are nested more than `depth` levels deep."""
    yield path, ""
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            if not depth:
                text = f"this folder is {_DEPTH + 1} levels below the model's folder; at most {_DEPTH} are searched"
                raise NotSupportedError(f"overwire: open {entry.path}: {text}", source=entry.path)
            for folder, below in folders_of(entry.path, depth - 1):
                yield folder, os.path.join(entry.name, below)


def may_be_foreign(path: str, is_tree: bool = True) -> bool:
    """Returns whether a local path is named like a supported file of another library, or is a folder with such files.
    is_tree: whether to search subfolders. Opens no file. Raises an error for folders that cannot be listed."""
    if os.path.isfile(path):
        return path.endswith(FOREIGN_ENDINGS)
    if not os.path.isdir(path):
        return False
    try:
        lists = [os.listdir(folder) for folder, _ in (folders_of(path) if is_tree else [(path, "")])]
    except NotSupportedError:
        return False  # opening it reports why
    except OSError as error:
        raise error_of_system(error, "open", path) from error
    if any(name.endswith((".distcp", ".metadata")) or name.startswith("shard-") for names in lists for name in names):
        return True
    own = [names for names in lists if not has_weights(names)]
    return not has_weights(lists[0]) and any(name.endswith(TORCH_ENDINGS) for names in own for name in names)


def has_weights(names: list[str]) -> bool:
    """Returns whether any name is that of a safetensors file. Hidden files do not count, because the engine ignores
    them."""
    return any(name.endswith(".safetensors") and not name.startswith(".") for name in names)

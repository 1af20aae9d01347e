"""Opens and reads regular files, and nothing that waits for a writer or has no end.

A pipe, a socket or a device under a file's name is refused at once: the file is
opened without waiting, and looked at by its descriptor, so that nothing can take
its place in between. Whatever reads a file by a name that it was given, or that it
found in another file, reads it by this module or through the engine.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

from ._tables import FILE_KINDS
from .errors import (
    ArgumentError,
    FormatError,
    IOFailure,
    NotSupportedError,
    OutOfMemoryError,
    OverwireError,
    error_of_system,
)

# Bytes read at once: a moment, between which Ctrl-C is heard.
_STEP = 8 << 20


def regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY | os.O_CLOEXEC) -> int:
    """A descriptor of a regular file; `opener=regular` makes `open` take no other.

    flags: those of `os.open`, for reading. Raises ArgumentError for what is no regular
    file, and what `os.open` raises.
    """
    try:
        number = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket, or a device that is not there
            raise
        raise _refuse_special(path) from None
    try:
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise _refuse_special(path)
    except BaseException:
        os.close(number)
        raise
    return number


def _refuse_special(path: str | os.PathLike[str]) -> ArgumentError:
    name = os.fsdecode(path)
    return ArgumentError(f"overwire: open {name}: not a regular file", source=name)


# What the system says where files cannot be locked: by their file system, or by a sandbox. Not EACCES, by which some
# servers say that another has the lock.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


def lock_file(number: int, path: str, kind: int) -> None:
    """`fcntl.flock`; where there are no locks, one line in the log: there the caller alone must write."""
    import fcntl

    try:
        fcntl.flock(number, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        import logging

        text = "overwire: %s: files cannot be locked here (%s): let one process write at a time"
        logging.getLogger("overwire").warning(text, path, error.strerror)


def state_of_file(place: Any) -> tuple[int, ...] | None:
    """What tells a local file, by its path or descriptor, from one that has taken its name since, or from what it was
    before a write; None of what is no such file."""
    try:
        state = os.stat(place)
    except (OSError, TypeError, ValueError):
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


class AnonymousMemory:
    """A memory file that closes with its last holder; an open file would warn that no one closed it."""

    def __init__(self) -> None:
        self.number = os.memfd_create("overwire")

    def __del__(self) -> None:
        if hasattr(self, "number"):  # there may have been no descriptor left
            os.close(self.number)


def number_of(file: Any) -> int | None:
    """The descriptor of an open file that reads its very bytes. None for others,
    whatever their `fileno` says: it may be that of the bytes that they decompress
    or decrypt."""
    plain = file.file if type(file).__module__ == "tempfile" and hasattr(file, "file") else file
    raw = (
        getattr(plain, "raw", None)
        if isinstance(plain, (io.BufferedReader, io.BufferedWriter, io.BufferedRandom))
        else plain
    )
    if type(raw) is not io.FileIO or raw.closed:
        return None
    return raw.fileno()


def read_file(path: str, limit: int | None = None, name: str | None = None) -> bytes:
    """The whole content of a regular file.

    limit: the most bytes that are read; FormatError for a file that has more, before
        anything is read where its size says so. None: what the machine's memory holds,
        OutOfMemoryError above that.
    name: what errors call it; None: its path.

    Raises NotFoundError, AccessError, FormatError for a folder, ArgumentError for what is
    no regular file, IOFailure.
    """
    name = path if name is None else name
    try:
        with open(path, "rb", buffering=0, opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if limit is None else limit
            content = io.BytesIO()
            # To the end, whatever the size: that of files in /proc is 0.
            while max(size, content.tell()) <= most:
                block = file.read(min(_STEP, max(size, content.tell()) - content.tell() + (64 << 10)))
                if block is None:
                    raise IOFailure(
                        f"overwire: read {name}: it has nothing to read now, and may never have", source=name
                    )
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
        raise OutOfMemoryError(
            f"overwire: read {name}: {size} bytes do not fit into memory", source=name, asked=size
        ) from error
    if limit is None:
        text = f"overwire: read {name}: {size} bytes are more than the {most} of this machine's memory"
        raise OutOfMemoryError(text, source=name, asked=size, total=most)
    raise FormatError(f"overwire: read {name}: more than {limit} bytes", source=name)


class FileKind(NamedTuple):
    """A row of the engine's table of kinds of files. foreign: a folder of other weights may hold it."""

    what: str
    do: str
    foreign: bool


def kind_of_file(path: str, head: bytes) -> FileKind | None:
    """The kind of the file that begins so, with HEAD_BYTES where it has them; None for no kind that is known."""
    name = os.path.basename(path)
    for offset, magics, globs, what, do, foreign in FILE_KINDS:
        is_named = not globs or any(fnmatch.fnmatchcase(name, glob) for glob in globs)
        if is_named and (not magics or head[offset:].startswith(magics)):
            return FileKind(what, do, foreign)
    return None


#: How the names of what torch.save writes end, and of all files of other libraries that are read.
TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
FOREIGN_ENDINGS = (*TORCH_ENDINGS, ".nemo", ".npz", ".npy")

# How far below a model's folder others are looked for.
_DEPTH = 8


def folders_of(path: str, depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    """A folder and those below it, without hidden ones and links, each with its path from it on. NotSupportedError
    for folders that lie deeper than they are followed."""
    yield path, ""
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            if not depth:
                text = f"this folder lies {_DEPTH + 1} below the model's, and at most {_DEPTH} are followed"
                raise NotSupportedError(f"overwire: open {entry.path}: {text}", source=entry.path)
            for folder, below in folders_of(entry.path, depth - 1):
                yield folder, os.path.join(entry.name, below)


def may_be_foreign(path: str, is_tree: bool = True) -> bool:
    """Whether a local path has the name of a file of another library that is read, or is a folder with such
    names, in it or, of a tree, below it. Opens none of them."""
    if os.path.isfile(path):
        return path.endswith(FOREIGN_ENDINGS)
    if not os.path.isdir(path):
        return False
    try:
        names = [
            name for folder, _ in (folders_of(path) if is_tree else [(path, "")]) for name in os.listdir(folder)
        ]
    except (OSError, NotSupportedError):
        return False  # what reads it reports why
    if any(name.endswith((".distcp", ".metadata")) or name.startswith("shard-") for name in names):
        return True
    return any(name.endswith(TORCH_ENDINGS) for name in names) and not has_weights(names)


def has_weights(names: list[str]) -> bool:
    """Whether some of the names are those of safetensors files."""
    return any(name.endswith(".safetensors") for name in names)

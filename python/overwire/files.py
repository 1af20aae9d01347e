"""Opens and reads regular files, and refuses pipes, sockets and devices.

A pipe, socket or device under a file's name is refused at once instead of waited for: the
file is opened without waiting and checked by its descriptor, so that nothing can replace it
in between. All code that reads a file by a name, given or found in another file, uses this
module or the engine.
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

# Bytes per read. A read of this size takes a moment, and Ctrl-C is handled between reads.
_STEP = 8 << 20


def regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY | os.O_CLOEXEC) -> int:
    """Opens a regular file and returns its descriptor. With `opener=regular`, `open` takes only such files.

    flags: as for `os.open`, for reading. Raises ArgumentError if the file is not a regular
    file, and whatever `os.open` raises.
    """
    try:
        number = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket, or a device that does not exist
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


# The errors of the system if files cannot be locked, because of the file system or a sandbox. EACCES is not among
# them: some servers use it to say that someone else has the lock.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM)


def lock_file(number: int, path: str, kind: int) -> None:
    """Runs `fcntl.flock`. If locks are not available it logs one line; then the caller must be the only writer."""
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
    """The identity of a local file, given by path or descriptor. It changes if another file takes the name or if
    the file is written. None if it is not such a file."""
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
    """The descriptor of an open file that reads its bytes unchanged. None for other files, whatever
    their `fileno` says: it may belong to the compressed or encrypted bytes underneath."""
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

    limit: the most bytes to read. A larger file is a FormatError, before anything is read if
        its size already shows it. None: as much as the machine's memory holds, and
        OutOfMemoryError above that.
    name: what errors call it; None: its path.

    Raises NotFoundError, AccessError, FormatError for a folder, ArgumentError if it is not a
    regular file, IOFailure.
    """
    name = path if name is None else name
    try:
        with open(path, "rb", buffering=0, opener=regular) as file:
            size = os.fstat(file.fileno()).st_size
            most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if limit is None else limit
            content = io.BytesIO()
            # Read to the end whatever the size says: files in /proc have size 0.
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
    """A row of the engine's table of file kinds. foreign: a folder of other weights may hold such a file."""

    what: str
    do: str
    foreign: bool


def kind_of_file(path: str, head: bytes) -> FileKind | None:
    """The kind of a file from its name and first bytes (HEAD_BYTES of them, if it has as many); None if unknown."""
    name = os.path.basename(path)
    for offset, magics, globs, what, do, foreign in FILE_KINDS:
        is_named = not globs or any(fnmatch.fnmatchcase(name, glob) for glob in globs)
        if is_named and (not magics or head[offset:].startswith(magics)):
            return FileKind(what, do, foreign)
    return None


#: Endings of torch.save file names, and of all files of other libraries that are read.
TORCH_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
FOREIGN_ENDINGS = (*TORCH_ENDINGS, ".nemo", ".npz", ".npy")

# How many levels below a model's folder are searched.
_DEPTH = 8


def folders_of(path: str, depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
    """Yields a folder and the folders in it, except hidden ones and links, each with its relative path.
    NotSupportedError if folders are nested deeper than the search goes."""
    yield path, ""
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            if not depth:
                text = f"this folder is {_DEPTH + 1} levels below the model's folder; at most {_DEPTH} are searched"
                raise NotSupportedError(f"overwire: open {entry.path}: {text}", source=entry.path)
            for folder, below in folders_of(entry.path, depth - 1):
                yield folder, os.path.join(entry.name, below)


def may_be_foreign(path: str, is_tree: bool = True) -> bool:
    """Whether a local path has the name of a file of another library that is read, or is a folder with such names.
    is_tree: names in its subfolders count as well. Opens no file. Raises for folders that cannot be listed."""
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
    """Whether some of the names are those of safetensors files; the engine opens no hidden ones."""
    return any(name.endswith(".safetensors") and not name.startswith(".") for name in names)

"""What a user calls a model (a path, a list, a folder, an open file), in the
engine's words: a list of URIs. Parsing and opening is the engine's."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterable
from typing import Any, Union

from .errors import ArgumentError
from .files import read_file
from .storage import is_remote

__all__ = ["SourceLike", "is_file", "local", "number_of", "path_of", "read_bytes", "resolve"]

#: A path or URI of a file, a folder or an index.json; several of them; or a
#: binary file open for reading, which is read from where it stands, or, where that
#: is its end, from its beginning.
SourceLike = Union[str, "os.PathLike[str]", Iterable[Union[str, "os.PathLike[str]"]], Any]


def local(path: Any) -> str:
    """One path or URI as text; a relative path is made absolute, so that a
    later change of the working directory does not matter.

    What os.fsencode makes of the text is the name that is opened, whatever its
    bytes are. A text that no name has, and a URI that is not UTF-8, are
    ArgumentError."""
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise ArgumentError(f"overwire: path: expected a str or os.PathLike, got {type(path).__name__}") from None
    if not text or "\0" in text:
        raise ArgumentError("overwire: path: it is empty or has a NUL byte")
    try:
        same = os.fsencode(text) == text.encode("utf-8", "surrogateescape")
        if is_remote(text):
            text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"overwire: path: {text!r} is no name of a file, nor a URI: {error.reason}") from None
    if not same:
        raise ArgumentError(f"overwire: path {text!r}: the engine's names are UTF-8, and Python's are not: start it with -X utf8")
    if is_remote(text) or is_file(text):
        return text
    # ".." after a symbolic link is not the name before: the system finds it.
    return os.path.join(os.getcwd(), text) if ".." in text.split("/") else os.path.abspath(text)


def is_file(uri: str) -> bool:
    """Whether a path is written as a file:// URI."""
    return uri[:7].lower() == "file://"


def path_of(uri: str) -> str:
    """The path of a file:// URI: the very bytes that its escapes stand for.
    ArgumentError for another host's, and for a bare ? or #, which some readers
    take for the end of the path and others for a part of the name."""
    from urllib.parse import unquote_to_bytes

    host, slash, rest = uri.partition("://")[2].partition("/")
    path = os.fsdecode(unquote_to_bytes(os.fsencode(slash + rest)))
    if host not in ("", "localhost") or not slash or set(rest) & set("?#") or "\0" in path:
        raise ArgumentError(f"overwire: open {uri}: not the URI of a local file (? is written %3F there, # %23)", source=uri)
    return path


def resolve(source: SourceLike) -> tuple[list[str], Any]:
    """The URIs of a source, and what must stay alive until they are open."""
    if isinstance(source, (str, bytes, os.PathLike)):
        return [local(source)], None
    if hasattr(source, "read"):
        return _open_file(source)
    try:
        uris = [local(part) for part in source]
    except TypeError:
        raise ArgumentError(f"overwire: source: expected a path, a list of paths or an open file, got {type(source).__name__}") from None
    if not uris:
        raise ArgumentError("overwire: source: the list of files is empty")
    return uris, None


def read_bytes(source: str | os.PathLike[str], limit: int | None = None, *, storage_options: Any = None) -> bytes:
    """The bytes of one whole file: a path or a URI.

    For what stands beside models: manifests, indexes, raw tensors.

    limit: the most bytes that are read; a file that has more is refused.
    storage_options: as for `load_file`.
    Raises NotFoundError, AccessError, IOFailure, FormatError above the limit,
    ArgumentError for what is no regular file, OutOfMemoryError for what does not fit
    into memory, NotSupportedError for other schemes.
    """
    uri = local(source)
    from .storage import storage

    if is_remote(uri):
        from .remote import read

        return read(uri, storage_options, (1 << 62) if limit is None else limit)
    storage(storage_options, [uri])  # refused for a local path
    return read_file(path_of(uri) if is_file(uri) else uri, limit, uri)


def number_of(file: Any) -> int | None:
    """The descriptor of an open file that reads its very bytes. None for others,
    whatever their `fileno` says: it may be that of the bytes that they decompress
    or decrypt."""
    plain = file.file if type(file).__module__ == "tempfile" and hasattr(file, "file") else file
    raw = getattr(plain, "raw", None) if isinstance(plain, (io.BufferedReader, io.BufferedWriter, io.BufferedRandom)) else plain
    if type(raw) is not io.FileIO or raw.closed:
        return None
    return raw.fileno()


def _open_file(file: Any) -> tuple[list[str], Any]:
    # What remains of it from where it stands; of one at its end, which was just
    # written, all of it. A file of the disk at either place is opened again by its
    # number, which also finds unlinked ones. Everything else that reads is copied
    # to anonymous memory first.
    if isinstance(file, io.TextIOBase):
        raise ArgumentError("overwire: source: the file is not open in binary mode")
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if file.writable():
            file.flush()
    number = number_of(file)
    if number is not None:
        if stat.S_ISCHR(os.fstat(number).st_mode):
            raise ArgumentError("overwire: source: the file is a device, which has no end")
        with contextlib.suppress(OSError, ValueError):
            size = os.fstat(number).st_size
            if size and file.tell() in (0, size):
                return [f"/proc/self/fd/{number}"], file
    memory = os.fdopen(os.memfd_create("overwire"), "w+b")
    again = False
    while True:
        block = file.read(1 << 20)
        if not block and not memory.tell() and not again:
            with contextlib.suppress(AttributeError, OSError, ValueError):
                file.seek(0)
            again = True
            continue
        if not isinstance(block, (bytes, bytearray, memoryview)):
            memory.close()
            raise ArgumentError("overwire: source: the file is not open in binary mode")
        if not block:
            break
        memory.write(block)
    memory.flush()
    return [f"/proc/self/fd/{memory.fileno()}"], memory

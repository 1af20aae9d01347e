"""What a user calls a model (a path, a list, a folder, an open file), in the
engine's words: a list of URIs. Parsing and opening is the engine's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any, Union

from .errors import AccessError, ArgumentError, FormatError, IOFailure, NotFoundError, NotSupportedError

__all__ = ["SourceLike", "local", "read_bytes", "resolve"]

#: A path or URI of a file, a folder or an index.json; several of them; or a
#: binary file open for reading.
SourceLike = Union[str, "os.PathLike[str]", Iterable[Union[str, "os.PathLike[str]"]], Any]


def local(path: Any) -> str:
    """One path or URI as text; a relative path is made absolute, so that a
    later change of the working directory does not matter."""
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    try:
        text: str = os.fspath(path)
    except TypeError:
        raise ArgumentError(f"overwire: path: expected a str or os.PathLike, got {type(path).__name__}") from None
    if not text or "\0" in text:
        raise ArgumentError("overwire: path: it is empty or has a NUL byte")
    return text if "://" in text else os.path.abspath(text)


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
    NotSupportedError for other schemes.
    """
    uri = local(source)
    from .storage import is_remote, storage

    if is_remote(uri):
        from .remote import read

        return read(uri, storage_options, (1 << 62) if limit is None else limit)
    storage(storage_options, [uri])  # refused for a local path
    scheme, _, rest = uri.partition("://")
    path = uri
    if rest:
        if scheme.lower() != "file":
            raise NotSupportedError(f"overwire: open {uri}: scheme {scheme!r}", source=uri)
        host, slash, rest = rest.partition("/")
        if host not in ("", "localhost"):
            raise ArgumentError(f"overwire: open {uri}: not the URI of a local file")
        from urllib.parse import unquote

        path = slash + unquote(rest)
    try:
        with open(path, "rb") as file:
            found = file.read() if limit is None else file.read(limit + 1)
    except FileNotFoundError as error:
        raise NotFoundError(f"overwire: open {uri}: not found", source=uri) from error
    except IsADirectoryError as error:
        raise FormatError(f"overwire: open {uri}: it is a folder", source=uri) from error
    except PermissionError as error:
        raise AccessError(f"overwire: open {uri}: permission denied", source=uri) from error
    except OSError as error:
        raise IOFailure(f"overwire: read {uri}: {error.strerror}", source=uri) from error
    if limit is not None and len(found) > limit:
        raise FormatError(f"overwire: read {uri}: more than {limit} bytes", source=uri)
    return found


def _open_file(file: Any) -> tuple[list[str], Any]:
    # An open file is opened again by its number, which also finds unlinked
    # ones. What has no number, or has an archive around it, is copied to
    # anonymous memory first.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if file.writable():
            file.flush()
    try:
        number = file.fileno()
        direct = os.fstat(number).st_size > 0 and not hasattr(file, "fileobj")
    except (AttributeError, OSError, ValueError):
        number, direct = -1, False
    if direct:
        return [f"/proc/self/fd/{number}"], file
    memory = os.fdopen(os.memfd_create("overwire"), "w+b")
    while True:
        block = file.read(1 << 20)
        if not isinstance(block, (bytes, bytearray, memoryview)):
            memory.close()
            raise ArgumentError("overwire: source: the file is not open in binary mode")
        if not block:
            break
        memory.write(block)
    memory.flush()
    return [f"/proc/self/fd/{memory.fileno()}"], memory

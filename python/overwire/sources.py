"""What a user calls a model (a path, a list, a folder, an open file), in the
engine's words: a list of URIs. Parsing and opening is the engine's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any, Union

from .errors import ArgumentError

__all__ = ["SourceLike", "local", "resolve"]

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

"""Converts a source that a user passes (a path, a list, a folder, an open file) to URIs that the engine opens."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from ..files import AnonymousMemory, may_be_foreign, number_of
from ..paths import is_remote, local
from .starting import source_error

if TYPE_CHECKING:
    from .._requests import VerifyCopy


def resolve(source: Any) -> tuple[list[str], Any]:
    """Returns the URIs of a source, and an object that must stay alive until the URIs are open."""
    if isinstance(source, (str, bytes, os.PathLike)):
        return [local(source)], None
    if hasattr(source, "read"):
        return _open_file(source)
    try:
        uris = [local(part) for part in source]
    except TypeError:
        raise source_error(source) from None
    if not uris:
        raise ArgumentError("overwire: source: the list of files is empty")
    return uris, None


class Opened:
    """A source that can be opened. uris: the URIs for the engine. names: a name for messages, for each URI. keep: an
    object that must stay alive until the URIs are open. copies: maps the URIs of copies to descriptions of the
    originals."""

    def __init__(self, uris: list[str], names: list[str], keep: Any, copies: dict[str, VerifyCopy]) -> None:
        self.uris, self.names, self.keep, self.copies = uris, names, keep, copies


def resolve_plain(source: Any, is_header: bool = False) -> Opened:
    """Resolves a source for functions that only read a model. Local files and folders of other libraries are converted
    to plain files in memory. is_header: only headers will be read."""
    uris, keep = resolve(source)
    others = [uri for uri in uris if not is_remote(uri) and may_be_foreign(uri, is_tree=False)] if keep is None else []
    if not others:
        return Opened(uris, uris, keep, {})
    from ..foreign.memory import read_foreign

    found = {uri: files for uri in others if (files := read_foreign(uri, is_header))}
    if not found:
        return Opened(uris, uris, keep, {})
    pairs = [(one.uri, one.name) if one else (uri, uri) for uri in uris for one in found.get(uri) or (None,)]
    copies = {one.uri: one.original for files in found.values() for one in files}
    return Opened([uri for uri, _ in pairs], [name for _, name in pairs], found, copies)


def _open_file(file: Any) -> tuple[list[str], Any]:
    # The file is read from its current position to its end. If the position is at the end, for example after writing,
    # it is read from the beginning. A file on disk is opened again through its descriptor, which also works for
    # unlinked files. Other readable objects are first copied to anonymous memory.
    if isinstance(file, io.TextIOBase):
        raise ArgumentError("overwire: source: the file is not open in binary mode")
    with contextlib.suppress(AttributeError, OSError):
        if file.closed or not file.readable():
            raise ArgumentError("overwire: source: the file is closed, or not open for reading")
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if file.writable():
            file.flush()
    if (number := number_of(file)) is not None:
        if stat.S_ISCHR(os.fstat(number).st_mode):
            raise ArgumentError("overwire: source: the file is a character device, which has no end")
        with contextlib.suppress(OSError, ValueError):
            size = os.fstat(number).st_size
            if size and file.tell() in (0, size):
                return [f"/proc/self/fd/{number}"], file
    memory = AnonymousMemory()
    again = False
    with os.fdopen(memory.number, "wb", closefd=False) as copy:
        while True:
            block = file.read(1 << 20)
            if not block and not copy.tell() and not again:
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    file.seek(0)
                again = True
                continue
            if not isinstance(block, (bytes, bytearray, memoryview)):
                raise ArgumentError("overwire: source: the file is not open in binary mode")
            if not block:
                break
            copy.write(block)
    return [f"/proc/self/fd/{memory.number}"], memory

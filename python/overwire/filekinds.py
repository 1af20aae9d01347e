"""Recognises files that are not models, with the engine's table of file kinds."""

from __future__ import annotations

import fnmatch
import os
from typing import NamedTuple

from ._tables import FILE_KINDS


class FileKind(NamedTuple):
    """A row of the engine's table of file kinds. foreign: whether folders with other libraries' weights may have such
    files."""

    what: str
    do: str
    foreign: bool


def kind_of_file(path: str, head: bytes) -> FileKind | None:
    """Determines the kind of a file from its name and its first HEAD_BYTES bytes. Returns None if the kind is
    unknown."""
    name = os.path.basename(path)
    for offset, magics, globs, what, do, foreign in FILE_KINDS:
        is_named = not globs or any(fnmatch.fnmatchcase(name, glob) for glob in globs)
        if is_named and (not magics or head[offset:].startswith(magics)):
            return FileKind(what, do, foreign)
    return None

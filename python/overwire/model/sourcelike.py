"""Defines the types of the sources that a user passes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Protocol, Union


class BinaryFile(Protocol):
    """A file that is open for reading in binary mode."""

    def read(self, size: int = ..., /) -> bytes: ...


class Shared(Protocol):
    """A model that is already open, such as a `Pinned`."""

    def shared_model(self) -> Any: ...


#: A path or URI of a file, a folder or an index.json; a list of these; a binary file that is open for reading; or a
#: `Pinned` model. An open file is read from its current position, or from the beginning if it is at its end.
SourceLike = Union[str, "os.PathLike[str]", Iterable[Union[str, "os.PathLike[str]"]], BinaryFile, Shared]

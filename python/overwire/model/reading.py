"""Reads small files into memory: manifests, indexes, and pickles without tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from .. import _verbs
from ..errors import ArgumentError
from ..files import read_file
from ..jobs import Job, heed
from ..paths import is_file, is_remote, local, path_of
from .storage import storage


def read_bytes(source: str | os.PathLike[str], limit: int | None = None, *, storage_options: Any = None) -> bytes:
    """Returns all bytes of a file.

    The function is meant for the small files of a model: manifests, indexes, raw tensors.

    source: a path or a URI.
    limit: the most bytes to read. A larger file is refused.
    storage_options: as for `load_file`.
    Raises NotFoundError, AccessError, IOFailure, FormatError if the file is larger than the limit, ArgumentError if the
    file is not regular, OutOfMemoryError if it does not fit into memory, and NotSupportedError for other schemes.
    """
    uri = local(source)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
        raise ArgumentError(f"overwire: limit {limit!r}: expected a number of bytes, or None")
    if is_remote(uri):
        return read_uri(uri, storage_options, (1 << 62) if limit is None else limit)
    storage(storage_options, [uri])  # refuses options for a local path
    return read_file(path_of(uri) if is_file(uri) else uri, limit, uri)


def read_uri(uri: str, options: Mapping[str, object] | None, most: int) -> bytes:
    """Returns all bytes of a URI. Raises FormatError if there are more than `most`."""
    try:
        with os.fdopen(os.memfd_create("overwire"), "w+b") as memory:
            fd, spec = memory.fileno(), storage(options, [uri])
            with Job(_verbs.fetch({"uris": [uri], "fd": fd, "most": most, "storage": spec}), "fetch") as job:
                job.wait()
            memory.seek(0)
            return memory.read()
    finally:
        heed([uri])

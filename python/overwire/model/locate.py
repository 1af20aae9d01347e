"""Finds the files to preload for a path or URI: a bundle's containers, or the path itself."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from ..errors import FormatError, NotFoundError
from ..jobs import shown
from ..paths import is_remote
from . import layout
from .opened import Model
from .reading import read_uri

# The largest manifest that is read, in bytes.
_MANIFEST = 1 << 24
_PICKLE_ENDINGS = (".pkl", ".pickle", ".pth", ".pt")


def uris_of(path: str, options: Mapping[str, object] | None) -> list[str]:
    """Returns what a preload of a path or URI reads. For a remote manifest these are the containers that it lists, and
    for a remote pickle its container. Local paths: see `layout.preload_uris`."""
    if not is_remote(path):
        return layout.preload_uris(path)
    name = path.partition("?")[0].partition("#")[0]
    if name.endswith(".csv"):
        try:
            text = read_uri(path, options, _MANIFEST).decode()
        except UnicodeDecodeError as error:
            why = f"overwire: open {shown(path)}: not a meta.csv, because it is not UTF-8 text"
            raise FormatError(why, source=shown(path)) from error
        return layout.remote_containers_in(path, text)
    if name.endswith(_PICKLE_ENDINGS):
        candidates = layout.remote_containers_of(path, layout.FOLDERS[::-1])
        for candidate in candidates:
            with contextlib.suppress(NotFoundError):
                Model(candidate, storage_options=options, probe=True).close()
                return [candidate]
        return candidates[:1]  # opening it reports that it does not exist
    return [path]

"""Small files and bundles behind URIs."""

from __future__ import annotations

import contextlib
import json
import os

from . import _engine, layout
from .errors import FormatError, NotFoundError
from .jobs import Job
from .models import Model
from .storage import StorageOptions, is_remote, shown, storage

__all__ = ["read", "uris_of"]

# A manifest, and a pickle without its tensors.
_MANIFEST = 1 << 24
_PICKLE_ENDINGS = (".pkl", ".pickle", ".pth", ".pt")


def read(uri: str, options: StorageOptions | None, most: int) -> bytes:
    """All bytes of a URI; FormatError if there are more than `most`."""
    with os.fdopen(os.memfd_create("overwire"), "w+b") as memory:
        spec = {"uris": [uri], "fd": memory.fileno(), "most": most, **storage(options, [uri])}
        with Job(_engine.fetch_start(json.dumps(spec)), "fetch") as job:
            job.wait()
        memory.seek(0)
        return memory.read()


def uris_of(path: str, options: StorageOptions | None) -> list[str]:
    """`layout.preload_uris`, for URIs too: a manifest is read, and a pickle
    stands for its container."""
    if not is_remote(path):
        return layout.preload_uris(path)
    name = path.partition("?")[0].partition("#")[0]
    if name.endswith(".csv"):
        try:
            text = read(path, options, _MANIFEST).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"overwire: open {shown(path)}: not a meta.csv", source=shown(path)) from error
        return layout.remote_containers_in(path, text)
    if name.endswith(_PICKLE_ENDINGS):
        candidates = layout.remote_containers_of(path)
        for candidate in candidates:
            with contextlib.suppress(NotFoundError):
                Model(candidate, storage_options=options).close()
                return [candidate]
        return candidates[:1]  # whoever opens it says so
    return [path]

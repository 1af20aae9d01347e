"""Small files written to stores: the pickle and the csv of a bundle at a URI."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence

from . import _engine
from .jobs import Job
from .storage import StorageOptions, storage

__all__ = ["write_bytes"]


def write_bytes(uri: str, data: bytes, options: StorageOptions | None, stale: Sequence[str] = ()) -> None:
    """Replaces one object in one step, and then removes what it makes stale."""
    spec = {"path": uri, "raw": True, "stale": list(stale), **storage(options, [uri])}
    pointer = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    number = _engine.save_start(json.dumps(spec), [("", "U8", (len(data),), pointer, len(data))])
    with Job(number, "save") as job:
        job.wait()

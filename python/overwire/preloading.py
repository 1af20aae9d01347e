"""preload: a load that runs in the engine while Python does other things.

By hand, or at the import of overwire when OVERWIRE_PRELOAD (or nyacomp's
PRELOAD_PATH) names something. The first load of the same path joins it and
takes the tensors over; what nobody takes is freed at exit.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from typing import Any

from . import _engine, layout
from .errors import ArgumentError, DeadlineError, NotSupportedError, OverwireError
from .frames import check_device, frame_for
from .progress import Progress
from .remote import uris_of
from .sources import SourceLike, resolve
from .storage import StorageOptions, shown, storage

__all__ = ["Preload", "find", "preload", "start_from_environment"]

log = logging.getLogger("overwire")

_lock = threading.Lock()
_started = False
# Paths whose preload could not even begin, with the reason: the load of the
# same path says so too.
_failed: dict[str, OverwireError] = {}

# Where each preload goes.
_devices: dict[tuple[str, ...], str] = {}

# The engine's spellings of yes; it warns about what is neither yes nor no.
_YES = frozenset({"1", "true", "yes", "on", "y", "t"})


class Preload:
    """A running preload. Dropping the object does not stop it."""

    def __init__(self, path: str, uris: list[str], device: str, reach: dict[str, Any] | None = None) -> None:
        global _started
        #: What was asked for.
        self.path = path
        #: The files that are read.
        self.uris = uris
        #: Where the tensors go: "cpu" or "cuda:N".
        self.device = device
        self._job = _engine.preload_start(json.dumps({"uris": uris, "device": device, **(reach or {})}))
        with _lock:
            _devices[_key(uris)] = device
        _started = True

    def __repr__(self) -> str:
        return f"Preload({self.path!r})"

    def __del__(self) -> None:
        # The handle alone: the preload goes on. `getattr`: the constructor may
        # have failed.
        job = getattr(self, "_job", None)
        if job is not None:
            _engine.job_free(job)

    def progress(self) -> Progress:
        """How far it is: tensor bytes and tensors, done and total (0 before the
        files are open)."""
        return Progress(*_engine.job_progress(self._job))

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until everything is in memory, at most `timeout` seconds.

        True when it is, False when time was up. Raises the error of the load.
        """
        return _engine.job_wait(self._job, timeout)

    def result(self, timeout: float | None = None) -> None:
        """`wait` that raises DeadlineError instead of returning False."""
        if not self.wait(timeout):
            raise DeadlineError(f"overwire: preload {self.path}: not done in {timeout} s", source=self.path)

    def cancel(self) -> None:
        """Stops it; what has landed is freed, unless a load has taken it over.
        A later load of the path reads it anew."""
        _engine.job_cancel(self._job)


def preload(
    source: SourceLike,
    *,
    device: Any = "cpu",
    storage_options: StorageOptions | None = None,
) -> Preload:
    """Starts to load, in the engine's own threads, without the GIL. Returns at
    once; torch need not be imported.

    source: what `load_file` takes (but no open file), or a bundle: its pickle,
        or its meta.csv. `load_file`, `stream`, `load_model` of the same path,
        and `load_compressed*` of the same bundle, join it.
    device: "cpu" (or "host"): into host memory, with CUDA untouched, for
        programs that fork; a load to a GPU moves the tensors on. "cuda",
        "cuda:1": to that GPU; loads to the same one join it. Bundles go to the
        host only.
    storage_options: as for `load_file`; a load joins with the same options only.

    Errors of the files show in `wait`, and in the load that joins. Raises
    NotFoundError, FormatError, NotSupportedError for a pickle or meta.csv that
    names no container.
    """
    where = _device(device)
    if hasattr(source, "read"):
        raise ArgumentError("overwire: preload: an open file cannot be preloaded; give its path")
    paths, _ = resolve(source)
    uris = [uri for path in paths for uri in uris_of(path, storage_options)]
    with _lock:
        for path in paths:
            _failed.pop(path, None)
    if where != "cpu" and any(path.endswith((".pkl", ".pth", ".csv")) for path in paths):
        raise NotSupportedError(f"overwire: preload {', '.join(map(shown, paths))}: bundles are preloaded to the host only")
    return Preload(", ".join(map(shown, paths)), uris, where, storage(storage_options, uris))


def _device(device: Any) -> str:
    if device == "host":
        return "cpu"
    text = str(device)
    if text == "cuda" and "torch" not in sys.modules:
        return "cuda:0"  # without asking for torch
    if text.startswith("cuda:") and text[5:].isdecimal():
        return text
    return check_device(device, None if text == "cpu" else frame_for("torch"))


def _key(uris: list[str]) -> tuple[str, ...]:
    return tuple(uri if "://" in uri else os.path.realpath(uri) for uri in uris)


def find(uris: list[str], device: str, reach: dict[str, Any]) -> tuple[int, int] | None:
    """Takes over the preload of these files: (model, job), None if there is
    none for this device. Raises what went wrong when it was started."""
    with _lock:
        for uri in uris:
            if uri in _failed:
                raise _failed.pop(uri)
        if not _started or _devices.get(_key(uris), "cpu") not in ("cpu", device):
            return None
    return _engine.preload_find(json.dumps({"uris": uris, **reach}))


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in _YES


def start_from_environment() -> None:
    """What the import of overwire does when a preload variable is set.

    Never raises: a wrong path is a warning here, and an error at the load.
    NO_PRELOAD and LOAD_UNCOMPRESSED (nyacomp's) and OVERWIRE_NO_PRELOAD stop it.
    """
    if any(map(_flag, ("OVERWIRE_NO_PRELOAD", "NO_PRELOAD", "LOAD_UNCOMPRESSED"))):
        return
    name = "OVERWIRE_PRELOAD" if os.environ.get("OVERWIRE_PRELOAD") else "PRELOAD_PATH"
    path = os.environ[name]
    if "://" not in path:
        path = os.path.abspath(path)
    try:
        if "://" not in path and not os.path.exists(path) and not path.endswith(".csv"):
            from .errors import NotFoundError

            raise NotFoundError(f"overwire: open {path}: not found", source=path)
        if "://" not in path and path.endswith(".csv"):
            layout.refuse_urls(path)
        preload(path, device=os.environ.get("OVERWIRE_PRELOAD_DEVICE") or "cpu")
    except OverwireError as error:
        with _lock:
            _failed[path] = error
        log.warning("%s=%s: nothing is preloaded: %s", name, shown(os.environ[name]), error)
    except Exception as error:  # an import must not fail for this
        log.warning("%s=%s: nothing is preloaded: %s", name, shown(os.environ[name]), error)

"""Tracks background saves by the paths they write. Later writes to these paths wait for them.

Each function of `_verbs` that writes a path calls this module before its job starts. Otherwise an
earlier save could end last and replace the files of a later save.
"""

from __future__ import annotations

import os
import re
from _thread import get_ident

from ._locks import new_lock
from .errors import ArgumentError
from .paths import is_file, is_remote, path_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

lock = new_lock()
_savers: list[Saver] = []  # running saves, and failed saves that have not raised their error yet

# The parts of a shard's or index's name that a single file's name does not have.
_SHARD = (
    r"(-ow[0-9a-f]{8})?-\d{1,9}-of-\d{1,9}(?=\.[^/]*$)"
    r"|(?<=\.safetensors)(\.[^./]+)?\.index(\.[^./]+)?\.json$"
)
_DEFAULT_PORT = ":6379"


class Saver:
    """A background save, which is tracked from `claim_paths` to `forget_saver`."""

    def __init__(self, paths: list[str], is_sharded: bool) -> None:
        self._keys = list(dict.fromkeys(key for path in paths for key in _keys_of(path)))
        self._family = _family_of(self._keys[0]) if is_sharded else ""
        self._thread = get_ident()  # the thread that works on the save; 0 if only its job runs
        self._is_publishing = False  # whether that thread runs the save's own code, not a callback

    def wait(self, timeout: float | None = None) -> Any:
        """Waits until the files are in place, and raises the save's error."""
        raise NotImplementedError

    def shown_path(self) -> str:
        """Returns the path for messages, without secrets."""
        raise NotImplementedError

    def claim_paths(self) -> None:
        """Waits for earlier savers of the same paths, then registers this one."""
        while True:
            with lock:
                if (earlier := _saver_of(self._keys)) is None:
                    _savers.append(self)
                    return
            _follow_saver(earlier)

    def forget_saver(self) -> None:
        """Unregisters this saver: its result is known."""
        with lock:
            if self in _savers:
                _savers.remove(self)

    def _writes_at(self, keys: list[str]) -> bool:
        inner = any(own == key or own.startswith(f"{key.rstrip('/')}/") for own in self._keys for key in keys)
        return inner or self._family != "" and self._family in map(_family_of, keys)


def await_saves(request: Mapping[str, Any]) -> None:
    """Waits for background saves to the path or folder that a request writes. Raises the error of a failed save unless
    it was raised before. Does nothing for requests of background saves, which have already claimed their paths."""
    if _savers and request.get("path") and not request.get("background"):
        await_path(request["path"])


def await_path(path: str) -> None:
    """Waits for background saves to one path, like `await_saves`."""
    while _savers:
        with lock:
            earlier = _saver_of(_keys_of(path))
        if earlier is None or earlier._thread == get_ident() and earlier._is_publishing:
            return
        _follow_saver(earlier)


def await_all() -> None:
    """Waits for all background saves. Commands call it, because only the engine knows their paths. Raises the error of
    a failed save unless it was raised before."""
    while _savers:
        with lock:
            earlier = next((one for one in _savers if one._thread != get_ident()), None)
        if earlier is None:
            return
        earlier.wait()


def _saver_of(keys: list[str]) -> Saver | None:
    return next((one for one in _savers if one._writes_at(keys)), None)


def _follow_saver(earlier: Saver) -> None:
    if earlier._thread == get_ident():
        why = "a signal handler or callback saves to the same path as the save that it interrupts: use another path"
        raise ArgumentError(f"overwire: save {earlier.shown_path()}: {why}")
    earlier.wait()


def _keys_of(path: str) -> list[str]:
    # Returns a local path twice: with all links resolved, and with its last element, which may be a link, unresolved.
    if not is_remote(path):
        text = path_of(path) if is_file(path) else path
        folder, name = os.path.split(text.rstrip("/"))
        return list(dict.fromkeys([os.path.realpath(text), os.path.join(os.path.realpath(folder), name)]))
    scheme, _, rest = path.partition("://")
    host, slash, name = rest.partition("/")
    return [f"{scheme.lower()}://{host.lower().removesuffix(_DEFAULT_PORT)}{slash}{name}"]


def _family_of(key: str) -> str:
    return re.sub(_SHARD, "", key)

"""Saves in the background, by the paths that they write: whatever writes there later waits for them.

Each function of `_verbs` that writes a path asks here before its job starts, so that no later
save is lost to an earlier one.
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
_savers: list[Saver] = []  # what runs, or has failed and no one knows

# The names of a set of shards, without what tells them from those of the single file.
_SHARD = re.compile(
    r"(-ow[0-9a-f]{8})?-\d{1,9}-of-\d{1,9}(?=\.[^/]*$)"
    r"|(?<=\.safetensors)(\.[^./]+)?\.index(\.[^./]+)?\.json$"
)
_DEFAULT_PORT = ":6379"


class Saver:
    """A save in the background, from `claim_paths` to `forget_saver`: `wait` returns when its files are there."""

    def __init__(self, paths: list[str], is_sharded: bool) -> None:
        self._keys = list(dict.fromkeys(key for path in paths for key in _keys_of(path)))
        self._family = _family_of(self._keys[0]) if is_sharded else ""
        self._thread = get_ident()  # which works for it; 0: none, its job runs
        self._is_publishing = False  # that thread runs the save's own code, and no one's callback

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for its end, and raises its error."""
        raise NotImplementedError

    def shown_path(self) -> str:
        """Its path, as people may see it."""
        raise NotImplementedError

    def claim_paths(self) -> None:
        """Waits for the savers of the same paths, and is the one of them from now on."""
        while True:
            with lock:
                earlier = _saver_of(self._keys)
                if earlier is None:
                    _savers.append(self)
                    return
            _follow_saver(earlier)

    def forget_saver(self) -> None:
        """Its end is known: no one waits for it any more."""
        with lock:
            if self in _savers:
                _savers.remove(self)

    def _writes_at(self, keys: list[str]) -> bool:
        inner = any(own == key or own.startswith(f"{key.rstrip('/')}/") for own in self._keys for key in keys)
        return inner or self._family != "" and self._family in map(_family_of, keys)


def await_saves(request: Mapping[str, Any]) -> None:
    """Waits for the save in the background of the path, or in the folder, that a request writes.
    Raises that save's error, if it has failed and no one knows it. The request of a save in the background has claimed
    its path already."""
    if _savers and request.get("path") and not request.get("background"):
        await_path(request["path"])


def await_path(path: str) -> None:
    """`await_saves` of a request for a path."""
    while _savers:
        with lock:
            earlier = _saver_of(_keys_of(path))
        if earlier is None or earlier._thread == get_ident() and earlier._is_publishing:
            return
        _follow_saver(earlier)


def await_all() -> None:
    """Waits for all saves in the background, before a command whose paths are not known here. Raises
    the error of one that has failed and that no one knows."""
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
        raise ArgumentError(
            f"overwire: save {earlier.shown_path()}: a signal handler or a callback saves to the path whose save it "
            "interrupts"
        )
    earlier.wait()


def _keys_of(path: str) -> list[str]:
    # The file to which a path leads, and the path itself, because it may become a link or stop being one during a save.
    if not is_remote(path):
        text = path_of(path) if is_file(path) else path
        folder, name = os.path.split(text.rstrip("/"))
        return list(dict.fromkeys([os.path.realpath(text), os.path.join(os.path.realpath(folder), name)]))
    scheme, _, rest = path.partition("://")
    host, slash, name = rest.partition("/")
    return [f"{scheme.lower()}://{host.lower().removesuffix(_DEFAULT_PORT)}{slash}{name}"]


def _family_of(key: str) -> str:
    return _SHARD.sub("", key)

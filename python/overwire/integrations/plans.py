"""Slice plans on disk: what one start found out about a model's loader, for the next.

A file of the folder `OVERWIRE_PLANS` holds one plan, and its name is the plan's key: a
digest of all that the plan depends on. Its bytes:

    b"overwire slice plan 1\\n", SHA-256 of the rest, the length of the JSON as 8 bytes,
    the JSON, and the landings: 8 signed little-endian integers of 64 bits each

The JSON has `key`, `places`, `loaded`, `views`, `zeros` and `reads`; see `Plan`. Folder and file must
belong to this user, and other users must not be able to write them. Whatever is wrong
with a file, it is no plan, and there is one line in the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..plumbing import write_bytes

__all__ = ["Place", "Plan", "Read", "View", "Zero", "folder", "keep", "read"]

_MAGIC = b"overwire slice plan 1\n"
_SUFFIX = ".plan"
_HEAD = len(_MAGIC) + 32 + 8

# The largest plan that is read or written, and how many are kept.
_MOST_BYTES = 1 << 28
_MOST_PLANS = 64

#: Columns of a landing.
WIDTH = 8


class Place(NamedTuple):
    """A parameter or buffer: its name, dtype, shape, stride, offset in its storage and the
    storage's bytes, as it must be; elements: how many of it the plan loads."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int
    elements: int


class View(NamedTuple):
    """A copy that is no landing: a view of a tensor of a file, and of a place, in elements
    from the first of each."""

    file: int
    at: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    place: int
    start: int
    steps: tuple[int, ...]


class Zero(NamedTuple):
    """Elements of a place that are zero before anything is loaded."""

    place: int
    start: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]


class Read(NamedTuple):
    """A tensor of integers whose content the loader went by: the path of its module, its
    attribute there or that of an object there, and the digest of its memory."""

    module: str
    name: str
    inner: str
    digest: str


class Plan(NamedTuple):
    """places: what is loaded into. loaded: what the model said it has loaded, None for
    nothing. landings: blocks of tensors that land dense in a place, flat: file, tensor,
    [lo, hi) of its first two dimensions with hi -1 for all, place, and the element
    of the place at which it begins. views: the other copies. zeros, reads: what the loader did
    beside copying."""

    places: list[Place]
    loaded: list[str] | None
    landings: array[int]
    views: list[View]
    zeros: list[Zero]
    reads: list[Read]


def folder() -> str | None:
    """Where plans are; None if none are kept."""
    chosen = os.environ.get("OVERWIRE_PLANS", "").strip()
    if chosen.lower() in ("off", "0", "no", "false"):
        return None
    if chosen:
        return os.path.abspath(os.path.expanduser(chosen))
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the rules ignore a relative one
        base = os.path.expanduser("~/.cache")
        if not os.path.isabs(base):
            return None
    return os.path.join(base, "overwire", "plans")


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    # A process that can write here says what is loaded where.
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _ours(os.fstat(number), path)
        yield number
    finally:
        os.close(number)


def _ours(found: os.stat_result, path: str) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ValueError(f"{path} belongs to another user, or others may write it")


def read(path: str, key: str, log: Any) -> Plan | None:
    """The plan of a key in a folder; None if there is none that can be used."""
    name = key + _SUFFIX
    try:
        with _opened(path) as at:
            number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=at)
        with open(number, "rb", closefd=True) as file:
            state = os.fstat(number)
            if not stat.S_ISREG(state.st_mode) or not _HEAD <= state.st_size <= _MOST_BYTES:
                raise ValueError("it is not a plan")
            _ours(state, name)
            data = file.read(_MOST_BYTES + 1)
        return _parse(data, key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        log.info("overwire: ignores the plan %s: %s", os.path.join(path, name), error)
        return None


def _parse(data: bytes, key: str) -> Plan:
    if len(data) < _HEAD or not data.startswith(_MAGIC):
        raise ValueError("it is not a plan of this version")
    body = memoryview(data)[len(_MAGIC) + 32 :]
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : len(_MAGIC) + 32]:
        raise ValueError("its checksum does not match")
    size = int.from_bytes(body[:8], "little")
    if size > len(body) - 8 or (len(body) - 8 - size) % (8 * WIDTH):
        raise ValueError("its length is wrong")
    head = json.loads(bytes(body[8 : 8 + size]))
    if not isinstance(head, dict) or head["key"] != key:
        raise ValueError("it is the plan of something else")
    landings = array("q", bytes(body[8 + size :]))
    loaded = head["loaded"]
    if loaded is not None and not (isinstance(loaded, list) and all(isinstance(name, str) for name in loaded)):
        raise ValueError("its names are none")
    kinds = {"places": Place, "views": View, "zeros": Zero, "reads": Read}
    places, views, zeros, reads = (_rows(kind, head[name]) for name, kind in kinds.items())
    return Plan(places, loaded, landings, views, zeros, reads)


def _rows(kind: Any, rows: Any) -> list[Any]:
    # Rows with the fields that the annotations say.
    annotations = [str(wanted) for wanted in kind.__annotations__.values()]
    shapes, texts = (["tuple" in one for one in annotations], ["str" in one for one in annotations])
    made = []
    for row in rows:
        if not isinstance(row, list) or len(row) != len(annotations):
            raise ValueError("a row is wrong")
        out = []
        for value, shape, text in zip(row, shapes, texts, strict=True):
            if shape:
                if not isinstance(value, list) or not all(_number(one) for one in value):
                    raise ValueError("a shape is wrong")
                value = tuple(value)
            elif not (isinstance(value, str) if text else _number(value)):
                raise ValueError("a field is wrong")
            out.append(value)
        made.append(kind(*out))
    return made


def _number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def keep(path: str, key: str, plan: Plan) -> None:
    """Writes a plan: it appears whole or not at all, also while others write it.

    Raises OSError, and ValueError for a folder that others may write or a plan that is
    too large.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    rows = {name: [list(row) for row in getattr(plan, name)] for name in ("places", "views", "zeros", "reads")}
    head = json.dumps({"key": key, "loaded": plan.loaded, **rows}).encode()
    body = len(head).to_bytes(8, "little") + head + plan.landings.tobytes()
    data = _MAGIC + hashlib.sha256(body).digest() + body
    if len(data) > _MOST_BYTES:
        raise ValueError(f"a plan of {len(data)} bytes")
    with _opened(path) as at:
        name = key + _SUFFIX
        _remove_others(name, at)
        write_bytes(os.path.join(path, name), data, None)
        number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        try:
            os.fchmod(number, 0o600)  # until then a reader may ignore it
        finally:
            os.close(number)
        _tidy(at)


def _remove_others(name: str, at: int) -> None:
    # The writer follows links, and keeps owner and mode of what it replaces.
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            os.unlink(name, dir_fd=at)


def _tidy(at: int) -> None:
    # Only what this module makes is touched. Another process may be as quick.
    plans = []
    for name in os.listdir(at):
        with contextlib.suppress(OSError):
            if name.endswith(_SUFFIX) and len(name) == 64 + len(_SUFFIX):
                plans.append((os.stat(name, dir_fd=at, follow_symlinks=False).st_mtime, name))
    for _, name in sorted(plans)[:-_MOST_PLANS]:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=at)

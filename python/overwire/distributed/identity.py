"""Which files the ranks of a group have open: all the same, or an error that names who differs.

Ranks open a path each by itself, and what lies there may be replaced in between. On one
host equal files have the same inode, size and times (`stat`); objects of stores have the
same version there. Elsewhere the layouts must be equal, with which go the checksums of a
compressed file: it may also lie on a host several times. On a file system of several
hosts, whose inodes may be made up, so must be size and time of the last change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._verbs import states
from ..errors import CorruptError

__all__ = ["Opened", "opened", "replaced"]


class Opened(NamedTuple):
    """What a rank has open. space: in which paths mean the same. files: of each model its
    files, as the engine tells them from others."""

    space: tuple[str, str]
    files: list[dict[str, Any]]


def opened(models: Sequence[Any], host: str) -> Opened:
    """Local: what the ranks compare of the files of models."""
    try:
        space = os.readlink("/proc/self/ns/mnt")
    except OSError:
        space = ""
    return Opened((host, space), [dict(state) for model in models for state in states(model.handle)])


def replaced(ranks: Mapping[int, Opened], uris: Sequence[str]) -> CorruptError | None:
    """The error of ranks that do not have the same files open; None if they do. Local, and
    alike on all ranks. uris: of the files, as people may see them."""
    nearest: dict[tuple[str, str], int] = {}
    for rank, one in ranks.items():
        near = nearest.setdefault(one.space, rank)
        for other in sorted({min(ranks), near}):
            at = _differs(ranks[other], one, other == near)
            if at is None:
                continue
            uri = uris[min(at, len(uris) - 1)]
            text = f"overwire: group: {uri} is not the same file on ranks {other} and {rank}: was it replaced meanwhile?"
            return CorruptError(text, source=uri)
    return None


def _differs(one: Opened, two: Opened, near: bool) -> int | None:
    # The number of the first file that is not the same.
    if len(one.files) != len(two.files):
        return min(len(one.files), len(two.files))
    return next((at for at, pair in enumerate(zip(one.files, two.files, strict=True)) if not _same(*pair, near)), None)


def _same(one: dict[str, Any], two: dict[str, Any], near: bool) -> bool:
    # near: both are on one host, where paths mean the same.
    if one == two:
        return True
    if one["layout"] != two["layout"]:
        return False
    if one["sealed"] and two["sealed"]:
        return True
    if one["pin"] or two["pin"]:
        return bool(one["pin"] == two["pin"])
    if one["network"] and two["network"]:
        return bool(one["modified"] == two["modified"])
    return not near or not (one["inode"] or two["inode"])

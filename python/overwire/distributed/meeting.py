"""What the ranks of a group compare when they meet, and which files they have open: all the same,
or an error that names who differs.

Ranks open a path each by itself, and what lies there may be replaced in between. On one
host equal files have the same inode, size and times (`stat`); objects of stores have the
same version there. Elsewhere the layouts must be equal, with which go the checksums of a
compressed file: it may also lie on a host several times. On a file system of several
hosts, whose inodes may be made up, so must be size and time of the last change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .._verbs import states
from ..errors import ArgumentError, CorruptError
from . import group as ranks
from .group import Members


class OpenFiles(NamedTuple):
    """What a rank has open. space: in which paths mean the same. files: of each model its
    files, as the engine tells them from others. uris: as people may see them."""

    space: tuple[str, str]
    files: list[dict[str, Any]]
    uris: list[str]


def describe_open_files(models: Sequence[Any]) -> OpenFiles:
    """Local: what the ranks compare of the files of models."""
    try:
        space = os.readlink("/proc/self/ns/mnt")
    except OSError:
        space = ""
    files = [dict(state) for model in models for state in states(model.handle)]
    return OpenFiles((ranks.host_identity(), space), files, [uri for model in models for uri in model.uris])


def meet(
    members: Members,
    describe: Callable[[], dict[str, Any]],
    reopen: Callable[[], None] | None = None,
    comparable: Callable[[list[dict[str, Any]]], bool] = lambda _: True,
) -> list[dict[str, Any]]:
    """Collective: what each rank reports. Of that "alike" must be the same on all, as
    OVERWIRE_EXCHANGE must, and so must be "opened", what `describe_open_files` gives or None, where it is
    `comparable`. reopen: called where files differ, before all report again:
    another one may have been put there meanwhile.

    Raises on all ranks what `describe` raises on one, ArgumentError and CorruptError for what differs.
    """

    def report() -> dict[str, Any]:
        own = describe()
        own["alike"] = {"OVERWIRE_EXCHANGE": ranks.exchange_setting(), **own.get("alike", {})}
        return {"host": ranks.host_identity(), **own}

    reports = members.gather_results(report)
    if reopen is not None and _difference_of(reports) is not None:
        reopen()
        reports = members.gather_results(report)
    first = reports[0]
    source = first["opened"].uris[0] if first.get("opened") else ""
    for what, value in first["alike"].items():
        for rank, one in enumerate(reports):
            if one["alike"].get(what) != value:
                members.raise_alike(
                    ArgumentError(f"overwire: group: {what} differs between ranks 0 and {rank}", source=source)
                )
    if comparable(reports) and (error := _difference_of(reports)) is not None:
        members.raise_alike(error)
    members.note_hosts([one["host"] for one in reports])
    return reports


def _difference_of(reports: Sequence[Mapping[str, Any]]) -> CorruptError | None:
    return find_difference({rank: one["opened"] for rank, one in enumerate(reports) if one.get("opened")})


def find_difference(files: Mapping[int, OpenFiles]) -> CorruptError | None:
    """The error of ranks that do not have the same files open, None for none; by their numbers."""
    nearest: dict[tuple[str, str], int] = {}
    for rank, one in files.items():
        neighbour = nearest.setdefault(one.space, rank)
        for other in sorted({min(files), neighbour}):
            at = _first_differing_file(files[other], one, other == neighbour)
            if at is None:
                continue
            uris = files[min(files)].uris
            uri = uris[min(at, len(uris) - 1)]
            text = (
                f"overwire: group: {uri} is not the same file on ranks {other} and {rank}: was it replaced meanwhile?"
            )
            return CorruptError(text, source=uri)
    return None


def _first_differing_file(one: OpenFiles, two: OpenFiles, same_host: bool) -> int | None:
    # The number of the first file that is not the same.
    if len(one.files) != len(two.files):
        return min(len(one.files), len(two.files))
    pairs = enumerate(zip(one.files, two.files, strict=True))
    return next((at for at, pair in pairs if not _is_same(*pair, same_host)), None)


def _is_same(one: dict[str, Any], two: dict[str, Any], same_host: bool) -> bool:
    # same_host: both are on one host, where paths mean the same.
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
    return not same_host or not (one["inode"] or two["inode"])

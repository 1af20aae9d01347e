"""Compares the arguments and the open files of all ranks, and raises an error that names the ranks if they differ.

Each rank opens a path by itself, and the file may be replaced between two of these opens. On one host, the ranks must
have opened files with the same inode, size and times (`stat`), or objects with the same version. On different hosts,
the layouts must be equal, including the checksums of a compressed file. Copies of a compressed file on one host are
also accepted. On network file systems, where inode numbers are not reliable, size and modification time must also be
equal.
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
    """The files that a rank has opened. space: the host and the mount namespace of its paths. files: the engine's
    identity of each file. uris: redacted URIs for messages."""

    space: tuple[str, str]
    files: list[dict[str, Any]]
    uris: list[str]


def describe_open_files(models: Sequence[Any]) -> OpenFiles:
    """Returns the facts about the files of models that ranks compare. Not collective."""
    try:
        space = os.readlink("/proc/self/ns/mnt")
    except OSError:
        space = ""
    files = [dict(state) for model in models for state in states(model.handle, False)]
    return OpenFiles((ranks.host_identity(), space), files, [uri for model in models for uri in model.uris])


def meet(
    members: Members,
    describe: Callable[[], dict[str, Any]],
    reopen: Callable[[], None] | None = None,
    comparable: Callable[[list[dict[str, Any]]], bool] = lambda _: True,
) -> list[dict[str, Any]]:
    """Gathers and compares the reports of all ranks. Collective.

    describe: returns this rank's report. The report's "alike" and OVERWIRE_EXCHANGE must be equal on all ranks. The
    report's "opened", the result of `describe_open_files` or None, must be equal if the reports are `comparable`.
    reopen: called on all ranks if files differ, because a file may have been replaced between two opens. All ranks then
    report again.

    Raises errors of `describe` on all ranks, and ArgumentError and CorruptError for differences.
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
                text = f"overwire: group: {what} differs between ranks 0 and {rank}"
                members.raise_alike(ArgumentError(text, source=source))
    if comparable(reports) and (error := _difference_of(reports)) is not None:
        members.raise_alike(error)
    members.note_hosts([one["host"] for one in reports])
    return reports


def _difference_of(reports: Sequence[Mapping[str, Any]]) -> CorruptError | None:
    return find_difference({rank: one["opened"] for rank, one in enumerate(reports) if one.get("opened")})


def find_difference(files: Mapping[int, OpenFiles]) -> CorruptError | None:
    """Returns the error for ranks that have opened different files, or None if all files are equal. files: by rank."""
    nearest: dict[tuple[str, str], int] = {}
    for rank, one in files.items():
        neighbour = nearest.setdefault(one.space, rank)
        for other in sorted({min(files), neighbour}):
            at = _first_differing_file(files[other], one, other == neighbour)
            if at is None:
                continue
            uris = files[min(files)].uris
            uri = uris[min(at, len(uris) - 1)]
            text = f"overwire: group: {uri} is not the same file on ranks {other} and {rank}: it may have been replaced"
            return CorruptError(text, source=uri)
    return None


def _first_differing_file(one: OpenFiles, two: OpenFiles, same_host: bool) -> int | None:
    # Returns the number of the first file that differs, or None.
    if len(one.files) != len(two.files):
        return min(len(one.files), len(two.files))
    pairs = enumerate(zip(one.files, two.files, strict=True))
    return next((at for at, pair in pairs if not _is_same(*pair, same_host)), None)


def _is_same(one: dict[str, Any], two: dict[str, Any], same_host: bool) -> bool:
    # same_host: both ranks have the same paths, so a path must lead to the same file.
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

"""Blocks of open files that the ranks of a group load together, each into memory of its own.

Every rank says which blocks it needs. What several ranks of a host need is read by one of
them and copied by the others, what one alone needs is read by that one (`gosrc/relay`).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import _engine
from ..errors import ArgumentError, CancelledError, CorruptError, ForkedError
from . import group as ranks
from .group import Members, Unmapped, members_of, verb
from .identity import opened, replaced
from .relays import Mapped, begin, request_of

if TYPE_CHECKING:
    from .._engine import JobNumber

__all__ = ["SHARE", "Blocks", "Together", "meet", "shares", "unplanned"]

_UNPLANNED = "no rank has a plan"

_WORDS = 6  # of a request

# Of the ring; half as much memory as a group's load takes, since an engine counts on its
# GPU's: with two ranks 120 MiB of it, at 4 % of the speed. The largest chunk fits.
_BUFFERS = 3
SHARE = 20 << 20


class Blocks(NamedTuple):
    """What a rank wants of open files: for each file of a `safe_open` requests, packed as
    `overwire.plumbing.land` takes them. device: where they land. tables: what tells the
    files, the same on all ranks."""

    device: str
    files: Sequence[Any]
    requests: Sequence[bytes]
    tables: Sequence[str]


def shares(group: Any, pays: bool) -> bool:
    """Whether the ranks of a group are to share the reading: there are several, and
    OVERWIRE_EXCHANGE is mapped, or auto and it pays.

    pays: the ranks load onto GPUs, or from a store; the same on all of them, as the setting is.
    """
    return group is not None and ranks.exchange_setting() in ("mapped", "auto" if pays else "mapped") and members_of(group).size > 1


def meet(group: Any, prepare: Callable[[], Blocks | None], pays: bool = True) -> tuple[Together | None, str]:
    """Collective: what loads the blocks of all ranks, or None and why each rank loads by
    itself ("": they are not to share the reading, or no two of them share a host).

    prepare: what this rank wants; None: nothing that can be shared. What it raises is raised
    on all ranks. pays: as for `shares`.

    Raises on all ranks ArgumentError where OVERWIRE_EXCHANGE differs, CorruptError where they
    have not the same files open.
    """
    with verb(group) as members:
        return _meet(members, prepare, pays)


def _meet(members: Members, prepare: Callable[[], Blocks | None], pays: bool) -> tuple[Together | None, str]:
    mine: list[Blocks | None] = []

    def report() -> dict[str, Any]:
        mine.append(prepare())
        return _report(mine[0], shares(members.group, pays))

    reports = members.exchange(report)
    for rank, one in enumerate(reports):
        if one["exchange"] != reports[0]["exchange"]:
            members.raise_alike(ArgumentError(f"overwire: group: OVERWIRE_EXCHANGE differs between ranks 0 and {rank}"))
    if error := _replaced(reports):
        members.raise_alike(error)
    members.settle([one["host"] for one in reports])
    if not all(one["shares"] for one in reports):
        return None, ""
    if members.most_local == 1 or members.unreachable:
        return None, members.unreachable
    if all(one["blocks"] is None for one in reports):
        return None, _UNPLANNED
    for rank, one in enumerate(reports):
        if one["blocks"] is None:
            return None, f"rank {rank} has no plan"
        for what in ("device", "tables"):
            if one[what] != reports[0][what]:
                return None, f"{what} differ between ranks 0 and {rank}"
    assert mine[0] is not None
    return Together(members, mine[0], [one["blocks"] for one in reports]), ""


def _replaced(reports: list[dict[str, Any]]) -> CorruptError | None:
    # Of ranks that name the same files, or have the same tables of them.
    having = {rank: one for rank, one in enumerate(reports) if one["opened"] is not None}
    if not having:
        return None
    first = next(iter(having.values()))
    if any(one["tables"] != first["tables"] and one["uris"] != first["uris"] for one in having.values()):
        return None  # they load by themselves
    return replaced({rank: one["opened"] for rank, one in having.items()}, first["uris"])


def unplanned(why: str) -> bool:
    """Whether `meet` has found that no rank knows what it wants: they may meet again."""
    return why == _UNPLANNED


def _report(mine: Blocks | None, sharing: bool) -> dict[str, Any]:
    known = {"host": ranks.host_name(), "exchange": ranks.exchange_setting(), "shares": sharing}
    if mine is None:
        return {**known, "blocks": None, "opened": None}
    models = [file._live() for file in mine.files]
    if _engine.forked():
        raise ForkedError("overwire: the engine cannot run in a forked child", source=models[0].uris[0])
    stored = [hashlib.sha256(array("q", [row[4] for row in model.table]).tobytes()).hexdigest() for model in models]
    blocks = []
    for requests in mine.requests:
        flat = array("q", requests)
        flat[1::_WORDS] = array("q", bytes(8 * (len(flat) // _WORDS)))  # an address is no one else's business
        blocks.append(flat.tobytes())
    files = {"opened": opened(models, ranks.host_name()), "uris": [uri for model in models for uri in model.uris]}
    return {**known, **files, "blocks": blocks, "device": mine.device.partition(":")[0], "tables": [*mine.tables, *stored]}


class Together:
    """The blocks of all ranks. `land` once: the others do; if it goes without that, they
    hear of it."""

    def __init__(self, members: Members, mine: Blocks, every: Sequence[Sequence[bytes]]) -> None:
        self._members, self._mine, self._every = members, mine, every
        # The files of which some rank wants a block, and how many tensors those before it have.
        self._files: dict[int, int] = {}
        before = 0
        for number, file in enumerate(mine.files):
            if any(blocks[number] for blocks in every):
                self._files[number] = before
                before += len(file._live().table)
        self._lands = False
        #: Stored bytes that this rank has read, and that it has copied from others.
        self.read, self.copied = 0, 0

    def land(self, first: Callable[[], None]) -> str:
        """Collective: lands all blocks, by one relay over the files. "", or why the ranks
        cannot reach each other's memory: then no block has landed.

        first: this rank's part of the load beside them; it runs while the first bytes are
        read, and what it raises is raised on all ranks. If a rank fails or is gone, the
        others raise it.
        """
        with verb(self._members.group, self._mine.device, False):
            self._lands = True
            return self._land(first)

    def __del__(self) -> None:
        if not getattr(self, "_lands", True) and not sys.is_finalizing():
            self._members.part(CancelledError("overwire: group: it did not load its blocks"), -1, False)

    def _land(self, first: Callable[[], None]) -> str:
        members = self._members
        if not self._files:
            members.exchange(first)
            return ""
        relay = Mapped(members, self._begun)
        relay.attempt(lambda: relay.aim(self._numbered(self._mine.requests)))
        relay.attempt(first)
        relay.join()
        try:
            for _ in relay.arrive(members.agree):
                pass
        except Unmapped as reason:
            return str(reason).removeprefix("overwire: ")
        self.read, self.copied = relay.report["stages"]["read_bytes"], relay.report.get("pulled", 0)
        return ""

    def _begun(self) -> JobNumber:
        members = self._members
        models = [self._mine.files[number]._live().on(self._mine.device) for number in self._files]
        for model in models:
            model.alone()  # what was preloaded is not shared out
        needs = b"".join(self._numbered(self._every[rank], local) for local, rank in enumerate(members.local))
        device = models[0].device
        if device != "cpu":
            from ..frameworks.torch import used_on

            used_on(device)
        request = request_of(device, members.local, members.rank, SHARE, _BUFFERS)
        request["tensors"] = sorted(set(array("q", needs)[0::_WORDS]))
        request["more"] = [model.handle for model in models[1:]]
        return begin(request, models[0].handle, needs)

    def _numbered(self, requests: Sequence[bytes], rank: int | None = None) -> bytes:
        # The requests of all files, with the numbers that tensors have where the files are one
        # model, and with a rank in the place of the addresses.
        import torch

        out = bytearray()
        for number, before in self._files.items():
            if requests[number]:
                held = bytearray(requests[number])
                rows = torch.frombuffer(held, dtype=torch.int64).view(-1, _WORDS)
                rows[:, 0] += before
                if rank is not None:
                    rows[:, 1] = rank
                out += held
        return bytes(out)

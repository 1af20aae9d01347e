"""Loads blocks of open files on the ranks of a group. The ranks share the reading, and each rank loads into its own
memory.

Every rank passes the blocks that it needs. The plug-ins for inference engines use this module after they have recorded
where the engine's own loader copies each block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from .. import _engine
from .._imports import skip_at_exit
from ..errors import CancelledError, ForkedError
from . import group as ranks
from .group import Members, Unmapped, group_verb
from .load import REQUEST, GroupLoad, Wants, share_of_rank
from .meeting import describe_open_files, meet

_WORDS = REQUEST // 8

# The ring is smaller than in a `GroupLoad` of whole models (144 MiB with two ranks), because an inference engine
# budgets its GPU memory. On four GPUs, dividing the same memory into fewer and larger shares was slower by a seventh.
_BUFFERS = 6
SHARE = 16 << 20


class Blocks(NamedTuple):
    """The blocks of open files that a rank needs.

    device: the device to load to. files: the `safe_open` files. requests: for each file, packed requests as for
    `overwire._compat_api.landing`. tables: digests of the files' tables, equal on all ranks.
    """

    device: str
    files: Sequence[Any]
    requests: Sequence[bytes]
    tables: Sequence[str]


def should_share_reading(group: Any, pays: bool, open_all: Callable[[], None] = lambda: None) -> bool:
    """Returns whether the ranks of a group should share the reading. Collective.

    They should if some ranks are on the same host, the ranks of each host can probably map each other's memory, and
    OVERWIRE_EXCHANGE is "mapped", or is "auto" and `pays` is true.

    pays: whether sharing is worthwhile, because the ranks load onto GPUs or from a store. It must be equal on all
    ranks. open_all: opens this rank's files; its exceptions are raised on all ranks. Raises ArgumentError on all ranks
    if OVERWIRE_EXCHANGE differs.
    """
    if group is None:
        return False
    with group_verb(group) as members:
        setting = ranks.exchange_setting() in ("mapped", "auto" if pays else "mapped")

        def open_and_describe() -> dict[str, Any]:
            open_all()
            return {"shares": setting}

        reports = meet(members, open_and_describe)
        return all(one["shares"] for one in reports) and members.most_local > 1 and not members.unreachable


def meet_to_load(group: Any, prepare: Callable[[], tuple[Any, ...] | None]) -> tuple[BlockLoad | None, str]:
    """Returns the load of all ranks' blocks, or None and the reason why each rank must load by itself. Collective.

    prepare: returns the fields of `Blocks` for this rank, or None if nothing can be shared. Its exceptions are raised
    on all ranks. On all ranks, raises ArgumentError if OVERWIRE_EXCHANGE differs, and CorruptError if the ranks have
    opened different files.
    """
    blocks: list[Blocks | None] = []

    def prepare_and_describe() -> dict[str, Any]:
        fields = prepare()
        blocks.append(None if fields is None else Blocks(*fields))
        return _describe_blocks(blocks[0])

    with group_verb(group) as members:
        reports = meet(members, prepare_and_describe, comparable=_are_comparable)
        if members.most_local == 1 or members.unreachable:
            return None, members.unreachable
        for rank, one in enumerate(reports):
            if one["opened"] is None:
                return None, f"rank {rank} has no plan"
            for what in ("device", "tables"):
                if one[what] != reports[0][what]:
                    return None, f"{what} differ between ranks 0 and {rank}"
        assert blocks[0] is not None
        return BlockLoad(members, blocks[0], [one["requests"] for one in reports]), ""


def _are_comparable(reports: Sequence[dict[str, Any]]) -> bool:
    # Returns whether all ranks have opened the same names, or files with equal tables. If not, each rank loads by
    # itself.
    plans = [one for one in reports if one["opened"] is not None]
    return all(one["tables"] == plans[0]["tables"] or one["opened"].uris == plans[0]["opened"].uris for one in plans)


def _describe_blocks(blocks: Blocks | None) -> dict[str, Any]:
    if blocks is None:
        return {"opened": None}
    models = [file._live_model() for file in blocks.files]
    if _engine.forked():
        raise ForkedError("overwire: group: the engine cannot run in a forked child", source=models[0].uris[0])
    offsets = [hashlib.sha256(array("q", [row[4] for row in model.table]).tobytes()).hexdigest() for model in models]
    requests = []
    for packed in blocks.requests:
        flat = array("q", packed)
        flat[1::_WORDS] = array("q", bytes(8 * (len(flat) // _WORDS)))  # other ranks do not need the addresses
        requests.append(flat.tobytes())
    device, tables = blocks.device.partition(":")[0], [*blocks.tables, *offsets]
    return {"opened": describe_open_files(models), "requests": requests, "device": device, "tables": tables}


class BlockLoad:
    """The load of all ranks' blocks. Every rank must call `try_land` once. If a rank frees this object instead, the
    other ranks raise an error."""

    def __init__(self, members: Members, blocks: Blocks, requests: Sequence[Sequence[bytes]]) -> None:
        """requests: the requests of all ranks, by rank and by file."""
        self._members, self._blocks, self._requests = members, blocks, requests
        # The files from which any rank loads a block, each with the total number of tensors in the files before it.
        self._files: dict[int, int] = {}
        before = 0
        for number, file in enumerate(blocks.files):
            if any(one[number] for one in requests):
                self._files[number] = before
                before += len(file._live_model().table)
        self._lands = False
        #: The stored bytes that this rank has read, and the stored bytes that it has copied from other ranks.
        self.read, self.copied = 0, 0

    def try_land(self, meanwhile: Callable[[], None]) -> str:
        """Loads all blocks in one pass over the files, and returns "". If the ranks cannot map each other's memory,
        loads no block and returns the reason. Collective.

        meanwhile: a function that loads the rest of this rank's tensors. It runs while the first bytes are read, and
        its exceptions are raised on all ranks. If a rank fails or disappears, the other ranks raise an error.
        """
        members, device = self._members, self._blocks.device
        with group_verb(members.group, device, False):
            self._lands = True
            if not self._files:
                members.gather_results(meanwhile)
                return ""
            models = [self._blocks.files[number]._live_model().on(device) for number in self._files]
            room = max(model.room() for model in models)
            load = GroupLoad(members, models, (share_of_rank(len(members.local), max(SHARE, room + 255)), _BUFFERS))
            load.carrier = "mapped"
            needs = b"".join(self._number_rows(self._requests[rank], local) for local, rank in enumerate(members.local))
            wants = Wants(sorted(set(array("q", needs)[0::_WORDS])), needs)
            try:
                own = partial(self._number_rows, self._blocks.requests)
                for _ in load.land_requests(wants, own, members.agree, meanwhile=meanwhile):
                    pass
            except Unmapped as reason:
                return str(reason).removeprefix("overwire: ")
            self.read, self.copied = load.report["stages"]["read_bytes"], load.report.get("pulled", 0)
            return ""

    @skip_at_exit
    def __del__(self) -> None:
        if not getattr(self, "_lands", True):
            self._members.tell_failure(CancelledError("overwire: group: this rank did not load its blocks"), -1, False)

    def _number_rows(self, requests: Sequence[bytes], rank: int | None = None) -> bytes:
        # Returns the requests of all files as if the files were one model with consecutive tensor numbers. rank: a
        # number that replaces the addresses, unless it is None.
        numbered = array("q")
        for number, before in self._files.items():
            rows = array("q", requests[number])
            rows[0::_WORDS] = array("q", [at + before for at in rows[0::_WORDS]])
            if rank is not None:
                rows[1::_WORDS] = array("q", [rank]) * (len(rows) // _WORDS)
            numbered += rows
        return numbered.tobytes()

"""What the ranks of a save send each other: blocks of tensors, and whether all is well.

Every rank runs the same rounds. Before each they tell each other whether the last one went
well, so that an error on one ends the save on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from ..errors import ArgumentError, CancelledError
from .schedule import Block, Duty, Entry, Round

__all__ = ["Exchange"]


class Exchange:
    """The exchange of one save, on this rank. tensor: gives the block of an index."""

    def __init__(self, group: Any, duty: Duty, tensor: Callable[[MetadataIndex], torch.Tensor]) -> None:
        self._duty, self._tensor = duty, tensor
        self._alone = duty.ranks == 1
        self._group = group
        self._device: torch.device | None = None  # where blocks are sent from and to
        self._broken = False  # all ranks know of an error

    def run(self, work: Callable[[Round], None], finish: Callable[[], None]) -> None:
        """Runs all rounds, then `finish`. Raises what fails on this rank, and CancelledError for what fails on another."""
        if self._alone:
            for step in self._duty.rounds:
                work(step)
            finish()
            return
        group = dist.group.WORLD if self._group is None else self._group
        if group is None or dist.get_world_size(group) != self._duty.ranks or dist.get_rank(group) != self._duty.rank:
            raise ArgumentError("overwire: CheckpointWriter: the save has another group: give it as process_group=, too")
        self._group = group
        self._agree_on_device()
        for step in self._duty.rounds:
            with self._together():
                work(step)
        with self._together():
            finish()

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Collective: what fails within on one rank ends the save on all of them."""
        try:
            yield
        except BaseException as error:
            if not self._broken:
                self._broken = True  # blocks lie in each other: it is said once
                with contextlib.suppress(Exception):  # the first error counts
                    self._agree(error)
            raise
        self._agree(None)

    def _agree(self, error: BaseException | None) -> None:
        """Collective: raises CancelledError if another rank has failed."""
        failed: list[Any] = [None] * self._duty.ranks
        dist.all_gather_object(failed, None if error is None else type(error).__name__, group=self._group)
        for rank, name in enumerate(failed):
            if name is not None and rank != self._duty.rank and error is None:
                self._broken = True
                raise CancelledError(f"overwire: the save ends, because rank {rank} has failed")

    def _agree_on_device(self) -> None:
        with self._together():
            here = {self._tensor(index).device.type for step in self._duty.rounds for _, index in step.sends}
            here |= {self._tensor(block.index).device.type for block in self._own()}
        there: list[Any] = [None] * self._duty.ranks
        dist.all_gather_object(there, sorted(here), group=self._group)
        kinds = {kind for one in there for kind in one}
        able = {device.type for device in self._group._device_types}
        if kinds <= {"cuda"} and kinds and "cuda" in able or "cpu" not in able:
            self._device = torch.device("cuda", torch.cuda.current_device())
        else:
            self._device = torch.device("cpu")

    def _own(self) -> Iterator[Block]:
        for step in self._duty.rounds:
            for entry in step.entries:
                if entry.dtype is not None and any(block.rank != self._duty.rank for block in entry.blocks):
                    yield from (block for block in entry.blocks if block.rank == self._duty.rank)

    def gather(self, step: Round) -> dict[str, torch.Tensor]:
        """The round's tensors, whole, by name; those that this rank alone has are its own."""
        out: dict[str, torch.Tensor] = {}
        waits: list[tuple[torch.Tensor, torch.Tensor]] = []  # a block that comes, and its place
        operations: list[Any] = []
        if self._alone:
            return {entry.name: self._tensor(entry.blocks[0].index) for entry in step.entries if entry.dtype is not None}
        with self._together():  # memory may be short on one rank: then none waits for blocks
            for peer, index in step.sends:
                operations.append(dist.P2POp(dist.isend, _raw(self._tensor(index).to(self._device)), group=self._group, group_peer=peer))
            for entry in step.entries:
                if entry.dtype is not None:
                    out[entry.name] = self._whole(entry, operations, waits)
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for block_there, place in waits:
            place.copy_(block_there)
        return out

    def _whole(self, entry: Entry, operations: list[Any], waits: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        # A tensor of this rank, of which other ranks' blocks come by the operations.
        if len(entry.blocks) == 1 and entry.blocks[0].rank == self._duty.rank:
            return self._tensor(entry.blocks[0].index)
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
        for block in entry.blocks:
            place = _part(whole, block)
            if block.rank == self._duty.rank:
                place.copy_(self._tensor(block.index))
                continue
            into = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            if into is not place:
                waits.append((into, place))
            operations.append(dist.P2POp(dist.irecv, _raw(into), group=self._group, group_peer=block.rank))
        return whole


def _part(whole: torch.Tensor, block: Block) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    # Backends do not know every dtype.
    return tensor.contiguous().view(-1).view(torch.uint8)

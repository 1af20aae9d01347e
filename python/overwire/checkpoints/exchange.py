"""Exchanges blocks of tensors between the ranks of a save, and ends the save on all ranks if one of them fails.

Blocks that a stager has copied to host memory are not sent to ranks on the same host. These ranks map the memory
(see `buffers`) and copy the blocks.

Every rank runs the same rounds. After each round the ranks exchange whether the round succeeded.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any, Union

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from .._undo import after_error
from ..errors import ArgumentError, CancelledError
from ..frameworks.spec import JoinedTensor
from .buffers import BufferOffset, find_block, map_buffers, offer_buffers
from .schedule import Block, Duty, Entry, Round

#: A destination in a tensor, and the block to copy to it.
Copy = tuple[torch.Tensor, torch.Tensor]

#: A whole tensor that a rank saves.
Gathered = Union["torch.Tensor", JoinedTensor]


class Exchange:
    """The exchange of one save, on this rank. tensor: returns this rank's block with a given index."""

    def __init__(self, group: Any, duty: Duty, tensor: Callable[[MetadataIndex], torch.Tensor]) -> None:
        self._duty, self._tensor = duty, tensor
        self._alone = duty.ranks == 1
        self._group = group
        self._device: torch.device | None = None  # the device of blocks that are sent and received
        self._broken = False  # whether all ranks know that one of them failed
        #: Whether the group can be used again. After an error during a transfer, messages may be left in it.
        self.group_is_usable = True
        # (rank, index) for each block in this process's memory that another rank can copy if it can map the memory.
        self._shared: set[tuple[int, MetadataIndex]] = set()
        self._readers: set[int] = set()  # the ranks that have mapped the memory
        # By rank: the rank's mapped memory, and the positions of its blocks there.
        self._sources: dict[int, tuple[list[torch.Tensor], Iterator[BufferOffset | None]]] = {}

    def run(self, work: Callable[[Round], None], finish: Callable[[], None]) -> None:
        """Runs all rounds, then `finish`. Raises this rank's own error, or CancelledError if another rank has
        failed."""
        if self._alone:
            for step in self._duty.rounds:
                work(step)
            finish()
            return
        group = dist.group.WORLD if self._group is None else self._group
        if group is None or dist.get_world_size(group) != self._duty.ranks or dist.get_rank(group) != self._duty.rank:
            why = "torch saves with another group: pass that group as process_group="
            raise ArgumentError(f"overwire: CheckpointWriter: {why}")
        self._group = group
        self._agree_on_ways()
        for step in self._duty.rounds:
            with self._ending_together():
                work(step)
        with self._ending_together():
            finish()

    @contextlib.contextmanager
    def _ending_together(self) -> Iterator[None]:
        """A context that ends the save on all ranks after an error on one of them. Collective."""
        try:
            yield
        except BaseException as error:
            if not self._broken:
                self._broken = True  # contexts are nested, and only the innermost reports the error
                with contextlib.suppress(Exception):  # the first error is raised instead
                    self._agree_on_error(error)
            raise
        self._agree_on_error(None)

    def _agree_on_error(self, error: BaseException | None) -> None:
        """Raises CancelledError if another rank has failed. Collective."""
        for rank, name in enumerate(self._tell(None if error is None else type(error).__name__)):
            if name is not None and rank != self._duty.rank and error is None:
                self._broken = True
                raise CancelledError(f"overwire: the save was cancelled because rank {rank} failed")

    def _agree_on_ways(self) -> None:
        """Chooses the device for gathering blocks, and finds the blocks that can be copied from other ranks' memory.
        Collective."""
        offer = offer_buffers()
        offsets: dict[int, list[BufferOffset | None]] = {}  # by rank: positions of the blocks that it needs, in order
        with self._ending_together():
            here = {self._tensor(block.index).device.type for block in self._own_blocks()}
            for step in self._duty.rounds:
                for peer, index in step.sends:
                    tensor = self._tensor(index)
                    here.add(tensor.device.type)
                    offsets.setdefault(peer, []).append(place := find_block(tensor, offer))
                    if place is not None:
                        self._shared.add((peer, index))
        if not self._shared:
            offer = offer._replace(buffers=())
        there = self._tell((sorted(here), offer))
        kinds = {kind for one, _ in there for kind in one}
        able = _devices_of(self._group)
        if kinds <= {"cuda"} and kinds and "cuda" in able or "cpu" not in able:
            self._device = torch.device("cuda", torch.cuda.current_device())
        else:
            self._device = torch.device("cpu")
        if not any(other.buffers for _, other in there):
            return
        others = {rank: other for rank, (_, other) in enumerate(there) if other.buffers and rank != self._duty.rank}
        buffers = {rank: map_buffers(other) for rank, other in others.items()}
        same_host = {rank: some for rank, some in offsets.items() if there[rank][1].host == offer.host}
        answers = self._tell(({rank for rank, some in buffers.items() if some is not None}, same_host))
        self._readers = {rank for rank, (sources, _) in enumerate(answers) if self._duty.rank in sources}
        for rank, memory in buffers.items():
            if memory is not None:
                self._sources[rank] = (memory, iter(answers[rank][1].get(self._duty.rank, ())))

    def _tell(self, what: Any) -> list[Any]:
        """Sends an object to all ranks. Returns the objects of all ranks, by rank. Collective."""
        there: list[Any] = [None] * self._duty.ranks
        with self._mark_failures():
            dist.all_gather_object(there, what, group=self._group)
        return there

    def _mark_failures(self) -> after_error:
        return after_error(setattr, self, "group_is_usable", False)

    def _own_blocks(self) -> Iterator[Block]:
        for step in self._duty.rounds:
            for entry in step.entries:
                if entry.dtype is not None and any(block.rank != self._duty.rank for block in entry.blocks):
                    yield from (block for block in entry.blocks if block.rank == self._duty.rank)

    def gather(self, step: Round) -> tuple[dict[str, Gathered], list[Copy]]:
        """Returns the round's tensors by name, and a list of copies. A tensor that only this rank has is returned as it
        is. Other tensors are complete after `copy_blocks(copies)`, which must be called before the save ends."""
        out: dict[str, Gathered] = {}
        copies: list[Copy] = []
        operations: list[Any] = []
        if self._alone:
            entries = [entry for entry in step.entries if entry.dtype is not None]
            return {entry.name: self._tensor(entry.blocks[0].index) for entry in entries}, []
        with self._ending_together():  # the other ranks must not wait for the blocks of a rank that runs out of memory
            for peer, index in step.sends:
                if peer not in self._readers or (peer, index) not in self._shared:
                    block = _raw_bytes(self._tensor(index).to(self._device))
                    operations.append(self._make_operation(dist.isend, block, peer))
            for entry in step.entries:
                if entry.dtype is not None:
                    out[entry.name] = self._whole_tensor(entry, operations, copies)
        if operations:
            with self._mark_failures():
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
        return out, copies

    def _make_operation(self, operation: Any, block: torch.Tensor, rank: int) -> dist.P2POp:
        return dist.P2POp(operation, block, dist.get_global_rank(self._group, rank), self._group)

    def _whole_tensor(self, entry: Entry, operations: list[Any], copies: list[Copy]) -> Gathered:
        # Returns a tensor that this rank writes. Appends the operations and copies that fetch other ranks' blocks.
        if len(entry.blocks) == 1 and entry.blocks[0].rank == self._duty.rank:
            return self._tensor(entry.blocks[0].index)
        rows = all(block.sizes[1:] == entry.shape[1:] for block in entry.blocks)
        if rows and self._device == torch.device("cpu"):
            return self._joined_tensor(entry, operations)
        whole = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
        for block in entry.blocks:
            place = _place_of(whole, block)
            if block.rank == self._duty.rank:
                copies.append((place, self._tensor(block.index)))
                continue
            if (into := self._memory_of(block, place.dtype)) is None:
                dense = torch.contiguous_format
                into = place if place.is_contiguous() else torch.empty_like(place, memory_format=dense)
                operations.append(self._make_operation(dist.irecv, _raw_bytes(into), block.rank))
            if into is not place:
                copies.append((place, into))
        return whole

    def _joined_tensor(self, entry: Entry, operations: list[Any]) -> JoinedTensor:
        # Returns a tensor in host memory that consists of blocks of whole rows. The blocks are saved without being
        # joined.
        assert entry.dtype is not None
        parts: dict[int, torch.Tensor] = {}
        for block in entry.blocks:
            if block.rank == self._duty.rank:
                part: torch.Tensor | None = self._tensor(block.index).to(self._device)
            elif (part := self._memory_of(block, entry.dtype)) is None:
                part = torch.empty(block.sizes, dtype=entry.dtype)
                operations.append(self._make_operation(dist.irecv, _raw_bytes(part), block.rank))
            assert part is not None
            parts[block.offsets[0]] = part
        return JoinedTensor([parts[begin] for begin in sorted(parts)])

    def _memory_of(self, block: Block, dtype: torch.dtype) -> torch.Tensor | None:
        # Returns a block in the mapped memory of its rank, or None if the block is sent.
        if block.rank not in self._sources:
            return None
        memory, offsets = self._sources[block.rank]
        if (place := next(offsets)) is None:
            return None
        size = math.prod(block.sizes) * dtype.itemsize
        return memory[place.buffer][place.offset : place.offset + size].view(dtype).view(block.sizes)


def copy_blocks(copies: list[Copy]) -> None:
    """Copies blocks to their destinations. Contiguous blocks are copied on this thread only."""
    for place, block in copies:
        if place.device.type == block.device.type == "cpu" and place.is_contiguous() and block.is_contiguous():
            ctypes.memmove(place.data_ptr(), block.data_ptr(), place.nbytes)
        else:
            place.copy_(block)


def _devices_of(group: Any) -> set[str]:
    # gloo also registers itself for CUDA, but can send only tensors in host memory.
    devices = group._device_types
    return {one.type for one in devices if one.type == "cpu" or group._get_backend(one).name() != "gloo"}


def _place_of(whole: torch.Tensor, block: Block) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def _raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Blocks are sent as bytes, because backends do not support every dtype.
    return tensor.contiguous().view(-1).view(torch.uint8)

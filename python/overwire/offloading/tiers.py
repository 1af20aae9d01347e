"""Chooses a tier for the stored bytes of each block: device memory, or pinned host memory."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from traceback import clear_frames
from typing import TYPE_CHECKING

import torch

from ..errors import OutOfMemoryError
from ..frameworks.torch import _errors_of, _free_memory
from ..jobs import log
from .blocks import Block
from .stored import DeviceMemory, HostMemory, SharedMemory, StoredBlock, check_streams, encode_block

if TYPE_CHECKING:
    from .sharing import BlockGroup
    from .source import Source


class Tiers:
    """Compresses blocks in order, each into its tier. blocks: all of them. slots, where, room: see `offload`; room is 0
    if it was not given. group: the ranks that share host memory. Create this object after the rest of the model was
    moved to the device. With a group, all ranks have to create one."""

    def __init__(
        self,
        device: torch.device,
        blocks: Sequence[Block],
        slots: int,
        where: str,
        room: int,
        group: BlockGroup | None = None,
    ) -> None:
        self._device, self._where, self._limit = device, where, room
        self._room = room or sys.maxsize  # bytes of device memory that are left for blocks
        if where == "auto":
            self._room = _room_on(device, blocks, slots, room)
            if group is not None:  # the ranks must choose the same tiers
                self._room = group.find_smallest(self._room)
        self._group = group
        self._ahead = [block.nbytes for block in blocks if block.weights]  # of blocks not compressed yet
        self._weights = self._stored = 0  # bytes of the other blocks, and their compressed bytes
        self._decoded: torch.Tensor | None = None  # a block that is checked
        self._balance = 0.0  # the blocks that the device should have by now, minus those that it has

    def compress_blocks(self, blocks: Sequence[Block], source: Source | None) -> Generator[StoredBlock, None, None]:
        """Yields the compressed blocks, in order. Their values are those of `source`, if there is one. Without a group,
        the stored chunks of the next block are loaded while a block is checked. Close the iterator.

        Raises OutOfMemoryError, DeviceError, and the errors of the source."""
        before: tuple[Block, StoredBlock] | None = None
        try:
            for block in blocks:
                stored = self._compress_block(block, source)
                if before is not None:
                    yield self._check_block(*before)
                before = block, stored
                if not stored.files or self._group is not None:
                    before = None
                    yield self._check_block(block, stored)
            if before is not None:
                yield self._check_block(*before)
        finally:  # an error refers to this frame, and the memory may be needed to restore the weights
            if source is not None:
                source.cancel_loads()
            before = stored = self._decoded = None  # type: ignore[assignment]

    def _compress_block(self, block: Block, source: Source | None) -> StoredBlock:
        allocate = partial(self._memory_for, block)
        with self._named_errors(block):
            if source is None:
                return encode_block([weight.parameter.detach() for weight in block.weights], self._device, allocate)
            return encode_block(source.read_block(block.weights), self._device, allocate, source.load_streams)

    def _check_block(self, block: Block, stored: StoredBlock) -> StoredBlock:
        if not stored.files or isinstance(stored.memory, SharedMemory):  # a group checks its blocks
            return stored._replace(await_files=None)
        with self._named_errors(block):
            if self._decoded is None or self._decoded.numel() < stored.nbytes:
                self._decoded = None
                with _errors_of(str(self._device), stored.nbytes):
                    self._decoded = torch.empty(stored.nbytes, dtype=torch.uint8, device=self._device)
            return stored._replace(digests=check_streams(stored, self._device, self._decoded), await_files=None)

    @contextmanager
    def _named_errors(self, block: Block) -> Iterator[None]:
        try:
            yield
        except OutOfMemoryError as error:
            clear_frames(error.__traceback__)  # they refer to device memory, which may be needed to restore the weights
            text = f"{error}, while block {block.name!r} was compressed, with where={self._where!r}"
            raise OutOfMemoryError(text, asked=error.asked, free=error.free, total=error.total) from error

    def _memory_for(self, block: Block, nbytes: int) -> HostMemory | DeviceMemory:
        if not self._takes_device(nbytes):
            return self._host_memory_for(block, nbytes)
        try:
            memory = DeviceMemory(nbytes, self._device)
        except OutOfMemoryError as error:
            if self._where == "device":
                raise
            self._room = 0  # the ring needs the rest
            log.warning(
                "overwire: offload: the device has no memory for the %d compressed bytes of %s: that block and the "
                "later ones stay in host memory: %s", nbytes, block.name, error
            )
            return self._host_memory_for(block, nbytes)
        self._room -= nbytes
        return memory

    def _host_memory_for(self, block: Block, nbytes: int) -> HostMemory:
        if self._group is not None:
            return self._group.allocate_part(block.name, nbytes)
        return HostMemory(nbytes, self._device)

    def _takes_device(self, nbytes: int) -> bool:
        if self._where == "device" and nbytes > self._room:
            text = f"the stored weights take more than room, {self._limit} bytes of device memory"
            advice = "where='auto' puts the other blocks into host memory"
            total = self._limit - self._room + nbytes
            raise OutOfMemoryError(f"overwire: offload: {text}: {advice}", asked=total)
        if self._where != "auto":
            return self._where == "device"
        # Blocks of both tiers alternate, so that blocks of the host are copied while others run.
        self._weights += self._ahead.pop(0)
        self._stored += nbytes
        sizes = [one * self._stored / self._weights for one in self._ahead]  # estimated from the ratio so far
        rest = nbytes + sum(size for size in sizes if size <= self._room)
        self._balance += min(1.0, self._room / rest)
        takes = nbytes <= self._room and self._balance >= 0.5
        self._balance -= takes
        return takes


def _room_on(device: torch.device, blocks: Sequence[Block], slots: int, room: int) -> int:
    # Returns the device memory for compressed blocks. From the memory that is free without the blocks' weights, it
    # subtracts the slots and two more blocks, which are needed first for encoding and later for the staging buffers. If
    # no room was given, it also subtracts a fifth of the GPU's memory, for activations.
    if device.type != "cuda":
        return room
    free, total = _free_memory(str(device))
    if free is None or total is None:
        return room
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free += sum(weight.parameter.nbytes for block in blocks for weight in block.weights if weight.device == device)
    free -= (slots + 2) * max((block.nbytes for block in blocks), default=0)
    return max(0, min(free, room) if room else free - total // 5)

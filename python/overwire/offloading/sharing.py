"""Lets the ranks of a group hold the stored bytes of blocks together, and run the blocks in step.

Each rank stores a part of each block, in memory of the host that all ranks map. All ranks can read all parts, even
after a rank has died. On GPUs, each rank copies only its part to its GPU and gets the other parts from the other GPUs.
If GPUs cannot map each other's memory, each rank copies all parts from the host.

The ranks use torch.distributed only during setup. After that they announce in shared memory which block they load. If
they announce different blocks, if a rank is gone, or if a rank announces nothing within the group's timeout, the others
raise an error that names the block. The group then cannot be used again, but each rank can restore its weights.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .. import _verbs
from .._engine import release
from .._imports import skip_at_exit
from .._undo import pass_error_to
from ..distributed import group as ranks
from ..distributed.meeting import meet
from ..errors import ArgumentError, IOFailure, NotSupportedError, OverwireError
from ..jobs import log
from .blocks import Block
from .stored import SharedMemory, StoredBlock, check_streams, copy_to_host, max_sizes, place_streams, round_up

if TYPE_CHECKING:
    from ..distributed.group import Members
    from .source import Source

# The longest wait for other ranks in one engine call, in milliseconds. Ctrl-C is handled between the calls.
_SLICE_MS = 50


class BlockGroup:
    """This rank's part in a group that streams blocks together."""

    def __init__(
        self,
        members: Members,
        device: torch.device,
        blocks: Sequence[Block],
        alike: Mapping[str, object],
        source: Source | None = None,
    ) -> None:
        """blocks: the blocks to stream. alike: other facts that must be equal on all ranks. source: the files with the
        weights. Collective.

        Raises on all ranks: ArgumentError if these facts differ, CorruptError if the files differ, NotSupportedError
        if the ranks are on several hosts."""
        sizes = [(block.name, [weight.parameter.nbytes for weight in block.weights]) for block in blocks]
        lengths = [_most_stored_bytes(block, source) for block in blocks]
        files = source.describe_files() if source is not None else None
        facts = {"device": device.type, "the streamed blocks": _digest_of(sizes), **alike}
        facts["the content of source="] = _digest_of((source is None, lengths))
        meet(members, lambda: {"alike": facts, "opened": files})
        if members.hosts > 1:
            text = f"its ranks are on {members.hosts} hosts, but must be on one: pass a group for each host"
            members.raise_alike(NotSupportedError(f"overwire: offload: group: {text}"))
        self._members, self._device = members, device
        self._timeout = members.timeout_seconds
        self._names: list[str] = []
        self._memories: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
        self._end = 0  # the end of the allocated blocks in the shared memory
        self._broken = ""
        self._whole = True  # whether each rank copies all parts from the host
        self._handle = 0
        most = sum(round_up(place_streams(one)[1]) for one in lengths)

        def make_offer() -> Any:
            number = device.index if device.type == "cuda" else -1
            self._handle = _verbs.gather_new(number, members.rank, members.size, max(most, 1))
            return _verbs.gather_offer(self._handle, 0, 0)

        offers = members.gather_results(make_offer)
        addresses = members.gather_results(lambda: _verbs.gather_join(offers, self._handle, 0, self._limit_ms()))
        self._base = addresses[members.rank]

    def _limit_ms(self) -> int:
        return int(min(1000 * self._timeout, 1 << 31))

    def allocate_part(self, name: str, nbytes: int) -> SharedMemory:
        """Returns memory for the stored bytes of a block. All ranks must call it for the same blocks in the
        same order, but it does not wait for them.

        Raises DeviceError."""
        place = self._members.rank, self._members.size
        memory = SharedMemory(self._base, self._end, nbytes, place, self._device)
        memory.owner, memory.number = self, len(self._names)
        self._names.append(name)
        self._memories.add(memory)
        self._end += round_up(nbytes)
        return memory

    def agree_on(self, name: str, store: Callable[[], StoredBlock]) -> StoredBlock:
        """Stores a block on all ranks, and returns it when all of them have stored and checked it. Collective.
        If a rank fails, all raise its error. If the blocks differ, all raise ArgumentError."""
        blocks: list[StoredBlock] = []

        def describe_block() -> tuple[Any, ...]:
            blocks.append(store())
            memory = blocks[0].memory
            digests = memory.digests if isinstance(memory, SharedMemory) else b""
            return blocks[0].places, blocks[0].streams, blocks[0].digests, digests, memory.is_on_device

        every = self._members.gather_results(describe_block)
        for rank, one in enumerate(every):
            if one != every[0]:
                text = f"has different weights on rank {rank} than on rank 0"
                text += ": with group=, all ranks need the same model"
                if one[:4] == every[0][:4]:
                    text = "fits on the device of only some ranks: pass a smaller room="
                self._members.raise_alike(ArgumentError(f"overwire: offload: block {name!r} {text}"))
        if blocks[0].digests or not blocks[0].files:
            return blocks[0]
        return self._check_streams(blocks[0])

    def _check_streams(self, block: StoredBlock) -> StoredBlock:
        # Decodes a block with streams of files, to find out whether all bytes are right. Each rank decodes some of the
        # tensors, with about the same number of bytes as every other rank. Collective.
        members, owners = self._members, [0] * len(block.streams)
        nbytes = [0] * members.size
        for number in sorted(range(len(owners)), key=lambda number: -block.streams[number][1]):
            owners[number] = nbytes.index(min(nbytes))
            nbytes[owners[number]] += block.streams[number][1]
        own = [number for number, owner in enumerate(owners) if owner == members.rank]
        digests = members.gather_results(lambda: check_streams(copy_to_host(block, own), self._device))
        rest = [iter([one[at : at + 16] for at in range(0, len(one), 16)]) for one in digests]
        return block._replace(digests=b"".join(next(rest[owner]) for owner in owners))

    def find_smallest(self, number: int) -> int:
        """Returns the smallest of all ranks' numbers. Collective."""
        return min(self._members.gather_results(lambda: number))

    def open_ring(self, nbytes: int, buffers: int, memories: Sequence[SharedMemory]) -> int:
        """Makes buffers on this rank's GPU, each for the stored bytes of a block, and returns their total size.
        Collective.

        Raises OutOfMemoryError and DeviceError on all ranks."""
        torch.cuda.empty_cache()  # the engine needs the memory for the buffers
        nbytes, members, setting = round_up(nbytes), self._members, ranks.exchange_setting()
        offers = members.gather_results(lambda: _verbs.gather_offer(self._handle, buffers, nbytes))

        def map_buffers() -> tuple[str, bool]:
            if setting not in ("auto", "mapped"):
                return f"OVERWIRE_EXCHANGE is {setting}", True
            try:
                _verbs.gather_join(offers, self._handle, buffers, self._limit_ms())
            except OverwireError as error:
                return str(error).removeprefix("overwire: "), isinstance(error, NotSupportedError)
            return "", False

        every = members.gather_results(map_buffers)
        reasons = sorted((one for one in every if one[0]), key=lambda one: not one[1])
        if reasons and not reasons[0][1]:
            members.raise_alike(IOFailure(f"overwire: offload: group: {reasons[0][0]}"))
        self._whole = bool(reasons)
        if self._whole:
            log.warning("overwire: offload: each rank copies all weights from the host: %s", reasons[0][0])
            members.gather_results(lambda: self._pin_others(memories))
        return buffers * nbytes

    def _pin_others(self, memories: Sequence[SharedMemory]) -> None:
        for memory in memories:
            for low in range(0, memory.nbytes, memory.share):
                if low != memory.part[0]:
                    memory.pin_range((low, min(low + memory.share, memory.nbytes)), self._device)

    def fetch_part(self, memory: SharedMemory, after: int | None = None) -> None:
        """Announces that this rank loads a block, and waits until all ranks have announced it. On a GPU it then queues
        the copy of this rank's part after the work that is now queued on the stream `after`.

        Raises ArgumentError if the ranks load different blocks, and IOFailure if a rank is gone or too late."""
        with self._going_on(self._names[memory.number]):
            blocks: list[int] = []

            def meet_others(ms: int) -> bool:
                blocks[:] = memoryview(_verbs.gather_meet(self._handle, memory.number, ms)[1]).cast("q")
                return len(blocks) == self._members.size

            self._await_ranks(meet_others, lambda: f"rank {len(blocks)} has not run it")
            for rank, block in enumerate(blocks):
                if block != blocks[0]:
                    own, first = self._names[block], self._names[blocks[0]]
                    text = f"overwire: offload: rank {rank} runs block {own!r} where rank 0 runs {first!r}"
                    raise ArgumentError(f"{text}: all ranks of the group must run the same blocks in the same order")
            if after is not None:
                piece = memory.place, memory.nbytes, memory.share, int(self._whole), after
                self._await_ranks(lambda ms: _verbs.gather_copy(self._handle, *piece, ms), _describe_slow)

    def take_block(self, memory: SharedMemory, stream: int) -> int:
        """Makes a stream wait until the oldest block from `fetch_part` is on this rank's GPU. Returns its address
        there.

        Raises IOFailure."""
        with self._going_on(self._names[memory.number]):
            return self._await_ranks(lambda ms: _verbs.gather_take(self._handle, stream, ms), _describe_slow)

    def _await_ranks(self, call: Callable[[int], int], describe_slow: Callable[[], str]) -> int:
        until = time.monotonic() + self._timeout
        while not (result := call(_SLICE_MS)):
            if time.monotonic() > until:
                raise IOFailure(f"{describe_slow()} within {self._timeout:g} s, the group's timeout")
        return result

    @contextmanager
    def _going_on(self, name: str) -> Iterator[None]:
        # The ranks are out of step after any exception.
        with pass_error_to(self.leave_step):
            try:
                if self._broken:
                    raise IOFailure(f"the group cannot be used after an earlier error: {self._broken}")
                yield
            except IOFailure as error:
                text = f"{_text_of(error)}. Offloaded.close() restores this rank's weights"
                raise IOFailure(f"overwire: offload: block {name!r}: {text}") from error

    def leave_step(self, error: BaseException) -> None:
        """Ends the use of the group after an error on this rank, and tells the other ranks."""
        self._broken = self._broken or _text_of(error)
        if not isinstance(error, IOFailure):  # the other ranks detect the causes of an IOFailure themselves
            _verbs.gather_end(self._handle, 1)

    def close_ring(self) -> None:
        """Frees the buffers. Not collective, but waits briefly for the other ranks."""
        if self._handle:
            _verbs.gather_end(self._handle, 0)

    def close_all(self) -> None:
        """Frees all memory. The other ranks can still restore their weights. Not collective."""
        handle, self._handle = self._handle, 0
        if handle:
            for memory in list(self._memories):
                memory.unpin_all()
            release(handle)

    @skip_at_exit
    def __del__(self) -> None:
        if getattr(self, "_handle", 0):
            self.close_all()


def _digest_of(facts: object) -> bytes:
    return hashlib.sha256(repr(facts).encode()).digest()


def _most_stored_bytes(block: Block, source: Source | None) -> list[int]:
    # Returns the largest possible length of each weight's stream.
    most = max_sizes([weight.parameter.nbytes for weight in block.weights])
    if source is None:
        return most
    streams = map(source.stream_of, block.weights)
    return [one.nbytes if one is not None else length for one, length in zip(streams, most, strict=True)]


def _text_of(error: BaseException) -> str:
    return (str(error) or type(error).__name__).removeprefix("overwire: ").removeprefix("i/o error: ")


def _describe_slow() -> str:
    return "the GPUs have not copied it"

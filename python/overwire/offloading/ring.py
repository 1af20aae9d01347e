"""The ring: a few slots of device memory that the blocks of a model pass through.

A block's stored bytes are copied into one of two staging buffers on a stream of their
own, and decoded from there into a slot on another. What computes waits for a slot on
the device, by an event, and a slot is written again only after what has read it; the
host waits for neither. While a block runs, those that followed it the last time are
fetched. On the CPU there is nothing to hide: a block is decoded when it is asked for.

Threads may share a ring. Each holds the slots of the blocks that it runs; one that finds
all slots held waits until one is released.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch

from .. import gpu
from .._locks import new_lock
from ..errors import NotSupportedError
from ..frameworks.torch import _errors_of
from .stored import CHUNK, StoredBlock, decode_on_host


class Hold(NamedTuple):
    """One run of a block: its thread, the frame that is on that thread's stack as long as it
    runs, and the stream that it computes on."""

    thread: int
    frame: FrameType
    stream: Any


class Slot:
    """Device memory for one block, and who uses it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.block: int | None = None
        self.ready: Any = None  # the event behind which its bytes are there
        self.readers: list[Any] = []  # events behind which nothing reads it
        self.holds: list[Hold] = []


class Ring:
    """Slots for blocks, which `acquire` fills and `release` gives back. `evicted` is called
    with the number of a block before its slot gets another."""

    def __init__(
        self,
        blocks: Sequence[StoredBlock],
        device: torch.device,
        count: int,
        evicted: Callable[[int], None] | None = None,
    ) -> None:
        self._blocks = blocks
        self._evicted = evicted
        #: Held by every change of the ring; it may be held around several.
        self.lock = threading.Condition(new_lock())
        self._following = {at: (at + 1) % len(blocks) for at in range(len(blocks))}
        self._previous: dict[int, int] = {}  # by thread: the block that it ran last
        self._waiting: dict[int, int] = {}  # by thread: the block that it waits for
        count = min(count, len(blocks))
        slot_bytes = max((block.nbytes for block in blocks), default=0)
        staging_bytes = max((block.memory.nbytes for block in blocks), default=0)
        self._carrier = _carrier_for(device, staging_bytes)
        #: Bytes of device memory that the ring takes.
        self.nbytes: int = count * slot_bytes + self._carrier.nbytes
        with _errors_of(str(device), self.nbytes):
            self._slots = [Slot(torch.empty(slot_bytes, dtype=torch.uint8, device=device)) for _ in range(count)]
        self._carrier.follow_current()

    def acquire(self, at: int, frame: FrameType) -> torch.Tensor:
        """The memory of a slot that has block `at`, for what the current stream does from
        now on, until `release`. frame: see `Hold`. Begins to fetch the blocks that followed
        it the last time.

        Raises CorruptError where stored bytes have changed, NotSupportedError where those who
        hold all slots wait for another: this thread, or several.
        """
        thread = threading.get_ident()
        with self.lock:
            self._drop_stale_holds()
            while (slot := self._slot_of(at) or self._fetch_block(at)) is None:
                if self._drop_stale_holds():
                    continue
                self._waiting[thread] = at
                try:
                    if self._is_stuck():
                        raise NotSupportedError(
                            f"overwire: offload: {len(self._slots)} blocks run within one another: give more slots="
                        )
                    self.lock.wait(1.0)  # a thread that holds a slot may end without a word
                finally:
                    self._waiting.pop(thread, None)
            before = self._previous.get(thread)
            if before is not None and before != at:
                self._following[before] = at
            self._previous[thread] = at
            if self._carrier.ahead:
                self._fetch_following(at)
            self._carrier.await_ready(slot)
            slot.holds.append(Hold(thread, frame, self._carrier.stream()))  # if what precedes fails, nothing runs
        return slot.memory

    def release(self, at: int) -> bool:
        """Ends this thread's run of block `at`: its slot may be filled anew behind what the
        current stream has been given. Returns whether no other run holds it."""
        thread = threading.get_ident()
        with self.lock:
            slot = self._slot_of(at)
            own_holds = [hold for hold in slot.holds if hold.thread == thread] if slot is not None else []
            if slot is None or not own_holds:
                return False
            slot.holds.remove(own_holds[-1])
            self._carrier.mark_read(slot, self._carrier.stream())
            self.lock.notify_all()
            return not slot.holds

    def runs(self, at: int) -> bool:
        """Whether this thread runs block `at`."""
        slot, thread = self._slot_of(at), threading.get_ident()
        return slot is not None and any(hold.thread == thread for hold in slot.holds)

    def owns(self, at: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the slot of block `at`, whose bytes change later."""
        slot = self._slot_of(at)
        return slot is not None and _storage_of(tensor) == slot.memory.untyped_storage().data_ptr()

    def leave(self, at: int) -> int:
        """Gives the slot of block `at`, which this thread runs, other memory with the same bytes:
        a tensor that outlives the run has its own. Returns the address of that."""
        slot = self._slot_of(at)
        assert slot is not None
        address = slot.memory.data_ptr()
        self._carrier.leave(slot)
        return address

    def close(self) -> None:
        """Waits for what is under way, and frees the slots. Raises NotSupportedError while a
        block runs."""
        with self.lock:
            self._drop_stale_holds()
            if any(slot.holds for slot in self._slots):
                raise NotSupportedError("overwire: offload: close: a block runs, in this thread or another")
            self._carrier.wait()
            self._slots = []

    def _slot_of(self, at: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.block == at), None)

    def _fetch_block(self, at: int, spare: Sequence[int] = ()) -> Slot | None:
        # Fills a slot that no one holds and that has none of the blocks `spare`.
        free = [slot for slot in self._slots if not slot.holds and (slot.block is None or slot.block not in spare)]
        if not free:
            return None
        slot = free[0]
        if slot.block is not None and self._evicted is not None:
            self._evicted(slot.block)
        slot.block = None  # if what follows fails, it has nothing
        self._carrier.fetch(self._blocks[at], slot)
        slot.block = at
        self._slots.append(self._slots.pop(self._slots.index(slot)))  # what was filled last is replaced last
        return slot

    def _fetch_following(self, at: int) -> None:
        order, block = [at], at
        while len(order) < len(self._slots) and self._following[block] not in order:
            block = self._following[block]
            order.append(block)
        for block in order[1:]:
            if self._slot_of(block) is None and self._fetch_block(block, order) is None:
                return

    def _is_stuck(self) -> bool:
        # Every slot is held by a thread that waits for a block that is in none.
        waiting = {thread for thread, at in self._waiting.items() if self._slot_of(at) is None}
        return all(any(hold.thread in waiting for hold in one.holds) for one in self._slots)

    def _drop_stale_holds(self) -> bool:
        # A run that Ctrl-C ended has called no hook: its frame has ended, too.
        any_stale = False
        for slot in self._slots:
            for hold in list(slot.holds):
                if _has_ended(hold.frame):
                    slot.holds.remove(hold)
                    self._carrier.mark_read(slot, hold.stream)
                    any_stale = True
            if any_stale and not slot.holds and slot.block is not None and self._evicted is not None:
                self._evicted(slot.block)
        return any_stale


def _storage_of(tensor: torch.Tensor) -> int:
    # The address of its memory; 0 where it has none of its own, as one that is made of others.
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _has_ended(frame: FrameType) -> bool:
    # Asked of the frame: to walk the stack of a thread that runs can end the process.
    try:
        frame.clear()
    except RuntimeError:  # it runs
        return False
    return True


def _carrier_for(device: torch.device, staging_bytes: int) -> _HostCarrier | _GPUCarrier:
    return _GPUCarrier(device, staging_bytes) if device.type == "cuda" else _HostCarrier()


class _HostCarrier:
    """Decodes on the host's cores, at once."""

    ahead = False
    nbytes = 0

    def fetch(self, block: StoredBlock, slot: Slot) -> None:
        decode_on_host(block, range(len(block.places)), slot.memory)

    def stream(self) -> Any:
        return None

    def await_ready(self, slot: Slot) -> None:
        pass

    def mark_read(self, slot: Slot, stream: Any) -> None:
        pass

    def leave(self, slot: Slot) -> None:
        slot.memory = slot.memory.clone()

    def follow_current(self) -> None:
        pass

    def wait(self) -> None:
        pass


class _GPUCarrier:
    """Copies and decodes on two streams of a GPU, beside what computes."""

    ahead = True

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        self.nbytes = 2 * staging_bytes
        self._device = device
        with _errors_of(str(device), self.nbytes):
            self._copying, self._decoding = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._staging = [torch.empty(staging_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._decoded: list[Any] = [None, None]  # by staging buffer: the event behind which it is free
        self._turn = 0
        self._tasks: dict[tuple[int, int, int], bytes] = {}  # what is decoded, by block, staging buffer and slot
        self._batches: deque[gpu.Batch] = deque()  # whose results are not known yet

    def fetch(self, block: StoredBlock, slot: Slot) -> None:
        number = self._device.index
        self._raise_failed()
        staging, turn = self._staging[self._turn], self._turn
        self._turn ^= 1
        with torch.cuda.device(self._device):
            if self._decoded[turn] is not None:
                self._copying.wait_event(self._decoded[turn])
            gpu.copy(
                staging.data_ptr(),
                block.memory.address,
                block.memory.nbytes,
                device=number,
                stream=self._copying.cuda_stream,
                wait=False,
            )
            self._decoding.wait_stream(self._copying)
            for event in slot.readers:
                self._decoding.wait_event(event)
            slot.readers = []
            key = (block.memory.address, turn, slot.memory.data_ptr())
            tasks = self._tasks.get(key)
            if tasks is None:
                tasks = self._tasks[key] = gpu.pack_streams(
                    (staging.data_ptr() + offset, length, slot.memory.data_ptr() + place.offset, place.nbytes, CHUNK)
                    for place, (offset, length) in zip(block.places, block.streams, strict=True)
                    if place.nbytes
                )
            self._batches.append(gpu.decode(number, self._decoding.cuda_stream, tasks, "X16"))
            slot.ready = self._decoded[turn] = self._decoding.record_event()

    def stream(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def await_ready(self, slot: Slot) -> None:
        self.stream().wait_event(slot.ready)

    def mark_read(self, slot: Slot, stream: Any) -> None:
        slot.readers.append(stream.record_event())

    def leave(self, slot: Slot) -> None:
        before, stream = slot.memory, self.stream()
        with torch.cuda.device(self._device):
            slot.memory = before.clone()
            slot.memory.record_stream(self._decoding)
            before.record_stream(stream)
            slot.ready = stream.record_event()
        self._tasks = {key: tasks for key, tasks in self._tasks.items() if key[2] != before.data_ptr()}

    def follow_current(self) -> None:
        # The allocator's memory may still be used by what the current stream was given.
        for stream in (self._copying, self._decoding):
            stream.wait_stream(self.stream())

    def wait(self) -> None:
        for stream in (self._copying, self._decoding, self.stream()):
            stream.synchronize()
        self._raise_failed()

    def _raise_failed(self) -> None:
        while self._batches and (results := self._batches[0].poll()) is not None:
            self._batches.popleft()
            for error in results:
                if isinstance(error, BaseException):
                    raise error

"""The ring: a few slots of device memory that the blocks of a model pass through.

A block's stored bytes are copied into one of two staging buffers on a stream of their
own, and decoded from there into a slot on another. What computes waits for a slot on
the device, by an event, and a slot is written again only after what has read it; the
host waits for neither. While a block runs, those that followed it the last time are
fetched. On the CPU there is nothing to hide: a block is decoded when it is asked for.

A slot whose memory something still holds after a run is never written again: it leaves the
ring with its block, and the ring gets another one. It is freed once nothing holds it.

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
        self.views: dict[int, list[torch.Tensor]] = {}  # by block: its weights in this memory
        self.block: int | None = None
        self.ready: Any = None  # the event behind which its bytes are there
        self.readers: list[Any] = []  # events behind which nothing reads it
        self.streams: set[Any] = set()  # that they are of
        self.holds: list[Hold] = []


class Ring:
    """Slots for blocks, which `acquire` fills and `release` gives back. `vacate` is called with
    the number of a block when its last run ends: it takes the weights out of the slot, and
    returns False where they have to stay there."""

    def __init__(
        self,
        blocks: Sequence[StoredBlock],
        device: torch.device,
        count: int,
        vacate: Callable[[int], bool] | None = None,
    ) -> None:
        self._blocks = blocks
        self._device = device
        self._vacate = vacate or (lambda at: True)
        self._inference = torch.is_inference_mode_enabled()  # that its tensors are made in
        #: Held by every change of the ring; it may be held around several.
        self.lock = threading.Condition(new_lock())
        self._following = {at: (at + 1) % len(blocks) for at in range(len(blocks))}
        self._previous: dict[int, int] = {}  # by thread: the block that it ran last
        self._waiting: dict[int, int] = {}  # by thread: the block that it waits for
        self._count = count = min(count, len(blocks))
        self._slot_bytes = slot_bytes = max((block.nbytes for block in blocks), default=0)
        self._left: dict[int, Slot] = {}  # by block: slots that have left the ring
        staging_bytes = max((block.memory.nbytes for block in blocks), default=0)
        self._carrier = _carrier_for(device, staging_bytes)
        #: Bytes of device memory that the ring takes.
        self.nbytes: int = count * slot_bytes + self._carrier.nbytes
        self._slots = [self._make_slot() for _ in range(count)]
        self._carrier.follow_current()

    def acquire(self, at: int, frame: FrameType) -> Slot:
        """A slot that has block `at`, its views included, for what the current stream does from
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
            if at not in slot.views:
                with torch.inference_mode(self._inference), torch.no_grad():
                    slot.views[at] = [place.view(slot.memory) for place in self._blocks[at].places]
            slot.holds.append(Hold(thread, frame, self._carrier.stream()))  # if what precedes fails, nothing runs
        return slot

    def release(self, at: int) -> bool:
        """Ends this thread's run of block `at`: its slot may be filled anew behind what the
        current stream has been given. Returns whether that is so: no other run holds it, and
        its weights are out of it."""
        thread = threading.get_ident()
        with self.lock:
            slot = self._slot_of(at)
            own_holds = [hold for hold in slot.holds if hold.thread == thread] if slot is not None else []
            if slot is None or not own_holds:
                return False
            slot.holds.remove(own_holds[-1])
            self._carrier.mark_read(slot, self._carrier.stream())
            self.lock.notify_all()
            return not slot.holds and self._empty_slot(slot)

    def runs(self, at: int) -> bool:
        """Whether this thread runs block `at`."""
        slot, thread = self._slot_of(at), threading.get_ident()
        return slot is not None and any(hold.thread == thread for hold in slot.holds)

    def compares_bytes(self, runs: int) -> bool:
        """Whether a block's bytes are compared with what is stored after this many runs: always on
        the host. On a GPU that makes the host wait: after the first run, the 2nd, 4th, 8th ..."""
        return not self._carrier.ahead or runs & (runs - 1) == 0

    def is_as_stored(self, at: int) -> bool:
        """Whether the slot of block `at` has the bytes that are stored. Waits for the current stream."""
        slot = self._slot_of(at)
        assert slot is not None
        return self._blocks[at].is_in(slot.memory)

    def close(self) -> None:
        """Waits for what is under way; the slots are freed with the ring. Raises NotSupportedError
        while a block runs."""
        with self.lock:
            self._drop_stale_holds()
            if any(slot.holds for slot in self._slots):
                raise NotSupportedError("overwire: offload: close: a block runs, in this thread or another")
            self._carrier.wait()
            self._free_left()

    def _slot_of(self, at: int) -> Slot | None:
        return next((slot for slot in self._slots if slot.block == at), None) or self._left.get(at)

    def _make_slot(self) -> Slot:
        with _errors_of(str(self._device), self._slot_bytes), torch.inference_mode(self._inference), torch.no_grad():
            slot = Slot(torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device))
        self._carrier.adopt_slot(slot)
        return slot

    def _empty_slot(self, slot: Slot) -> bool:
        # Takes a block that no one runs out of its slot, or else the slot out of the ring.
        at = slot.block
        if at is None:
            return True
        if is_empty := self._vacate(at):
            if self._left.pop(at, None) is None:
                return True
            self.nbytes -= self._slot_bytes
        elif at not in self._left:
            self._slots.remove(slot)
            self._left[at] = slot
            self.nbytes += self._slot_bytes
        self._carrier.leave(slot)
        return is_empty

    def _free_left(self) -> None:
        for slot in list(self._left.values()):
            if not slot.holds:
                self._empty_slot(slot)

    def _fetch_block(self, at: int, spare: Sequence[int] = ()) -> Slot | None:
        # Fills a slot that no one holds and that has none of the blocks `spare`.
        self._free_left()
        slot = self._free_slot(spare)
        if slot is None:
            return None
        slot.block = None  # if what follows fails, it has nothing
        self._carrier.fetch(self._blocks[at], slot)
        slot.block = at
        self._slots.append(self._slots.pop(self._slots.index(slot)))  # what was filled last is replaced last
        return slot

    def _free_slot(self, spare: Sequence[int]) -> Slot | None:
        for slot in list(self._slots):
            if not slot.holds and (slot.block is None or slot.block not in spare) and self._empty_slot(slot):
                return slot
        if len(self._slots) == self._count:
            return None
        self._slots.append(self._make_slot())  # in the place of one that has left
        return self._slots[-1]

    def _fetch_following(self, at: int) -> None:
        order, block = [at], at
        while len(order) < self._count and self._following[block] not in order:
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
        for slot in [*self._slots, *self._left.values()]:
            stale = [hold for hold in slot.holds if _has_ended(hold.frame)]
            for hold in stale:
                slot.holds.remove(hold)
                self._carrier.mark_read(slot, hold.stream)
            if stale and not slot.holds:
                self._empty_slot(slot)
            any_stale = any_stale or bool(stale)
        return any_stale


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

    def adopt_slot(self, slot: Slot) -> None:
        pass

    def leave(self, slot: Slot) -> None:
        pass

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
            slot.readers, slot.streams = [], set()
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
        slot.streams.add(stream)

    def adopt_slot(self, slot: Slot) -> None:
        # The allocator gives memory that the current stream may still use.
        slot.readers.append(self.stream().record_event())
        slot.memory.record_stream(self._decoding)

    def leave(self, slot: Slot) -> None:
        # Its memory may be freed at any time: not before the streams that read it are done.
        for stream in slot.streams:
            slot.memory.record_stream(stream)
        slot.readers, slot.streams = [], set()
        address = slot.memory.data_ptr()
        self._tasks = {key: tasks for key, tasks in self._tasks.items() if key[2] != address}

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

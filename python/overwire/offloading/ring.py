"""Implements the ring: a few slots of device memory that the blocks of a model use in turn.

One stream copies a block's stored bytes into one of two staging buffers, and another stream decodes them from there
into a slot. Stored bytes that are on the device are decoded from where they are. A slot is filled again only after all
its readers are done, for which the device waits. While a block runs, the blocks that followed it the last time are
loaded. On the CPU nothing overlaps, and a block is decoded when it is needed.

The host waits until a block is decoded before it queues the block's work. Only then is it known whether the stored
bytes were valid, and nothing may be computed from others. The following blocks are queued before this wait, so the
device always has work.

If something still uses a slot's memory after a run, the slot is never written again. It leaves the ring together with
its block, and is freed when nothing uses it. The ring gets a new slot instead.

The rings of a group have to load the same blocks in the same order. If a slot leaves one of them, the new slot takes
its position and counts as the block's slot. The block is also loaded whenever the other rings load it, and the copy is
not used. When nothing uses the old slot any more, it returns.

Several threads may share a ring. Each holds the slots of the blocks that it is running. If all slots are held, a thread
waits for one to be released.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import gpu
from .._locks import new_lock
from .._undo import after_error, pass_error_to
from ..errors import NotSupportedError
from ..frameworks.torch import _errors_of
from .stored import SharedMemory, StoredBlock, StoredMemory, decode_on_host

if TYPE_CHECKING:
    from .sharing import BlockGroup


class Hold(NamedTuple):
    """One run of a block. thread: its thread. frame: a frame that is on the thread's stack while the block runs.
    stream: the stream on which the block computes."""

    thread: int
    frame: FrameType
    stream: Any


class Slot:
    """Device memory for one block, and the runs that use it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.views: dict[int, list[torch.Tensor]] = {}  # the weights of each block, as views of this memory
        self.block: int | None = None
        self.decoding: gpu.Batch | None = None  # the decoding of its block, until its result is known
        self.readers: list[Any] = []  # events after which the readers are done
        self.streams: set[Any] = set()  # the streams of the readers
        self.holds: list[Hold] = []


class Ring:
    """Slots for blocks. `acquire` fills a slot and holds it, and `release` releases it.

    vacate: called with the number of a block after its last run. It must remove the weights from the slot, or return
    False if they have to stay there.

    group: the ranks that hold the blocks together, which all make a ring. A block that is loaded is announced to them.
    """

    def __init__(
        self,
        blocks: Sequence[StoredBlock],
        device: torch.device,
        count: int,
        vacate: Callable[[int], bool] | None = None,
        group: BlockGroup | None = None,
    ) -> None:
        self._blocks = blocks
        self._device = device
        self._is_shared = group is not None
        self._vacate = vacate or (lambda at: True)
        self._inference = torch.is_inference_mode_enabled()  # whether to create tensors in inference mode
        #: The lock for all changes of the ring. Callers may hold it around several changes.
        self.lock = threading.Condition(new_lock())
        self._following = {at: (at + 1) % len(blocks) for at in range(len(blocks))}
        self._previous: dict[int, int] = {}  # the block that each thread ran last
        self._waiting: dict[int, int] = {}  # the block that each waiting thread needs
        self._count = count = min(count, len(blocks))
        self._slot_bytes = slot_bytes = max((block.nbytes for block in blocks), default=0)
        self._left: dict[int, Slot] = {}  # slots that have left the ring, by block
        on_host = [block.memory for block in blocks if not block.memory.is_on_device]
        self._carrier = _carrier_for(device, on_host, group, max(3, count))
        #: Bytes of device memory that the ring takes.
        self.nbytes: int = count * slot_bytes + self._carrier.nbytes
        self._slots = [self._make_slot() for _ in range(count)]
        self._carrier.follow_current()

    def acquire(self, at: int, frame: FrameType) -> Slot:
        """Returns a slot with block `at` and its views, for work that is queued on the current stream before `release`.
        Starts to load the blocks that followed this block the last time. frame: see `Hold`.

        Raises CorruptError if the stored bytes cannot be decoded, and NotSupportedError if all slots are held by
        threads that wait for another slot.
        """
        thread = threading.get_ident()
        with self.lock:
            self._drop_stale_holds()
            while not self._is_loaded(at) and self._fetch_block(at) is None:
                if self._drop_stale_holds():
                    continue
                self._waiting[thread] = at
                try:
                    if self._is_stuck():
                        text = f"more than {len(self._slots)} blocks run inside each other: pass a larger slots="
                        raise NotSupportedError(f"overwire: offload: {text}")
                    self.lock.wait(1.0)  # with a timeout, because a thread that holds a slot may end without a release
                finally:
                    self._waiting.pop(thread, None)
            before = self._previous.get(thread)
            if before is not None and before != at:
                self._following[before] = at
            self._previous[thread] = at
            if self._carrier.ahead:
                self._fetch_following(at)
            slots = self._slots_of(at)
            for slot in slots:
                self._await_decoded(slot)
            if at not in slots[0].views:
                with torch.inference_mode(self._inference), torch.no_grad():
                    slots[0].views[at] = [place.view(slots[0].memory) for place in self._blocks[at].places]
            for slot in slots:  # last, because a step above may fail
                slot.holds.append(Hold(thread, frame, self._carrier.stream()))
        return slots[0]

    def release(self, at: int) -> bool:
        """Ends this thread's run of block `at`. The slot can be filled again after the queued work of the current
        stream. Returns whether the slot is free: no other run holds it, and the weights were removed from it."""
        thread = threading.get_ident()
        with self.lock:
            slot = self._slot_of(at)
            own_holds = [hold for hold in slot.holds if hold.thread == thread] if slot is not None else []
            if slot is None or not own_holds:
                return False
            for one in self._slots_of(at):
                if own_holds[-1] in one.holds:
                    one.holds.remove(own_holds[-1])
                    self._carrier.mark_read(one, self._carrier.stream())
            self.lock.notify_all()
            return not slot.holds and self._empty_slot(slot)

    def runs(self, at: int) -> bool:
        """Returns whether this thread is running block `at`."""
        slot, thread = self._slot_of(at), threading.get_ident()
        return slot is not None and any(hold.thread == thread for hold in slot.holds)

    def compares_bytes(self, runs: int) -> bool:
        """Returns whether to compare a block's bytes with the stored ones after this many runs: on the CPU after every
        run, and on a GPU, where the host has to wait, after the 1st, 2nd, 4th, 8th ... run."""
        return not self._carrier.ahead or runs & (runs - 1) == 0

    def is_as_stored(self, at: int) -> bool:
        """Returns whether the slot of block `at` contains exactly the stored bytes. Waits for the current stream."""
        slot = self._slot_of(at)
        assert slot is not None
        return self._blocks[at].is_in(slot.memory)

    def close(self) -> None:
        """Waits for running copies. The ring frees the slots. Raises NotSupportedError if a block is running."""
        with self.lock:
            self._drop_stale_holds()
            if any(slot.holds for slot in self._slots):
                raise NotSupportedError("overwire: offload: close: a block is running, in this thread or another")
            self._carrier.wait()
            self._free_left()
            self._blocks = ()  # so that restoring a block frees its stored bytes

    def _await_decoded(self, slot: Slot) -> None:
        # After an error the slot is empty, so that the block is decoded again when it runs again.
        with after_error(setattr, slot, "block", None):
            self._carrier.await_decoded(slot)

    def _slots_of(self, at: int) -> list[Slot]:
        # The slot with the block's weights, and in a group also the slot that the ring has for a block that has left.
        slots = [slot for slot in self._slots if slot.block == at]
        return [self._left[at], *slots] if at in self._left else slots

    def _slot_of(self, at: int) -> Slot | None:
        return next(iter(self._slots_of(at)), None)

    def _is_loaded(self, at: int) -> bool:
        # In a group, a block that has left one ring is loaded if it is in the others.
        return any(slot.block == at for slot in self._slots) or not self._is_shared and at in self._left

    def _make_slot(self) -> Slot:
        with _errors_of(str(self._device), self._slot_bytes), torch.inference_mode(self._inference), torch.no_grad():
            slot = Slot(torch.empty(self._slot_bytes, dtype=torch.uint8, device=self._device))
        self._carrier.adopt_slot(slot)
        return slot

    def _empty_slot(self, slot: Slot) -> bool:
        # Removes a block that is not running from its slot, and returns whether it did. If the block has to stay,
        # removes the slot from the ring.
        at = slot.block
        if at is None or self._left.get(at, slot) is not slot:
            return True
        if is_empty := self._vacate(at):
            if at not in self._left:
                return True
            self.nbytes -= self._slot_bytes
            for spare in self._slots_of(at)[1:]:  # its bytes may never have been loaded
                self._carrier.return_slot(slot)
                self._slots[self._slots.index(spare)] = slot
            del self._left[at]
            if slot in self._slots:
                return True
        elif at not in self._left:
            slots = [self._make_slot()] if self._is_shared else []
            index = self._slots.index(slot)
            self._slots[index : index + 1] = slots
            self._left[at] = slot
            self.nbytes += self._slot_bytes
            for spare in slots:  # last, because Ctrl-C may come before
                spare.block = at
        self._carrier.leave(slot)
        return is_empty

    def _free_left(self, spare: Sequence[int] = ()) -> None:
        for at, slot in list(self._left.items()):
            if not slot.holds and at not in spare:
                self._empty_slot(slot)

    def _fetch_block(self, at: int, spare: Sequence[int] = ()) -> Slot | None:
        # Loads a block into a free slot without a block in `spare`. Returns the slot, or None if there is none.
        self._free_left(spare)
        slot = self._free_slot(spare)
        if slot is None:
            return None
        slot.block = None  # the slot counts as empty if the next step fails
        self._carrier.fetch(self._blocks[at], slot)
        slot.block = at
        self._slots.append(self._slots.pop(self._slots.index(slot)))  # the slot filled last is replaced last
        return slot

    def _free_slot(self, spare: Sequence[int]) -> Slot | None:
        for index, slot in enumerate(list(self._slots)):
            if not slot.holds and (slot.block is None or slot.block not in spare):
                if self._empty_slot(slot):
                    return slot
                if self._is_shared:
                    return self._slots[index]
        if len(self._slots) == self._count:
            return None
        self._slots.append(self._make_slot())  # replaces a slot that has left the ring
        return self._slots[-1]

    def _fetch_following(self, at: int) -> None:
        order, block = [at], at
        while len(order) < self._count and self._following[block] not in order:
            block = self._following[block]
            order.append(block)
        for block in order[1:]:
            if not self._is_loaded(block) and self._fetch_block(block, order) is None:
                return

    def _is_stuck(self) -> bool:
        # Returns whether every slot is held by a thread that waits for another slot.
        waiting = {thread for thread, at in self._waiting.items() if not self._is_loaded(at)}
        return all(any(hold.thread in waiting for hold in one.holds) for one in self._slots)

    def _drop_stale_holds(self) -> bool:
        # Releases the slots of runs that Ctrl-C has ended before they called the hook. Their frames have ended.
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
    # Tries to clear the frame, because walking the stack of a running thread can crash the process.
    try:
        frame.clear()
    except RuntimeError:  # the frame is running
        return False
    return True


def _carrier_for(
    device: torch.device, stored: Sequence[StoredMemory], group: BlockGroup | None, buffers: int
) -> _HostCarrier | _GPUCarrier:
    return _GPUCarrier(device, stored, group, buffers) if device.type == "cuda" else _HostCarrier(group)


class _HostCarrier:
    """Decodes blocks on the CPU, when they are fetched."""

    ahead = False
    nbytes = 0

    def __init__(self, group: BlockGroup | None = None) -> None:
        self._group = group

    def fetch(self, block: StoredBlock, slot: Slot) -> None:
        if self._group is not None and isinstance(block.memory, SharedMemory):
            self._group.fetch_part(block.memory)
        decode_on_host(block, range(len(block.places)), slot.memory)

    def _do_nothing(self, *arguments: object) -> None:
        pass

    # There are no streams, so there is nothing to wait for.
    stream = await_decoded = mark_read = adopt_slot = leave = return_slot = follow_current = wait = _do_nothing


class _GPUCarrier:
    """Copies and decodes blocks on two streams of a GPU, concurrently with the computation.

    A block that a group holds together is copied to a buffer of the group, and decoded when it is needed or its slot
    or buffer is needed. So the host waits for copies only after it has queued the work of the block before."""

    ahead = True

    def __init__(
        self, device: torch.device, stored: Sequence[StoredMemory], group: BlockGroup | None, buffers: int
    ) -> None:
        self._device, self._group, self._buffers = device, group, buffers
        self._coming: deque[tuple[SharedMemory, StoredBlock, Slot]] = deque()  # blocks that the group copies
        memories = [memory for memory in stored if isinstance(memory, SharedMemory)]
        staging_bytes = max((memory.nbytes for memory in stored), default=0)
        self.nbytes = 2 * staging_bytes
        if group is not None and memories:
            self.nbytes, staging_bytes = group.open_ring(staging_bytes, buffers, memories), 0
        with _errors_of(str(device), 2 * staging_bytes):
            self._copying, self._decoding = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
            self._staging = [torch.empty(staging_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._decoded: list[Any] = [None, None]  # for each staging buffer, an event after which it is free
        self._turn = 0
        self._tasks: dict[tuple[int, int, int], bytes] = {}  # decoding tasks, by block, source and slot

    def fetch(self, block: StoredBlock, slot: Slot) -> None:
        memory = block.memory
        with torch.cuda.device(self._device):
            while self._is_coming(slot):
                self._decode_oldest()
            if self._group is not None and isinstance(memory, SharedMemory):
                if len(self._coming) == self._buffers:
                    self._decode_oldest()
                with pass_error_to(self._group.leave_step):  # the group's copies must be those in `_coming`
                    self._group.fetch_part(memory, self._decoding.cuda_stream)
                    self._coming.append((memory, block, slot))
            elif memory.is_on_device:
                memory.tensor.record_stream(self._decoding)
                self._decode_block(block, slot, memory.address)
            else:
                turn = self._copy_up(memory)
                self._decode_block(block, slot, self._staging[turn].data_ptr())
                self._decoded[turn] = self._decoding.record_event()

    def _is_coming(self, slot: Slot) -> bool:
        return any(one is slot for _, _, one in self._coming)

    def _decode_oldest(self) -> None:
        assert self._group is not None
        memory, block, slot = self._coming[0]
        with pass_error_to(self._group.leave_step):  # after an error the slot is never ready
            source = self._group.take_block(memory, self._decoding.cuda_stream)
            self._decode_block(block, slot, source)
            self._coming.popleft()

    def _decode_block(self, block: StoredBlock, slot: Slot, source: int) -> None:
        # source: the address of the stored bytes on the device.
        for event in slot.readers:
            self._decoding.wait_event(event)
        slot.readers, slot.streams = [], set()
        key = (block.memory.address, source, slot.memory.data_ptr())
        tasks = self._tasks.get(key)
        if tasks is None:
            tasks = self._tasks[key] = block.pack_tasks(source, slot.memory.data_ptr())
        slot.decoding = gpu.decode(self._device.index, self._decoding.cuda_stream, tasks, "X16")

    def _copy_up(self, memory: StoredMemory) -> int:
        # Copies stored bytes into the next staging buffer, and returns its number.
        turn = self._turn
        self._turn ^= 1
        if self._decoded[turn] is not None:
            self._copying.wait_event(self._decoded[turn])
        to, stream = self._staging[turn].data_ptr(), self._copying.cuda_stream
        gpu.copy(to, memory.address, memory.nbytes, device=self._device.index, stream=stream, wait=False)
        self._decoding.wait_stream(self._copying)
        return turn

    def stream(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def await_decoded(self, slot: Slot) -> None:
        while self._is_coming(slot):
            with torch.cuda.device(self._device):
                self._decode_oldest()
        if slot.decoding is None:
            return
        with pass_error_to(self._group.leave_step) if self._group is not None else nullcontext():
            for error in slot.decoding.wait():
                if isinstance(error, BaseException):
                    raise error
        slot.decoding = None

    def mark_read(self, slot: Slot, stream: Any) -> None:
        slot.readers.append(stream.record_event())
        slot.streams.add(stream)

    def adopt_slot(self, slot: Slot) -> None:
        # The allocator may return memory that the current stream still uses.
        slot.readers.append(self.stream().record_event())
        slot.memory.record_stream(self._decoding)

    def leave(self, slot: Slot) -> None:
        # The slot may be freed at any time. The allocator must not reuse its memory before its readers are done.
        for stream in slot.streams:
            slot.memory.record_stream(stream)
        slot.readers = []
        address = slot.memory.data_ptr()
        self._tasks = {key: tasks for key, tasks in self._tasks.items() if key[2] != address}

    def return_slot(self, slot: Slot) -> None:
        slot.readers = [stream.record_event() for stream in slot.streams]

    def follow_current(self) -> None:
        # Queued work of the current stream may still use the memory of the staging buffers and slots.
        for stream in (self._copying, self._decoding):
            stream.wait_stream(self.stream())

    def wait(self) -> None:
        for stream in (self._copying, self._decoding, self.stream()):
            stream.synchronize()

"""Batches of a group's load: what each rank reads, and how it reaches the rest.

A batch is built (its reading begins), `read` (the reading is waited for and
everything that sending needs is allocated), and after all ranks have agreed
that theirs succeeded, sent. Only `send` is collective, and only among the ranks
of one host, from rank to rank. The ways are named in `distributed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from ..dtypes import PACKED, nbytes, packed_shape
from ..errors import OverwireError
from ..frameworks.frame import Frame
from ..model.loads import Load
from ..model.opened import WHOLE, Model, Row
from .group import Members

__all__ = ["Batch", "ExchangeContext", "Task", "shard_range", "torch_shape"]

# Tensors below _LARGE are sent in runs of at most _RUN bytes.
_LARGE = 1 << 20
_RUN = 16 << 20

# Seconds between two looks at what the other ranks say, while this one reads.
_TICK = 0.25

# Sends that are started together.
_TOGETHER = 32


def shard_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The block [lo, hi) of a dimension of `size` that `rank` of `ranks` gets:
    ceil(size / ranks) each, as torch.chunk and DTensor cut; the last may be
    shorter or empty."""
    block = -(-size // ranks)
    return min(rank * block, size), min((rank + 1) * block, size)


@lru_cache
def _part(shape: tuple[int, ...], dim: int, ranks: int, rank: int) -> tuple[int, ...]:
    # The shape of a rank's block. A model has few.
    lo, hi = shard_range(shape[dim], ranks, rank)
    return (*shape[:dim], hi - lo, *shape[dim + 1 :])


def torch_shape(row: Any) -> tuple[int, ...]:
    """The shape of a row of the table, as the loaded torch tensor has it."""
    shape: tuple[int, ...] = row[2]
    return packed_shape(row[1], shape) if row[1] in PACKED else shape


class Task(NamedTuple):
    """One tensor: its position and row, its shape as loaded, and the dimension
    it is cut along, None for whole."""

    at: int
    row: Row
    shape: tuple[int, ...]
    dim: int | None


class ExchangeContext:
    """What the batches of one load share: the ranks, torch, the model opened for the
    destination, and link_model (often the same), opened for the device of the exchange."""

    def __init__(self, members: Members, frame: Frame, model: Model, link_model: Model) -> None:
        self.members, self.frame, self.model, self.link_model = members, frame, model, link_model
        self._ring: list[Any] = []

    def drain(self) -> None:
        """Waits for what is queued on the GPU, for the sake of a clock."""
        if self.model.device != "cpu":
            import torch

            torch.cuda.synchronize(self.model.device)

    def ring(self, buffers: int, size: int) -> list[Any]:
        """Buffers of `size` bytes where tensors are sent, as long as the load."""
        if not self._ring:
            self._ring = [self.frame.empty("U8", (size,), self.link_model.device) for _ in range(buffers)]
        return self._ring

    def block(self, task: Task, rank: int) -> tuple[int, int]:
        """The part of the task's dimension that a rank of the group gets."""
        assert task.dim is not None
        return shard_range(task.shape[task.dim], self.members.size, rank)

    def part_shape(self, task: Task, rank: int) -> tuple[int, ...]:
        """The shape of what a rank gets of a task."""
        return task.shape if task.dim is None else _part(task.shape, task.dim, self.members.size, rank)

    def block_read(self, task: Task, rank: int) -> tuple[int, int, int, int] | None:
        """The ranges of dims 0 and 1 that the engine reads of a task for a rank;
        None for all of it. Deeper dimensions and packed types are read whole and
        cut afterwards."""
        if task.dim is None or task.dim > 1 or task.row.dtype in PACKED:
            return None
        lo, hi = self.block(task, rank)
        block = (lo, hi, 0, WHOLE) if task.dim == 0 else (0, task.row.shape[0], lo, hi)
        return None if self.part_shape(task, rank) == task.row.shape else block

    def cut(self, task: Task, tensor: Any) -> Any:
        """This rank's block of a tensor that may have been read whole."""
        if tuple(tensor.shape) == self.part_shape(task, self.members.rank):
            return tensor
        return self.block_of(task, tensor, self.members.rank)

    def block_of(self, task: Task, tensor: Any, rank: int) -> Any:
        """A rank's block of a whole tensor, contiguous, its own memory."""
        lo, hi = self.block(task, rank)
        assert task.dim is not None
        index = tuple(slice(lo, hi, 1) if dim == task.dim else slice(0, size, 1) for dim, size in enumerate(task.shape))
        if hi <= lo:
            return self.empty(task, str(tensor.device), rank)
        return self.frame.index(tensor, index, task.row.dtype)

    def empty(self, task: Task, device: str, rank: int | None = None) -> Any:
        """Memory for a task, or for a rank's block of it."""
        shape = task.shape if rank is None else self.part_shape(task, rank)
        # `frame.empty` counts elements as the file does; these are torch's.
        if task.row.dtype in PACKED:
            flat = self.frame.empty("U8", (math.prod(shape),), device)
            typed = self.frame.empty(task.row.dtype, (0,), "cpu").dtype
            return flat.view(typed).view(shape)
        return self.frame.empty(task.row.dtype, shape, device)


class _Want(NamedTuple):
    # One request to the engine: dims 0 and 1 of a row.
    slot: int
    row: Row
    at: int
    block: tuple[int, int, int, int]
    shape: tuple[int, ...]  # of the block, in elements


class _Reading:
    """A load that is running. `finish` once, or `abandon`."""

    def __init__(self, model: Model, frame: Frame, wants: list[_Want]) -> None:
        self._model, self._frame = model, frame
        self._wants = wants
        self._load: Load | None = None
        self._busy = [want for want in wants if 0 not in want.shape]
        if self._busy:
            rows = [(w.row.name, w.row.dtype, w.shape, nbytes(w.row.dtype, w.shape)) for w in self._busy]
            self._load = model.begin_blocks([(w.at, w.block) for w in self._busy], rows, frame)

    def wait(self, look: Callable[[], None]) -> None:
        """Waits for the end of the reading, whose error `finish` raises. look: called
        meanwhile; what it raises ends the reading."""
        load = self._load
        if load is None or load.crowded:
            return
        try:
            while not _over(load):
                look()
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> Iterator[tuple[int, Any]]:
        """(slot, tensor) of each want, in any order."""
        load, self._load = self._load, None
        for want in self._wants:
            if 0 in want.shape:
                yield want.slot, self._frame.empty(want.row.dtype, want.shape, self._model.device)
        if load is not None:
            yield from zip((want.slot for want in self._busy), load.tensors(), strict=True)

    def abandon(self) -> None:
        """Cancels running work; nothing writes to its memory after that."""
        load, self._load = self._load, None
        if load is not None:
            load.job.abandon()


def _over(load: Load) -> bool:
    try:
        return load.job.ended(_TICK)
    except OverwireError:
        return True


class Batch:
    """Tensors that go one way together."""

    def __init__(self, context: ExchangeContext, way: str, tasks: list[Task]) -> None:
        self.tasks = tasks
        self._context, self._way = context, way
        self._reading: _Reading | None = None
        self._error: BaseException | None = None
        self._tensors: list[Any] = [None] * len(tasks)  # what this rank has read, then its result
        self._sends: list[_Send] = []
        members = context.members
        self._me = members.local.index(members.rank)
        self._count = len(members.local)
        self._model = context.model if way in ("each", "own") or self._count == 1 else context.link_model
        self._owners = self._owned()
        try:
            self._reading = _Reading(self._model, context.frame, [w for slot in range(len(tasks)) for w in self._wants(slot)])
        except BaseException as error:  # said by `read`, when the others can hear it
            self._error = error

    def _owned(self) -> list[int]:
        # The rank on this host that reads each task: the one with the fewest
        # stored bytes so far. -1: all of them.
        if self._way in ("each", "own") or self._count == 1:
            return [-1] * len(self.tasks)
        load = [0] * self._count
        owners = []
        for task in self.tasks:
            if task.row.nbytes == 0:
                owners.append(-1)
                continue
            owner = load.index(min(load))
            load[owner] += task.row.stored + 1
            owners.append(owner)
        return owners

    def _wants(self, slot: int) -> list[_Want]:
        task, owner = self.tasks[slot], self._owners[slot]
        rank = self._context.members.rank
        if owner not in (-1, self._me):
            return []
        block = None if owner == self._me else self._context.block_read(task, rank)
        if block is None:
            return [_Want(slot, task.row, task.at, (0, WHOLE, 0, WHOLE), task.row.shape)]
        return [_Want(slot, task.row, task.at, block, self._context.part_shape(task, rank))]

    def arrive(self) -> None:
        """Waits for the reading; `read` says what went wrong with it."""
        reading, self._reading = self._reading, None
        if reading is None:
            return
        try:
            reading.wait(self._context.members.look)
            for slot, tensor in reading.finish():
                self._tensors[slot] = tensor
        except BaseException as error:
            self._error = error

    def read(self) -> None:
        """Waits for the reading, and makes ready what is sent."""
        self.arrive()
        if self._error is not None:
            raise self._error
        sent: list[int] = []
        for slot, (task, owner) in enumerate(zip(self.tasks, self._owners, strict=True)):
            if owner >= 0:
                sent.append(slot)
            elif task.dim is not None:
                self._tensors[slot] = self._context.cut(task, self._tensors[slot])
        kind = _scatter if self._way == "scatter" else _broadcast
        for owner in range(self._count):
            run: list[int] = []
            size = 0
            for slot in (slot for slot in sent if self._owners[slot] == owner):
                nbytes = self.tasks[slot].row.nbytes
                if run and (nbytes >= _LARGE or size + nbytes > _RUN):
                    self._sends.append(kind(self, run, owner))
                    run, size = [], 0
                run.append(slot)
                size += nbytes if nbytes < _LARGE else _RUN
            if run:
                self._sends.append(kind(self, run, owner))

    def send(self) -> list[Any]:
        """Collective. Sends, and returns this rank's tensors."""
        members = self._context.members
        for first in range(0, len(self._sends), _TOGETHER):
            # NCCL runs what is started together at the same time.
            members.send_receive(
                [(members.local[peer], flat) for send in self._sends[first : first + _TOGETHER] for peer, flat in send.outgoing],
                [(members.local[peer], flat) for send in self._sends[first : first + _TOGETHER] for peer, flat in send.incoming],
            )
        for send in self._sends:
            send.finish()
        tensors = self._tensors
        if self._model is not self._context.model:
            tensors = [tensor.to(self._context.model.device) for tensor in tensors]
        self._sends, self._tensors = [], []
        return tensors

    def abandon(self) -> None:
        """Ends reading that is no longer needed. Does nothing after `arrive`."""
        if self._reading is not None:
            self._reading.abandon()
            self._reading = None


class _Send(NamedTuple):
    # One tensor, or a run of small ones, on its way between the ranks of a host: what to
    # send and receive, as (rank on this host, bytes), and what this rank gets of it.
    outgoing: list[tuple[int, Any]]
    incoming: list[tuple[int, Any]]
    parts: list[Any]

    def finish(self) -> None:
        """Puts what has arrived where it belongs."""
        for _, flat in self.incoming:
            _split(flat, self.parts)


def _broadcast(batch: Batch, run: list[int], owner: int) -> _Send:
    mine = owner == batch._me
    if not mine:
        for slot in run:
            batch._tensors[slot] = batch._context.empty(batch.tasks[slot], batch._model.device)
    parts = [_bytes(batch._tensors[slot]) for slot in run]
    flat = _join(parts, mine)
    if mine:
        return _Send([(peer, flat) for peer in range(batch._count) if peer != owner], [], parts)
    return _Send([], [(owner, flat)], parts)


def _scatter(batch: Batch, run: list[int], owner: int) -> _Send:
    context, tasks = batch._context, [batch.tasks[slot] for slot in run]
    outgoing, mine = [], []
    if owner == batch._me:
        whole = [batch._tensors[slot] for slot in run]
        for peer, rank in enumerate(context.members.local):
            blocks = [context.block_of(task, tensor, rank) for task, tensor in zip(tasks, whole, strict=True)]
            if peer == owner:
                mine = blocks
            else:
                outgoing.append((peer, _join([_bytes(block) for block in blocks], True)))
    else:
        mine = [context.empty(task, batch._model.device, context.members.rank) for task in tasks]
    for slot, tensor in zip(run, mine, strict=True):
        batch._tensors[slot] = tensor
    parts = [_bytes(tensor) for tensor in mine]
    return _Send(outgoing, [] if owner == batch._me else [(owner, _join(parts, False))], parts)


def _bytes(tensor: Any) -> Any:
    # A view of the bytes of a contiguous tensor: collectives know few dtypes.
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _join(parts: list[Any], fill: bool) -> Any:
    # One buffer for the parts behind each other; a single part is its own.
    if len(parts) == 1:
        return parts[0]
    flat = parts[0].new_empty(sum(part.numel() for part in parts))
    if fill:
        for part, place in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            place.copy_(part)
    return flat


def _split(flat: Any, parts: list[Any]) -> None:
    if len(parts) > 1:
        for part, place in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(place)

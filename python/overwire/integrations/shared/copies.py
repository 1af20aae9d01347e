"""Copies out of the tensors of a checkpoint into tensors with memory, which bytes they go to, and loads of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

#: Dtypes of several elements a byte, or of elements that end inside one.
PACKED = ("F4", "F6_E2M3", "F6_E3M2")


class Stored(NamedTuple):
    """A tensor of an open file: its place in the table of the file, and its row there; shape: as torch has it."""

    file: Any
    at: int
    name: str
    dtype: str
    shape: tuple[int, ...]


class Copy(NamedTuple):
    """A view of a stored tensor, and where it goes. The view is in elements of the
    contiguous tensor: offset, shape, stride. dtype: the stored one, as torch has it."""

    of: Stored
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    target: torch.Tensor


#: How many elements a tensor of a shape has.
elements = math.prod


def whole_copy(stored: Stored, target: torch.Tensor) -> Copy:
    """The copy of all of a stored tensor, which has the shape and dtype of its target."""
    strides, step = [], 1
    for size in reversed(stored.shape):
        strides.append(step)
        step *= size
    return Copy(stored, 0, stored.shape, tuple(reversed(strides)), target.dtype, target)


def spanned_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """From the first element of a view to the last, both counted, how many lie in memory."""
    return 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))


def memory_range(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The memory that a tensor lies in, and its first byte and its end there."""
    size = tensor.element_size()
    low = int(tensor.storage_offset()) * size
    count = tensor.numel() if tensor.is_contiguous() else spanned_elements(tensor.shape, tensor.stride())
    return tensor.untyped_storage().data_ptr(), low, low + count * size


def block_of(copy: Copy) -> list[tuple[int, int]] | None:
    """The ranges of the first two dimensions of the stored tensor whose elements, in their
    order, the view is; None if there are none."""
    shape, offset = copy.of.shape, copy.offset
    if not shape:
        return []
    row = elements(shape[1:])
    last, count, dense = offset, 1, True
    for size, step in zip(reversed(copy.shape), reversed(copy.stride), strict=True):
        last += (size - 1) * step
        dense = dense and (size == 1 or step == count)
        count *= size
    low, high = offset // row, last // row + 1
    if count == (high - low) * row and dense:
        return [(low, high)]
    column = offset % row
    if len(shape) == 2 == len(copy.shape) and copy.stride == (row, 1) and copy.shape[0] == high - low:  # columns
        return [(low, high), (column, column + copy.shape[1])]
    return _block_by_torch(copy, row, low, high, last)


def _block_by_torch(copy: Copy, row: int, low: int, high: int, last: int) -> list[tuple[int, int]] | None:
    # By what torch makes of the ranges: the rare ones.
    shape, offset, count = copy.of.shape, copy.offset, elements(copy.shape)
    ranges = [(low, high)]
    if count != (high - low) * row:
        if len(shape) < 2:
            return None
        cell = elements(shape[2:])
        first, right = offset % row // cell, last % row // cell + 1
        ranges.append((first, right))
        if first >= right or count != (high - low) * (right - first) * cell:
            return None
    whole = torch.empty(shape, device="meta")[tuple(slice(*one) for one in ranges)]
    try:
        view = whole.view(copy.shape)
    except RuntimeError:
        return None
    steps = [(n, step) for n, step in zip(copy.shape, copy.stride, strict=True) if n != 1]
    same = steps == [(n, step) for n, step in zip(view.shape, view.stride(), strict=True) if n != 1]
    return ranges if same and view.storage_offset() == offset else None


def request_of(copy: Copy, device: torch.device) -> tuple[int, int, int, int, int, int] | None:
    """A copy as the engine lands it, see `overwire.plumbing.landing`; None if it cannot."""
    target = copy.target
    if copy.dtype != target.dtype or target.device != device or not target.is_contiguous() or copy.of.dtype in PACKED:
        return None
    if target.is_conj() or target.is_neg() or not target.data_ptr():
        return None
    if not copy.of.shape:
        return (copy.of.at, target.data_ptr(), 0, -1, 0, -1) if target.numel() == 1 else None
    block = block_of(copy)
    if not block:
        return None
    lo0, hi0 = block[0]
    if len(block) > 1:
        return (copy.of.at, target.data_ptr(), lo0, hi0, *block[1])
    whole = lo0 == 0 and hi0 == copy.of.shape[0]
    return (copy.of.at, target.data_ptr(), lo0, -1 if whole else hi0, 0, -1)


def begin_landing(copies: Sequence[Copy], device: torch.device) -> tuple[Any, list[Copy], list[Copy]]:
    """Begins to load those copies of the first one's file that land on the device as they are: the job, these, and
    the others. No job, and all are others, where there are none, and where a preload has the file."""
    from ...plumbing import landing

    file = copies[0].of.file if copies else None
    requests: list[tuple[int, int, int, int, int, int]] = []
    direct: list[Copy] = []
    others: list[Copy] = []
    for copy in copies:
        request = request_of(copy, device) if copy.of.file is file else None
        if request is None:
            others.append(copy)
        else:
            requests.append(request)
            direct.append(copy)
    job = landing(file, str(device), requests) if requests else None
    if job is None:
        return None, [], list(copies)
    job.keep_memory(direct)  # an interrupted program may drop the tensors before the job
    return job, direct, others


def load_copies(copies: Iterable[Copy], most: int) -> None:
    """Loads copies, none of which overlap, into their targets, in one pass a file.

    A view that is a block of its tensor lands in the target. Another one, transposed or
    cut along the third dimension, is taken out of its rows, which are loaded beside, those of
    at most `most` bytes at once, or of one view.
    """
    groups: dict[tuple[int, torch.device], list[Copy]] = {}
    for copy in copies:
        groups.setdefault((id(copy.of.file), copy.target.device), []).append(copy)
    rest: list[Copy] = []
    for (_, device), neighbours in groups.items():
        job, _, others = begin_landing(neighbours, device)
        rest += others
        if job is not None:
            with job:
                job.take()
    _load_indirectly(rest, most)


def _load_indirectly(copies: list[Copy], most: int) -> None:
    # What no request says: casts, targets with gaps, other views, files that are preloaded.
    into: dict[int, tuple[Any, list[Any]]] = {}
    others: list[tuple[Copy, tuple[int, int]]] = []
    for copy in copies:
        shape = copy.of.shape
        block = _loadable_block(copy)
        target = (
            None
            if block is None
            else view_in_shape(copy.target, [*(high - low for low, high in block), *shape[len(block) :]])
        )
        if target is not None:
            into.setdefault(id(copy.of.file), (copy.of.file, []))[1].append((copy.of.name, block, target))
        else:
            row = elements(shape[1:])
            last = copy.offset + spanned_elements(copy.shape, copy.stride) - 1
            is_row = copy.of.dtype in PACKED and len(shape) == 1  # which is not cut
            others.append((copy, (0, shape[0]) if is_row else (copy.offset // row, last // row + 1)))
    for file, targets in into.values():
        file.load_into(targets)
    while others:
        neighbours: list[tuple[Copy, int, torch.Tensor]] = []
        size = 0
        while others and (not neighbours or size < most):
            copy, (low, high) = others.pop()
            rows = torch.empty((high - low, *copy.of.shape[1:]), dtype=copy.dtype, device=copy.target.device)
            size += rows.numel() * rows.element_size()
            neighbours.append((copy, low, rows))
        for copy, low, rows in neighbours:
            block = [(low, low + rows.shape[0])] if copy.of.shape and rows.shape != copy.of.shape else []
            copy.of.file.load_into([(copy.of.name, block, rows if copy.of.shape else rows[0])])
        for copy, low, rows in neighbours:
            view = rows.as_strided(copy.shape, copy.stride, copy.offset - low * elements(rows.shape[1:]))
            with torch.no_grad():
                copy.target.copy_(view)


def _loadable_block(copy: Copy) -> list[tuple[int, int]] | None:
    # `block_of`, but for one that cuts elements which share bytes.
    block = block_of(copy)
    if block and copy.of.dtype in PACKED and len(block) == len(copy.of.shape):
        return block[:-1] if block[-1] == (0, copy.of.shape[-1]) else None
    return block


def view_in_shape(target: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """A view of a tensor in another shape; None if its memory is not that of such a one."""
    try:
        return target.view(shape)
    except RuntimeError:
        return None


class Early:
    """Loads some copies while others are still to be found out; one load at a time, so
    that few large ones come of many small offers."""

    def __init__(self, device: Callable[[], torch.device]) -> None:
        """device: where the files' tensors land, asked when the first copies come."""
        self._device = device
        self._job: Any = None
        #: All copies that were begun.
        self.copies: list[Copy] = []

    def begin(self, copies: list[Copy]) -> list[Copy]:
        """Begins to load those of one file that land as they are, and returns the others;
        while a load runs, and where a preload has the file, all. Raises what the load
        before has raised."""
        if self._job is not None:
            if not self._job.ended(0):
                return copies
            self.end()
        self._job, begun_copies, others = begin_landing(copies, self._device())
        self.copies += begun_copies
        return others

    def end(self) -> None:
        """Waits for the load that runs, and raises what it raises."""
        job, self._job = self._job, None
        if job is not None:
            with job:
                job.take()

    def cancel(self) -> None:
        """Ends the load that runs: it writes nothing after this."""
        job, self._job = self._job, None
        if job is not None:
            job.abandon()


class _Block(NamedTuple):
    # Bytes of a memory: from `low`, `width` of every `period`; all of one row where the period is 0.

    low: int
    width: int
    period: int
    name: str

    def is_apart(self, other: _Block) -> bool:
        # Whether they share no byte for sure, though what lies between their ends overlaps.
        if not self.period or self.period != other.period:
            return False
        distance = (other.low - self.low) % self.period
        return self.width <= distance and distance + other.width <= self.period


class Destinations:
    """The bytes that copies go to, by memory: whole ones, and columns of a matrix, of which others go
    to the columns beside."""

    def __init__(self) -> None:
        # First byte, end and blocks of stretches, by memory, in their order; no two stretches overlap.
        self._stretches: dict[int, list[tuple[int, int, list[_Block]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._stretches)

    def forget_all(self) -> None:
        """Forgets all copies that were noted."""
        self._stretches.clear()

    def name_at(self, memory: int, low: int, high: int) -> str | None:
        """The name of a copy that goes to bytes between these, or close by in the same matrix."""
        stretches = self._stretches.get(memory)
        if not stretches:
            return None
        first, end = _find_overlaps(stretches, low, high)
        return None if first == end else stretches[first][2][0].name

    def note_copy(self, target: torch.Tensor, reach: tuple[int, int, int], name: str) -> str | None:
        """Notes a copy to a tensor, whose memory, first byte and end are `memory_range`. The name of one that
        goes to the same bytes, or may; then nothing is noted."""
        memory, low, high = reach
        stretches = self._stretches.setdefault(memory, [])
        first, end = _find_overlaps(stretches, low, high)
        width, period = (high - low, 0) if target.is_contiguous() else _rows_of(target)
        block = _Block(low, width, period, name)
        blocks = [block]
        for stretch in stretches[first:end]:
            for other in stretch[2]:
                if not block.is_apart(other):
                    return other.name
            blocks += stretch[2]
            low, high = min(low, stretch[0]), max(high, stretch[1])
        stretches[first:end] = [(low, high, blocks)]
        return None


def _find_overlaps(stretches: list[tuple[int, int, list[_Block]]], low: int, high: int) -> tuple[int, int]:
    # Which stretches overlap these bytes: the first, and the one after the last.
    first = bisect_left(stretches, (low,))
    if first and stretches[first - 1][1] > low:
        first -= 1
    end = first
    while end < len(stretches) and stretches[end][0] < high:
        end += 1
    return first, end


def _rows_of(target: torch.Tensor) -> tuple[int, int]:
    # Of rows of equal distance: bytes of a row, and from one to the next; (0, 0) for other views.
    width, size = 1, target.element_size()
    steps = [(count, step) for count, step in zip(target.shape, target.stride(), strict=True) if count > 1]
    while steps and steps[-1][1] == width:
        width *= steps.pop()[0]
    period = distance = steps[-1][1] if steps else 0
    for count, step in reversed(steps):
        if step != distance:
            return 0, 0
        distance *= count
    return width * size, period * size

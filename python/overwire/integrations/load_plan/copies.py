"""Describes copies from checkpoint tensors to memory, tracks the bytes that they write, and loads them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

#: Dtypes with elements smaller than a byte.
PACKED = ("F4", "F6_E2M3", "F6_E3M2")


class Stored(NamedTuple):
    """A tensor of an open file. at: the number of its row in the file's table. shape: the shape in torch."""

    file: Any
    at: int
    name: str
    dtype: str
    shape: tuple[int, ...]


class Copy(NamedTuple):
    """A copy of a view of a stored tensor to a target. offset, shape and stride describe the view, in elements of the
    contiguous tensor. dtype: the torch dtype of the stored tensor."""

    of: Stored
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    target: torch.Tensor


#: The number of elements of a shape.
elements = math.prod


def whole_copy(stored: Stored, target: torch.Tensor) -> Copy:
    """Returns the copy of a whole stored tensor to a target of the same shape and dtype."""
    strides, step = [], 1
    for size in reversed(stored.shape):
        strides.append(step)
        step *= size
    return Copy(stored, 0, stored.shape, tuple(reversed(strides)), target.dtype, target)


def spanned_elements(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Returns how many elements of memory a view spans, from its first element to its last."""
    return 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))


def memory_range(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns the address of a tensor's storage, and the offsets of the tensor's first byte and end in it."""
    size = tensor.element_size()
    low = int(tensor.storage_offset()) * size
    count = tensor.numel() if tensor.is_contiguous() else spanned_elements(tensor.shape, tensor.stride())
    return tensor.untyped_storage().data_ptr(), low, low + count * size


def block_of(copy: Copy) -> list[tuple[int, int]] | None:
    """Returns the ranges of the stored tensor's first two dimensions that select exactly the view's elements, in order.
    Returns None if there are no such ranges."""
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
    # Handles rare cases: indexes a meta tensor with candidate ranges, and compares the result with the view.
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
    """Returns a copy as an engine request (see `overwire._compat_api.landing`), or None if the engine cannot do it."""
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
    """Starts to load the copies that are from the same file as the first copy and that the engine can land directly.
    Returns the job, these copies, and the remaining copies. If there are no such copies, or if the file was preloaded,
    the job is None and all copies remain."""
    from ..._compat_api import landing

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
    job.keep_memory(direct)  # an interrupted program may drop the tensors before the job ends
    return job, direct, others


def load_copies(copies: Iterable[Copy], most: int) -> None:
    """Loads copies into their targets, in one pass per file. The copies must not overlap.

    A view that is a block of its tensor lands directly in the target. For other views, such as transposed views or
    slices of the third dimension, the rows that contain the view are first loaded into extra memory. The extra memory
    holds at most `most` bytes of rows, or the rows of one view.
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
    # Loads copies that a request cannot express: casts, targets with gaps, other views, preloaded files.
    into: dict[int, tuple[Any, list[Any]]] = {}
    others: list[tuple[Copy, tuple[int, int]]] = []
    for copy in copies:
        shape = copy.of.shape
        block, target = _loadable_block(copy), None
        if block is not None:
            target = view_in_shape(copy.target, [*(high - low for low, high in block), *shape[len(block) :]])
        if target is not None:
            into.setdefault(id(copy.of.file), (copy.of.file, []))[1].append((copy.of.name, block, target))
        else:
            row = elements(shape[1:])
            last = copy.offset + spanned_elements(copy.shape, copy.stride) - 1
            is_row = copy.of.dtype in PACKED and len(shape) == 1  # a packed row cannot be split
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
    # Returns `block_of`, or None if the block would separate elements that share bytes.
    block = block_of(copy)
    if block and copy.of.dtype in PACKED and len(block) == len(copy.of.shape):
        return block[:-1] if block[-1] == (0, copy.of.shape[-1]) else None
    return block


def view_in_shape(target: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """Returns a view of a tensor in another shape, or None if its strides do not allow that shape."""
    try:
        return target.view(shape)
    except RuntimeError:
        return None


class Early:
    """Loads some copies while others are still being recorded. Only one load runs at a time. Many small calls of
    `begin` thus become few large loads."""

    def __init__(self, device: Callable[[], torch.device]) -> None:
        """device: returns the device for the files' tensors. The first `begin` calls it."""
        self._device = device
        self._job: Any = None
        #: All copies that have started to load.
        self.copies: list[Copy] = []

    def begin(self, copies: list[Copy]) -> list[Copy]:
        """Starts to load the copies of one file that can land directly, and returns the remaining copies. Returns all
        copies while a load is running, or if the file was preloaded. Raises the error of the previous load."""
        if self._job is not None:
            if not self._job.ended(0):
                return copies
            self.end()
        self._job, begun_copies, others = begin_landing(copies, self._device())
        self.copies += begun_copies
        return others

    def end(self) -> None:
        """Waits for the running load. Raises its error."""
        job, self._job = self._job, None
        if job is not None:
            with job:
                job.take()

    def cancel(self) -> None:
        """Ends the running load. It writes nothing after this call."""
        job, self._job = self._job, None
        if job is not None:
            job.abandon()


class _Block(NamedTuple):
    # Bytes of a storage: from `low` on, the first `width` bytes of every `period` bytes. If `period` is 0, there is a
    # single row.

    low: int
    width: int
    period: int
    name: str

    def is_apart(self, other: _Block) -> bool:
        # Returns whether it is certain that two blocks with overlapping ranges share no byte.
        if not self.period or self.period != other.period:
            return False
        distance = (other.low - self.low) % self.period
        return self.width <= distance and distance + other.width <= self.period


class Destinations:
    """Tracks the bytes that copies write, by storage. A copy may write a contiguous range, or some columns of a
    matrix while other copies write the other columns."""

    def __init__(self) -> None:
        # Maps storages to ordered stretches that do not overlap. A stretch has a first byte, an end, and blocks.
        self._stretches: dict[int, list[tuple[int, int, list[_Block]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._stretches)

    def forget_all(self) -> None:
        """Forgets all copies."""
        self._stretches.clear()

    def name_at(self, memory: int, low: int, high: int) -> str | None:
        """Returns the name of a copy that writes to this range, or to nearby columns of the same matrix."""
        stretches = self._stretches.get(memory)
        if not stretches:
            return None
        first, end = _find_overlaps(stretches, low, high)
        return None if first == end else stretches[first][2][0].name

    def note_copy(self, target: torch.Tensor, reach: tuple[int, int, int], name: str) -> str | None:
        """Notes a copy to a tensor. If another copy may write the same bytes, notes nothing and returns that copy's
        name. reach: the tensor's `memory_range`."""
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
    # Returns the index of the first stretch that overlaps these bytes, and the index after the last.
    first = bisect_left(stretches, (low,))
    if first and stretches[first - 1][1] > low:
        first -= 1
    end = first
    while end < len(stretches) and stretches[end][0] < high:
        end += 1
    return first, end


def _rows_of(target: torch.Tensor) -> tuple[int, int]:
    # Returns the size of a row and the distance between rows in bytes, or (0, 0) if rows are not equally spaced.
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

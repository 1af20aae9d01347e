"""Decides which block of a tensor to read for an index, and how to index the block.

The engine reads a block: a contiguous range of dimension 0 and a contiguous range of dimension 1. `plan` splits any
basic index (ints, slices with steps, Ellipsis, None) into the smallest such block, and an index into the block that the
framework applies.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from ..errors import SliceError

#: One entry of an index into the block: an int, a normalised slice, or None for a new dimension.
Entry = int | slice | None


class Plan(NamedTuple):
    """The block to read for an index, and the index into it.

    block: the (lo, hi) ranges of the first two dimensions. shape: the shape of the block.
    cut: an index into the block, or () for the whole block. empty: whether the result has no elements.
    """

    block: tuple[tuple[int, int], tuple[int, int]]
    shape: tuple[int, ...]
    cut: tuple[Entry, ...]
    empty: bool


def _expand_index(index: Any, rank: int) -> list[Any]:
    """Returns the index as a list with one entry per dimension, and with the index's Nones between them."""
    entries = list(index) if isinstance(index, tuple) else [index]
    count = sum(1 for e in entries if e is not None and e is not Ellipsis)
    dots = [at for at, e in enumerate(entries) if e is Ellipsis]
    if len(dots) > 1:
        raise SliceError("overwire: slice: an index may have only one '...'")
    if count > rank:
        raise SliceError(f"overwire: slice: got {count} indices for {rank} dimensions")
    fill = [slice(None)] * (rank - count)
    at = dots[0] if dots else len(entries)
    return entries[:at] + fill + entries[at + len(dots) :]


def _check_entry(entry: Any, size: int, dim: int) -> int | range:
    if isinstance(entry, slice):
        try:
            return range(size)[entry]
        except (TypeError, ValueError) as error:
            raise SliceError(f"overwire: slice of dimension {dim}: {error}") from error
    if isinstance(entry, bool) or str(getattr(entry, "dtype", "")).endswith("bool"):
            raise SliceError("overwire: slice: masks are not supported: load the tensor and index it")
    try:
        if getattr(entry, "shape", ()) != ():  # an array of one index, which would keep the dimension
            raise TypeError
        number = operator.index(entry)
    except TypeError:
        kind = type(entry).__name__
        text = f"expected an int, a slice, '...' or None, got {kind}: load the tensor and index it"
        raise SliceError(f"overwire: slice of dimension {dim}: {text}") from None
    if not -size <= number < size:
        raise SliceError(f"overwire: index {number} is out of range for dimension {dim} of {size}")
    return number + size if number < 0 else number


def plan(index: Any, shape: tuple[int, ...], dims: int = 2) -> Plan:
    """Splits an index of a tensor with this shape. Raises SliceError for an invalid index.

    dims: the number of leading dimensions that the block may cut. With 0 the block is the whole tensor, and
    the cut is the normalised index.
    """
    block = [(0, size) for size in shape[:2]] + [(0, 1)] * (2 - len(shape[:2]))
    cut: list[Entry] = []
    cuts = empty = False
    dim = 0
    for entry in _expand_index(index, len(shape)):
        if entry is None:
            cut.append(None)
            cuts = True
            continue
        size = shape[dim]
        selection = _check_entry(entry, size, dim)
        lo = 0
        if isinstance(selection, int):
            if dim < dims:
                lo = selection
                block[dim] = (selection, selection + 1)
            cut.append(selection - lo)
            cuts = True
        elif len(selection) == 0:
            empty = True
            cut.append(slice(0, 0, 1))
        else:
            hi = size
            if dim < dims:
                lo, hi = min(selection[0], selection[-1]), max(selection[0], selection[-1]) + 1
                block[dim] = (lo, hi)
            relative = range(selection.start - lo, selection.stop - lo, selection.step)
            # A descending range may end at -1, but a slice would count -1 from the end.
            cut.append(slice(relative.start, None if relative.stop < 0 else relative.stop, relative.step))
            cuts = cuts or relative != range(hi - lo)
        dim += 1
    empty = empty or 0 in shape
    sizes = tuple(hi - lo for lo, hi in block[: len(shape)]) + shape[2:]
    return Plan((block[0], block[1]), sizes, tuple(cut) if cuts or empty else (), empty)

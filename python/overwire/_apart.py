"""Checks that output memory does not overlap other memory. All codecs use this check."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from .errors import ArgumentError

Place = Sequence[Any]  # address, number of bytes, other values


def apart(sources: Iterable[Place], outs: Iterable[Place]) -> None:
    """Raises ArgumentError if an output overlaps another output or a source. Sources may overlap each other.

    Each item is an address and a number of bytes; an empty item overlaps nothing. Takes O(n log n) steps.
    """
    ranges = [(out[0], out[0] + out[1]) for out in outs if out[1] > 0]
    if not ranges:
        return
    ranges.sort()
    ends = [end for _, end in ranges]
    for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False):
        if start < end:
            raise ArgumentError(f"overwire: out: two outputs overlap at {start:#x}: give each its own memory")
    for source in sources:
        at, nbytes = source[0], source[1]
        i = bisect_right(ends, at)  # the first output that ends after the source begins
        if nbytes > 0 and i < len(ranges) and ranges[i][0] < at + nbytes:
            why = "the source would be overwritten while it is read"
            raise ArgumentError(f"overwire: out overlaps the source at {at:#x}: {why}")

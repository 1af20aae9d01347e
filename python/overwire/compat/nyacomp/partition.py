"""Assigns files to threads, in bins of nearly equal sums.

overwire itself does not need this, because a worker takes the next chunk when it is free. The module is for programs
that call its functions, and for the first line of a meta.csv.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def ffd_binpack(sizes: Sequence[int], capacity: float) -> list[list[int]]:
    """Packs sizes into bins of at most `capacity` by first-fit decreasing, with as many bins as needed.
    A size above `capacity` gets its own bin."""
    bins: list[list[int]] = []
    room: list[float] = []
    for size in sorted(sizes, reverse=True):
        for at, space in enumerate(room):
            if size <= space:
                bins[at].append(size)
                room[at] -= size
                break
        else:
            bins.append([size])
            room.append(capacity - size)
    return bins


def multifit_partition(sizes: Sequence[int], bins: int = 32, k: int = 20) -> list[list[int]]:
    """Puts sizes into exactly `bins` bins, some of which may be empty. The makespan (the largest sum) is at most that
    of MULTIFIT with `k` steps.

    Raises ValueError for fewer than one bin.
    """
    if bins < 1:
        raise ValueError(f"overwire: bins: expected at least 1, got {bins}")
    if not sizes:
        return [[] for _ in range(bins)]
    return _multifit(sizes, bins, k)


def makespan(bins: Sequence[Sequence[int]]) -> int:
    """Returns the largest sum of a bin."""
    return max(map(sum, bins), default=0)


def _multifit(sizes: Sequence[int], bins: int, k: int) -> list[list[int]]:
    # Bisects for the smallest capacity with which first-fit decreasing needs at most `bins` bins (Coffman, Garey,
    # Johnson 1978).
    mean, most = sum(sizes) / bins, max(sizes)
    low, high = float(max(int(mean), most)), float(max(2 * mean, most))
    best = ffd_binpack(sizes, high)
    for _ in range(k):
        if high - low < 1:
            break
        capacity = round((low + high) / 2)
        packing = ffd_binpack(sizes, capacity)
        if len(packing) > bins:
            low = capacity
            continue
        high = capacity
        if makespan(packing) <= makespan(best) or len(best) > bins:
            best = packing
    return best + [[] for _ in range(bins - len(best))]


def to_idx(sizes: Sequence[int], bins: Sequence[Sequence[int]]) -> list[list[int]]:
    """Converts bins of sizes to bins of positions in `sizes`. Equal sizes are assigned in order of
    position. Raises KeyError if a size does not occur often enough."""
    places: dict[int, list[int]] = {}
    for at in reversed(range(len(sizes))):
        places.setdefault(sizes[at], []).append(at)
    indices = []
    for part in bins:
        for size in part:
            if not places.get(size):
                raise KeyError(f"overwire: bins: size {size} occurs more often than in `sizes`")
        indices.append([places[size].pop() for size in part])
    return indices


def massage(sizes: Sequence[int], n_bins: int = 32) -> list[list[int]]:
    """Distributes the positions in `sizes` over exactly `n_bins` bins. Each bin begins with its largest size. No bin is
    empty if another bin has two positions."""
    return [list(part) for part in _massage(tuple(sizes), n_bins)]


@lru_cache(maxsize=64)
def _massage(sizes: tuple[int, ...], n_bins: int) -> tuple[tuple[int, ...], ...]:
    bins = multifit_partition(sizes, n_bins)
    while any(not part for part in bins) and any(len(part) > 1 for part in bins):
        fullest = max((part for part in bins if len(part) > 1), key=sum)
        next(part for part in bins if not part).append(fullest.pop())
    return tuple(tuple(part) for part in to_idx(sizes, bins))

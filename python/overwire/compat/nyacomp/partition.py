"""Which thread gets which file: bins of nearly equal sums.

overwire itself needs none of this, since its workers take chunks as they come;
it is here for programs that call it, and for the first line of a meta.csv.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache

# Rounds of moving and swapping after the packing: each lowers the makespan or
# the number of bins that have it, and soon none is left to be found.
_ROUNDS = 1000


def ffd_binpack(sizes: Sequence[int], capacity: float) -> list[list[int]]:
    """First fit, decreasing: bins of sizes, each at most `capacity` full (a size
    above it has a bin alone). As many bins as that takes."""
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
    """Sizes in exactly `bins` bins, empty ones included, with a makespan (the
    largest sum) no worse than that of MULTIFIT with `k` steps.

    The better one of MULTIFIT and longest-first, then improved by moves and
    swaps. Raises ValueError for fewer than one bin.
    """
    if bins < 1:
        raise ValueError(f"overwire: bins: expected at least 1, got {bins}")
    if not sizes:
        return [[] for _ in range(bins)]
    partition = min((_multifit(sizes, bins, k), _longest_first(sizes, bins)), key=makespan)
    _improve(partition)
    return [sorted(part, reverse=True) for part in partition]


def makespan(bins: Sequence[Sequence[int]]) -> int:
    """The largest sum."""
    return max(map(sum, bins), default=0)


def _longest_first(sizes: Sequence[int], bins: int) -> list[list[int]]:
    from heapq import heapreplace

    bins_of_sizes: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, at) for at in range(bins)]
    for size in sorted(sizes, reverse=True):
        load, at = heap[0]
        bins_of_sizes[at].append(size)
        heapreplace(heap, (load + size, at))
    return bins_of_sizes


def _multifit(sizes: Sequence[int], bins: int, k: int) -> list[list[int]]:
    # Bisects the capacity that first fit needs; Coffman, Garey, Johnson 1978.
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


def _improve(bins: list[list[int]]) -> None:
    # Moves one size out of the fullest bin, or swaps it for a smaller one,
    # while both bins then end below what the fullest had.
    for part in bins:
        part.sort()
    loads = [sum(part) for part in bins]
    for _ in range(_ROUNDS):
        top = max(range(len(bins)), key=loads.__getitem__)
        best: tuple[int, int, int, int] | None = None
        for other, part in enumerate(bins):
            gap = loads[top] - loads[other]
            if other == top or gap < 2:
                continue
            for size in bins[top]:
                # Wanted is a partner whose difference is half of the gap.
                at = bisect_left(part, size - gap // 2)
                for partner in (0, *part[max(at - 1, 0) : at + 1]):
                    difference = size - partner
                    if 0 < difference < gap:
                        after = max(loads[top] - difference, loads[other] + difference)
                        if best is None or after < best[0]:
                            best = after, other, size, partner
        if best is None:
            return
        _, other, size, partner = best
        bins[top].remove(size)
        insort(bins[other], size)
        if partner:
            bins[other].remove(partner)
            insort(bins[top], partner)
        loads[top] -= size - partner
        loads[other] += size - partner


def to_idx(sizes: Sequence[int], bins: Sequence[Sequence[int]]) -> list[list[int]]:
    """Bins of sizes as bins of positions in `sizes`; of equal sizes the first
    position goes first. Raises KeyError for a size that occurs too rarely."""
    places: dict[int, list[int]] = {}
    for at in reversed(range(len(sizes))):
        places.setdefault(sizes[at], []).append(at)
    indices = []
    for part in bins:
        for size in part:
            if not places.get(size):
                raise KeyError(f"overwire: bins: no further size {size}")
        indices.append([places[size].pop() for size in part])
    return indices


def massage(sizes: Sequence[int], n_bins: int = 32) -> list[list[int]]:
    """Positions in `sizes`, in exactly `n_bins` bins, each with its largest
    first. No bin is empty while another has two; works for any numbers."""
    return [list(part) for part in _massage(tuple(sizes), n_bins)]


@lru_cache(maxsize=64)
def _massage(sizes: tuple[int, ...], n_bins: int) -> tuple[tuple[int, ...], ...]:
    bins = multifit_partition(sizes, n_bins)
    while any(not part for part in bins) and any(len(part) > 1 for part in bins):
        fullest = max((part for part in bins if len(part) > 1), key=sum)
        next(part for part in bins if not part).append(fullest.pop())
    return tuple(tuple(part) for part in to_idx(sizes, bins))

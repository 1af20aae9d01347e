"""tensorizer._linear_partition: a sequence in slices of balanced weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def _filled(weights: Sequence[int], most: int) -> Iterator[slice]:
    """Slices of at most the given size, each as long as possible."""
    begin = total = 0
    for at, weight in enumerate(weights):
        if at > begin and total + weight > most:
            yield slice(begin, at)
            begin, total = at, 0
        total += weight
    yield slice(begin, len(weights))


def linear_partition(weights: Sequence[int], partitions: int) -> Iterable[slice]:
    """At most `partitions` slices of the sequence, in order, whose heaviest is as
    light as can be. ValueError for no partitions."""
    if partitions < 1:
        raise ValueError(f"partitions: expected 1 or more, got {partitions}")
    low, high = max(weights, default=0), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if sum(1 for _ in _filled(weights, middle)) <= partitions:
            high = middle
        else:
            low = middle + 1
    return list(_filled(weights, low))


greedy_linear_partition = linear_partition  # which is fast


def partition(weights: Sequence[int], partitions: int, performance_threshold: int = 100) -> Iterable[slice]:
    """`linear_partition`; performance_threshold has no effect, since it is fast."""
    return linear_partition(weights, partitions)

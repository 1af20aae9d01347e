"""Stacks tensors of equal shape and dtype for storage, and splits the stacks again.

overwire's own bundles do not need this, because small tensors share chunks there. The module is for programs that call
its functions, and for bundles in nyacomp's layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import overwire

from . import partition, settings

#: The most bytes of a merged tensor by default. Servers commonly refuse larger uploads.
LIMIT = 500 << 20


def tensor_size(tensor: Any) -> int:
    """Returns the size of a tensor's elements in bytes."""
    return int(tensor.nelement() * tensor.element_size())


def split_into_bins(group: Sequence[Any], n_splits: int) -> list[list[Any]]:
    """Splits a group into contiguous runs of nearly equal length, the longer ones first. For example, 7 members in 3
    runs give runs of 3, 2 and 2. If there are more runs than members, the last runs are empty."""
    size, longer = divmod(len(group), n_splits)
    ends = [size * at + min(at, longer) for at in range(n_splits + 1)]
    return [list(group[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def _groups(tensors: Sequence[Any], limit: float) -> list[list[int]]:
    """Returns positions of the tensors to stack, grouped by shape, dtype and device. Each group has at
    most `limit` bytes, unless one tensor has more."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for at, tensor in enumerate(tensors):
        alike.setdefault((tuple(tensor.shape), str(tensor.dtype), str(tensor.device)), []).append(at)
    groups = []
    for _, members in sorted(alike.items()):
        total = tensor_size(tensors[members[0]]) * len(members)
        runs = 1 if total < limit else min(math.ceil(total / limit), len(members))
        groups += split_into_bins(members, runs)
    return groups


def merge_tensors(tensors: Sequence[Any], maxsize: float = 0) -> tuple[list[Any], str]:
    """Stacks tensors of equal shape and dtype along a new first dimension.

    maxsize: the most bytes of a stack of several tensors; 0 means an equal share for each of NUM_THREADS threads, at
        least 500 MiB.

    Returns the stacks, on the device of their tensors, and the text of merged_tensors.csv, with the
    positions of each stack's tensors in one line. `split_tensors` needs that text.
    """
    import torch

    limit = maxsize or max(LIMIT, sum(map(tensor_size, tensors)) / settings.num_threads())
    groups = _groups(tensors, limit)
    stacks = [torch.stack([tensors[at].detach() for at in group]) for group in groups]
    return stacks, "\n".join(",".join(map(str, group)) for group in groups)


def calculate_makespan(tensors: Sequence[Any]) -> int:
    """Returns the size of the fullest bin in bytes if these tensors are spread over NUM_THREADS bins."""
    return _makespan([tensor_size(tensor) for tensor in tensors])


def _makespan(sizes: list[int]) -> int:
    return partition.makespan(partition.multifit_partition(sorted(sizes, reverse=True), settings.num_threads()))


def iterative_merge_tensors(tensors: Sequence[Any]) -> tuple[list[Any], str]:
    """Runs `merge_tensors` with the limit that gives the smallest makespan: the default limit, or a limit found by
    bisection between an equal share for each thread and twice this share. The search uses only the sizes. Tensors are
    copied once, at the end."""
    if not tensors:
        return [], ""
    sizes = [tensor_size(tensor) for tensor in tensors]
    share = sum(sizes) / settings.num_threads()
    low, high = math.ceil(max(share, *sizes, 1)), math.ceil(max(2 * share, *sizes, 1))

    def cost(limit: int) -> tuple[int, int]:
        groups = _groups(tensors, limit)
        return _makespan([sizes[group[0]] * len(group) for group in groups]), len(groups)

    best = min(math.ceil(max(LIMIT, share)), high, key=cost)
    least = cost(best)
    while low <= high:
        middle = (low + high) // 2
        cost_of_middle = cost(middle)
        if cost_of_middle < least:
            best, least, low = middle, cost_of_middle, middle + 1
        else:
            high = middle - 1
    return merge_tensors(tensors, best)


def split_tensors(tensors: Sequence[Any], info: str) -> list[Any]:
    """Splits stacks into their tensors, in the order of their positions. Each tensor has its own memory, and the
    stack's shape without the first dimension.

    info: the text of merged_tensors.csv. Raises FormatError if it does not match the stacks.
    """
    lines = [line for line in info.strip().splitlines() if line.strip()]
    if len(lines) != len(tensors):
        raise overwire.FormatError(f"overwire: merged tensors: {len(lines)} lines for {len(tensors)} tensors")
    pieces: dict[int, Any] = {}
    for line, tensor in zip(lines, tensors, strict=True):
        try:
            positions = [int(at) for at in line.split(",")]
        except ValueError as error:
            raise overwire.FormatError(f"overwire: merged tensors: {line!r} is not a list of positions") from error
        if (
            tensor.ndim == 0
            or tensor.shape[0] != len(positions)
            or pieces.keys() & set(positions)
            or len(set(positions)) != len(positions)
        ):
            text = f"overwire: merged tensors: {line!r} does not match a tensor of shape {tuple(tensor.shape)}"
            raise overwire.FormatError(text)
        parts = [tensor[0]] if len(positions) == 1 else [part.clone() for part in tensor]
        pieces.update(zip(positions, parts, strict=True))
    return [pieces[at] for at in sorted(pieces)]

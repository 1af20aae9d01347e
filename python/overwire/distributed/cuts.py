"""Computes the slices of tensors for the ranks of a group, and the part of a tensor that each rank reads."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from ..dtypes import PACKED
from ..frameworks.frame import Frame
from ..model.opened import WHOLE
from ..model.rows import Row

#: The ranges of a whole tensor.
ALL = (0, WHOLE, 0, WHOLE)


def shard_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Returns the block [lo, hi) that `rank` of `ranks` gets of a dimension of `size`. Blocks have ceil(size / ranks)
    elements, as in torch.chunk and DTensor. The blocks of the last ranks may be shorter or empty."""
    block = -(-size // ranks)
    return min(rank * block, size), min((rank + 1) * block, size)


@lru_cache
def _slice_shape(shape: tuple[int, ...], dim: int, ranks: int, rank: int) -> tuple[int, ...]:
    # Returns the shape of a rank's block. The result is cached, because a model has few different shapes.
    lo, hi = shard_range(shape[dim], ranks, rank)
    return (*shape[:dim], hi - lo, *shape[dim + 1 :])


class CutTensor(NamedTuple):
    """One tensor to load. at: its position in the table. row: its row there. shape: its shape in torch. dim: the
    dimension along which it is sliced, or None."""

    at: int
    row: Row
    shape: tuple[int, ...]
    dim: int | None

    def engine_dim(self) -> int:
        """Returns the dimension along which the engine slices the tensor, or -1 if the engine reads all of it. Tensors
        that are sliced along later dimensions, and packed dtypes, are read whole and sliced afterwards."""
        return -1 if self.dim is None or self.dim > 1 or self.row.dtype in PACKED else self.dim


class Cutting(NamedTuple):
    """Describes one rank's slices of tensors."""

    frame: Frame
    ranks: int
    rank: int

    def shape(self, task: CutTensor, rank: int | None = None) -> tuple[int, ...]:
        """Returns the shape of a rank's slice of a tensor. rank: None means this rank."""
        if task.dim is None:
            return task.shape
        return _slice_shape(task.shape, task.dim, self.ranks, self.rank if rank is None else rank)

    def block(self, task: CutTensor, rank: int | None = None) -> tuple[int, int, int, int]:
        """Returns the ranges of dimensions 0 and 1 that the engine reads for a rank. rank: None means this rank."""
        dim, shape = task.engine_dim(), self.shape(task, rank)
        if dim < 0 or shape == task.row.shape:
            return ALL
        lo, hi = shard_range(task.shape[dim], self.ranks, self.rank if rank is None else rank)
        return (lo, hi, 0, WHOLE) if dim == 0 else (0, task.row.shape[0], lo, hi)

    def row(self, task: CutTensor) -> Row:
        """Returns the table row of a tensor, with the shape and size of the part that the engine reads for this
        rank."""
        if self.block(task) == ALL:
            return task.row
        shape = self.shape(task)
        nbytes = task.row.nbytes * math.prod(shape) // max(1, math.prod(task.shape))
        return task.row._replace(shape=shape, nbytes=nbytes)

    def lands_whole(self, task: CutTensor) -> bool:
        """Returns whether the engine reads exactly this rank's slice, so that nothing is sliced afterwards."""
        return self.block(task) != ALL or self.shape(task) == task.shape

    def own_slice(self, task: CutTensor, tensor: Any) -> Any:
        """Returns this rank's slice of a tensor that may have been read whole. The slice is contiguous and does not
        share the memory of the whole tensor."""
        if tuple(tensor.shape) == self.shape(task):
            return tensor
        assert task.dim is not None
        lo, hi = shard_range(task.shape[task.dim], self.ranks, self.rank)
        if hi <= lo:
            return self._empty_slice(task, str(tensor.device))
        index = tuple(slice(lo, hi, 1) if dim == task.dim else slice(0, size, 1) for dim, size in enumerate(task.shape))
        return self.frame.index(tensor, index, task.row.dtype)

    def _empty_slice(self, task: CutTensor, device: str) -> Any:
        shape = self.shape(task)
        # `frame.empty` takes the shape in a file, but this is the shape in torch.
        if task.row.dtype in PACKED:
            flat = self.frame.empty("U8", (math.prod(shape),), device)
            return flat.view(self.frame.empty(task.row.dtype, (0,), "cpu").dtype).view(shape)
        return self.frame.empty(task.row.dtype, shape, device)

"""Frames: tensors, and slices of them, by their places in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .st_types import DType


def dense_strides(shape: list[int]) -> list[int]:
    """The strides of a tensor in C order, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


@dataclass
class TensorFrame:
    """A tensor, or a slice of one, by its place in a file.

    shape, strides (in elements) and offsets (in elements of each dimension)
    have one entry a dimension; data_offsets is the whole tensor's [begin, end).
    """

    dtype: DType
    shape: list[int]
    data_offsets: list[int]
    strides: list[int]
    offsets: list[int]
    sliced: bool

    @classmethod
    def from_buffer(cls, entry: Any) -> TensorFrame:
        """The frame of a tensor, by its entry in a header."""
        shape = [int(size) for size in entry["shape"]]
        return cls(
            DType(entry["dtype"]), shape, list(entry["data_offsets"]), dense_strides(shape), [0] * len(shape), False
        )

    def __getitem__(self, index: Any) -> TensorFrame:
        """The frame of a slice: ints keep their dimension with size 1, and an
        empty slice has shape []. IndexError, or ValueError for other indices."""
        entries = index if isinstance(index, tuple) else (index,)
        if not entries:
            return self
        if len(entries) > len(self.shape):
            raise ValueError(f"[BUG] tried to get too large slice {entries} from {self.shape}")
        shape, strides, offsets = list(self.shape), list(self.strides), list(self.offsets)
        for dim, entry in enumerate(entries):
            size = self.shape[dim]
            if isinstance(entry, slice):
                steps = range(size)[entry]
            elif isinstance(entry, int) and not isinstance(entry, bool):
                if not -size <= entry < size:
                    raise IndexError(f"[BUG] tried to access index {entry} at dim={dim} for shape={self.shape}")
                steps = range(entry % size, entry % size + 1)
            else:
                raise ValueError(f"[BUG] Unsupported index type for DiskTensor: {entry}")
            if len(steps) == 0:
                return TensorFrame(self.dtype, [], list(self.data_offsets), [], [], False)
            shape[dim] = len(steps)
            strides[dim] = self.strides[dim] * steps.step
            offsets[dim] = self.offsets[dim] + steps.start
        return TensorFrame(self.dtype, shape, list(self.data_offsets), strides, offsets, True)

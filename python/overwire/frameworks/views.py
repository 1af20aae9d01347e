"""Defines how frames describe the memory of a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple


class Bytes(NamedTuple):
    """A tensor's bytes to be saved: contiguous, on the host, or on the CUDA device `cuda` - 1,
    where all work on them has finished.

    `keep` owns the memory at `pointer` and must outlive its use. `pieces`: if the bytes are in
    several host buffers, the address and size of each, in order.
    """

    dtype: str
    shape: tuple[int, ...]
    pointer: int
    nbytes: int
    keep: Any
    cuda: int = 0
    pieces: tuple[int, ...] = ()


class View(NamedTuple):
    """A tensor's own memory, strided or not: on the host, or on the CUDA device `cuda` - 1.

    dtype, shape: as in `Bytes`; dtype is "" if safetensors lacks the tensor's dtype.
    item: the bytes of an element. dims: the dimensions in elements. strides: bytes from one element to the next. A
    contiguous tensor may be described as one dimension of bytes. `keep` owns the memory and must outlive its use.
    """

    dtype: str
    shape: tuple[int, ...]
    pointer: int
    item: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    keep: Any
    cuda: int = 0

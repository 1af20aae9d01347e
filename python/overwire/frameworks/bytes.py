"""Tensors as their bytes, for programs without torch and numpy."""

from __future__ import annotations

import ctypes
from typing import Any

from ..dtypes import nbytes
from ..errors import ArgumentError, NotSupportedError
from .frame import Frame


class BytesFrame(Frame):
    """The frame of no framework; see `frame.Frame`. No tensor is cast by it or belongs to it.

    A tensor is a writable memoryview of its bytes, one dimension of "B", as
    the file's dtype has them; `get_slice` tells dtype and shape. Only addresses
    count: capsules are never unpacked.
    """

    name = "bytes"

    def adopt(self, capsule: Any, pointer: int, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        size = nbytes(dtype, shape)
        if capsule is None or size == 0:
            return self.empty(dtype, shape)
        block = (ctypes.c_ubyte * size).from_address(pointer)
        vars(block)["capsule"] = capsule  # the memory lives as long as a view of it
        return memoryview(block).cast("B")

    def empty(self, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        return memoryview(bytearray(nbytes(dtype, shape)))

    def dtype(self, wanted: Any) -> Any:
        raise ArgumentError("overwire: dtype: bytes are not cast; load with framework='pt' or 'np'")

    def index(self, tensor: Any, index: tuple[Any, ...], dtype: str) -> Any:
        raise NotSupportedError(
            "overwire: slice: bytes are cut only in whole rows of the first two dimensions, and without a step"
        )

"""Handles tensors as plain bytes, for programs without torch and numpy."""

from __future__ import annotations

import ctypes
from typing import Any

from ..dtypes import nbytes
from ..errors import ArgumentError, NotSupportedError
from .frame import Frame


class BytesFrame(Frame):
    """The frame of plain bytes; see `frame.Frame`. It does not cast tensors.

    A tensor is a writable one-dimensional memoryview of format "B", with the bytes in the file's dtype; `get_slice`
    returns dtype and shape. The frame uses only addresses, so capsules are never unpacked.
    """

    name = "bytes"

    def adopt(self, capsule: Any, pointer: int, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        size = nbytes(dtype, shape)
        if capsule is None or size == 0:
            return self.empty(dtype, shape)
        block = (ctypes.c_ubyte * size).from_address(pointer)
        vars(block)["capsule"] = capsule  # keeps the memory alive as long as any view exists
        return memoryview(block).cast("B")

    def empty(self, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        return memoryview(bytearray(nbytes(dtype, shape)))

    def dtype(self, wanted: Any) -> Any:
        raise ArgumentError("overwire: dtype: framework='bytes' does not cast: load with framework='pt' or 'np'")

    def index(self, tensor: Any, index: tuple[Any, ...], dtype: str) -> Any:
        why = "bytes can only be sliced by whole rows of the first two dimensions, without a step"
        raise NotSupportedError(f"overwire: slice: {why}")

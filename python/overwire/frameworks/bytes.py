"""Tensors as their bytes, for programs without torch and numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..dtypes import nbytes
from ..errors import ArgumentError, NotSupportedError
from .frame import Bytes, View

__all__ = ["BytesFrame"]


class BytesFrame:
    """The frame of no framework; see `frame.Frame`.

    A tensor is a writable memoryview of its bytes, one dimension of "B", as
    the file's dtype has them; `get_slice` tells dtype and shape.
    """

    name = "bytes"
    make: Callable[[Any], Any] | None = None

    def raw(self, dtypes: Iterable[str]) -> bool:
        return False  # only the address counts: capsules are never unpacked

    def adopt(self, capsule: Any, pointer: int, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        size = nbytes(dtype, shape)
        if capsule is None or size == 0:
            return self.empty(dtype, shape)
        block = (ctypes.c_ubyte * size).from_address(pointer)
        vars(block)["capsule"] = capsule  # the memory lives as long as a view of it
        return memoryview(block).cast("B")

    def empty(self, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        return memoryview(bytearray(nbytes(dtype, shape)))

    def empty_on(self, device: str, rows: Sequence[Any], again: bool = True) -> list[Any]:
        raise NotSupportedError(f"overwire: bytes are not made on {device}")

    def dtype(self, wanted: Any) -> Any:
        raise ArgumentError("overwire: dtype: bytes are not cast; load with framework='pt' or 'np'")

    def name_of(self, wanted: Any) -> str:
        return ""

    def floating(self, wanted: Any) -> bool:
        return False

    def cast(self, tensor: Any, dtype: str, wanted: Any) -> Any:
        raise ArgumentError("overwire: dtype: bytes are not cast; load with framework='pt' or 'np'")

    def index(self, tensor: Any, index: tuple[Any, ...], dtype: str) -> Any:
        raise NotSupportedError("overwire: slice: bytes are cut only in whole rows of the first two dimensions, and without a step")

    def view(self, tensor: Any) -> View:
        raise ArgumentError("overwire: bytes alone have no dtype and shape; give a TensorSpec")

    def describe(self, tensor: Any) -> Bytes:
        raise ArgumentError("overwire: bytes alone have no dtype and shape; save a TensorSpec")

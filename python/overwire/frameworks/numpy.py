"""Implements the frame of numpy arrays. Importing this module imports numpy.

bfloat16, fp8 and fp4 are types of the package ml_dtypes, which is imported on the first use of such a type.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .._tables import BITS, FLOATS
from ..dtypes import CALLED, PACKED, named, nbytes, packed_shape
from ..errors import ArgumentError, MissingPackageError, NotSupportedError
from .frame import Frame, check_empty
from .views import Bytes, View

# The types that ml_dtypes provides. All other types are numpy's own.
_EXTRA = {name: called for name, called in CALLED.items() if called.startswith(("float8", "bfloat16"))}
_EXTRA["F4"] = "float4_e2m1fn"
_OWN = {name: called for name, called in CALLED.items() if name not in _EXTRA}
SAVED = {dtype: name for name, dtype in (_OWN | _EXTRA).items()}


class _Holder:
    # The base of a numpy array. The capsule frees the memory when the last array over it is gone.
    __slots__ = ("__array_interface__", "capsule")

    def __init__(self, capsule: Any, pointer: int, kind: str, shape: tuple[int, ...]):
        self.capsule = capsule
        self.__array_interface__ = {"data": (pointer, False), "shape": shape, "typestr": kind, "version": 3}


def hold(capsule: Any, pointer: int, size: int) -> Any:
    """Makes a writable uint8 array over `size` bytes at `pointer`. The array keeps the capsule alive."""
    if size == 0:
        return np.empty(0, np.uint8)
    return np.asarray(_Holder(capsule, pointer, "|u1", (size,)))


def _extra_dtype(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes
    except ImportError as error:
        todo = "pip install ml_dtypes (or load with framework='pt')"
        text = f"overwire: numpy does not have {name}; the package ml_dtypes adds it: {todo}"
        raise MissingPackageError(text) from error
    if not hasattr(ml_dtypes, _EXTRA[name]):
        todo = "install a newer one: pip install -U ml_dtypes"
        raise NotSupportedError(f"overwire: this version of ml_dtypes has no {_EXTRA[name]}; {todo}")
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _EXTRA[name]))
    return dtype


class NumpyFrame(Frame):
    """The frame of numpy; see `frame.Frame`.

    F4 is unpacked to one element per byte, as in ml_dtypes. numpy has no type for packed F6, so F6
    tensors are arrays of bytes.
    """

    name = "numpy"

    def __init__(self) -> None:
        self._types: dict[str, np.dtype[Any]] = {name: np.dtype(text) for name, text in _OWN.items()}
        self._kinds = {name: t.str for name, t in self._types.items()}

    def _type_of(self, name: str) -> np.dtype[Any]:
        if name not in self._types:
            self._types[name] = np.dtype(np.uint8) if name.startswith("F6_") else _extra_dtype(name)
        return self._types[name]

    def raw(self, dtypes: Iterable[str]) -> bool:
        for name in dtypes:
            self._type_of(name)  # raises an error for an unsupported type before anything is read
        return False  # the frame uses only addresses, so capsules are never unpacked

    def adopt(self, capsule: Any, pointer: int, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        if capsule is None or 0 in shape:
            return self.empty(dtype, shape)
        if (kind := self._kinds.get(dtype)) is not None:
            return np.asarray(_Holder(capsule, pointer, kind, shape))
        target = self._type_of(dtype)
        if dtype in PACKED:
            flat = hold(capsule, pointer, nbytes(dtype, shape))
            if dtype == "F4":
                return _unpack_nibbles(flat).view(target).reshape(shape)
            return flat.reshape(packed_shape(dtype, shape))
        plain = np.asarray(_Holder(capsule, pointer, f"<u{BITS[dtype] // 8}", shape))
        return plain.view(target)

    def empty(self, dtype: str, shape: tuple[int, ...], device: str = "cpu") -> Any:
        check_empty(dtype, shape)
        if dtype.startswith("F6_"):
            shape = packed_shape(dtype, shape)
        return np.empty(shape, self._type_of(dtype))

    def dtype(self, wanted: Any) -> Any:
        name = wanted if isinstance(wanted, str) and wanted == "float" else named(wanted)  # numpy's float is float64
        if isinstance(name, str) and name in _EXTRA:
            return self._type_of(name)
        try:
            return np.dtype(_OWN.get(name, name) if isinstance(name, str) else name)
        except TypeError as error:
            why = "expected a numpy dtype, or a name: 'bfloat16', 'float16', 'float8_e4m3fn'"
            raise ArgumentError(f"overwire: dtype {wanted!r}: {why}") from error

    def name_of(self, wanted: Any) -> str:
        return SAVED.get(wanted.name, "")

    def floating(self, wanted: Any) -> bool:
        return wanted.kind == "f" or super().floating(wanted)

    def cast(self, tensor: Any, dtype: str, wanted: Any) -> Any:
        return tensor.astype(wanted, copy=False) if dtype in FLOATS else tensor

    def index(self, tensor: Any, index: tuple[Any, ...], dtype: str) -> Any:
        result = tensor[index]
        if not isinstance(result, np.ndarray):
            return np.array(result, dtype=tensor.dtype)
        if result.size != tensor.size or not result.flags.c_contiguous:
            result = result.copy(order="C")
        return result

    def view(self, tensor: Any) -> View:
        array = np.asarray(tensor)
        name = SAVED.get(array.dtype.name, "")
        if name == "F4":
            spec = self.describe(array)
            return View(name, spec.shape, spec.pointer, 1, (spec.nbytes,), (1,), spec.keep)
        is_other = array.dtype.kind in "OSUMm" or array.dtype.hasobject or array.dtype.names
        if is_other or array.itemsize not in (1, 2, 4, 8, 16):
            why = "expected numbers of 1, 2, 4, 8 or 16 bytes"
            raise NotSupportedError(f"overwire: numpy {array.dtype} arrays are not supported: {why}")
        if array.dtype.byteorder not in "=|":
            array = array.astype(array.dtype.newbyteorder("="))
        address = array.__array_interface__["data"][0] if array.size else 0
        return View(name, array.shape, address, array.itemsize, array.shape, array.strides, array)

    def describe(self, tensor: Any) -> Bytes:
        if not isinstance(tensor, (np.ndarray, np.generic)):
            raise ArgumentError(f"overwire: expected a numpy array, got {type(tensor).__name__}")
        array = np.asarray(tensor)
        if array.dtype.byteorder not in "=|" and array.dtype.kind in "biufc":
            array = array.astype(array.dtype.newbyteorder("="))
        name = SAVED.get(array.dtype.name)
        if name is None or array.dtype.kind in "OSUMm":
            text = f"safetensors has no type for numpy {array.dtype} arrays; use save_bundle"
            raise NotSupportedError(f"overwire: {text}")
        shape = array.shape
        dense = np.asarray(array, order="C")
        if name == "F4":
            if dense.size % 2:
                raise ArgumentError("overwire: F4 needs an even number of elements")
            dense = _pack_nibbles(dense)
        address = dense.__array_interface__["data"][0]
        return Bytes(name, shape, address if dense.nbytes else 0, dense.nbytes, dense)


def _unpack_nibbles(flat: Any) -> Any:
    """Unpacks bytes of two elements each to one element per byte. The low half of a byte is the first element."""
    both = np.empty(flat.size * 2, np.uint8)
    both[0::2] = flat & 15
    both[1::2] = flat >> 4
    return both


def _pack_nibbles(array: Any) -> Any:
    flat = array.view(np.uint8).reshape(-1)
    return (flat[0::2] & 15) | (flat[1::2] << 4)

"""Implements safetensors.numpy: saves and loads dicts of numpy arrays."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import overwire
from overwire.compat.safetensors import TensorSpec, deserialize, safe_open, serialize, serialize_file
from overwire.compat.safetensors._bytes import bytes_file
from overwire.compat.safetensors._errors import reading

__all__ = [
    "TensorSpec", "deserialize", "load", "load_file", "safe_open", "save", "save_file", "serialize", "serialize_file",
]  # fmt: skip


def save(tensor_dict: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Returns a plain safetensors file as bytes. Arrays that are not dense are copied."""
    keep: list[Any] = []
    return serialize(_flatten(tensor_dict, keep), metadata=metadata)


def save_file(tensor_dict: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None) -> None:
    """Writes a plain safetensors file. Arrays that are not dense are copied."""
    keep: list[Any] = []
    serialize_file(_flatten(tensor_dict, keep), filename, metadata=metadata)


def load(data: bytes) -> dict[str, Any]:
    """Returns the arrays in a file's bytes, plain or compressed."""
    source = bytes_file(data)
    with reading("<bytes>", "Error while deserializing"):
        return overwire.load_file(source, framework="np")


def load_file(filename: Any, *, backend: str = "mmap") -> dict[str, Any]:
    """Returns the arrays of a file, plain or compressed. backend: "mmap" or "pread"."""
    with safe_open(filename, framework="np", backend=backend) as f:
        return f.get_tensors()


def _flatten(tensor_dict: dict[str, Any], keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    flat = {}
    for name, array in tensor_dict.items():
        if not _is_little_endian(array):
            array = array.byteswap(inplace=False)
        array = np.asarray(array, order="C")
        keep_alive_buffer.append(array)
        dtype, pointer = array.dtype.name, array.ctypes.data
        flat[name] = TensorSpec(dtype=dtype, shape=array.shape, data_ptr=pointer, data_len=array.nbytes)
    return flat


_TYPES: dict[str, Any] = {"BOOL": bool, "U8": np.uint8, "I8": np.int8, "C64": np.complex64}
for _word in ("float", "int", "uint"):
    _TYPES |= {f"{_word[0].upper()}{bits}": getattr(np, f"{_word}{bits}") for bits in (16, 32, 64)}


def _getdtype(dtype_str: str) -> Any:
    return _TYPES[dtype_str]


def _view2np(safeview: Any) -> dict[str, Any]:
    flat = ((name, view["shape"], np.frombuffer(view["data"], _getdtype(view["dtype"]))) for name, view in safeview)
    return {name: array.reshape(shape) for name, shape, array in flat}


def _is_little_endian(tensor: Any) -> bool:
    order = tensor.dtype.byteorder
    if order not in "=|<>":
        raise ValueError(f"Unexpected byte order {order}")
    return order != ">" and (order != "=" or sys.byteorder == "little")

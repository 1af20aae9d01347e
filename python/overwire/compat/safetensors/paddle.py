"""Implements safetensors.paddle: saves and loads dicts of paddle tensors."""

from __future__ import annotations

from typing import Any

import paddle

from overwire.compat.safetensors import TensorSpec, deserialize, numpy, safe_open, serialize, serialize_file
from overwire.compat.safetensors._errors import not_contiguous
from overwire.compat.safetensors._frameworks import to_paddle

__all__ = [
    "TensorSpec", "deserialize", "load", "load_file", "safe_open", "save", "save_file", "serialize", "serialize_file",
]  # fmt: skip


def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """Returns a plain safetensors file as bytes. Raises ValueError for tensors that are not dense."""
    keep: list[Any] = []
    return serialize(_flatten(tensors, keep), metadata=metadata)


def save_file(tensors: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None) -> None:
    """Writes a plain safetensors file atomically. Raises ValueError for tensors that are not dense."""
    keep: list[Any] = []
    serialize_file(_flatten(tensors, keep), filename, metadata=metadata)


def load(data: bytes, device: str = "cpu") -> dict[str, Any]:
    """Returns the tensors in a file's bytes, plain or compressed, on a device."""
    return {name: to_paddle(array, device) for name, array in numpy.load(data).items()}


def load_file(filename: Any, device: Any = "cpu", *, backend: str = "mmap") -> dict[str, Any]:
    """Returns the tensors of a file, plain or compressed, on a device. backend: "mmap" or "pread"."""
    with safe_open(filename, framework="paddle", device=device, backend=backend) as f:
        return f.get_tensors()


def _flatten(tensors: dict[str, Any], keep_alive_buffer: list[Any]) -> dict[str, TensorSpec]:
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, paddle.Tensor] but received {type(tensors)}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, paddle.Tensor):
            raise ValueError(f"Key `{name}` is invalid, expected paddle.Tensor but received {type(tensor)}")
    flat = {}
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise not_contiguous(name)
        dense = tensor if tensor.place.is_cpu_place() else tensor.cpu()
        keep_alive_buffer.append(dense)
        size = dense.size * dense.element_size()
        dtype, pointer = str(dense.dtype).split(".")[-1], dense.data_ptr() if size else 0
        flat[name] = TensorSpec(dtype=dtype, shape=dense.shape, data_ptr=pointer, data_len=size)
    return flat

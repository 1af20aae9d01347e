"""safetensors.mlx: dicts of mlx arrays as files and bytes."""

from __future__ import annotations

from typing import Any

import mlx.core  # noqa: F401 (to be refused here where it is missing)

from overwire.compat.safetensors import numpy, safe_open
from overwire.compat.safetensors._frameworks import from_mlx, to_mlx

__all__ = ["load", "load_file", "save", "save_file"]


def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """A plain safetensors file as bytes."""
    return numpy.save(_mx2np(tensors), metadata=metadata)


def save_file(tensors: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None) -> None:
    """Writes a plain safetensors file, which is complete or absent."""
    numpy.save_file(_mx2np(tensors), filename, metadata=metadata)


def load(data: bytes) -> dict[str, Any]:
    """The arrays in a file's bytes, plain or compressed."""
    return _np2mx(numpy.load(data))


def load_file(filename: Any, *, backend: str = "mmap") -> dict[str, Any]:
    """The arrays of a file, plain or compressed. backend: "mmap" or "pread"."""
    with safe_open(filename, framework="mlx", backend=backend) as f:
        return f.get_tensors()


def _np2mx(numpy_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: to_mlx(array) for name, array in numpy_dict.items()}


def _mx2np(mx_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: from_mlx(array) for name, array in mx_dict.items()}

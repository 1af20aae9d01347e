"""safetensors.tensorflow: dicts of tensorflow tensors as files and bytes."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from overwire.compat.safetensors import numpy, safe_open

__all__ = ["load", "load_file", "save", "save_file"]


def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """A plain safetensors file as bytes."""
    return numpy.save(_tf2np(tensors), metadata=metadata)


def save_file(tensors: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None) -> None:
    """Writes a plain safetensors file, which is complete or absent."""
    numpy.save_file(_tf2np(tensors), filename, metadata=metadata)


def load(data: bytes) -> dict[str, Any]:
    """The tensors in a file's bytes, plain or compressed."""
    return _np2tf(numpy.load(data))


def load_file(filename: Any, *, backend: str = "mmap") -> dict[str, Any]:
    """The tensors of a file, plain or compressed. backend: "mmap" or "pread"."""
    with safe_open(filename, framework="tf", backend=backend) as f:
        return f.get_tensors()


def _np2tf(numpy_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: tf.convert_to_tensor(array) for name, array in numpy_dict.items()}


def _tf2np(tf_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: array.numpy() for name, array in tf_dict.items()}

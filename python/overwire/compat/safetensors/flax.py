"""safetensors.flax: dicts of jax arrays as files and bytes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from overwire.compat.safetensors import numpy, safe_open

__all__ = ["load", "load_file", "save", "save_file"]


def save(tensors: dict[str, Any], metadata: dict[str, str] | None = None) -> bytes:
    """A plain safetensors file as bytes."""
    return numpy.save(_jnp2np(tensors), metadata=metadata)


def save_file(tensors: dict[str, Any], filename: Any, metadata: dict[str, str] | None = None) -> None:
    """Writes a plain safetensors file, which is complete or absent."""
    numpy.save_file(_jnp2np(tensors), filename, metadata=metadata)


def load(data: bytes) -> dict[str, Any]:
    """The arrays in a file's bytes, plain or compressed."""
    return _np2jnp(numpy.load(data))


def load_file(filename: Any, *, backend: str = "mmap") -> dict[str, Any]:
    """The arrays of a file, plain or compressed. backend: "mmap" or "pread"."""
    with safe_open(filename, framework="flax", backend=backend) as f:
        return f.get_tensors()


def _np2jnp(numpy_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: jnp.array(array) for name, array in numpy_dict.items()}


def _jnp2np(jnp_dict: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(array) for name, array in jnp_dict.items()}

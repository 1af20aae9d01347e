"""The names of the original's compiled module."""

from __future__ import annotations

from overwire.compat.safetensors import (
    SafetensorError,
    TensorSpec,
    __version__,
    _safe_open_handle,
    deserialize,
    safe_open,
    serialize,
    serialize_file,
)

__all__ = [
    "SafetensorError",
    "TensorSpec",
    "__version__",
    "_safe_open_handle",
    "deserialize",
    "safe_open",
    "serialize",
    "serialize_file",
]

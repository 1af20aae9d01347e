"""Implements safetensors.mlx: saves and loads dicts of mlx arrays."""

from __future__ import annotations

import mlx.core  # noqa: F401 (raises ImportError here if it is missing)

from overwire.compat.safetensors._arrays import functions
from overwire.compat.safetensors._frameworks import from_mlx

__all__ = ["load", "load_file", "save", "save_file"]

save, save_file, load, load_file = functions(__name__, "mlx", from_mlx)

"""Implements safetensors.flax: saves and loads dicts of jax arrays."""

from __future__ import annotations

import jax.numpy  # noqa: F401 (raises ImportError here if it is missing)
import numpy as np

from overwire.compat.safetensors._arrays import functions

__all__ = ["load", "load_file", "save", "save_file"]

save, save_file, load, load_file = functions(__name__, "flax", np.asarray)

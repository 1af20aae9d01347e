"""Implements safetensors.tensorflow: saves and loads dicts of tensorflow tensors."""

from __future__ import annotations

import tensorflow  # noqa: F401 (raises ImportError here if it is missing)

from overwire.compat.safetensors._arrays import functions

__all__ = ["load", "load_file", "save", "save_file"]

save, save_file, load, load_file = functions(__name__, "tensorflow", lambda tensor: tensor.numpy())

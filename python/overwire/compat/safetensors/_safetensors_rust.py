"""Exports the names of the original's compiled module."""

from __future__ import annotations

from overwire.compat import safetensors
from overwire.compat.safetensors import *  # noqa: F403
from overwire.compat.safetensors._prefetch import TensorStream

__all__ = [*safetensors.__all__, "TensorStream"]

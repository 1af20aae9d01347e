"""tensorizer._crypt._exceptions: the exception of keys that do not fit."""

from __future__ import annotations

from .._encryption import CryptographyError

__all__ = ["CryptographyError"]

"""tensorizer._crypt._exceptions: the exception of keys that do not fit."""

from __future__ import annotations

from ....errors import CryptographyError as CryptographyError

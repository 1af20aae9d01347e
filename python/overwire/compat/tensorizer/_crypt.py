"""Implements tensorizer._crypt, from which programs learn whether encryption is available.

The engine implements the ciphers, so the original's classes around libsodium do not exist here.
"""

from __future__ import annotations

#: Encryption is always available.
available: bool = True

"""Implements tensorizer._crypt, which tells programs whether encryption is available.

The engine has the ciphers. libsodium, and the classes that wrap it in the original, do not
exist here.
"""

from __future__ import annotations

#: Encryption is always available.
available: bool = True

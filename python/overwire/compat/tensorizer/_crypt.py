"""tensorizer._crypt: whether files can be encrypted and decrypted, which programs ask before they do.

The engine has the ciphers: there is no libsodium, and none of the classes that wrap it there.
"""

from __future__ import annotations

#: Always.
available: bool = True

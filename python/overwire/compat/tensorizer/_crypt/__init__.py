"""tensorizer._crypt: that encryption is there, and what programs take from it.

The engine has the ciphers, and encrypts and decrypts whole files:
there is no libsodium, and none of the classes that wrap it there.
"""

from __future__ import annotations

import secrets

from ....errors import CryptographyError as CryptographyError
from . import _cgroup_cpu_count as _cgroup_cpu_count
from . import _exceptions as _exceptions

#: Whether files can be encrypted and decrypted: always.
available: bool = True


def random_bytes(size: int) -> bytes:
    """`size` random bytes, fit for keys."""
    return secrets.token_bytes(size)

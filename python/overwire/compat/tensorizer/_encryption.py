"""Implements EncryptionParams and DecryptionParams: keys, and passwords from which keys are derived."""

from __future__ import annotations

import enum
import secrets

from ...records import KeyDerivation, derive_key

_KEY_BYTES = 32
_SALT_BYTES = 16


class _OpsLimit(enum.IntEnum):
    MIN = 1
    INTERACTIVE = 2
    MODERATE = 3
    SENSITIVE = 4


class _MemLimit(enum.IntEnum):
    MIN = 8 << 10
    INTERACTIVE = 64 << 20
    MODERATE = 256 << 20
    SENSITIVE = 1 << 30


def _check_length(key: bytes, what: str) -> None:
    if len(key) != _KEY_BYTES:
        raise ValueError(f"Invalid {what} key length, must be {_KEY_BYTES} bytes; got {len(key)} bytes instead.")


class EncryptionParams:
    """The key of 32 bytes with which a TensorSerializer encrypts.

    Make one with `random` or `from_string`, or from your own key. Raises ValueError for a key of any other length.
    """

    OpsLimit = _OpsLimit
    MemLimit = _MemLimit

    key: bytes

    def __init__(self, key: bytes) -> None:
        if not key:
            raise ValueError("Invalid encryption key: cannot be empty")
        _check_length(key, "encryption")
        self.key = bytes(key)
        self._derivation: KeyDerivation | None = None

    @classmethod
    def random(cls) -> EncryptionParams:
        """Makes a random key. Save `.key`: without it the file cannot be decrypted."""
        return cls(key=secrets.token_bytes(_KEY_BYTES))

    @classmethod
    def from_string(
        cls,
        source: str | bytes,
        opslimit: int | None = None,
        memlimit: int | None = None,
        salt: str | bytes | None = None,
        *,
        encoding: str = "utf-8",
    ) -> EncryptionParams:
        """Derives a key from a password with Argon2id.

        opslimit: number of passes. memlimit: bytes of memory. None means MODERATE, which takes 256 MiB and half a
        second. salt: 16 bytes, random by default. The file stores these three values. Raises ValueError for an empty
        password or a salt of any other length. Raises TypeError if memlimit is an OpsLimit or opslimit a MemLimit.
        """
        if not source:
            raise ValueError("Source cannot be empty")
        for name, value, right, wrong in (
            ("opslimit", opslimit, _OpsLimit, _MemLimit), ("memlimit", memlimit, _MemLimit, _OpsLimit)
        ):
            if isinstance(value, wrong) or not isinstance(value, (int, type(None))):
                text = f"{name} parameter: expected EncryptionParams.{right.__name__[1:]}, int, or None;"
                raise TypeError(f"{text} {value.__class__.__name__} found")
        if isinstance(source, str):
            source = source.encode(encoding)
        if isinstance(salt, str):
            salt = salt.encode(encoding)
        salt = secrets.token_bytes(_SALT_BYTES) if salt is None else bytes(salt)
        if len(salt) != _SALT_BYTES:
            raise ValueError(f"Invalid salt length, must be {_SALT_BYTES} bytes; got {len(salt)} bytes instead.")
        derivation = KeyDerivation(
            int(_OpsLimit.MODERATE if opslimit is None else opslimit),
            int(_MemLimit.MODERATE if memlimit is None else memlimit),
            salt,
        )
        params = cls(key=derive_key(bytes(source), derivation))
        params._derivation = derivation
        return params

    @property
    def salt(self) -> bytes:
        """The salt of `from_string`. Raises ValueError for other keys."""
        if self._derivation is None:
            text = "An exact binary key is being used. Exact binary keys do not use key derivation algorithms, and"
            raise ValueError(f"{text} thus have no salt.")
        return self._derivation.salt

    def __repr__(self) -> str:
        return "EncryptionParams(key=...)"


class DecryptionParams:
    """The key or password with which a TensorDeserializer decrypts. Make one with `from_string` or `from_key`."""

    key: bytes | None
    source: bytes | None

    def __init__(self) -> None:
        self.key = None
        self.source = None

    @classmethod
    def from_string(cls, source: str | bytes, *, encoding: str = "utf-8") -> DecryptionParams:
        """Decrypts with the password of `EncryptionParams.from_string`. The file contains the salt
        and limits. Raises ValueError for an empty password."""
        if not source:
            raise ValueError("Source cannot be empty")
        params = cls()
        params.source = source.encode(encoding) if isinstance(source, str) else bytes(source)
        return params

    @classmethod
    def from_key(cls, key: bytes) -> DecryptionParams:
        """Decrypts with the key itself, however it was made. Raises ValueError unless the key has 32 bytes."""
        if not key:
            raise ValueError("Key cannot be empty")
        _check_length(key, "decryption")
        params = cls()
        params.key = bytes(key)
        return params

    def __repr__(self) -> str:
        return "DecryptionParams(...)"

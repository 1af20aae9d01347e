"""What a caller says about reaching a store, in the engine's words."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .._environment import environment
from ..errors import ArgumentError
from ..jobs import log
from ..paths import is_remote

if TYPE_CHECKING:
    from .._requests import FormatAccess

__all__ = ["storage"]

# Options of .tensors files, wherever they lie.
_OF_TENSORS = ("decryption_key", "decryption_password", "encryption_key", "encryption_password", "other_dtypes_as_bytes", "verify_crc32")

def storage(options: Mapping[str, object] | None, uris: Iterable[str], *, writes: bool = False) -> FormatAccess:
    """What a request says about reaching its URIs: {} for local paths.

    `decryption_key` (32 bytes, or their hex digits) and `decryption_password`
    (a text or bytes) are for encrypted .tensors files, wherever they lie;
    `other_dtypes_as_bytes` takes tensors of theirs whose dtype safetensors lacks
    as "U8" with one dimension more, and `verify_crc32` holds plain tensors of
    theirs to their CRC32 while they are read. `encryption_key` and `encryption_password`
    encrypt a .tensors file that is written, and are refused unless `writes`.
    Values become text; None is dropped; `headers`, a mapping, becomes one entry
    a header. Which names a scheme has the engine says. ArgumentError for
    options of another kind, or beside local paths alone.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(f"overwire: storage_options: expected a mapping, got {type(options).__name__}")
    of_tensors = {"decrypt": _keys(options or {}, "decryption"), "encrypt": _keys(options or {}, "encryption")}
    if (options or {}).get("other_dtypes_as_bytes"):
        of_tensors["decrypt"]["bytes"] = "true"
    if (options or {}).get("verify_crc32"):
        of_tensors["decrypt"]["crc32"] = "true"
    if of_tensors["encrypt"] and not writes:
        raise ArgumentError("overwire: storage_options: encryption_key and encryption_password are for what writes .tensors files")
    if any(of_tensors.values()):
        options = {name: value for name, value in (options or {}).items() if name not in _OF_TENSORS}
        found = storage(options or None, uris)
        if of_tensors["decrypt"]:
            found["decrypt"] = of_tensors["decrypt"]
        if of_tensors["encrypt"]:
            found["encrypt"] = of_tensors["encrypt"]
        return found
    if not any(map(is_remote, uris)):
        if options:
            raise ArgumentError("overwire: storage_options: they are for URIs; a local path takes none")
        return {}
    texts: dict[str, str] = {}
    for name, value in (options or {}).items():
        if not isinstance(name, str):
            raise ArgumentError("overwire: storage_options: a name is not a str")
        if name == "headers" and value is not None:
            if not isinstance(value, Mapping):
                raise ArgumentError("overwire: storage_options: headers: expected a mapping of names to texts")
            texts.update({f"header.{key}": _text("headers", part) for key, part in value.items()})
        elif value is not None:
            texts[name] = _text(name, value)
    if texts.get("insecure") == "true":
        _warn_once()
    return {"storage": texts, "env": environment()}


_warned = False


def _warn_once() -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning("storage_options: insecure: certificates are not checked, so anyone on the network path can change the weights")


def _keys(options: Mapping[str, object], prefix: str) -> dict[str, str]:
    """The key or the password of .tensors files, as the engine has it: in hex digits."""
    key, password = options.get(f"{prefix}_key"), options.get(f"{prefix}_password")
    if key is not None and password is not None:
        raise ArgumentError(f"overwire: storage_options: {prefix}_key and {prefix}_password exclude each other")
    if key is not None:
        if isinstance(key, (bytes, bytearray, memoryview)):
            key = bytes(key).hex()
        if not isinstance(key, str) or len(key) != 64 or not set(key.lower()) <= set("0123456789abcdef"):
            raise ArgumentError(f"overwire: storage_options: {prefix}_key: expected 32 bytes, or 64 hex digits")
        return {"key": key}
    if password is not None:
        if isinstance(password, str):
            password = password.encode()
        if not isinstance(password, (bytes, bytearray, memoryview)) or not len(password):
            raise ArgumentError(f"overwire: storage_options: {prefix}_password: expected a text or bytes, not empty")
        return {"password": bytes(password).hex()}
    return {}


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    raise ArgumentError(f"overwire: storage_options: {name}: expected a text, a number or a bool, got {type(value).__name__}")

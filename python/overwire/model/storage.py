"""Translates a caller's storage_options for the engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from .._environment import environment
from ..errors import ArgumentError
from ..fleet.choice import feeds
from ..jobs import log
from ..paths import is_remote
from .options import check_values

if TYPE_CHECKING:
    from .._requests import FormatAccess


def storage(options: Mapping[str, object] | None, uris: Iterable[str], *, writes: bool = False) -> FormatAccess:
    """Returns the fields of an engine request that say how to reach its URIs, or {} for local paths.

    options: see `StorageOptions`. Encryption options are refused unless `writes` is true. Values are converted to text,
    and each header becomes one entry. The engine checks the option names for each scheme. Raises ArgumentError for a
    value of a wrong type, and for store options if all paths are local.
    """
    check_values(storage_options=options)
    is_any_remote = any(map(is_remote, uris))
    if not options and not is_any_remote:
        return {}
    settings = {name: value for name, value in (options or {}).items() if value is not None}
    access: FormatAccess = {}
    decrypt = _take_key(settings, "decryption")
    for flag, name in (("bytes", "other_dtypes_as_bytes"), ("crc32", "verify_crc32")):
        if settings.pop(name, False):
            decrypt[flag] = "true"
    if decrypt:
        access["decrypt"] = decrypt
    if encrypt := _take_key(settings, "encryption"):
        if not writes:
            why = "encryption_key and encryption_password are only for writing .tensors files"
            raise ArgumentError(f"overwire: storage_options: {why}")
        access["encrypt"] = encrypt
    if is_any_remote:
        ray = settings.pop("ray", None)
        if not writes and feeds(ray):
            access["fed"] = True
        access["storage"], access["env"] = _option_texts(settings), environment()
    elif settings:
        raise ArgumentError("overwire: storage_options: expected a URI: local paths have no such options")
    return access


def _option_texts(options: Mapping[str, object]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for name, value in options.items():
        if not isinstance(name, str):
            raise ArgumentError(f"overwire: storage_options: expected str names, got {type(name).__name__}")
        if name != "headers":
            texts[name] = _option_text(name, value)
        elif isinstance(value, Mapping):
            texts.update({f"header.{key}": _option_text("headers", part) for key, part in value.items()})
        else:
            raise ArgumentError("overwire: storage_options: headers: expected a mapping of names to strings")
    if texts.get("insecure") == "true":
        _warn_once()
    return texts


@cache
def _warn_once() -> None:
    why = "certificates are not checked, so anyone on the network path can change the weights"
    log.warning(f"overwire: storage_options: insecure: {why}")


def _take_key(options: dict[str, object], prefix: str) -> dict[str, str]:
    """Removes the key or password for .tensors files from the options, and returns it as hex digits for the engine."""
    key, password = options.pop(f"{prefix}_key", None), options.pop(f"{prefix}_password", None)
    if key is not None and password is not None:
        raise ArgumentError(f"overwire: storage_options: pass only one of {prefix}_key and {prefix}_password")
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
            raise ArgumentError(f"overwire: storage_options: {prefix}_password: expected non-empty str or bytes")
        return {"password": bytes(password).hex()}
    return {}


def _option_text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    kind = type(value).__name__
    raise ArgumentError(f"overwire: storage_options: {name}: expected a str, a number or a bool, got {kind}")

"""Records of .tensors files as Python calls them, by the rules of `_engine`: see
gosrc/bind/face/tensors.go."""

from __future__ import annotations

from ._engine import call

__all__ = ["tensors_front", "tensors_key", "tensors_records", "tensors_sums", "tensors_write"]


def tensors_records(spec: str) -> str:
    """What a .tensors file says of itself, as JSON: {"uris": [one], "records": bool, "storage": {...}}."""
    return call("records", spec)


def tensors_write(spec: str) -> str:
    """Writes records and data to a descriptor: JSON {"items": [...], "pointers": [...], "fd", "path", "offset", "threads", "key",
    "derive"}; gives {"places": [[record, data], ...], "end"}."""
    return call("write", spec)


def tensors_front(spec: str) -> str:
    """Head and index of a .tensors file, in hex: JSON {"items": [...], "length", "version"}."""
    return call("front", spec)


def tensors_sums(spec: str) -> str:
    """CRC32 and SHA-256, a JSON list of pairs in hex: JSON {"items": [{"prefix": hex, "pointer", "bytes"}, ...]}."""
    return call("sums", spec)


def tensors_key(spec: str) -> str:
    """The key of a password, in hex: JSON {"password": hex, "passes", "memory", "salt": base64}."""
    return call("key", spec)

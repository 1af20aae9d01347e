"""Records of .tensors files as Python calls them, by the rules of `_engine`: see
gosrc/bind/face/tensors.go."""

from __future__ import annotations

from ._engine import _call, _core

__all__ = ["tensors_front", "tensors_key", "tensors_record", "tensors_records", "tensors_sums"]


def tensors_records(spec: str) -> str:
    """What a .tensors file says of itself, as JSON: {"uris": [one], "records": bool, "storage": {...}}."""
    text: str = _call(_core().api_TensorsRecords, spec)
    return text


def tensors_record(spec: str, data: int, sealed: int) -> str:
    """The record before the data at an address, in hex; `sealed` gets the data encrypted."""
    text: str = _call(_core().api_TensorsRecord, spec, data, sealed)
    return text


def tensors_front(spec: str) -> str:
    """Head and index of a .tensors file, in hex: JSON {"items": [...], "length", "version"}."""
    text: str = _call(_core().api_TensorsFront, spec)
    return text


def tensors_sums(prefix: str, data: int, n: int) -> str:
    """CRC32 and SHA-256 of a prefix (hex) and of n bytes at an address, in hex."""
    text: str = _call(_core().api_TensorsSums, prefix, data, n)
    return text


def tensors_key(spec: str) -> str:
    """The key of a password, in hex: JSON {"password": hex, "passes", "memory", "salt": base64}."""
    text: str = _call(_core().api_TensorsKey, spec)
    return text

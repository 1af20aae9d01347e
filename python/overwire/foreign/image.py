"""Reads the header of a safetensors file that stores parts of tensors. That file may be inside another file.

torch's HuggingFaceStorageWriter records where each part begins in its whole tensor. The offsets are in the metadata
entry DCP_SHARDING_INFO: {"name": {"saved_offsets": [0, 4]}, ...}.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from .._tables import BITS
from ..errors import CorruptError, FormatError, OverwireError
from ..portable.container import STRICTLY
from .content import bytes_of
from .joined import Files, Run

#: The metadata key of the offsets.
SHARDING = "DCP_SHARDING_INFO"

_MOST = 100_000_000
_DIMS = 64


class Part(NamedTuple):
    """A tensor of the file. offsets: the position of its first element in the whole tensor, or None if the file does
    not state it."""

    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    run: Run


def read_parts(files: Files, path: str, start: int = 0) -> dict[str, Part]:
    """Returns the tensors listed in the header of a safetensors file. That file begins at offset `start` of `path` and
    ends where `path` ends.

    Raises FormatError for an invalid safetensors file, and CorruptError for a truncated file.
    """

    def make_error(why: str, tensor: str | None = None, kind: type[OverwireError] = FormatError) -> OverwireError:
        name = "" if tensor is None else f"tensor {tensor!r}: "
        return kind(f"overwire: open {path}: {name}{why}", source=path, tensor=tensor)

    whole = files.size_of(path) - start
    length = bytearray(8)
    if whole < 8:
        raise make_error(f"a safetensors file has at least 8 bytes, but only {whole} bytes are left at offset {start}")
    files.fill_block(path, memoryview(length), start)
    size = int.from_bytes(length, "little")
    if size > _MOST:
        raise make_error(f"invalid header size {size}: expected at most {_MOST} bytes")
    if size > whole - 8:
        raise make_error(f"its header has {size} bytes, but only {whole - 8} bytes follow", kind=CorruptError)
    text = bytearray(size)
    files.fill_block(path, memoryview(text), start + 8)
    try:
        header = json.loads(text.decode(), **STRICTLY)
        metadata = header.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata values are not strings")
        sharding = json.loads(metadata[SHARDING], **STRICTLY) if SHARDING in metadata else None
        entries = {name: (one["dtype"], one["shape"], one["data_offsets"]) for name, one in header.items()}
        offsets = None if sharding is None else {name: one["saved_offsets"] for name, one in sharding.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise make_error(f"malformed header: {error!s:.200}") from error
    parts: dict[str, Part] = {}
    for name, (dtype, shape, span) in entries.items():
        if dtype not in BITS or not _are_numbers(shape) or not _are_numbers(span) or len(span) != 2:
            raise make_error("its dtype, shape or offsets are malformed", name)
        at = None if offsets is None else offsets.get(name)
        if at is not None and (not _are_numbers(at) or len(at) != len(shape)):
            raise make_error(f"its offsets in {SHARDING} are malformed", name)
        low, high = span
        if high - low != bytes_of(dtype, tuple(shape)):
            raise make_error(f"its {high - low} bytes do not match shape {shape} of {dtype}", name)
        if high > whole - 8 - size:
            why = f"it ends at byte {high} of the data, but the data has only {whole - 8 - size} bytes"
            raise make_error(f"truncated file: {why}: copy or fetch the file again", name, CorruptError)
        run = Run(files, path, start + 8 + size + low, high - low)
        parts[name] = Part(dtype, tuple(shape), None if at is None else tuple(at), run)
    spans = sorted((part.run.start, part.run.size, name) for name, part in parts.items() if part.run.size)
    end = start + 8 + size
    for low, count, name in spans:
        if low != end:
            raise make_error("it shares bytes with another tensor" if low < end else "there is a gap before it", name)
        end = low + count
    if end != start + whole:
        raise make_error(f"{start + whole - end} unused bytes follow the last tensor")
    return parts


def _are_numbers(value: Any) -> bool:
    is_list = type(value) is list and len(value) <= _DIMS
    return is_list and all(type(number) is int and 0 <= number < 1 << 62 for number in value)

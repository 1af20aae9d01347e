"""Defines the small types of tensorizer's serialization module."""

from __future__ import annotations

import enum
import io
from dataclasses import dataclass
from typing import Any


def refuse_text(file: Any, *needs: str, text: str) -> None:
    """Raises ValueError if a file is open in text mode or lacks a capability ("readable"). text: the message, with {}
    in place of the file's mode."""
    try:
        fits = all(getattr(file, need)() for need in needs)
    except AttributeError:
        fits = True
    if isinstance(file, io.TextIOBase) or not fits:
        mode = getattr(file, "mode", "")
        raise ValueError(text.format(f', current mode="{mode}"' if mode else ""))


class TensorType(enum.IntEnum):
    """Whether a tensor is a parameter, a buffer or an entry of a state dict."""

    PARAM = 0
    BUFFER = 1
    STATE_DICT = 2


class HashType(enum.IntEnum):
    """The kinds of checksums."""

    CRC32 = 0
    SHA256 = 1


class HashMismatchError(Exception):
    """Raised if a tensor's bytes do not match its checksum."""


@dataclass(order=True)
class TensorHash:
    """One checksum: its kind, and its bytes (CRC32 as four bytes, little-endian)."""

    type: HashType
    hash: bytes


@dataclass(order=True)
class TensorEntry:
    """A tensor's entry in the index, and the checksums of its record. name: a string, or a path as a tuple. dtype: the
    name of the numpy dtype. offset, data_offset: byte offsets in the file."""

    metadata_version: int
    name: Any
    type: TensorType
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data_offset: int
    data_length: int
    hashes: list[TensorHash] | None
    header_hashes: dict[HashType, Any] | None = None

    @property
    def deserialized_length(self) -> int:
        """The number of bytes in memory. If data_length is 0, all bytes are zero."""
        import math
        import re

        size = re.search(r"(\d+)$", self.dtype.partition("\0")[0])
        return self.data_length or math.prod(self.shape) * int(size[1] if size else 0)

    @property
    def is_long_tensor(self) -> bool:
        """Whether each dimension takes 8 bytes in the file."""
        return self.metadata_version >= 5


class FileFeatureFlags(enum.IntFlag):
    """The feature flags in the head of a file."""

    encrypted = enum.auto()
    versioned_headers = enum.auto()


@dataclass
class FileHeader:
    """The head of a file. tensor_size: the number of bytes that the file's writer has stated."""

    version_number: int
    feature_flags: FileFeatureFlags
    tensor_size: int
    tensor_count: int

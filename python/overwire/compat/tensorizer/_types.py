"""The small types of tensorizer's serialization module."""

from __future__ import annotations

import enum


class TensorType(enum.IntEnum):
    """What a tensor is of."""

    PARAM = 0
    BUFFER = 1
    STATE_DICT = 2


class HashType(enum.IntEnum):
    """The kinds of sums."""

    CRC32 = 0
    SHA256 = 1


class HashMismatchError(Exception):
    """A tensor's bytes are not those that were summed up."""

"""Decodes chunks of codec 6 with numpy (docs/format.md, section 3.6)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError, MissingPackageError

Bytes = NDArray[np.uint8]

_ELEMENTS = {1: (1, False), 2: (2, False), 3: (4, False), 4: (8, False), 5: (2, True), 6: (4, True), 7: (8, True)}
_BLOCK = 65536
_LARGEST_WINDOW = 16 << 20  # as large as the largest chunk


class _Reader:
    # Reads the bytes of a chunk from front to back.

    def __init__(self, data: Bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> Bytes:
        _check_planes(self.at + count <= len(self.data), "its length")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: str) -> int:
        return int(self.take(np.dtype(kind).itemsize).view(kind)[0])


def decode(stored: Bytes, logical: int, transform: int) -> Bytes:
    """Returns the logical bytes of a chunk. Raises CorruptError, and MissingPackageError if the chunk has Zstandard
    frames and Python has no decoder for them."""
    size, rotation = _ELEMENTS[transform]
    reader = _Reader(np.ascontiguousarray(stored))
    _check_planes(logical % size == 0 and reader.number("<u4") == logical, "its logical bytes")
    count = logical // size
    planes = np.stack([_plane_of(reader, count) for _ in range(size)], axis=1)
    _check_planes(reader.at == len(stored), "extra bytes after its planes")
    out = np.ascontiguousarray(planes).reshape(-1)
    if rotation:
        kind = np.dtype(f"<u{size}")
        elements = out.view(kind)
        out = (elements >> kind.type(1) | elements << kind.type(8 * size - 1)).view(np.uint8)
    return out


def _check_planes(ok: bool, what: str) -> None:
    if not ok:
        raise CorruptError(f"overwire: corrupt data: planes: check failed: {what}")


def _plane_of(reader: _Reader, count: int) -> Bytes:
    form = reader.number("u1")
    if form == 2:
        return reader.take(count)
    if form == 1:
        return _unpack_frame(bytes(reader.take(reader.number("<u4"))), count)
    _check_planes(form == 0, f"form {form}")
    sizes = [min(_BLOCK, count - at) for at in range(0, count, _BLOCK)]
    kinds = reader.take(len(sizes)).tolist()
    _check_planes(max(kinds) <= 3 and kinds.count(3) != 1, "the kind of a block")
    shared_table = _table_of(reader) if 3 in kinds else None
    blocks: list[Bytes] = []
    for kind, size in zip(kinds, sizes, strict=True):
        if kind == 0:
            blocks.append(reader.take(size))
        elif kind == 1:
            blocks.append(np.full(size, reader.number("u1"), np.uint8))
        else:
            table = shared_table if kind == 3 else _table_of(reader)
            assert table is not None
            blocks.append(_decode_plane(reader, table, size))
    return np.concatenate(blocks)


def _table_of(reader: _Reader) -> tuple[list[int], list[int], list[int]]:
    # Returns for each slot: its value, the value's frequency, and the slot's position among the value's slots.
    values = np.flatnonzero(np.unpackbits(reader.take(32), bitorder="little")).tolist()
    value: list[int] = []
    freq: list[int] = []
    rank: list[int] = []
    for one in values:
        count = reader.number("u1")
        if count >= 128:
            count = (count & 127) << 8 | reader.number("u1")
            _check_planes(count >= 128, "a frequency")
        _check_planes(count >= 1, "a frequency")
        value += [one] * count
        freq += [count] * count
        rank += range(count)
        _check_planes(len(value) <= 4096, "its frequencies")
    _check_planes(len(value) == 4096, "its frequencies")
    return value, freq, rank


def _decode_plane(reader: _Reader, table: tuple[list[int], list[int], list[int]], size: int) -> Bytes:
    value, freq, rank = table
    states = reader.take(16).view("<u4").tolist()
    words = reader.take(2 * reader.number("<u2")).view("<u2").tolist()
    _check_planes(min(states) >= 1 << 16, "a state")
    out, at, end = bytearray(size), 0, len(words)
    for i in range(size):
        x = states[i & 3]
        slot = x & 4095
        out[i] = value[slot]
        x = freq[slot] * (x >> 12) + rank[slot]
        if x < 1 << 16:
            _check_planes(at < end, "a word after the end of its block")
            x = x << 16 | words[at]
            at += 1
        states[i & 3] = x
    _check_planes(at == end and states == [1 << 16] * 4, "the end of a block")
    return np.frombuffer(bytes(out), np.uint8)


def _check_frame(frame: bytes, count: int) -> None:
    # Expects a single frame that states its content size and has no dictionary: RFC 8878, 3.1.1.1.
    _check_planes(frame[:4] == b"\x28\xb5\x2f\xfd" and len(frame) > 5, "the start of a frame")
    flags = frame[4]
    is_single, size_bytes = bool(flags & 32), (1 if flags & 32 else 0, 2, 4, 8)[flags >> 6]
    _check_planes(not flags & 8 and size_bytes > 0, "the header of a frame")
    at = 5 if is_single else 6
    dictionary = frame[at : at + (0, 1, 2, 4)[flags & 3]]
    _check_planes(not any(dictionary), "the dictionary of a frame")
    at += len(dictionary)
    size = int.from_bytes(frame[at : at + size_bytes], "little") + (256 if size_bytes == 2 else 0)
    _check_planes(size == count, "the size that a frame states")
    window = size if is_single else (1 << 10 + (frame[5] >> 3)) * (8 + (frame[5] & 7)) // 8
    _check_planes(window <= _LARGEST_WINDOW, "the window of a frame")


def _unpack_frame(frame: bytes, count: int) -> Bytes:
    _check_frame(frame, count)
    decompressor: Any
    try:
        from compression import zstd as standard  # type: ignore[import-not-found]

        decompressor = standard.ZstdDecompressor()
    except ImportError:
        try:
            import zstandard
        except ImportError:
            text = "this file has Zstandard frames: pip install zstandard, or use Python 3.14 or later"
            raise MissingPackageError(f"overwire: {text}") from None
        decompressor = zstandard.ZstdDecompressor().decompressobj()
    try:
        content = decompressor.decompress(frame)
    except Exception as error:  # each package has its own class of errors
        raise CorruptError(f"overwire: corrupt data: planes: {error}") from None
    _check_planes(len(content) == count and decompressor.eof and not decompressor.unused_data, "a frame")
    return np.frombuffer(content, np.uint8)

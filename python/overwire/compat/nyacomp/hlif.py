"""The files that nyacomp itself wrote: nvCOMP's high-level container, of which
the header is open.

    0  u32 magic (0)      4  u8 major, minor   6  u8 format
    8  u64 payload bytes  16 u64 plain bytes   24 u64 chunks
    48 u64 plain bytes of a chunk              56 u32 offset of the payload

Its chunks are GDeflate streams in a layout of nvCOMP 3, which is not published:
they are named and refused, never guessed at.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import overwire

__all__ = ["FORMATS", "RECOMPRESS", "Header", "parse", "refuse"]

FORMATS = ("LZ4", "Snappy", "ANS", "GDeflate", "Cascaded", "Bitcomp", "Zstd", "Deflate", "Gzip")
_HEADER = struct.Struct("<IBBB1xQQQ16xQI4x")

#: What turns a bundle of nyacomp's into one of overwire's, where nyacomp and its GPU are.
RECOMPRESS = "python -m overwire.compat.nyacomp recompress MODEL.pkl NEW.pkl"


class Header(NamedTuple):
    """The fixed part of nvCOMP's header."""

    version: tuple[int, int]
    format: str
    payload: int
    plain: int
    chunks: int
    chunk_bytes: int
    offset: int


def parse(head: bytes, size: int) -> Header | None:
    """The header in the first 64 bytes of a file of `size` bytes; None if these
    cannot be one."""
    if len(head) < _HEADER.size:
        return None
    magic, major, minor, kind, payload, plain, chunks, chunk_bytes, offset = _HEADER.unpack_from(head)
    if magic or not 1 <= major < 64 or kind >= len(FORMATS) or not _HEADER.size <= offset <= size or payload > size - offset:
        return None
    return Header((major, minor), FORMATS[kind], payload, plain, chunks, chunk_bytes, offset)


def refuse(place: str) -> None:
    """Raises NotSupportedError for a file of nvCOMP's, FormatError for one that is
    neither that nor a container."""
    with open(place, "rb") as file:
        head = file.read(_HEADER.size)
        size = file.seek(0, 2)
    if head[4:9] == b"\0\0\0\0{":
        return
    found = parse(head, size)
    if found is None:
        raise overwire.FormatError(f"overwire: open {place}: neither a container of overwire's nor a file of nvCOMP's", source=place)
    raise overwire.NotSupportedError(
        f"overwire: open {place}: written by nyacomp itself ({found.format} of nvCOMP {found.version[0]}.{found.version[1]}, "
        f"{found.plain} bytes); where nyacomp and its GPU are, run: {RECOMPRESS}",
        source=place,
    )

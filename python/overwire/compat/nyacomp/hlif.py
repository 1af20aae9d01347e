"""Reads files that nyacomp itself wrote, in nvCOMP's high-level container.

    0  u32 magic          4  u8 major, minor   6  u8 format
    8  u64 payload bytes  16 u64 plain bytes   24 u64 chunks
    32 u8 offsets follow  44 u8, u8 checksums of stored, of plain chunks follow
    48 u64 plain bytes of a chunk              56 u32 offset of the payload
    64 the format's own header; u64 offset, u64 bytes of each chunk; u32 checksums

This is the container of nvCOMP 2.2, the last open-source release, except that the magic number is 0. Its GDeflate
chunks are standard. nvCOMP does not publish its checksum algorithm, so checksums are not compared (nyacomp does not
compare them either). A wrong byte is not noticed if its chunk can still be decoded, so compress such models again.
"""

from __future__ import annotations

import logging
import struct
from typing import NamedTuple

import overwire
from overwire import codecs
from overwire._compat_api import regular

log = logging.getLogger("overwire")

FORMATS = ("LZ4", "Snappy", "ANS", "GDeflate", "Cascaded", "Bitcomp", "Zstd", "Deflate", "Gzip")
_HEADER = struct.Struct("<IBBB1xQQ32xI4x")
_HIDDEN = ("ANS", "Bitcomp")  # formats with unpublished chunk layouts

#: The command that converts nyacomp's bundles to overwire's.
RECOMPRESS = "python -m overwire.compat.nyacomp recompress MODEL.pkl NEW.pkl"


class Header(NamedTuple):
    """nvCOMP's header of a file: its version, format, and number of plain bytes."""

    version: tuple[int, int]
    format: str
    plain: int


def parse(place: str, head: bytes, size: int) -> Header:
    """Parses the first 64 bytes of a file of `size` bytes. Raises FormatError for other files, and NotSupportedError
    for formats that only nvCOMP can read."""
    if len(head) >= _HEADER.size:
        magic, major, minor, kind, payload, plain, offset = _HEADER.unpack_from(head)
        if (
            magic == 0
            and 2 <= major <= 4
            and kind < len(FORMATS)
            and _HEADER.size <= offset <= size
            and payload <= size - offset
        ):
            header = Header((major, minor), FORMATS[kind], plain)
            if header.format not in _HIDDEN:
                return header
            text = f"overwire: open {place}: format {header.format} of nvCOMP {major}.{minor}: only nvCOMP reads it"
            raise overwire.NotSupportedError(text, source=place)
    text = f"overwire: open {place}: neither an overwire container nor an nvCOMP file"
    raise overwire.FormatError(text, source=place)


def sniff(place: str) -> Header | None:
    """Detects the kind of a local file. Returns None for an overwire container, and nvCOMP's header
    for other files. Raises the errors of `parse`."""
    with open(place, "rb", opener=regular) as file:
        head = file.read(_HEADER.size)
        size = file.seek(0, 2)
    return None if head[4:9] == b"\0\0\0\0{" else parse(place, head, size)


def decode(place: str, data: bytes, size: int) -> memoryview:
    """Decodes the `size` bytes of a complete nvCOMP file. Raises CorruptError, FormatError, NotSupportedError."""
    header = parse(place, data[: _HEADER.size], len(data))
    if header.plain != size:
        text = f"overwire: open {place}: expected {size} plain bytes, got {header.plain}"
        raise overwire.FormatError(text, source=place)
    text = "overwire: %s: its checksums are nvCOMP's own and are not compared; compress the model again with: %s"
    log.warning(text, place, RECOMPRESS)
    try:
        content = codecs.decode(data, header.format, verify=False)  # limits its memory itself
    except overwire.OverwireError as error:
        raise type(error)(f"overwire: decode {place}: {error}", source=place) from error
    if len(content) != size:
        raise overwire.CorruptError(f"overwire: decode {place}: {len(content)} bytes, expected {size}", source=place)
    return content

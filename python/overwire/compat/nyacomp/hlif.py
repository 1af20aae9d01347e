"""The files that nyacomp itself wrote: nvCOMP's high-level container.

    0  u32 magic          4  u8 major, minor   6  u8 format
    8  u64 payload bytes  16 u64 plain bytes   24 u64 chunks
    32 u8 offsets follow  44 u8, u8 checksums of stored, of plain chunks follow
    48 u64 plain bytes of a chunk              56 u32 offset of the payload
    64 the format's own header; u64 offset, u64 bytes of each chunk; u32 checksums

It is the container of nvCOMP 2.2, the last release whose source is open, with 0 as
magic, and the chunks of GDeflate are the open ones. nvCOMP does not publish its
checksums, so that they are not compared: nyacomp does not either, but a changed
byte may go unseen where it breaks no chunk. Compress such files again.
"""

from __future__ import annotations

import logging
import struct
from typing import NamedTuple

import overwire
from overwire import codecs
from overwire.plumbing import regular

log = logging.getLogger("overwire")

FORMATS = ("LZ4", "Snappy", "ANS", "GDeflate", "Cascaded", "Bitcomp", "Zstd", "Deflate", "Gzip")
_HEADER = struct.Struct("<IBBB1xQQ32xI4x")
_HIDDEN = ("ANS", "Bitcomp")  # the layout of their chunks is not public

#: What turns a bundle of nyacomp's into one of overwire's.
RECOMPRESS = "python -m overwire.compat.nyacomp recompress MODEL.pkl NEW.pkl"


class Header(NamedTuple):
    """What nvCOMP's header says of a file: who wrote it, how, and the bytes in it."""

    version: tuple[int, int]
    format: str
    plain: int


def parse(place: str, head: bytes, size: int) -> Header:
    """The header in the first 64 bytes of a file of `size` bytes. FormatError for what
    is none, NotSupportedError for formats that only nvCOMP knows."""
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
            raise overwire.NotSupportedError(
                f"overwire: open {place}: {header.format} of nvCOMP {major}.{minor}, {plain} bytes: only nvCOMP reads "
                "it",
                source=place,
            )
    raise overwire.FormatError(
        f"overwire: open {place}: neither a container of overwire's nor a file of nvCOMP's", source=place
    )


def sniff(place: str) -> Header | None:
    """What a local file is: None for one of overwire's containers, the header of
    nvCOMP's. Raises as `parse`."""
    with open(place, "rb", opener=regular) as file:
        head = file.read(_HEADER.size)
        size = file.seek(0, 2)
    return None if head[4:9] == b"\0\0\0\0{" else parse(place, head, size)


def decode(place: str, data: bytes, size: int) -> memoryview:
    """The `size` bytes in a whole file of nvCOMP's. CorruptError, FormatError,
    NotSupportedError."""
    header = parse(place, data[: _HEADER.size], len(data))
    if header.plain != size:
        raise overwire.FormatError(f"overwire: open {place}: {header.plain} bytes in it, {size} wanted", source=place)
    log.warning(
        "overwire: %s: its checksums are nvCOMP's own and are not compared; compress the model again: %s",
        place,
        RECOMPRESS,
    )
    try:
        content = codecs.decode(data, header.format, verify=False)  # no memory before the stream can give as much
    except overwire.OverwireError as error:
        raise type(error)(f"overwire: decode {place}: {error}", source=place) from error
    if len(content) != size:
        raise overwire.CorruptError(f"overwire: decode {place}: {len(content)} bytes, {size} wanted", source=place)
    return content

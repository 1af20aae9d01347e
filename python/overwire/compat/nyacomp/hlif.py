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
from typing import Any, NamedTuple

import overwire
from overwire import codecs
from overwire.plumbing import regular

__all__ = ["FORMATS", "RECOMPRESS", "Header", "decode", "parse", "refuse", "sniff"]

log = logging.getLogger("overwire")

FORMATS = ("LZ4", "Snappy", "ANS", "GDeflate", "Cascaded", "Bitcomp", "Zstd", "Deflate", "Gzip")
_HEADER = struct.Struct("<IBBB1xQQQ16xQI4x")
_HIDDEN = ("ANS", "Bitcomp")  # the layout of their chunks is not public

#: What turns a bundle of nyacomp's into one of overwire's.
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
    if magic != 0 or not 2 <= major <= 4 or kind >= len(FORMATS):
        return None
    if not _HEADER.size <= offset <= size or payload > size - offset:
        return None
    return Header((major, minor), FORMATS[kind], payload, plain, chunks, chunk_bytes, offset)


def sniff(place: str) -> Header | None:
    """What a local file is: None for one of overwire's containers, the header of
    nvCOMP's. FormatError for a file that is neither."""
    with open(place, "rb", opener=regular) as file:
        head = file.read(_HEADER.size)
        size = file.seek(0, 2)
    if head[4:9] == b"\0\0\0\0{":
        return None
    found = parse(head, size)
    if found is None:
        raise overwire.FormatError(f"overwire: open {place}: neither a container of overwire's nor a file of nvCOMP's", source=place)
    refuse(place, found)
    return found


def refuse(place: str, found: Header) -> None:
    """Raises NotSupportedError for files of formats that only nvCOMP knows."""
    if found.format in _HIDDEN:
        raise overwire.NotSupportedError(
            f"overwire: open {place}: written by nyacomp itself ({found.format} of nvCOMP {found.version[0]}.{found.version[1]}, "
            f"{found.plain} bytes); where nyacomp and its GPU are, run: {RECOMPRESS}",
            source=place,
        )


def decode(place: str, data: bytes | bytearray | memoryview, out: Any) -> None:
    """Decodes a whole file of nvCOMP's into a writable buffer of just its plain bytes. CorruptError, FormatError, NotSupportedError."""
    found = parse(bytes(data[: _HEADER.size]), len(data))
    if found is None:
        raise overwire.FormatError(f"overwire: open {place}: neither a container of overwire's nor a file of nvCOMP's", source=place)
    refuse(place, found)
    size = memoryview(out).nbytes
    if found.plain != size:
        raise overwire.FormatError(f"overwire: open {place}: {found.plain} bytes in it, {size} wanted", source=place)
    log.warning("%s: its checksums are nvCOMP's own and are not compared; compress the model again: %s", place, RECOMPRESS)
    try:
        got = codecs.decode(data, found.format, out=out, verify=False)
    except overwire.OverwireError as error:
        raise type(error)(f"overwire: decode {place}: {error}", source=place) from error
    if len(got) != size:
        raise overwire.CorruptError(f"overwire: decode {place}: {len(got)} bytes, {size} wanted", source=place)

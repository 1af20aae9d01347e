"""Recomputes the checksums of changed containers, so that tests can check what happens to damage that matches its
checksums."""

from __future__ import annotations

import struct

import numpy as np
from overwire.portable.sums import crc32c


def with_checksums(data: bytearray) -> bytes:
    """Returns the container with recomputed checksums of its header, index and chunks. The checksum of a chunk that
    reaches past the end of the file does not change."""
    base = 8 + int.from_bytes(data[:8], "little")
    tensors, chunks, dims = struct.unpack_from("<3I", data, base + 16)
    table = base + 64 + 8 * dims + 64 * tensors
    if table + 32 * chunks + 4 > len(data):
        return bytes(data)

    def put_sum(at: int, low: int, high: int) -> None:
        struct.pack_into("<I", data, at, crc32c(np.frombuffer(bytes(data[low:high]), np.uint8)))

    for at in range(table, table + 32 * chunks, 32):
        offset, size = struct.unpack_from("<QI", data, at)
        if offset + size <= len(data):
            put_sum(at + 16, offset, offset + size)
    put_sum(base + 40, 0, base)
    put_sum(table + 32 * chunks, base, table + 32 * chunks)
    return bytes(data)

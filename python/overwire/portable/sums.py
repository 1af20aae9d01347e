"""CRC32C (Castagnoli) of bytes, by numpy: RFC 3720, appendix B.4.

The register is linear over GF(2): columns of the bytes are summed side by side, each from
a register of zero, and joined by what zeros make of the register.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["crc32c"]

_POLYNOMIAL = 0x82F63B78
_COLUMNS = 4096

Words = NDArray[np.uint32]


def _shift(register: Words) -> Words:
    # One bit of zero through registers.
    return np.where(register & 1, register >> 1 ^ np.uint32(_POLYNOMIAL), register >> 1).astype(np.uint32)


@cache
def _table(bits: int) -> Words:
    # What that many bits make of a register that was zero but for them.
    table = np.arange(1 << bits, dtype=np.uint32)
    for _ in range(bits):
        table = _shift(table)
    return table


def crc32c(data: NDArray[np.uint8]) -> int:
    """The CRC32C of an array of uint8."""
    rows = len(data) // (2 * _COLUMNS)
    head = data[: rows * 2 * _COLUMNS]
    register = np.uint32(0xFFFFFFFF)
    table = _table(16)
    if rows:
        # Column k has bytes [k, k + 1) x 2 rows of the head.
        pairs = np.ascontiguousarray(head.view("<u2").reshape(_COLUMNS, rows).T).astype(np.uint32)
        columns = np.zeros(_COLUMNS, np.uint32)
        columns[0] = register
        for row in pairs:
            mixed = columns ^ row
            columns = table[mixed & 0xFFFF] ^ mixed >> 16
        register = _join(columns, 2 * rows)
    rest, single = data[len(head) :], _table(8)
    for byte in rest.tolist():
        register = single[(int(register) ^ byte) & 0xFF] ^ np.uint32(int(register) >> 8)
    return int(register) ^ 0xFFFFFFFF


def _join(columns: Words, nbytes: int) -> np.uint32:
    # Neighbours are joined in pairs: the left one is moved past the bytes of the right one.
    matrix = _zeros(nbytes)
    while len(columns) > 1:
        columns = _times(matrix, columns[0::2]) ^ columns[1::2]
        matrix = _times(matrix, matrix)
    register: np.uint32 = columns[0]
    return register


@cache
def _zeros(nbytes: int) -> Words:
    # As a matrix, bit by bit of the register, what that many zero bytes make of it.
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power = _shift(bits)  # of one bit
    result: Words = bits
    count = 8 * nbytes
    while count:
        if count & 1:
            result = _times(power, result)
        power = _times(power, power)
        count >>= 1
    return result


def _times(matrix: Words, values: Words) -> Words:
    out = np.zeros_like(values)
    for bit in range(32):
        out ^= np.where(values >> np.uint32(bit) & 1, matrix[bit], np.uint32(0))
    return out

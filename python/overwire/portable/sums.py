"""Computes CRC32C (Castagnoli; RFC 3720, appendix B.4) with numpy.

The register is linear over GF(2): bytes have the same effect at any position, shifted by the bytes that follow. So each
row of words is shifted past the next row and added to it, for all words in parallel, until one row is left.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_WIDTHS = (2048, 256, 32)  # words per row

Words = NDArray[np.uint32]


def _shift_bit(register: Words) -> Words:
    # Shifts a zero bit through registers.
    return np.where(register & 1, register >> 1 ^ np.uint32(_POLYNOMIAL), register >> 1).astype(np.uint32)


@cache
def _make_table(bits: int) -> Words:
    # Returns the register after `bits` zero bits, for each value of its low `bits` bits, with its other bits 0.
    table = np.arange(1 << bits, dtype=np.uint32)
    for _ in range(bits):
        table = _shift_bit(table)
    return table


def crc32c(data: NDArray[np.uint8]) -> int:
    """Returns the CRC32C of an array of uint8."""
    register = 0xFFFFFFFF
    for width in _WIDTHS:
        rows = len(data) // (4 * width)
        if rows > 1:
            words = data[: 4 * width * rows].view("<u4").reshape(rows, width)
            row = _fold_words(words, np.uint32(register))
            data, register = np.concatenate([row.view(np.uint8), data[4 * width * rows :]]), 0
    single = _make_table(8)
    for byte in data.tolist():
        register = int(single[(register ^ byte) & 0xFF]) ^ register >> 8
    return register ^ 0xFFFFFFFF


def _fold_words(words: Words, register: np.uint32) -> Words:
    # Returns one row of words with the same effect as `register` and all the rows.
    width = words.shape[1]
    low_table, high_table = _moves_of_zeros(width)
    row: Words = words[0].astype(np.uint32)
    row[0] ^= register
    halves = row.view(np.uint16)
    index, low, high = np.empty(width, np.intp), np.empty_like(row), np.empty_like(row)
    for after in words[1:]:
        index[:] = halves[0::2]
        np.take(low_table, index, out=low, mode="clip")  # clip avoids a copy of `out`
        index[:] = halves[1::2]
        np.take(high_table, index, out=high, mode="clip")
        np.bitwise_xor(low, high, out=low)
        np.bitwise_xor(low, after, out=row)
    return row


@cache
def _moves_of_zeros(words: int) -> tuple[Words, Words]:
    # Returns the effect of `words` zero words on a register's low half, and on its high half.
    matrix = _matrix_of_zeros(4 * words)
    tables = []
    for half in (matrix[:16], matrix[16:]):
        table = np.zeros(1, np.uint32)
        for bit in half:
            table = np.concatenate([table, table ^ bit])
        tables.append(table)
    return tables[0], tables[1]


@cache
def _matrix_of_zeros(nbytes: int) -> Words:
    # Returns the effect of `nbytes` zero bytes on each bit of the register, as a matrix.
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power = _shift_bit(bits)  # the effect of one zero bit
    result: Words = bits
    count = 8 * nbytes
    while count:
        if count & 1:
            result = _multiply_matrix(power, result)
        power = _multiply_matrix(power, power)
        count >>= 1
    return result


def _multiply_matrix(matrix: Words, values: Words) -> Words:
    out = np.zeros_like(values)
    for bit in range(32):
        out ^= np.where(values >> np.uint32(bit) & 1, matrix[bit], np.uint32(0))
    return out

"""The element types of safetensors: their names and sizes, nothing else.

The tables are the engine's.
"""

from __future__ import annotations

from ._tables import BITS, CAST_FROM, CAST_TO

__all__ = ["BITS", "CAST_FROM", "CAST_TO", "FLOATS", "PACKED", "nbytes", "packed_shape"]

# Types with several elements in a byte: no framework indexes them by element.
PACKED = frozenset(name for name, bits in BITS.items() if bits < 8)

# Types that `dtype=` casts. Packed types and the exponent-only F8_E8M0 are
# parts of a quantisation scheme and stay as they are.
FLOATS = frozenset({"F16", "BF16", "F32", "F64"} | {"F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The bytes of a tensor; a packed one must fill its last byte."""
    bits = BITS[dtype]
    for d in shape:
        bits *= d
    return bits // 8


def packed_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape, in bytes, that a packed tensor has as U8.

    The last dimension shrinks to its bytes; where it does not fill whole
    bytes, the result is flat.
    """
    if shape and (shape[-1] * BITS[dtype]) % 8 == 0:
        return (*shape[:-1], shape[-1] * BITS[dtype] // 8)
    return (nbytes(dtype, shape),)

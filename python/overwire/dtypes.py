"""The element types of safetensors: their names and sizes, nothing else.

The table is that of gosrc/tensor; a test compares the two.
"""

from __future__ import annotations

__all__ = ["BITS", "CAST_FROM", "CAST_TO", "FLOATS", "PACKED", "nbytes", "packed_shape"]

# Bits of one element, in the order of Go's codes.
BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# Types with several elements in a byte: no framework indexes them by element.
PACKED = frozenset(name for name, bits in BITS.items() if bits < 8)

# Types that `dtype=` casts. Packed types and the exponent-only F8_E8M0 are
# parts of a quantisation scheme and stay as they are.
FLOATS = frozenset({"F16", "BF16", "F32", "F64"} | {"F8_E5M2", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})

# Of these, what the engine casts on a GPU, from and to. A test compares it with
# the kernels' table in Go.
CAST_FROM = frozenset({"F32", "BF16", "F16", "F8_E4M3", "F8_E5M2"})
CAST_TO = frozenset({"F32", "BF16", "F16"})


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

"""Lists the element types of safetensors with their names and sizes.

The tables come from the engine.
"""

from __future__ import annotations

import math
from typing import Any

from ._imports import imported
from ._tables import BITS

# Types with elements smaller than a byte. Frameworks cannot index these elements.
PACKED = frozenset(name for name, bits in BITS.items() if bits < 8)


# The names in torch, and in numpy with ml_dtypes. F4 has only torch's name, because the F4 of ml_dtypes is not packed.
CALLED = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2", "I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32",
    "U32": "uint32", "F32": "float32", "C64": "complex64", "F64": "float64", "I64": "int64", "U64": "uint64",
}  # fmt: skip

# Other names that `dtype=` accepts, besides the safetensors names.
_NAMES = {
    "F16": "float16 half fp16 f16",
    "BF16": "bfloat16 bf16",
    "F32": "float32 float single fp32 f32",
    "F64": "float64 double fp64 f64",
    "F8_E4M3": "float8_e4m3fn fp8_e4m3 fp8_e4m3fn f8_e4m3",
    "F8_E5M2": "float8_e5m2 fp8_e5m2 f8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz fp8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz fp8_e5m2fnuz",
}
_NAMED = {text: name for name, texts in _NAMES.items() for text in texts.split()}


def named(dtype: Any) -> Any:
    """Returns the safetensors name of a floating-point dtype, given as a name ("bf16",
    "torch.float16", "BF16") or as a framework's type. Returns other values unchanged."""
    numpy = imported("numpy")
    if numpy is not None and isinstance(dtype, (numpy.dtype, type)):
        try:
            dtype = numpy.dtype(dtype).name
        except TypeError:
            return dtype
    elif type(dtype).__module__ == "torch":
        dtype = str(dtype)
    if not isinstance(dtype, str):
        return dtype
    bare = dtype.removeprefix("torch.").removeprefix("numpy.").removeprefix("np.")
    return bare if bare in BITS else _NAMED.get(bare, bare)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the number of bytes of a tensor. A packed tensor must fill its last byte."""
    return BITS[dtype] * math.prod(shape) // 8


def packed_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a packed tensor viewed as U8.

    The last dimension becomes the number of bytes of a row. If a row does not fill whole bytes, the result is
    one-dimensional.
    """
    if shape and (shape[-1] * BITS[dtype]) % 8 == 0:
        return (*shape[:-1], shape[-1] * BITS[dtype] // 8)
    return (nbytes(dtype, shape),)


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a file's tensor in torch, which is `packed_shape` if elements share bytes."""
    return packed_shape(dtype, shape) if dtype in PACKED else shape

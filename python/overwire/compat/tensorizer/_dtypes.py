"""Converts torch's dtypes to and from the texts in .tensors files."""

from __future__ import annotations

from typing import Any

_NUMPY = {"bool": "|b1", "uint8": "|u1", "int8": "|i1", "complex64": "<c8", "complex128": "<c16"}
_NUMPY |= {f"{word}{bits}": f"<{word[0]}{bits // 8}" for word in ("int", "uint", "float") for bits in (16, 32, 64)}

_WRITTEN = frozenset(_NUMPY.values())
_SHARED = frozenset(_NUMPY.values()) - {"<c16"}
_SHARED_OPAQUE = frozenset(
    "torch." + name
    for name in "bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu "
    "float4_e2m1fn_x2".split()
)


def foreign(text: str) -> bool:
    """Returns whether safetensors lacks the dtype with this text."""
    form, opaque, name = text.partition("\0")
    return name not in _SHARED_OPAQUE if opaque else form not in _SHARED


def written(dtype: Any) -> str:
    """Returns a torch dtype's text in a file. Raises NotImplementedError for quantised dtypes."""
    name = str(dtype).removeprefix("torch.")
    if name in _NUMPY:
        return _NUMPY[name]
    if name.startswith(("qint", "quint")):
        raise NotImplementedError(f"Serialization for {dtype} is not implemented.")
    size = int(dtype.itemsize)
    return f"{'|' if size == 1 else '<'}V{size}\0{dtype}"


def of_numpy(dtype: Any) -> str:
    """Returns a numpy dtype's text in a file. Raises TypeError for dtypes that readers lack, and ValueError for a
    foreign byte order."""
    form = str(dtype.str)
    if form in _WRITTEN:
        return form
    if not dtype.isnative and str(dtype.newbyteorder().str) in _WRITTEN:
        text = f"an array of {dtype} does not have this machine's byte order: use astype(dtype.newbyteorder())"
        raise ValueError(text)
    raise TypeError(f"Cannot serialize an array with dtype {dtype}")


def typed(tensor: Any, record: Any) -> Any:
    """Converts a tensor to the dtype of its record. A tensor with a dtype that safetensors lacks arrives as bytes, with
    an extra dimension."""
    import torch

    if tensor.dtype != torch.uint8 or tensor.dim() == len(record.shape):
        return tensor
    _, _, name = record.dtype.partition("\0")
    dtype = torch.complex128 if record.dtype == "<c16" else getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or tensor.shape[-1] != dtype.itemsize:
        raise ValueError(f"{record.name}: this torch does not have the dtype {record.dtype!r}")
    return tensor.view(dtype).reshape(record.shape)


def opaque(text: str) -> tuple[str, str | None]:
    """Returns the numpy dtype for a file's dtype, and None. If numpy lacks the dtype, returns an integer dtype of the
    same size, and torch's name for the dtype."""
    form, _, name = text.partition("\0")
    if not name:
        return form, None
    return {"1": "|i1", "2": "<i2", "4": "<i4", "8": "<i8"}[form[2:]], name

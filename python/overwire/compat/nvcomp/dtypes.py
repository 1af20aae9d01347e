"""Converts between element types: DLPack's triples, type strings, and names.

A kind is a DLPack triple (code, bits, lanes).
"""

from __future__ import annotations

import re
from typing import Any

Kind = tuple[int, int, int]

#: The default type of results: |i1, as in nvCOMP.
BYTE: Kind = (0, 8, 1)

_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_LETTERS = {code: letter for letter, code in _CODES.items()}

# Types for which numpy has no type string.
_NAMED: dict[str, Kind] = {
    "bfloat16": (4, 16, 1), "float8_e4m3fn": (10, 8, 1), "float8_e4m3fnuz": (11, 8, 1), "float8_e5m2": (12, 8, 1),
    "float8_e5m2fnuz": (13, 8, 1), "float8_e8m0fnu": (14, 8, 1),
}  # fmt: skip
_NAMES = {kind: name for name, kind in _NAMED.items()}

_PLAIN = {"bool": "|b1", "complex64": "<c8", "complex128": "<c16"}
_PLAIN |= {f"{word}{bits}": f"<{word[0]}{bits // 8}" for word in ("int", "uint", "float") for bits in (8, 16, 32, 64)}

_SAFETENSORS: dict[Kind, str] = {
    (4, 16, 1): "BF16", (2, 16, 1): "F16", (2, 32, 1): "F32", (10, 8, 1): "F8_E4M3", (12, 8, 1): "F8_E5M2"
}


def kind_of(data_type: Any) -> Kind:
    """Returns the kind of a type string, a name, or a numpy or torch dtype.

    Raises ValueError "Unknown output data type" for other values.
    """
    text = data_type if isinstance(data_type, str) else ""
    if not text and type(data_type).__module__ == "torch":
        text = str(data_type).removeprefix("torch.")
    elif not text and hasattr(data_type, "kind") and hasattr(data_type, "str"):
        text = data_type.name if data_type.kind == "V" or data_type.name in _NAMED else data_type.str
    elif not text and isinstance(data_type, type):
        text = data_type.__name__
    if text in _NAMED:
        return _NAMED[text]
    if text == "|f1":  # nvCOMP's FP8
        return _NAMED["float8_e4m3fn"]
    text = _PLAIN.get(text, text)
    match = re.fullmatch(r"([<|])([iufcb])(1|2|4|8|16)", text)
    size = int(match[3]) if match else 0
    sizes = {"i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16), "b": (1,)}
    if match is None or size not in sizes[match[2]] or (match[1] == "|" and size != 1):
        raise ValueError(f"Unknown output data type: {data_type!r}")
    return _CODES[match[2]], 8 * size, 1


def elements(nbytes: int, kind: Kind) -> int:
    """Returns the number of elements in `nbytes` bytes. Raises ValueError if the number is not whole."""
    size = kind[1] * kind[2] // 8
    if nbytes % size:
        raise ValueError(f"{nbytes} bytes are not a whole number of elements of {kind[1]} bits")
    return nbytes // size


def typestr(kind: Kind) -> str:
    """Returns the type string of the array protocol. Types that the protocol cannot express become opaque ("<V2")."""
    code, bits, lanes = kind
    size = bits * lanes // 8
    mark = "|" if size == 1 else "<"
    letter = _LETTERS.get(code, "V") if lanes == 1 else "V"
    return f"{mark}{letter}{size}"


def numpy_dtype(kind: Kind) -> Any:
    """Returns the numpy dtype of a kind. Raises ImportError if the dtype comes from ml_dtypes and that is not
    installed."""
    import numpy

    if (name := _NAMES.get(kind)) is None:
        return numpy.dtype(typestr(kind))
    import ml_dtypes

    return numpy.dtype(getattr(ml_dtypes, name))


def safetensors_name(kind: Kind) -> str | None:
    """Returns the safetensors dtype of a kind for X16, or None if X16 must detect the dtype."""
    return _SAFETENSORS.get(kind)


def integers_name(kind: Kind) -> str:
    """Returns the dtype that the Cascaded codec uses for a kind: integers of the same size, or U8 if there are none."""
    code, bits, lanes = kind
    return f"{'I' if code == 0 else 'U'}{bits}" if bits in (8, 16, 32, 64) and lanes == 1 else "U8"

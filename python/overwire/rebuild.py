"""Rebuilds numpy objects that cannot be stored as tensors: dtypes, scalars, and arrays of
Python objects. The pickles of bundles call these functions.

numpy's own pickle functions are not used because they trust their input: a forged dtype state can make numpy read bytes
as pointers. These functions check their input, so they are on the allow-list of `load_compressed_pickle`. `budget`
limits the work for an untrusted pickle; it is None for a trusted pickle.

Files contain the names and arguments of these functions, so these must never change.
"""

from __future__ import annotations

import math
import re
from typing import Any

from .bundles.budget import Budget
from .errors import ArgumentError, FormatError

#: A dtype as data: numpy's text ("<f4", "O", "<M8[ns]"), an ml_dtypes name, or a list of fields (name, spec, shape).
Spec = str | list[Any]

# Specs of numpy's own dtypes, with elements that are plain bytes or Python objects (O), and names of ml_dtypes.
_OWN = re.compile(r"[<>=|](?:[?bBiufcmMSUV]\d{0,10}(?:\[[\w/]{1,40}\])?|O)|O", re.ASCII)
_ADDED = re.compile(r"(?:b?float|u?int)\d+(?:_\w+)?", re.ASCII)

# The most nesting levels of structures, the most dimensions of a field or an array, and the limit of a dimension.
_DEEPEST = 32
_DIMS = 64
_LARGEST = 1 << 62


def spec_of(dtype: Any) -> Spec | None:
    """Returns the spec of a numpy dtype. Returns None for a dtype that a spec cannot express: with aligned or
    overlapping fields, with metadata, or with a scalar type such as np.record."""
    if dtype.names is not None:
        fields = []
        for name in dtype.names:
            field = dtype.fields[name][0]
            if (spec := spec_of(field.base)) is None:
                return None
            fields.append((name, spec, field.shape))
        result: Spec = fields
    elif dtype.subdtype is not None:
        return None
    elif dtype.isbuiltin == 2:  # a dtype that another package has registered (ml_dtypes)
        result = dtype.name
    else:
        result = dtype.str
    try:
        again = np_dtype(result)
        return result if again == dtype and again.type is dtype.type and not dtype.metadata else None
    except (FormatError, TypeError, ValueError):
        return None


def np_dtype(spec: Spec, *, budget: Budget | None = None, depth: int = 0) -> Any:
    """Returns the numpy dtype of a spec."""
    import numpy as np

    if budget is not None:
        budget.charge_work(10)
    if type(spec) is list:
        if depth > _DEEPEST:
            raise FormatError(f"overwire: unpickle: a dtype is nested deeper than {_DEEPEST}")
        fields = []
        for field in spec:
            if type(field) is not tuple or len(field) != 3 or type(field[0]) is not str or not _is_shape(field[2]):
                raise FormatError("overwire: unpickle: a dtype's field is malformed")
            name, of, shape = field
            fields.append((name, np_dtype(of, budget=budget, depth=depth + 1), shape))
        return np.dtype(fields)
    if type(spec) is not str:
        raise FormatError("overwire: unpickle: a dtype is malformed")
    if _OWN.fullmatch(spec):
        return np.dtype(spec)
    if _ADDED.fullmatch(spec):
        from .frameworks.choose import frame_for

        try:
            return frame_for("np").dtype(spec)
        except ArgumentError:
            pass  # the installed ml_dtypes does not have this dtype
    raise FormatError(f"overwire: unpickle: no such dtype: {spec[:100]!r}")


def _is_shape(shape: Any) -> bool:
    return type(shape) is tuple and len(shape) <= _DIMS and all(type(d) is int and 0 <= d < _LARGEST for d in shape)


def dtype(spec: Spec, *, budget: Budget | None = None) -> Any:
    """Makes a dtype."""
    return np_dtype(spec, budget=budget)


def scalar(spec: Spec, data: bytes, *, budget: Budget | None = None) -> Any:
    """Makes a numpy scalar from its bytes."""
    import numpy as np

    kind = np_dtype(spec, budget=budget)
    if kind.hasobject or type(data) is not bytes or len(data) != kind.itemsize:
        raise FormatError("overwire: unpickle: a scalar is malformed")
    if budget is not None:
        budget.charge_memory(len(data))
    return np.frombuffer(data, kind)[0] if data else np.zeros((), kind)[()]


def array(spec: Spec, shape: tuple[int, ...], fortran: bool, items: list[Any], *, budget: Budget | None = None) -> Any:
    """Makes an array of Python objects. items has one object per element, in C order."""
    import numpy as np

    kind = np_dtype(spec, budget=budget)
    if not kind.hasobject or not _is_shape(shape) or type(items) is not list or type(fortran) is not bool:
        raise FormatError("overwire: unpickle: an array is malformed")
    if (count := math.prod(shape)) != len(items):
        raise FormatError("overwire: unpickle: an array is malformed")
    if budget is not None:
        # numpy allocates one element even for an empty array.
        budget.charge_memory((1 + fortran) * max(count, 1) * kind.itemsize)
    flat = np.empty(count, kind)
    for at, item in enumerate(items):
        flat[at] = item
    result = flat.reshape(shape).copy(order="F") if fortran else flat.reshape(shape)
    if budget is not None:
        budget.nest(result, items)
    return result

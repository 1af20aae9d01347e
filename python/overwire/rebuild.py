"""What our pickles call to make numpy objects that torch and the container do
not carry: dtypes, scalars, and arrays of Python objects.

numpy's own pickle functions are not used, because they trust their input: a
forged dtype state can make numpy take bytes for pointers. These check theirs,
and are therefore on the allow-list of `load_compressed_pickle`.

Their names and arguments stand in files: they never change.
"""

from __future__ import annotations

from typing import Any

from .errors import FormatError

__all__ = ["array", "dtype", "scalar", "spec_of"]

#: A dtype as data: numpy's text ("<f4", "O", "<M8[ns]"), an ml_dtypes name, or
#: a list of fields (name, spec, shape).
Spec = str | list[Any]


def spec_of(dtype: Any) -> Spec | None:
    """The spec of a numpy dtype; None if it has none (aligned or overlapping
    fields, metadata)."""
    if dtype.names is not None:
        fields = []
        for name in dtype.names:
            field = dtype.fields[name][0]
            spec = spec_of(field.base)
            if spec is None:
                return None
            fields.append((name, spec, field.shape))
        made: Spec = fields
    elif dtype.subdtype is not None:
        return None
    elif dtype.isbuiltin == 2:  # registered by another package: ml_dtypes
        made = dtype.name
    else:
        made = dtype.str
    try:
        return made if np_dtype(made) == dtype and not dtype.metadata else None
    except (FormatError, TypeError, ValueError):
        return None


def np_dtype(spec: Spec) -> Any:
    """The numpy dtype of a spec."""
    import numpy as np

    if isinstance(spec, list):
        fields = []
        for field in spec:
            if not (isinstance(field, tuple) and len(field) == 3):
                raise FormatError("overwire: unpickle: a dtype's field is malformed")
            name, of, shape = field
            if not isinstance(name, str) or not _is_ints(shape):
                raise FormatError("overwire: unpickle: a dtype's field is malformed")
            fields.append((name, np_dtype(of), shape))
        return np.dtype(fields)
    if not isinstance(spec, str):
        raise FormatError("overwire: unpickle: a dtype is malformed")
    if spec[:1] in "<>=|" or spec == "O":
        return np.dtype(spec)
    if spec.replace("_", "").isalnum() and ("float" in spec or "int" in spec):
        from .frames import frame_for

        return frame_for("np").dtype(spec)
    raise FormatError(f"overwire: unpickle: no such dtype: {spec!r}")


def _is_ints(shape: Any) -> bool:
    return isinstance(shape, tuple) and all(type(d) is int and d >= 0 for d in shape)


def dtype(spec: Spec) -> Any:
    """Makes a dtype."""
    return np_dtype(spec)


def scalar(spec: Spec, data: bytes) -> Any:
    """Makes a numpy scalar of its bytes."""
    import numpy as np

    kind = np_dtype(spec)
    if kind.hasobject or type(data) is not bytes or len(data) != kind.itemsize:
        raise FormatError("overwire: unpickle: a scalar is malformed")
    if not data:
        return np.zeros((), kind)[()]
    return np.frombuffer(data, kind)[0]


def array(spec: Spec, shape: tuple[int, ...], fortran: bool, items: list[Any]) -> Any:
    """Makes an array of Python objects, one item an element in C order."""
    import numpy as np

    kind = np_dtype(spec)
    if not _is_ints(shape) or type(items) is not list:
        raise FormatError("overwire: unpickle: an array is malformed")
    count = 1
    for d in shape:
        count *= d
    if count != len(items):
        raise FormatError("overwire: unpickle: an array is malformed")
    flat = np.empty(count, kind)
    for at, item in enumerate(items):
        flat[at] = item
    return flat.reshape(shape).copy(order="F") if fortran else flat.reshape(shape)

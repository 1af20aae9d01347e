"""What a pickle may name, and do with it, without `trust=True`.

The rule: a pickle may build data and torch's own modules, nothing else. Beside
the list of globals itself, two things make that hold:

- Functions that rebuild tensors are handed out as guards, which check their
  arguments: extents inside the storage, plain hooks, known types. numpy's own
  pickle functions are not on the list (see `rebuild`).
- Of what it names, a pickle may call only guards and plain types, and set the
  state only of modules and ordered dicts. A forged state of anything else
  (a function's defaults, a numpy dtype's flags) would be a way out.

Nothing is imported because a pickle names it, but torch and numpy themselves.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from . import rebuild
from .errors import FormatError, UntrustedPickleError

__all__ = ["AllowList", "check_extent", "tensor_v3"]

# Immutable types (their attributes cannot be set), which call nothing.
_TYPES: dict[tuple[str, str], Any] = {
    ("builtins", name): getattr(__import__("builtins"), name)
    for name in (
        "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int",
        "list", "object", "range", "set", "slice", "str", "tuple",
    )
}  # fmt: skip
_TYPES |= {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("datetime", "date"): datetime.date,
    ("datetime", "datetime"): datetime.datetime,
    ("datetime", "time"): datetime.time,
    ("datetime", "timedelta"): datetime.timedelta,
    ("datetime", "timezone"): datetime.timezone,
    ("decimal", "Decimal"): decimal.Decimal,
}
_CALLED = frozenset(_TYPES.values()) - {object}
# Values that a pickle may hold, but not call.
_NUMPY_TYPES = frozenset(
    {
        "bool",
        "bool_",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "float32",
        "float64",
        "complex64",
        "complex128",
    }
)
_ACTIVATIONS = frozenset(
    {
        "relu",
        "relu6",
        "gelu",
        "silu",
        "mish",
        "elu",
        "selu",
        "celu",
        "leaky_relu",
        "prelu",
        "rrelu",
        "glu",
        "tanh",
        "sigmoid",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "softplus",
        "softsign",
        "softmax",
        "log_softmax",
        "logsigmoid",
        "normalize",
    }
)


class _Guard:
    """A function that a pickle may call."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


class AllowList:
    """The rules for one unpickling; `source` is for messages."""

    def __init__(self, source: str) -> None:
        self._source = source

    def refuse(self, what: str) -> UntrustedPickleError:
        """The error for a pickle that does what it may not."""
        return UntrustedPickleError(
            f"overwire: unpickle {self._source}: {what}, which is not on the allow-list. If you trust "
            "where the file comes from, load it with trust=True",
            source=self._source,
        )

    def check_call(self, function: Any) -> None:
        """Whether a pickle may call this."""
        if type(function) is not _Guard and not (isinstance(function, type) and function in _CALLED):
            raise self.refuse(f"it calls {_named(function)}")

    def check_new(self, kind: Any) -> None:
        """Whether a pickle may make an empty object of this class."""
        import torch

        if not (isinstance(kind, type) and (kind is object or issubclass(kind, torch.nn.Module))):
            raise self.refuse(f"it makes an empty {_named(kind)}")

    def check_state(self, made: Any) -> None:
        """Whether a pickle may set the state of this object."""
        if type(made) is collections.OrderedDict:
            return
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(made, torch.nn.Module):
            raise self.refuse(f"it sets the state of {_named(made)}")

    def find(self, module: str, name: str) -> Any:
        """What a pickle gets for a global; UntrustedPickleError if nothing."""
        found = _TYPES.get((module, name))
        if found is None:
            if module == "overwire.rebuild" and name in rebuild.__all__:
                if name != "spec_of":
                    found = _Guard(getattr(rebuild, name))
            elif module == "numpy" and name in _NUMPY_TYPES:
                import numpy

                found = getattr(numpy, name, None)
            elif module.split(".")[0] == "torch":
                found = self._torch(module, name)
        if found is None:
            raise self.refuse(f"it names {module}.{name}")
        return found

    def _torch(self, module: str, name: str) -> Any:
        import torch

        if module == "torch":
            return self._torch_top(name)
        if module == "torch._utils" and name in _REBUILDERS:
            return _Guard(_REBUILDERS[name])
        if module == "torch._utils" and name.startswith("torch."):
            # How memory formats pickle: by a path through whatever module.
            found = getattr(torch, name[6:], None)
            return found if isinstance(found, torch.memory_format) else None
        if module == "torch.serialization" and name == "_get_layout":
            return _Guard(_layout)
        if module == "torch._tensor" and name == "_rebuild_from_type_v2":
            return _Guard(_from_type)
        if module == "torch.nn.parameter" and name in ("Parameter", "Buffer"):
            return getattr(torch.nn.parameter, name, None)
        if module == "torch.nn.functional" and name in _ACTIVATIONS:
            return getattr(torch.nn.functional, name, None)
        if module == "torch._C._nn" and name == "gelu":
            return torch._C._nn.gelu
        if module.startswith("torch.nn.modules."):
            found = getattr(sys.modules.get(module), name, None)
            if isinstance(found, type) and issubclass(found, torch.nn.Module) and found.__module__ == module:
                return found
        return None

    def _torch_top(self, name: str) -> Any:
        import torch

        if name in ("Size", "device"):
            return _Guard(getattr(torch, name))
        if name == "Tensor":
            return torch.Tensor
        if name in _ACTIVATIONS:
            found = getattr(torch, name, None)
            return found if not isinstance(found, FunctionType) else None
        found = getattr(torch, name, None)
        kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
        return found if isinstance(found, kinds) else None


def _named(thing: Any) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


# -- rebuilding tensors, with checked arguments


def _malformed(what: str) -> FormatError:
    return FormatError(f"overwire: unpickle: {what} is malformed")


def check_extent(nbytes: int, item: int, offset: Any, size: Any, stride: Any) -> None:
    """FormatError unless the view lies inside a storage of `nbytes`."""
    if type(offset) is not int or offset < 0 or len(size) != len(stride) or len(size) > 64:
        raise _malformed("a tensor")
    last = offset
    for d, s in zip(size, stride, strict=True):
        if type(d) is not int or type(s) is not int or d < 0 or s < 0:
            raise _malformed("a tensor")
        last += (d - 1) * s
    if 0 not in size and (last + 1) * item > nbytes:
        raise _malformed("a tensor that reaches beyond its storage")


def _plain_metadata(metadata: Any) -> Any:
    if metadata is None or (
        type(metadata) is dict and set(metadata) <= {"conj", "neg"} and all(type(v) is bool for v in metadata.values())
    ):
        return metadata
    raise _malformed("a tensor's metadata")


def _tensor_v2(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any = None,
               metadata: Any = None) -> Any:  # fmt: skip
    import torch

    if type(storage) is not torch.storage.TypedStorage:
        raise _malformed("a tensor's storage")
    raw = storage._untyped_storage
    check_extent(raw.nbytes(), storage.dtype.itemsize, offset, size, stride)
    make: Any = torch._utils._rebuild_tensor_v2
    return make(
        storage, offset, tuple(size), tuple(stride), bool(grad),
        collections.OrderedDict(), _plain_metadata(metadata),
    )  # fmt: skip


def tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any,
               dtype: Any, metadata: Any = None) -> Any:  # fmt: skip
    import torch

    if type(storage) is not torch.UntypedStorage or type(dtype) is not torch.dtype:
        raise _malformed("a tensor's storage")
    check_extent(storage.nbytes(), dtype.itemsize, offset, size, stride)
    # torch's function wants a typed storage, of whatever type.
    typed: Any = torch.storage.TypedStorage
    make: Any = torch._utils._rebuild_tensor_v3
    return make(
        typed(wrap_storage=storage, dtype=torch.uint8, _internal=True), offset, tuple(size), tuple(stride), bool(grad),
        collections.OrderedDict(), dtype, _plain_metadata(metadata),
    )  # fmt: skip


def _layout(name: Any) -> Any:
    import torch

    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise _malformed("a layout")
    return found


def _qtensor(storage: Any, offset: Any, size: Any, stride: Any, params: Any, grad: Any,
             hooks: Any) -> Any:  # fmt: skip
    import torch

    if type(storage) is not torch.storage.TypedStorage or type(params) is not tuple:
        raise _malformed("a quantised tensor")
    item = storage.dtype.itemsize
    check_extent(storage._untyped_storage.nbytes(), item, offset, size, stride)
    make: Any = torch._utils._rebuild_qtensor
    return make(storage, offset, tuple(size), tuple(stride), params, bool(grad), collections.OrderedDict())


def _sparse(layout: Any, data: Any) -> Any:
    import torch

    # Indices are checked, so that no later use reads outside the tensor.
    if type(data) is not tuple:
        raise _malformed("a sparse tensor")
    if layout is torch.sparse_coo and len(data) in (3, 4):
        coalesced = data[3] if len(data) == 4 else None
        return torch.sparse_coo_tensor(*data[:3], check_invariants=True, is_coalesced=coalesced)
    kinds = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    if layout in kinds and len(data) == 4:
        return torch.sparse_compressed_tensor(*data, layout=layout, check_invariants=True)
    raise _malformed("a sparse tensor")


def _meta(dtype: Any, size: Any, stride: Any, grad: Any) -> Any:
    import torch

    return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=bool(grad))


def _parameter(data: Any, grad: Any, hooks: Any = None, state: Any = None) -> Any:
    import torch

    if not isinstance(data, torch.Tensor):
        raise _malformed("a parameter")
    made = torch.nn.Parameter(data, bool(grad))
    if type(state) is dict:
        made.__dict__.update(state)
    elif state is not None:
        raise _malformed("a parameter's state")
    return made


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    import torch

    allowed = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", None))
    if type(function) is not _Guard or kind not in allowed or type(args) is not tuple:
        raise _malformed("a tensor of a subclass")
    made = function(*args)
    if not isinstance(made, torch.Tensor):
        raise _malformed("a tensor of a subclass")
    if type(made) is not kind:
        made = made.as_subclass(kind)
    if type(state) is tuple and len(state) == 2 and not state[1]:
        state = state[0]
    if type(state) is dict:
        made.__dict__.update(state)
    elif state is not None:
        raise _malformed("a tensor's state")
    return made


_REBUILDERS: dict[str, Callable[..., Any]] = {
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": tensor_v3,
    "_rebuild_qtensor": _qtensor,
    "_rebuild_sparse_tensor": _sparse,
    "_rebuild_meta_tensor_no_storage": _meta,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
}

"""Defines which globals a pickle may name without `trust=True`, and what it may do with them.

A pickle may build only data and torch's own modules. In addition to the list of globals, these checks enforce that:

- A pickle may call only functions that have a guard in this module. The guard checks exact types, bounds numbers, and
  charges sizes to the budget. It allows only calls that ordinary pickles make, and none for which an opcode exists.
- Guards replace the torch functions that rebuild tensors (see `tensors`). numpy's own pickle functions are not on the
  list (see `rebuild`).
- A pickle may set the state only of modules and ordered dicts. It may set only their own attributes, none with a
  special name, and none that hides a method.

Of the modules that a pickle names, only torch and numpy are imported.
"""

from __future__ import annotations

import builtins
import collections
import datetime
import decimal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from .. import rebuild
from .._imports import imported
from ..errors import FormatError, UntrustedPickleError
from .budget import ATTRIBUTE, LONGEST, Budget, attributes
from .tensors import REBUILDERS, subclassed

# Types that have no settable attributes and run no other code.
_BUILTINS = "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple"
_TYPES: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        *(vars(builtins)[name] for name in _BUILTINS.split()),
        *(collections.OrderedDict, collections.defaultdict, collections.deque, decimal.Decimal),
        *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    )
}
# Values that a pickle may contain but not call.
_NUMPY_TYPES = frozenset(
    "bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128".split()
)
_ACTIVATIONS = frozenset(
    "relu relu6 gelu silu mish elu selu celu leaky_relu prelu rrelu glu tanh sigmoid hardtanh hardswish hardsigmoid "
    "softplus softsign softmax log_softmax logsigmoid normalize".split()
)

# The attributes of a module that contain its parts.
_PARTS = ("_parameters", "_buffers", "_modules")
# How many bytes are charged for a module in addition to its own attributes.
_MODULE = 4096


@dataclass(frozen=True, eq=False, slots=True)
class Guard:
    """Replaces a function that a pickle may call. call: checks the arguments and charges the budget. tensor: whether
    the function creates a tensor."""

    call: Callable[..., Any]
    tensor: bool = False


class AllowList:
    """The rules for one unpickling, which is charged to `budget`."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget

    def wrong(self, verb: str, thing: Any) -> UntrustedPickleError:
        """Returns the error for a pickle that uses an allowed object or type in a forbidden way."""
        kind = thing if isinstance(thing, type) else type(thing)
        return self._refuse_name(f"it {verb} {kind.__module__}.{kind.__qualname__}")

    def unlisted(self, module: str, name: str) -> UntrustedPickleError:
        """Returns the error for a global that a pickle may not name."""
        whole = f"{module}.{name}"[:LONGEST]
        return self._refuse_name(f"it names {whole if whole.isprintable() else ascii(whole)}")

    def _refuse_name(self, what: str) -> UntrustedPickleError:
        return self.budget.refuse(f"{what}, which is not on the allow-list")

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        """Calls a function for the pickle and returns its result. Raises UntrustedPickleError if it is not allowed."""
        if type(function) is Guard:
            return function.call(self.budget, *args)
        if isinstance(function, type):
            torch = imported("torch")
            of_torch = {torch.Size: _make_size, torch.device: _make_device} if torch is not None else {}
            make: Any = CALLS.get(function) or of_torch.get(function)
            if make is not None:
                return make(self.budget, *args)
        raise self.wrong("calls", function)

    def new(self, kind: Any, args: tuple[Any, ...]) -> Any:
        """Creates an empty object of a class."""
        torch = imported("torch")
        is_module = torch is not None and isinstance(kind, type) and issubclass(kind, torch.nn.Module)
        if kind is not object and not is_module:
            raise self.wrong("creates an empty object of", kind)
        if args:
            raise FormatError("an empty object has arguments, which are not allowed")
        if kind is not object:
            self.budget.charge_memory(_MODULE)
        return kind.__new__(kind)

    def set_state(self, made: Any, state: Any) -> None:
        """Sets the attributes of an object."""
        if type(made) is collections.OrderedDict:
            made.__dict__.update(attributes(self.budget, made, state))
            return
        torch = imported("torch")
        if torch is None or not isinstance(made, torch.nn.Module):
            raise self.wrong("sets the state of", made)
        own = attributes(self.budget, made, state)
        for name, kind in zip(_PARTS, (torch.Tensor, torch.Tensor, torch.nn.Module), strict=True):
            if name in own:
                own[name] = _copy_parts(self.budget, own[name], kind)
        if isinstance(made, torch.nn.RNNBase):
            _check_rnn(self.budget, type(made), own)
        type(made).__setstate__(made, own)

    def find(self, module: str, name: str) -> Any:
        """Returns the object or guard for a global. Raises UntrustedPickleError if the pickle may not name it."""
        allowed_object = _TYPES.get((module, name)) or _GUARDS.get((module, name))
        if allowed_object is None:
            if module == "numpy" and name in _NUMPY_TYPES:
                import numpy

                allowed_object = vars(numpy).get(name)
            elif module == "torch" or module.startswith("torch."):
                allowed_object = _find_in_torch(module, name)
        if allowed_object is None:
            raise self.unlisted(module, name)
        return allowed_object


def _find_in_torch(module: str, name: str) -> Any:
    import torch

    if module == "torch":
        return _find_top_of_torch(torch, name)
    if module == "torch._utils" and name.startswith("torch."):
        # A memory format is pickled as a dotted name in this module.
        member = vars(torch).get(name[6:])
        return member if isinstance(member, torch.memory_format) else None
    if module == "torch.nn.parameter" and name in ("Parameter", "Buffer"):
        return vars(torch.nn.parameter).get(name)
    if module == "torch.nn.functional" and name in _ACTIVATIONS:
        return vars(torch.nn.functional).get(name)
    if module == "torch._C._nn" and name == "gelu":
        return torch._C._nn.gelu
    if module.startswith("torch.nn.modules."):
        member = getattr(sys.modules.get(module), "__dict__", {}).get(name)
        if isinstance(member, type) and issubclass(member, torch.nn.Module) and member.__module__ == module:
            return member
    return None


def _find_top_of_torch(torch: Any, name: str) -> Any:
    # Looks only into the dict, because torch imports modules on demand for other names.
    member = vars(torch).get(name)
    if name in ("Size", "Tensor", "device"):
        return member
    if name in _ACTIVATIONS:
        return member if not isinstance(member, FunctionType) else None
    kinds = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
    return member if isinstance(member, kinds) else None


# -- states


def _copy_parts(budget: Budget, parts: Any, kind: Any) -> Any:
    """Returns a copy of the parts of a module. Nothing else in the pickle can refer to the copy."""
    if type(parts) is not dict and type(parts) is not collections.OrderedDict:
        raise FormatError("a module's parts are malformed")
    budget.charge_memory(ATTRIBUTE * len(parts))
    for name, part in parts.items():
        if type(name) is not str or not (part is None or isinstance(part, kind)):
            raise FormatError("a module's part is malformed")
        if name.startswith("__"):
            raise budget.refuse(f"it sets {name[:LONGEST]!a} of a module, which is not on the allow-list")
    return type(parts)(parts)


def _check_rnn(budget: Budget, kind: type, own: dict[str, Any]) -> None:
    """Checks the names of an RNN's weights, because torch reads the attributes with these names. The attributes must
    not be methods. torch takes the names from the older key, `all_weights`, or creates them from `num_layers` if the
    values of that key are not names."""
    layers = own.get("num_layers", 0)
    rows = own.get("_all_weights", own.get("all_weights"))
    has_both = "_all_weights" in own and "all_weights" in own
    if has_both or type(rows) is not list or type(layers) is not int or layers > len(rows):
        raise FormatError("the weights of an RNN are malformed")
    for row in [own.get("_flat_weights_names"), *rows]:
        if type(row) is not list:
            raise FormatError("the weights of an RNN are malformed")
        budget.charge_work(1 + len(row))
        for name in row:
            if type(name) is not str or hasattr(kind, name):
                raise FormatError("the weights of an RNN are malformed")


# -- calls, with checked arguments


def _is_int(number: Any, bits: int = 63) -> bool:
    return type(number) is int and number.bit_length() <= bits


def _wrong_args(what: str) -> FormatError:
    return FormatError(f"the arguments of {what} are malformed")


def _make_complex(budget: Budget, real: Any = 0.0, imag: Any = 0.0) -> complex:
    if type(real) is not float or type(imag) is not float:
        raise _wrong_args("complex")
    return complex(real, imag)


def _make_range(budget: Budget, *args: Any) -> range:
    if not all(_is_int(n, 1 << 10) for n in args):
        raise _wrong_args("range")
    return range(*args)


def _make_slice(budget: Budget, *args: Any) -> slice:
    part = slice(*args)
    budget.nest(part, args)
    return part


def _make_default_dict(budget: Budget, factory: Any = None) -> collections.defaultdict[Any, Any]:
    if factory is not None and not isinstance(factory, type):
        text = "it creates a defaultdict with a factory that is not a class"
        raise budget.refuse(f"{text}, which is not on the allow-list")
    return collections.defaultdict(factory)


def _make_deque(budget: Budget, items: Any = (), most: Any = None) -> collections.deque[Any]:
    if type(items) not in (tuple, list) or items or not (most is None or _is_int(most) and most >= 0):
        raise _wrong_args("deque")
    return collections.deque((), most)


def _guard_datetime(kind: Any, size: int, zoned: bool) -> Callable[..., Any]:
    """Returns a guard for a datetime type that is pickled as `size` bytes. zoned: whether a time zone may follow."""

    def make_moment(budget: Budget, data: Any, *zone: Any) -> Any:
        is_zone = len(zone) <= zoned and all(type(part) is datetime.timezone for part in zone)
        if type(data) is not bytes or len(data) != size or not is_zone:
            raise _wrong_args(kind.__name__)
        return kind(data, *zone)

    return make_moment


def _make_timedelta(budget: Budget, *args: Any) -> datetime.timedelta:
    if len(args) > 3 or not all(_is_int(n) for n in args):
        raise _wrong_args("timedelta")
    return datetime.timedelta(*args)


def _make_timezone(budget: Budget, offset: Any, *name: Any) -> datetime.timezone:
    if type(offset) is not datetime.timedelta or len(name) > 1 or not all(type(n) is str for n in name):
        raise _wrong_args("timezone")
    return datetime.timezone(offset, *name)


def _make_decimal(budget: Budget, text: Any) -> decimal.Decimal:
    if type(text) is not str:
        raise _wrong_args("Decimal")
    budget.charge_memory(len(text))
    return decimal.Decimal(text)


#: The guard that creates an object, for each class that a pickle may call.
CALLS: dict[type, Callable[..., Any]] = {
    complex: _make_complex,
    range: _make_range,
    slice: _make_slice,
    collections.OrderedDict: lambda budget: collections.OrderedDict(),
    collections.defaultdict: _make_default_dict,
    collections.deque: _make_deque,
    datetime.date: _guard_datetime(datetime.date, 4, False),
    datetime.datetime: _guard_datetime(datetime.datetime, 10, True),
    datetime.time: _guard_datetime(datetime.time, 6, True),
    datetime.timedelta: _make_timedelta,
    datetime.timezone: _make_timezone,
    decimal.Decimal: _make_decimal,
}


def _make_size(budget: Budget, dims: Any) -> Any:
    import torch

    if type(dims) is not tuple or not all(_is_int(d) for d in dims):
        raise _wrong_args("Size")
    budget.charge_memory(8 * len(dims))
    return torch.Size(dims)


def _make_device(budget: Budget, kind: Any, *index: Any) -> Any:
    import torch

    if type(kind) is not str or len(index) > 1 or not all(_is_int(n, 7) and n >= 0 for n in index):
        raise _wrong_args("device")
    return torch.device(kind, *index)


def _find_layout(budget: Budget, name: Any) -> Any:
    import torch

    layout = vars(torch).get(name.removeprefix("torch.")) if type(name) is str else None
    if not isinstance(layout, torch.layout):
        raise _wrong_args("a layout")
    return layout


def _from_type(budget: Budget, function: Any, kind: Any, args: Any, state: Any) -> Any:
    import torch

    if type(function) is not Guard or not function.tensor or type(args) is not tuple:
        raise _wrong_args("a tensor of a subclass")
    if not any(kind is base for base in (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", None))):
        raise _wrong_args("a tensor of a subclass")
    return subclassed(budget, function.call(budget, *args), kind, state)


def _guard_rebuild(function: Callable[..., Any]) -> Guard:
    return Guard(lambda budget, *args: function(*args, budget=budget))


_GUARDS: dict[tuple[str, str], Guard] = {
    ("torch.serialization", "_get_layout"): Guard(_find_layout),
    ("torch._tensor", "_rebuild_from_type_v2"): Guard(_from_type),
    **{("torch._utils", name): Guard(make, tensor=True) for name, make in REBUILDERS.items()},
    ("overwire.rebuild", "array"): _guard_rebuild(rebuild.array),
    ("overwire.rebuild", "dtype"): _guard_rebuild(rebuild.dtype),
    ("overwire.rebuild", "scalar"): _guard_rebuild(rebuild.scalar),
}

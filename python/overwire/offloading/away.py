"""Marks parameters as offloaded. They stay the same objects, but reading their values is an error.

While a block does not run, its parameters have no memory and another class. This class returns metadata (shape, dtype,
device) and raises an error that names the parameter for all other operations. Before a block runs, its parameters get
their memory and their own class back, so its code sees ordinary parameters.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ..errors import NotSupportedError

_RECORD = "_overwire_away"  # the key of the Record in the __dict__ of an offloaded parameter

# Attributes and methods that depend on the shape. They are read from the meta tensor, because the memory is empty.
_BY_SHAPE = frozenset(
    "shape size numel nelement dim ndim ndimension stride is_contiguous __len__ nbytes itemsize element_size".split()
)
# Attributes and methods that are correct although the memory is empty.
_PLAIN = frozenset(
    "dtype device layout requires_grad requires_grad_ grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_mkldnn is_nested is_complex is_floating_point is_conj is_neg is_inference is_signed names "
    "get_device __hash__ _backward_hooks".split()
)


class Record(NamedTuple):
    """Describes an offloaded parameter: its name, a meta tensor with its shape and strides, and the empty memory that
    it has while it is offloaded."""

    name: str
    twin: torch.Tensor
    empty: torch.Tensor


def record_of(parameter: torch.Tensor, name: str, device: torch.device) -> Record:
    """Returns the record of a parameter for a model that runs on `device`."""
    twin = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return Record(name, twin, torch.empty(0, dtype=parameter.dtype, device=device))


def send_away(parameter: torch.Tensor, record: Record) -> None:
    """Removes a parameter's memory until `bring` is called. Does nothing if the parameter is already offloaded."""
    # Ctrl-C may interrupt this and `bring` between any two steps. All steps can be repeated.
    if type(parameter) not in _KINDS:
        parameter.__dict__[_RECORD] = record
        parameter.data = record.empty
        parameter.__class__ = _away_class(type(parameter))


def bring(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    """Gives an offloaded parameter its own class and memory."""
    kind = _KINDS.get(type(parameter))
    if kind is not None:
        parameter.__class__ = kind
    parameter.data = memory
    parameter.__dict__.pop(_RECORD, None)


def is_away(parameter: torch.Tensor) -> bool:
    """Returns whether a parameter is offloaded or is being offloaded."""
    return _RECORD in parameter.__dict__


# The own class of a parameter, by its class while it is offloaded.
_KINDS: dict[type, type] = {}


@cache
def _away_class(kind: type) -> type:
    # Returns the class for offloaded parameters. It is a subclass of their own class, so that isinstance still works.
    answer: Any = classmethod(_answer_metadata)
    fields = {"__module__": kind.__module__, "__torch_function__": answer, "__repr__": _describe_away}
    away = type(kind)(kind.__name__, (kind,), fields)
    _KINDS[away] = kind
    return away


def _answer_metadata(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    # torch calls this for every operation on an offloaded parameter. For an attribute it passes the __get__ of the
    # attribute's descriptor.
    name = getattr(func, "__name__", "")
    name = func.__self__.__name__ if name == "__get__" or name == "__set__" else name
    records = [one.__dict__[_RECORD] for one in args if isinstance(one, torch.Tensor) and is_away(one)]
    with torch._C.DisableTorchFunctionSubclass():
        if records and name in _PLAIN:
            return func(*args, **(kwargs or {}))
        if len(records) == 1 and name in _BY_SHAPE:
            return func(records[0].twin, *args[1:], **(kwargs or {}))
    which = repr(records[0].name) if records else "a parameter"
    text = f"the weights of {which} are offloaded and are on the device only while their block runs"
    advice = "call Offloaded.close() to restore them"
    tensor = records[0].name if records else ""
    raise NotSupportedError(f"overwire: offload: {name}: {text}: {advice}", tensor=tensor)


def _describe_away(parameter: torch.Tensor) -> str:
    name, twin, _ = parameter.__dict__[_RECORD]
    return f"{type(parameter).__name__}({name!r}, offloaded, shape={tuple(twin.shape)}, dtype={twin.dtype})"

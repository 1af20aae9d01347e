"""Marks parameters as offloaded: they stay the same objects, but reading their values is an error.

While a block does not run, its parameters have no memory. They get another class, which answers questions
about metadata (shape, dtype, device) and raises an error that names the parameter for everything else.
They get their own class back together with their memory, so code that runs meanwhile sees ordinary parameters.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ..errors import NotSupportedError

_RECORD = "_overwire_away"  # in the parameter's __dict__ while it is offloaded: its Record

# Attributes and methods that depend on the shape. The empty memory would answer them wrongly.
_BY_SHAPE = frozenset(
    "shape size numel nelement dim ndim ndimension stride is_contiguous __len__ nbytes itemsize element_size".split()
)
# Attributes and methods that the empty memory answers correctly.
_PLAIN = frozenset(
    "dtype device layout requires_grad requires_grad_ grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_mkldnn is_nested is_complex is_floating_point is_conj is_neg is_inference is_signed names "
    "get_device __hash__ _backward_hooks".split()
)


class Record(NamedTuple):
    """Describes an offloaded parameter: its name, a twin on the meta device with its shape and strides,
    and the empty memory that it has meanwhile."""

    name: str
    twin: torch.Tensor
    empty: torch.Tensor


def record_of(parameter: torch.Tensor, name: str, device: torch.device) -> Record:
    """Returns a parameter's record, for a model that runs on `device`."""
    twin = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return Record(name, twin, torch.empty(0, dtype=parameter.dtype, device=device))


def send_away(parameter: torch.Tensor, record: Record) -> None:
    """Takes a parameter's memory until `bring`. Does nothing if the parameter is offloaded already."""
    # Ctrl-C may come between any two steps here and in `bring`. Each can be done again then.
    if type(parameter) not in _KINDS:
        parameter.__dict__[_RECORD] = record
        parameter.data = record.empty
        parameter.__class__ = _away_class(type(parameter))


def bring(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    """Gives an offloaded parameter its class and memory."""
    kind = _KINDS.get(type(parameter))
    if kind is not None:
        parameter.__class__ = kind
    parameter.data = memory
    parameter.__dict__.pop(_RECORD, None)


def is_away(parameter: torch.Tensor) -> bool:
    """Whether a parameter is offloaded, or is being offloaded."""
    return _RECORD in parameter.__dict__


# The parameter's own class, by the class that it has while it is offloaded.
_KINDS: dict[type, type] = {}


@cache
def _away_class(kind: type) -> type:
    # A subclass of the parameter's own class, so that isinstance gives the same answers.
    answer: Any = classmethod(_answer_metadata)
    fields = {"__module__": kind.__module__, "__torch_function__": answer, "__repr__": _describe_away}
    away = type(kind)(kind.__name__, (kind,), fields)
    _KINDS[away] = kind
    return away


def _answer_metadata(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    # torch calls this before it does anything with an offloaded parameter. For an attribute
    # it passes the __get__ of the descriptor, and the descriptor has the name.
    name = getattr(func, "__name__", "")
    name = func.__self__.__name__ if name == "__get__" or name == "__set__" else name
    records = [one.__dict__[_RECORD] for one in args if isinstance(one, torch.Tensor) and is_away(one)]
    with torch._C.DisableTorchFunctionSubclass():
        if records and name in _PLAIN:
            return func(*args, **(kwargs or {}))
        if len(records) == 1 and name in _BY_SHAPE:
            return func(records[0].twin, *args[1:], **(kwargs or {}))
    which = repr(records[0].name) if records else "a parameter"
    raise NotSupportedError(
        f"overwire: offload: {name}: the weights of {which} are offloaded, and are on the device only while "
        "their block runs: call Offloaded.close() to restore them",
        tensor=records[0].name if records else "",
    )


def _describe_away(parameter: torch.Tensor) -> str:
    name, twin, _ = parameter.__dict__[_RECORD]
    return f"{type(parameter).__name__}({name!r}, offloaded, shape={tuple(twin.shape)}, dtype={twin.dtype})"

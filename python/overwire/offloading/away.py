"""A parameter whose weights are away: it keeps its object, and reading it is an error.

While a block does not run, its parameters have no memory. Their class says so: metadata
(shape, dtype, device) is answered, all else raises and names the parameter. The class
goes and comes with the memory, so that what runs in between sees ordinary parameters.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ..errors import NotSupportedError

_RECORD = "_overwire_away"  # in the parameter's __dict__ while it is away: its Record

# Attributes and methods whose answers depend on the shape, which the empty memory lacks.
_BY_SHAPE = frozenset(
    "shape size numel nelement dim ndim ndimension stride is_contiguous __len__ nbytes itemsize element_size".split()
)
# Those that memory without elements answers truly.
_PLAIN = frozenset(
    "dtype device layout requires_grad requires_grad_ grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse "
    "is_quantized is_mkldnn is_nested is_complex is_floating_point is_conj is_neg is_inference is_signed names "
    "get_device __hash__ _backward_hooks".split()
)


class Record(NamedTuple):
    """What a parameter that is away answers: its name, its shape and strides on the meta
    device; and the memory without elements that it has meanwhile."""

    name: str
    twin: torch.Tensor
    empty: torch.Tensor


def record_of(parameter: torch.Tensor, name: str, device: torch.device) -> Record:
    """A parameter's record, for a model that runs on `device`."""
    twin = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
    return Record(name, twin, torch.empty(0, dtype=parameter.dtype, device=device))


def send_away(parameter: torch.Tensor, record: Record) -> None:
    """Takes a parameter's memory, until `bring`. Does nothing to one that is away."""
    # Ctrl-C may come between any two steps here and in `bring`: each is done again then.
    if type(parameter) not in _KINDS:
        parameter.__dict__[_RECORD] = record
        parameter.data = record.empty
        parameter.__class__ = _away_class(type(parameter))


def bring(parameter: torch.Tensor, memory: torch.Tensor) -> None:
    """Gives a parameter that is away its class and memory."""
    kind = _KINDS.get(type(parameter))
    if kind is not None:
        parameter.__class__ = kind
    parameter.data = memory
    parameter.__dict__.pop(_RECORD, None)


def is_away(parameter: torch.Tensor) -> bool:
    """Whether a parameter is away, or on its way."""
    return _RECORD in parameter.__dict__


# The class of a parameter that is not away, by the one that it has meanwhile.
_KINDS: dict[type, type] = {}


@cache
def _away_class(kind: type) -> type:
    # A subclass of the parameter's own class, so that isinstance says what it did.
    answer: Any = classmethod(_answer_metadata)
    fields = {"__module__": kind.__module__, "__torch_function__": answer, "__repr__": _describe_away}
    away = type(kind)(kind.__name__, (kind,), fields)
    _KINDS[away] = kind
    return away


def _answer_metadata(
    cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    # torch asks here before it does anything with a parameter that is away. Of an
    # attribute's getter it passes the descriptor's method, whose owner has the name.
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
        f"overwire: offload: {name}: the weights of {which} are away, compressed in host memory, and come while "
        "their block runs: Offloaded.close() puts them back",
        tensor=records[0].name if records else "",
    )


def _describe_away(parameter: torch.Tensor) -> str:
    name, twin, _ = parameter.__dict__[_RECORD]
    return f"{type(parameter).__name__}({name!r}, away, shape={tuple(twin.shape)}, dtype={twin.dtype})"

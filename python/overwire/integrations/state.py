"""Whether a model is as it was: its modules' attributes, and all that hangs on them."""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch

__all__ = ["State"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)

# Most of what is plain, to be passed over at once.
_USUAL = frozenset((type(None), bool, int, float, str))

# Those that are as empty as they say.
_BUILT_IN = frozenset((dict, OrderedDict, list, set, deque))

# What an object holds; None for one of which only the identity counts.
_Look = Callable[[Any], list[Any]] | None


class State:
    """Everything that hangs on a model now, but the tensors' data: attributes of its modules,
    parameters and of objects of the same packages, and what containers hold."""

    def __init__(self, model: torch.nn.Module) -> None:
        roots = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch", "transformers", "builtins"}
        self._roots = roots | {"vllm", "sglang"}
        # Each object with its look and what it held. They keep all objects, so that none
        # gets another one's number.
        self._rows: list[tuple[Any, Callable[[Any], list[Any]], list[Any]]] = []
        self._empty: list[Any] = []  # containers, half of all objects
        looks: dict[type, _Look] = {}
        seen: set[int] = set()
        left: list[Any] = [model]
        while left:
            value = left.pop()
            kind = type(value)
            if kind not in looks:
                looks[kind] = self._look_of(kind)
            look = looks[kind]
            if look is None or id(value) in seen:
                continue
            seen.add(id(value))
            if kind in _BUILT_IN and not value:
                self._empty.append(value)
                continue
            held = look(value)
            self._rows.append((value, look, held))
            left += [one for one in held if type(one) not in _USUAL]

    def unchanged(self) -> bool:
        """Whether every object that was found holds what it held."""
        return not any(self._empty) and all(_same(held, look(value)) for value, look, held in self._rows)

    def _look_of(self, kind: type) -> _Look:
        if issubclass(kind, _PLAIN):
            return None
        for base, look in _LOOKS.items():
            if issubclass(kind, base):
                return look
        ours = kind.__module__.partition(".")[0] in self._roots and not issubclass(kind, type)
        return _attributes if ours else None


def _same(before: list[Any], after: list[Any]) -> bool:
    if len(before) != len(after):
        return False
    if all(map(is_, before, after)):
        return True
    pairs = zip(before, after, strict=True)
    return all(one is two or (type(one) is type(two) and isinstance(one, _PLAIN) and one == two) for one, two in pairs)


def _tensor(value: torch.Tensor) -> list[Any]:
    memory = value.untyped_storage().data_ptr() if value.device.type != "meta" else 0
    return [value.shape, torch.Size(value.stride()), value.dtype, value.device, value.storage_offset(), memory, vars(value)]


def _closure(value: FunctionType) -> list[Any]:
    held = []
    for cell in value.__closure__ or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:
            held.append("empty")
    return held


def _attributes(value: Any) -> list[Any]:
    slots = getattr(type(value), "__slots__", ())
    held = [getattr(value, slot, None) for slot in slots if isinstance(slot, str) and slot != "__dict__"]
    return [*held, getattr(value, "__dict__", None)]


_LOOKS: dict[type, Callable[[Any], list[Any]]] = {
    torch.Tensor: _tensor,
    dict: lambda value: [*value.keys(), *value.values()],
    list: list,
    tuple: list,
    deque: list,
    set: list,
    frozenset: list,
    partial: lambda value: [value.func, value.args, value.keywords],
    MethodType: lambda value: [value.__self__, value.__func__],
    FunctionType: _closure,
    torch.nn.Module: _attributes,
}

"""Describes everything in a model other than its weights as text. Two models with the same texts are equal.

The description covers every attribute of every module and parameter, and the contents of objects of the engine's own
classes, such as kernels and quantisation methods. A tensor that is a view of one of the model's tensors is described by
its offset in that tensor. Any other tensor is described by its bytes.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections import deque
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

from ..load_plan.copies import memory_range
from .keep_files import Refused

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_EXACT = frozenset(_PLAIN)
_NAMED = (torch.dtype, torch.Size, torch.layout, torch.memory_format)
_MANY = (list, tuple, set, frozenset, deque)

# The largest tensor, in bytes, that is described by its bytes.
_SMALL = 1 << 20

# Attributes of a module that torch defines, or whose contents are described in another way.
_APART = frozenset(torch.nn.Module().__dict__)

# The prefix of overwire's attributes, which are not part of the model.
_OURS = "_overwire"


class Memory:
    """Finds the model's tensor that contains a view."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._held: dict[int, list[tuple[int, int, str]]] = {}
        for name, tensor in tensors.items():
            self.add(name, tensor)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a tensor. It must not overlap another tensor."""
        if tensor.device.type != "meta" and tensor.numel():
            memory, low, high = memory_range(tensor)
            self._held.setdefault(memory, []).append((low, high, name))

    def find_holder(self, view: torch.Tensor) -> tuple[str, int] | None:
        """Returns the name of the tensor that contains a view, and the view's byte offset in it, or None if there is no
        such tensor. Raises Refused if a tensor contains only a part of the view."""
        if view.device.type == "meta" or not view.numel():
            return None
        memory, low, high = memory_range(view)
        for first, last, name in self._held.get(memory, ()):
            if first <= low and high <= last:
                return name, low - first
            if first < high and low < last:
                raise Refused(f"a tensor overlaps only partly with {name}")
        return None


def is_plain(value: Any) -> bool:
    """Returns whether the text of a value describes it completely."""
    return isinstance(value, _PLAIN)


class Describer:
    """Describes a model.

    tensors: the model's tensors by name. engine: the name of the engine's package. opaque: prefixes of the engine's
    Python modules. Objects of classes from these modules are described only by their class.
    """

    def __init__(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], engine: str, opaque: tuple[str, ...]
    ) -> None:
        self._memory = Memory(tensors)
        self._engine, self._opaque = engine + ".", opaque
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._model = model
        self._known: dict[int, tuple[Any, str]] = {}  # the values keep the objects alive, so that ids stay unique
        self._open: set[int] = set()

    def describe_modules(self) -> dict[str, dict[str, str]]:
        """Returns the description of each attribute of each module, by the module's path. Attributes of parameters
        have names like `weight.attribute`."""
        with torch._C.DisableTorchFunctionSubclass():  # otherwise the engines' parameter classes are slow
            return {path: self._describe_module(module) for path, module in self._model.named_modules()}

    def _describe_module(self, module: torch.nn.Module) -> dict[str, str]:
        entries = {"": _kind_of(module)}
        for name, value in vars(module).items():
            if name not in _APART and not name.startswith(_OURS):
                entries[name] = repr(value) if type(value) in _EXACT else self.text_of(value)
        entries["training"] = str(module.training)
        for name, param in [*module._parameters.items(), *module._buffers.items()]:
            entries[f"{name}."] = "None" if param is None else _kind_of(param)
            for attribute, value in {} if param is None else vars(param).items():
                entries[f"{name}.{attribute}"] = self.text_of(value)
        return entries

    def text_of(self, value: Any) -> str:
        """Returns the description of one value."""
        if type(value) in _EXACT or isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, (enum.Enum, *_NAMED)):
            return str(value)
        if isinstance(value, torch.device):
            return value.type
        known_text = self._known.get(id(value))
        if known_text is not None:
            return known_text[1]
        if id(value) in self._open:
            return f"<{_kind_of(value)}>"
        self._open.add(id(value))
        try:
            text = self._describe_value(value)
        finally:
            self._open.discard(id(value))
        if len(text) > 256:
            text = f"{text[:96]}... {hashlib.sha256(text.encode()).hexdigest()}"
        self._known[id(value)] = (value, text)
        return text

    def _describe_value(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self._describe_tensor(value)
        if isinstance(value, torch.nn.Module) and id(value) in self._paths:
            return f"module {self._paths[id(value)]}"
        if isinstance(value, _MANY):
            parts = [self.text_of(part) for part in value]
            if isinstance(value, set | frozenset):
                parts.sort()
            return f"{type(value).__name__}({', '.join(parts)})"
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{self.text_of(key)}: {self.text_of(part)}" for key, part in value.items()) + "}"
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, functools.partial):
            return f"partial({self.text_of(value.func)}, {self.text_of(value.args)}, {self.text_of(value.keywords)})"
        if isinstance(value, MethodType):
            return f"{value.__qualname__} of {self.text_of(value.__self__)}"
        if isinstance(value, FunctionType | BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        return self._describe_object(value)

    def _describe_object(self, value: Any) -> str:
        # Describes the contents of an object if its class belongs to the engine, otherwise only the class.
        kind = _kind_of(value)
        if not kind.startswith(self._engine) or kind.startswith(self._opaque):
            return kind
        attributes = dict(getattr(value, "__dict__", None) or {})
        if isinstance(value, torch.nn.Module):
            attributes = {name: part for name, part in attributes.items() if name not in _APART}
            attributes |= {**value._parameters, **value._buffers}
        for slot in getattr(type(value), "__slots__", ()):
            if isinstance(slot, str) and hasattr(value, slot):
                attributes[slot] = getattr(value, slot)
        return f"{kind}({', '.join(f'{name}={self.text_of(part)}' for name, part in sorted(attributes.items()))})"

    def _describe_tensor(self, value: torch.Tensor) -> str:
        shape = f"{value.dtype} {list(value.shape)}"
        if not value.numel():
            return shape
        at = self._memory.find_holder(value)
        if at is not None:
            return f"{shape} {list(value.stride())} at {at[1]} of {at[0]}"
        if value.device.type == "meta":
            return f"{shape} without memory"
        if value.nbytes > _SMALL:
            what = f"a tensor that is not a parameter or buffer has {value.nbytes} bytes ({shape})"
            raise Refused(f"{what}: expected at most {_SMALL}")
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{shape} on {value.device.type} {hashlib.sha256(data.numpy().tobytes()).hexdigest()}"


def _kind_of(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"

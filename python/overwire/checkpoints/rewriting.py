"""Objects of a checkpoint, written anew for torch's planner, which unpickles whatever it gets.

A restricted unpickler may set any attribute of the objects that it makes. What pickle asks
an instance for, and not its class (`__reduce_ex__`, an OrderedDict's `items`), would then be
the file's own choice.
"""

from __future__ import annotations

import io
import pickle
from types import ModuleType
from typing import Any

import torch


class _Pickler(pickle.Pickler):
    # Refuses objects whose attributes hide a method of their class.
    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        for name in () if isinstance(value, type) else getattr(value, "__dict__", ()):
            if callable(getattr(kind, name, None)):
                raise pickle.PicklingError(f"its attribute {name!r} hides a method of {kind.__qualname__}")
        return NotImplemented


_module = ModuleType("overwire.pickle")
_module.__dict__.update(vars(pickle), Pickler=_Pickler)


def rewrite_object(value: Any) -> io.BytesIO:
    """What torch.save writes of an object. Raises pickle.PicklingError if an attribute hides a
    method of its class, before anything of the object is called."""
    out = io.BytesIO()
    torch.save(value, out, pickle_module=_module)
    out.seek(0)
    return out

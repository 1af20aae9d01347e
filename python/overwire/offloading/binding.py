"""Finds out whether something else uses the memory of weights in a slot, and whether the weights were changed.

torch counts the references to a storage (views, numpy arrays, tensors saved by autograd) and to a tensor.
It also counts changes to a tensor and its views, but not changes through `.data`, numpy or custom kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import getrefcount
from typing import Any, NamedTuple

import torch

from ..frameworks.memory import users_of

_State = tuple[int, int, tuple[Any, ...]]


class Binding(NamedTuple):
    """The state of parameters when they got a slot's memory.

    users: the number of references to the memory. states: for each parameter, the number of references to it, the
    number of changes, and the layout in memory. is_owned: whether only the module and this object refer to the
    parameters. Otherwise they belong to the user, who may keep references to them, and these are not counted.
    """

    memory: torch.Tensor
    users: int
    parameters: list[torch.Tensor]
    states: list[_State]
    is_owned: bool

    def compare_states(self) -> tuple[bool, bool]:
        """Returns two bools: whether something else uses the memory, and whether a parameter was changed (according to
        torch's count) or has another layout or other memory."""
        is_held, now = users_of(self.memory) > self.users, _states_of(self.parameters, self.is_owned)
        if now == self.states:
            return is_held, False
        pairs = list(zip(self.states, now, strict=True))
        return is_held or any(new[0] > old[0] for old, new in pairs), any(new[1:] != old[1:] for old, new in pairs)

    def counts_changes(self) -> bool:
        """Returns whether torch counts changes to the parameters. It does not for inference tensors."""
        return not any(one.is_inference() for one in self.parameters)

    def has_memory_of(self, parameter: torch.Tensor) -> bool:
        """Returns whether a parameter is in this memory."""
        return bool(parameter.untyped_storage()._cdata == self.memory.untyped_storage()._cdata)


def binding_of(memory: torch.Tensor, parameters: Iterable[torch.Tensor], is_owned: bool = False) -> Binding:
    """Returns the binding of parameters that have just got a slot's memory."""
    tensors = list(parameters)
    return Binding(memory, users_of(memory), tensors, _states_of(tensors, is_owned), is_owned)


def _states_of(parameters: list[Any], is_owned: bool) -> list[_State]:
    # Both states of a comparison are computed here, so that the references of this code are counted in both. Inference
    # tensors have no `_version`.
    if any(one.is_inference() for one in parameters):
        return [(one._use_count(), 0, _layout_of(one)) for one in parameters]
    if is_owned:
        return [(one._use_count() + getrefcount(one), one._version, _layout_of(one)) for one in parameters]
    return [(one._use_count(), one._version, _layout_of(one)) for one in parameters]


def _layout_of(parameter: Any) -> tuple[Any, ...]:
    # An assignment to `.data` may change any of these without a change of the address.
    bits = parameter.is_conj(), parameter.is_neg()
    return parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype, *bits

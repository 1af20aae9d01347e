"""Finds out what else uses the memory of weights in a slot, and whether the weights were changed.

torch counts the users of a storage (views, numpy arrays, tensors saved by autograd) and of a tensor.
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
    """The state of parameters when they got a slot's memory: the number of users of the memory, and each
    parameter's number of users, number of changes, and layout in memory.

    is_owned: only the module and this object refer to the parameters. If not, they belong to the user, who may
    keep references to them, and their number of users is not compared."""

    memory: torch.Tensor
    users: int
    parameters: list[torch.Tensor]
    states: list[_State]
    is_owned: bool

    def compare_states(self) -> tuple[bool, bool]:
        """Returns two answers: whether anything else uses the memory, and whether a parameter was changed (by
        torch's count), has another layout or other memory."""
        is_held, now = users_of(self.memory) > self.users, _states_of(self.parameters, self.is_owned)
        if now == self.states:
            return is_held, False
        pairs = list(zip(self.states, now, strict=True))
        return is_held or any(new[0] > old[0] for old, new in pairs), any(new[1:] != old[1:] for old, new in pairs)

    def counts_changes(self) -> bool:
        """Whether torch counts changes to the parameters. It does not for parameters made in inference mode."""
        return not any(one.is_inference() for one in self.parameters)

    def has_memory_of(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is in this memory."""
        return bool(parameter.untyped_storage()._cdata == self.memory.untyped_storage()._cdata)


def binding_of(memory: torch.Tensor, parameters: Iterable[torch.Tensor], is_owned: bool = False) -> Binding:
    """Records the state of parameters that have just got a slot's memory."""
    tensors = list(parameters)
    return Binding(memory, users_of(memory), tensors, _states_of(tensors, is_owned), is_owned)


def _states_of(parameters: list[Any], is_owned: bool) -> list[_State]:
    # Counted in one place, because this code's own references count also. Inference tensors have no `_version`.
    if any(one.is_inference() for one in parameters):
        return [(one._use_count(), 0, _layout_of(one)) for one in parameters]
    if is_owned:
        return [(one._use_count() + getrefcount(one), one._version, _layout_of(one)) for one in parameters]
    return [(one._use_count(), one._version, _layout_of(one)) for one in parameters]


def _layout_of(parameter: Any) -> tuple[Any, ...]:
    # An assignment to `.data` may change any of these, and need not change the address.
    return (
        parameter.data_ptr(),
        parameter.shape,
        parameter.stride(),
        parameter.dtype,
        parameter.is_conj(),
        parameter.is_neg(),
    )

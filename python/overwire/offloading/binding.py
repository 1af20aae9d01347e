"""Weights that are bound to a slot's memory: what else holds that memory, and whether it was changed.

torch counts the users of a storage, which views, numpy arrays and tensors that autograd has
saved are, and those of a tensor itself. It counts changes of a tensor and of its views, but
not those by `.data`, by numpy or by a kernel of one's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from sys import getrefcount
from typing import Any, NamedTuple

import torch

from ..frameworks.memory import users_of

_State = tuple[int, int, tuple[Any, ...]]


class Binding(NamedTuple):
    """Parameters in a slot's memory, as they were when they got it: the users of that memory, and
    of each parameter its users, the number of its changes, and how it lies in memory.

    is_owned: only their module and this have the parameters; else they are the user's, whose own
    references mean nothing."""

    memory: torch.Tensor
    users: int
    parameters: list[torch.Tensor]
    states: list[_State]
    is_owned: bool

    def compare_states(self) -> tuple[bool, bool]:
        """Whether anything else uses the memory; and whether torch has counted a change of a
        parameter, or it lies there otherwise, or elsewhere."""
        is_held, now = users_of(self.memory) > self.users, _states_of(self.parameters, self.is_owned)
        if now == self.states:
            return is_held, False
        pairs = list(zip(self.states, now, strict=True))
        return is_held or any(new[0] > old[0] for old, new in pairs), any(new[1:] != old[1:] for old, new in pairs)

    def counts_changes(self) -> bool:
        """Whether torch counts changes of the parameters: not of those made in inference mode."""
        return not any(one.is_inference() for one in self.parameters)

    def has_memory_of(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter lies in the memory."""
        return bool(parameter.untyped_storage()._cdata == self.memory.untyped_storage()._cdata)


def binding_of(memory: torch.Tensor, parameters: Iterable[torch.Tensor], is_owned: bool = False) -> Binding:
    """What parameters are that have just got a slot's memory."""
    tensors = list(parameters)
    return Binding(memory, users_of(memory), tensors, _states_of(tensors, is_owned), is_owned)


def _states_of(parameters: list[Any], is_owned: bool) -> list[_State]:
    # In one place, as the references of this code count. Those of inference mode have no `_version`.
    if any(one.is_inference() for one in parameters):
        return [(one._use_count(), 0, _layout_of(one)) for one in parameters]
    if is_owned:
        return [(one._use_count() + getrefcount(one), one._version, _layout_of(one)) for one in parameters]
    return [(one._use_count(), one._version, _layout_of(one)) for one in parameters]


def _layout_of(parameter: Any) -> tuple[Any, ...]:
    # `.data = ` changes any of these, the address only if it likes.
    bits = parameter.is_conj(), parameter.is_neg()
    return parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype, bits

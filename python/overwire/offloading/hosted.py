"""Streams blocks of modules that another library offloads.

While a block runs, its modules have parameters in a slot. At all other times they have the parameters that the library
has set, for example on the meta device. Everything that the library supports still works. A run with gradients, or a
read between runs, gets copies of the values from `Hosted.read`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from .binding import binding_of
from .blocks import Block, can_store, cut_model
from .offload import Offloaded, _Away
from .ring import Slot
from .stored import decode_tensor, encode_block


class HostedWeight(NamedTuple):
    """A parameter to stream. owner: its module. key: its name in the module. values: its values."""

    name: str
    owner: torch.nn.Module
    key: str
    values: torch.Tensor


class Hosted(Offloaded):
    """Blocks of a model that run on `device`. Call `add` for each block, then `run`. The modules refer to this
    object."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, False)
        self._parameters: list[list[tuple[torch.nn.Module, str, torch.nn.Parameter]]] = []  # indexed by block
        self._owners: dict[torch.nn.Module, int] = {}
        self._places: dict[str, tuple[int, int]] = {}

    @staticmethod
    def find_blocks(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
        """Returns the names and modules of the blocks that `offload` would choose."""
        names = {module: name for name, module in model.named_modules()}
        return [(names[module], module) for module in dict.fromkeys(cut_model(model))]

    @staticmethod
    def weight_of(name: str, owner: torch.nn.Module, key: str, values: torch.Tensor) -> HostedWeight | None:
        """Returns a weight for `add`, or None if its values cannot be stored: they must be dense and not empty, with a
        dtype that files support."""
        return HostedWeight(name, owner, key, values) if can_store(values) else None

    def add(self, name: str, module: torch.nn.Module, weights: Iterable[HostedWeight]) -> None:
        """Compresses the weights of a block (at least one) into host memory. `read` returns them after this call.

        Raises OutOfMemoryError and DeviceError. After an error nothing has changed.
        """
        weights, at = list(weights), len(self._away)
        with torch.inference_mode(False), torch.no_grad():
            block = encode_block([weight.values for weight in weights], self._device)
        self._away.append(_Away(Block(name, module, []), block, []))
        parameters = [(one.owner, one.key, one.owner._parameters[one.key]) for one in weights]
        self._parameters.append(parameters)  # type: ignore[arg-type]
        self._owners.update((weight.owner, at) for weight in weights)
        self._places.update((weight.name, (at, number)) for number, weight in enumerate(weights))
        self.blocks.append(name)
        self.nbytes += sum(weight.values.nbytes for weight in weights)
        self.stored += block.memory.nbytes

    def run(self, slots: int = 2) -> None:
        """Starts streaming: a block's weights are loaded when it is called. Raises OutOfMemoryError."""
        with torch.inference_mode(False):
            self._run_by(slots)

    def __deepcopy__(self, memo: object) -> Hosted:
        return self  # a copy of a module gets its weights from `read`

    def read(self, name: str) -> torch.Tensor:
        """Returns a copy of a weight's values in host memory. Raises KeyError for an unknown name."""
        at, number = self._places[name]
        one = self._away[at]
        if one.binding is not None and (one.was_held or one.is_changed):
            return one.binding.parameters[number].detach().to("cpu", copy=True)
        return decode_tensor(one.stored, number)

    def runs(self, owner: torch.nn.Module) -> bool:
        """Returns whether this thread is running the block of a module, so that the module has its parameters."""
        at, ring = self._owners.get(owner), self._ring
        return at is not None and ring is not None and ring.runs(at)

    def drop(self, owner: torch.nn.Module) -> None:
        """Stops streaming the block of a module. `read` still returns its weights."""
        at = self._owners.get(owner)
        for hook in self._hooks[2 * at : 2 * at + 2] if at is not None else ():
            hook.remove()

    def _bring_weights(self, at: int, slot: Slot) -> None:
        one = self._away[at]
        if one.binding is not None:
            for (owner, key, _), parameter in zip(self._parameters[at], one.binding.parameters, strict=True):
                if _is_placeholder(owner._parameters.get(key)):  # the library has removed the parameter
                    owner._parameters[key] = parameter  # type: ignore[assignment]
            return
        for (owner, key, left), view in zip(self._parameters[at], slot.views[at], strict=True):
            owner._parameters[key] = torch.nn.Parameter(view, left.requires_grad)
        parameters = (owner._parameters[key] for owner, key, _ in self._parameters[at])
        one.binding = binding_of(slot.memory, parameters, is_owned=True)  # type: ignore[arg-type]

    def _compare_states(self, at: int) -> tuple[bool, bool]:
        is_held, is_changed = super()._compare_states(at)
        binding = self._away[at].binding
        assert binding is not None
        for (owner, key, _), parameter in zip(self._parameters[at], binding.parameters, strict=True):
            now = owner._parameters.get(key)
            is_changed = is_changed or now is not parameter and not _is_placeholder(now)
        return is_held, is_changed

    def _send_away(self, at: int) -> None:
        self._away[at].binding = None
        for owner, key, placeholder in self._parameters[at]:
            owner._parameters[key] = placeholder

    def _meet_gradients(self, name: str, ran: bool = False) -> None:
        if ran:
            super()._meet_gradients(name)
        text = "a forward with gradients is not streamed: use torch.inference_mode() or torch.no_grad()"
        warnings.warn(f"overwire: offload: {name}: {text}", stacklevel=2)


def _is_placeholder(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.is_meta

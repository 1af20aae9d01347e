"""Blocks whose parameters another library takes away and puts back: while one runs, the
library's modules have parameters in a slot, and the library's own way serves all else.

Between runs the modules have what the library left there, such as parameters of the meta
device. Nothing is refused that the library can do: a run that needs gradients, or a read
between runs, takes the values from `Hosted.read`, in memory of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from .binding import binding_of
from .blocks import Block, cut_model
from .offload import Offloaded, _Away
from .ring import Slot
from .stored import decode_tensor, encode_block


class HostedWeight(NamedTuple):
    """A parameter by the module that has it, and its values, for which `can_store` holds."""

    name: str
    owner: torch.nn.Module
    key: str
    values: torch.Tensor


class Hosted(Offloaded):
    """Blocks of a model that run on `device`: `add` each, then `run`. It lives as long as the
    modules."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, False)
        self._parameters: list[list[tuple[torch.nn.Module, str, torch.nn.Parameter]]] = []  # by block
        self._owners: dict[torch.nn.Module, int] = {}
        self._places: dict[str, tuple[int, int]] = {}

    def add(self, name: str, module: torch.nn.Module, weights: Iterable[HostedWeight]) -> None:
        """Compresses the weights of a block, at least one, into host memory; `read` has them from now on.

        Raises OutOfMemoryError and DeviceError; nothing is changed then.
        """
        weights, at = list(weights), len(self._away)
        with torch.inference_mode(False), torch.no_grad():
            block = encode_block([weight.values for weight in weights], self._device)
        self._away.append(_Away(Block(name, module, []), block, []))
        self._parameters.append([(one.owner, one.key, one.owner._parameters[one.key]) for one in weights])  # type: ignore[misc]
        self._owners.update((weight.owner, at) for weight in weights)
        self._places.update((weight.name, (at, number)) for number, weight in enumerate(weights))
        self.blocks.append(name)
        self.nbytes += sum(weight.values.nbytes for weight in weights)
        self.stored += block.memory.nbytes

    def run(self, slots: int = 2) -> None:
        """Lets the blocks fetch their weights when they are called. Raises OutOfMemoryError."""
        with torch.inference_mode(False):
            self._run_by(slots)

    def __deepcopy__(self, memo: object) -> Hosted:
        return self  # a copy of a module takes its weights by `read`

    def read(self, name: str) -> torch.Tensor:
        """The values of a weight, in host memory of its own. Raises KeyError for another name."""
        at, number = self._places[name]
        one = self._away[at]
        if one.binding is not None and (one.was_held or one.is_changed):
            return one.binding.parameters[number].detach().to("cpu", copy=True)
        return decode_tensor(one.stored, number)

    def runs(self, owner: torch.nn.Module) -> bool:
        """Whether this thread runs the block of a module, whose parameters are there then."""
        at, ring = self._owners.get(owner), self._ring
        return at is not None and ring is not None and ring.runs(at)

    def drop(self, owner: torch.nn.Module) -> None:
        """Ends the streaming of a module's block; its weights can still be read."""
        at = self._owners.get(owner)
        for hook in self._hooks[2 * at : 2 * at + 2] if at is not None else ():
            hook.remove()

    def _bring_weights(self, at: int, slot: Slot) -> None:
        one = self._away[at]
        if one.binding is not None:
            for (owner, key, _), parameter in zip(self._parameters[at], one.binding.parameters, strict=True):
                if _is_placeholder(owner._parameters.get(key)):  # the library has taken it away
                    owner._parameters[key] = parameter  # type: ignore[assignment]
            return
        for (owner, key, left), view in zip(self._parameters[at], slot.views[at], strict=True):
            owner._parameters[key] = torch.nn.Parameter(view, left.requires_grad)
        one.binding = binding_of(slot.memory, (owner._parameters[key] for owner, key, _ in self._parameters[at]), is_owned=True)  # type: ignore[misc]

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
        warnings.warn(
            f"overwire: offload: {name}: a forward with gradients is not streamed: "
            "use torch.inference_mode() or torch.no_grad()",
            stacklevel=2,
        )


def _is_placeholder(parameter: torch.Tensor | None) -> bool:
    return parameter is not None and parameter.is_meta


def listed_blocks(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """What `offload` takes as the blocks of a model, by name; none if it has no lists of modules."""
    names = {module: name for name, module in model.named_modules()}
    return [(names[module], module) for module in dict.fromkeys(cut_model(model))]

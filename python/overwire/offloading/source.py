"""Reads the weights of a model that is offloaded with source=."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ModelMismatchError
from ..frameworks.torch import _errors_of
from ..verbs.open import safe_open
from ..verbs.states import tensors_of_module
from .blocks import Weight

if TYPE_CHECKING:
    from ..model.sourcelike import SourceLike


class Source:
    """A file with a model's weights, under the model's names."""

    def __init__(self, model: torch.nn.Module, source: SourceLike, device: torch.device) -> None:
        self._device = device
        self._file = safe_open(source, framework="pt")
        self._tables: list[dict[str, Any]] = [
            table for part in model.modules() for table in (part._parameters, part._buffers)
        ]
        self._placeholders: list[tuple[Any, str, torch.Tensor]] = []  # the model's meta tensors
        file_names, (state, _) = set(self._file.keys()), tensors_of_module(model, "offload")
        self._names: dict[int, str] = {}
        needs: dict[int, str] = {}
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
        ]:
            if name in file_names:
                self._names[id(tensor)] = name
            elif name in state or tensor.device.type == "meta":
                needs.setdefault(id(tensor), name)
        if missing := [name for key, name in needs.items() if key not in self._names]:
            first = ", ".join(sorted(missing)[:5])
            raise ModelMismatchError(f"overwire: offload: {source} lacks {len(missing)} weights of the model: {first}")

    def give_memory(self) -> None:
        """Replaces each meta tensor by a tensor in host memory, under all its names."""
        tensors: dict[int, torch.Tensor] = {}
        for table in self._tables:
            for key, old in table.items():
                if old is None or old.device.type != "meta":
                    continue
                if id(old) not in tensors:  # the new tensor takes no memory before it is written
                    new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="cpu")
                    if isinstance(old, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, old.requires_grad)
                    tensors[id(old)] = new
                    self._names[id(tensors[id(old)])] = self._names[id(old)]
                self._placeholders.append((table, key, old))
                table[key] = tensors[id(old)]

    def take_memory(self) -> None:
        """Undoes `give_memory`."""
        while self._placeholders:
            table, key, old = self._placeholders.pop()
            table[key] = old

    def load_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        self._file.load_into([(self._names[id(t)], None, t.data) for t in tensors if id(t) in self._names])

    def read_block(self, weights: list[Weight]) -> list[torch.Tensor]:
        # The tensors are on the device, because a GPU encodes them there and then sends only stored bytes to the host.
        with _errors_of(str(self._device), sum(weight.parameter.nbytes for weight in weights)):
            tensors = [torch.empty_like(weight.parameter.detach(), device=self._device) for weight in weights]
        self._file.load_into(
            [(self._names[id(w.parameter)], None, tensor) for w, tensor in zip(weights, tensors, strict=True)]
        )
        return tensors

"""Decides which modules of a model are its blocks, and which of their parameters can be offloaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, NotSupportedError
from ..frameworks.memory import check_memory
from ..frameworks.torch import SAVED
from ..verbs.sleeping import _fills_extent

# A module with more than this share of the model's bytes is divided if it contains lists of modules. The engine, which
# plans from names only, uses the same two numbers.
_LARGEST_SHARE = 1 / 16
# A module is divided only if its lists have this share of its bytes. Weights outside of lists stay on the device.
_LISTED_SHARE = 0.8


class Weight(NamedTuple):
    """A parameter that is offloaded with its block."""

    name: str
    parameter: torch.nn.Parameter
    device: torch.device  # the device on which the parameter was


class Block(NamedTuple):
    """A module with weights that are on the device only while it runs."""

    name: str
    module: torch.nn.Module
    weights: list[Weight]

    @property
    def nbytes(self) -> int:
        """The bytes of the weights."""
        return sum(weight.parameter.nbytes for weight in self.weights)


def find_blocks(model: torch.nn.Module, blocks: Iterable[Any] | None, prefix: str = "") -> list[Block]:
    """Returns the blocks of a model in the order of its modules.

    blocks: modules, names of modules, or a ModuleList. By default the blocks are the children of the model's lists of
    modules, and a child with more than a sixteenth of the model is divided further.

    Raises ArgumentError for modules outside of the model, nested blocks, freed memory, and a model without lists.
    Raises NotSupportedError for a compiled model, and for parameters that consist of other tensors.
    """
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        text = "the whole model is compiled: compile its blocks, or offload it before you compile it"
        raise NotSupportedError(f"overwire: offload: {text}")
    _check_memory(model)
    names = {module: name for name, module in model.named_modules()}
    modules = _find_modules(model, names, blocks) if blocks is not None else cut_model(model)
    if not modules:
        text = f"{type(model).__name__} has no ModuleList with parameters: pass its blocks as blocks=[...]"
        raise ArgumentError(f"overwire: offload: {text}")
    modules = list(ones := dict.fromkeys(modules))  # a module may be in several lists
    for module in modules:
        for inner in module.modules():
            if inner is not module and inner in ones:
                raise ArgumentError(f"overwire: offload: block {names[inner]!r} is part of block {names[module]!r}")
    owners = _count_places(model, modules)
    pairs = [(prefix + names[module], module) for module in modules]
    return [Block(name, module, list(weights_of(module, name, owners))) for name, module in pairs]


def find_models(model: Any) -> dict[str, torch.nn.Module]:
    """Returns the models of a diffusers pipeline by name, or a module under the name "". Raises ArgumentError."""
    if isinstance(model, torch.nn.Module):
        return {"": model}
    components = getattr(model, "components", None)
    models: dict[str, torch.nn.Module] = {}
    for name, part in components.items() if isinstance(components, Mapping) else ():
        if isinstance(part, torch.nn.Module) and part not in models.values():
            models[name] = part
    if not models:
        why = f"expected a torch.nn.Module or a diffusers pipeline, got {type(model).__name__}"
        raise ArgumentError(f"overwire: offload: {why}")
    return models


def blocks_of(model: torch.nn.Module, blocks: Iterable[Any] | None, name: str, optional: bool) -> list[Block]:
    """Returns the blocks of a model of a pipeline; see `find_blocks`. optional: whether it may have none."""
    try:
        return find_blocks(model, blocks, f"{name}." if name else "")
    except ArgumentError:
        if optional:  # a model of a pipeline stays on the device if it has no lists of modules
            return []
        raise


def weights_of(module: torch.nn.Module, prefix: str, owners: dict[int, int]) -> Iterator[Weight]:
    """Yields the parameters of a block that no other module uses and that share no memory."""
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "__tensor_flatten__"):
            text = f"is a {type(parameter).__name__}, which consists of other tensors"
            raise NotSupportedError(f"overwire: offload: {prefix}.{name} {text}", tensor=name)
        if owners.get(id(parameter)) == 1 and can_store(parameter):
            yield Weight(f"{prefix}.{name}", parameter, parameter.device)


def _find_modules(
    model: torch.nn.Module, names: dict[torch.nn.Module, str], blocks: Iterable[Any]
) -> list[torch.nn.Module]:
    modules: list[torch.nn.Module] = []
    if isinstance(blocks, str) or not isinstance(blocks, Iterable):
        raise ArgumentError(f"overwire: offload: blocks: expected modules or their names, got {blocks!r}")
    for block in blocks:
        module = block
        if isinstance(block, str):
            try:
                module = model.get_submodule(block)
            except AttributeError as error:
                raise ArgumentError(f"overwire: offload: blocks: {error}") from None
        if not isinstance(module, torch.nn.Module) or module not in names or module is model:
            what = block if isinstance(block, str) else type(block).__name__
            raise ArgumentError(f"overwire: offload: blocks: {what!r} is not part of the model")
        modules += module if isinstance(module, torch.nn.ModuleList) else [module]  # the list itself is never called
    return modules


def cut_model(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the children of a model's lists of modules. Large ones are divided further."""
    return list(_cut_lists(model, _LARGEST_SHARE * _bytes_of(model)))


def _cut_lists(module: torch.nn.Module, limit: float) -> Iterator[torch.nn.Module]:
    for child in module.children():
        if not isinstance(child, torch.nn.ModuleList):
            yield from _cut_lists(child, limit)
            continue
        for block in child:
            inner = list(_cut_lists(block, limit)) if _bytes_of(block) > limit else []
            if sum(map(_bytes_of, inner)) >= _LISTED_SHARE * _bytes_of(block) > 0:
                yield from inner
            elif _bytes_of(block):
                yield block


def _bytes_of(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _count_places(model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> dict[int, int]:
    # Returns the number of blocks that use each parameter or part of its memory, by the parameter's id. Everything
    # outside of the blocks counts as another block. Weights that two blocks use (tied weights) cannot be offloaded.
    inside: dict[torch.nn.Module, set[int]] = {}
    for at, block in enumerate(blocks):
        for module in block.modules():
            inside.setdefault(module, set()).add(at)
    places: dict[int, set[int]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                places.setdefault(id(tensor), set()).update(inside.get(module, {-1}))
                tensors[id(tensor)] = tensor
    full = [(key, t) for key, t in tensors.items() if t.numel() and t.device.type != "meta"]
    spans = sorted((str(t.device), t.data_ptr(), t.data_ptr() + _extent_of(t), key) for key, t in full)
    counts = {key: len(where) for key, where in places.items()}
    reach: tuple[str, int, int] = ("", 0, 0)  # device, end, and id of the tensor with the highest end so far
    for device, low, high, key in spans:
        if reach[0] == device and low < reach[1]:
            counts[key] += 1
            counts[reach[2]] += 1
        if reach[0] != device or high > reach[1]:
            reach = (device, high, key)
    return counts


def _check_memory(model: torch.nn.Module) -> None:
    # Raises ArgumentError for memory that was freed, for example by `sleep`, or was never allocated.
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__"):
            check_memory(tensor, f"overwire: offload: {name!r}", name)


def _extent_of(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def can_store(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor can be offloaded. It must be dense and not empty, with a dtype that files support."""
    plain = tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.numel() > 0 and tensor.dtype in SAVED and _fills_extent(tensor)

"""Patches accelerate for `overwire.patch_safetensors`.

Weights that are offloaded to disk stay in compressed files, and can still be read after the patch ends. With
`offload=True`, weights that are offloaded to the CPU are compressed there. accelerate would fetch the weights of a
module when the module runs. overwire fetches them in advance, block by block. accelerate's other functions (state dicts
of meta tensors, `align_module_device`, `save_model`, removing its hooks) find every weight through accelerate's own map
of weights.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import Lazy

__all__ = ["MODULES", "pair_replacements"]

#: The modules of accelerate that `pair_replacements` uses.
MODULES = ("accelerate.utils.offload", "accelerate.big_modeling")

log = logging.getLogger("overwire")


def pair_replacements(found: Callable[[str, str], Any], lazy: Lazy) -> list[tuple[Any, Any]]:
    """Returns the objects to replace, each with its replacement."""
    pairs: list[tuple[Any, Any]] = []
    loader = found(MODULES[0], "OffloadedWeightsLoader")
    if loader is not None:
        pairs.append((loader, _wrap_offload_loader(loader, lazy)))
    for name in ("dispatch_model", "cpu_offload"):
        original = found(MODULES[1], name)
        if original is not None:
            pairs.append((original, _wrap_dispatch(original, lazy)))
    return pairs


def _wrap_offload_loader(loader: Any, lazy: Lazy) -> Any:
    class OffloadedWeightsLoader(loader):  # type: ignore[misc]
        # A model keeps this loader, and reads weights through it whenever the model runs.
        __doc__ = loader.__doc__

        def __getitem__(self, key: str) -> Any:
            about = {} if key in self.state_dict else self.index[key]
            path = about.get("safetensors_file")
            if path is None or not lazy.compressed(path):
                return super().__getitem__(key)
            import torch

            with lazy.open(path, "pt", "cpu" if self.device is None else self.device) as file:
                tensor = file.get_tensor(about.get("weight_name", key))
            return tensor.to(getattr(torch, about["dtype"])) if "dtype" in about else tensor

    return OffloadedWeightsLoader


def _wrap_dispatch(original: Any, lazy: Lazy) -> Any:
    @functools.wraps(original)
    def dispatch_and_stream(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        if lazy.offloads():
            _stream_modules(model)
        return model

    return dispatch_and_stream


class _Weights(Mapping[str, Any]):
    # Replaces accelerate's map of weights on the host. Some of the weights are compressed.

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.data: dict[str, Any] = dict(weights)

    def __getitem__(self, name: str) -> Any:
        from overwire._compat_api import Hosted

        value = self.data[name]
        return value.read(name) if isinstance(value, Hosted) else value

    def __contains__(self, name: object) -> bool:
        return name in self.data

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


def _stream_modules(model: Any) -> None:
    # Streams the weights of a model to which accelerate has just attached its hooks.
    import torch
    from accelerate.hooks import AlignDevicesHook

    from overwire._compat_api import Hosted

    hooks: dict[Any, Any] = {module: getattr(module, "_hf_hook", None) for module in model.modules()}
    hooks_of_modules = {
        module: hook for module, hook in hooks.items() if type(hook) is AlignDevicesHook and hook.offload
    }
    maps: dict[int, _Weights] = {}
    weights = {module: own for module, hook in hooks_of_modules.items() if (own := _weights_of(module, hook, maps))}
    _drop_shared(weights, hooks_of_modules)
    hosted_of: dict[torch.device, Hosted] = {}
    for name, block, owners in _blocks_of(Hosted.find_blocks(model), weights):
        for device in dict.fromkeys(_device_of(hooks_of_modules[owner]) for owner in owners):
            own_blocks = [owner for owner in owners if _device_of(hooks_of_modules[owner]) == device]
            host = hosted_of.setdefault(device, Hosted(device))
            host.add(name, block, [weight for owner in own_blocks for weight in weights[owner]])
            for owner in own_blocks:
                maps_of_owner = weights.pop(owner)
                _take_hook(owner, maps_of_owner[0].owner, host)
                for weight in maps_of_owner:
                    _map_of(hooks_of_modules[owner], maps).data[weight.name] = host
    for device, host in hosted_of.items():
        host.run()
        log.info("patch_safetensors: accelerate: %r for %s, ring of %d bytes", host, device, host.ring)


def _weights_of(module: Any, hook: Any, maps: dict[int, _Weights]) -> list[Any]:
    # Returns the weights that accelerate copies from host memory when a module runs. Returns [] if some of them are
    # not plain parameters.
    from overwire._compat_api import Hosted

    weights_map, out = _map_of(hook, maps), []
    buffers = hook.offload_buffers and any(True for _ in module.buffers(recurse=hook.place_submodules))
    if weights_map is None or buffers or hook.tied_params_names or _device_of(hook).type not in ("cpu", "cuda"):
        return []
    for name, parameter in module.named_parameters(recurse=hook.place_submodules):
        whole, (inner, _, key) = hook.weights_map.prefix + name, name.rpartition(".")
        values = weights_map.get(whole)
        if values is None or type(parameter).__name__ != "Parameter" or not parameter.is_meta:
            return []
        weight = Hosted.weight_of(whole, module.get_submodule(inner), key, values)
        if weight is None or values.dtype != parameter.dtype or values.shape != parameter.shape:
            return []
        out.append(weight)
    return out


def _drop_shared(weights: dict[Any, list[Any]], offloaded: Mapping[Any, Any]) -> None:
    # Removes modules that share weights. accelerate handles these modules, and copies a shared weight once.
    values = Counter(weight.values.data_ptr() for own in weights.values() for weight in own)
    holders = Counter(id(one) for module in offloaded for one in module._parameters.values())
    for module, own in list(weights.items()):
        if any(values[one.values.data_ptr()] > 1 or holders[id(one.owner._parameters[one.key])] > 1 for one in own):
            del weights[module]


def _blocks_of(listed: list[tuple[str, Any]], weights: dict[Any, list[Any]]) -> Iterator[tuple[str, Any, list[Any]]]:
    # Yields each block in the model's lists with its modules, then each module that is not in a block.
    inside = Counter(inner for _, block in listed for inner in block.modules())
    for name, block in listed:
        owners = [inner for inner in block.modules() if inner in weights and inside[inner] == 1]
        if owners:
            yield name, block, owners
    for module in [module for module in weights if module not in inside]:
        yield weights[module][0].name.rpartition(".")[0], module, [module]


def _map_of(hook: Any, maps: dict[int, _Weights]) -> Any:
    # Replaces accelerate's map of weights in host memory by a `_Weights`, for all hooks that share it. Returns None if
    # the hook has no such map.
    from accelerate.utils.offload import OffloadedWeightsLoader, PrefixedDataset

    holder, key = hook.weights_map, "dataset"
    if not isinstance(holder, PrefixedDataset):
        return None
    if isinstance(holder.dataset, OffloadedWeightsLoader):
        holder, key = holder.dataset, "state_dict"
    weights = getattr(holder, key)
    if not isinstance(weights, _Weights):
        weights = maps.setdefault(id(weights), _Weights(weights))
        setattr(holder, key, weights)
    return weights


def _device_of(hook: Any) -> Any:
    import torch

    device = hook.execution_device
    if isinstance(device, int):
        return torch.device("cuda", device)
    return torch.device("meta" if device is None else device)


def _take_hook(taken: Any, owner: Any, hosted: Any) -> None:
    # Changes accelerate's hook of a module so that it does not fetch weights while the block's hook fetches them.
    from accelerate.hooks import AlignDevicesHook

    hook = taken._hf_hook
    inputs = AlignDevicesHook(hook.execution_device, io_same_device=hook.io_same_device, skip_keys=hook.skip_keys)

    class Streamed(AlignDevicesHook):  # type: ignore[misc]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            if module is taken and hosted.runs(owner):
                return inputs.pre_forward(module, *args, **kwargs)
            return super().pre_forward(module, *args, **kwargs)

        def post_forward(self, module: Any, output: Any) -> Any:
            if module is taken and hosted.runs(owner):
                return inputs.post_forward(module, output)
            return super().post_forward(module, output)

        def detach_hook(self, module: Any) -> Any:
            if module is taken:
                hosted.drop(owner)
            return super().detach_hook(module)

    hook.__class__, hook.tied_params_map = Streamed, None

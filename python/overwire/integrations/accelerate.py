"""accelerate under `overwire.patch_safetensors`: weights that stay in compressed
files, because they are offloaded to disk, are found there after the patch too; and
modules that a `device_map` leaves on the host are streamed by `overwire.offload`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import overwire

from . import Lazy

if TYPE_CHECKING:
    import torch

__all__ = ["MODULES", "hooks"]

#: The modules of accelerate that `hooks` looks into.
MODULES = ("accelerate.utils.offload", "accelerate.big_modeling")


def hooks(found: Callable[[str, str], Any], lazy: Lazy) -> list[tuple[Any, Any]]:
    """The names that change, and what stands for each while patched."""
    loader, dispatch = found(MODULES[0], "OffloadedWeightsLoader"), found(MODULES[1], "dispatch_model")
    pairs = [] if loader is None else [(loader, _through_overwire(loader, lazy))]
    return pairs if dispatch is None else [*pairs, (dispatch, _dispatch_by_offload(dispatch))]


def _through_overwire(loader: Any, lazy: Lazy) -> Any:
    class OffloadedWeightsLoader(loader):  # type: ignore[misc]
        # Models keep it as long as they live, and read by it whenever they run.
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


def _dispatch_by_offload(dispatch: Any) -> Any:
    signature = inspect.signature(dispatch)

    @functools.wraps(dispatch)
    def dispatch_model(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        model, device_map = given["model"], given["device_map"]
        device = _one_device(device_map)
        # What asks for more than a device and the host has ways of accelerate's own.
        more = set(given) - {"model", "device_map", "main_device", "offload_dir", "offload_buffers", "skip_keys"}
        quantised = getattr(model, "quantization_method", None) is not None
        if device is None or quantised or any(given[name] for name in more):
            return dispatch(*args, **kwargs)
        blocks = [block for name, place in device_map.items() if place == "cpu" for block in _blocks_in(model, name)]
        try:
            model._overwire_offloaded = overwire.offload(model, given.get("main_device") or device, blocks=blocks)
        except (overwire.ArgumentError, overwire.NotSupportedError) as error:
            logging.getLogger("overwire").warning("accelerate moves the weights itself: %s", error)
            return dispatch(*args, **kwargs)
        from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # type: ignore[import-untyped]

        # It moves arguments to the device, and results to where the arguments were.
        hook = AlignDevicesHook(execution_device=device, io_same_device=True, skip_keys=given.get("skip_keys"))
        add_hook_to_module(model, hook, append=True)
        model.hf_device_map = dict(device_map)
        return model

    return dispatch_model


def _one_device(device_map: dict[str, Any]) -> Any:
    # The one device that a map names beside the host; None for others, and for the disk.
    devices = [device for device in device_map.values() if device != "cpu"]
    if not devices or len(devices) == len(device_map) or any(device != devices[0] or device == "disk" for device in devices):
        return None
    return devices[0]


def _blocks_in(model: torch.nn.Module, name: str) -> Iterator[torch.nn.Module]:
    # The modules that run as one: of a list of modules, its own.
    import torch

    module = model.get_submodule(name) if name else model
    if isinstance(module, torch.nn.ModuleList):
        yield from module
    elif any(True for _ in module.parameters()):
        yield module

"""`{"offload": "8GB"}`: layers of a model that vLLM runs eagerly lie compressed on the host, and come while they run.

vLLM gives its offloader each layer as soon as it is made, before weights are loaded into it.
`HostedLayers` takes them to the host, so that the model is made on a GPU that it does not fit
on; once vLLM has loaded and processed all weights, `stream_layers` lets overwire.offload's ring bring them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.offloader import BaseOffloader, get_offloader, set_offloader
from vllm.model_executor.offloader.base import NoopOffloader

from .identity import is_offloading

# What streams the layers of this process's models.
_streams: weakref.WeakSet[Any] = weakref.WeakSet()


class HostedLayers(BaseOffloader):  # type: ignore[misc, unused-ignore]
    """Lets the layers of a model for `device` lie on the host while its weights are loaded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: dict[torch.nn.Module, set[str]] = {}  # by layer: its parameters that were on the device

    def wrap_modules(self, modules_generator: Iterable[torch.nn.Module], prefix: str = "") -> list[torch.nn.Module]:
        """The layers, one made after the other: the weights of each leave the device before the next one is made."""
        layers = []
        for layer in modules_generator:
            parameters = {name: one for name, one in layer.named_parameters() if one.device.type == self._device.type}
            for parameter in parameters.values():
                parameter.data = parameter.data.cpu()
            self._names[layer] = set(parameters)
            layers.append(layer)
        return layers

    def stream_layers(self, model: torch.nn.Module, keep: int) -> None:
        """Compresses the layers of a model whose weights are loaded, up to `keep` bytes of them
        excepted, which go to the device. They are streamed as long as the model lives.

        Raises ValueError for a model without layers, and what `overwire.offload` raises.
        """
        from ...plumbing import stream_blocks

        modules = set(model.modules())
        inner = {part for layer in self._names for part in layer.modules() if part is not layer}
        layers = {layer: names for layer, names in self._names.items() if layer in modules - inner}
        if not layers:
            raise ValueError(f"overwire: offload: {type(model).__name__} has no layers that vLLM gives to offloaders")
        parameters = [
            parameter
            for layer, names in layers.items()
            for name, parameter in layer.named_parameters()
            if name in names  # what vLLM itself has put on the host stays there
        ]
        handle = stream_blocks(model, self._device, layers, parameters, keep)
        model.__dict__["_overwire_offloaded"] = handle
        _streams.add(handle)


@contextmanager
def hosted_layers(device: torch.device) -> Iterator[HostedLayers]:
    """Makes `HostedLayers` vLLM's offloader for the models that are made meanwhile."""
    layers, before = HostedLayers(device), get_offloader()
    set_offloader(layers)
    try:
        yield layers
    finally:
        set_offloader(before)


def refuse_config(config: Any, model_config: Any) -> None:
    """Raises ValueError for a configuration of vLLM's under which layers cannot be streamed."""
    compilation, parallel = config.compilation_config, config.parallel_config
    reasons = {
        "graphs and compiled models keep the addresses of weights: add --enforce-eager": bool(
            not model_config.enforce_eager or compilation.mode or getattr(compilation.cudagraph_mode, "value", 0)
        ),
        "it needs one of NVIDIA's GPUs, or the CPU": bool(torch.version.hip)
        or config.device_config.device_type not in ("cpu", "cuda"),
        f"weights of {model_config.quantization} are held by its kernels, too": model_config.quantization is not None,
        "sleep frees memory that the ring writes: leave out --enable-sleep-mode": model_config.enable_sleep_mode,
        "experts are moved while the engine runs: leave out --enable-eplb": parallel.enable_eplb,
        "two batches at a time wait for one another's layers: leave out --enable-dbo": parallel.use_ubatching,
        "LoRA puts other layers in the place of the model's": config.lora_config is not None,
        "vLLM has an offloader of its own: leave out --cpu-offload-gb and --offload-group-size": is_offloading(config)
        or not isinstance(get_offloader(), NoopOffloader),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"overwire: model_loader_extra_config: offload: {reason}")


def refuse_changes(what: str) -> None:
    """Raises ValueError where layers are streamed, whose weights nothing may change or read meanwhile."""
    if any(handle.blocks for handle in _streams):
        raise ValueError(f"overwire: {what}: layers of the model lie compressed on the host: start it without offload")

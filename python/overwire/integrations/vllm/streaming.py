"""Implements the options `{"offload": "8GB", "offload_where": "host"}`. Layers of a model stay compressed on the host
or on the GPU, and are streamed.

vLLM passes each layer to its offloader as soon as it is created, before weights are loaded into it. `HostedLayers`
moves the layer to the host, so that vLLM can build a model that does not fit on the GPU. After vLLM has loaded and
processed all weights, `stream_layers` compresses the layers and streams them through the ring of `overwire.offload`.
Layers of compiled and quantised models have fixed slots. vLLM divides a compiled model at the operator that loads a
layer, so that the operator runs between its CUDA graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from vllm.model_executor.offloader import BaseOffloader, get_offloader, set_offloader
from vllm.model_executor.offloader.base import NoopOffloader

from .identity import is_offloading

# The operator that `stream_blocks` adds to each layer.
_OPERATOR = "overwire::next_block"

# The handles that stream the layers of this process's models.
_streams: weakref.WeakSet[Any] = weakref.WeakSet()


class HostedLayers(BaseOffloader):  # type: ignore[misc, unused-ignore]
    """A vLLM offloader that keeps the layers of a model on the host while its weights are loaded. device: the device
    for which vLLM builds the layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: dict[torch.nn.Module, set[str]] = {}  # names of the parameters that were on the device, by layer

    def wrap_modules(self, modules_generator: Iterable[torch.nn.Module], prefix: str = "") -> list[torch.nn.Module]:
        """Returns the layers that vLLM creates. Moves each layer's weights to the host before the next layer is
        created."""
        layers = []
        for layer in modules_generator:
            parameters = {name: one for name, one in layer.named_parameters() if one.device.type == self._device.type}
            for parameter in parameters.values():
                parameter.data = parameter.data.cpu()
            self._names[layer] = set(parameters)
            layers.append(layer)
        return layers

    def stream_layers(
        self, model: torch.nn.Module, keep: int, static: bool = False, where: Literal["host", "device"] = "host"
    ) -> None:
        """Compresses the layers of a model after its weights are loaded, and streams them as long as the model exists.
        Up to `keep` bytes of layers are moved to the device instead. static: see `stream_blocks`. where: the memory for
        compressed layers.

        Raises ValueError for a model without layers, and the errors of `overwire.offload`.
        """
        from ..._compat_api import stream_blocks

        modules = set(model.modules())
        inner = {part for layer in self._names for part in layer.modules() if part is not layer}
        layers = {layer: names for layer, names in self._names.items() if layer in modules - inner}
        if not layers:
            raise ValueError(f"overwire: offload: vLLM passes no layers of {type(model).__name__} to its offloader")
        parameters = [
            parameter
            for layer, names in layers.items()
            for name, parameter in layer.named_parameters()
            if name in names  # other parameters were created on the host and stay there
        ]
        handle = stream_blocks(model, self._device, layers, parameters, keep, static, where)
        model.__dict__["_overwire_offloaded"] = handle
        _streams.add(handle)


@contextmanager
def hosted_layers(device: torch.device) -> Iterator[HostedLayers]:
    """Returns a context in which a `HostedLayers` is vLLM's offloader."""
    layers, before = HostedLayers(device), get_offloader()
    set_offloader(layers)
    try:
        yield layers
    finally:
        set_offloader(before)


def prepare_config(config: Any, model_config: Any) -> bool:
    """Makes vLLM divide a compiled model at streamed layers. Returns whether the layers need fixed slots. Raises
    ValueError for a vLLM configuration with which layers cannot be streamed."""
    from vllm.config import CompilationMode

    compilation, parallel = config.compilation_config, config.parallel_config
    is_compiled, has_graphs = bool(compilation.mode), "FULL" in getattr(compilation.cudagraph_mode, "name", "")
    is_whole = compilation.mode != CompilationMode.VLLM_COMPILE or compilation.use_inductor_graph_partition
    is_other = bool(torch.version.hip) or config.device_config.device_type not in ("cpu", "cuda")
    is_offloaded = is_offloading(config) or not isinstance(get_offloader(), NoopOffloader)
    eager = """'{"cudagraph_mode": "PIECEWISE"}' or --enforce-eager"""
    mode = "compilation mode 3, without use_inductor_graph_partition"
    reasons = {
        f"a CUDA graph of a whole model cannot capture streamed layers: add --compilation-config {eager}": has_graphs,
        f"vLLM divides models at layers only in {mode}: add --enforce-eager": is_compiled and is_whole,
        "only NVIDIA GPUs and the CPU are supported": is_other,
        "sleep frees memory that the ring writes to: remove --enable-sleep-mode": model_config.enable_sleep_mode,
        "experts are moved while the engine runs: remove --enable-eplb": parallel.enable_eplb,
        "two concurrent batches would wait for each other's layers: remove --enable-dbo": parallel.use_ubatching,
        "LoRA replaces the model's layers: remove --enable-lora": config.lora_config is not None,
        "vLLM's own offloader is enabled: remove --cpu-offload-gb and --offload-group-size": is_offloaded,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"overwire: model_loader_extra_config: offload: {reason}")
    if is_compiled:
        compilation.splitting_ops = [*dict.fromkeys((*(compilation.splitting_ops or ()), _OPERATOR))]
    return is_compiled or model_config.quantization is not None


def refuse_changes(what: str) -> None:
    """Raises ValueError if layers are streamed, because nothing may change or read the weights of such layers."""
    if any(handle.blocks for handle in _streams):
        raise ValueError(f"overwire: {what}: layers of the model are compressed: start vLLM without the offload option")

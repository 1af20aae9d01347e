"""Where the weights of a vLLM model are to land."""

from __future__ import annotations

from typing import Any

import torch

from ..shared.devices import device_or_host


def device_of(model: torch.nn.Module, load_config: Any) -> str:
    """Where tensors are to land: where the model's parameters are, but those that are
    offloaded; the host where the engine does not serve that device."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    engram = getattr(config, "engram_config", None)
    if getattr(engram, "cpu_offload", False):
        return "cpu"  # its tables can be larger than the device
    if load_config.device is not None:
        configured_device = torch.device(load_config.device)
    else:
        devices = [param.device for param in model.parameters() if param.device.type != "meta"]
        away = [device for device in devices if device.type != "cpu"]
        configured_device = (away or devices or [torch.device(config.device_config.device if config else "cpu")])[0]
    return device_or_host(configured_device)


def device_of_config(config: Any, load_config: Any) -> str:
    """The same for a model that is still to be made."""
    device = config.device_config.device if load_config.device is None else load_config.device
    return device_or_host(torch.device(device))

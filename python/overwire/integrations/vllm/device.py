"""Chooses the device for the weights of a vLLM model."""

from __future__ import annotations

from typing import Any

import torch

from ..devices import device_or_host


def device_of(model: torch.nn.Module, load_config: Any) -> str:
    """Returns the device of the parameters that are not offloaded, or "cpu" if overwire does not support the device."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    engram = getattr(config, "engram_config", None)
    if getattr(engram, "cpu_offload", False):
        return "cpu"  # the model's tables may be larger than the device memory
    if load_config.device is not None:
        configured_device = torch.device(load_config.device)
    else:
        devices = [param.device for param in model.parameters() if param.device.type != "meta"]
        away = [device for device in devices if device.type != "cpu"]
        configured_device = (away or devices or [torch.device(config.device_config.device if config else "cpu")])[0]
    return device_or_host(configured_device)


def device_of_config(config: Any, load_config: Any) -> str:
    """Returns the device for a model that has not been built yet."""
    device = config.device_config.device if load_config.device is None else load_config.device
    return device_or_host(torch.device(device))

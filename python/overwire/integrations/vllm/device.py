"""Where the weights of a vLLM model are to land, and the ranks that load them together."""

from __future__ import annotations

from typing import Any

import torch


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
    return _served_device(configured_device)


def likely_device(config: Any, load_config: Any) -> str:
    """The same for a model that is still to be made."""
    return _served_device(
        torch.device(config.device_config.device if load_config.device is None else load_config.device)
    )


def _served_device(asked: torch.device) -> str:
    if asked.type != "cuda" or torch.version.hip:
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if asked.index is None else asked.index}"


def tensor_ranks() -> Any:
    """The group of the ranks that divide tensors among them and load at the same time, on
    the host; None if there is one rank."""
    try:
        from vllm.distributed import parallel_state
    except ImportError:
        return None
    group = getattr(parallel_state, "_TP", None)
    return None if group is None or group.world_size == 1 else group.cpu_group

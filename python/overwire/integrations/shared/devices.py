"""Where tensors of an engine's model land, and the ranks that divide them."""

from __future__ import annotations

from typing import Any

import torch


def device_or_host(asked: torch.device) -> str:
    """A device as `overwire.load_file` takes it; the host for one that the engine does not serve."""
    if asked.type != "cuda" or torch.version.hip:
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if asked.index is None else asked.index}"


def tensor_parallel_group(parallel_state: Any, kind: str) -> Any:
    """The group of the ranks that divide tensors among them and load at the same time, by an engine's module of groups;
    None for one rank. kind: "cpu_group", on the host, or "device_group"."""
    group = getattr(parallel_state, "_TP", None)
    return None if group is None or group.world_size == 1 else getattr(group, kind)

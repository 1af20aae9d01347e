"""Finds the device for an inference engine's tensors, and the group of ranks that divide them."""

from __future__ import annotations

from typing import Any

import torch


def device_or_host(asked: torch.device) -> str:
    """Returns the device for `overwire.load_file`, or "cpu" if overwire does not support the device."""
    if asked.type != "cuda" or torch.version.hip:
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if asked.index is None else asked.index}"


def tensor_parallel_group(parallel_state: Any, kind: str) -> Any:
    """Returns the group of ranks that divide tensors and load at the same time, or None for one rank. parallel_state:
    the engine's module of groups. kind: "cpu_group" (on the host) or "device_group"."""
    group = getattr(parallel_state, "_TP", None)
    return None if group is None or group.world_size == 1 else getattr(group, kind)


def all_agree(parallel_state: Any, mine: bool, groups: tuple[str, ...] = ("_TP",)) -> bool:
    """Returns whether `mine` is true on all ranks of the groups. Collective. groups: names in parallel_state of groups
    that form a grid of ranks."""
    for name in groups:
        group = getattr(parallel_state, name, None)
        if group is not None and group.world_size > 1:
            every = torch.tensor([mine], dtype=torch.int32)
            torch.distributed.all_reduce(every, torch.distributed.ReduceOp.MIN, group.cpu_group)
            mine = bool(every.item())
    return mine

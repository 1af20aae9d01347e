"""Decides which tensors an expert-parallel rank needs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from re import Pattern

#: Matches the expert's number in a tensor's name.
DEFAULT_EXPERT_PATTERN: Pattern[str] = re.compile(r"\.experts\.(\d+)\.")

# The last part of the names of tensors that are dropped if their expert belongs to another rank. An expert's remaining
# tensors (scales, zero points, g_idx) are small, and code that computes a common scale needs them for all experts.
_WEIGHTS = frozenset({"weight", "weight_packed", "qweight", "bias"})


def owned_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """Returns the experts [first, end) of a rank. Experts are split into contiguous runs. If they do not divide evenly,
    each of the first ranks gets one more expert. Raises ValueError for invalid numbers."""
    if num_experts <= 0 or ep_size <= 0:
        raise ValueError(f"num_experts {num_experts} and ep_size {ep_size} must be positive")
    if not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank {ep_rank} out of range for ep_size {ep_size}")
    each, more = divmod(num_experts, ep_size)
    first = ep_rank * each + min(ep_rank, more)
    return first, first + each + (ep_rank < more)


def expert_parallel_filter(
    num_experts: int, ep_size: int, ep_rank: int, pattern: Pattern[str] = DEFAULT_EXPERT_PATTERN
) -> Callable[[str], bool]:
    """Returns a filter for names. The filter only rejects weights of other ranks' experts (names that end in weight,
    weight_packed, qweight or bias).

    It accepts scales, shared experts and routers, and expert numbers of num_experts and above.
    The original library also rejects the scales of other ranks' experts.
    """
    first, end = owned_expert_range(num_experts, ep_size, ep_rank)

    def keep(name: str) -> bool:
        match = pattern.search(name)
        expert = int(match.group(1)) if match and name.rpartition(".")[2] in _WEIGHTS else -1
        return not 0 <= expert < num_experts or first <= expert < end

    return keep


def expert_parallel_filter_from_env() -> Callable[[str], bool] | None:
    """Returns the filter configured by FASTSAFETENSORS_EP_SLICE=1, _EP_NUM_EXPERTS, _EP_SIZE and
    _EP_RANK, or None if it is off. The last two default to WORLD_SIZE and RANK."""
    env = os.environ
    if env.get("FASTSAFETENSORS_EP_SLICE", "0") != "1":
        return None

    def number(name: str, default: str) -> int:
        text = env.get(name, default)
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name}={text!r}: expected a number") from None

    count = number("FASTSAFETENSORS_EP_NUM_EXPERTS", "0")
    size = number("FASTSAFETENSORS_EP_SIZE", env.get("WORLD_SIZE", "1"))
    rank = number("FASTSAFETENSORS_EP_RANK", env.get("RANK", "0"))
    return expert_parallel_filter(count, size, rank)

"""Expert parallelism: which tensors a rank of it needs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from re import Pattern

#: Finds the expert's number.
DEFAULT_EXPERT_PATTERN: Pattern[str] = re.compile(r"\.experts\.(\d+)\.")

# What is left out of other ranks' experts. All else that bears a number
# (scales, zero points, g_idx) is small, and what computes a common scale needs
# those of every expert.
_WEIGHTS = frozenset({"weight", "weight_packed", "qweight", "bias"})


def owned_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """The experts [first, end) of a rank: num_experts split in even runs, the
    first ranks one more where it does not divide. ValueError for bad numbers."""
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
    """A filter of names: false only for the weights of other ranks' experts
    (names that end in weight, weight_packed, qweight or bias).

    Scales, shared experts and routers are kept, and so is a number beyond
    num_experts. The original drops other experts' scales.
    """
    first, end = owned_expert_range(num_experts, ep_size, ep_rank)

    def keep(name: str) -> bool:
        match = pattern.search(name)
        expert = int(match.group(1)) if match and name.rpartition(".")[2] in _WEIGHTS else -1
        return not 0 <= expert < num_experts or first <= expert < end

    return keep


def expert_parallel_filter_from_env() -> Callable[[str], bool] | None:
    """The filter that FASTSAFETENSORS_EP_SLICE=1, _EP_NUM_EXPERTS, _EP_SIZE and
    _EP_RANK ask for, the last two by default WORLD_SIZE and RANK; None without."""
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

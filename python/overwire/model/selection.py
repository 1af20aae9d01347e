"""Provides `experts`, the filter for a rank that loads only some of a model's experts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import ArgumentError
from .options import Placement, check_choice

# Matches `model.layers.3.mlp.experts.17.up_proj.weight`, but not `shared_experts.0`.
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.(?:.*\.)?([^.]+)$")

# The last part of the names of an expert's large tensors. An expert's other tensors (scales, zero points, g_idx,
# shapes) are small, and every rank loads them for all experts, because code that computes a common scale needs them.
_WEIGHTS = frozenset({"weight", "weight_packed", "qweight", "bias"})


class Experts:
    """The filter that `experts` returns. It is true for the tensor names that the rank needs."""

    def __init__(self, rank: int, world: int, count: int | None = None, placement: Placement = "linear") -> None:
        for what, value in (("rank", rank), ("world", world), ("count", count)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ArgumentError(f"overwire: experts: {what}: expected an int, got {value!r}")
        if not 0 <= rank < world:
            raise ArgumentError(f"overwire: experts: rank {rank} of a world of {world}: expected 0 <= rank < world")
        if count is not None and count < 1:
            raise ArgumentError(f"overwire: experts: count {count}: expected 1 or more")
        check_choice(placement, "experts: placement", Placement)
        self.rank, self.world, self.count, self.placement = rank, world, count, placement

    def __repr__(self) -> str:
        return f"experts({self.rank}, {self.world}, {self.count}, {self.placement!r})"

    def over(self, names: Iterable[str]) -> Experts:
        """Returns this filter if it has a count, otherwise a filter with the number of experts in the names."""
        if self.count is not None:
            return self
        numbers = [int(match[1]) for match in map(_EXPERT.search, names) if match]
        return Experts(self.rank, self.world, max(numbers, default=0) + 1, self.placement)

    def owner(self, expert: int) -> int:
        """Returns the rank that loads an expert."""
        if self.count is None:
            raise ArgumentError("overwire: experts: the number of experts is unknown: pass count=")
        if not 0 <= expert < self.count:
            raise ArgumentError(f"overwire: experts: expert {expert}: expected 0 <= expert < {self.count}")
        if self.placement == "round_robin":
            return expert % self.world
        each, more = divmod(self.count, self.world)
        if expert < more * (each + 1):
            return expert // (each + 1)
        return more + (expert - more * (each + 1)) // each

    def __call__(self, name: str) -> bool:
        match = _EXPERT.search(name)
        return match is None or match[2] not in _WEIGHTS or self.owner(int(match[1])) == self.rank


def experts(rank: int, world: int, count: int | None = None, placement: Placement = "linear") -> Experts:
    """Returns a `filter=` for expert parallelism. It selects the weights of this rank's experts, and every tensor that
    is not an expert's weight.

    The filter rejects only names that contain another rank's expert (`.experts.17.`) and end in `weight`,
    `weight_packed`, `qweight` or `bias`. Every rank loads scales, zero points and shared experts. Every rank also loads
    tensors that contain all experts (`.experts.gate_up_proj`); use `get_slice` to read a part of such a tensor.

    rank, world: the rank and the size of the expert-parallel group, 0 <= rank < world.
    count: the number of experts in a layer; None finds it in the names.
    placement: "linear" gives each rank consecutive experts. If the count does not divide evenly, each of the first
        ranks gets one more. "round_robin" gives expert i to rank i % world.

    If the model has an index.json, only shards with selected tensors are opened. Raises ArgumentError.
    """
    return Experts(rank, world, count, placement)

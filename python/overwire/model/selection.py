"""experts: the filter for a rank that has some of a model's experts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import ArgumentError
from .options import Placement, check_choice

# Matches `model.layers.3.mlp.experts.17.up_proj.weight`, but not `shared_experts.0`.
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.(?:.*\.)?([^.]+)$")

# The names of the tensors that hold an expert's bytes. All other tensors with its number (scales, zero points,
# g_idx, shapes) are small, and code that computes a common scale needs those of every expert.
_WEIGHTS = frozenset({"weight", "weight_packed", "qweight", "bias"})


class Experts:
    """The result of `experts`: returns true for the names that the rank needs."""

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
        """Returns the filter with the number of experts found in the names; itself if the number was given."""
        if self.count is not None:
            return self
        numbers = [int(match[1]) for match in map(_EXPERT.search, names) if match]
        return Experts(self.rank, self.world, max(numbers, default=0) + 1, self.placement)

    def owner(self, expert: int) -> int:
        """Returns the rank that has an expert."""
        if self.count is None:
            raise ArgumentError("overwire: experts: the number of experts is unknown: pass count=")
        if not 0 <= expert < self.count:
            raise ArgumentError(f"overwire: experts: expert {expert}: the number of experts is {self.count}")
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
    """Returns a `filter=` for expert parallelism: it selects the weights of this rank's experts,
    and everything that is not an expert's weight.

    It leaves out only names with an expert's number (`.experts.17.`) that end in `weight`, `weight_packed`,
    `qweight` or `bias`. Every rank keeps scales, zero points and shared experts, and tensors that hold
    all experts (`.experts.gate_up_proj`): cut those with `get_slice`.

    rank, world: of the expert-parallel group, 0 <= rank < world.
    count: the number of experts in a layer; None finds it in the names.
    placement: "linear" gives rank 0 the first experts, and the first ranks one more each if the number
        does not divide evenly; "round_robin" deals them out one by one.

    Of a model with an index.json, only shards with selected tensors are opened. Raises ArgumentError.
    """
    return Experts(rank, world, count, placement)

"""experts: the filter of a rank that holds some of a model's experts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import ArgumentError
from .options import Placement, check_choice

# `model.layers.3.mlp.experts.17.up_proj.weight`; `shared_experts.0` is none.
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.(?:.*\.)?([^.]+)$")

# The tensors that an expert's bytes are in. All else that bears its number
# (scales, zero points, g_idx, shapes) is small, and what computes a common
# scale needs those of every expert.
_WEIGHTS = frozenset({"weight", "weight_packed", "qweight", "bias"})


class Experts:
    """What `experts` returns: true for the names that the rank needs."""

    def __init__(self, rank: int, world: int, count: int | None = None, placement: Placement = "linear") -> None:
        for what, value in (("rank", rank), ("world", world), ("count", count)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ArgumentError(f"overwire: experts: {what}: expected an int, got {value!r}")
        if not 0 <= rank < world:
            raise ArgumentError(f"overwire: experts: rank {rank} of a world of {world}")
        if count is not None and count < 1:
            raise ArgumentError(f"overwire: experts: count {count}: expected at least 1")
        check_choice(placement, "experts: placement", Placement)
        self.rank, self.world, self.count, self.placement = rank, world, count, placement

    def __repr__(self) -> str:
        return f"experts({self.rank}, {self.world}, {self.count}, {self.placement!r})"

    def over(self, names: Iterable[str]) -> Experts:
        """The filter with the number of experts that the names tell; itself where that is given."""
        if self.count is not None:
            return self
        numbers = [int(match[1]) for match in map(_EXPERT.search, names) if match]
        return Experts(self.rank, self.world, max(numbers, default=0) + 1, self.placement)

    def owner(self, expert: int) -> int:
        """The rank that holds an expert."""
        if self.count is None:
            raise ArgumentError("overwire: experts: the number of experts is not known: give count=")
        if not 0 <= expert < self.count:
            raise ArgumentError(f"overwire: experts: expert {expert} of {self.count}")
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
    """A `filter=` for expert parallelism: the weights of this rank's experts,
    and everything that is not an expert's weight.

    Only names with an expert's number (`.experts.17.`) that end in `weight`,
    `weight_packed`, `qweight` or `bias` are ever left out. Scales, zero points
    and shared experts are kept on every rank, and so are tensors that hold all
    experts in one (`.experts.gate_up_proj`): cut those with `get_slice`.

    rank, world: of the expert-parallel group, 0 <= rank < world.
    count: how many experts a layer has; None: as many as the names tell.
    placement: "linear" gives rank 0 the first experts, and one more each to the
        first ranks where they do not divide; "round_robin" deals them out.

    Of a model with an index.json only the shards that hold a wanted tensor are
    opened. Raises ArgumentError.
    """
    return Experts(rank, world, count, placement)

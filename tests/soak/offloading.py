"""A loop over `offload`: blocks keep, change and replace their weights at random, and must give the same results as in
a model that is not offloaded."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import overwire as ow
import torch

from .outcomes import Failure, Round

# Objects that a block may keep. They share the memory of its weight.
_HOLDS: list[Callable[[Any], Any]] = [
    lambda w: w.t(),
    lambda w: w.data[1],
    lambda w: w.detach().numpy(),
    lambda w: torch.from_dlpack(w.detach()),
    lambda w: [w[2], {"w": w.view(-1)}],
]

# Functions that change a block's weight.
_CHANGES: list[Callable[[Any], Any]] = [
    lambda block: block.weight.mul_(1.25),
    lambda block: block.weight.data.copy_(block.weight.data.flip(0)),
    lambda block: block.weight.numpy().fill(0.5),
    lambda block: torch._foreach_add_([block.weight], 0.25),
    lambda block: setattr(block.weight, "data", block.weight.data * 0.5),
    lambda block: setattr(block, "weight", torch.nn.Parameter(block.weight * 0.75, False)),
]


class Block(torch.nn.Module):
    """A block with a list of acts, one of which each run performs."""

    def __init__(self, rng: random.Random, number: int) -> None:
        super().__init__()
        size = rng.choice((4, 16, 64))
        source = torch.Generator().manual_seed(rng.getrandbits(32))
        self.weight = torch.nn.Parameter(torch.randn(size, size, generator=source), False)
        self.register_buffer("bias", torch.randn(size, generator=source))
        self.acts = [rng.choice(("nothing",) * 4 + ("hold", "change", "drop", "fail")) for _ in range(24)]
        self.choices = [rng.randrange(1 << 16) for _ in self.acts]
        self.runs, self.kept = 0, None

    def forward(self, x: Any) -> Any:
        act, choice = self.acts[self.runs % len(self.acts)], self.choices[self.runs % len(self.acts)]
        self.runs += 1
        if act == "hold":
            self.kept = _HOLDS[choice % len(_HOLDS)](self.weight)
        elif act == "change":
            _CHANGES[choice % len(_CHANGES)](self)
        elif act == "drop":
            self.kept = None
        elif act == "fail":
            raise ArithmeticError
        return torch.tanh(x + self.weight.sum(0).mean() + self.bias.mean() + _sum_of(self.kept))


def _sum_of(kept: Any) -> float:
    if isinstance(kept, list):
        return float(kept[0].sum() + kept[1]["w"].sum())
    return 0.0 if kept is None else float(torch.as_tensor(kept).sum())


def _run(model: Any, rounds: int) -> list[Any]:
    results: list[Any] = []
    for _ in range(rounds):
        x = torch.ones(3)
        for number, block in enumerate(model.layers):
            try:
                x = block(x)
            except ArithmeticError:
                results.append((number, "failed"))
        results.append(x)
    return results


def escapes(round_: Round) -> None:
    """If blocks keep or change their weights in any way, outputs and weights match the resident model's, with any
    number of slots and after errors during a pass."""
    rng = round_.rng
    while round_.lasts():
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList(Block(rng, number) for number in range(rng.randint(2, 6)))
        resident, rounds = copy.deepcopy(model), rng.randint(1, 8)
        with torch.no_grad():
            expected = _run(resident, rounds)
            with ow.offload(model, "cpu", slots=rng.randint(1, 3)):
                got = _run(model, rounds)
        _compare(got, expected, "outputs")
        _compare(list(model.state_dict().values()), list(resident.state_dict().values()), "weights")
        round_.count("passes", rounds)


def _compare(got: list[Any], expected: list[Any], what: str) -> None:
    same = all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(got, expected, strict=True))
    if not same:
        raise Failure("wrong bytes", f"{what} differ: {got} instead of {expected}")

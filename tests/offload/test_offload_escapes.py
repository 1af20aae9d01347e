"""Tests blocks that keep weights after their run, or change them. All values must be as in the resident model."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import overwire as ow
import pytest
import torch
from test_offload import slots_are_poisoned  # noqa: F401


class Square(torch.nn.Module):
    """A block that applies `act` to itself before its first run and keeps the result."""

    def __init__(self, seed: int, act: Callable[[Any], Any]) -> None:
        super().__init__()
        values = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(seed))
        self.weight, self.other = (torch.nn.Parameter(value, requires_grad=False) for value in values)
        self.act, self.kept, self.runs = act, None, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.kept = self.act(self) if self.kept is None else self.kept
        return torch.tanh(x @ self.weight.t() + x @ self.other + self.seen())

    def seen(self) -> float:
        kept = self.kept.values if isinstance(self.kept, Box) else self.kept
        kept = next(iter(kept), None) if isinstance(kept, frozenset) else kept
        if isinstance(kept, torch.UntypedStorage):
            return float(bytes(kept[self.weight.storage_offset() * 4 : self.weight.storage_offset() * 4 + 1])[0])
        return 0.0 if kept is None else float(torch.as_tensor(kept).sum())


@dataclasses.dataclass
class Box:
    values: Any


HOLDING: dict[str, Callable[[Square], Any]] = {
    "a view": lambda block: block.weight.t(),
    "in a dataclass": lambda block: Box(block.weight[1]),
    "in a set": lambda block: frozenset([block.weight[1]]),
    "data": lambda block: block.weight.data,
    "numpy": lambda block: block.weight.numpy(),
    "numpy of detach": lambda block: block.weight.detach().numpy()[2],
    "DLPack": lambda block: torch.from_dlpack(block.weight),
    "other bits": lambda block: block.weight.view(torch.int32),
    "the storage": lambda block: block.weight.untyped_storage(),
}


def squares(act: Callable[[Any], Any]) -> torch.nn.Module:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(Square(seed, act) for seed in range(4))
    return model


@torch.no_grad()
def passes(model: torch.nn.Module, act: Callable[[int, Any], None] = lambda number, block: None) -> list[torch.Tensor]:
    """Returns the outputs of three passes. After each pass, calls act(pass, block) for each block."""
    out, x = [], torch.ones(2, 8)
    for number in range(3):
        for block in model.layers:
            x = block(x)
        out.append(x)
        for block in model.layers:
            act(number, block)
    return out


def assert_as_resident(
    act: Callable[[Any], Any], slots: int, between: Callable[[int, Any], None] = lambda *_: None
) -> None:
    """Asserts that outputs and final weights match the resident model's."""
    model, resident = squares(act), squares(act)
    expected = passes(resident, between)
    with ow.offload(model, "cpu", slots=slots):
        assert all(map(torch.equal, passes(model, between), expected))
    for ours, theirs in zip(model.parameters(), resident.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("how", HOLDING)
def test_memory_that_a_block_keeps_stays_right(how: str, slots: int) -> None:
    """If a block keeps memory of its weights after a run, in whatever form, the values in it stay right. The block
    stays on the device exactly as long as it keeps this memory."""
    assert_as_resident(HOLDING[how], slots)
    model = squares(HOLDING[how])
    with ow.offload(model, "cpu", slots=slots), torch.no_grad():
        for block in model.layers:
            block(torch.ones(2, 8))
        assert "offloaded" not in repr(model.layers[0].weight)
        for block in model.layers:
            block.act, block.kept = lambda block: 0, None
        for block in model.layers:
            block(torch.ones(2, 8))
        assert all("offloaded" in repr(weight) for weight in model.parameters())


def write_between(number: int, block: Square) -> None:
    """After the first pass, writes to the memory that a block keeps. After the second, lets the block drop it."""
    if number == 0:
        torch.as_tensor(block.kept)[..., 1] = 3
    if number == 1:
        block.kept, block.act = None, lambda block: 0


@pytest.mark.parametrize("how", ["a view", "data", "numpy", "DLPack"])
def test_writes_to_kept_memory_reach_the_weights(how: str) -> None:
    """Writes to memory that a block keeps change its weights as in the resident model, even if torch does not count the
    writes. The changes remain after the memory is dropped."""
    assert_as_resident(HOLDING[how], 2, write_between)


CHANGES: dict[str, Callable[[Square], Any]] = {
    "mul_": lambda block: block.weight.mul_(1.5),
    "a view": lambda block: block.weight.t()[1].fill_(2),
    "foreach": lambda block: torch._foreach_mul_([block.weight, block.other], 1.5),
    "data": lambda block: block.weight.data.mul_(1.5),
    "rows of data": lambda block: block.weight.data.copy_(block.weight.data.flip(0)),
    "other data": lambda block: setattr(block.weight, "data", block.weight.data * 1.5),
    "the same data transposed": lambda block: setattr(block.weight, "data", block.weight.data.t()),
    "the same data negated": lambda block: setattr(block.weight, "data", torch._neg_view(block.weight.data)),
    "numpy": lambda block: block.weight.numpy().fill(3),
    "set_": lambda block: block.weight.set_(block.weight * 1.5),
    "another parameter": lambda block: setattr(block, "weight", torch.nn.Parameter(block.weight * 1.5, False)),
    "the third time": lambda block: block.runs == 3 and block.weight.data.mul_(1.5),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("inference", [False, True])
def test_weights_that_change_in_forward_stay_changed(how: str, inference: bool) -> None:
    """Outputs and weights match the resident model's, even for a model that was made in inference mode, and after an
    error."""

    def change(block: Square) -> None:
        CHANGES[how](block)

    with torch.inference_mode(inference):
        assert_as_resident(change, 2)
    model, resident = squares(change), squares(change)

    def fail(*_: Any) -> None:
        raise ValueError

    with ow.offload(model, "cpu"):
        for one in (model, resident):
            hook = one.layers[1].register_forward_hook(fail)
            with pytest.raises(ValueError):
                passes(one)
            hook.remove()
        assert all(map(torch.equal, passes(model), passes(resident)))


@pytest.mark.parametrize("use", [torch.nn.functional.linear, torch.matmul, lambda x, w: x * w[0]], ids=["linear", "matmul", "row"])
def test_gradients_of_runs_within_enable_grad(use: Callable[..., torch.Tensor]) -> None:
    """Weights that autograd has saved are right in a backward pass long after the block ran."""

    def run(model: torch.nn.Module) -> list[torch.Tensor]:
        inputs: list[torch.Tensor] = []

        def act(block: Square) -> Any:
            with torch.enable_grad():
                inputs.append(torch.ones(2, 8, requires_grad=True))
                return torch.tanh(use(inputs[-1], block.weight)) @ block.other

        for block in model.layers:
            block.act = act
        passes(model)
        return [torch.autograd.grad(block.kept.sum(), one)[0] for block, one in zip(model.layers, inputs, strict=True)]

    model = squares(lambda block: None)
    expected = run(copy.deepcopy(model))
    with ow.offload(model, "cpu"):
        assert all(map(torch.equal, run(model), expected))

"""A step of group_worker.py in which ranks share reads while the model's own loader is recorded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import group_blocks
import overwire as ow
import pytest
import torch
import torch.distributed as dist
from group_blocks import block_loads, expected_of
from overwire.distributed import shard_range
from overwire.integrations.load_plan import record_copies, run_plan
from overwire.integrations.load_plan.run_plan import SliceLoad, load_by_slices

# At most this many bytes are loaded as separate rows.
MOST = 1 << 20


class Model(torch.nn.Module):
    """A model that loads its rank's rows of most tensors, and its rank's columns of every third tensor. Every fifth
    tensor is transposed, so it is not loaded as a block."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.want: dict[str, torch.Tensor] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.places: dict[str, int] = {}
        for at, (name, tensor) in enumerate(sorted(ow.load_file(expected_of(path), mmap=False).items())):
            self.places[name] = at
            if tensor.dtype == torch.float4_e2m1fn_x2:
                continue
            want = self.part(at, tensor)
            self.want[name], self.held[name] = (
                want.clone(), torch.empty(want.shape, dtype=want.dtype, device=group_blocks.DEVICE),
            )
        self.halfway: Callable[[torch.Tensor], Any] = lambda _: None

    @staticmethod
    def part(at: int, tensor: torch.Tensor) -> torch.Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        if not tensor.dim():
            return tensor
        dim = 1 if at % 3 == 0 and tensor.dim() > 1 else 0
        low, high = shard_range(tensor.shape[dim], size, rank)
        mine = tensor.narrow(dim, low, high - low)
        return mine.t() if at % 5 == 0 and tensor.dim() == 2 else mine

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            if name in self.held:
                self.held[name].copy_(self.part(self.places[name], tensor))
                if self.places[name] == len(self.places) // 2:
                    self.halfway(tensor)
        return set(self.held)

    def compare(self) -> None:
        for name, want in self.want.items():
            mine = self.held[name].cpu().contiguous().view(-1).view(torch.uint8)
            assert torch.equal(mine, want.contiguous().view(-1).view(torch.uint8)), name


def load(path: Path, halfway: Callable[[torch.Tensor], Any] | None = None) -> tuple[bool, int | None, list[str]]:
    """Returns whether the load used slices, how many bytes of shared blocks this rank has read, and the log."""
    model, said, read = Model(path), [], []
    model.halfway = halfway or model.halfway
    shared = run_plan.land_together

    def noted(together: Any, *more: Any) -> bool:
        done = shared(together, *more)
        read.append(together.read)
        return done

    def run(attempt: SliceLoad) -> None:
        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            yield from attempt.next_stand_ins() or attempt.open_source(str(path), group_blocks.DEVICE, {})
            attempt.load_recorded()

        with attempt.replace_loader(model, weights, dist.group.WORLD, True):
            model.load_weights(weights())

    log = logging.getLogger("recorded")
    log.setLevel(logging.INFO)
    log.handlers = [handler := logging.Handler()]
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    run_plan.land_together = noted
    try:
        sliced = load_by_slices(run, MOST, log)
    finally:
        run_plan.land_together = shared
    if sliced:
        model.compare()
    return sliced, read[0] if read else None, said


def recorded(folder: Path) -> None:
    """Together, ranks read each stored byte once, even in the first load. If a rank cannot continue, the others do not
    wait for it. Damage ends the load on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    block_loads.SHARE = (1 << 20) + 4096
    for file in ("plain.safetensors", "compressed.safetensors"):
        sliced, mine, said = load(folder / file)
        read: list[Any] = [None] * size
        dist.all_gather_object(read, mine)
        stored = (folder / file).stat().st_size
        assert sliced and None not in read, said
        assert sum(read) <= 1.05 * stored, (file, read, stored)
    run_plan.APART, record_copies.EARLY, apart = 1, 1, (run_plan.APART, record_copies.EARLY)
    sliced, mine, said = load(folder / file)  # parts of rows are read while the loader runs
    assert sliced and mine is not None and not any("; 0 slices were loaded while it ran" in line for line in said), said
    run_plan.APART, record_copies.EARLY = apart
    sliced, mine, said = load(folder / file, (lambda tensor: tensor.sum()) if rank == 1 else None)
    assert (sliced, mine) == (rank != 1, None), said
    assert any(("rank 1 has no plan" if rank != 1 else "cannot be loaded by slices") in line for line in said), said

    def fails(_: torch.Tensor) -> None:
        raise KeyError("the model's own")

    sliced, _, said = load(folder / file, fails if rank == 1 else None)  # the plain loader raises it
    assert sliced == (rank != 1), said
    with pytest.raises(ow.CorruptError, match="checksum"):
        load(folder / "damaged.safetensors")

"""The ranks of tests/groups/test_async_checkpoints.py, forks of one process that has imported torch: a folder, the
file that they meet through, and what they do are on its command line."""

from __future__ import annotations

import datetime
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import overwire as ow
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_worker import equal, kinds, sharded, trained
from group_worker import forked
from overwire.checkpoints import CheckpointReader, CheckpointStager, CheckpointWriter
from torch.distributed.checkpoint.state_dict import get_state_dict


def train(model: Any, optimizer: Any, steps: int) -> None:
    """What meets the messages of a save that uses training's group."""
    for _ in range(steps):
        model(torch.ones(4, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def documented(folder: Path, group: Any = None, own: Any = None) -> None:
    """The program of docs/checkpoints.md, next to training."""
    model, optimizer = trained(0, 1)
    writer, stager, saving = CheckpointWriter(process_group=own), CheckpointStager(), None
    for step in range(3):
        weights, moments = get_state_dict(model, optimizer)
        if saving is not None:
            saving.result()
        saving = dcp.async_save(
            {"model": weights, "optimizer": moments, "step": step}, checkpoint_id=str(folder / f"step-{step}"),
            storage_writer=writer, async_stager=stager, process_group=group,
        )  # fmt: skip
        want = {name: tensor.full_tensor().clone() for name, tensor in weights.items()}
        train(model, optimizer, 8)
    saving.result()
    stager.close()
    dist.barrier()
    got = ow.load_file(folder / "step-2")
    assert got.keys() == want.keys() and all(torch.equal(got[name], tensor) for name, tensor in want.items())
    state = {"model": get_state_dict(model, optimizer)[0], "step": 0}
    dcp.load(state, storage_reader=CheckpointReader(folder / "step-2"))
    assert state["step"] == 2 and all(torch.equal(state["model"][name].full_tensor(), want[name]) for name in want)


def given(folder: Path) -> None:
    """torch has a group for saves, or the writer has it."""
    group = dist.new_group(backend="gloo")
    for number, (one, two) in enumerate([(group, None), (None, group)]):
        documented(folder / str(number), one, two)


def several(folder: Path) -> None:
    """Two writers at a time, many times, in either order of the ranks' threads; each has a group of its own, and later
    saves use these again."""
    model, optimizer = trained(0, 1)
    before = len(dist.distributed_c10d._world.pg_map)
    writers = [CheckpointWriter(folder / "one"), CheckpointWriter(folder / "two")]
    stagers = [CheckpointStager(), CheckpointStager()]
    for _ in range(3):
        order = [0, 1] if dist.get_rank() else [1, 0]
        saves = [
            dcp.async_save(sharded(True), storage_writer=writers[at], async_stager=stagers[at]) for at in order
        ]
        train(model, optimizer, 4)
        for saving in saves:
            saving.result()
        dist.barrier()
    for name, tensor in kinds().items():
        assert all(equal(ow.load_file(folder / path)[name], tensor) for path in ("one", "two")), name
    assert len(dist.distributed_c10d._world.pg_map) <= before + 4


def subset(folder: Path) -> None:
    """A group of some ranks saves, at once and in the background, while the others train; and one rank by itself."""
    group = dist.new_group([0, 2], backend="gloo")
    if dist.get_rank() != 1:
        state = {f"of-{dist.get_rank()}": torch.full((999,), float(dist.get_rank())), "both": torch.arange(5)}
        dcp.save(state, storage_writer=CheckpointWriter(folder / "now"), process_group=group)
        writer = CheckpointWriter(folder / "later")
        dcp.async_save(state, storage_writer=writer, async_stager=CheckpointStager(), process_group=group).result()
        dist.barrier(group)
        for path in ("now", "later"):
            got = ow.load_file(folder / path)
            assert set(got) == {"of-0", "of-2", "both"} and got["of-2"].sum() == 1998
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"x": torch.ones(9)}, storage_writer=CheckpointWriter(folder / "alone"), no_dist=True)
        assert ow.load_file(folder / "alone")["x"].sum() == 9


if __name__ == "__main__":
    folder, size = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    rank = forked(size)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / sys.argv[2]), size)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=90), store=store)
    for step in sys.argv[3:]:
        globals()[step](folder / step)
        dist.barrier()
        print(f"done {step}", flush=True)
    dist.destroy_process_group()

"""Runs the ranks of tests/groups/test_async_checkpoints.py as forks of one process that has imported torch. The
arguments are a folder, the file through which the ranks connect, and the steps."""

from __future__ import annotations

import datetime
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_worker import equal, kinds, sharded, stored, trained
from group_worker import forked
from overwire import checkpoints
from overwire.checkpoints import CheckpointReader, CheckpointStager, CheckpointWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict


def train(model: Any, optimizer: Any, steps: int) -> None:
    """Trains a model. If a save used the group of training, their messages would be mixed up."""
    for _ in range(steps):
        model(torch.ones(4, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def documented(folder: Path, group: Any = None, own: Any = None) -> None:
    """Runs the program of docs/checkpoints.md while training continues."""
    model, optimizer = trained(0, 1)
    writer, stager, saving = CheckpointWriter(process_group=own), CheckpointStager(), None
    for step in range(2):
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
    got = ow.load_file(folder / "step-1")
    assert got.keys() == want.keys() and all(torch.equal(got[name], tensor) for name, tensor in want.items())
    state = {"model": get_state_dict(model, optimizer)[0], "step": 0}
    dcp.load(state, storage_reader=CheckpointReader(folder / "step-1"))
    assert state["step"] == 1 and all(torch.equal(state["model"][name].full_tensor(), want[name]) for name in want)


def given(folder: Path) -> None:
    """A separate group for saves is passed once to torch and once to the writer."""
    group = dist.new_group(backend="gloo")
    for number, (one, two) in enumerate([(group, None), (None, group)]):
        documented(folder / str(number), one, two)


def several(folder: Path) -> None:
    """Two writers save at the same time, many times, and the ranks start these saves in different orders. Each writer
    has its own group, which its later saves reuse."""
    model, optimizer = trained(0, 1)
    before = groups()
    writers = [CheckpointWriter(folder / "one"), CheckpointWriter(folder / "two")]
    stagers = [CheckpointStager(), CheckpointStager()]
    for _ in range(2):
        order = [0, 1] if dist.get_rank() else [1, 0]
        saves = [
            dcp.async_save(sharded(True), storage_writer=writers[at], async_stager=stagers[at]) for at in order
        ]
        train(model, optimizer, 4)
        for saving in saves:
            saving.result()
        dist.barrier()
    for name, tensor in kinds().items():
        assert all(equal(ow.load_file(folder / path)[name], stored(tensor)) for path in ("one", "two")), name
    assert groups() <= before + 2


def late(folder: Path) -> None:
    """If one rank never begins a save, the saves of the other ranks time out. The next save to that path works."""
    writer, state = CheckpointWriter(folder), {"x": torch.ones(9)}
    limit, dist.distributed_c10d.default_pg_timeout = (
        dist.distributed_c10d.default_pg_timeout, datetime.timedelta(seconds=0.2),
    )  # fmt: skip
    if dist.get_rank():
        with pytest.raises(ow.IOFailure, match="1 of 2 ranks have begun the save of"):
            dcp.async_save(state, storage_writer=writer).result()
    dist.distributed_c10d.default_pg_timeout = limit
    dist.barrier()
    dcp.async_save(state, storage_writer=writer).result()
    assert ow.load_file(folder)["x"].sum() == 9


def failing(folder: Path) -> None:
    """A save that fails on one rank leaves no additional or unusable group. A call that does not come from torch's save
    functions gets an error."""
    writer, state = CheckpointWriter(folder), {"x": torch.ones(9)}
    writer._write_step = None if dist.get_rank() == 0 else writer._write_step  # type: ignore[method-assign,assignment]
    before = groups()
    for _ in range(2):
        with pytest.raises(CheckpointException):
            dcp.async_save(state, storage_writer=writer).result()
    del writer._write_step
    dcp.async_save(state, storage_writer=writer).result()
    assert groups() <= before + 1 and ow.load_file(folder)["x"].sum() == 9
    finder, checkpoints.groups._wrapper_of_save = checkpoints.groups._wrapper_of_save, lambda: None
    with pytest.raises(CheckpointException, match="pass a process_group= that training does not use"):
        dcp.async_save(state, storage_writer=writer).result()
    checkpoints.groups._wrapper_of_save = finder


def destroyed(folder: Path) -> None:
    """If the groups are destroyed while a rank waits for others to begin a save, the rank raises an error at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    if rank == 0:
        has_begun, meet = threading.Event(), checkpoints.groups._meet_at_store

        def begin(*args: Any) -> Any:
            has_begun.set()
            return meet(*args)

        checkpoints.groups._meet_at_store = begin
        saving = dcp.async_save({"x": torch.ones(9)}, storage_writer=CheckpointWriter(folder / "never"))
        assert has_begun.wait(60)
        dist.destroy_process_group()
        with pytest.raises(ow.IOFailure, match=r"destroy_process_group\(\) was called during this save"):
            saving.result(60)
        checkpoints.groups._meet_at_store = meet
    else:
        dist.destroy_process_group()
    assert not (folder / "never").exists()
    connect(f"{folder}-again", rank, size)


def subset(folder: Path) -> None:
    """Two of three ranks save as a group, in the foreground and in the background, while the third rank trains or saves
    by itself."""
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


def connect(store: str, rank: int, size: int) -> None:
    limit = datetime.timedelta(seconds=90)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=limit, store=dist.FileStore(store, size))


if __name__ == "__main__":
    folder, size = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    rank = forked(size)
    torch.set_num_threads(1)
    connect(str(folder / sys.argv[2]), rank, size)
    for step in sys.argv[3:]:
        globals()[step](folder / step)
        dist.barrier()
        print(f"done {step}", flush=True)
    dist.destroy_process_group()
    assert not any(one.group() for one in checkpoints.groups._free_groups.values())

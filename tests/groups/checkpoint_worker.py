"""Runs the ranks of tests/groups/test_checkpoints.py as forks of one process that has imported torch. The arguments are
a folder, the file through which the ranks connect, and the steps."""

from __future__ import annotations

import datetime
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from group_worker import forked
from overwire.checkpoints import CheckpointReader, CheckpointStager, CheckpointWriter, exchange
from overwire.checkpoints.schedule import bytes_of, is_bytes
from test_checkpoint_saves import make_old
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def trained(seed: int, steps: int) -> tuple[Any, Any]:
    """Returns an FSDP2 model with odd sizes, and its optimizer. One layer has fewer rows than there are ranks."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(33, 257), torch.nn.Linear(257, 129, dtype=torch.float32), torch.nn.Linear(129, 1)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(steps):
        torch.manual_seed(seed)
        model(torch.randn(4, 33)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: Any, optimizer: Any, **more: Any) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, **more}


def whole(value: Any) -> Any:
    """Returns a copy of the state in which every DTensor is gathered."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    return [whole(one) for one in value] if isinstance(value, (list, tuple)) else value


def same(got: Any, want: Any, name: str = "") -> None:
    if isinstance(want, dict):
        assert set(got) == set(want), (name, set(got) ^ set(want))
        for key in want:
            same(got[key], want[key], f"{name}.{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            same(one, other, f"{name}.{number}")
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and torch.equal(got, want), name
    else:
        assert got == want, (name, got, want)


def equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, two)]
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(*raw)


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as checkpoint files store it."""
    return bytes_of(tensor) if is_bytes(tensor.dtype) else tensor


def kinds() -> dict[str, torch.Tensor]:
    """Returns tensors of all kinds and shardings that a checkpoint may contain."""
    torch.manual_seed(5)
    return {
        "rows": torch.randn(7, 5),
        "columns": torch.randn(5, 9).bfloat16(),
        "deep": torch.randn(3, 4, 7, 2).half(),
        "few": torch.randn(1, 3),
        "bytes8": torch.randint(0, 255, (6, 4), dtype=torch.uint8).view(torch.float8_e4m3fn),
        "flags": torch.arange(20).reshape(10, 2) % 3 == 0,
        "copies": torch.randn(4, 4),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "pairs": torch.randint(0, 255, (6, 8), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "pair columns": torch.randint(0, 255, (4, 6), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "wide": torch.randn(5, 3, dtype=torch.complex128),
        "wide columns": torch.randn(2, 6, dtype=torch.complex128),
        "wide deep": torch.randn(2, 3, 5, dtype=torch.complex128),
    }


SHARDS = {"pairs": 0, "pair columns": 1, "wide": 0, "wide columns": 1, "wide deep": 2, "rows": 0, "columns": 1, "deep": 2, "few": 0, "bytes8": 0, "flags": 0, "empty": 0}


def sharded(fill: bool) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = kinds() if fill else {name: torch.zeros_like(t) for name, t in kinds().items()}
    # There is no source rank, because gloo cannot send every dtype.
    return {
        name: distribute_tensor(t, mesh, [Shard(SHARDS[name]) if name in SHARDS else Replicate()], src_data_rank=None)
        for name, t in tensors.items()
    }


def save(folder: Path) -> None:
    """Saves a training state in files of at most 64 KiB, and DTensors of every kind."""
    model, optimizer = trained(1, 3)
    state = state_of(model, optimizer, step=3, rng=torch.get_rng_state(), note={"lr": 0.5, "tags": ["a", "b"]})
    want = whole(state)
    dcp.save(state, storage_writer=CheckpointWriter(folder / "training", max_shard_size="64KiB"))
    dcp.save(sharded(True), storage_writer=CheckpointWriter(folder / "kinds", compress=False))
    if dist.get_rank() == 0:
        torch.save(want, folder / "want.pt")


def load(folder: Path) -> None:
    """Loads both checkpoints into another state, on another number of ranks."""
    want = torch.load(folder / "want.pt", weights_only=True)
    model, optimizer = trained(7, 1)
    state = state_of(model, optimizer, step=0, rng=torch.zeros_like(want["rng"]), note={"lr": 0.0, "tags": ["", ""]})
    dcp.load(state, storage_reader=CheckpointReader(folder / "training"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    same(whole(state_of(model, optimizer, step=state["step"], rng=state["rng"], note=state["note"])), want)
    blocks = sharded(False)
    dcp.load(blocks, storage_reader=CheckpointReader(folder / "kinds"))
    for name, tensor in sharded(True).items():
        assert equal(blocks[name].to_local(), tensor.to_local()), name


def background(folder: Path) -> None:
    """Each async_save writes the staged values, even if the tensors change during the save."""
    stager = CheckpointStager()
    state = sharded(True)
    writer = CheckpointWriter()
    for number in range(3):
        saving = dcp.async_save(state, checkpoint_id=str(folder / f"background-{number}"), storage_writer=writer, async_stager=stager)
        for tensor in state.values():
            tensor.to_local().view(-1).view(torch.uint8).bitwise_not_()
        saving.result()
        dist.barrier()
    stager.close()
    first, last = (ow.load_file(folder / f"background-{number}") for number in (0, 2))
    for name, tensor in kinds().items():
        assert equal(first[name], stored(tensor)) and equal(last[name], stored(tensor)), name


def mapped(folder: Path) -> None:
    """Ranks map each other's memory and copy staged blocks from it. A rank that cannot map memory gets the blocks by
    messages."""
    stager, operations = CheckpointStager(), []
    batch, map_buffers = dist.batch_isend_irecv, exchange.map_buffers

    def counted(some: list[Any]) -> Any:
        operations.extend(some)
        return batch(some)

    dist.batch_isend_irecv = counted
    for number, alone in enumerate([None, 0, 1]):
        exchange.map_buffers = (lambda _: None) if dist.get_rank() == alone else map_buffers
        operations.clear()
        writer, at = CheckpointWriter(max_shard_size=300), str(folder / f"mapped-{number}")
        dcp.async_save(sharded(True), checkpoint_id=at, storage_writer=writer, async_stager=stager).result()
        assert bool(operations) == (alone is not None)
        dist.barrier()
        for name, tensor in ow.load_file(at).items():
            assert equal(tensor, stored(kinds()[name])), name
    dist.batch_isend_irecv, exchange.map_buffers = batch, map_buffers
    stager.close()


def cached(folder: Path) -> None:
    """Saves are right with a planner that caches its plan, and after the state of one rank has changed."""
    writer = CheckpointWriter()
    for number in range(4):
        state: dict[str, Any] = dict(sharded(True))
        if number == 3 and dist.get_rank() == 1:
            state["more"] = torch.arange(5)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=str(folder / f"cached-{number}"), storage_writer=writer, planner=planner)
        assert set(ow.load_file(folder / f"cached-{number}")) == set(kinds()) | ({"more"} if number == 3 else set())


def short(folder: Path) -> None:
    """If one rank's disk is full, every rank gets an error, the old checkpoint stays, and no other file is left."""
    at = folder / "short"
    dcp.save(sharded(True), storage_writer=CheckpointWriter(at))
    before = {path.name: path.read_bytes() for path in at.iterdir() if path.is_file()}
    big = {
        f"b{n}": distribute_tensor(torch.randn(1 << 18), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        for n in range(4)
    }
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, old[1]))
    with pytest.raises(CheckpointException) as caught:
        dcp.save(big, storage_writer=CheckpointWriter(at, max_shard_size="1MiB"))
    resource.setrlimit(resource.RLIMIT_FSIZE, old)
    errors = {rank: wrapped[0] for rank, wrapped in caught.value.failures.items()}
    assert isinstance(errors[1], ow.IOFailure) and isinstance(errors[0], ow.CancelledError), errors
    dist.barrier()
    assert {path.name: path.read_bytes() for path in at.iterdir() if path.is_file()} == before
    assert not list(folder.glob(".short*")), list(folder.iterdir())
    dist.barrier()
    dcp.save(big, storage_writer=CheckpointWriter(at))
    assert set(ow.load_file(at)) == set(big)


class _Failing(DefaultSavePlanner):
    after = 0  # number of calls that succeed

    def resolve_data(self, item: Any) -> Any:
        self.after -= 1
        if self.after < 0 and dist.get_rank() == 1:
            raise MemoryError("none is left")
        return super().resolve_data(item)


def failing(folder: Path) -> None:
    """If a rank cannot provide its blocks, before or during a round of the exchange, every rank gets an error. The
    ranks stay in step, and the next save succeeds."""
    for after in (0, 1, 7):
        planner = _Failing()
        planner.after = after
        with pytest.raises(CheckpointException) as caught:
            dcp.save(sharded(True), storage_writer=CheckpointWriter(folder / "failing"), planner=planner)
        errors = {rank: wrapped[0] for rank, wrapped in caught.value.failures.items()}
        assert isinstance(errors[1], MemoryError) and isinstance(errors[0], ow.CancelledError), errors
    dcp.save(sharded(True), storage_writer=CheckpointWriter(folder / "failing"))
    assert set(ow.load_file(folder / "failing")) == set(kinds())


class _Interrupted(DefaultSavePlanner):
    """A planner that sends Ctrl-C before a rank's first file, or between its files."""

    ranks: tuple[int, ...] = ()
    after = 0  # number of calls that succeed

    def resolve_data(self, item: Any) -> Any:
        self.after -= 1
        if self.after == -1 and dist.get_rank() in self.ranks:
            os.kill(os.getpid(), signal.SIGINT)
        return super().resolve_data(item)


def interrupted(folder: Path) -> None:
    """Ctrl-C during dcp.save, on one rank or on all, ends the save on every rank. Only the old checkpoint remains."""
    at = folder / "interrupted"
    dcp.save(sharded(True), storage_writer=CheckpointWriter(at))
    before = {path.name: path.read_bytes() for path in at.iterdir() if path.is_file()}
    for ranks in ((1,), (0,), (0, 1)):
        for after in (0, 3):
            planner = _Interrupted()
            planner.ranks, planner.after = ranks, after
            with pytest.raises(CheckpointException) as caught:
                dcp.save(sharded(False), storage_writer=CheckpointWriter(at, max_shard_size=300), planner=planner)
            errors = {rank: wrapped[0] for rank, wrapped in caught.value.failures.items()}
            assert [rank for rank in sorted(errors) if isinstance(errors[rank], KeyboardInterrupt)] == list(ranks), (
                errors
            )
            dist.barrier()
            assert {path.name: path.read_bytes() for path in at.iterdir() if path.is_file()} == before
            assert not list(folder.glob(".interrupted*")), list(folder.iterdir())
            dist.barrier()
    dcp.save(sharded(True), storage_writer=CheckpointWriter(at))
    assert set(ow.load_file(at)) == set(kinds())


class _Pressing:
    """A value that sends Ctrl-C when it is staged."""

    def __deepcopy__(self, memo: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return self


class _Waiting(DefaultSavePlanner):
    go = threading.Event()

    def resolve_data(self, item: Any) -> Any:
        self.go.wait(60)
        return super().resolve_data(item)


def pressed(folder: Path) -> None:
    """Ctrl-C while dcp.async_save stages tensors prevents the save. After that, Ctrl-C only ends the wait, and the
    checkpoint becomes complete."""
    at, stager = folder / "pressed", CheckpointStager()
    with pytest.raises(KeyboardInterrupt):
        dcp.async_save({**sharded(False), "key": _Pressing()}, storage_writer=CheckpointWriter(at), async_stager=stager)
    assert not at.exists() and not list(folder.glob(".pressed*"))
    saving = dcp.async_save(sharded(True), storage_writer=CheckpointWriter(at), async_stager=stager, planner=_Waiting())
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        saving.result()
    _Waiting.go.set()
    saving.result()
    dist.barrier()
    for name, tensor in ow.load_file(at).items():
        assert equal(tensor, stored(kinds()[name])), name
    stager.close()


class _Dying(DefaultSavePlanner):
    def resolve_data(self, item: Any) -> Any:
        if item.index.fqn == "c":
            os._exit(0)
        return super().resolve_data(item)


def dying(folder: Path) -> None:
    """If a rank dies during a save, the other rank gets an error, and the old checkpoint stays."""
    at = folder / "dying"
    dcp.save(sharded(True), storage_writer=CheckpointWriter(at))
    state = {name: torch.randn(9) for name in "abc"} if dist.get_rank() == 1 else {}
    print("done dying", flush=True)
    with pytest.raises(Exception):  # noqa: B017, PT011 - torch's error for a closed connection
        dcp.save(state, storage_writer=CheckpointWriter(at), planner=_Dying())
    assert set(ow.load_file(at)) == set(kinds()) and set(
        CheckpointReader(at).read_metadata().state_dict_metadata
    ) == set(kinds())
    os._exit(0)


def replaced(folder: Path, old: bool = False) -> None:
    """A checkpoint is replaced after one rank has opened it and before another does."""
    at = folder / f"replaced-{old}"

    def save(value: float) -> None:
        state = {"model": {"w": distribute_tensor(torch.full((8,), value), init_device_mesh("cpu", (2,)), [Shard(0)])}}
        dcp.save(state, storage_writer=CheckpointWriter(at, compress=False))
        if old and dist.get_rank() == 0:
            made = at.with_name("made")
            os.rename(at, made)
            make_old(made)
            os.rename(made, at)
        dist.barrier()

    save(1.0)
    first = dist.get_rank() == 0
    reader = CheckpointReader(at) if first else CheckpointReader()
    dist.barrier()
    save(2.0)
    if not first:
        reader.reset(at)
    state = {"model": {"w": distribute_tensor(torch.zeros(8), init_device_mesh("cpu", (2,)), [Shard(0)])}}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=reader)
    assert {type(one[0]) for one in caught.value.failures.values()} == {ow.CorruptError}, caught.value.failures
    assert not state["model"]["w"].to_local().any()
    dcp.load(state, storage_reader=reader)
    assert set(state["model"]["w"].to_local().tolist()) == {2.0}
    reader.close()


def replaced_old(folder: Path) -> None:
    """Runs `replaced` with a checkpoint of version 1."""
    replaced(folder, True)


if __name__ == "__main__":
    folder, size = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    rank = forked(size)
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / sys.argv[2]), size)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60), store=store)
    for step in sys.argv[3:]:
        globals()[step](folder)
        dist.barrier()
        print(f"done {step}", flush=True)
    dist.destroy_process_group()

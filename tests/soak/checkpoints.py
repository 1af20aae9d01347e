"""Loops over training checkpoints. Readers run while writers replace the checkpoints and are killed: in one process, on
two ranks, and in S3."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import overwire as ow
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from overwire.checkpoints import CheckpointReader, CheckpointWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from .models import Tensors, bytes_of, random_tensors, version, which
from .outcomes import Failure, Round
from .ranks import TIMEOUT

Versions = dict[int, Tensors]

# A reader may get these errors during a write, because the checkpoint was replaced or does not exist yet.
_REPLACED = (ow.CorruptError, ow.NotFoundError)


@contextlib.contextmanager
def _own_errors() -> Any:
    """Raises the error of a rank in place of torch's error, which is not an Exception."""
    try:
        yield
    except CheckpointException as failure:
        raise next(iter(failure.failures.values()))[0] from failure


def _save(rng: random.Random, at: Any, versions: Versions, number: int, options: Any = None) -> None:
    shard = rng.choice((max(1, bytes_of(versions[0]) // 4), 1 << 30))
    writer = CheckpointWriter(at, compress=rng.random() < 0.5, max_shard_size=shard, storage_options=options)
    with _own_errors():
        dcp.save({"model": versions[number], "step": number}, storage_writer=writer, no_dist=True)


def _load(rng: random.Random, at: Any, versions: Versions, options: Any = None) -> int:
    """Loads a checkpoint, or only its model with load_file, and returns which version it is. Raises Failure for a
    mixture."""
    if options is None and rng.random() < 0.3:
        number: int = which(ow.load_file(at, framework="pt"), versions)
        return number
    state: dict[str, Any] = {"model": {name: torch.zeros_like(t) for name, t in versions[0].items()}, "step": -1}
    with _own_errors():
        dcp.load(state, storage_reader=CheckpointReader(at, storage_options=options), no_dist=True)
    if (number := which(state["model"], versions)) != state["step"]:
        raise Failure("wrong bytes", f"the model is from save {number}, the step from save {state['step']}")
    return number


def _versions(rng: random.Random, count: int = 4) -> Versions:
    base = random_tensors(rng, rng.choice((1 << 12, 1 << 16, 1 << 20)))
    return {number: version(base, number) for number in range(count)}


def replaced(round_: Round) -> None:
    """A writer replaces a checkpoint again and again until it is killed at a random time. Each reader gets one complete
    save with its step, or an error that the checkpoint was replaced. After the kill, the last save or the one before it
    can be read, and the next save removes all files of the killed writer."""
    rng, folder = round_.rng, round_.folder / "out"
    versions, log = _versions(rng), round_.folder / "log"
    folder.mkdir()
    round_.in_child(lambda child: _save(child.rng, folder / "c", versions, 0))
    last = 0
    while round_.lasts():
        log.write_text(f"{last}\n")
        writer = round_.child(lambda child: _save_on(child, folder / "c", versions, log))
        readers = [
            round_.child(lambda child: _load_on(child, folder / "c", versions)) for _ in range(rng.randint(1, 2))
        ]
        time.sleep(rng.choice((0.1, 0.3, 0.6)) * rng.random())
        writer.kill()
        for reader in readers:
            reader.result()
        begun = [int(line) for line in log.read_text().split()]
        present, last = round_.in_child(lambda child: _look_and_save(child, folder, versions))
        if present not in begun[-2:]:
            raise Failure("wrong bytes", f"save {present} was found; the last saves begun were {begun[-3:]}")
        round_.count("kills: checkpoint")


def _save_on(round_: Round, at: Path, versions: Versions, log: Path) -> None:
    with open(log, "ab", buffering=0) as file:
        while True:
            number = round_.rng.randrange(len(versions))
            file.write(b"%d\n" % number)
            _save(round_.rng, at, versions, number)


def _load_on(round_: Round, at: Path, versions: Versions) -> None:
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        with round_.may_raise(*_REPLACED):
            _load(round_.rng, at, versions)
            round_.count("loads of checkpoints")


def _look_and_save(round_: Round, folder: Path, versions: Versions) -> tuple[int, int]:
    present, number = _load(round_.rng, folder / "c", versions), round_.rng.randrange(len(versions))
    _save(round_.rng, folder / "c", versions, number)
    if _load(round_.rng, folder / "c", versions) != number:
        raise Failure("wrong bytes", f"save {number} has ended, but another save was found")
    if os.listdir(folder) != ["c"]:
        raise Failure("leak", f"after the next save the folder has {sorted(os.listdir(folder))}")
    round_.count("saves of checkpoints")
    return present, number


def ranks(round_: Round) -> None:
    """Two ranks replace a checkpoint of sharded tensors until one or both are killed. A new job starts immediately,
    while a rank of the old job may still write. Two ranks that load at the same time get the same complete save, or
    both get an error that it was replaced."""
    rng, folder = round_.rng, round_.folder / "out"
    folder.mkdir()
    jobs = 0

    def job(body: Callable[..., None], *args: Any) -> list[Any]:
        nonlocal jobs
        jobs += 1
        return [round_.child(partial(_rank, body, rank, jobs, *args)) for rank in range(2)]

    for rank in job(_save_shards, folder / "c", 1):
        rank.result()
    while round_.lasts():
        readers = job(_load_shards, folder / "c")
        writers = job(_save_shards, folder / "c", 1000)
        time.sleep(1 + rng.random())
        killed = writers[: rng.choice((1, 1, 2))]
        for rank in killed:
            rank.kill()
        heirs = job(_save_shards, folder / "c", 2)
        for rank in heirs:
            rank.result()
        for rank in writers[len(killed) :]:  # these ranks get an error about a closed connection
            rank.kill()
        for rank in readers:
            rank.result()
        round_.in_child(lambda child: _tidy(child, folder))
        round_.count("kills: ranks of checkpoints", len(killed))


def _rank(body: Callable[..., None], rank: int, number: int, *rest: Any) -> None:
    round_: Round = rest[-1]
    torch.set_num_threads(1)
    place = dist.FileStore(str(round_.folder / f"rendezvous-{number}"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=TIMEOUT), store=place)
    body(round_, rank, *rest[:-1])


def _shards(value: float) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (2,))
    return {f"w{at}": distribute_tensor(torch.full((at + 3, 40), value), mesh, [Shard(at % 2)]) for at in range(4)}


def _save_shards(round_: Round, rank: int, at: Path, times: int) -> None:
    for _ in range(times):
        value = [random.randrange(1, 1 << 20) if rank == 0 else None]
        dist.broadcast_object_list(value)
        state = {"model": _shards(float(value[0] or 0)), "step": value[0]}
        with _own_errors():
            dcp.save(state, storage_writer=CheckpointWriter(at, max_shard_size=400, compress=False))
        round_.count("saves by ranks")


def _load_shards(round_: Round, rank: int, at: Path) -> None:
    until = [time.monotonic() + 2]
    dist.broadcast_object_list(until)
    while True:
        # If one rank cannot open the checkpoint, both must know before they load together.
        opened: Any = None
        time.sleep(0.1 * round_.rng.random())  # ranks open the checkpoint at different times
        with round_.may_raise(*_REPLACED):
            opened = CheckpointReader(at)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, (opened is not None, time.monotonic() > until[0]))
        if both[0][1]:
            return
        if not all(is_open for is_open, _ in both):
            continue
        state: dict[str, Any] = {"model": _shards(0.0), "step": 0}
        loaded: set[float] | None = None
        with round_.may_raise(ow.CorruptError):
            with _own_errors():
                dcp.load(state, storage_reader=opened)
            loaded = {float(state["step"])}.union(
                *(tensor.to_local().view(-1).tolist() for tensor in state["model"].values())
            )
        opened.close()
        dist.all_gather_object(both, loaded)
        if both[0] != both[1] or loaded is not None and len(loaded) != 1:
            raise Failure("wrong bytes", f"the ranks have loaded {both}")
        round_.count("loads by ranks")


def _tidy(round_: Round, folder: Path) -> None:
    """Saves in one process, and checks that only the new checkpoint remains."""
    dcp.save({"model": {"x": torch.ones(3)}}, storage_writer=CheckpointWriter(folder / "c"), no_dist=True)
    if os.listdir(folder) != ["c"]:
        raise Failure("leak", f"after the next save the folder has {sorted(os.listdir(folder))}")
    if set(ow.load_file(folder / "c", framework="pt")) != {"x"}:
        raise Failure("wrong bytes", "a different checkpoint was found")
    round_.count("saves of checkpoints")


def stores(round_: Round) -> None:
    """Two writers save to one name in S3 and may be killed at random times. Afterwards there is no checkpoint, or the
    complete checkpoint of one of them, which stays. A later save to this name succeeds, or reports that the checkpoint
    exists."""
    import pytest
    import stores as real

    rng = round_.rng
    versions = _versions(rng, 3)
    with contextlib.ExitStack() as stack:
        try:
            options, _ = stack.enter_context(real.s3())
        except pytest.skip.Exception:
            round_.count("s3 is not installed")
            return
        number = 0
        while round_.lasts():
            number += 1
            at = f"s3://models/step-{number}"
            writers = [round_.child(partial(_save_once, at, versions, one, options)) for one in (0, 1)]
            reader = round_.child(partial(_load_from_store, at, versions, options))
            time.sleep(0.4 * rng.random())
            for writer in rng.sample(writers, rng.randint(0, 2)):
                writer.kill()
            for writer in writers:
                if writer.status is None:
                    writer.result()
            reader.result()
            round_.in_child(partial(_settle, at, versions, options))
            round_.count("names of S3")


def _save_once(at: str, versions: Versions, number: int, options: Any, round_: Round) -> None:
    with round_.may_raise(ow.ArgumentError):  # the other writer has saved the checkpoint
        _save(round_.rng, at, versions, number, options)
        round_.count("saves of checkpoints")


def _load_from_store(at: str, versions: Versions, options: Any, round_: Round) -> None:
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        with round_.may_raise(ow.NotFoundError):
            _load(round_.rng, at, versions, options)
            round_.count("loads of checkpoints")


def _settle(at: str, versions: Versions, options: Any, round_: Round) -> None:
    present: int | None = None
    with contextlib.suppress(ow.NotFoundError):
        present = _load(round_.rng, at, versions, options)
    try:
        _save(round_.rng, at, versions, 2, options)
    except ow.ArgumentError:
        if present is None:
            raise
    else:
        if present is not None:
            raise Failure("wrong bytes", f"{at} had save {present}, and was saved again")
        present = 2
    if (now := _load(round_.rng, at, versions, options)) != present:
        raise Failure("wrong bytes", f"{at} was save {present}, and is {now}")
    round_.count("loads of checkpoints", 2)

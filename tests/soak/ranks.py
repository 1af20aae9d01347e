"""Loops over process groups: 2 to 4 gloo processes load together, and ranks fail."""

from __future__ import annotations

import datetime
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import overwire as ow
import torch
import torch.distributed as dist

from .models import Stored, Tensors, compare_all, random_tensors, store
from .outcomes import Failure, Round

# gloo gives up on a rank after this number of seconds.
TIMEOUT = 20


def loads(round_: Round) -> None:
    """The ranks of a group together load and stream whole tensors, or blocks along any dimension. With every transport,
    each rank gets its parts of the files, and then exits like a program."""
    _play(round_, _load_all)


def losses(round_: Round) -> None:
    """If a rank raises an error, closes its stream early or is killed, the other ranks soon get an overwire error. The
    remaining ranks can load again by themselves and, if no rank was killed, together."""
    _play(round_, round_.rng.choice((_one_raises, _one_closes, _one_dies)))


def _play(round_: Round, body: Callable[[Round, list[Stored], int, int, random.Random], None]) -> None:
    """Forks the ranks and waits for all of them."""
    rng = round_.rng
    size, exchange = rng.randint(2, 4), rng.choice(("mapped", "collective", "none", "auto"))
    models = _make(round_)
    round_.doing = f"{body.__name__}, {size} ranks, {exchange}"
    os.environ["OVERWIRE_EXCHANGE"] = exchange  # the engine of each rank reads this when it starts
    dying = body is _one_dies
    ends = "at once" if dying else "as a program"
    ranks = [round_.child(partial(_rank, body, models, rank, size, round_.seed), ends) for rank in range(size)]
    began = time.monotonic()
    for number, rank in enumerate(ranks):
        if dying and number == 0:
            rank.wait()
            continue
        rank.result()
    if dying and time.monotonic() - began > TIMEOUT + round_.seconds + 20:
        raise Failure("hang", f"the ranks needed {time.monotonic() - began:.0f} s to detect a dead rank")
    round_.count("groups")


def _make(round_: Round) -> list[Stored]:
    """Makes and stores models in a child process, because this process must not start the engine."""
    rng = round_.rng
    models = []
    for number in range(2):
        tensors = random_tensors(rng, rng.choice((1 << 14, 1 << 20, 1 << 22)))
        form, folder = rng.choice(("plain", "compressed", "shards", "digests")), round_.folder / f"m{number}"
        path = round_.in_child(partial(_path_of, tensors, form, folder))
        models.append(Stored(path, tensors, form))
    return models


def _path_of(tensors: Tensors, form: str, folder: Path, round_: Round) -> Path:
    return store(round_.rng, folder, tensors, form).path


def _rank(body: Callable[..., None], models: list[Stored], rank: int, size: int, seed: str, round_: Round) -> None:
    torch.set_num_threads(1)
    place = dist.FileStore(str(round_.folder / "rendezvous"), size)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=TIMEOUT), store=place)
    # All ranks draw the same random numbers.
    body(round_, models, rank, size, random.Random(f"{seed} ranks"))
    if body is not _one_dies:
        dist.barrier()
        dist.destroy_process_group()


def _cut(tensors: Tensors, rng: random.Random, rank: int, size: int) -> tuple[dict[str, int] | None, Tensors]:
    """Returns the dimension along which each tensor is cut, and the blocks of this rank."""
    shard = {
        name: rng.randrange(tensor.dim()) for name, tensor in tensors.items() if tensor.dim() and rng.random() < 0.5
    }
    own = dict(tensors)
    for name, dimension in shard.items():
        first, end = ow.distributed.shard_range(tensors[name].shape[dimension], size, rank)
        own[name] = tensors[name].narrow(dimension, first, end - first).contiguous()
    return shard or None, own


def _load_together(round_: Round, model: Stored, rng: random.Random, rank: int, size: int) -> None:
    shard, own = _cut(model.tensors, rng, rank, size)
    way = rng.randrange(3)
    if way == 0:
        limit = rng.choice((None, 4 * sum(tensor.nbytes for tensor in model.tensors.values()) + (1 << 20)))
        loaded = dict(ow.stream(model.path, framework="pt", group=dist.group.WORLD, shard=shard, max_memory=limit))
    elif way == 1:
        loaded = ow.load_file(model.path, framework="pt", group=dist.group.WORLD, shard=shard)
    else:
        names = sorted(rng.sample(sorted(model.tensors), rng.randint(1, len(model.tensors))))
        shard = {name: dimension for name, dimension in (shard or {}).items() if name in names} or None
        loaded = ow.load_file(model.path, framework="pt", group=dist.group.WORLD, shard=shard, keys=names)
        own = {name: own[name] for name in names}
    compare_all(loaded, own)
    round_.count("loads by ranks")


def _load_all(round_: Round, models: list[Stored], rank: int, size: int, rng: random.Random) -> None:
    for _ in range(max(2, int(round_.seconds * 3))):
        _load_together(round_, rng.choice(models), rng, rank, size)


def _one_raises(round_: Round, models: list[Stored], rank: int, size: int, rng: random.Random) -> None:
    for _ in range(3):
        model, raising = rng.choice(models), rng.randrange(size)
        wrong = rng.choice(({"keys": ["none"]}, {"max_memory": 1}))
        options = wrong if rank == raising else {}
        try:
            ow.load_file(model.path, framework="pt", group=dist.group.WORLD, **options)  # type: ignore[call-overload]
        except ow.OverwireError:
            round_.count("refusals")
        else:
            raise Failure("unexpected error", f"rank {raising} has failed, but rank {rank} got no error")
        _load_together(round_, model, rng, rank, size)


def _one_closes(round_: Round, models: list[Stored], rank: int, size: int, rng: random.Random) -> None:
    for _ in range(3):
        model, closing, after = rng.choice(models), rng.randrange(size), rng.randint(0, 3)
        stream = ow.stream(model.path, framework="pt", group=dist.group.WORLD)
        loaded = {}
        with round_.may_raise(ow.CancelledError):
            for name, tensor in stream:
                loaded[name] = tensor
                if rank == closing and len(loaded) >= after:
                    break
        stream.close()  # type: ignore[attr-defined]
        compare_all(loaded, model.tensors, list(loaded))
        round_.count("closes")
        _load_together(round_, model, rng, rank, size)


def _one_dies(round_: Round, models: list[Stored], rank: int, size: int, rng: random.Random) -> None:
    instant = 0.3 * rng.random()
    dist.barrier()
    began = time.monotonic()
    if rank == 0:
        _kill_later(instant)
    try:
        while time.monotonic() < began + instant + TIMEOUT + 30:
            _load_together(round_, rng.choice(models), rng, rank, size)
    except ow.OverwireError:
        round_.count("refusals")
    else:
        raise Failure("hang", f"rank {rank} continues without rank 0")
    for model in models:
        compare_all(ow.load_file(model.path, framework="pt"), model.tensors)
        round_.count("loads")


def _kill_later(seconds: float) -> None:
    """Kills this process after some seconds. A forked process does this, so that no thread is needed."""
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, 9)
        os._exit(0)

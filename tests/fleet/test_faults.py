"""Tests loads through real Ray under random faults. `make ray` runs each kind of fault once.

OVERWIRE_TEST_SEED repeats the faults of a run. OVERWIRE_TEST_FAULTS is the number of faults.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections import Counter
from typing import Any

import overwire as ow
import pytest
from cluster import MIB, NODES, Setup, add_node, ray
from overwire.fleet.feeder import DIRECTORY, NAMESPACE

pytest_plugins = ["cluster"]

Sums = dict[str, int]


class Soak:
    """The replicas of a cluster, and the model that they load under one fault."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup, self.rng = setup, rng
        self.replicas: dict[int, list[Any]] = {node: [] for node in range(NODES)}
        self.uri, self.want, self.size = "", {}, 0
        self.numbers = itertools.count(NODES)  # numbers of nodes that are added and killed

    def take(self, node: int | None = None) -> Any:
        """Returns an idle replica on the given node, or on a random node."""
        node = self.rng.randrange(NODES) if node is None else node
        one = self.replicas[node].pop() if self.replicas[node] else self.setup.replica(node)
        self.taken.append((node, one))
        return one

    def begin(self, compress: bool | None = None) -> None:
        self.taken: list[tuple[int, Any]] = []
        compress = self.rng.random() < 0.5 if compress is None else compress
        self.uri, self.want, self.size = self.setup.model(compress, seed=self.rng.randrange(1 << 30))

    def end(self, dead: Any = None) -> None:
        for node, one in self.taken:
            if one is not dead:
                self.replicas[node].append(one)

    def start(self, *replicas: Any, **options: Any) -> list[Any]:
        ray.get([one.free.remote() for one in replicas])  # wait until the replicas have started
        return [one.load.remote(self.uri, {**self.setup.options, **options}) for one in replicas]

    def check(self, works: list[Any], want: Sums | None = None) -> None:
        for got, _ in ray.get(works, timeout=120):
            assert got == (want or self.want)

    def wait(self) -> None:
        time.sleep(self.rng.random())


def kill_owner(soak: Soak) -> Any:
    """Kills the process that has read the pieces and owns them."""
    victim, *others = soak.take(), soak.take(), soak.take()
    works = soak.start(victim, *others)
    soak.wait()
    ray.kill(victim)
    soak.check(works[1:])
    return victim


def kill_raylet(soak: Soak) -> Any:
    """Adds a node and kills it during a load. Each node gets a new number, because Ray starts actors on a dead node
    until it notices the death."""
    number = next(soak.numbers)
    node = add_node(soak.setup.cluster, number)
    victim, *others = soak.setup.replica(number), soak.take(), soak.take()
    works = soak.start(victim, *others)
    soak.wait()
    soak.setup.cluster.remove_node(node, allow_graceful=False)
    soak.check(works[1:])
    return victim


def kill_directory(soak: Soak) -> None:
    """Kills the directory of pieces. Ray or the next load starts another one."""
    works = soak.start(soak.take(), soak.take(), soak.take())
    soak.wait()
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(DIRECTORY, namespace=NAMESPACE), no_restart=soak.rng.random() < 0.5)
    soak.check(works)


def spill_pieces(soak: Soak) -> None:
    """Fills the memory of the node that owns pieces, or of a node that has copies, with other objects."""
    nodes = soak.rng.sample(range(NODES), 2)
    owner, other = (soak.take(node) for node in nodes)
    soak.check(soak.start(owner))
    soak.check(soak.start(other))
    filler = soak.take(soak.rng.choice(nodes))
    ray.get(filler.fill.remote(280 * MIB))
    soak.check(soak.start(other, soak.take(), owner))
    ray.get(filler.free.remote())


def use_all_memory(soak: Soak) -> None:
    """Fills the object store of a node. Ray cannot spill."""
    filler = soak.take()
    ray.get(filler.fill.remote(280 * MIB, True))
    soak.check(soak.start(soak.take(), soak.take(), soak.take()))
    ray.get(filler.free.remote())


def replace_object(soak: Soak) -> None:
    """Replaces the object in the store, between two loads or during one. A load during the replacement may raise an
    error."""
    works, old, new = soak.start(soak.take(), soak.take()), soak.want, soak.rng.randrange(1 << 30)
    if soak.rng.random() < 0.5:
        soak.check(works)
    _, soak.want, _ = soak.setup.model(False, seed=new, uri=soak.uri)
    for work in works:
        try:
            assert ray.get(work, timeout=120)[0] in (old, soak.want)
        except ow.errors.CorruptError as error:
            assert "changed" in str(error)
    soak.check(soak.start(soak.take(), soak.take()))


def use_wrong_credentials(soak: Soak) -> None:
    """Gives one node credentials that do not allow it to read the object."""
    victim = soak.take()
    works = soak.start(soak.take(), soak.take())
    with pytest.raises(ow.errors.AccessError):
        ray.get(soak.start(victim, secret="wrong"), timeout=120)
    soak.check(works)


def damage_read(soak: Soak) -> None:
    """Makes a process read wrong bytes from the store and share them with matching checksums. If an earlier fault has
    made the process load without sharing, it may raise CorruptError."""
    soak.begin(compress=True)
    soak.setup.proxy.wrong = 1
    replicas = [soak.take(), soak.take()]
    for one, work in zip(replicas, soak.start(*replicas), strict=True):
        try:
            soak.check([work])
        except ow.errors.CorruptError:
            assert ray.get(one.has_read_store.remote())
    soak.check(soak.start(soak.take()))
    assert soak.setup.proxy.wrong == 0


FAULTS = [
    kill_owner, kill_raylet, kill_directory, spill_pieces, use_all_memory, replace_object, use_wrong_credentials,
    damage_read,
]  # fmt: skip


def test_faults(setup: Setup) -> None:
    """After every kind of fault, all other loads succeed and give the right bytes."""
    seed = int(os.environ.get("OVERWIRE_TEST_SEED") or random.randrange(1 << 32))
    count = int(os.environ.get("OVERWIRE_TEST_FAULTS") or len(FAULTS))
    print("seed", seed)
    rng = random.Random(seed)
    soak, done = Soak(setup, rng), Counter[str]()
    for fault in [*FAULTS, *(rng.choice(FAULTS) for _ in range(count - len(FAULTS)))][:count]:
        soak.begin()
        print(fault.__name__, flush=True)
        soak.end(fault(soak))
        done[fault.__name__] += 1
    print(dict(done))

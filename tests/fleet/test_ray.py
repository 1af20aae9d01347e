"""Tests loads through real Ray: several nodes on one machine, and a real S3 server behind a proxy that counts.

`make ray` runs them. Set OVERWIRE_TEST_SEED to repeat the random faults of a run.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import runpy
import socket
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import stores
from overwire.fleet.directory import Directory, Key
from overwire.fleet.feeder import DIRECTORY, NAMESPACE

ray: Any = pytest.importorskip("ray", reason="needs Ray: `make ray` installs it")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import this module

MIB = 1 << 20
NODES = 3
# The credentials of the nodes' own environments, which prefetch uses.
ENV = {"OVERWIRE_RAY_PIECE_MB": "1", "AWS_ACCESS_KEY_ID": stores.S3_KEY, "AWS_SECRET_ACCESS_KEY": stores.S3_SECRET}


class Replica:
    """Loads models on its node, as a replica of a deployment does."""

    def __init__(self) -> None:
        import logging

        self.lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("overwire").addHandler(handler)

    def load(self, uri: str, options: dict[str, Any], ray: bool = True) -> tuple[dict[str, int], list[str]]:
        import overwire

        self.lines.clear()
        tensors = overwire.load_file(uri, framework="np", storage_options=options, ray=ray)
        return {name: zlib.crc32(tensor.tobytes()) for name, tensor in tensors.items()}, self.lines

    def fill(self, size: int) -> None:
        import ray

        self.pinned = [ray.put(bytes(size >> 3)) for _ in range(8)]

    def free(self) -> None:
        self.pinned = []


class Setup:
    def __init__(self, cluster: Any, options: dict[str, Any], folder: Path, proxy: Any) -> None:
        self.cluster, self.options, self.folder, self.proxy = cluster, options, folder, proxy
        self.made = 0

    def model(self, compress: bool, tensors: int = 12, seed: int = 1, uri: str = "") -> tuple[str, dict[str, int], int]:
        """Stores a model. Returns its URI, the checksums of its tensors, and its stored size."""
        self.made += 1
        rng = np.random.default_rng(seed)
        uri = uri or f"s3://models/m{self.made}.safetensors"
        made = {f"t{at}": (rng.standard_normal(600_000 + at) * 0.02).astype(np.float16) for at in range(tensors)}
        ow.save_file(made, uri, compress=compress, storage_options=self.options)
        size = (self.folder / uri.rpartition("/")[2]).stat().st_size
        return uri, {name: zlib.crc32(one.tobytes()) for name, one in made.items()}, size

    def replica(self, node: int) -> Any:
        return ray.remote(Replica).options(num_cpus=0, resources={f"n{node}": 0.001}).remote()

    def sent(self) -> int:
        """Returns the bytes that the store has sent since the last call, without the beginnings of files, which every
        load reads to learn the state of the object."""
        beginning = 256 << 10
        count = sum(size for method, _, headers, _, size in self.proxy.asked
                    if method == "GET" and not str(headers.get("Range")).endswith(f"-{beginning - 1}"))  # fmt: skip
        self.proxy.asked.clear()
        return count


PORTS = ("metrics_agent_port", "runtime_env_agent_port", "dashboard_agent_listen_port", "metrics_export_port")


def free_ports(count: int) -> list[int]:
    """Returns ports that no program uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def add_node(cluster: Any, number: int) -> Any:
    """Adds a node with a resource of its own. Ray waits 30 s for a node, and for ports that it chooses itself 15 s,
    which a busy machine may exceed."""
    for left in (3, 2, 1, 0):
        try:
            ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
            return cluster.add_node(
                num_cpus=2, object_store_memory=300 * MIB, resources={f"n{number}": 1}, include_dashboard=False, **ports
            )
        except Exception:
            if not left:
                raise
    raise AssertionError


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    os.environ.update(ENV)
    with stores.s3() as (options, folder), stores.front(str(options["endpoint_url"])) as (url, proxy):
        cluster = importlib.import_module("ray.cluster_utils").Cluster()
        try:
            for node in range(NODES):
                add_node(cluster, node)
            ray.init(address=cluster.address, log_to_driver=False)
            yield Setup(cluster, {**options, "endpoint_url": url}, folder, proxy)
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.mark.parametrize("compress", [True, False])
def test_once(setup: Setup, compress: bool) -> None:
    """Nodes that load at once, a second replica and a late node read each byte from the store once in total."""
    uri, want, size = setup.model(compress)
    first, second, late = (setup.replica(node) for node in (0, 1, 2))
    other = setup.replica(0)
    setup.sent()
    for got, lines in ray.get([one.load.remote(uri, setup.options) for one in (first, second)]):
        assert got == want and not lines
    sent = setup.sent()
    assert size * 0.9 < sent < size * 1.1
    for one in (other, late, first):
        got, lines = ray.get(one.load.remote(uri, setup.options))
        assert got == want and not lines
        assert setup.sent() == 0
    got, _ = ray.get(late.load.remote(uri, setup.options, False))
    assert got == want and setup.sent() > size * 0.9


def test_lost_owner(setup: Setup) -> None:
    """The pieces of a process that died are read from the store again, and shared again."""
    uri, want, size = setup.model(True)
    owner, other, late = setup.replica(0), setup.replica(1), setup.replica(2)
    assert ray.get(owner.load.remote(uri, setup.options))[0] == want
    ray.kill(owner)
    time.sleep(1)
    setup.sent()
    got, lines = ray.get(other.load.remote(uri, setup.options))
    assert got == want and any("lost" in line for line in lines)
    assert len(lines) <= 3 and setup.sent() <= size * 1.1  # one line for each kind of fault
    assert ray.get(late.load.remote(uri, setup.options))[0] == want


def test_lost_directory(setup: Setup) -> None:
    """Loads go on without the directory, and share pieces again once there is a new one."""
    uri, want, _ = setup.model(False)
    first, second = setup.replica(0), setup.replica(1)
    assert ray.get(first.load.remote(uri, setup.options))[0] == want
    ray.kill(ray.get_actor(DIRECTORY, namespace=NAMESPACE), no_restart=False)
    for one in (first, second):
        assert ray.get(one.load.remote(uri, setup.options))[0] == want
    ray.kill(ray.get_actor(DIRECTORY, namespace=NAMESPACE), no_restart=True)
    for one in (first, second, setup.replica(2)):
        assert ray.get(one.load.remote(uri, setup.options))[0] == want


def test_changed_object(setup: Setup) -> None:
    """A node that opens a replaced object never gets bytes of the old one."""
    uri, want, _ = setup.model(False)
    first, second = setup.replica(0), setup.replica(1)
    assert ray.get(first.load.remote(uri, setup.options))[0] == want
    _, new, _ = setup.model(False, seed=2, uri=uri)
    assert new != want
    for one in (second, first):
        assert ray.get(one.load.remote(uri, setup.options))[0] == new


def test_wrong_credentials(setup: Setup) -> None:
    """A node that may not read the object gets an error, although its pieces are in the cluster. Others load it."""
    uri, want, _ = setup.model(True)
    first, second, third = (setup.replica(node) for node in (0, 1, 2))
    works = [one.load.remote(uri, setup.options) for one in (first, third)]
    with pytest.raises(ow.errors.AccessError):
        ray.get(second.load.remote(uri, {**setup.options, "secret": "wrong"}))
    assert all(got == want for got, _ in ray.get(works))


class WrongSums(Directory):
    """A directory that damages the checksums of some pieces."""

    async def put(
        self, key: Key, size: int, process: str, node: str, refs: list[Any], sums: list[int], seconds: float
    ) -> None:
        wrong = [one ^ (key[1] % 3 == 1) for one in sums]
        await super().put(key, size, process, node, refs, wrong, seconds)


@pytest.mark.parametrize("compress", [True, False])
def test_wrong_bytes(setup: Setup, compress: bool) -> None:
    """A piece whose bytes do not match their checksum is dropped for all nodes and read from the store."""
    uri, want, _ = setup.model(compress)
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(DIRECTORY, namespace=NAMESPACE))
    wait_until_gone()
    directory = ray.remote(WrongSums).options(name=DIRECTORY, namespace=NAMESPACE, num_cpus=0).remote()
    first, second = setup.replica(0), setup.replica(1)
    assert ray.get(first.load.remote(uri, setup.options))[0] == want
    pieces = ray.get(directory.counts.remote())["pieces"]
    got, lines = ray.get(second.load.remote(uri, setup.options))
    assert got == want and any("wrong checksum" in line for line in lines)
    assert ray.get(directory.counts.remote())["pieces"] < pieces
    ray.kill(directory)
    wait_until_gone()


def wait_until_gone() -> None:
    for _ in range(300):
        try:
            ray.get_actor(DIRECTORY, namespace=NAMESPACE)
        except ValueError:
            return
        time.sleep(0.1)


def test_full_store(setup: Setup) -> None:
    """Loads succeed on nodes whose object stores have no free memory."""
    uri, want, _ = setup.model(True)
    fill, first, second = setup.replica(1), setup.replica(0), setup.replica(1)
    ray.get(fill.fill.remote(290 * MIB))
    for got, _ in ray.get([one.load.remote(uri, setup.options) for one in (first, second)]):
        assert got == want
    ray.get(fill.free.remote())


def test_random_faults(setup: Setup) -> None:
    """Loads return right bytes while processes that own pieces, and the directory, are killed at random."""
    seed = int(os.environ.get("OVERWIRE_TEST_SEED") or random.randrange(1 << 32))
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(int(os.environ.get("OVERWIRE_TEST_FAULTS", "5"))):
        uri, want, _ = setup.model(rng.random() < 0.5)
        victim, first, second = (setup.replica(rng.randrange(NODES)) for _ in range(3))
        ray.get([one.free.remote() for one in (victim, first, second)])  # they have started
        works = [one.load.remote(uri, setup.options) for one in (victim, first, second)]
        time.sleep(rng.random())
        if rng.random() < 0.3:
            ray.kill(ray.get_actor(DIRECTORY, namespace=NAMESPACE), no_restart=rng.random() < 0.5)
        else:
            ray.kill(victim)
        assert all(got == want for got, _ in ray.get(works[1:]))
        for one in (victim, first, second):
            ray.kill(one)


def test_prefetch(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that prefetched a model load it without the store, also when the process that called is gone. Options with
    secrets and unknown nodes are refused."""
    from overwire.integrations.ray import prefetch, release

    uri, want, size = setup.model(True)
    with pytest.raises(ow.errors.ArgumentError, match="secret"):
        prefetch(uri, storage_options=setup.options)  # type: ignore[arg-type]
    with pytest.raises(ow.errors.ArgumentError, match="alive"):
        prefetch(uri, ["none"])
    nodes = [one["NodeID"] for one in ray.nodes() if one["Alive"]][:2]
    setup.sent()
    read = prefetch(uri, nodes, storage_options={"endpoint_url": setup.options["endpoint_url"]})
    assert list(read) == nodes and all(size < one for one in read.values())
    assert setup.sent() < size * 1.1
    late = setup.replica(2)
    assert ray.get(late.load.remote(uri, setup.options))[0] == want
    assert setup.sent() == 0
    release(nodes)


def test_serve(setup: Setup, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The example with two deployments of Ray Serve loads the model twice and reads it once."""
    pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'ray[serve]'")
    uri, _, size = setup.model(True)
    monkeypatch.setenv("RAY_ADDRESS", setup.cluster.address)
    path = Path(__file__).parents[2] / "examples/production/ray_serve.py"
    setup.sent()
    namespace = runpy.run_path(str(path))
    namespace["main"](uri, {"endpoint_url": setup.options["endpoint_url"]})
    text = capfd.readouterr().out
    assert "first holds" in text and "second holds" in text
    assert size * 0.9 < setup.sent() < size * 1.1


def test_killed_node(setup: Setup) -> None:
    """When a node dies during a load, the others finish."""
    node = add_node(setup.cluster, NODES)
    uri, want, _ = setup.model(True, tensors=40)
    first, second, victim = setup.replica(0), setup.replica(1), setup.replica(NODES)
    ray.get([one.free.remote() for one in (first, second, victim)])
    works = [one.load.remote(uri, setup.options) for one in (first, second, victim)]
    time.sleep(0.5)
    setup.cluster.remove_node(node, allow_graceful=False)
    assert all(got == want for got, _ in ray.get(works[:2]))
    assert ray.get(setup.replica(2).load.remote(uri, setup.options))[0] == want


def test_no_secrets(setup: Setup) -> None:
    """Ray's logs contain no credentials."""
    folder = Path(ray._private.worker._global_node.get_session_dir_path())
    texts = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert texts
    for secret in stores.SECRETS:
        assert not any(secret.encode() in text for text in texts), secret

"""Tests loads through real Ray. `make ray` runs them."""

from __future__ import annotations

import contextlib
import runpy
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import stores
from cluster import MIB, NODES, Setup, add_node, ray, wait_until_gone
from overwire.fleet import directory as rules
from overwire.fleet.directory import Directory, Key
from overwire.fleet.feeder import DIRECTORY, NAMESPACE, find_directory

pytest_plugins = ["cluster"]
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import this module


@pytest.mark.parametrize("compress", [True, False])
def test_once(setup: Setup, compress: bool) -> None:
    """Several nodes that load at once, a second replica and a node that comes later together read each byte from the
    store once."""
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


@pytest.mark.parametrize("node", [0, 1])
def test_lost_owner(setup: Setup, node: int) -> None:
    """If a process dies, the pieces that it owned are read from the store and shared again."""
    uri, want, size = setup.model(True)
    owner, other, late = setup.replica(0), setup.replica(node), setup.replica(2)
    assert ray.get(owner.load.remote(uri, setup.options))[0] == want
    ray.kill(owner)
    time.sleep(1)
    setup.sent()
    got, lines = ray.get(other.load.remote(uri, setup.options))
    assert got == want and any("lost" in line for line in lines)
    assert len(lines) <= 3 and setup.sent() <= size * 1.1  # at most one line for each kind of fault
    assert ray.get(late.load.remote(uri, setup.options))[0] == want


def test_lost_directory(setup: Setup) -> None:
    """Loads continue while there is no directory of pieces. Once there is a new one, they share pieces again."""
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
    """A node that opens an object after it was replaced never gets bytes of the old object."""
    uri, want, _ = setup.model(False)
    first, second = setup.replica(0), setup.replica(1)
    assert ray.get(first.load.remote(uri, setup.options))[0] == want
    _, new, _ = setup.model(False, seed=2, uri=uri)
    assert new != want
    for one in (second, first):
        assert ray.get(one.load.remote(uri, setup.options))[0] == new


def test_wrong_credentials(setup: Setup) -> None:
    """If a node's credentials do not allow it to read the object, its load raises an error, although the cluster has
    the pieces. Other nodes load the object."""
    uri, want, _ = setup.model(True)
    first, second, third = (setup.replica(node) for node in (0, 1, 2))
    works = [one.load.remote(uri, setup.options) for one in (first, third)]
    with pytest.raises(ow.errors.AccessError):
        ray.get(second.load.remote(uri, {**setup.options, "secret": "wrong"}))
    assert all(got == want for got, _ in ray.get(works))


class Recording(Directory):
    """A directory that records how many pieces its answers have."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[int, int]] = []

    async def take_work(self, *args: Any) -> Any:
        answer = await super().take_work(*args)
        self.answers.append((len(answer[0]), len(answer[3])))
        return answer

    async def take_record(self) -> list[tuple[int, int]]:
        """Returns the numbers of pieces since the last call: those to fetch, and those that the node has."""
        answers, self.answers = self.answers, []
        return answers


@pytest.mark.parametrize("compress", [True, False])
def test_pieces_of_the_same_node(setup: Setup, compress: bool) -> None:
    """A second replica on a node, and a second load, get their node's pieces from the directory with few answers: about
    one for five pieces."""
    uri, want, _ = setup.model(compress)
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(DIRECTORY, namespace=NAMESPACE))
    wait_until_gone()
    directory = ray.remote(Recording).options(name=DIRECTORY, namespace=NAMESPACE, num_cpus=0).remote()
    first, second = setup.replica(0), setup.replica(0)
    assert ray.get(first.load.remote(uri, setup.options))[0] == want
    count = ray.get(directory.counts.remote())["pieces"]
    ray.get(directory.take_record.remote())
    for replica in (second, second, first):
        assert ray.get(replica.load.remote(uri, setup.options)) == (want, [])
        answers = ray.get(directory.take_record.remote())
        local = [number for _, number in answers if number]
        assert sum(fetched for fetched, _ in answers) == 0 and sum(local) == count
        assert len(local) <= 1 + count // 5
    ray.kill(directory)
    wait_until_gone()


class WrongSums(Directory):
    """A directory that damages the checksums of some pieces."""

    async def put(self, key: Key, process: str, refs: list[Any], sums: bytes, seconds: float) -> None:
        wrong = bytes([sums[0] ^ (key[1] % 3 == 1)]) + sums[1:]
        await super().put(key, process, refs, wrong, seconds)


@pytest.mark.parametrize("compress", [True, False])
def test_wrong_bytes(setup: Setup, compress: bool) -> None:
    """If the bytes of a piece do not match their checksum, all nodes drop the piece and read it from the store."""
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


def test_damaged_read(setup: Setup) -> None:
    """If a process reads wrong bytes from the store, it drops their piece and reads it again. Other processes get only
    right bytes."""
    uri, want, _ = setup.model(True)
    first, second = setup.replica(0), setup.replica(1)
    setup.proxy.wrong = 1
    got, lines = ray.get(first.load.remote(uri, setup.options))
    assert got == want and setup.proxy.wrong == 0 and any("wrong checksum" in line for line in lines)
    assert ray.get(second.load.remote(uri, setup.options)) == (want, [])


def test_damaged_read_of_group(setup: Setup, tmp_path: Path) -> None:
    """If a rank of a group load to the host reads wrong bytes, all ranks still get the right bytes."""
    uri, want, _ = setup.model(True)
    ranks = [setup.replica(0), setup.replica(1)]
    setup.proxy.wrong = 1
    works = [one.load_in_group.remote(uri, setup.options, rank, len(ranks), str(tmp_path / "group"))
             for rank, one in enumerate(ranks)]  # fmt: skip
    assert ray.get(works) == [want, want] and setup.proxy.wrong == 0
    assert ray.get(setup.replica(2).load.remote(uri, setup.options)) == (want, [])


def test_unused_directory(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that no process has called for a while ends. The next load starts a new one."""
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(DIRECTORY, namespace=NAMESPACE))
    wait_until_gone()
    monkeypatch.setattr(rules, "SILENCE", 1.0)
    directory = find_directory(ray)
    ray.get(directory.note_alive.remote("a"))
    wait_until_gone()
    with pytest.raises(ray.exceptions.RayActorError):
        for _ in range(100):  # the process ends shortly after its name is gone
            ray.get(directory.counts.remote(), timeout=30)
            time.sleep(0.1)
    uri, want, _ = setup.model(True)
    assert ray.get(setup.replica(0).load.remote(uri, setup.options)) == (want, [])
    assert ray.get(ray.get_actor(DIRECTORY, namespace=NAMESPACE).counts.remote())["pieces"] > 0


def test_checkpoint(setup: Setup) -> None:
    """Two nodes load a training checkpoint, which is read from the store once."""
    import torch
    import torch.distributed.checkpoint as dcp
    from overwire.checkpoints import CheckpointWriter

    state = {f"t{at}": torch.randn(600_000 + at) for at in range(6)}
    want = {name: zlib.crc32(tensor.numpy().tobytes()) for name, tensor in state.items()}
    uri = "s3://models/step-1"
    dcp.save(state, storage_writer=CheckpointWriter(uri, storage_options=setup.options))
    first, second = setup.replica(0), setup.replica(1)
    assert ray.get(first.load_checkpoint.remote(uri, setup.options)) == want
    setup.sent()
    assert ray.get(second.load_checkpoint.remote(uri, setup.options)) == want
    assert setup.sent() < MIB  # only small files are read again


def test_full_store(setup: Setup) -> None:
    """Loads succeed on nodes with a full object store."""
    uri, want, _ = setup.model(True)
    fill, first, second = setup.replica(1), setup.replica(0), setup.replica(1)
    ray.get(fill.fill.remote(290 * MIB))
    for got, _ in ray.get([one.load.remote(uri, setup.options) for one in (first, second)]):
        assert got == want
    ray.get(fill.free.remote())


def test_prefetch(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `prefetch`, nodes load the model without the store. Options with secrets and unknown nodes are refused."""
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
    """In the Ray Serve example, two deployments load the model, and it is read from the store once."""
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
    """If a node dies during a load, the other loads finish."""
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

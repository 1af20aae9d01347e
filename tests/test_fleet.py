"""Tests the parts of loads through Ray that do not need Ray: the engine's feed, the rules of the directory of pieces,
and settings."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import overwire.fleet.directory as rules
import pytest
import stores
from overwire import _verbs
from overwire._engine import buffer_of
from overwire.fleet.directory import Directory

PIECE = 1 << 20


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[dict[str, object], Path]]:
    with stores.s3() as one:
        yield one


class Supplier(threading.Thread):
    """Supplies the engine with pieces of a file's bytes. fault: changes the bytes of a piece before they are shared.
    trusted: the engine does not check the changed bytes, as if another process had got them from the store."""

    def __init__(self, data: bytes, fault: Any = lambda piece, data: data, trusted: bool = False) -> None:
        super().__init__(daemon=True)
        self.feed = _verbs.feed_open(PIECE, 4)
        self.data, self.fault, self.trusted = data, fault, trusted
        self.held: dict[tuple[int, int], object] = {}
        self.seen: list[Any] = []
        self.start()

    def run(self) -> None:
        while True:
            try:
                events = _verbs.feed_next(self.feed, 100)["events"] or ()
            except ow.errors.OverwireError:
                return
            for event in events:
                self.seen.append(event)
                key = event["file"], event["piece"]
                if event["what"] == "free":
                    del self.held[key]
                if event["what"] != "ask":
                    continue
                address, size, holder = buffer_of(bytearray(event["bytes"]), True)
                try:
                    _verbs.feed_wait(self.feed, *key, 60_000)  # a busy machine is not late
                    sums = _verbs.feed_read(self.feed, *key, address, size)["sums"]
                except ow.errors.ArgumentError:
                    continue  # the file was closed after the request
                begin = event["piece"] * PIECE
                expected = self.data[begin : begin + size]
                shared = bytes(self.fault(event["piece"], expected))
                address, size, holder = buffer_of(shared)
                self.held[key] = holder
                numbers = b"" if self.trusted else b"".join(one.to_bytes(8, "little") for one in sums)
                _verbs.feed_answer(self.feed, *key, address, size, numbers)

    def stop(self) -> None:
        _verbs.feed_close(self.feed)
        self.join()


def _model(options: dict[str, object], name: str, compress: bool) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    tensors = {f"t{at}": rng.normal(size=(at * 40_000 + 7,)).astype(np.float32) for at in range(11)}
    # Files that are only copied into the server's folder would have no ETags.
    ow.save_file(tensors, f"s3://models/{name}", compress=compress, storage_options=options)
    return tensors


def _load(uri: str, options: dict[str, object]) -> dict[str, Any]:
    # Opens the file as ray=True does, but without Ray.
    from overwire.model import storage

    original = storage.feeds
    storage.feeds = lambda ray: True
    try:
        return ow.load_file(uri, framework="np", storage_options=options)
    finally:
        storage.feeds = original


@pytest.mark.parametrize("compress", [True, False])
def test_a_load_uses_the_pieces_that_it_is_fed(s3: tuple[dict[str, object], Path], compress: bool) -> None:
    """A load uses the pieces that Python supplies, even if some are damaged, and frees all of them."""
    options, folder = s3
    name = f"{compress}.safetensors"
    tensors = _model(options, name, compress)
    data = (folder / name).read_bytes()

    def damage(piece: int, part: bytes) -> bytes:
        return bytes([part[0] ^ 1]) + part[1:] if piece == 2 else part[:-1] if piece == 3 else part

    for fault in (lambda _, part: part, damage):
        supplier = Supplier(data, fault)
        try:
            loaded = _load(f"s3://models/{name}", options)
        finally:
            supplier.stop()
        assert loaded.keys() == tensors.keys()
        assert all(np.array_equal(loaded[key], tensors[key]) for key in tensors)
        whats = [event["what"] for event in supplier.seen]
        assert whats.count("ask") == -(-len(data) // PIECE)
        assert whats.count("bad") == (2 if fault is damage else 0)
        assert not any(stores.S3_SECRET in str(event) or "planted" in str(event) for event in supplier.seen)


def test_wrong_reader(s3: tuple[dict[str, object], Path]) -> None:
    """If another process shares wrong bytes with matching checksums, the load reads the store instead. If the store's
    bytes are also wrong, the load raises CorruptError."""
    options, folder = s3
    tensors = _model(options, "wrong.safetensors", True)
    data = (folder / "wrong.safetensors").read_bytes()

    def damage(piece: int, part: bytes) -> bytes:
        return part[:-9] + bytes([part[-9] ^ 1]) + part[-8:] if piece in (1, 3) else part

    supplier = Supplier(data, damage, trusted=True)
    try:
        loaded = _load("s3://models/wrong.safetensors", options)
        assert all(np.array_equal(loaded[key], tensors[key]) for key in tensors)
        assert {event["piece"] for event in supplier.seen if event["what"] == "bad"} >= {1, 3}
        with (folder / "wrong.safetensors").open("r+b") as file:
            file.seek(2 * PIECE - 9)
            file.write(bytes([data[2 * PIECE - 9] ^ 1]))
        with pytest.raises(ow.errors.CorruptError, match="checksum"):
            _load("s3://models/wrong.safetensors", options)
    finally:
        supplier.stop()


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Ray is not installed, only ray=True raises an error, which says what to install."""
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ow.errors.MissingPackageError, match="pip install ray"):
        ow.load_file("s3://b/k", framework="np", ray=True)
    with pytest.raises(ow.errors.ArgumentError, match="ray"):
        ow.load_file("s3://b/k", framework="np", ray="yes")  # type: ignore[arg-type]
    with pytest.raises(ow.errors.ArgumentError, match="local paths"):
        ow.load_file("/none", framework="np", ray=True)
    from overwire.fleet.choice import feeds

    assert not feeds(None)
    monkeypatch.setenv("OVERWIRE_RAY", "auto")
    assert not feeds(None)
    assert not feeds(False)


async def _take(
    one: Directory, process: str, *numbers: int, room: int = 100, reads: Any = (), has: Any = (), name: str = "a"
) -> tuple[dict[int, Any], list[int], list[int]]:
    """Requests pieces of 10 bytes. The first letter of a process's name is its node."""
    wants = [(name, number, 10) for number in numbers]
    own = [(name, number) for number in reads]
    got = await one.take_work(process, process[0], room, wants, own, [(name, number) for number in has], {})
    pieces = {key[1]: refs for key, refs, *_ in got[0]}
    return pieces, *([key[1] for key in keys] for keys in got[1:3])  # type: ignore[return-value]


async def _put(one: Directory, process: str, number: int, ref: object) -> None:
    await one.put(("a", number), process, [ref], b"7", 0.1)


NOTHING: Any = ({}, [], [])


def test_each_piece_is_read_by_one_process() -> None:
    """One process reads each piece and shares it with all. The piece is read again if it is lost, if the read fails, or
    if the process ends. Only the process with the lease can share a piece or report a failed read. While several nodes
    read an object, each of them reads one piece at a time."""

    async def run() -> None:
        one = Directory()
        assert await _take(one, "x", 0, 1, 2, 3) == ({}, [0, 1], [])
        assert await _take(one, "y", 0, 1, 2, 3) == ({}, [2], [])
        assert await _take(one, "z", 0, 1, 2) == NOTHING  # "z" waits and gets nothing
        waiting = asyncio.create_task(_take(one, "z", 0, 1))
        await asyncio.sleep(0.05)
        await one.add_wants("z", [("a", 2, 10)])
        assert not waiting.done()
        await _put(one, "y", 2, "ref")
        assert await waiting == ({2: ["ref"]}, [], [])
        assert await _take(one, "y", 3) == ({}, [3], [])
        await one.drop([("a", 2)], "x")  # "x" does not own this piece, so nothing changes
        assert await _take(one, "w", 2) == ({2: ["ref"]}, [], [])
        await one.fail(("a", 3), "x")  # "x" does not have the lease
        await _put(one, "x", 3, "wrong")  # "x" does not have the lease
        await _put(one, "x", 4, "wrong")  # no process has a lease
        assert [*one.pieces] == [("a", 2)]
        assert await _take(one, "w", 3) == NOTHING
        await one.fail(("a", 3), "y")
        assert await _take(one, "w", 3) == ({}, [3], [])
        await one.drop([("a", 2)], "y")
        assert await _take(one, "y", 2) == ({}, [2], [])
        await _put(one, "w", 3, "ref")
        await one.drop(None, "w")  # "w" has ended
        assert await one.counts() == {"pieces": 0, "leases": 3, "bytes": 0}
        for node in "xzw":
            await one.leave("a", node)
        rules.LEASE = 0.2
        assert await _take(one, "y", 5, reads=[2]) == ({}, [5], [])  # "y" renews its lease
        await _put(one, "y", 2, "ref")
        await _put(one, "y", 5, "ref")
        assert await _take(one, "y", 6) == ({}, [6], [])
        assert await _take(one, "z", 6) == ({}, [6], [])  # the lease of "y" has expired

    lease = rules.LEASE
    try:
        asyncio.run(run())
    finally:
        rules.LEASE = lease


def test_a_process_learns_which_pieces_its_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process learns at once about all pieces of its node that it wants, and about those in a range that it does not
    want yet, up to a limit."""

    async def take(one: Directory, process: str, local: dict[str, tuple[int, int]], *numbers: int) -> Any:
        wants = [("a", number, 10) for number in numbers]
        pieces, reads, stores, found = await one.take_work(process, process[0], 100, wants, [], [], local)
        return [key[1] for key, *_ in pieces], [key[1] for key in reads], [key[1] for key, *_ in found]

    async def run() -> None:
        one = Directory()
        for number in range(5):
            assert await _take(one, "x", number) == ({}, [number], [])
            await _put(one, "x", number, f"ref{number}")
        assert await take(one, "y", {"a": (0, 9)}, 0, 1) == ([0, 1], [], [])
        await _take(one, "y", 5, has=[1])
        assert await take(one, "yy", {"a": (0, 9), "b": (0, 9)}, 0, 1) == ([0], [], [1])
        assert await take(one, "xx", {"a": (0, 4)}, 0, 6) == ([], [6], [0, 1, 2, 3])
        found = (await one.take_work("xx", "x", 100, [], [], [], {"a": (4, 9)}))[3]
        assert [(key, refs, sums, owner) for key, refs, sums, owner, _ in found] == [(("a", 4), ["ref4"], b"7", "x")]
        await one.drop([("a", 3)], "x")
        assert await take(one, "xx", {"a": (2, 9)}, 2) == ([], [], [2, 4])
        monkeypatch.setattr(rules, "LOCAL", 2)
        assert await take(one, "xx", {"a": (0, 1 << 62)}, 0, 4) == ([], [], [0, 1, 4])
        assert await take(one, "xx", {"a": (0, 9)}) == ([], [], [0, 1])
        monkeypatch.setattr(rules, "POLL", 60)
        assert await take(one, "xx", {}) == ([], [], [])

    asyncio.run(run())


def test_nodes_read_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that has read two pieces more than most others waits until they have read more, or until they are slow.
    Nodes without room for pieces, which never read, do not count."""
    monkeypatch.setattr(rules, "POLL", 0.05)

    async def run() -> None:
        one = Directory()
        for node in "uvw":
            assert not (await _take(one, node, 3, room=0))[1]
        for node, number in (("x", 0), ("y", 1), ("z", 2)):
            assert await _take(one, node, 0, 1, 2) == ({}, [number], [])
        await _put(one, "x", 0, 0)
        assert await _take(one, "x", 3) == ({}, [3], [])
        await _put(one, "x", 3, 3)
        waiting = asyncio.create_task(_take(one, "x", 4))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await _put(one, "y", 1, 1)  # the median is now 1
        assert await waiting == ({}, [4], [])
        await _put(one, "x", 4, 4)
        assert await _take(one, "x", 5) == NOTHING
        monkeypatch.setattr(rules, "FULL", 0)
        assert await _take(one, "x", 5) == ({}, [5], [])

    asyncio.run(run())


def test_unused_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory forgets the pieces of a process that no longer calls it. When no process is left, it ends."""
    monkeypatch.setattr(rules, "SILENCE", 0.5)

    class One(Directory):
        def end_actor(self) -> None:
            ended.set()

    ended = threading.Event()

    async def run() -> None:
        one = One()
        assert await _take(one, "x", 0) == ({}, [0], [])
        await _put(one, "x", 0, "ref")
        for _ in range(10):
            await one.note_alive("y")
            await asyncio.sleep(0.1)
        assert not ended.is_set() and not one.pieces and [*one.alive] == ["y"]
        await asyncio.sleep(1)
        assert ended.is_set()

    asyncio.run(run())


def test_prefetched_secrets() -> None:
    """Secrets in URIs and options are refused before they reach Ray. The message does not contain them."""
    from overwire.integrations.ray import prefetch

    for uri, endpoint in (
        ("https://h/m.safetensors?X-Amz-Signature=hidden", ""),
        ("https://user:hidden@h/m.safetensors", ""),
        (["s3://b/m", "https://h/m?hidden"], ""),
        ("s3://b/m", "https://user:hidden@h"),
    ):
        with pytest.raises(ow.errors.ArgumentError, match="show") as error:
            prefetch(uri, storage_options={"endpoint_url": endpoint})
        assert "hidden" not in str(error.value) and ("endpoint_url" in str(error.value)) == bool(endpoint)


def test_a_node_never_shares_more_than_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node never shares more bytes than its limit (`room`). A piece stays until every reader that needs it has got
    it."""
    monkeypatch.setattr(rules, "FULL", 0.2)

    async def run() -> None:
        one = Directory()
        assert await _take(one, "x", 0, room=9) == ({}, [], [0])
        assert await _take(one, "x", 0, 1, room=20) == ({}, [0, 1], [])
        for number in range(2):
            await _put(one, "x", number, number)
        assert await _take(one, "y", 0, 1, room=0) == ({0: [0], 1: [1]}, [], [])
        assert await _take(one, "x", 2, room=20) == ({}, [], [2])  # "y" still needs both pieces
        assert await _take(one, "y", 3, room=0, has=[1]) == ({}, [], [3])
        assert await _take(one, "x", 2, room=20) == ({}, [2], [])
        assert list(one.pieces) == [("a", 0)]
        await one.leave("a", "y")
        await _put(one, "x", 2, 2)
        assert await _take(one, "x", 3, room=20) == ({}, [3], [])
        assert one.used["x"] == 20
        # A process without room waits a while for another reader with room, and then reads the store without sharing.
        waiting = asyncio.create_task(_take(one, "z", 7, 8, 9))
        await asyncio.sleep(0)
        assert (await waiting)[1] == [7]
        waiting = asyncio.create_task(_take(one, "z", 9))
        await asyncio.sleep(0.05)
        assert await _take(one, "y", 9, room=0) in (NOTHING, ({}, [], [9]))

    asyncio.run(run())


def test_directory_at_random() -> None:
    """With random requests and faults on five nodes, the directory's counts stay right, and no request waits
    forever."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)

    async def node(one: Directory, name: str) -> None:
        for _ in range(30):
            numbers = rng.sample(range(8), 3)
            pieces, reads, _ = await _take(one, name, *numbers, room=30, has=rng.sample(range(8), 1))
            for number in reads:
                await asyncio.sleep(rng.random() / 100)
                if rng.random() < 0.7:
                    await _put(one, name, number, object())
                elif rng.random() < 0.9:
                    await one.fail(("a", number), name)
            for number in pieces:
                if rng.random() < 0.3:
                    await one.drop(rng.choice(([("a", number)], None)), f"n{rng.randrange(5)}")

    async def run() -> None:
        one = Directory()
        await asyncio.gather(*(node(one, f"{at}") for at in range(5)))
        for name in {piece.node for piece in one.pieces.values()} | set(one.used):
            held = [piece.size for piece in one.pieces.values() if piece.node == name]
            held += [lease.size for lease in one.leases.values() if lease.node == name]
            assert one.used.get(name, 0) == sum(held) <= 30

    monkey = rules.POLL, rules.LEASE
    rules.POLL, rules.LEASE = 0.02, 0.3
    try:
        asyncio.run(run())
    finally:
        rules.POLL, rules.LEASE = monkey

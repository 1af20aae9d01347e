"""Tests the parts of loads through Ray that do not need Ray: the engine's feed, the directory's rules, and the
settings."""

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
from overwire.fleet.directory import Directory, choose_owner

PIECE = 1 << 20


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[dict[str, object], Path]]:
    with stores.s3() as one:
        yield one


class Supplier(threading.Thread):
    """Answers the engine from a file's bytes. fault: changes the bytes of a piece before they are shared."""

    def __init__(self, data: bytes, fault: Any = lambda piece, data: data) -> None:
        super().__init__(daemon=True)
        self.feed = _verbs.feed_open(PIECE)
        self.data, self.fault = data, fault
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
                sums = _verbs.feed_read(self.feed, *key, address, size)["sums"]
                begin = event["piece"] * PIECE
                expected = self.data[begin : begin + size]
                shared = bytes(self.fault(event["piece"], expected))
                address, size, holder = buffer_of(shared)
                self.held[key] = holder
                _verbs.feed_answer(
                    self.feed, *key, address, size, b"".join(one.to_bytes(8, "little") for one in sums)
                )  # fmt: skip

    def stop(self) -> None:
        _verbs.feed_close(self.feed)
        self.join()


def _model(options: dict[str, object], name: str, compress: bool) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    tensors = {f"t{at}": rng.normal(size=(at * 40_000 + 7,)).astype(np.float32) for at in range(11)}
    # Files that are copied into the server's folder have no ETags.
    ow.save_file(tensors, f"s3://models/{name}", compress=compress, storage_options=options)
    return tensors


def _load(uri: str, options: dict[str, object]) -> dict[str, Any]:
    # Opens with `fed`, as `storage` does for ray=True, without Ray.
    from overwire.model import storage

    original = storage.feeds
    storage.feeds = lambda ray: True
    try:
        return ow.load_file(uri, framework="np", storage_options=options)
    finally:
        storage.feeds = original


@pytest.mark.parametrize("compress", [True, False])
def test_feed(s3: tuple[dict[str, object], Path], compress: bool) -> None:
    """A load reads pieces that Python supplies, even if some are damaged, and frees them all."""
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


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray, only ray=True raises an error, which says what to install."""
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


def _ask(one: Directory, node: str, number: int = 0, room: int = 100, patience: float = 5, name: str = "a") -> Any:
    return one.ask(name, number, 10, node, f"{node} 1", room, patience)


def test_owners() -> None:
    """Pieces are spread over the nodes. When a node leaves, only its pieces change their owner."""
    nodes = [f"n{at}" for at in range(8)]
    before = {at: choose_owner(("a", at), nodes) for at in range(800)}
    assert all(60 < list(before.values()).count(node) < 140 for node in nodes)
    assert all(choose_owner(("a", at), nodes[1:]) == was for at, was in before.items() if was != "n0")


def test_directory() -> None:
    """One node reads a piece, and the others wait for it and get it. A failed, ended or lost piece is read again."""

    async def run() -> None:
        one = Directory()
        assert (await _ask(one, "x"))[0] == "read"
        waiting = asyncio.create_task(_ask(one, "y"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await one.put("a", 0, 10, "x", ["ref"], [7])
        assert await waiting == ("piece", ["ref"], [7])
        await one.drop("a", 0, ["another"])
        assert (await _ask(one, "z"))[0] == "piece"
        await one.drop("a", 0, ["ref"])
        assert await one.counts() == {"pieces": 0, "leases": 0, "bytes": 0}
        assert one.used == {"x": 0}
        assert (await _ask(one, "x"))[0] == "read"  # after a head start, if another node owns it
        await one.fail("a", 0, "other 1")  # the lease is another reader's
        assert one.leases
        await one.fail("a", 0, "x 1")
        assert (await _ask(one, "x", number=5))[0] == "read"
        rules.LEASE = 0.2
        assert (await _ask(one, "y", number=6))[0] == "read"
        await one.renew("y 1")
        assert (await _ask(one, "x", number=6))[0] == "read"  # y's lease has ended

    lease = rules.LEASE
    try:
        asyncio.run(run())
    finally:
        rules.LEASE = lease


def test_budget() -> None:
    """A node never has more pieces than it has room for. Pieces that a reader still lacks are kept until it has
    them."""

    async def run() -> None:
        one = Directory()
        assert (await _ask(one, "x", room=9))[0] == "store"
        for number in range(2):
            assert (await _ask(one, "x", number, room=20))[0] == "read"
            await one.put("a", number, 10, "x", [number], [])
        await one.ask("a", 0, 10, "y", "y 1", 20, 0)
        assert (await _ask(one, "x", 2, room=20, patience=0.3))[0] == "store"  # y lacks both
        await one.got("a", 1, "y")
        assert (await _ask(one, "x", 2, room=20))[0] == "read"
        assert list(one.pieces) == [("a", 0)]
        await one.leave("a", "y")
        await one.put("a", 2, 10, "x", [2], [])
        assert (await _ask(one, "x", 3, room=20))[0] == "read"
        assert one.used["x"] == 20

    asyncio.run(run())


def test_directory_at_random() -> None:
    """With random nodes, faults and sizes, the directory's counts stay right and no request waits forever."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)

    async def node(one: Directory, name: str) -> None:
        for _ in range(30):
            number = rng.randrange(6)
            todo, refs, _ = await _ask(one, name, number, room=30, patience=0.05)
            if todo == "read":
                await asyncio.sleep(rng.random() / 100)
                if rng.random() < 0.7:
                    await one.put("a", number, 10, name, [object()], [])
                elif rng.random() < 0.7:
                    await one.fail("a", number, f"{name} 1")
            elif todo == "piece" and rng.random() < 0.3:
                await one.drop("a", number, refs)
            elif todo == "piece":
                await one.got("a", number, name)

    async def run() -> None:
        one = Directory()
        await asyncio.gather(*(node(one, f"n{at}") for at in range(5)))
        for name in {piece.node for piece in one.pieces.values()} | set(one.used):
            held = [piece.size for piece in one.pieces.values() if piece.node == name]
            held += [lease.size for lease in one.leases.values() if lease.node == name]
            assert one.used.get(name, 0) == sum(held) <= 30

    asyncio.run(run())

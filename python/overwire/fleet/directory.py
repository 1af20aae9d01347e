"""The directory of a Ray cluster: an actor that knows which pieces of objects are in Ray's object stores.

The directory never touches bytes. It runs without overwire, because Ray copies this module's code to it; the module
therefore imports only the standard library. A lost directory costs time only: the nodes read their stores.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from typing import Any

#: Seconds for which a lease holds without `renew`, and for which a node that asked for a piece of an object counts as
#: one of the object's readers.
LEASE, RECENT = 1.5, 10.0

#: Seconds that a node waits for the reader of a piece before it reads the piece itself.
HEAD_START = 0.5

#: A piece: the name of the object's state, and the piece's number.
Key = tuple[str, int]


class Piece:
    """A shared piece: the list that holds Ray's reference to its bytes, their checksums, the node that read it, its
    size, and the nodes that have it."""

    def __init__(self, refs: list[Any], sums: list[int], node: str, size: int) -> None:
        self.refs, self.sums, self.node, self.size = refs, sums, node, size
        self.nodes = {node}


class Lease:
    """The right to read a piece from the store. It ends if its process does not renew it."""

    def __init__(self, node: str, process: str, size: int) -> None:
        self.node, self.process, self.size, self.until = node, process, size, time.monotonic() + LEASE


def choose_owner(key: Key, nodes: list[str]) -> str:
    """Returns the node that reads a piece: the one with the highest random weight. Most pieces keep their node when
    another node joins or leaves."""
    return max(nodes, key=lambda node: hashlib.sha256(f"{key[0]} {key[1]} {node}".encode()).digest())


class Directory:
    """The actor. All methods run in one event loop."""

    def __init__(self) -> None:
        self.pieces: OrderedDict[Key, Piece] = OrderedDict()  # the longest unused first
        self.leases: dict[Key, Lease] = {}
        self.readers: dict[str, dict[str, float]] = {}  # when each node last asked for a piece of an object
        self.used: dict[str, int] = {}  # bytes of pieces and leases by node
        self._change = asyncio.Event()

    def _notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def ask(
        self, name: str, number: int, size: int, node: str, process: str, room: int, patience: float
    ) -> tuple[str, list[Any], list[int]]:
        """Returns what a process does about a piece of `size` bytes: ("piece", reference, checksums), or ("read", [],
        []) if it reads the piece from the store and then calls `put` or `fail`, or ("store", [], []) if it reads the
        piece for itself. room: the most bytes of pieces on the node. patience: how many seconds this may take."""
        key, began = (name, number), time.monotonic()
        while True:
            now = time.monotonic()
            self.readers.setdefault(name, {})[node] = now
            piece = self.pieces.get(key)
            if piece is not None:
                self.pieces.move_to_end(key)
                return "piece", piece.refs, piece.sums
            self._end_leases(now)
            if size > room or now >= began + patience:
                return "store", [], []
            if key not in self.leases:
                is_owner = choose_owner(key, self._recent(name, now)) == node
                if (is_owner or now >= began + HEAD_START) and self._make_room(name, node, size, room, now):
                    self.leases[key] = Lease(node, process, size)
                    self.used[node] = self.used.get(node, 0) + size
                    return "read", [], []
            change = self._change
            try:
                await asyncio.wait_for(change.wait(), 0.1)
            except asyncio.TimeoutError:
                pass

    def _recent(self, name: str, now: float) -> list[str]:
        return [node for node, last in self.readers.get(name, {}).items() if last > now - RECENT]

    def _end_leases(self, now: float) -> None:
        for key in [key for key, lease in self.leases.items() if lease.until < now]:
            self._end_lease(key)

    def _end_lease(self, key: Key) -> None:
        lease = self.leases.pop(key)
        self.used[lease.node] -= lease.size

    def _make_room(self, name: str, node: str, size: int, room: int, now: float) -> bool:
        # Drops the longest unused pieces of the node: those of objects that no node reads, and those that all readers
        # of their object have.
        if self.used.get(node, 0) + size <= room:
            return True
        for key, piece in list(self.pieces.items()):
            if piece.node == node and piece.nodes.issuperset(self._recent(key[0], now)):
                self._drop(key)
                if self.used.get(node, 0) + size <= room:
                    return True
        return False

    def _drop(self, key: Key) -> None:
        piece = self.pieces.pop(key)
        self.used[piece.node] -= piece.size

    async def renew(self, process: str) -> None:
        """Keeps a process's leases."""
        until = time.monotonic() + LEASE
        for lease in self.leases.values():
            if lease.process == process:
                lease.until = until

    async def put(self, name: str, number: int, size: int, node: str, refs: list[Any], sums: list[int]) -> None:
        """Shares a piece that a process has read. refs: a list with one reference, which keeps Ray from fetching it."""
        key = name, number
        if key in self.leases:
            self._end_lease(key)
        if key not in self.pieces:
            self.pieces[key] = Piece(refs, sums, node, size)
            self.used[node] = self.used.get(node, 0) + size
        self._notify()

    async def fail(self, name: str, number: int, process: str) -> None:
        """Ends the lease of a process that could not read the piece."""
        lease = self.leases.get((name, number))
        if lease is not None and lease.process == process:
            self._end_lease((name, number))
            self._notify()

    async def got(self, name: str, number: int, node: str) -> None:
        """Records that a node has a piece."""
        piece = self.pieces.get((name, number))
        if piece is not None:
            piece.nodes.add(node)

    async def drop(self, name: str, number: int, refs: list[Any]) -> None:
        """Forgets a piece that is lost or wrong, unless it has been replaced since. refs: from `ask`."""
        piece = self.pieces.get((name, number))
        if piece is not None and piece.refs == refs:
            self._drop((name, number))

    async def leave(self, name: str, node: str) -> None:
        """Records that a node no longer reads an object."""
        nodes = self.readers.get(name, {})
        nodes.pop(node, None)
        if not nodes:
            self.readers.pop(name, None)

    async def counts(self) -> dict[str, int]:
        """Returns the numbers of pieces and leases, and the bytes of pieces."""
        size = sum(piece.size for piece in self.pieces.values())
        return {"pieces": len(self.pieces), "leases": len(self.leases), "bytes": size}

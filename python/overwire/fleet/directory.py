"""Defines the directory of a Ray cluster: an actor that knows which pieces of objects are in Ray's object stores.

The directory does not handle the bytes of pieces. Ray copies this module's code to the actor, which may not have
overwire, so the module imports only the standard library. If the directory is lost, the nodes read from their stores.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from importlib import import_module
from typing import Any

#: Seconds that a lease lasts after its process last called `take_work`.
LEASE = 3.0
#: For so long after its last request, in seconds, a process counts as wanting pieces, and a node as reading an object.
RECENT = 10.0

#: Limits in seconds for one call of `take_work`, for a process that waits for room on its node, and for a process that
#: waits for a piece while no piece of the object is shared.
POLL, FULL, PATIENCE = 0.5, 2.0, 30.0

#: Seconds without a call after which a process counts as ended. Without processes, the directory ends.
SILENCE = 300.0

#: The largest number of leases of a process that reads an object as the only node: one for its current read, and one so
#: that it never waits for the next. Several nodes have one lease each: pieces arrive sooner if fewer share the store.
LEASES = 2

#: How many more pieces than the median of the nodes a node may read. It sends its pieces to all others, so a node that
#: reads faster than they do would let them wait for its link.
AHEAD = 1

#: The largest number of pieces in a range that a process asks about.
LOCAL = 32

#: A piece: the name of the object's state, and the piece's number.
Key = tuple[str, int]

#: How a process gets a piece from Ray: (key, references, checksums, owner, seconds of the owner's read).
PieceRecord = tuple[Key, list[Any], bytes, str, float]


class Piece:
    """A shared piece.

    refs: a list with Ray's reference to the bytes. sums: their checksums. process, node: the reader of the piece.
    seconds: how long the read took. nodes: the nodes that have the piece."""

    def __init__(self, refs: list[Any], sums: bytes, process: str, node: str, size: int, seconds: float) -> None:
        self.refs, self.sums, self.process, self.node = refs, sums, process, node
        self.size, self.seconds = size, seconds
        self.nodes = {node}

    def to_record(self, key: Key) -> PieceRecord:
        return key, self.refs, self.sums, self.process, self.seconds


class Lease:
    """The right to read a piece from the store. It ends if its process does not renew it."""

    def __init__(self, node: str, process: str, size: int) -> None:
        self.node, self.process, self.size, self.until = node, process, size, time.monotonic() + LEASE


class Reading:
    """An object that nodes read. nodes: when each node last wanted a piece. shares: how many pieces each node with room
    has shared. seconds: how long its last read took. shared: when the last piece was shared."""

    def __init__(self) -> None:
        self.nodes: dict[str, float] = {}
        self.shares: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.shared = 0.0


class Process:
    """A process that wants pieces. wants: their sizes and when it first wanted them, in the order of its reads. pause:
    seconds until it may get a lease without any change."""

    def __init__(self, name: str) -> None:
        self.name, self.node, self.room, self.seen, self.pause = name, "", 0, 0.0, POLL
        self.wants: dict[Key, tuple[int, float]] = {}
        self.change = asyncio.Event()


class Answer:
    """Tells a process how to get the pieces that it wants.

    pieces: fetch these from other nodes. reads: read these from the store, and share them. stores: read these without
    sharing them. Other pieces are on their way. local: pieces that the node already has, including some that were not
    requested."""

    def __init__(self) -> None:
        self.pieces: list[PieceRecord] = []
        self.reads: list[Key] = []
        self.stores: list[Key] = []
        self.local: list[PieceRecord] = []

    def has_work(self) -> bool:
        """Returns whether the process can do anything with this answer."""
        return bool(self.pieces or self.reads or self.stores or self.local)


class Directory:
    """The actor. All methods run in one event loop."""

    def __init__(self) -> None:
        self.pieces: OrderedDict[Key, Piece] = OrderedDict()  # least recently used first
        self.leases: dict[Key, Lease] = {}
        self.processes: dict[str, Process] = {}
        self.readings: dict[str, Reading] = {}
        self.used: dict[str, int] = {}  # bytes of pieces and leases by node
        self.alive: dict[str, float] = {}  # when each process last called
        self.watch: asyncio.Future[None] | None = None

    async def note_alive(self, process: str) -> None:
        """Records that a process is alive. Idle processes call this, so that their pieces are kept."""
        self.alive[process] = time.monotonic()
        if self.watch is None:
            self.watch = asyncio.ensure_future(self._end_unused())

    async def _end_unused(self) -> None:
        while self.alive:
            await asyncio.sleep(SILENCE / 10)
            limit = time.monotonic() - SILENCE
            for name in [name for name, last in self.alive.items() if last < limit]:
                del self.alive[name]
                await self.drop(None, name)
        self.watch = None
        self.end_actor()

    def end_actor(self) -> None:
        """Ends the actor for good. Otherwise Ray would restart it."""
        ray: Any = import_module("ray")
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    async def add_wants(self, process: str, wants: list[tuple[str, int, int]]) -> None:
        """Adds pieces, as (name, number, size), to those of a running `take_work`."""
        one = self.processes.get(process)
        if one is not None:
            for name, number, size in wants:
                one.wants.setdefault((name, number), (size, time.monotonic()))
            one.change.set()

    async def take_work(
        self, process: str, node: str, room: int, wants: list[tuple[str, int, int]], reads: list[Key],
        has: list[Key], ranges: dict[str, tuple[int, int]],
    ) -> tuple[list[PieceRecord], list[Key], list[Key], list[PieceRecord]]:  # fmt: skip
        """Waits until the process can do something about the pieces that it wants. Returns at once if it wants none.
        Returns the fields of an Answer.

        room: the largest total size of the pieces that the node may share. wants: pieces as (name, number, size).
        reads: the leases of the process, which this renews. has: pieces that the node has received. ranges: maps
        an object's name to a range of pieces. The answer lists those that the node has."""
        await self.note_alive(process)
        began = time.monotonic()
        one = self.processes.setdefault(process, Process(process))
        one.node, one.room, before = node, room, one.wants
        one.wants = {(name, number): before.get((name, number), (size, began)) for name, number, size in wants}
        for key in has:
            if key in self.pieces:
                self.pieces[key].nodes.add(node)
        for key in reads:
            if key in self.leases and self.leases[key].process == process:
                self.leases[key].until = began + LEASE
        while True:
            one.change.clear()
            now = one.seen = time.monotonic()
            for name in {name for name, _ in one.wants} | ranges.keys():
                reading = self.readings.setdefault(name, Reading())
                reading.nodes[node] = now
                if room:
                    reading.shares.setdefault(node, 0)
                else:
                    reading.shares.pop(node, None)
            self._end_old(now)
            answer = Answer()
            for name, (first, end) in ranges.items():
                answer.local += self._list_local(name, first, end, node)
            for key, *_ in answer.local:
                one.wants.pop(key, None)
            self._find_work(one, now, answer)
            if answer.has_work() or not one.wants or now >= began + POLL:
                return answer.pieces, answer.reads, answer.stores, answer.local
            try:
                await asyncio.wait_for(one.change.wait(), min(one.pause, began + POLL - now))
            except asyncio.TimeoutError:
                pass

    def _list_local(self, name: str, first: int, end: int, node: str) -> list[PieceRecord]:
        # Lists the pieces from first to end - 1 of an object that a node has.
        pieces = []
        for key in [(name, number) for number in range(first, min(end, first + LOCAL))]:
            piece = self.pieces.get(key)
            if piece is not None and node in piece.nodes:
                self.pieces.move_to_end(key)
                pieces.append(piece.to_record(key))
        return pieces

    def _find_work(self, one: Process, now: float, answer: Answer) -> None:
        one.pause = POLL
        count = sum(1 for lease in self.leases.values() if lease.process == one.name)
        for key, (size, since) in list(one.wants.items()):
            piece = self.pieces.get(key)
            reading = self.readings[key[0]]
            if piece is not None:
                self.pieces.move_to_end(key)
                (answer.local if one.node in piece.nodes else answer.pieces).append(piece.to_record(key))
            elif now > max(since, reading.shared) + PATIENCE:
                answer.stores.append(key)
            elif key in self.leases or count >= self._count_leases(key[0], one, now):
                continue
            elif self._make_room(one.node, size, one.room, now):
                self.leases[key] = Lease(one.node, one.name, size)
                self.used[one.node] = self.used.get(one.node, 0) + size
                answer.reads.append(key)
                count += 1
            elif now > since + FULL or not self._is_wanted(key, size, one.name):
                answer.stores.append(key)
            else:
                continue
            del one.wants[key]

    def _count_leases(self, name: str, one: Process, now: float) -> int:
        # The largest number of leases that a process may have. A node that is ahead goes on if no piece is shared for
        # as long as its last read took, because the others are slow or fetch earlier pieces.
        reading, readers = self.readings[name], self._list_readers(name, now)
        if len(readers) == 1:
            return LEASES
        counts = sorted(reading.shares[node] for node in readers if node in reading.shares)
        wait = reading.shared + min(FULL, reading.seconds.get(one.node, FULL)) - now
        if wait <= 0 or not counts or reading.shares.get(one.node, 0) <= counts[len(counts) // 2] + AHEAD:
            return 1
        one.pause = max(wait, 0.01)
        return 0

    def _list_readers(self, name: str, now: float) -> list[str]:
        reading = self.readings.get(name)
        return [] if reading is None else [node for node, last in reading.nodes.items() if last > now - RECENT]

    def _is_wanted(self, key: Key, size: int, but: str) -> bool:
        # Whether another process may read and share a piece.
        return any(key in one.wants and one.room >= size for name, one in self.processes.items() if name != but)

    def _end_old(self, now: float) -> None:
        for key in [key for key, lease in self.leases.items() if lease.until < now]:
            self._end_lease(key)
        for name in [name for name, one in self.processes.items() if one.seen < now - RECENT]:
            del self.processes[name]
        for name in [name for name, one in self.readings.items() if max(one.nodes.values()) < now - RECENT]:
            del self.readings[name]

    def _end_lease(self, key: Key) -> None:
        lease = self.leases.pop(key)
        self.used[lease.node] -= lease.size
        for one in self.processes.values():
            one.change.set()

    def _make_room(self, node: str, size: int, room: int, now: float) -> bool:
        # Drops the node's least recently used pieces: only those of objects that no node reads, and those that all
        # readers of their object have.
        if size > room:
            return False
        if self.used.get(node, 0) + size <= room:
            return True
        for key, piece in list(self.pieces.items()):
            if piece.node == node and piece.nodes.issuperset(self._list_readers(key[0], now)):
                self._drop(key)
                if self.used.get(node, 0) + size <= room:
                    return True
        return False

    def _drop(self, key: Key) -> None:
        piece = self.pieces.pop(key)
        self.used[piece.node] -= piece.size

    async def put(self, key: Key, process: str, refs: list[Any], sums: bytes, seconds: float) -> None:
        """Shares a piece that a process has read. Does nothing if the process has no lease of the piece.

        refs: a list with one reference. Ray would fetch the object of a reference that is not in a list."""
        lease = self.leases.get(key)
        if lease is not None and lease.process == process:
            self._end_lease(key)
            reading = self.readings.get(key[0])
            if reading is not None:
                reading.shared = time.monotonic()
                reading.shares[lease.node] = reading.shares.get(lease.node, 0) + 1
                reading.seconds[lease.node] = seconds
            self.pieces[key] = Piece(refs, sums, process, lease.node, lease.size, seconds)
            self.used[lease.node] += lease.size

    async def fail(self, key: Key, process: str) -> None:
        """Ends the lease of a process that could not read the piece."""
        if key in self.leases and self.leases[key].process == process:
            self._end_lease(key)

    async def drop(self, keys: Iterable[Key] | None, process: str) -> None:
        """Forgets pieces that are lost or wrong, unless another process has replaced them.

        keys: None if the owner has ended. process: the owner."""
        for key in list(self.pieces if keys is None else keys):
            if key in self.pieces and self.pieces[key].process == process:
                self._drop(key)

    async def leave(self, name: str, node: str) -> None:
        """Records that a node no longer reads an object. name: the name of the object's state."""
        reading = self.readings.get(name)
        if reading is not None:
            reading.nodes.pop(node, None)
            reading.shares.pop(node, None)
            if not reading.nodes:
                del self.readings[name]

    async def counts(self) -> dict[str, int]:
        """Returns the numbers of pieces and leases, and the bytes of pieces."""
        size = sum(piece.size for piece in self.pieces.values())
        return {"pieces": len(self.pieces), "leases": len(self.leases), "bytes": size}

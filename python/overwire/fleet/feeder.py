"""Supplies the engine with pieces of objects through Ray: reads this node's pieces from the store, and shares them.

Each piece is handled by one thread, from the engine's question to the answer. The engine does not wait for a late
answer, so every fault here ends with the engine reading its store.
"""

from __future__ import annotations

import atexit
import os
import pickle
import time
from collections.abc import Callable
from mmap import mmap
from queue import SimpleQueue
from threading import BoundedSemaphore, Thread
from typing import TYPE_CHECKING, Any

from .. import _verbs
from .._engine import buffer_of
from .._imports import start_thread
from .._locks import new_lock
from ..errors import OverwireError
from ..jobs import log
from . import directory

if TYPE_CHECKING:
    from .._requests import FedEvent

#: The namespace in Ray, and the name of the directory, which changes with its methods.
NAMESPACE, DIRECTORY = "overwire", "directory-1"

# How many pieces a process handles, and reads from the store, at the same time.
_PIECES, _READS = 16, 2

# Seconds: the most for an answer of the directory, for fetching a piece from Ray, and between renewals of leases.
_PATIENCE, _FETCH, _RENEW = 10.0, 30.0, 0.5

# Sharing a piece should take no longer than this, in seconds. Ray takes longer if it has to spill other objects first.
_SHARE = 5.0

# Milliseconds that one wait for events takes.
_WAIT = 1000


def find_directory(ray: Any) -> Any:
    """Returns the cluster's directory, which this starts if there is none."""
    ray.cloudpickle.register_pickle_by_value(directory)  # the actor needs no overwire
    try:
        kind = ray.remote(directory.Directory)
        return kind.options(
            name=DIRECTORY, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
            max_restarts=-1, max_concurrency=10000,
        ).remote()  # fmt: skip
    finally:
        ray.cloudpickle.unregister_pickle_by_value(directory)


class Feeder:
    """The supplier of this process. ray: the module. piece: the size of a piece in bytes. room: the most bytes of
    pieces on this node."""

    def __init__(self, ray: Any, piece: int, room: int) -> None:
        self._ray, self._room = ray, room
        self._directory = find_directory(ray)
        self._node: str = ray.get_runtime_context().get_node_id()
        self._process = f"{self._node} {os.getpid()}"
        # The memory of the pieces that the engine uses, by file and piece.
        self._memory: dict[tuple[int, int], Any] = {}
        self._asked: dict[int, set[int]] = {}  # the engine's open questions: pieces by file
        self._lock = new_lock()
        self._reads = BoundedSemaphore(_READS)
        self._leases = 0
        self._said: set[str] = set()
        self._work: SimpleQueue[tuple[Callable[[FedEvent], None], FedEvent]] = SimpleQueue()
        self._feed = _verbs.feed_open(piece)
        atexit.register(self.stop)  # runs before Ray's own, which frees the memory of pieces
        for run in (self._take_events, self._renew_leases, *[self._take_work] * _PIECES):
            start_thread(Thread(target=run, name="overwire-ray", daemon=True).start)

    def stop(self) -> None:
        """Makes the engine read only from stores. On return it uses no memory of pieces."""
        try:
            _verbs.feed_close(self._feed)
        except OverwireError:
            pass

    def _say(self, what: str, why: object, event: FedEvent | None = None) -> None:
        # Logs one line for each kind of fault and object. An error of Ray may quote anything, so its text is left out.
        kind = what if event is None else f"{what} {event['name']}"
        if kind not in self._said:
            self._said.add(kind)
            if event is not None:
                what = f"piece {event['piece']} of {event['uri']} {what}"
            text = type(why).__name__ if isinstance(why, BaseException) else why
            log.warning("overwire: ray: %s (%s): reading from the store instead", what, text)

    def _take_events(self) -> None:
        while True:
            try:
                events = _verbs.feed_next(self._feed, _WAIT)["events"] or ()
            except OverwireError:
                return  # closed, or the process ends
            for event in events:
                try:
                    self._handle(event)
                except Exception as error:
                    self._say("pieces cannot be shared", error)

    def _take_work(self) -> None:
        while True:
            work, event = self._work.get()
            work(event)

    def _handle(self, event: FedEvent) -> None:
        what, file = event["what"], event["file"]
        if what == "ask":
            self._asked.setdefault(file, set()).add(event["piece"])
            self._work.put((self._serve, event))
        elif what == "free":
            with self._lock:
                self._memory.pop((file, event["piece"]), None)
        elif what == "bad":
            self._say("has a wrong checksum", "dropped for all nodes", event)
            self._work.put((self._drop_bad, event))
        elif what == "late":
            self._asked.get(file, set()).discard(event["piece"])
            self._say("is late", "the store would be faster", event)
        else:
            if what == "alone":
                self._say("does not arrive", "no more pieces are asked for", event)
            self._asked.pop(file, None)
            with self._lock:
                for key in [key for key in self._memory if key[0] == file]:
                    del self._memory[key]
            self._directory.leave.remote(event["name"], self._node)

    def _serve(self, event: FedEvent) -> None:
        try:
            if self._share(event):
                return
        except OverwireError:
            pass  # the engine reads the store itself, and reports the error
        except Exception as error:
            self._say("pieces cannot be shared", error)
        self._answer(event)

    def _answer(self, event: FedEvent, memory: Any = None, sums: list[int] | None = None) -> bool:
        """Answers the engine's question. Returns whether it uses the memory."""
        file, piece = event["file"], event["piece"]
        if memory is None:
            _verbs.feed_answer(self._feed, file, piece, 0, 0, b"")
            return False
        address, size, holder = buffer_of(memory)
        with self._lock:  # the event that frees the memory waits
            numbers = b"".join(one.to_bytes(8, "little") for one in sums or ())
            is_used = bool(_verbs.feed_answer(self._feed, file, piece, address, size, numbers))
            if is_used:
                self._memory[file, piece] = holder
        return is_used

    def _is_over(self, event: FedEvent) -> bool:
        # Whether the engine no longer waits for an answer, because it reads the store itself.
        return event["piece"] not in self._asked.get(event["file"], ())

    def _share(self, event: FedEvent) -> bool:
        """Gets a piece from another process, or reads and shares it. Returns whether the question is answered."""
        for _ in range(2):
            if self._is_over(event):
                return True
            todo, refs, sums = self._call(
                self._directory.ask, event["bytes"], self._node, self._process, self._room, _PATIENCE, event=event
            )
            if todo == "read":
                self._read(event)
                return True
            if todo != "piece" or not sums:  # the engine would trust a piece without checksums
                return False
            try:
                memory = self._ray.get(refs[0], timeout=_FETCH)
            except self._ray.exceptions.RayError as error:
                self._say("is lost", error, event)
                self._directory.drop.remote(event["name"], event["piece"], refs)
                continue  # the next answer may be to read and share the piece again
            self._answer(event, memory, sums)
            self._directory.got.remote(event["name"], event["piece"], self._node)
            return True
        return False

    def _call(self, method: Any, *rest: Any, event: FedEvent) -> Any:
        return self._ray.get(method.remote(event["name"], event["piece"], *rest), timeout=_PATIENCE + 5)

    def _read(self, event: FedEvent) -> None:
        # Reads a piece from the store, answers, and shares it. The engine does not wait for the sharing.
        name, number, size = event["name"], event["piece"], event["bytes"]
        is_shared = False
        with self._lock:
            self._leases += 1
        try:
            memory = mmap(-1, size)
            address, _, holder = buffer_of(memory, True)
            with self._reads:
                if self._is_over(event):
                    return
                sums = _verbs.feed_read(self._feed, event["file"], number, address, size)["sums"]
            self._answer(event, memory)
            began = time.monotonic()
            ref = self._ray.put(pickle.PickleBuffer(memory))
            del holder
            self._directory.put.remote(name, number, size, self._node, [ref], sums)
            is_shared = True
            if time.monotonic() - began > _SHARE:
                self._room = 0
                self._say("Ray's object store is full or slow", "this process shares no more pieces")
        finally:
            with self._lock:
                self._leases -= 1
            if not is_shared:
                self._directory.fail.remote(name, number, self._process)

    def _renew_leases(self) -> None:
        while True:
            time.sleep(_RENEW)
            if self._leases:
                try:
                    self._directory.renew.remote(self._process)
                except Exception as error:
                    self._say("leases cannot be renewed", error)

    def _drop_bad(self, event: FedEvent) -> None:
        try:
            todo, refs, _ = self._call(self._directory.ask, 0, self._node, self._process, 0, 0.0, event=event)
            if todo == "piece":
                self._directory.drop.remote(event["name"], event["piece"], refs)
        except Exception as error:
            self._say("a wrong piece cannot be dropped", error)

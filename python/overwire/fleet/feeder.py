"""Supplies the engine with pieces of objects through Ray: reads this node's pieces from the store, and shares them.

Each piece is handled by one thread, from the engine's question to the answer. The engine does not wait for a late
answer. If something fails here, the engine reads its store.
"""

from __future__ import annotations

import atexit
import contextlib
import pickle
import secrets
import time
from array import array
from collections.abc import Callable
from functools import partial
from mmap import mmap
from queue import SimpleQueue
from threading import BoundedSemaphore, Event, Thread
from typing import TYPE_CHECKING, Any

from .. import _verbs
from .._engine import buffer_of
from .._imports import start_thread
from .._locks import new_lock
from .._undo import after_error
from ..errors import OverwireError
from ..jobs import log
from . import directory

if TYPE_CHECKING:
    from .._requests import FedEvent

#: The namespace in Ray, and the name of the directory, which changes with its methods.
NAMESPACE, DIRECTORY = "overwire", "directory-5"

# The number of threads that handle pieces, how many of them may read from the store at once, and the largest number of
# pieces that the engine asks for before it reads them.
_PIECES, _READS, _AHEAD = 4, 2, 16

# Limits in seconds for the first answer of the directory and for later ones, and the interval at which an idle process
# calls `note_alive`.
_START, _PATIENCE, _BEAT = 30.0, 5.0, 60.0

# How many pieces Ray fetches for this process at once. It asks another node for a piece that takes longer than ten
# seconds, and then receives it twice.
_FETCHES = 4

# The engine waits at least _WAIT seconds for a piece that is on its way. A transfer by Ray may take as long as
# _READS_LONG reads of a piece from the store, because the nodes that fetch from one node share its link. For each
# _FETCHES pieces that wait, it may take that long again.
_WAIT, _READS_LONG = 2.0, 4

# Sharing a piece should take no longer than this, in seconds. Ray takes longer if it has to spill other objects first.
_SHARE = 5.0

# Limit in seconds for Ray to return this node's pieces. It is short, because leases are not renewed during this call.
_LOCAL = 0.5

# The longest wait for events, in milliseconds.
_EVENTS = 1000

Piece = tuple[int, int]  # the numbers of a file and of one of its pieces


def find_directory(ray: Any) -> Any:
    """Returns the cluster's directory. Starts it if there is none. Raises RuntimeError if the process is not connected:
    Ray would start a new cluster."""
    if not ray.is_initialized():
        raise RuntimeError("the process is not connected to a Ray cluster")
    with contextlib.suppress(ValueError):  # there is none
        return ray.get_actor(DIRECTORY, namespace=NAMESPACE)  # faster than `get_if_exists`, which pickles the class
    ray.cloudpickle.register_pickle_by_value(directory)  # the actor needs no overwire
    try:
        kind = ray.remote(directory.Directory)
        return kind.options(
            name=DIRECTORY, namespace=NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
            max_restarts=-1, max_concurrency=10000,
        ).remote()  # fmt: skip
    finally:
        ray.cloudpickle.unregister_pickle_by_value(directory)


class ReadProgress:
    """How far an open object is read. count: the number of its pieces. last_wanted: the highest piece that the engine
    has asked for. end: where the last range that the directory was asked about ended."""

    def __init__(self, count: int) -> None:
        self.count, self.last_wanted, self.end = count, -1, 0


class Feeder:
    """The supplier of this process. ray: the module. piece: the size of a piece in bytes. room: the largest total size
    of the pieces that this node may share."""

    def __init__(self, ray: Any, piece: int, room: int) -> None:
        self._ray, self._room = ray, room
        self._node: str = ray.get_runtime_context().get_node_id()
        self._process = f"{self._node} {secrets.token_hex(16)}"  # processes in containers may have the same number
        self._directory: Any = None  # until `_take_answers` has found it
        self._patience = _START  # for the directory's next answer: a new actor starts in some seconds
        self._memory: dict[Piece, Any] = {}  # of the pieces that the engine uses
        self._owners: dict[Piece, str] = {}  # of all pieces that it has used
        self._local: dict[directory.Key, Callable[[FedEvent], None]] = {}  # answer with pieces of this node
        self._progress: dict[str, ReadProgress] = {}  # of open objects
        # How many pieces of an object one call asks about before they are wanted. The next range is requested when half
        # of the last one is wanted, so listed pieces reach up to 1.5 ranges beyond the last wanted one.
        self._piece_bytes, self._range_pieces = piece, max(1, min(directory.LOCAL, room // piece // 4))
        self._asked: dict[Piece, FedEvent] = {}  # the engine's open questions
        self._busy: set[Piece] = set()  # questions that a thread is working on
        self._seconds = 0.0  # how long a slow read of a piece has recently taken
        self._leases: set[directory.Key] = set()
        self._has: list[directory.Key] = []  # received since the last call of the directory
        self._lock = new_lock()
        self._todo = Event()  # the directory has to be called
        self._is_over = False
        self._reads = BoundedSemaphore(_READS)
        self._waiting: list[tuple[Any, str, Callable[[Any, FedEvent], None], FedEvent]] = []  # fetches to begin
        self._sources: dict[Piece, str] = {}  # the owners of the pieces that Ray fetches now
        self._said: set[str] = set()
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._has_workers = False
        self._feed = _verbs.feed_open(piece, max(1, min(_AHEAD, room // piece // 2)))
        atexit.register(self.stop)  # runs before Ray's own exit handler, which frees the memory of pieces
        self._start_threads(self._take_events, self._take_answers)

    def _start_threads(self, *functions: Callable[[], None]) -> None:
        for function in functions:
            start_thread(Thread(target=function, name="overwire-ray", daemon=True).start)

    def stop(self) -> None:
        """Makes the engine read only from stores. On return, the engine uses no memory of pieces."""
        with contextlib.suppress(OverwireError):
            _verbs.feed_close(self._feed)

    def _say(
        self, what: str, why: object, event: FedEvent | None = None, then: str = "reading from the store instead"
    ) -> None:
        # Logs one line for each kind of fault and object, without the text of Ray's errors, which may contain anything.
        kind = what if event is None else f"{what} {event['name']}"
        if kind not in self._said:
            self._said.add(kind)
            if event is not None:
                what = f"piece {event['piece']} of {event['uri']} {what}"
            text = type(why).__name__ if isinstance(why, BaseException) else why
            log.warning("overwire: ray: %s (%s): %s", what, text, then)

    def _take_events(self) -> None:
        while True:
            try:
                events = _verbs.feed_next(self._feed, _EVENTS)["events"] or ()
            except OverwireError:  # closed, or the process ends
                self._is_over = True
                self._todo.set()
                return
            try:
                for event in events:
                    self._handle(event)
                wants = [(one["name"], one["piece"], one["bytes"]) for one in events
                         if one["what"] == "ask" and (one["file"], one["piece"]) in self._asked]  # fmt: skip
                if wants and self._directory is not None:
                    self._directory.add_wants.remote(self._process, wants)
            except Exception as error:
                self._say("pieces cannot be shared", error)

    def _add_work(self, work: Callable[[], None]) -> None:
        # Starts the threads with the first work. A process that finds all pieces on its node needs none.
        self._work.put(work)
        with self._lock:
            is_first, self._has_workers = not self._has_workers, True
        if is_first:
            with after_error(self.stop):
                self._start_threads(*[self._take_work] * _PIECES)

    def _take_work(self) -> None:
        while True:
            self._work.get()()

    def _handle(self, event: FedEvent) -> None:
        what, file = event["what"], event["file"]
        piece, key = (file, event["piece"]), (event["name"], event["piece"])
        with self._lock:
            local = self._local.get(key)
            if what == "ask":
                self._asked[piece] = event
                count = -(-event["size"] // self._piece_bytes)
                progress = self._progress.setdefault(event["name"], ReadProgress(count))
                progress.last_wanted = max(progress.last_wanted, event["piece"])
                self._todo.set()
            elif what == "free":
                self._memory.pop(piece, None)
                self._local.pop(key, None)
            elif what == "late":
                self._asked.pop(piece, None)
                self._sources.pop(piece, None)
            elif what == "bad":
                self._local.pop(key, None)
            else:
                self._local = {one: local for one, local in self._local.items() if one[0] != event["name"]}
                self._progress.pop(event["name"], None)
                self._sources = {key: one for key, one in self._sources.items() if key[0] != file}
                self._asked = {key: one for key, one in self._asked.items() if key[0] != file}
                self._memory = {key: one for key, one in self._memory.items() if key[0] != file}
                self._owners = {key: one for key, one in self._owners.items() if key[0] != file}
        if what == "ask" and local is not None:
            self._run_work(local, event)
        elif what == "ask" and self._patience == _START:
            _verbs.feed_wait(self._feed, *piece, int(_START * 1000))
        elif what == "bad":
            self._say("has a wrong checksum", "dropped for all nodes", event)
            self._drop_piece(key, self._owners.get(piece))
        elif what == "late":
            self._say("is late", "the store would be faster", event)
        elif what == "alone":
            self._say(f"pieces of {event['uri']} do not arrive in time", "no more of them are requested")
        if what not in ("ask", "free", "bad"):
            self._start_fetches()
        if what in ("alone", "close") and self._directory is not None:
            self._directory.leave.remote(event["name"], self._node)

    def _drop_piece(self, key: directory.Key, owner: str | None) -> None:
        with self._lock:
            is_shared = key not in self._leases
            self._leases.discard(key)
        if not is_shared:  # this process has read the piece, and now does not share it
            self._directory.fail.remote(key, self._process)
        elif owner is not None:
            self._directory.drop.remote([key], owner)

    def _take_answers(self) -> None:
        # Finds the directory before the first question, because a process's first call to Ray takes long. Then calls it
        # while there are questions, ranges or leases.
        try:
            self._directory = find_directory(self._ray)
            self._note_alive()
            while not self._is_over:
                self._take_answer()
        except Exception as error:
            self._say("pieces cannot be shared", error)
            self.stop()

    def _take_answer(self) -> None:
        with self._lock:
            wants = [one for piece, one in self._asked.items() if piece not in self._busy]
            ranges = {} if wants else self._choose_range()  # wanted pieces come first
            leases, has, self._has = list(self._leases), self._has, []
            if not (wants or ranges):
                self._todo.clear()
        if not (wants or leases or has or ranges):
            if not self._todo.wait(_BEAT):
                with self._lock:  # what is known about objects that are still open may be outdated
                    self._local = {}
                self._note_alive()
            return
        try:
            keys = [(one["name"], one["piece"], one["bytes"]) for one in wants]
            work = self._directory.take_work.remote(self._process, self._node, self._room, keys, leases, has, ranges)
            pieces, reads, stores, local = self._ray.get(work, timeout=self._patience)
            self._patience = _PATIENCE
        except Exception as error:
            self._say("the directory does not answer", error)
            self._patience = _PATIENCE
            for one in wants:
                self._answer_question(one)
            self._find_again()
            return
        for key, refs, sums, owner, seconds in pieces + self._use_local_pieces(local):
            fetch = partial(self._fetch_piece, refs=refs, sums=sums, owner=owner, seconds=seconds)
            self._start_work(key, fetch, True)
        for key in reads:
            with self._lock:
                self._leases.add(key)
            if not self._start_work(key, self._read_piece, False):
                self._end_lease(key)
        for key in stores:
            self._start_work(key, self._decline_piece, True)
        self._extend_waits()
        if not (wants or ranges):
            self._todo.wait(directory.POLL)

    def _choose_range(self) -> dict[str, tuple[int, int]]:
        # Chooses and records the next range of an object whose last range is used up, or soon will be. The caller holds
        # the lock.
        for name, progress in self._progress.items():
            first = max(progress.end, progress.last_wanted + 1)
            if first < min(progress.count, progress.last_wanted + 1 + self._range_pieces // 2):
                progress.end = first + self._range_pieces
                return {name: (first, progress.end)}
        return {}

    def _use_local_pieces(self, pieces: list[directory.PieceRecord]) -> list[directory.PieceRecord]:
        # Gets the memory of pieces that are in this node's shared memory, and answers questions about them. The memory
        # stays in use until the engine has used the piece or closed the object. The engine reads the store for pieces
        # without checksums. If Ray has lost or moved a piece, returns all pieces, to be fetched like those of other
        # nodes.
        answers: dict[directory.Key, Callable[[FedEvent], None]] = {}
        try:
            memories = self._ray.get([refs[0] for _, refs, *_ in pieces], timeout=_LOCAL) if pieces else []
            for (key, _, sums, owner, _), memory in zip(pieces, memories, strict=True):
                memory = memory if sums else None
                answers[key] = partial(self._answer_question, memory=memory, sums=sums, owner=owner)
        except Exception as error:  # the rest of the answer is used
            if not isinstance(error, self._ray.exceptions.RayError):
                self._say("pieces of this node cannot be used", error, then="fetching them one by one instead")
            return pieces
        with self._lock:
            self._local.update((key, one) for key, one in answers.items()
                               if key[0] in self._progress and key[1] > self._progress[key[0]].last_wanted)  # fmt: skip
            questions = [(one, answers[one["name"], one["piece"]]) for one in self._asked.values()
                         if (one["name"], one["piece"]) in answers]  # fmt: skip
        for event, answer in questions:
            self._run_work(answer, event)
        return []

    def _note_alive(self) -> None:
        # A call after ray.shutdown() would start a new cluster. If the directory is lost, the next load notices it.
        with contextlib.suppress(Exception):
            if self._ray.is_initialized():
                self._directory.note_alive.remote(self._process)

    def _find_again(self) -> None:
        try:
            self._directory = find_directory(self._ray)
            self._ray.get(self._directory.note_alive.remote(self._process), timeout=_START)
        except Exception:
            time.sleep(1)  # the engine reads its store

    def _start_work(self, key: directory.Key, work: Callable[[FedEvent], object], for_all: bool) -> bool:
        """Lets threads work on all questions for a piece, or on one of them. Returns whether there are any."""
        with self._lock:
            events = [one for piece, one in self._asked.items()
                      if piece not in self._busy and (one["name"], one["piece"]) == key]  # fmt: skip
            events = events if for_all else events[:1]
            self._busy.update((one["file"], one["piece"]) for one in events)
        for event in events:
            self._add_work(partial(self._run_work, work, event))
        return bool(events)

    def _run_work(self, work: Callable[[FedEvent], object], event: FedEvent) -> None:
        try:
            work(event)
        except Exception as error:
            if not isinstance(error, OverwireError):  # the engine reads the store itself, and reports the error
                self._say("pieces cannot be shared", error)
            self._answer_question(event)
            self._set_free(event)

    def _set_free(self, event: FedEvent) -> None:
        with self._lock:
            self._busy.discard((event["file"], event["piece"]))
        self._todo.set()

    def _extend_waits(self) -> None:
        # The directory has answered, so pieces that are wanted or that this process reads are on their way.
        with self._lock:
            pieces = [piece for piece, one in self._asked.items()
                      if piece not in self._busy or (one["name"], one["piece"]) in self._leases]  # fmt: skip
        for file, number in pieces:
            _verbs.feed_wait(self._feed, file, number, int(_WAIT * 1000))

    def _answer_question(self, event: FedEvent, memory: Any = None, sums: bytes = b"", owner: str = "") -> None:
        """Answers the engine's question. Without memory, the engine reads its store."""
        file, number = event["file"], event["piece"]
        if memory is not None:
            address, size, holder = buffer_of(memory)
        with self._lock:  # so that "free" is handled after the memory is recorded
            if self._asked.pop((file, number), None) is None:
                return
            if memory is None:
                _verbs.feed_answer(self._feed, file, number, 0, 0, b"")
                return
            self._owners[file, number] = owner  # needed to drop the piece if the engine refuses it
            if _verbs.feed_answer(self._feed, file, number, address, size, sums):
                self._memory[file, number] = holder

    def _decline_piece(self, event: FedEvent) -> None:
        self._answer_question(event)
        self._set_free(event)

    def _fetch_piece(self, event: FedEvent, refs: list[Any], sums: bytes, owner: str, seconds: float) -> None:
        # Starts to fetch a piece that another process has read. No thread waits in ray.get, because a ray.put of this
        # process would then wait as well.
        if not sums:  # the engine does not check a piece without checksums
            self._decline_piece(event)
            return
        self._seconds = max(seconds, self._seconds * 0.9)  # the last pieces are read fast, but their transfers wait
        wait = min(max(_WAIT, _READS_LONG * self._seconds), directory.PATIENCE)  # another process chose `seconds`
        wait *= 1 + len(self._busy) // _FETCHES
        _verbs.feed_wait(self._feed, event["file"], event["piece"], int(wait * 1000))
        use = partial(self._use_piece, sums=sums, owner=owner)
        with self._lock:
            self._waiting.append((refs[0], owner, use, event))
        self._start_fetches()

    def _start_fetches(self, ended: Piece | None = None) -> None:
        # Starts fetches. Prefers pieces of owners that this process fetches nothing from, and drops those for which the
        # engine no longer waits. ended: a piece whose fetch has ended.
        begin = []
        with self._lock:
            if ended is not None:
                self._sources.pop(ended, None)
            over = [one for one in self._waiting if (one[3]["file"], one[3]["piece"]) not in self._asked]
            self._waiting = [one for one in self._waiting if (one[3]["file"], one[3]["piece"]) in self._asked]
            while self._waiting and len(self._sources) < _FETCHES:
                owners = list(self._sources.values())
                begin.append(min(self._waiting, key=lambda one: owners.count(one[1])))
                self._waiting.remove(begin[-1])
                _, owner, _, event = begin[-1]
                self._sources[event["file"], event["piece"]] = owner
        for *_, event in over:
            self._set_free(event)
        for ref, _, use, event in begin:
            self._run_work(partial(self._begin_fetch, ref, use), event)

    def _begin_fetch(self, ref: Any, use: Callable[[Any, FedEvent], None], event: FedEvent) -> None:
        with after_error(self._start_fetches, (event["file"], event["piece"])):
            ref.future().add_done_callback(partial(self._end_fetch, use, event))

    def _end_fetch(self, use: Callable[[Any, FedEvent], None], event: FedEvent, future: Any) -> None:
        self._add_work(partial(self._run_work, partial(use, future), event))
        self._start_fetches((event["file"], event["piece"]))

    def _use_piece(self, future: Any, event: FedEvent, sums: bytes, owner: str) -> None:
        """Answers with a piece that Ray has fetched. If it is lost, the question stays open."""
        key = event["name"], event["piece"]
        try:
            memory = future.result()
        except self._ray.exceptions.RayError as error:
            self._say("is lost", error, event)
            keys = None if isinstance(error, self._ray.exceptions.OwnerDiedError) else [key]
            self._directory.drop.remote(keys, owner)
        else:
            self._answer_question(event, memory, sums, owner)
            with self._lock:
                self._has.append(key)
        self._set_free(event)

    def _read_piece(self, event: FedEvent) -> None:
        # Reads a piece from the store, answers, and shares it. The engine does not wait for the sharing.
        key, piece, size = (event["name"], event["piece"]), (event["file"], event["piece"]), event["bytes"]
        try:
            memory = mmap(-1, size)
            address, _, holder = buffer_of(memory, True)
            with self._reads:
                if piece not in self._asked:
                    return
                began = time.monotonic()
                sums = array("Q", _verbs.feed_read(self._feed, *piece, address, size)["sums"]).tobytes()
            self._answer_question(event, memory, owner=self._process)
            after = time.monotonic()
            ref = self._ray.put(pickle.PickleBuffer(memory))
            del holder
            with self._lock:  # so that a wrong piece is not shared after it was dropped
                if key in self._leases:
                    self._leases.discard(key)
                    self._directory.put.remote(key, self._process, [ref], sums, after - began)
            if time.monotonic() - after > _SHARE:
                self._room = 0
                self._say("Ray's object store is full or slow", "this process shares no more pieces")
        finally:
            if key in self._leases:
                self._end_lease(key)
            self._set_free(event)

    def _end_lease(self, key: directory.Key) -> None:
        with self._lock:
            self._leases.discard(key)
        self._directory.fail.remote(key, self._process)

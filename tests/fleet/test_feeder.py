"""Tests the supplier of a process against the real directory, without Ray and without the engine: the tests decide when
calls of the directory end, and which pieces the engine wants."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from overwire.errors import ArgumentError
from overwire.fleet import directory, feeder

COUNT = 400


class RayError(Exception):
    pass


class Node:
    """A node that has all pieces of the object "N", and a supplier there. may_answer: calls of the directory end only
    while it is set. failures: the next calls of the directory that fail. answers: what the engine got, as (file, piece,
    whether it got memory)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.directory, self.loop = directory.Directory(), asyncio.new_event_loop()
        self.calls: list[tuple[Any, ...]] = []
        self.answers: list[tuple[int, int, bool]] = []
        self.failures, self.may_answer = 0, Event()
        self.may_answer.set()
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._is_closed = False
        self._thread = Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        for number in range(COUNT):
            self.directory.pieces["N", number] = directory.Piece(["ref"], b"sums", "owner", "node", 1, 0.1)
        engine = {
            "feed_open": lambda *_: 1, "feed_next": self._next_events, "feed_answer": self._take,
            "feed_close": self._close, "feed_wait": lambda *_: None,
        }  # fmt: skip
        for name, function in engine.items():
            monkeypatch.setattr(feeder._verbs, name, function)
        monkeypatch.setattr(feeder, "buffer_of", lambda memory: (1, 1, memory))
        context = SimpleNamespace(get_node_id=lambda: "node")
        self.ray = SimpleNamespace(
            get=self._get, get_runtime_context=lambda: context, is_initialized=lambda: True,
            get_actor=lambda *_, **__: self, exceptions=SimpleNamespace(RayError=RayError),
        )  # fmt: skip
        self._feeders: list[feeder.Feeder] = []
        self.feeder = self.start_feeder()

    def start_feeder(self) -> feeder.Feeder:
        self._feeders.append(feeder.Feeder(self.ray, 1, COUNT))
        return self._feeders[-1]

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Any:
            if self._is_closed:
                raise RayError
            self.calls.append((method, *args))
            return asyncio.run_coroutine_threadsafe(getattr(self.directory, method)(*args), self.loop)

        return SimpleNamespace(remote=call)

    def _get(self, what: Any, timeout: float) -> Any:
        if isinstance(what, list):
            return [b"piece" for _ in what]
        self.may_answer.wait()
        if self.failures:
            self.failures -= 1
            raise RayError
        assert isinstance(what, Future)
        return what.result(timeout)

    def _next_events(self, feed: int, ms: int) -> Any:
        if self._is_closed:
            raise ArgumentError("closed")
        try:
            return {"events": self._events.get(timeout=0.05)}
        except Empty:
            return {"events": None}

    def _take(self, feed: int, file: int, piece: int, address: int, size: int, sums: bytes) -> int:
        self.answers.append((file, piece, bool(address)))
        return bool(address)

    def _close(self, feed: int) -> None:
        self._is_closed = True

    def tell(self, what: str, *pieces: int, file: int = 1) -> None:
        common = {"what": what, "file": file, "name": "N", "uri": "u", "size": COUNT, "bytes": 1}
        self._events.put([{**common, "piece": piece} for piece in pieces])

    def count(self, method: str) -> int:
        return sum(1 for name, *_ in self.calls if name == method)

    async def _end_tasks(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def end(self) -> None:
        self.may_answer.set()
        for one in self._feeders:
            one.stop()
            _wait(lambda: one._is_over)  # noqa: B023
        asyncio.run_coroutine_threadsafe(self._end_tasks(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    one = Node(monkeypatch)
    yield one
    one.end()


def _wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_pieces_are_listed_before_they_are_wanted(node: Node) -> None:
    """A process that reads pieces of its own node in order asks the directory once for many of them, and holds few that
    are not wanted yet. It starts no threads for work."""
    for number in range(0, COUNT, 8):
        node.tell("ask", *range(number, number + 8))
        _wait(lambda: len(node.answers) == number + 8)  # noqa: B023
        node.tell("free", *range(number, number + 8))
        assert len(node.feeder._local) <= 3 * directory.LOCAL // 2
    assert all(has_memory for *_, has_memory in node.answers)
    assert node.count("take_work") <= COUNT // 16 + 4
    _wait(lambda: not node.feeder._memory)
    assert not node.feeder._has_workers


def test_questions_of_a_second_file(node: Node) -> None:
    """If an object is open twice, and one of the files is closed while the directory answers a question of the other,
    that question is answered."""
    node.may_answer.clear()
    node.tell("ask", 0, 1, file=2)
    _wait(lambda: node.count("take_work"))
    node.tell("close", 0, file=1)
    _wait(lambda: node.count("leave"))
    node.may_answer.set()
    _wait(lambda: len(node.answers) == 2)
    assert node.count("take_work") < 10


def test_questions_during_a_failure(node: Node) -> None:
    """If a call of the directory fails, the engine reads the store for the pieces in this call. Later questions are
    answered, also those from before the failure, and no unwanted pieces are held."""
    node.may_answer.clear()
    node.tell("ask", 100)
    _wait(lambda: node.count("take_work"))
    node.tell("ask", 398, 399)
    _wait(lambda: len(node.feeder._asked) == 3)
    node.failures = 1
    node.may_answer.set()
    _wait(lambda: len(node.answers) == 3)
    assert sorted(node.answers) == [(1, 100, False), (1, 398, True), (1, 399, True)]
    assert node.count("take_work") < 10
    assert not node.feeder._local


def test_no_threads(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started for work, the process shares no more pieces, and the engine reads its stores."""

    def start(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(feeder, "start_thread", start)
    node.directory.pieces["N", 5].nodes = {"other"}
    node.tell("ask", 5)
    _wait(lambda: node._is_closed)


def test_processes_with_one_number_have_different_names(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each container numbers its processes separately, so two processes on a node may have the same number."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    feeders = [node.start_feeder() for _ in range(2)]
    _wait(lambda: node.count("note_alive") == 3)
    assert len({one._process for one in feeders}) == 2

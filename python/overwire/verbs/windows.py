"""Streams in bounded memory: one window of tensors after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from threading import RLock
from typing import TYPE_CHECKING, Any

from .._imports import skip_at_exit
from ..model.opened import Model
from ..progress import Progress, Watcher

if TYPE_CHECKING:
    from .._requests import PlanWindow


def windows_of(chosen: Sequence[int], windows: Iterable[PlanWindow]) -> list[tuple[list[int], int]]:
    """The tensors of each window that the engine divides a model into, and their bytes."""
    positions = iter(chosen)
    return [(list(islice(positions, window["tensors"])), window["bytes"]) for window in windows]


class Windows(Iterator[tuple[str, Any]]):
    """The tensors of all windows. `begin` starts the stream of one, which has
    `landed()`, `cancel()` and `close()`. It owns the model."""

    def __init__(
        self,
        model: Model,
        windows: list[tuple[list[int], int]],
        budget: int,
        begin: Callable[[list[int], Watcher | None], Any],
        watcher: Watcher | None,
    ) -> None:
        self._model, self._begin, self._budget = model, begin, budget
        self._left = windows[::-1]
        self._watcher = watcher
        self._total = (
            sum(model.table[at][3] for at in (p for w, _ in windows for p in w)), sum(len(w) for w, _ in windows)
        )
        self._passed = (0, 0)
        self._lock = RLock()  # each thread takes what comes next
        self._now: tuple[Any, int] | None = None  # a stream, and the bytes of its window
        self._next: tuple[Any, int] | None = None
        try:
            self._now = self._start_window()
        except BaseException:
            self.close()
            raise

    def _start_window(self) -> tuple[Any, int] | None:
        if not self._left:
            return None
        window, size = self._left.pop()
        # Without self: a stream that is dropped must not wait for the cycle collector.
        whole, (done_bytes, count), (size_of_all, all_of_them) = self._watcher, self._passed, self._total
        if whole is None:
            return self._begin(window, None), size
        self._passed = (done_bytes + sum(self._model.table[at][3] for at in window), count + len(window))

        def update_watcher(now: Progress) -> None:  # counts of this window as those of all of them
            whole.update(Progress(done_bytes + now.bytes, size_of_all, count + now.tensors, all_of_them))

        return self._begin(window, Watcher(update_watcher)), size

    def __next__(self) -> tuple[str, Any]:
        with self._lock:
            return self._take_next()

    def _take_next(self) -> tuple[str, Any]:
        try:
            while self._now is not None:
                stream, size = self._now
                # Only when this one has landed: two loads at once would share the way.
                if self._next is None and self._left and size + self._left[-1][1] <= self._budget and stream.landed():
                    self._next = self._start_window()
                for item in stream:
                    pair: tuple[str, Any] = item
                    return pair
                self._now, self._next = self._next, None
                if self._now is None:
                    self._now = self._start_window()
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def __repr__(self) -> str:
        suffix = "" if self._now is not None else ", ended"
        return f"<stream of {self._total[1]} tensors to {self._model.device}, {self._budget} bytes at a time{suffix}>"

    def close(self) -> None:
        """Ends the stream; the rest is cancelled and freed."""
        if not self._lock.acquire(blocking=False):  # another thread waits for what comes next
            for running in filter(None, (self._now, self._next)):
                running[0].cancel()
            self._lock.acquire()
        try:
            for running in filter(None, (self._now, self._next)):
                running[0].close()
            self._now = self._next = None
            self._left = []
            self._model.close()
            watcher, self._watcher = self._watcher, None
            if watcher is not None:
                watcher.close()
        finally:
            self._lock.release()

    @skip_at_exit
    def __del__(self) -> None:
        if hasattr(self, "_next"):
            self.close()

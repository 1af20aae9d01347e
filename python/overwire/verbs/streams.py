"""Iterates over the tensors of a load as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from .._engine import HandleOwner, forked, refuse_child
from .._imports import skip_at_exit
from .._locks import new_lock
from .._undo import after_error
from ..errors import ArgumentError, OverwireError
from ..model.loads import Load
from ..model.opened import Model, Target
from ..model.options import parse_size
from ..progress import Progress, Watcher

if TYPE_CHECKING:
    from ..distributed.stream import GroupArrivals


class Stream(HandleOwner, Iterator[tuple[str, Any]]):
    """Yields the tensors of `arrivals` by name. Several threads may iterate, one at a time.

    order: the numbers of the tensors in the order in which to yield them, by default as they arrive. text: a
    description of the tensors.

    The class is not a generator, because a generator that was never started would not run its `finally`, but the load
    has begun.
    """

    def __init__(self, arrivals: ModelArrivals | GroupArrivals, order: Iterable[int] | None, text: str) -> None:
        self._arrivals, self._text = arrivals, text
        self._order = None if order is None else iter(order)
        self._early: dict[int | None, tuple[str, Callable[[], Any]]] = {}  # tensors that have arrived too early
        self._has_ended = False
        # A signal handler of the same thread can acquire the lock. `_taking` detects this case, which is refused.
        self._lock = new_lock()
        self._taking = False

    def __next__(self) -> tuple[str, Any]:
        refuse_child("overwire: stream: its load runs in")
        with self._lock:
            self._refuse_within("next")
            self._taking, had_ended = True, self._has_ended
            try:
                name, make = self._take_next()
                pair = name, make()
                if self._has_ended and not had_ended:
                    self._arrivals.close()  # ends a window that began after a signal handler had closed the stream
                return pair
            except BaseException as error:
                # whether a signal handler closed the stream during the step that failed
                is_closed = self._has_ended and not had_ended
                self._end_load(None if isinstance(error, StopIteration) else error)
                if is_closed and isinstance(error, (OverwireError, IndexError)):
                    raise StopIteration from None
                raise
            finally:
                self._taking = False

    def _take_next(self) -> tuple[str, Callable[[], Any]]:
        if self._order is None:
            return self._arrivals.take_next()[1:]
        number = next(self._order, None)
        while number not in self._early:
            at, name, make = self._arrivals.take_next()
            self._early[at] = name, make
        return self._early.pop(number)

    def _refuse_within(self, step: str) -> None:
        # A refused call leaves the stream unchanged.
        if self._taking:
            text = f"overwire: stream: {step}() within next(): a signal handler called it while it interrupted next()"
            raise ArgumentError(text)

    def close(self) -> None:
        """Ends the stream: cancels the load and frees the remaining tensors. Does nothing in a forked child, because
        the parent owns the load."""
        if forked():
            return
        if not self._lock.acquire(blocking=False):
            self._arrivals.end_waits()  # another thread may be waiting for the next tensor
            self._lock.acquire()
        try:
            if self._arrivals.collective:
                self._refuse_within("close")  # the other ranks wait for this step
            self._end_load()
        finally:
            self._lock.release()

    def _end_load(self, error: BaseException | None = None) -> None:
        self._has_ended, self._early = True, {}
        self._arrivals.close(error)

    @skip_at_exit
    def __del__(self) -> None:
        if hasattr(self, "_taking"):
            self.close()

    def __repr__(self) -> str:
        return f"<stream of {self._text}{', ended' if self._has_ended else ''}>"


class ModelArrivals:
    """The tensors of a model that this process loads in one load, or window by window. It is closed when the last load
    has begun.

    windows: for each window, the positions of its tensors and their bytes, or None for a single load of all chosen
    tensors. The tensors are numbered in this order.
    """

    collective = False

    def __init__(
        self, model: Model, target: Target, windows: list[tuple[list[int], int]] | None, watcher: Watcher | None
    ) -> None:
        self._model, self._target, self._budget = model, target, parse_size(target.max_memory)
        self._watcher = None if windows is None else watcher
        self._left = (windows or [])[::-1]
        positions = [at for window, _ in self._left for at in window]
        self._begun = Progress(0, sum(model.table[at][3] for at in positions), 0, len(positions))
        self._running: list[tuple[Load, int, int]] = []  # at most two loads, each with its bytes and its first number
        self._landed: list[tuple[int, Any, int]] = []  # the tensors of the first load that have landed
        with after_error(self.close):
            if windows is None:
                self._begin_load(model.chosen, 0, watcher)
            else:
                self._begin_window()

    def _begin_load(self, positions: list[int] | None, size: int, watcher: Watcher | None) -> None:
        load = self._model.begin(positions, self._target.frame, self._target.dtype, watcher)
        self._running = [*self._running, (load, size, self._begun.tensors)]
        if not self._left:
            self._model.close()

    def _begin_window(self) -> None:
        if self._left:
            (positions, size), before = self._left.pop(), self._begun
            self._begin_load(positions, size, None if self._watcher is None else _watch_window(self._watcher, before))
            nbytes = sum(self._model.table[at][3] for at in positions)
            self._begun = before._replace(bytes=before.bytes + nbytes, tensors=before.tensors + len(positions))

    def take_next(self) -> tuple[int, str, Callable[[], Any]]:
        """Waits for the next tensor. Returns its number, its name and a function that makes it. Raises StopIteration
        after the last."""
        while self._running:
            load, size, first = self._running[0]
            if len(self._running) == 1 and self._left and size + self._left[-1][1] <= self._budget and _is_over(load):
                self._begin_window()  # not earlier, because two loads would share the bandwidth
            self._landed = self._landed or load.next()[::-1]
            if self._landed:
                at, *place = self._landed.pop()
                return first + at, load.rows[at][0], partial(load.tensor, at, *place)
            self._running = self._running[1:]
            load.job.done()
            if not self._running:
                self._begin_window()
        raise StopIteration

    def end_waits(self) -> None:
        """Makes a `take_next` that waits in another thread return soon."""
        for load, *_ in self._running:
            load.job.cancel()

    def close(self, error: BaseException | None = None) -> None:
        """Cancels the load and frees the remaining tensors. A second call does nothing. error: the reason."""
        running, self._running, self._left, self._landed = self._running, [], [], []
        for load, *_ in running:
            if load.places:
                load.job.cancel()  # the engine writes to the tensors until it has stopped
            load.job.free()
        self._model.close()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()


def _watch_window(watcher: Watcher, before: Progress) -> Watcher:
    # Adds the readings of a window to those of earlier windows. The result does not refer to the stream, because only
    # the cycle collector could then free the stream.
    return Watcher(
        lambda now: watcher.update(
            before._replace(bytes=before.bytes + now.bytes, tensors=before.tensors + now.tensors)
        )
    )


def _is_over(load: Load) -> bool:
    # Returns whether the load has ended. The load's error is raised when its tensors are taken.
    try:
        return load.job.ended(0.0)
    except OverwireError:
        return False

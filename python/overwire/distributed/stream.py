"""Yields the tensors of a group load, over which all ranks iterate together."""

from __future__ import annotations

import atexit
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

from .group import on_current_gpu
from .tensors import TensorLoad


class GroupArrivals:
    """The tensors of a load by a group, in the order of arrival; see `verbs.streams`. Every method is collective.

    opening: a context manager that opens the load. The positions of this rank's tensors also serve as their numbers.
    """

    collective = True

    def __init__(self, opening: AbstractContextManager[TensorLoad], device: str) -> None:
        self._stack = ExitStack()
        self._device = device
        load = self._stack.enter_context(opening)
        self._load: TensorLoad | None = load
        self._names = [row[0] for row in load.model.table]
        self.positions = load.positions
        self._tensors = load.iter_tensors()
        _open.add(self)

    def take_next(self) -> tuple[int, str, Callable[[], Any]]:
        """Returns the position of the next tensor, its name, and a function that returns it."""
        with on_current_gpu(self._device):
            at, tensor = next(self._tensors)
        return at, self._names[at], lambda: tensor

    def end_waits(self) -> None:
        """Does nothing, because a step ends only when all ranks have taken it."""

    def close(self, error: BaseException | None = None) -> None:
        """Ends the load on all ranks. error: the reason, which the other ranks get unless they know it."""
        _open.discard(self)
        load, self._load = self._load, None
        with on_current_gpu(self._device):
            try:
                if load is not None:
                    if inspect.getgeneratorstate(self._tensors) == inspect.GEN_CREATED:
                        load.close_unbegun()  # closing a generator that has not started does not inform the other ranks
                    self._tensors.close()
            finally:
                if error is None:
                    self._stack.close()
                else:
                    self._stack.__exit__(type(error), error, error.__traceback__)


_open: weakref.WeakSet[GroupArrivals] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Closes loads while the groups still exist. Closing a load later would abort the process.
    for arrivals in list(_open):
        with suppress(Exception):
            if inspect.getgeneratorstate(arrivals._tensors) != inspect.GEN_RUNNING:  # a daemon thread may run it
                arrivals.close()

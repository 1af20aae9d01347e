"""Implements streams of a group. All ranks iterate over a stream together."""

from __future__ import annotations

import atexit
import inspect
import weakref
from contextlib import ExitStack, suppress
from typing import Any

from ..jobs import Steps
from ..model.options import DeviceLike, ShardLike
from ..model.sources import SourceLike
from ..progress import spell_count
from .group import on_current_gpu
from .tensors import TensorLoad, open_load


class GroupStream(Steps):
    """Implements `stream` for a process group. The constructor, every step, and an early `close` are collective.
    `close` ends the stream on all ranks. Forked children do not take part."""

    def __init__(
        self,
        source: SourceLike,
        group: Any,
        shard: ShardLike,
        device: DeviceLike,
        framework: Any,
        in_order: bool,
        budget: int,
        options: dict[str, Any],
    ) -> None:
        self._stack = ExitStack()
        self._device = device
        self._early: dict[int, Any] = {}
        opening = open_load(source, group, shard, device=device, framework=framework, budget=budget, **options)
        load = self._stack.enter_context(opening)
        self._load: TensorLoad | None = load
        self._names = [row[0] for row in load.model.table]
        self._order = iter(load.positions) if in_order else None
        self._tensors = load.iter_tensors()
        self._total = len(load.positions)
        super().__init__()
        _open.add(self)

    def _take_next(self) -> tuple[str, Any]:
        try:
            with on_current_gpu(self._device):
                if self._order is None:
                    at, tensor = next(self._tensors)
                    return self._names[at], tensor
                due = next(self._order, None)
                while due not in self._early:
                    at, tensor = next(self._tensors)
                    self._early[at] = tensor
                assert due is not None
                return self._names[due], self._early.pop(due)
        except StopIteration:  # the ranks have already agreed
            self._end(None)
            raise
        except BaseException as error:
            self._end(error)
            raise

    def __repr__(self) -> str:
        return f"<stream of {spell_count(self._total, 'tensor')} of a group to {self._device}>"

    def _free_rest(self) -> None:
        self._refuse_within("close")  # the step continues together with the other ranks
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        _open.discard(self)
        # Ends the stream. error: the reason, which is passed to the other ranks unless they know it.
        load, self._load, self._early = self._load, None, {}
        try:
            if load is not None:
                with on_current_gpu(self._device):
                    if inspect.getgeneratorstate(self._tensors) == inspect.GEN_CREATED:
                        load.close_unbegun()  # a generator that has not started does not inform the other ranks
                    self._tensors.close()
        finally:
            if error is None:
                self._stack.close()
            else:
                self._stack.__exit__(type(error), error, error.__traceback__)


_open: weakref.WeakSet[GroupStream] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # Closes streams while the groups still exist. A stream that is closed later aborts the process.
    for stream in list(_open):
        with suppress(Exception):
            if not stream._taking:  # a daemon thread may be inside a step; it ends with the process
                stream.close()

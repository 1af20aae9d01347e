"""stream: whole tensors as they arrive, of all of a model at once or in windows of max_memory bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

from .. import errors
from .._engine import forked
from ..errors import OverwireError
from ..jobs import Steps
from ..model.budget import fit, outlook
from ..model.loads import Load
from ..model.opened import Model, check_target, opening, prepare, start_engine
from ..model.options import (
    ArrayName,
    BytesName,
    DeviceLike,
    FrameworkName,
    StreamOptions,
    TorchName,
    check_options,
    check_switches,
    parse_size,
    spell_out,
)
from ..model.sources import SourceLike
from ..progress import Progress, Watcher, spell_count, watch
from .grouped import group_context

if TYPE_CHECKING:
    import numpy
    import torch
    from typing_extensions import Unpack

    from .._requests import PlanWindow


@overload
def stream(
    source: SourceLike,
    device: DeviceLike = "cpu",
    *,
    framework: TorchName | None = None,
    in_order: bool = False,
    **options: Unpack[StreamOptions],
) -> Iterator[tuple[str, torch.Tensor]]: ...


@overload
def stream(
    source: SourceLike,
    device: DeviceLike = "cpu",
    *,
    framework: ArrayName,
    in_order: bool = False,
    **options: Unpack[StreamOptions],
) -> Iterator[tuple[str, numpy.ndarray[Any, Any]]]: ...


@overload
def stream(
    source: SourceLike,
    device: DeviceLike = "cpu",
    *,
    framework: BytesName,
    in_order: bool = False,
    **options: Unpack[StreamOptions],
) -> Iterator[tuple[str, memoryview]]: ...


@overload
def stream(
    source: SourceLike,
    device: DeviceLike = "cpu",
    *,
    framework: FrameworkName | None,
    in_order: bool = False,
    **options: Unpack[StreamOptions],
) -> Iterator[tuple[str, Any]]: ...


def stream(
    source: SourceLike, device: Any = "cpu", *, framework: Any = None, in_order: bool = False, **options: Any
) -> Iterator[tuple[str, Any]]:
    """Yields (name, tensor) in the order of arrival. Arguments and tensors are those of
    `load_file`, except

    in_order: yields in the order of `load_file`'s dict instead. Tensors that arrive
        before their turn are held back, so an error of the load may drop some.
    max_memory: the most bytes of tensors that are loaded, or being loaded, and not
        yet yielded; the caller frees those that were. The load goes in windows of
        half of that. A single larger tensor is refused.

    This call opens the file and starts the load; each tensor is complete when it is
    yielded. Threads may share the iterator: each gets what comes next. Closing it early
    (`break`, `close`, an exception in the loop) cancels the rest and frees it. An error of the
    load is raised after the tensors that arrived before it. In a forked child a stream of its
    parent raises ForkedError.

    group, shard: as for `load_file`. All ranks iterate, to the end or up to one that
        closes early, which ends the stream on all; max_memory is then the smallest that
        any rank has given. Where the ranks map each other's memory
        (`OVERWIRE_EXCHANGE=mapped`), tensors are yielded while the others arrive, else
        after each GiB.
    """
    with group_context(options, device):
        check_options("stream", options, StreamOptions)
        check_switches(in_order=in_order)
        budget = parse_size(options.get("max_memory"), "max_memory")
        group, shard = options.pop("group", None), options.pop("shard", None)
        if group is not None or shard is not None:
            start_engine(source)
            from ..distributed.stream import GroupStream

            options.pop("max_memory", None)
            return GroupStream(source, group, shard, device, framework, in_order, budget, options)
    frame, where, frame_dtype = check_target(source, framework, device, options.get("dtype"))
    if forked():
        from ..model.forked import ForkedModel

        if budget:
            raise errors.forked("max_memory=")
        alone = ForkedModel(source, where, options.get("keys"), options.get("filter"), options.get("storage_options"))
        positions = range(len(alone.table)) if alone.chosen is None else alone.chosen
        return alone.iter_tensors(positions, frame, frame_dtype, in_order)
    prepare(where)
    max_memory, watcher = options.get("max_memory"), watch(options.get("progress"), "stream")

    def begin_stream(chosen: list[int] | None, watcher: Watcher | None) -> _Stream:
        return _Stream(model.begin(chosen, frame, frame_dtype, watcher), where, in_order)

    with ExitStack() as stack:
        model = stack.enter_context(Model(source, device=where, **opening(options)))
        model.join()
        if max_memory is None or model.joined:
            fit(model, frame, frame_dtype, max_memory)  # a preload has all of it already
            return begin_stream(model.chosen, watcher)
        chosen = range(len(model.table)) if model.chosen is None else model.chosen
        windows = _windows_of(
            chosen, outlook(model, frame, frame_dtype, max_memory=max_memory, stream=True)["windows"] or ()
        )
        stack.pop_all()  # the model is the stream's
        return _Windows(model, windows, budget, begin_stream, watcher)


spell_out(stream, StreamOptions)

class _Stream(Steps):
    """The tensors of one load, as they land, or in the order of the requests."""

    def __init__(self, load: Load, device: str, in_order: bool) -> None:
        self._load: Load | None = load
        self._names = [row[0] for row in load.rows]
        self._device = device
        self._landed: list[tuple[int, Any, int]] = []
        self._due = 0 if in_order else None  # the request whose turn it is
        self._early: dict[int, tuple[int, Any, int]] = {}  # landed before their turn
        super().__init__()

    def _take_next(self) -> tuple[str, Any]:
        load = self._load
        if load is None:
            raise StopIteration
        item = self._take_landed(load) if self._due is None else self._take_due(load)
        return self._names[item[0]], load.tensor(*item)

    def _take_due(self, load: Load) -> tuple[int, Any, int]:
        assert self._due is not None
        while self._due not in self._early:
            item = self._take_landed(load)
            self._early[item[0]] = item
        self._due += 1
        return self._early.pop(self._due - 1)

    def _take_landed(self, load: Load) -> tuple[int, Any, int]:
        """The next that has landed; StopIteration after the last."""
        if not self._landed:
            try:
                self._landed = load.next()
            except BaseException:
                self.close()
                raise
            if not self._landed:
                self._load = None
                load.job.done()
                raise StopIteration
            self._landed.reverse()
        return self._landed.pop()

    def __repr__(self) -> str:
        suffix = "" if self._load is not None else ", ended"
        return f"<stream of {spell_count(len(self._names), 'tensor')} to {self._device}{suffix}>"

    def landed(self) -> bool:
        """Whether all of it has; an error is raised where it comes in turn."""
        load = self._load
        try:
            return load is None or load.job.ended(0.0)
        except OverwireError:
            return False

    def _end_waits(self) -> None:
        if (load := self._load) is not None:
            load.job.cancel()

    def _free_rest(self) -> None:
        load, self._load = self._load, None
        self._landed, self._early = [], {}
        if load is not None:
            if load.places:
                load.job.cancel()  # the engine writes to them until it has stopped
            load.job.free()


def _windows_of(chosen: Sequence[int], windows: Iterable[PlanWindow]) -> list[tuple[list[int], int]]:
    """The tensors of each window that the engine divides a model into, and their bytes."""
    positions = iter(chosen)
    return [(list(islice(positions, window["tensors"])), window["bytes"]) for window in windows]


class _Windows(Steps):
    """The tensors of all windows. `begin` starts the stream of one. It owns the model."""

    def __init__(
        self,
        model: Model,
        windows: list[tuple[list[int], int]],
        budget: int,
        begin: Callable[[list[int], Watcher | None], _Stream],
        watcher: Watcher | None,
    ) -> None:
        self._model, self._begin, self._budget = model, begin, budget
        self._left = windows[::-1]
        self._watcher = watcher
        self._total = (
            sum(model.table[at][3] for at in (p for w, _ in windows for p in w)), sum(len(w) for w, _ in windows)
        )
        self._passed = (0, 0)
        self._now: tuple[_Stream, int] | None = None  # a stream, and the bytes of its window
        self._next: tuple[_Stream, int] | None = None
        super().__init__()
        try:
            self._now = self._start_window()
        except BaseException:
            self.close()
            raise

    def _start_window(self) -> tuple[_Stream, int] | None:
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

    def _take_next(self) -> tuple[str, Any]:
        try:
            while self._now is not None:
                stream, size = self._now
                # Only when this one has landed: two loads at once would share the way.
                if self._next is None and self._left and size + self._left[-1][1] <= self._budget and stream.landed():
                    self._next = self._start_window()
                for pair in stream:
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
        count = spell_count(self._total[1], "tensor")
        return f"<stream of {count} to {self._model.device}, {self._budget} bytes at a time{suffix}>"

    def _end_waits(self) -> None:
        for stream, _ in filter(None, (self._now, self._next)):
            stream._end_waits()

    def _free_rest(self) -> None:
        for stream, _ in filter(None, (self._now, self._next)):
            stream.close()
        self._now = self._next = None
        self._left = []
        self._model.close()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

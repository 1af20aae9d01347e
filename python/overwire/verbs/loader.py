"""Opens a model for `load_file`, `stream`, `load_model` and `safe_open`.

A model is loaded in one of four modes: by this process (`Loader`), by the ranks of a group (`GroupLoader`), in a forked
child without the engine (`ForkedLoader`), or by applying deltas to a base (`BasedLoader`). Only `choose_loader` chooses
between them. Modules that a single mode needs are imported when that mode is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from .. import errors
from .._engine import forked
from ..dtypes import nbytes, torch_shape
from ..errors import ArgumentError, CorruptError
from ..jobs import log
from ..model.opened import WHOLE, Model, Target, check_target, opening
from ..model.options import parse_size

if TYPE_CHECKING:
    from ..distributed.tensors import TensorLoad
    from ..model.forked import ForkedModel
    from ..progress import ProgressLike, Watcher
    from .ahead import Block, ReadAhead
    from .into import Destination

    #: A function that returns the destinations of a load. It gets the open model, and a function that returns the torch
    #: shape of the part of a tensor that is loaded. A group calls it again if a file was replaced before its ranks met.
    Choose = Callable[[Model, Callable[[int], tuple[int, ...]]], Sequence[Destination]]


class Loader:
    """Loads a model in this process. The classes for other modes override the methods that they support.

    If there is a group, an exception that leaves the loader's context is raised on all ranks.
    """

    def __init__(
        self, source: Any, target: Target, opens: Mapping[str, Any], progress: ProgressLike, parts: bool
    ) -> None:
        self.target, self._progress = target, progress
        if isinstance(opens.get("keys"), Iterator):  # `load_all` may open the files again
            opens = {**opens, "keys": list(opens["keys"])}
        self._open_model = partial(Model, source, device=target.device, parts=parts, **opens)
        self.model = self._open_model()
        self._has_model = True
        self._states = _states_of_files(self.model.uris) if parts else []

    def load_all(self) -> dict[str, Any]:
        """Returns the chosen tensors by name."""
        self._check_memory()
        try:
            return self._load_chosen()
        except CorruptError as error:
            if not self.model.from_host():
                raise
            text = "overwire: the bytes in the host store are wrong, and were dropped: reading the files: %s"
            log.warning(text, error)
        self.model.close()
        self.model = self._open_model(host=False)
        return self._load_chosen()

    def _load_chosen(self) -> dict[str, Any]:
        frame, dtype = self.target.frame, self.target.dtype
        return self.model.load(self.model.chosen, frame, dtype, _make_watcher(self._progress, "load"))

    def _check_memory(self) -> None:
        if self.target.max_memory is not None:
            from ..model.budget import fit

            fit(self.model, self.target.frame, self.target.dtype, self.target.max_memory)

    def iter_tensors(self, in_order: bool) -> Iterator[tuple[str, Any]]:
        """Starts to load the chosen tensors. Returns an iterator over (name, tensor), which stays valid after
        `close`."""
        from ..progress import spell_count
        from .streams import ModelArrivals, Stream

        target, model, windows, text = self.target, self.model, None, ""
        positions = range(len(model.table)) if model.chosen is None else model.chosen
        model.join()
        if target.max_memory is None or model.joined:
            self._check_memory()  # a preload has all tensors in memory already
        else:
            from ..model.budget import estimate

            load = estimate(model, target.frame, target.dtype, max_memory=target.max_memory, stream=True)
            rest = iter(positions)
            windows = [(list(islice(rest, one["tensors"])), one["bytes"]) for one in load["windows"] or ()]
            text = f", {parse_size(target.max_memory)} bytes at a time"
        arrivals = ModelArrivals(model, target, windows, _make_watcher(self._progress, "stream"))
        self._has_model = False
        text = f"{spell_count(len(positions), 'tensor')} to {target.device}{text}"
        return Stream(arrivals, range(len(positions)) if in_order else None, text)

    def load_into(self, choose: Choose, fixed: bool, max_memory: int | str | None, progress: ProgressLike) -> None:
        """Loads into existing tensors. fixed: whether to load to the target's device instead of each tensor's own
        device. max_memory: the most bytes for tensors that cannot be written to in place."""
        from .into import fill

        destinations, device = self._choose_destinations(choose), self.target.device if fixed else None
        fill(self.model, self.target.frame, destinations, device, max_memory, _make_watcher(progress, "load"))

    def _choose_destinations(self, choose: Choose) -> Sequence[Destination]:
        return choose(self.model, lambda at: torch_shape(*self.model.table[at][1:3]))

    def read_tensor(self, at: int, dtype: Any, ahead: ReadAhead) -> Any:
        """Returns one tensor. dtype: the framework's dtype to cast to, or None for no cast."""
        return self._read_block(at, None, dtype, ahead)

    def read_index(self, at: int, index: Any, ahead: ReadAhead) -> Any:
        """Returns `tensor[index]`. Reads only the block that contains it."""
        from ..model.indexing import plan

        frame, row = self.target.frame, self.model.row(at)
        reading = plan(index, row.shape)
        if reading.empty:
            tensor = frame.empty(row.dtype, reading.shape, self.model.device)
        elif reading.shape == row.shape:
            tensor = self._read_block(at, None, None, ahead)
        else:
            rows, columns = reading.block
            block = rows, (0, WHOLE) if len(row.shape) == 1 else columns, reading.shape
            tensor = self._read_block(at, block, None, ahead)
        return frame.index(tensor, reading.cut, row.dtype) if reading.cut else tensor

    def _read_block(self, at: int, block: Block | None, dtype: Any, ahead: ReadAhead) -> Any:
        model, frame = self.model, self.target.frame
        tensor = ahead.take(model, at, block, dtype)
        if tensor is not None:
            return tensor
        name, kind, *_ = model.table[at]
        if block is None:
            return model.load([at], frame, dtype, None)[name]
        (lo0, hi0), (lo1, hi1), shape = block
        rows = [(name, kind, shape, nbytes(kind, shape))]
        return model.begin_blocks([(at, (lo0, hi0, lo1, hi1))], rows, frame).tensors()[0]

    def in_this_process(self) -> Loader:
        """Returns this loader, or a new loader for the same files if the process was forked since it was made."""
        if not forked():
            return self
        from ..model.forked import ForkedModel

        uri, *_ = uris = self.model.uris
        if self._states != _states_of_files(uris):
            raise CorruptError(f"overwire: open {uri}: the file was replaced since it was opened", source=uri)
        return ForkedLoader(ForkedModel(uris, self.model.device, table=self.model.table), self.target)

    def close(self) -> None:
        """Closes the model."""
        if self._has_model:
            self.model.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def _make_watcher(progress: ProgressLike, verb: str) -> Watcher | None:
    # Most loads show no progress, and so do not import the module.
    if progress is None or progress is False:
        return None
    from ..progress import watch

    return watch(progress, verb)


def _states_of_files(paths: Iterable[str]) -> list[tuple[int, ...] | None]:
    # Returns the identities of the files, which show whether a file was replaced.
    states: list[tuple[int, ...] | None] = []
    for path in paths:
        try:
            state = os.stat(path)
            states.append((state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns))
        except (OSError, ValueError):
            states.append(None)
    return states


class ForkedLoader(Loader):
    """Reads local files in a forked child, without the engine."""

    model: ForkedModel

    def __init__(self, model: ForkedModel, target: Target) -> None:
        self.model, self.target, self._progress, self._has_model = model, target, None, True

    def iter_tensors(self, in_order: bool) -> Iterator[tuple[str, Any]]:
        positions = range(len(self.model.table)) if self.model.chosen is None else self.model.chosen
        return self.model.iter_tensors(positions, self.target.frame, self.target.dtype, in_order)

    def load_into(self, choose: Choose, fixed: bool, max_memory: int | str | None, progress: ProgressLike) -> None:
        from ..frameworks.choose import frame_for
        from .into import store_part

        destinations = self._choose_destinations(choose)
        frame = frame_for(self.target.frame.name)  # refuses torch's fake tensors
        if max_memory is not None:
            raise errors.forked("max_memory=")
        for destination in destinations:
            store_part(destination, self.model.read_index(destination.at, frame))

    def read_tensor(self, at: int, dtype: Any, ahead: ReadAhead) -> Any:
        return self.model.load([at], self.target.frame, dtype, None)[self.model.table[at][0]]

    def read_index(self, at: int, index: Any, ahead: ReadAhead) -> Any:
        return self.model.read_index(at, self.target.frame, index)

    def in_this_process(self) -> Loader:
        return self


class GroupLoader(Loader):
    """Loads with the ranks of a group. The ranks meet and open their files in the method that is called. verb: a stack
    that ends the call on this rank. The loader takes over its contents."""

    def __init__(
        self, verb: ExitStack, target: Target, progress: ProgressLike, source: Any, opens: Mapping[str, Any],
        group: Any, shard: Any,
    ) -> None:  # fmt: skip
        from ..distributed.tensors import open_load

        self.target = target
        self._open = partial(open_load, target, progress, source, opens, group, shard)
        self._verb = verb.pop_all()  # last: after an interrupt before this, the caller ends the call on all ranks

    def load_all(self) -> dict[str, Any]:
        with self._open() as load:
            return load.load_all()

    def iter_tensors(self, in_order: bool) -> Iterator[tuple[str, Any]]:
        from ..distributed.stream import GroupArrivals
        from ..progress import spell_count
        from .streams import Stream

        device = self.target.device
        arrivals = GroupArrivals(self._open(budget=parse_size(self.target.max_memory)), device)
        text = f"{spell_count(len(arrivals.positions), 'tensor')} of a group to {device}"
        return Stream(arrivals, arrivals.positions if in_order else None, text)

    def load_into(self, choose: Choose, fixed: bool, max_memory: int | str | None, progress: ProgressLike) -> None:
        from ..model.budget import fit
        from .into import in_place, store_part

        destinations: dict[int, Destination] = {}
        places: dict[int, Any] = {}
        late: dict[int, Any] = {}  # tensors to store after all others

        def choose_tensors(load: TensorLoad) -> list[int]:
            nonlocal destinations, places, late
            destinations = {one.at: one for one in choose(load.model, load.slice_shape)}
            places, order = in_place(load.model, list(destinations.values()), self.target.device)
            late = dict.fromkeys(order)
            sizes = [load.slice_size(at) for at in destinations if at not in places]
            fit(load.model, self.target.frame, None, max_memory, sizes)
            return list(destinations)

        with (
            self._open(budget=0, unmapped_budget=parse_size(max_memory), choose=choose_tensors) as load,
            closing(load.iter_tensors(places)) as arriving,
        ):
            for at, tensor in arriving:
                if at in late:
                    late[at] = tensor
                elif tensor is not places.get(at):
                    store_part(destinations[at], tensor)
        for at in list(late):
            store_part(destinations[at], late.pop(at))

    def __exit__(self, *exc: Any) -> None:
        self._verb.__exit__(*exc)


class BasedLoader(Loader):
    """Loads a base and applies deltas to it. load: loads the base, unless it is in memory. rest: see `load_on`."""

    def __init__(self, load: Callable[[], Loader], *rest: Any) -> None:
        self._load, self._rest, self._has_model = load, rest, False

    def load_all(self) -> dict[str, Any]:
        from .deltas import load_on

        def load_base() -> dict[str, Any]:
            with self._load() as loader:
                return loader.load_all()

        return load_on(load_base, *self._rest)


def choose_loader(
    verb: ExitStack, source: Any, device: Any, framework: Any, options: Mapping[str, Any], parts: bool
) -> Loader:
    """Returns the loader for the checked arguments of `open_loader`. verb: ends a group's call on this rank."""
    group = options.get("group")
    target = check_target(framework, device, options)
    opens, progress = opening(options), options.get("progress")
    if group is not None:
        return GroupLoader(verb, target, progress, source, opens, group, options.get("shard"))
    if options.get("shard") is not None:
        raise ArgumentError("overwire: shard: pass group=, the ranks that share the tensors")
    if forked():
        from ..model.forked import ForkedModel

        if target.max_memory is not None:
            raise errors.forked("max_memory=")
        return ForkedLoader(ForkedModel(source, target.device, **opens), target)
    return Loader(source, target, opens, progress, parts)

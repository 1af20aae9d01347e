"""Reads ahead for a program that requests the tensors of an open file one by one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from .. import _engine
from .._locks import new_lock
from ..dtypes import nbytes
from ..errors import OverwireError
from ..frameworks.frame import Frame
from ..model.loads import Load
from ..model.opened import WHOLE, Model

#: Ranges (lo, hi) of the first two dimensions, and the shape of the block.
Block = tuple[tuple[int, int], tuple[int, int], tuple[int, ...]]

# Tensors are read ahead in two windows: the current window and the next. A window is a single tensor, or has several
# times the bytes of the window before it, up to a maximum. These are the bytes of the first window and the maximum, on
# the host and on a GPU. On a GPU, both windows together also take at most a fraction of its free memory.
_FIRST, _MOST = 8 << 20, 128 << 20
_FIRST_GPU, _MOST_GPU = 512 << 20, 1 << 30
_GROWTH, _PART = 4, 8

# The number of requests in order after which reading ahead starts, and the largest value to which unused windows raise
# it.
_LEAST, _TIRED = 2, 64
# The number of requests with ascending names after which the order of the names is assumed.
_RISEN = 8

_NUMBERS = re.compile(r"\d+")


class _Window:
    """The tensors of one load. Each tensor can be taken once."""

    def __init__(self, load: Load, ways: dict[int, Block | None], sizes: dict[int, int]) -> None:
        self._load, self._requests = load, {at: request for request, at in enumerate(ways)}
        self.ways, self.sizes = ways, sizes
        self.left = sum(sizes.values())  # bytes that were not taken
        self._landed: dict[int, tuple[int, Any, int]] = {}

    @property
    def job_number(self) -> int:
        """Returns the number of the window's job. Callers keep only the number, so that the memory is freed after the
        load."""
        return self._load.job.number

    def take(self, at: int) -> Any:
        """Waits for a tensor. Raises the load's error."""
        request = self._requests[at]
        while request not in self._landed:
            news = self._load.next()
            self._landed.update((item[0], item) for item in news)
            if not news:
                break  # the load has ended without the tensor, so the pop below raises KeyError
        tensor = self._load.tensor(*self._landed.pop(request))
        del self.ways[at]
        self.left -= self.sizes[at]
        return tensor

    def end(self) -> None:
        """Waits until the load has ended and is counted. Must be called after the last tensor."""
        self._load.job.wait()
        self._load.job.done()

    def cancel(self) -> None:
        """Asks the load to stop."""
        self._load.job.cancel()

    def close(self) -> None:
        """Stops the load and frees the tensors that were not taken."""
        self._landed = {}
        self._load.job.abandon()


class _Order:
    """Detects the order in which tensors are requested: the order of the bytes or, if `by_name` is set or the names
    have ascended for a while, the order of the names.

    The order of the bytes is not enough. `keys` is sorted by name, and libraries loop over it or over the names of an
    index. If only the order of the bytes counted, a whole window might be read for each of these tensors.
    """

    def __init__(self) -> None:
        self.by_name = False
        self.last: int | None = None  # the last request
        self.runs = [0, 0]  # the number of consecutive requests in order: by bytes, by name
        self._risen = 0  # the number of consecutive requests with ascending names
        self._names: tuple[list[int], list[int]] | None = None  # tensors by name, and the position of each

    def note(self, model: Model, at: int) -> bool:
        """Counts a request, and returns whether it is in order. A first request counts as in order if it is for the
        first tensor."""
        last, self.last = self.last, at
        for order in (0, 1) if self.by_name else (0,):
            _, turn = self.positions(model, order)
            in_turn = turn[at] == (0 if last is None else turn[last] + 1)
            self.runs[order] = self.runs[order] + 1 if in_turn else 0
        if last is None:
            return False
        # The order of names is assumed only after several requests, because sorting the names takes time. The program
        # may not have called `keys` on this file.
        self._risen = self._risen + 1 if model.table[at][0] > model.table[last][0] else 0
        self.by_name = self.by_name or self._risen >= _RISEN
        return max(self.runs) > 0

    def positions(self, model: Model, order: int) -> tuple[Sequence[int], Sequence[int]]:
        """Returns the tensors in the given order, and each tensor's position in that order."""
        every = range(len(model.table))
        if not order:
            return every, every
        if self._names is None:
            positions = sorted(every, key=lambda at: model.table[at][0])
            turn = [0] * len(positions)
            for n, at in enumerate(positions):
                turn[at] = n
            self._names = positions, turn
        return self._names

    def choose(self) -> int:
        """Returns the order to read ahead in: 0 by bytes, 1 by name."""
        by_bytes, by_name = self.runs
        return int(by_name > by_bytes or self.by_name and by_name == by_bytes)


class ReadAhead:
    """Reads ahead in one open file. Threads may share this object. Forked children do not use it.

    While the program works, the next tensors in the order of its requests are loaded. At most two windows are in
    memory: on the host 256 MiB, on a GPU 2 GiB or an eighth of its free memory. Only a requested tensor may be larger.
    A request out of order ends the reading ahead, which begins again only after a longer run of requests in order.

    Blocks are also read ahead, if tensors with names that differ only in numbers were cut in the same way.
    """

    def __init__(self, frame: Frame) -> None:
        self.by_slice = False  # whether the program may cut tensors, so that its first requests do not show how
        self._frame = frame
        self._lock = new_lock()
        self._taking = self._off = False
        self._windows: list[_Window] = []
        self._how: Any = None  # the context on which the windows' tensors depend; see `_torch_context`
        self.order = _Order()
        self._by = 0  # the order of the windows: 0 by bytes, 1 by name
        self._next = 0  # the position of the tensor after the last window, in this order
        self._size, self._need = 0, _LEAST  # bytes of the next window, 0 for the first
        self._cuts: dict[tuple[str, tuple[int, ...]], Block | None] = {}  # by shape, and name without numbers

    def take(self, model: Model, at: int, block: Block | None, wanted: Any) -> Any:
        """Returns a tensor that was read ahead, or None if it must be loaded separately. wanted: the dtype to cast
        to."""
        with self._lock:
            # `_taking`: a signal handler has interrupted this method. `joined`: a preload has all tensors.
            if self._taking or self._off or model.joined or len(model.table) == 1:
                return None
            self._taking = True
            try:
                return self._take_tensor(model, at, block, wanted)
            except BaseException as error:
                self._drop_windows()
                if not isinstance(error, OverwireError):
                    raise
                self._off = True  # the tensor is loaded separately, because the windows have now freed their memory
                return None
            finally:
                self._taking = False

    def _take_tensor(self, model: Model, at: int, block: Block | None, wanted: Any) -> Any:
        if at == self.order.last or model.table[at][6] >= 0:  # a repeated request, or an alias of another tensor
            return None
        in_turn = self.order.note(model, at)
        self._learn_cut(model, at, block)
        how = (wanted, *_torch_context(model))
        number = next((n for n, window in enumerate(self._windows) if at in window.ways), None)
        if self._windows and (how != self._how or number is not None and self._windows[number].ways[at] != block):
            self._note_stray()
            return None
        if number is None and self._windows:
            if not in_turn:
                self._note_stray()
                return None
            if self.order.positions(model, self._by)[1][at] < self._next:
                return None  # the windows leave this tensor out
            self._drop_windows()  # the program has passed these windows
        self._how = how
        if number is None:
            if max(self.order.runs) < self._need + self.by_slice or not self._begin_window(model, at, block):
                return None
            number = 0
        for passed_window in self._windows[:number]:
            passed_window.close()
        del self._windows[:number]
        if len(self._windows) < 2 and self.order.runs[self._by] >= _LEAST:
            self._start_window(model, {})
        window = self._windows[0]
        tensor = window.take(at)
        if not window.ways:
            self._windows.pop(0)
            window.end()
            self._need = _LEAST
        return tensor

    def _learn_cut(self, model: Model, at: int, block: Block | None) -> None:
        # Nothing needs to be learnt while no tensor is cut.
        if block is not None or self._cuts:
            row = model.table[at]
            self._cuts[_NUMBERS.sub("#", row[0]), row[2]] = block

    def _begin_window(self, model: Model, at: int, block: Block | None) -> bool:
        """Starts the first window, with the requested tensor and those after it."""
        self._by = self.order.choose()
        self._next = self.order.positions(model, self._by)[1][at] + 1
        self._start_window(model, {at: block})
        return bool(self._windows)

    def _start_window(self, model: Model, ways: dict[int, Block | None]) -> None:
        """Starts the next window if there is room for another tensor."""
        tensors, _ = self.order.positions(model, self._by)
        if self._next == len(tensors) and not ways:
            return
        first, most = _window_sizes(model)
        room = min(most, 2 * most - sum(window.left for window in self._windows))
        sizes = {at: 0 for at in ways}
        used_bytes = 0
        while self._next < len(tensors):
            at = tensors[self._next]
            name, dtype, shape, *_, alias = model.table[at]
            if alias < 0:
                block = self._cuts.get((_NUMBERS.sub("#", name), shape), False) if self._cuts else None
                if block is False:
                    break
                assert not isinstance(block, bool)
                size = nbytes(dtype, shape if block is None else block[2])
                if self._how[0] is not None:
                    size = max(size, math.prod(shape) * self._how[0].itemsize)
                if used_bytes + size > (min(room, self._size or first) if used_bytes or self.by_slice else room):
                    break
                ways[at], sizes[at] = block, size
                used_bytes += size
            self._next += 1
        if not used_bytes:
            return
        after = self._windows[-1].job_number if self._windows else 0
        self._windows.append(_Window(self._load_window(model, ways, after), ways, sizes))
        self._size = min((self._size or first) * _GROWTH, most)

    def _load_window(self, model: Model, ways: dict[int, Block | None], after: int) -> Load:
        if all(block is None for block in ways.values()):
            return model.begin(list(ways), self._frame, self._how[0], after=after)
        blocks, rows = [], []
        for at, block in ways.items():
            name, dtype, shape, size, *_ = model.table[at]
            if block is not None:
                shape, size = block[2], nbytes(dtype, block[2])
            (lo0, hi0), (lo1, hi1) = ((0, WHOLE), (0, WHOLE)) if block is None else block[:2]
            blocks.append((at, (lo0, hi0, lo1, hi1)))
            rows.append((name, dtype, shape, size))
        return model.begin_blocks(blocks, rows, self._frame, after=after)

    def _note_stray(self) -> None:
        # The windows were not used, so the next reading ahead needs more requests before it begins.
        self._drop_windows()
        self.order.runs, self._need = [0, 0], min(2 * self._need, _TIRED)

    def _drop_windows(self) -> None:
        windows, self._windows, self._size = self._windows, [], 0
        for window in reversed(windows):  # the newest first, so that no window begins because an earlier one ends
            window.close()

    def close(self) -> None:
        """Frees the tensors that were read ahead, and stops reading ahead."""
        if not _engine.forked():  # in a forked child everything belongs to the parent
            self._off = True
            self.drop_blocks()

    def drop_blocks(self) -> None:
        """Frees the tensors that were read ahead. A thread that waits for such a tensor loads it separately."""
        if not self._lock.acquire(blocking=False):  # another thread waits for a tensor
            for window in self._windows[::-1]:
                window.cancel()
            self._lock.acquire()
        try:
            self._drop_windows()
        finally:
            self._lock.release()


def _torch_context(model: Model) -> tuple[Any, ...]:
    # Memory from torch's allocator belongs to the stream and the mode in which it was allocated.
    if model.join() == "cpu":
        return ()
    from ..frameworks.torch import around

    return around(model.device)


def _window_sizes(model: Model) -> tuple[int, int]:
    """Returns the size of the first window and the maximum size of a window, in bytes."""
    if model.device == "cpu":
        return _FIRST, _MOST
    from ..frameworks.torch import unused

    return _FIRST_GPU, min(_MOST_GPU, unused(model.device) // (2 * _PART))

"""Loads whole or sliced tensors on the ranks of a group.

    tensors = ow.load_file(path, device="cuda:0", group=pg, shard={"up.weight": 0, "down.weight": 1})

Each rank gets every tensor. A tensor that `shard` names is sliced along the given dimension into blocks of ceil(size /
ranks), and rank r gets block r. The blocks of the last ranks may be shorter or empty. If several ranks need the same
bytes, one of them reads the bytes and sends them to the others in stored form (`load`). Without a transport, every rank
reads everything that it needs.

An error on one rank is raised on all ranks at the next agreement, and the loaded tensors are freed. `group` describes
the agreement.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any

from .._undo import after_error, keep_error
from ..dtypes import torch_shape
from ..errors import ArgumentError, CancelledError, NotSupportedError, OutOfMemoryError, OverwireError
from ..frameworks.choose import prepare_gpu
from ..model.budget import fit
from ..model.loads import Load
from ..model.opened import WHOLE, Model, Target, pack_requests
from ..model.options import ShardLike
from ..model.sourcelike import SourceLike
from ..progress import Progress, ProgressLike, watch
from . import group as ranks
from .cuts import CutTensor, Cutting
from .group import Members, Unmapped, group_verb
from .load import GroupLoad, Wants
from .meeting import describe_open_files, meet

# The tensor bytes of a stream's window if there is no budget and the ranks do not map each other's memory.
_WINDOW = 1 << 30

_CLOSED = "overwire: stream: the stream was closed before its end"

# The seconds between two polls for failures of the other ranks while this rank reads.
_TICK = 0.25


@contextmanager
def open_load(
    target: Target,
    progress: ProgressLike,
    source: SourceLike,
    opens: Mapping[str, Any],
    group: Any,
    shard: ShardLike,
    budget: int | None = None,
    unmapped_budget: int = 0,
    choose: Callable[[TensorLoad], Iterable[int]] | None = None,
) -> Iterator[TensorLoad]:
    """Opens a load on all ranks, without reading tensors. Collective.

    opens: the result of `opening`. budget: the max_memory of a stream, or None for a load of all tensors.
    unmapped_budget: the budget of ranks that do not map each other's memory. choose: returns the positions of the
    tensors that this rank needs. It is called before the first agreement, and its errors are raised on all ranks.
    """
    loads: list[TensorLoad] = []

    def close() -> None:
        while loads:
            loads.pop().close()

    def open_and_describe() -> dict[str, Any]:
        if opens.get("read") is not None:
            why = "it cannot be combined with group: set OVERWIRE_READ on all ranks instead"
            raise ArgumentError(f"overwire: read: {why}")
        loads.append(TensorLoad(members, target, progress, source, opens, shard, (budget, unmapped_budget)))
        if choose is not None:
            loads[0].positions = list(choose(loads[0]))
        return loads[0].describe_wants()

    with group_verb(group, target.device) as members:
        try:
            reports = meet(members, open_and_describe, close)
            loads[0].apply_reports(reports)
            yield loads[0]
        finally:
            close()


class TensorLoad:
    """One load on one rank. The constructor is not collective. All methods are, unless their docstrings say otherwise.

    model: the open files. positions: the positions of the tensors that this rank needs, in order.
    """

    def __init__(
        self,
        members: Members,
        target: Target,
        progress: ProgressLike,
        source: SourceLike,
        opens: Mapping[str, Any],
        shard: ShardLike,
        budgets: tuple[int | None, int],
    ) -> None:
        # Every rank opens the whole model, so that the table is the same on all ranks.
        whole = {name: value for name, value in opens.items() if name not in ("keys", "filter")}
        self._members = members
        self._deferred = keep_error()
        self._count = self._bytes = 0  # number and bytes of the tensors that have arrived
        self._tasks: dict[int, CutTensor] = {}  # by position, filled on demand
        self._frame, device, self._dtype = target.frame, target.device, target.dtype
        self._exchange = ranks.exchange_setting()
        # 0 means no budget. `apply_reports` replaces these values by the smallest budget of any rank.
        self._budget, self._unmapped_budget = budgets[0] or 0, budgets[1]
        self._bitmaps: list[bytes] = []  # bitmaps of the tensors that each rank needs, by rank
        if self._frame.name != "torch":
            raise ArgumentError("overwire: group: only torch tensors are supported: use framework='pt'")
        self._watcher = watch(progress, "load" if budgets[0] is None else "stream")
        link = members.sending_device(device) if self._exchange == "collective" else ""
        prepare_gpu(link or device, self._exchange != "none")  # prepares the device that receives stored bytes
        self.model = Model(source, device=device, **whole)
        self._load = GroupLoad(members, [self.model])
        self.model.alone()  # preloaded tensors are not shared with other ranks
        with after_error(self.close):
            self._cutting = Cutting(self._frame, members.size, members.rank)
            selection = self.model.choose(opens.get("keys"), opens.get("filter"))
            self.positions = list(range(len(self.model.table))) if selection is None else selection
            self._dims = self._cut_dims(shard)
            if budgets[0] is None:
                sizes = map(self.slice_size, self.positions)
                fit(self.model, self._frame, self._dtype, target.max_memory, sizes)

    def close(self) -> None:
        """Closes the load. Not collective."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        self.model.close()

    def _cut_dims(self, shard: ShardLike) -> dict[int, int]:
        # Maps positions to dimensions. The map includes tensors that this rank does not load, because the ranks compare
        # it.
        model, dims = self.model, {}
        if shard is None:
            return {}
        if isinstance(shard, Mapping):
            dims_by_place: list[tuple[int, int | None]] = [(model.place(name), dim) for name, dim in shard.items()]
        elif callable(shard):
            dims_by_place = [(at, shard(row[0], torch_shape(*row[1:3]))) for at, row in enumerate(model.table)]
        else:
            kind = type(shard).__name__
            raise ArgumentError(f"overwire: shard: expected a dict of name to dimension, or a callable, got {kind}")
        for at, dim in dims_by_place:
            if dim is None:
                continue
            row = model.row(at)
            rank = len(torch_shape(*row[1:3]))
            if not isinstance(dim, int) or isinstance(dim, bool) or not -rank <= dim < rank:
                text = f"overwire: shard {row.name!r}: dimension {dim!r}: the tensor has {rank} dimensions"
                raise ArgumentError(text, tensor=row.name)
            if row.dtype.startswith("F6_"):
                text = f"overwire: shard {row.name!r}: {row.dtype} is loaded as bytes and has no dimensions to cut"
                raise NotSupportedError(text, tensor=row.name)
            dims[at] = dim % rank
        return dims

    def slice_size(self, at: int) -> tuple[int, int]:
        """Returns the tensor's position, and the number of elements of this rank's slice, counted as in the file. Not
        collective."""
        if at not in self._dims:
            return at, WHOLE
        task = self.cut_tensor(at)
        whole, own = math.prod(task.shape), math.prod(self._cutting.shape(task))
        return at, math.prod(task.row.shape) * own // max(whole, 1)

    def describe_wants(self) -> dict[str, Any]:
        """Returns the facts that the ranks compare, and the facts that all ranks need. Not collective."""
        self._check_sizes(self.positions, self._budget)
        table = hashlib.sha256(repr([row[:5] for row in self.model.table]).encode())
        bitmap = bytearray(-(-len(self.model.table) // 8))
        for at in self.positions:
            bitmap[at >> 3] |= 1 << (at & 7)
        shard = hashlib.sha256(repr(sorted(self._dims.items())).encode())
        alike = {"tensors": table.digest(), "shard": shard.digest(), "dtype": str(self._dtype)}
        alike["device"] = self.model.device.partition(":")[0]
        needs: dict[str, Any] = {"wants": bytes(bitmap), "budgets": (self._budget, self._unmapped_budget)}
        needs["opened"] = describe_open_files([self.model])
        return {"alike": alike, **needs, **self._load.describe_files()}

    def apply_reports(self, reports: list[dict[str, Any]]) -> None:
        """Chooses the transport and the budgets. Call it once, before other steps. Not collective. All ranks have the
        same `reports` and get the same result."""
        self._load.choose_carrier(self._exchange, reports)
        self._bitmaps = [one["wants"] for one in reports]
        budgets = [[one["budgets"][n] for one in reports if one["budgets"][n]] for n in range(2)]
        self._budget, self._unmapped_budget = (min(sizes, default=0) for sizes in budgets)

    def _is_wanted(self, rank: int, at: int) -> bool:
        return _has_bit(self._bitmaps[rank], at)

    def _split_positions(self) -> tuple[list[int], list[int]]:
        # Returns the positions that all ranks load together, which are equal on all ranks, and the positions that this
        # rank loads by itself. If ranks map each other's memory, all positions are loaded together.
        once = twice = 0
        for bitmap in self._bitmaps:
            bits = int.from_bytes(bitmap, "little")
            once, twice = once | bits, twice | once & bits
        shared = twice if self._load.carrier == "collective" else once
        bitmap = shared.to_bytes(len(self._bitmaps[0]), "little")
        together = [at for at in range(len(self.model.table)) if _has_bit(bitmap, at)]
        return together, [at for at in self.positions if not _has_bit(bitmap, at)]

    def load_all(self) -> dict[str, Any]:
        """Returns this rank's tensors by name."""
        tensors = dict(self._load_windows(0, {}, False))
        return {self.model.table[at][0]: tensors[at] for at in self.positions}

    def iter_tensors(self, places: Mapping[int, Any] | None = None) -> Generator[tuple[int, Any], None, None]:
        """Yields (position, tensor) for the tensors that this rank needs, as they arrive. The ranks agree after the
        last tensor. The load proceeds in windows if the budget or the transport requires this.

        places: this rank's memory for its slices, by position. It must be on the model's device, dense and of the
            file's dtype. The yielded tensor is in this memory, or elsewhere if the engine cannot write to it.

        A rank that closes this generator early ends the load on all ranks.
        """
        try:
            yield from self._load_windows(self._budget, places or {}, True)
        except GeneratorExit:
            self._end_early()
            raise

    def close_unbegun(self) -> None:
        """Ends an `iter_tensors` that has not begun, on all ranks. Collective."""
        if self._load.carrier == "mapped" and self._split_positions()[0]:
            with suppress(OverwireError):
                self._members.gather_results(_refuse_closed)
        else:
            self._end_early()

    def _end_early(self) -> None:
        with suppress(OverwireError):
            self._agree_or_raise(CancelledError(_CLOSED))

    def _load_windows(self, budget: int, places: Mapping[int, Any], streams: bool) -> Iterator[tuple[int, Any]]:
        # Loads the windows that all ranks load together, then the windows that this rank loads by itself. Collective.
        shared, lone = self._split_positions()
        self._check_sizes(shared, budget)
        windows, arrived, agreed = self._windows_of(shared, budget), set[int](), False
        while windows:
            window, windows = windows[0], windows[1:]
            mapped = self._load.carrier == "mapped"
            if streams and not mapped:
                self._agree_or_raise()  # raises if another rank has closed the stream
                self._check_sizes(window, self._unmapped_budget)
                window, *more = self._windows_of(window, budget or self._unmapped_budget or _WINDOW)
                windows = more + windows
            try:
                with closing(self._exchange_window(window, places)) as arriving:
                    for at, tensor in arriving:
                        if at not in arrived:
                            arrived.add(at)
                            yield at, tensor
                agreed = mapped
            except Unmapped as reason:  # all ranks start again with the remaining tensors
                self._load.fall_back(str(reason), self._exchange)
                rest = {at for positions in (window, *windows) for at in positions}
                shared, lone = self._split_positions()
                windows = self._windows_of([at for at in shared if at in rest], budget)
        for window in self._windows_of([at for at in lone if at not in arrived], (budget or _WINDOW) if streams else 0):
            yield from self._read_own(self._own_tensors(window))
        if not agreed:
            self._agree_or_raise()

    def _own_tensors(self, window: list[int]) -> list[CutTensor]:
        return [self.cut_tensor(at) for at in window if self._is_wanted(self._members.rank, at)]

    def _exchange_window(self, window: list[int], places: Mapping[int, Any]) -> Generator[tuple[int, Any], None, None]:
        # Loads the tensors of a window that this rank needs, and reads its share for other ranks.
        tasks, tensors, slots, empty = self._own_tensors(window), list[Any](), list[int](), list[tuple[int, Any]]()
        carrier = self._load.carrier
        device = self._load.link if carrier == "collective" else self.model.device
        if carrier == "none":
            yield from self._read_own(tasks)
            return

        def make_requests() -> bytes:
            tensors.extend(self._make_places(tasks, places if carrier == "mapped" else {}, device))
            for slot, (task, tensor) in enumerate(zip(tasks, tensors, strict=True)):
                if tensor.numel():
                    slots.append(slot)
                else:
                    empty.extend(self._finish_tensor(task, tensor))
            blocks = [(tasks[slot].at, tensors[slot].data_ptr(), *self._cutting.block(tasks[slot])) for slot in slots]
            return pack_requests(blocks)

        wants = self._needs_of_host(window) if carrier == "mapped" else Wants(window)
        landing = self._load.land_requests(wants, make_requests, self._agree_or_raise, self._tell_progress)
        with closing(landing):
            for number in landing:
                slot = slots[number]
                tensor, tensors[slot] = tensors[slot], None  # the caller owns the tensor now
                yield from self._finish_tensor(tasks[slot], tensor)
        yield from empty

    def _needs_of_host(self, window: list[int]) -> Wants:
        # Returns the blocks that each rank of this host needs.
        local = self._members.local
        if self._dims.keys().isdisjoint(window) and all(self._is_wanted(one, at) for one in local for at in window):
            return Wants(window)
        tasks = [self.cut_tensor(at) for at in window]
        kinds = {(task.row.dtype, task.shape, task.dim): task for task in tasks}  # few: layers have equal shapes
        blocks = {kind: [self._cutting.block(task, rank) for rank in local] for kind, task in kinds.items()}
        needs = [
            (task.at, number, *block)
            for task in tasks
            for number, block in enumerate(blocks[task.row.dtype, task.shape, task.dim])
            if block[0] != block[1] and block[2] != block[3] and self._is_wanted(local[number], task.at)
        ]
        return Wants(sorted({need[0] for need in needs}), pack_requests(needs))

    def _read_own(self, tasks: list[CutTensor]) -> Generator[tuple[int, Any], None, None]:
        # Reads tensors without the other ranks. Not collective. An error is raised at the next agreement.
        with self._deferred:
            if self._deferred.error is None:
                yield from self._read_tensors(tasks)

    def _read_tensors(self, tasks: list[CutTensor]) -> Iterator[tuple[int, Any]]:
        reads = [(task, self._cutting.block(task), self._cutting.row(task)) for task in tasks]
        busy = [(task, block, row) for task, block, row in reads if 0 not in row.shape]
        blocks, rows = [(task.at, block) for task, block, _ in busy], [row for *_, row in busy]
        load = self.model.begin_blocks(blocks, rows, self._frame) if busy else None
        with after_error(lambda: load.job.abandon() if load is not None else None):
            for task, _, row in reads:
                if 0 in row.shape:
                    yield from self._finish_tensor(task, self._frame.empty(row.dtype, row.shape, self.model.device))
            while load is not None and not load.crowded and not _has_ended(load):
                self._members.look_for_failure()
        for (task, *_), tensor in zip(busy, load.tensors() if load is not None else (), strict=True):
            yield from self._finish_tensor(task, tensor)

    def _make_places(self, tasks: list[CutTensor], places: Mapping[int, Any], device: str) -> list[Any]:
        # Returns memory for the part of each tensor that the engine reads: the caller's memory, or new memory if there
        # is none or the tensor is sliced afterwards. This runs while the first bytes are read. Before it decodes, the
        # engine waits for queued work that uses the memory.
        rows = [self._cutting.row(task) for task in tasks]
        own = [places.get(task.at) if self._cutting.lands_whole(task) else None for task in tasks]
        fresh = iter(self._frame.empty_on(device, [row for row, place in zip(rows, own, strict=True) if place is None]))
        return [next(fresh) if place is None else place for place in own]

    def _finish_tensor(self, task: CutTensor, tensor: Any) -> Iterator[tuple[int, Any]]:
        # An error is raised at the next agreement, and until then no further tensor is finished.
        with self._deferred:
            if self._deferred.error is None:
                tensor = self._cutting.own_slice(task, tensor)
                if str(tensor.device) == "cpu" != self.model.device:
                    tensor = tensor.to(self.model.device)
                if self._dtype is not None:
                    tensor = self._frame.cast(tensor, task.row.dtype, self._dtype)
                self._count, self._bytes = self._count + 1, self._bytes + self.model.table[task.at][3]
                self._tell_progress(0)
        if self._deferred.error is None:
            yield task.at, tensor

    def _largest_size(self, at: int) -> int:
        # Returns the most bytes of any rank's slice of a tensor, including the result of a cast.
        task = self.cut_tensor(at)
        elements = math.prod(self._cutting.shape(task, 0))
        size = elements * task.row.nbytes // max(math.prod(task.shape), 1)
        return size if self._dtype is None else size + elements * int(getattr(self._dtype, "itemsize", 8))

    def _check_sizes(self, positions: list[int], most: int) -> None:
        # Raises OutOfMemoryError if a single tensor exceeds the budget. most: the budget, or 0 for none.
        for at in positions if most else ():
            if (size := self._largest_size(at)) > most:
                name, uri = self.model.table[at][0], self.model.uris[0]
                text = f"overwire: {uri} tensor {name!r}: it takes {size} bytes, but max_memory is {most}"
                raise OutOfMemoryError(text, asked=size, free=most, total=most, tensor=name)

    def _windows_of(self, positions: list[int], most: int) -> list[list[int]]:
        # Divides positions into windows of at most `most` bytes. A larger tensor is a window by itself. most=0 means a
        # single window. For positions that all ranks load together, all ranks get the same windows.
        windows: list[list[int]] = [positions] if positions and not most else []
        left = 0
        for at in positions if most else ():
            size = self._largest_size(at)
            if not windows or size > left:
                windows.append([])
                left = most
            windows[-1].append(at)
            left -= size
        return windows

    def _agree_or_raise(self, error: BaseException | None = None, ours: bool = True) -> None:
        late, self._deferred.error = self._deferred.error, None
        self._members.agree(late or error, ours or late is not None)

    def cut_tensor(self, at: int) -> CutTensor:
        """Returns a tensor with the dimension along which it is sliced. Not collective."""
        if at not in self._tasks:
            row = self.model.row(at)
            self._tasks[at] = CutTensor(at, row, torch_shape(*row[1:3]), self._dims.get(at))
        return self._tasks[at]

    def slice_shape(self, at: int) -> tuple[int, ...]:
        """Returns the shape of this rank's slice of a tensor. Not collective."""
        return self._cutting.shape(self.cut_tensor(at))

    def _tell_progress(self, done: int) -> None:
        # done: the bytes of decoded tensors in the current window. Tensors that have arrived are counted separately.
        if self._watcher is not None:
            total = sum(self.model.table[at][3] for at in self.positions)
            self._watcher.update(Progress(min(max(done, self._bytes), total), total, self._count, len(self.positions)))


def _has_bit(bitmap: bytes, at: int) -> bool:
    return bool(bitmap[at >> 3] >> (at & 7) & 1)


def _refuse_closed() -> None:
    raise CancelledError(_CLOSED)


def _has_ended(load: Load) -> bool:
    try:
        return load.job.ended(_TICK)
    except OverwireError:
        return True

"""Loads by the ranks of a process group together: whole or in shards.

    tensors = ow.load_file(path, device="cuda:0", group=pg, shard={"up.weight": 0, "down.weight": 1})

Each rank gets every tensor; one that `shard` names is cut along that dimension
into blocks of ceil(size / ranks), of which rank r gets the r-th (the last ones
may be shorter, or empty). What several ranks want is read by one of them, and the
stored bytes travel (`relays`), by a carrier that follows from where the ranks and the
files are (`_carrier_of`); without one every rank reads what it wants.

Failure: whatever fails on one rank is raised on all when the ranks next agree; what had
been loaded is freed. `group` says how a rank hears of the others.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, CancelledError, CorruptError, NotSupportedError, OutOfMemoryError, OverwireError
from ..frameworks.choose import check_device, check_dtype, frame_for
from ..model.loads import Load
from ..model.opened import WHOLE, Model, opening, prepare
from ..model.options import DeviceLike, ShardLike, TorchName
from ..model.plan import fit
from ..model.sources import SourceLike
from ..progress import Progress, watch
from . import group as ranks
from .cuts import Cutting, Task, shard_range, torch_shape
from .group import Members, Unmapped, verb
from .identity import opened, replaced
from .relays import BUFFERS, FEW, SHARE, Collective, Mapped, begin, fits, packed, request_of

if TYPE_CHECKING:
    import torch

    from .._engine import JobNumber
    from .._requests import RelayRequest

__all__ = ["GroupLoad", "ShardLike", "begun", "load", "shard_range"]

log = logging.getLogger("overwire")

# Tensor bytes of a window of a stream that has no budget, where ranks do not map each other's
# memory.
_WINDOW = 1 << 30

# Seconds between two looks at what the other ranks say, while this one reads.
_TICK = 0.25

# The ranges of a whole tensor.
_ALL = (0, WHOLE, 0, WHOLE)


def load(
    source: SourceLike,
    group: Any,
    shard: ShardLike = None,
    *,
    device: DeviceLike = "cpu",
    framework: TorchName | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """`load_file` over a process group; all ranks of it must call this.

    source: must hold the same tensors on every rank. keys, filter: may differ
        from rank to rank (experts); a tensor that not every rank wants is read
        by those that do. shard: as `ShardLike`, the same on every rank;
        dimensions are those of the loaded tensor, negative ones count from the
        end. max_memory: of this rank's tensors; the ring of what is on its way
        is beside. Other arguments are those of `load_file`.

    Returns name -> tensor, this rank's. Raises, on every rank, what any rank's
    load raises; ArgumentError where the ranks ask for different things;
    IOFailure where the others cannot be reached.
    """
    with begun(source, group, shard, device=device, framework=framework, **options) as loading:
        return loading.run()


@contextmanager
def begun(
    source: SourceLike,
    group: Any,
    shard: ShardLike = None,
    *,
    device: DeviceLike = "cpu",
    framework: str | None = None,
    budget: int | None = None,
    beside: int = 0,
    choose: Callable[[GroupLoad], Iterable[int]] | None = None,
    **options: Any,
) -> Iterator[GroupLoad]:
    """Collective: a load that is open on all ranks and has read nothing. budget: what
    max_memory means for a stream, which holds a part of its tensors at a time; None: it
    is of all of them. beside: the same where ranks do not map each other's memory. choose: called before
    the ranks meet, it returns the tensors that this rank wants, by position; its errors reach all ranks."""
    if group is None:
        raise ArgumentError("overwire: shard: needs the group whose ranks share the tensors")
    begun: list[GroupLoad] = []

    def close() -> None:
        while begun:
            begun.pop().close()

    def describe() -> dict[str, Any]:
        if options.get("read") is not None:
            raise ArgumentError("overwire: read: a group's way of reading is set by OVERWIRE_READ, for all its ranks alike")
        begun.append(GroupLoad(members, source, shard, device, framework, (budget, beside), options))
        if choose is not None:
            begun[0].chosen = list(choose(begun[0]))
        return begun[0].describe()

    with verb(group, device) as members:
        try:
            reports = members.exchange(describe)
            if _replaced(reports, begun[0].model) is not None:  # once again: another file was put there meanwhile
                close()
                reports = members.exchange(describe)
            begun[0].meet(reports)
            yield begun[0]
        finally:
            close()


def _replaced(reports: list[dict[str, Any]], model: Model) -> CorruptError | None:
    # Local, and alike on all ranks.
    return replaced({rank: one["opened"] for rank, one in enumerate(reports)}, model.uris)


class GroupLoad:
    """One load on one rank. Construction is local; what else runs is collective, unless
    it says otherwise.

    model: the open files. chosen: the positions that this rank wants, in order. common:
    those that all want. budget, beside: the smallest of any rank's, 0: none.
    """

    def __init__(
        self,
        members: Members,
        source: SourceLike,
        shard: ShardLike,
        device: Any,
        framework: str | None,
        budgets: tuple[int | None, int],
        options: Mapping[str, Any],
    ) -> None:
        whole = {name: value for name, value in opening(options).items() if name not in ("keys", "filter")}  # every rank the same table
        dtype = options.get("dtype")
        self._members = members
        self._late: BaseException | None = None
        self._carrier = ""
        self._buffers: list[Any] = []  # of collectives
        self._count = self._bytes = 0  # of the tensors that have arrived
        self._frame = frame_for(framework)
        self._exchange = ranks.exchange_setting()
        self.budget, self.beside = budgets[0] or 0, budgets[1]
        self.common: list[int] = []
        self.lone: list[int] = []
        self._alike = False  # all ranks want the same tensors
        if self._frame.name != "torch":
            raise ArgumentError("overwire: group: the ranks exchange torch tensors; use framework='pt'")
        where = check_device(device, self._frame)
        self._dtype = check_dtype(self._frame, dtype)
        self._watcher = watch(options.get("progress"), "load" if budgets[0] is None else "stream")
        self._link = members.link_device(where)
        prepare(self._link or where if self._exchange == "collective" else where)  # where stored bytes go
        self.model = Model(source, device=where, **whole)
        self.model.alone()  # what was preloaded is not shared out
        try:
            self._cutting = Cutting(self._frame, members.size, members.rank)
            chosen = self.model.choose(options.get("keys"), options.get("filter"))
            self.chosen = list(range(len(self.model.table))) if chosen is None else chosen
            self._dims = self._cuts(shard)
            if budgets[0] is None:
                fit(self.model, self._frame, self._dtype, options.get("max_memory"), map(self.part, self.chosen))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        self.model.close()

    def _cuts(self, shard: ShardLike) -> dict[int, int]:
        # Position to dimension. Of all tensors, not of those chosen here alone:
        # the ranks compare it.
        model, dims = self.model, {}
        if shard is None:
            return {}
        if isinstance(shard, Mapping):
            asked: list[tuple[int, int | None]] = [(model.place(name), dim) for name, dim in shard.items()]
        elif callable(shard):
            asked = [(at, shard(row[0], torch_shape(row))) for at, row in enumerate(model.table)]
        else:
            raise ArgumentError(f"overwire: shard: expected a dict of name to dimension, or a callable, got {type(shard).__name__}")
        for at, dim in asked:
            if dim is None:
                continue
            row = model.row(at)
            rank = len(torch_shape(row))
            if not isinstance(dim, int) or isinstance(dim, bool) or not -rank <= dim < rank:
                text = f"overwire: shard {row.name!r}: dimension {dim!r} of a tensor with {rank}"
                raise ArgumentError(text, tensor=row.name)
            if row.dtype.startswith("F6_"):
                text = f"overwire: shard {row.name!r}: {row.dtype} is loaded as bytes, without dimensions"
                raise NotSupportedError(text, tensor=row.name)
            dims[at] = dim % rank
        return dims

    def part(self, at: int) -> tuple[int, int]:
        """Local: what this rank gets of a tensor: how many of its elements as the file
        counts them."""
        if at not in self._dims:
            return at, WHOLE
        task = self.task(at)
        whole, part = math.prod(task.shape), math.prod(self._cutting.shape(task))
        return at, math.prod(task.row.shape) * part // max(whole, 1)

    def describe(self) -> dict[str, Any]:
        """What the ranks compare and must know of each other."""
        self._check(self.chosen, self.budget)
        table = hashlib.sha256(repr([row[:5] for row in self.model.table]).encode())  # what the files hold, not where
        wanted = bytearray(-(-len(self.model.table) // 8))
        for at in self.chosen:
            wanted[at >> 3] |= 1 << (at & 7)
        return {
            "host": ranks.host_name(),
            "tensors": table.digest(),
            "shard": hashlib.sha256(repr(sorted(self._dims.items())).encode()).digest(),
            "dtype": str(self._dtype),
            "wanted": bytes(wanted),
            "device": self.model.device.partition(":")[0],
            "exchange": self._exchange,
            "opened": opened([self.model], ranks.host_name()),
            "remote": any(source["remote"] for source in self.model.info()),
            "room": self.model.room(),
            "budgets": (self.budget, self.beside),
        }

    def meet(self, reports: list[dict[str, Any]]) -> None:
        """Once, first, and local: all ranks have the same `reports`, so all decide alike."""
        members, table = self._members, self.model.table
        for what in ("tensors", "shard", "dtype", "device", "exchange"):
            for rank, one in enumerate(reports):
                if one[what] != reports[0][what]:
                    text = f"overwire: group: {what} differs between ranks 0 and {rank}"
                    members.raise_alike(ArgumentError(text, source=self.model.uris[0]))
        if error := _replaced(reports, self.model):
            members.raise_alike(error)
        members.settle([one["host"] for one in reports])
        remote, room = any(one["remote"] for one in reports), max(one["room"] for one in reports)
        self._carrier = self._carrier_of(remote, fits(members.size, room))
        shared = reports[0]["wanted"]
        for one in reports[1:]:
            shared = bytes(a & b for a, b in zip(shared, one["wanted"], strict=True))
        self.common = [at for at in range(len(table)) if shared[at >> 3] >> (at & 7) & 1]
        self.lone = [at for at in self.chosen if not shared[at >> 3] >> (at & 7) & 1]
        self._alike = all(one["wanted"] == shared for one in reports)
        self.budget, self.beside = (min((one["budgets"][n] for one in reports if one["budgets"][n]), default=0) for n in range(2))

    def _carrier_of(self, remote: bool, fitting: bool) -> str:
        """What brings bytes from rank to rank: "mapped", "collective", or "none". The same on all
        ranks. remote: the files lie in a store, or on a file system of several hosts. fitting:
        each chunk has space where all ranks exchange."""
        members, setting = self._members, self._exchange
        if setting == "none" or members.size == 1:
            return "none"
        if setting == "auto" and self.model.device == "cpu" and not remote:
            return "none"  # the page cache has each byte once, and plain tensors are mapped from it
        sends = "collective" if self._link and fitting else "none"
        if setting == "collective" or setting == "auto" and remote and members.hosts > 1 and sends == "collective":
            return sends  # one host alone would read what another has
        if members.unreachable:
            return sends
        return "mapped" if members.most_local > 1 else "none"

    def run(self) -> dict[str, Any]:
        """This rank's tensors, by name."""
        windows, lone = ([], self.chosen) if self._carrier == "none" else ([self.common], self.lone)
        loaded = dict(self._tensors(windows, [lone], None))
        return {self.model.table[at][0]: loaded[at] for at in self.chosen}

    def arrive(self, places: Mapping[int, Any] | None = None) -> Generator[tuple[int, Any], None, None]:
        """(position, tensor) of what this rank wants, as it arrives; after the last the
        ranks agree. Where the budget, or the carrier, wants it, the load goes in windows.

        places: by position, memory of this rank on the model's device, dense and of the
            file's dtype, for its part of a tensor. What is yielded is that memory, or,
            where the engine cannot write there, another.

        A rank that closes this early ends it on all.
        """
        try:
            self._check(self.common, self.budget)
            lone = self._windows(self.lone, self.budget or _WINDOW)
            yield from self._tensors(self._windows(self.common, self.budget), lone, places, True)
        except GeneratorExit:
            self._dismiss()
            raise

    def close_unbegun(self) -> None:
        """Collective: ends on all ranks what `arrive` would give, which has not begun."""
        if self._carrier == "mapped" and self.common:
            with suppress(OverwireError):
                self._members.exchange(_closed)
        else:
            self._dismiss()

    def _dismiss(self) -> None:
        with suppress(OverwireError):
            try:
                _closed()
            except OverwireError as error:
                self._agree(error)

    def _tensors(
        self, windows: list[list[int]], lone: list[list[int]], places: Mapping[int, Any] | None, streams: bool = False
    ) -> Iterator[tuple[int, Any]]:
        # Collective: the windows of what all want, and those of what this rank alone does.
        agreed = False
        while windows and windows[0]:
            window, windows = windows[0], windows[1:]
            arrived: set[int] = set()
            if self._carrier == "mapped":
                try:
                    with closing(self._mapped(window, places or {})) as arriving:
                        for at, tensor in arriving:
                            arrived.add(at)
                            yield at, tensor
                    agreed = True
                    continue
                except Unmapped as reason:  # other ranks go on with all tensors, and so does this one
                    self._give_up(str(reason))
            if streams:
                self._agree()  # with those that have closed
                self._check(window, self.beside)
                window, *more = self._windows(window, self.budget or self.beside or _WINDOW)
                windows = more + windows
            with closing(self._collective(window) if self._carrier == "collective" else self._alone(window)) as arriving:
                for at, tensor in arriving:
                    if at not in arrived:
                        yield at, tensor
            agreed = False
        for window in lone:
            yield from self._alone(window)
        if not (agreed and self._alike):
            self._agree()

    def _give_up(self, reason: str) -> None:
        # Once a group: its ranks cannot map each other's memory.
        members = self._members
        members.unreachable = reason.removeprefix("overwire: ")
        self._carrier = "collective" if self._link and self._exchange != "none" else "none"
        log.warning("the ranks exchange by torch.distributed: they cannot map each other's memory: %s", members.unreachable)

    def _mapped(self, window: list[int], places: Mapping[int, Any]) -> Generator[tuple[int, Any], None, None]:
        members, tasks = self._members, [self.task(at) for at in window]
        request = self._request(tasks, members.local, self.model.device, BUFFERS)
        request.update({"world": members.size, "members": members.local})
        dims = [task.engine_dim() for task in tasks]
        if max(dims) >= 0:
            request["cuts"] = dims
        relay = Mapped(members, lambda: begin(request, self.model.handle))
        tensors: list[Any] = []
        relay.attempt(lambda: tensors.extend(self._places(tasks, places, self.model.device)))
        asked = [slot for slot, tensor in enumerate(tensors) if tensor.numel()]
        relay.attempt(lambda: relay.aim(self._requests(tasks, tensors)))
        relay.join()
        for slot, tensor in enumerate(tensors):
            if not tensor.numel():
                yield from self._kept(tasks[slot], tensor)
        with closing(relay.arrive(self._agree, self._tell)) as arriving:
            for number in arriving:
                slot = asked[number]
                tensor, tensors[slot] = tensors[slot], None  # it is the caller's
                yield from self._kept(tasks[slot], tensor)
        if not members.reached:
            members.reached = True
            log.info("the ranks of each host can exchange by memory that they map of each other")

    def _collective(self, window: list[int]) -> Generator[tuple[int, Any], None, None]:
        members, tasks = self._members, [self.task(at) for at in window]
        request = self._request(tasks, range(members.size), self._link)
        request["here"] = len(members.local)
        tensors: list[Any] = []

        def start() -> JobNumber:
            if not self._buffers:
                self._buffers.extend(self._frame.empty("U8", (request["size"],), self._link) for _ in range(FEW))
            request["ring"] = [buffer.data_ptr() for buffer in self._buffers]
            return begin(request, self.model.on(self._link).handle)

        relay = Collective(members, start, self._buffers, request["stream"])
        relay.attempt(lambda: tensors.extend(self._places(tasks, {}, self._link)))
        relay.attempt(lambda: relay.aim(self._requests(tasks, tensors)))
        relay.run(self._agree, self._tell)
        for slot, task in enumerate(tasks):
            tensor, tensors[slot] = tensors[slot], None
            yield from self._kept(task, tensor)

    def _alone(self, window: list[int]) -> Generator[tuple[int, Any], None, None]:
        # Local: what this rank reads by itself. What fails is said when the ranks next agree.
        tasks = [self.task(at) for at in window]
        try:
            if self._late is None:
                yield from self._read(tasks)
        except GeneratorExit:
            raise
        except BaseException as caught:
            self._late = self._late or caught

    def _read(self, tasks: list[Task]) -> Iterator[tuple[int, Any]]:
        reads = [(task, *self._cutting.read(task)) for task in tasks]
        busy = [(task, block, row) for task, block, row in reads if 0 not in row.shape]
        blocks, rows = [(task.at, block) for task, block, _ in busy], [row for *_, row in busy]
        load = self.model.begin_blocks(blocks, rows, self._frame) if busy else None
        try:
            for task, _, row in reads:
                if 0 in row.shape:
                    yield from self._kept(task, self._frame.empty(row.dtype, row.shape, self.model.device))
            while load is not None and not load.crowded and not _over(load):
                self._members.look()
        except BaseException:
            if load is not None:
                load.job.abandon()
            raise
        for (task, *_), tensor in zip(busy, load.tensors() if load is not None else (), strict=True):
            yield from self._kept(task, tensor)

    def _request(self, tasks: list[Task], exchange: Sequence[int], device: str, buffers: int = 0) -> RelayRequest:
        request = request_of(device, exchange, self._members.rank, SHARE, buffers)
        request["tensors"] = [task.at for task in tasks]
        request["timeline"] = log.isEnabledFor(logging.DEBUG)
        return request

    def _places(self, tasks: list[Task], places: Mapping[int, Any], device: str) -> list[Any]:
        # Where the engine writes what it reads of each tensor: the caller's memory, but not for
        # what is cut afterwards. While the first bytes are on their way; each decode goes after
        # what is queued for memory that the tensors got.
        rows, given = [], []
        for task in tasks:
            block, row = self._cutting.read(task)
            rows.append(row)
            given.append(places.get(task.at) if block != _ALL or self._cutting.shape(task) == task.shape else None)
        fresh = iter(self._frame.empty_on(device, [row for row, place in zip(rows, given, strict=True) if place is None]))
        return [next(fresh) if place is None else place for place in given]

    def _requests(self, tasks: list[Task], tensors: list[Any]) -> bytes:
        pairs = [(task, tensor) for task, tensor in zip(tasks, tensors, strict=True) if tensor.numel()]
        return packed([(task.at, tensor.data_ptr(), *self._cutting.read(task)[0]) for task, tensor in pairs])

    def _kept(self, task: Task, tensor: Any) -> Iterator[tuple[int, Any]]:
        # What fails here is said when the ranks next agree; then nothing more is kept.
        try:
            if self._late is None:
                tensor = self._cutting.cut(task, tensor)
                if str(tensor.device) == "cpu" != self.model.device:
                    tensor = tensor.to(self.model.device)
                if self._dtype is not None:
                    tensor = self._frame.cast(tensor, task.row.dtype, self._dtype)
                self._count, self._bytes = self._count + 1, self._bytes + self.model.table[task.at][3]
                self._tell(0)
        except BaseException as caught:
            self._late = caught
        if self._late is None:
            yield task.at, tensor

    def _size(self, at: int) -> int:
        # The most bytes of any rank's part of a tensor, and of what it is cast to.
        task = self.task(at)
        elements = math.prod(self._cutting.shape(task, 0))
        size = elements * task.row.nbytes // max(math.prod(task.shape), 1)
        return size if self._dtype is None else size + elements * int(getattr(self._dtype, "itemsize", 8))

    def _check(self, positions: list[int], most: int) -> None:
        # Each tensor must fit a budget by itself; 0: there is none.
        for at in positions if most else ():
            if (size := self._size(at)) > most:
                name = self.model.table[at][0]
                text = f"overwire: {self.model.uris[0]} tensor {name!r}: it takes {size} bytes, and max_memory is {most}"
                raise OutOfMemoryError(text, asked=size, free=most, total=most, tensor=name)

    def _windows(self, positions: list[int], most: int) -> list[list[int]]:
        # Of at most that many bytes, or one tensor; 0: one window. All ranks divide what
        # they share alike.
        windows: list[list[int]] = []
        left = 0
        for at in positions:
            size = self._size(at)
            if not windows or most and size > left:
                windows.append([])
                left = most
            windows[-1].append(at)
            left -= size
        return windows

    def _agree(self, error: BaseException | None = None, ours: bool = True) -> None:
        late, self._late = self._late, None
        self._members.agree(late or error, ours or late is not None)

    def task(self, at: int) -> Task:
        """Local: a tensor, and how it is cut."""
        row = self.model.row(at)
        return Task(at, row, torch_shape(row), self._dims.get(at))

    def part_shape(self, at: int) -> tuple[int, ...]:
        """Local: the shape of this rank's part of a tensor."""
        return self._cutting.shape(self.task(at))

    def _tell(self, done: int) -> None:
        # done: bytes of tensors that are on their way; those of tensors that have arrived count.
        if self._watcher is not None:
            total = sum(self.model.table[at][3] for at in self.chosen)
            self._watcher.update(Progress(min(max(done, self._bytes), total), total, self._count, len(self.chosen)))


def _closed() -> None:
    raise CancelledError("overwire: stream: it was closed before its end")


def _over(load: Load) -> bool:
    try:
        return load.job.ended(_TICK)
    except OverwireError:
        return True

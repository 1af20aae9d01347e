"""Loads by the ranks of a process group together: whole or in shards.

    tensors = ow.load_file(path, device="cuda:0", group=pg, shard={"up.weight": 0, "down.weight": 1})

Each rank gets every tensor; one that `shard` names is cut along that dimension
into blocks of ceil(size / ranks), of which rank r gets the r-th (the last ones
may be shorter, or empty). There are several ways there:

    whole tensors    each       every rank reads it
                     broadcast  one rank of each host reads it, and sends it
                     gather     each rank of a host reads an equal part of the
                                stored bytes, and gets the others' from the others
    sharded tensors  own        every rank reads what holds its block
                     scatter    one rank of each host reads it, and sends blocks
                     gather     as above, and keeps what is in its block

    both             ipc        as gather, by memory that the ranks of a host map of
                                each other
                     spread     as gather, by the ranks of all hosts together

On the GPUs of one host ipc is the fastest, and all goes that way if the ranks can map
each other's memory. Elsewhere it depends on disk, page cache, links and cores, so it is
measured: the load goes in batches, each batch goes one way, and `group.Rates` has the rule.
By all but each and own a host reads each byte once, and by spread all hosts together do;
by the other ways nothing but a few flags crosses between hosts.

What travels by gather are the stored bytes: of compressed tensors every rank
decodes them (`relays`). Broadcast and scatter are for plain ones.

Failure: whatever fails on one rank is raised on all, before the batch is sent or,
for relays, when the ranks next agree; what had been loaded is freed. `group` says how a
rank hears of the others.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, CancelledError, CorruptError, NotSupportedError, OutOfMemoryError, OverwireError
from ..frameworks.choose import check_device, check_dtype, frame_for
from ..model.opened import WHOLE, Model, opening, prepare
from ..model.options import DeviceLike, ShardLike, TorchName
from ..model.plan import fit
from ..model.sources import SourceLike
from ..progress import Progress, watch
from . import group as ranks
from .exchange import Batch, ExchangeContext, Task, shard_range, torch_shape
from .group import Members, verb
from .identity import opened, replaced
from .relays import BUFFERS, FEW, Relay, fits

if TYPE_CHECKING:
    import torch

__all__ = ["GroupLoad", "ShardLike", "begun", "load", "shard_range"]

log = logging.getLogger("overwire")

# Tensor bytes of a batch, and of a try: enough for rates to be those of large
# loads, though each way takes some milliseconds to begin. Two batches of a rank
# are on their way at most.
_BATCH = 256 << 20
_TRY = 1 << 30

# Tensor bytes of a window of a stream that has no budget, where the engines do not
# exchange.
_WINDOW = 1 << 30

# Below this a tensor costs more by its number than by its bytes.
_SMALL = 256 << 10


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
        end. max_memory: of this rank's tensors; the two batches on their way
        are beside. Other arguments are those of `load_file`.

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
    is of all of them. beside: the same where the engines do not exchange. choose: called before the ranks meet, it returns the tensors that
    this rank wants, by position; its errors reach all ranks."""
    if group is None:
        raise ArgumentError("overwire: shard: needs the group whose ranks share the tensors")
    begun: list[GroupLoad] = []

    def close() -> None:
        while begun:
            begun.pop().close()

    def begin() -> dict[str, Any]:
        if options.get("read") is not None:
            raise ArgumentError("overwire: read: a group's way of reading is set by OVERWIRE_READ, for all its ranks alike")
        begun.append(GroupLoad(members, source, shard, device, framework, (budget, beside), options))
        if choose is not None:
            begun[0].chosen = list(choose(begun[0]))
        return begun[0].describe()

    with verb(group, device) as members:
        try:
            reports = members.exchange(begin, alike=True)
            if _replaced(reports, begun[0].model) is not None:  # once again: another file was put there meanwhile
                close()
                reports = members.exchange(begin, alike=True)
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
        self._waiting: Batch | None = None  # being read, and not sent yet
        # By way, what goes by one load or relay at the end; "few": too little to care how.
        self._later: dict[str, list[Task]] = defaultdict(list)
        self._widest: ExchangeContext | None = None  # of the ranks of all hosts
        self._frame = frame_for(framework)
        self._exchange = ranks.exchange_setting()
        self.budget, self.beside = budgets[0] or 0, budgets[1]
        self.common: list[int] = []
        self._alike = False  # all ranks want the same tensors
        self._place = ""
        self._spreads = False  # the ranks of several hosts may exchange
        if self._frame.name != "torch":
            raise ArgumentError("overwire: group: the ranks exchange torch tensors; use framework='pt'")
        where = check_device(device, self._frame)
        self._mapping = self._exchange == "ipc" or self._exchange == "auto" and where != "cpu"  # all of it, if that can be
        self._dtype = check_dtype(self._frame, dtype)
        self._watcher = watch(options.get("progress"), "load" if budgets[0] is None else "stream")
        link_device = members.link_device(where)
        prepare(where if self._mapping else link_device or where)  # where stored bytes go
        self.model = Model(source, device=where, **whole)
        self.model.alone()  # what was preloaded is not shared out
        self._link_model = self.model
        try:
            if link_device and link_device != where:
                self._link_model = Model(source, device=link_device, **whole)
                self._link_model.alone()
            self._context = ExchangeContext(members, self._frame, self.model, self._link_model)
            chosen = self.model.choose(options.get("keys"), options.get("filter"))
            self.chosen = list(range(len(self.model.table))) if chosen is None else chosen
            self._dims = self._cuts(shard)
            self._may_send = bool(link_device) and self._exchange != "none"
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
        if self._link_model is not self.model:
            self._link_model.close()

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
        whole, part = math.prod(task.shape), math.prod(self._context.part_shape(task, self._members.rank))
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
            "place": ranks.place_of(self.model.uris[0]),
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
        if members.hosts > 1 and self._may_send:
            # From a store, or a file system of several hosts, they may read each byte once.
            wanted = self._exchange == "nccl" or any(one["remote"] for one in reports)
            room = max(one["room"] for one in reports)
            self._spreads = wanted and fits(members.size, room)
            if wanted and not self._spreads:
                log.info("group: each host reads by itself: chunks of %d bytes are too large for %d ranks together", room, members.size)
            self._mapping = self._mapping and (self._exchange == "ipc" or not self._spreads)
        shared = reports[0]["wanted"]
        for one in reports[1:]:
            shared = bytes(a & b for a, b in zip(shared, one["wanted"], strict=True))
        self.common = [at for at in range(len(table)) if shared[at >> 3] >> (at & 7) & 1]
        self.lone = [at for at in self.chosen if not shared[at >> 3] >> (at & 7) & 1]
        self._alike = all(one["wanted"] == shared for one in reports)
        self.budget, self.beside = (min((one["budgets"][n] for one in reports if one["budgets"][n]), default=0) for n in range(2))
        self._place = reports[0]["place"]

    def run(self) -> dict[str, Any]:
        """This rank's tensors, by name."""
        loaded: dict[int, Any] = {}
        carried = self._mapping and self._carry(self._carrier([self.task(at) for at in self.common]), loaded)
        if not (carried and self._alike):  # else the ranks have agreed already
            self._load([] if carried else self.common, self.lone, loaded)
        return {self.model.table[at][0]: loaded[at] for at in self.chosen}

    def arrive(self, places: Mapping[int, Any] | None = None) -> Generator[tuple[int, Any], None, None]:
        """(position, tensor) of what this rank wants, as it arrives; after the last the
        ranks agree. Where the budget, or the way of exchange, wants it, the load goes in
        windows.

        places: by position, memory of this rank on the model's device, dense and of the
            file's dtype, for its part of a tensor. What is yielded is that memory, or,
            where the engine cannot write there, another.

        A rank that closes this early ends it on all.
        """
        try:
            self._check(self.common, self.budget)
            left = self._windows(self.common, self.budget)
            while left:
                window, left = left[0], left[1:]
                self._agree()  # with those that have closed
                relay = self._carrier([self.task(at) for at in window], places) if self._mapping else None
                if relay is not None:
                    for task, tensor in relay.carry(self._agree, lambda more: self._tell(more, 0)):
                        yield from self._kept(task, tensor)
                    continue
                self._check(window, self.beside)
                window, *more = self._windows(window, self.budget or self.beside or _WINDOW)
                left = more + left
                loaded: dict[int, Any] = {}
                self._load(window, [], loaded)
                for at in window:
                    yield at, loaded.pop(at)
            for window in self._windows(self.lone, self.budget or _WINDOW):
                try:
                    loaded = {}
                    batch = Batch(self._context, "own", [self.task(at) for at in window])
                    batch.read()
                    self._keep(batch.tasks, batch.send(), loaded)
                except BaseException as caught:  # said when the ranks next agree
                    self._late = self._late or caught
                    break
                for at in window:
                    yield at, loaded.pop(at)
            self._agree()
        except GeneratorExit:
            self.dismiss()
            raise

    def dismiss(self) -> None:
        """Collective: ends on all ranks what `arrive` gives, when the ranks next agree."""
        with suppress(OverwireError):
            self._agree(CancelledError("overwire: stream: it was closed before its end"))

    def _kept(self, task: Task, tensor: Any) -> Iterator[tuple[int, Any]]:
        kept: dict[int, Any] = {}
        try:
            if self._late is None:
                self._keep([task], [tensor], kept)
        except BaseException as caught:  # said when the ranks next agree
            self._late = caught
        yield from kept.items()

    def _size(self, at: int) -> int:
        # The most bytes of any rank's part of a tensor, and of what it is cast to.
        task = self.task(at)
        elements = math.prod(self._context.part_shape(task, 0))
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

    def _load(self, common: list[int], lone: list[int], loaded: dict[int, Any]) -> None:
        # By the ways that are measured; and what this rank alone wants.
        members = self._members
        later = self._later = defaultdict(list, own=[self.task(at) for at in lone])
        if self._may_send and members.most_local > 1 and common:
            members.warm_up(self._link_model.device)
        try:
            for kind, tasks in self._kinds(common):
                while tasks:
                    tasks = self._some(kind, tasks, loaded)
            self._flush(loaded)
            later[next((way for way in ("ipc", "gather", "spread") if later[way]), "own")] += later["few"]
            if later["ipc"] and not self._carry(self._carrier(later["ipc"]), loaded):
                later["gather" if self._may_send else "own"] += later["ipc"]
            for way in ("gather", "spread"):
                if later[way]:
                    self._relay(later[way], loaded, spread=way == "spread")
            # Also on ranks that have none of these: they may have to raise.
            self._finish(Batch(self._context, "own", later["own"]), loaded)
            self._agree()
        finally:
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                waiting.abandon()

    def _carrier(self, tasks: list[Task], places: Mapping[int, Any] | None = None) -> Relay | None:
        # The engines of each host exchange these; None where they cannot.
        members = self._members
        if members.most_local == 1 or not tasks or members.unreachable:
            return None
        relay = Relay(self._context, tasks, engine=True)
        if reason := relay.meet(places):
            members.unreachable = reason
            log.warning("the ranks exchange by torch.distributed: they cannot map each other's memory: %s", reason)
            return None
        if not members.reached:
            members.reached = True
            log.info("the ranks of each host can exchange by memory that they map of each other")
        return relay

    def _carry(self, relay: Relay | None, loaded: dict[int, Any]) -> bool:
        if relay is None:
            return False
        done = sum(self.model.table[at][3] for at in loaded)
        for task, tensor in relay.carry(self._agree, lambda more: self._tell(done + more, len(loaded))):
            loaded.update(self._kept(task, tensor))
        return True

    def _some(self, kind: tuple[Any, ...], tasks: list[Task], loaded: dict[int, Any]) -> list[Task]:
        # Collective: loads the first of the tasks, one way, and returns the rest.
        # Tries are finished; a batch is sent while the next is read; what every
        # rank reads for itself is left for one load at the end, and so is what goes
        # by relay.
        members = self._members
        if sum(task.row.nbytes for task in tasks) < ranks.TELLING:
            self._later["few"] += tasks
            return []
        ways = self._ways(kind)
        way, trying = members.rates.choose(kind, ways)
        if not trying and len(ways) > 1:
            self._say(kind, way)
        if way not in ("broadcast", "scatter") and not trying:
            self._later["own" if way == "each" else way] += tasks
            return []
        tasks, rest = _split(tasks, _TRY if trying else _BATCH)
        if trying:
            self._flush(loaded)
        began = time.perf_counter()
        if way in ("gather", "spread"):
            self._relay(tasks, loaded, spread=way == "spread")
        elif way == "ipc":
            if not self._carry(self._carrier(tasks), loaded):
                return tasks + rest  # by another way
        else:
            before = self._waiting
            if before is not None:
                before.arrive()  # one load at a time: each has memory of its own
            self._waiting = Batch(self._context, way, tasks)
            if before is not None:
                self._finish(before, loaded)
            if trying:
                self._flush(loaded)
        if trying:
            self._context.drain()
            seconds = self._agree(seconds=time.perf_counter() - began)
            members.rates.note(kind, way, sum(task.row.nbytes for task in tasks), seconds)
        return rest

    def _flush(self, loaded: dict[int, Any]) -> None:
        # Collective.
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._finish(waiting, loaded)

    def _agree(self, error: BaseException | None = None, ours: bool = True, seconds: float = 0.0) -> float:
        late, self._late = self._late, None
        return self._members.agree(late or error, seconds, ours or late is not None)

    def _say(self, kind: tuple[Any, ...], way: str) -> None:
        # Once for each kind: which way, and why.
        if kind not in self._members.said:
            self._members.said.add(kind)
            measured = self._members.rates.table().get(" ".join(str(part) for part in kind), {})
            rates = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in measured.items())
            log.info("group: %s tensors go by %r; GB/s measured: %s", " ".join(kind[:3]), way, rates)

    def _ways(self, kind: tuple[Any, ...]) -> tuple[str, ...]:
        first = "each" if kind[0] == "whole" else "own"
        members, ways = self._members, [first]
        if members.most_local > 1 and self._may_send:
            if kind[2] == "plain":
                ways.append("broadcast" if first == "each" else "scatter")
            ways.append("gather")
        if members.most_local > 1 and self._exchange == "auto" and not members.unreachable:
            ways.append("ipc")
        if self._spreads:
            ways.append("spread")
        return tuple(ways)

    def task(self, at: int) -> Task:
        """Local: a tensor, and how it is cut."""
        row = self.model.row(at)
        return Task(at, row, torch_shape(row), self._dims.get(at))

    def part_shape(self, at: int) -> tuple[int, ...]:
        """Local: the shape of this rank's part of a tensor."""
        return self._context.part_shape(self.task(at), self._members.rank)

    def _kinds(self, positions: list[int]) -> Iterable[tuple[tuple[Any, ...], list[Task]]]:
        # Tensors of a kind go together, in the order of the file.
        kinds: dict[tuple[Any, ...], list[Task]] = {}
        for at in positions:
            task = self.task(at)
            layout = "whole" if task.dim is None else "rows" if task.dim == 0 else "columns"
            size = "small" if task.row.nbytes < _SMALL else "large"
            held = self.model.row(task.row.alias) if task.row.alias >= 0 else task.row
            coding = "compressed" if held.stored < held.nbytes else "plain"
            target = self.model.device.partition(":")[0]
            kinds.setdefault((layout, size, coding, target, self._place), []).append(task)
        return list(kinds.items())

    def _relay(self, tasks: list[Task], loaded: dict[int, Any], spread: bool = False) -> None:
        # Collective. What fails after all have agreed is said when they next do.
        done = sum(self.model.table[at][3] for at in loaded)
        context = self._everywhere() if spread else self._context
        relay = Relay(context, tasks, buffers=FEW if spread else BUFFERS)
        relay.run(self._agree, lambda more: self._tell(done + more, len(loaded)))
        try:
            self._keep(tasks, relay.tensors(), loaded)
        except BaseException as caught:
            self._late = caught

    def _everywhere(self) -> ExchangeContext:
        # Its ring is kept as long as the load.
        if self._widest is None:
            self._widest = ExchangeContext(self._members.everyone(), self._frame, self.model, self._link_model)
        return self._widest

    def _keep(self, tasks: list[Task], tensors: list[Any], loaded: dict[int, Any]) -> None:
        wanted = self._dtype
        for task, tensor in zip(tasks, tensors, strict=True):
            loaded[task.at] = tensor if wanted is None else self._frame.cast(tensor, task.row.dtype, wanted)
        self._tell(sum(self.model.table[at][3] for at in loaded), len(loaded))

    def _tell(self, done: int, tensors: int) -> None:
        if self._watcher is not None:
            total = sum(self.model.table[at][3] for at in self.chosen)
            self._watcher.update(Progress(min(done, total), total, tensors, len(self.chosen)))

    def _finish(self, batch: Batch, loaded: dict[int, Any]) -> None:
        # Collective: reading, agreeing that all have read, sending. What fails
        # after that fails here alone, and is said when the ranks next agree.
        try:
            try:
                batch.read()
            except BaseException as caught:
                self._late = self._late or caught
            self._agree()
        except BaseException:
            batch.abandon()
            raise
        try:
            self._keep(batch.tasks, batch.send(), loaded)
        except BaseException as caught:
            self._late = caught


def _split(tasks: list[Task], limit: int) -> tuple[list[Task], list[Task]]:
    # The first tasks, of about `limit` bytes, and the rest.
    for end, task in enumerate(tasks):
        if end and task.row.nbytes > limit:
            return tasks[:end], tasks[end:]
        limit -= task.row.nbytes
    return tasks, []

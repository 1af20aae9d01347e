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

Which is fastest depends on disk, page cache, links and cores, so it is measured:
the load goes in batches, each batch goes one way, and `group.Rates` has the rule.
With broadcast, gather and scatter a host reads each byte once; nothing but a few
flags crosses between hosts.

What travels by gather are the stored bytes: of compressed tensors every rank
decodes them (`relays`). Broadcast and scatter are for plain ones.

Failure: whatever fails on one rank is raised on all, before the batch is sent or,
for relays, when the ranks next agree; what had been loaded is freed. Of a rank
that is gone the others hear from the group, at its time-out at the latest.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from .._verbs import knobs
from ..dtypes import PACKED, packed_shape
from ..errors import ArgumentError, NotSupportedError, OverwireError
from ..frameworks.choose import check_device, check_dtype, device_number, frame_for
from ..model.opened import WHOLE, Model, opening, prepare
from ..model.options import DeviceLike, ShardLike, StreamOptions, TorchName, check_options
from ..model.plan import fit
from ..model.sources import SourceLike
from ..progress import Progress, watch
from . import group as ranks
from .exchange import Batch, ExchangeContext, Task, shard_range
from .group import Members, members_of
from .relays import Relay

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

__all__ = ["ShardLike", "agree", "load", "rates", "shard_range"]

log = logging.getLogger("overwire")

# Tensor bytes of a batch, and of a try: enough for rates to be those of large
# loads, though each way takes some milliseconds to begin. Two batches of a rank
# are on their way at most.
_BATCH = 256 << 20
_TRY = 1 << 30

# Below this a tensor costs more by its number than by its bytes.
_SMALL = 256 << 10


def rates(group: Any) -> dict[str, dict[str, float]]:
    """What loads over this group have measured: kind of tensor to way to bytes
    a second of tensors, all ranks together counted once. No collective."""
    return members_of(group).rates.table()


def agree(group: Any, error: BaseException | None) -> None:
    """Collective: raises on every rank of the group if one brings an error: that
    rank its own, the others one of the same class that names the rank."""
    members_of(group).agree(error)


def load(
    source: SourceLike,
    group: Any,
    shard: ShardLike = None,
    *,
    device: DeviceLike = "cpu",
    framework: TorchName | None = None,
    **options: Unpack[StreamOptions],
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
    check_options("load", options, StreamOptions)
    if options.get("read") is not None:
        raise ArgumentError("overwire: read: a group's way of reading is set by OVERWIRE_READ, for all its ranks alike")
    if group is None:
        raise ArgumentError("overwire: shard: needs the group whose ranks share the tensors")
    members = members_of(group)
    opened: list[_Load] = []

    def begin() -> dict[str, Any]:
        opened.append(_Load(members, source, shard, device, framework, options))
        return opened[0].describe()

    with _current(device):
        try:
            reports = members.exchange(begin)
            return opened[0].run(reports)
        finally:
            for one in opened:
                one.close()


class _Load:
    # One load on one rank. Construction is local; `run` is collective.

    def __init__(
        self,
        members: Members,
        source: SourceLike,
        shard: ShardLike,
        device: Any,
        framework: str | None,
        options: StreamOptions,
    ) -> None:
        whole = {name: value for name, value in opening(options).items() if name not in ("keys", "filter")}  # every rank the same table
        dtype = options.get("dtype")
        self._members = members
        self._late: BaseException | None = None
        self._waiting: Batch | None = None  # being read, and not sent yet
        self._alone: list[Task] = []  # what this rank reads without the others
        self._shared: list[Task] = []  # what goes by one relay at the end
        self._few: list[Task] = []  # what is too little to care how
        self._frame = frame_for(framework)
        self._exchange = next(str(row["value"]) for row in knobs() if row["name"] == "OVERWIRE_EXCHANGE")
        if self._frame.name != "torch":
            raise ArgumentError("overwire: group: the ranks exchange torch tensors; use framework='pt'")
        where = check_device(device, self._frame)
        self._dtype = check_dtype(self._frame, dtype)
        self._watcher = watch(options.get("progress"), "load")
        link_device = members.link_device(where)
        prepare(link_device or where)
        self._model = Model(source, device=where, **whole)
        self._model.alone()  # what was preloaded is not shared out
        self._link_model = self._model
        try:
            if link_device and link_device != where:
                self._link_model = Model(source, device=link_device, **whole)
                self._link_model.alone()
            self._context = ExchangeContext(members, self._frame, self._model, self._link_model)
            chosen = self._model.choose(options.get("keys"), options.get("filter"))
            self._chosen = list(range(len(self._model.table))) if chosen is None else chosen
            self._dims = self._cuts(shard)
            self._may_send = bool(link_device) and self._exchange != "none"
            fit(self._model, self._frame, self._dtype, options.get("max_memory"), map(self._part, self._chosen))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        self._model.close()
        if self._link_model is not self._model:
            self._link_model.close()

    def _cuts(self, shard: ShardLike) -> dict[int, int]:
        # Position to dimension. Of all tensors, not of those chosen here alone:
        # the ranks compare it.
        model, dims = self._model, {}
        if shard is None:
            return {}
        if isinstance(shard, Mapping):
            asked: list[tuple[int, int | None]] = [(model.place(name), dim) for name, dim in shard.items()]
        elif callable(shard):
            asked = [(at, shard(row[0], _shape(row))) for at, row in enumerate(model.table)]
        else:
            raise ArgumentError(f"overwire: shard: expected a dict of name to dimension, or a callable, got {type(shard).__name__}")
        for at, dim in asked:
            if dim is None:
                continue
            row = model.row(at)
            rank = len(_shape(row))
            if not isinstance(dim, int) or isinstance(dim, bool) or not -rank <= dim < rank:
                text = f"overwire: shard {row.name!r}: dimension {dim!r} of a tensor with {rank}"
                raise ArgumentError(text, tensor=row.name)
            if row.dtype.startswith("F6_"):
                text = f"overwire: shard {row.name!r}: {row.dtype} is loaded as bytes, without dimensions"
                raise NotSupportedError(text, tensor=row.name)
            dims[at] = dim % rank
        return dims

    def _part(self, at: int) -> tuple[int, int]:
        # What this rank gets of a tensor: how many of its elements as the file counts them.
        if at not in self._dims:
            return at, WHOLE
        task = self._task(at)
        whole, part = math.prod(task.shape), math.prod(self._context.part_shape(task, self._members.rank))
        return at, math.prod(task.row.shape) * part // max(whole, 1)

    def describe(self) -> dict[str, Any]:
        """What the ranks compare and must know of each other."""
        table = hashlib.sha256()
        for name, dtype, shape, nbytes, stored, *_ in self._model.table:
            table.update(repr((name, dtype, shape, nbytes, stored)).encode())
        wanted = bytearray(-(-len(self._model.table) // 8))
        for at in self._chosen:
            wanted[at >> 3] |= 1 << (at & 7)
        return {
            "host": ranks.host_name(),
            "tensors": table.digest(),
            "shard": hashlib.sha256(repr(sorted(self._dims.items())).encode()).digest(),
            "dtype": str(self._dtype),
            "wanted": bytes(wanted),
            "device": self._model.device.partition(":")[0],
            "exchange": self._exchange,
            "place": _place(self._model.uris[0]),
        }

    def run(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """Collective. All ranks see the same `reports`, so all decide alike."""
        members, table = self._members, self._model.table
        for what in ("tensors", "shard", "dtype", "device", "exchange"):
            for rank, one in enumerate(reports):
                if one[what] != reports[0][what]:
                    raise ArgumentError(f"overwire: group: {what} differs between ranks 0 and {rank}", source=self._model.uris[0])
        members.settle([one["host"] for one in reports])
        shared = reports[0]["wanted"]
        for one in reports[1:]:
            shared = bytes(a & b for a, b in zip(shared, one["wanted"], strict=True))
        common = [at for at in range(len(table)) if shared[at >> 3] >> (at & 7) & 1]
        self._alone = [self._task(at) for at in self._chosen if not shared[at >> 3] >> (at & 7) & 1]

        loaded: dict[int, Any] = {}
        if self._carried([self._task(at) for at in common], loaded):
            common = []
        link_device = self._link_model.device
        if self._may_send and members.most_local > 1 and common:
            members.warm_up(link_device)
        try:
            for kind, tasks in self._kinds(common, reports[0]["place"]):
                while tasks:
                    tasks = self._some(kind, tasks, loaded)
            self._flush(loaded)
            if self._shared:
                self._shared += self._few
            else:
                self._alone += self._few
            if self._shared:
                self._relay(self._shared, loaded)
            # Also on ranks that have none of these: they may have to raise.
            self._finish(Batch(self._context, "own", self._alone), loaded)
            self._agree()
        finally:
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                waiting.abandon()
        return {table[at][0]: loaded[at] for at in self._chosen}

    def _carried(self, tasks: list[Task], loaded: dict[int, Any]) -> bool:
        # Collective: all that the ranks share, at once, if the engines of each host are
        # to exchange it and can.
        members = self._members
        if self._exchange != "ipc" or members.most_local == 1 or not tasks or members.unreachable:
            return False
        relay = Relay(self._context, tasks, engine=True)
        if reason := relay.meet():
            members.unreachable = reason
            log.warning("the ranks exchange by torch.distributed: they cannot map each other's memory: %s", reason)
            return False
        if not members.reached:
            members.reached = True
            log.info("the ranks of each host exchange by memory that they map of each other")
        tensors = relay.carry(lambda error, ours: self._agree(error=error, ours=ours), lambda more: self._tell(more, 0))
        try:
            self._keep(tasks, tensors, loaded)
        except BaseException as caught:  # said when the ranks next agree
            self._late = caught
        return True

    def _some(self, kind: tuple[Any, ...], tasks: list[Task], loaded: dict[int, Any]) -> list[Task]:
        # Collective: loads the first of the tasks, one way, and returns the rest.
        # Tries are finished; a batch is sent while the next is read; what every
        # rank reads for itself is left for one load at the end, and so is what goes
        # by relay.
        members = self._members
        if sum(task.row.nbytes for task in tasks) < ranks.TELLING:
            self._few += tasks
            return []
        way, trying = members.rates.choose(kind, self._ways(kind))
        if way in ("each", "own", "gather") and not trying:
            later = self._shared if way == "gather" else self._alone
            later += tasks
            return []
        tasks, rest = _split(tasks, _TRY if trying else _BATCH)
        if trying:
            self._flush(loaded)
        begun = time.perf_counter()
        if way == "gather":
            self._relay(tasks, loaded)
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
            seconds = self._agree(time.perf_counter() - begun)
            members.rates.note(kind, way, sum(task.row.nbytes for task in tasks), seconds)
        return rest

    def _flush(self, loaded: dict[int, Any]) -> None:
        # Collective.
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._finish(waiting, loaded)

    def _agree(self, seconds: float = 0.0, error: BaseException | None = None, ours: bool = True) -> float:
        late, self._late = self._late, None
        return self._members.agree(late or error, seconds, ours or late is not None)

    def _ways(self, kind: tuple[Any, ...]) -> tuple[str, ...]:
        whole = kind[0] == "whole"
        if not self._may_send or self._members.most_local == 1:
            return ("each",) if whole else ("own",)
        if kind[2] == "compressed":
            return ("each", "gather") if whole else ("own", "gather")
        return ("each", "broadcast", "gather") if whole else ("own", "scatter", "gather")

    def _task(self, at: int) -> Task:
        row = self._model.row(at)
        return Task(at, row, _shape(row), self._dims.get(at))

    def _kinds(self, positions: list[int], place: str) -> Iterable[tuple[tuple[Any, ...], list[Task]]]:
        # Tensors of a kind go together, in the order of the file.
        kinds: dict[tuple[Any, ...], list[Task]] = {}
        for at in positions:
            task = self._task(at)
            layout = "whole" if task.dim is None else "rows" if task.dim == 0 else "columns"
            size = "small" if task.row.nbytes < _SMALL else "large"
            held = self._model.row(task.row.alias) if task.row.alias >= 0 else task.row
            coding = "compressed" if held.stored < held.nbytes else "plain"
            target = self._model.device.partition(":")[0]
            kinds.setdefault((layout, size, coding, target, place), []).append(task)
        return list(kinds.items())

    def _relay(self, tasks: list[Task], loaded: dict[int, Any]) -> None:
        # Collective. What fails after all have agreed is said when they next do.
        done = sum(self._model.table[at][3] for at in loaded)
        tensors = Relay(self._context, tasks).run(
            lambda error, ours: self._agree(error=error, ours=ours), lambda more: self._tell(done + more, len(loaded))
        )
        try:
            self._keep(tasks, tensors, loaded)
        except BaseException as caught:
            self._late = caught

    def _keep(self, tasks: list[Task], tensors: list[Any], loaded: dict[int, Any]) -> None:
        wanted = self._dtype
        for task, tensor in zip(tasks, tensors, strict=True):
            loaded[task.at] = tensor if wanted is None else self._frame.cast(tensor, task.row.dtype, wanted)
        self._tell(sum(self._model.table[at][3] for at in loaded), len(loaded))

    def _tell(self, done: int, tensors: int) -> None:
        if self._watcher is not None:
            total = sum(self._model.table[at][3] for at in self._chosen)
            self._watcher.update(Progress(min(done, total), total, tensors, len(self._chosen)))

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


def _current(device: Any) -> AbstractContextManager[Any]:
    # NCCL sends flags and objects from the current GPU, which must be this rank's.
    # A wrong device is refused later, where the error reaches all ranks.
    import torch

    with suppress(OverwireError):
        if 0 <= (number := device_number(device)) < torch.cuda.device_count():
            return torch.cuda.device(number)
    return nullcontext()


def _split(tasks: list[Task], limit: int) -> tuple[list[Task], list[Task]]:
    # The first tasks, of about `limit` bytes, and the rest.
    for end, task in enumerate(tasks):
        if end and task.row.nbytes > limit:
            return tasks[:end], tasks[end:]
        limit -= task.row.nbytes
    return tasks, []


def _shape(row: Any) -> tuple[int, ...]:
    # As the loaded torch tensor has it.
    shape: tuple[int, ...] = row[2]
    return packed_shape(row[1], shape) if row[1] in PACKED else shape


def _place(uri: str) -> str:
    # What rates depend on: one file system, or one kind of store.
    if "://" in uri:
        return uri.partition("://")[0]
    try:
        return f"dev{os.stat(uri).st_dev}"
    except OSError:
        return "file"

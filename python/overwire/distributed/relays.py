"""Relays: the ranks of a host exchange stored bytes, and each decodes.

Each rank reads an equal share of the stored bytes, over the link of its own GPU, and
gets the other shares from the other ranks (by collectives, the ranks may be on several
hosts); then every rank decodes what it needs
(plain tensors: copies it). A relay is divided into pieces, each in one of a few
buffers. Beside the tensors it needs only the ring of these buffers.

The engine reads, lays out and decodes (`gosrc/relay`); this
module exchanges the pieces, by collectives. Where the ranks of each host map each
other's memory, the engine exchanges them, too, and this module only brings the ranks
together. All ranks of the group must call it with the same tensors.
On GPUs reading, uploading, gathering and decoding of successive pieces overlap,
ordered by their streams; the thread here only queues, as far ahead as there are
buffers.

Failure: a failed rank still exchanges, whatever its buffers contain, until the ranks
next agree; so no rank waits for it, and no rank uses its bytes.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .._verbs import relay, relay_aim, relay_decode, relay_join, relay_offer, relay_shares, relay_wait
from ..dtypes import PACKED
from ..errors import IOFailure, NotSupportedError, OverwireError
from ..jobs import Job, log
from ..model.opened import WHOLE
from .exchange import ExchangeContext, Task
from .group import Members

if TYPE_CHECKING:
    from .._requests import RelayRequest

__all__ = ["BUFFERS", "FEW", "SHARE", "Relay", "connect", "fits", "share_of", "spec_of"]

#: Buffers of the ring, and bytes in each for each rank of a host: it is all that a
#: relay takes beside the tensors. A chunk fits, and what lies between it
#: and the next. Where several hosts exchange there are FEW buffers.
BUFFERS = 4
FEW = 2
SHARE = 32 << 20

# A buffer is below 2 GiB, however many ranks exchange; shares are multiples of _ALIGN.
_MOST = (2 << 30) - 1
_ALIGN = 256

# Pieces after which the ranks agree that all is well.
_AGREE = 32

# Seconds between two reports of progress, where the engine exchanges.
_TICK = 0.1

# Seconds in which a relay that has lost its memory ends.
_SETTLED = 0.2

# Waits for the engine are in slices of this many milliseconds, for Ctrl-C.
_SLICE_MS = 50


def share_of(ranks: int, share: int) -> int:
    """The bytes of a buffer that each of the ranks has: `share`, or less where the buffer would be too large."""
    return min(share, _MOST // ranks // _ALIGN * _ALIGN)


def fits(ranks: int, room: int) -> bool:
    """Whether every chunk of a model fits where that number of ranks exchange. room: see `Model.room`."""
    return room <= share_of(ranks, SHARE)


def connect(members: Members, job: Job | None, error: BaseException | None) -> str:
    """Collective: connects the relays of all ranks, whose engines exchange. "", or why that
    cannot be. error: why this rank has no relay; raised on all."""

    def offer() -> Any:
        if error is not None:
            raise error
        assert job is not None
        return relay_offer(job.number)

    offers = members.exchange(offer)
    assert job is not None  # `offer` has raised
    try:
        relay_join([offers[rank] for rank in members.local], job.number)
    except BaseException as caught:
        error = caught
    try:
        # Of several, an error of another kind is raised.
        members.agree(error, ours=not isinstance(error, NotSupportedError))
    except NotSupportedError as reason:
        # A rank that fails while it reads takes its memory away, perhaps before others have
        # mapped it: then its error is the reason.
        members.agree(_failed(job))
        return str(reason).removeprefix("overwire: ")
    return ""


def _failed(job: Job) -> BaseException | None:
    # Why this rank's reading has failed; not why it cannot map the others, or they have ended.
    try:
        job.ended(_SETTLED)
    except NotSupportedError:
        return None
    except BaseException as error:
        return error if (job.report() or {}).get("ours", True) else None
    return None


def spec_of(members: Members, device: str, buffers: int, share: int) -> RelayRequest:
    """What a request says of this rank and its ring. All runs on torch's current stream,
    after what is queued there now."""
    stream = 0
    if device != "cpu":
        from ..frameworks.torch import stream_of

        stream = stream_of(device)
    return {
        "buffers": buffers,
        "size": share_of(members.most_local, share) * members.most_local,
        "ranks": len(members.local),
        "widest": members.most_local,
        "rank": members.local.index(members.rank),
        "device": device,
        "stream": stream,
    }


class Relay:
    """Tensors that go by a relay. The constructor begins to read, and is local;
    what fails in it is said by `run`, or by `meet` where the engine exchanges."""

    def __init__(self, context: ExchangeContext, tasks: list[Task], engine: bool = False, buffers: int = BUFFERS) -> None:
        self._context, self._tasks, self._engine = context, tasks, engine
        self._buffers = buffers
        self._model = context.model if engine else context.link_model
        self._job: Job | None = None
        self._shares: list[int] = []  # by piece: bytes of each rank's
        self._spec: RelayRequest = {}
        self._tensors: list[Any] = []
        self._asked: list[int] = []  # by request to the engine: the number of its task
        self._error: BaseException | None = None
        self._ours = True
        self._spent: dict[str, float] = {}  # seconds of this thread, by step
        try:
            self._begin()
        except BaseException as error:  # said by `run`, when the others can hear it
            self._fail(error)

    def _begin(self) -> None:
        members, model = self._context.members, self._model
        self._spec = spec = spec_of(members, model.device, self._buffers, SHARE)
        spec["tensors"] = [task.at for task in self._tasks]
        spec["exchange"] = self._engine
        if self._engine:
            spec["cuts"] = self._cuts()
        else:
            spec["ring"] = [buffer.data_ptr() for buffer in self._context.ring(self._buffers, spec["size"])]
        spec["world"], spec["members"], spec["here"] = members.size, members.local, members.here
        spec["timeline"] = log.isEnabledFor(logging.DEBUG)
        number = relay(spec, model.handle, b"")
        self._job = Job(number, "relay")
        if not self._engine:
            self._shares = relay_shares(number)
            self._aim()

    def _cuts(self) -> list[int]:
        # As `block_read` cuts, for the engines of all ranks alike.
        cuts = [-1 if task.dim is None or task.dim > 1 or task.row.dtype in PACKED else task.dim for task in self._tasks]
        return cuts if max(cuts) >= 0 else []

    def _aim(self, places: Mapping[int, Any] | None = None) -> None:
        context, model, rank = self._context, self._model, self._context.members.rank
        assert self._job is not None
        # While the first bytes are on their way. Each decode goes after what is
        # queued for memory that the tensors got.
        rows, blocks, given = [], [], []
        for task in self._tasks:
            block, shape, row = context.block_read(task, rank), context.part_shape(task, rank), task.row
            if block is not None:
                row = row._replace(shape=shape, nbytes=row.nbytes * math.prod(shape) // max(1, math.prod(task.shape)))
            rows.append(row)
            blocks.append(block or (0, WHOLE, 0, WHOLE))
            # The caller's memory, but not for what the engine brings whole and is cut afterwards.
            given.append(places.get(task.at) if places and (block is not None or shape == task.shape) else None)
        made = iter(context.frame.empty_on(model.device, [row for row, place in zip(rows, given, strict=True) if place is None]))
        self._tensors = [next(made) if place is None else place for place in given]
        self._asked = [slot for slot, tensor in enumerate(self._tensors) if tensor.numel()]
        requests = [(self._tasks[slot].at, self._tensors[slot].data_ptr(), *blocks[slot]) for slot in self._asked]
        relay_aim(self._job.number, array("q", [n for request in requests for n in request]).tobytes())

    def _fail(self, error: BaseException) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._job is not None:
            self._job.cancel()  # nothing writes to the ring any more
            report = self._job.report()
            self._ours = not isinstance(report, dict) or bool(report["ours"])

    def run(self, agree: Callable[[BaseException | None, bool], Any], decoded: Callable[[int], None]) -> None:
        """Collective: loads this rank's tensors.

        agree: raises on all ranks if it was given an error on one; the bool says
            that the error is not of bytes that another rank brought. decoded:
            gets the bytes of tensors decoded so far, now and then.
        """
        try:
            agree(self._error, True)  # from here on all ranks have the same pieces
            for piece in range(len(self._shares)):
                self._try(self._arrive, piece)
                self._try(self._exchange, piece)
                self._try(self._decode, piece)
                if piece % _AGREE == _AGREE - 1:
                    self._try(lambda _: decoded(self._done()), piece)
                    agree(self._error, self._ours)
            self._try(self._end, len(self._shares))
            agree(self._error, self._ours)
        except BaseException:
            self.abandon()
            raise
        log.debug("relay: %d pieces, seconds of %s", len(self._shares), {name: round(spent, 4) for name, spent in self._spent.items()})

    def tensors(self) -> list[Any]:
        """Local, once after `run`: the tensors, on the load's device."""
        tensors, self._tensors = self._tensors, []
        cut = [self._context.cut(task, tensor) for task, tensor in zip(self._tasks, tensors, strict=True)]
        return [tensor.to(self._context.model.device) for tensor in cut] if self._model is not self._context.model else cut

    def meet(self, places: Mapping[int, Any] | None = None) -> str:
        """Collective, before `carry`: connects the engines of all ranks. "", or why that
        cannot be; then nothing is read any more.

        places: by position, memory of the caller for what the engine writes of a tensor, on
            the device.
        """
        try:
            try:
                if self._error is None:
                    self._aim(places)
            except BaseException as error:
                self._fail(error)
            reason = connect(self._context.members, self._job, self._error)
        except BaseException:
            self.abandon()
            raise
        if reason:
            self.abandon()
        return reason

    def carry(
        self,
        agree: Callable[[BaseException | None, bool], Any],
        decoded: Callable[[int], None],
    ) -> Iterator[tuple[Task, Any]]:
        """Collective: `run` where the engine exchanges. Yields each task with its tensor as
        it arrives, in memory of its own or, where the engine can write there, in the
        caller's; after the last the ranks agree. Where a rank is gone, the
        others of its host raise that by themselves: no collective would end. A caller that
        closes this early has to agree by itself."""
        try:
            try:
                job = self._job
                if self._error is None and job is not None:
                    asked = self._asked
                    for slot in [slot for slot, tensor in enumerate(self._tensors) if not tensor.numel()]:
                        yield self._landed(slot)
                    while (landed := job.next(_TICK)) is None or landed.positions:
                        decoded(self._done())
                        if landed is None:
                            self._context.members.look()
                        for at in landed.positions if landed is not None else ():
                            yield self._landed(asked[at])
                    job.wait()
            except GeneratorExit:
                raise
            except BaseException as error:
                self._fail(error)
            if isinstance(self._error, OverwireError) and self._job is not None and (lost := (self._job.report() or {}).get("lost")):
                raise IOFailure(f"overwire: group: rank {self._context.members.local[lost[0]]} is gone: {self._error}") from self._error
            agree(self._error, self._ours)
            assert self._job is not None
            self._job.done()
        except BaseException:
            self.abandon()
            raise

    def _landed(self, slot: int) -> tuple[Task, Any]:
        task, tensor = self._tasks[slot], self._tensors[slot]
        self._tensors[slot] = None  # it is the caller's
        return task, self._context.cut(task, tensor)

    def _try(self, step: Callable[[int], None], piece: int) -> None:
        # After a failure only the exchange continues. What fails in that is out of step.
        if self._error is not None and step != self._exchange:
            return
        began = time.perf_counter()
        try:
            step(piece)
        except BaseException as error:
            if step == self._exchange:
                raise
            self._fail(error)
        name = step.__name__.strip("_<>")
        self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - began

    def _arrive(self, piece: int) -> None:
        assert self._job is not None
        while not relay_wait(self._job.number, piece, _SLICE_MS):
            self._context.members.look()

    def _exchange(self, piece: int) -> None:
        buffer = self._context.ring(self._buffers, self._spec["size"])[piece % self._buffers]
        self._context.members.gather(buffer, self._shares[piece])

    def _decode(self, piece: int) -> None:
        assert self._job is not None
        relay_decode(self._job.number, piece, self._spec["stream"])

    def _done(self) -> int:
        return self._job.progress().bytes if self._job is not None else 0

    def _end(self, _: int) -> None:
        assert self._job is not None
        while not self._job.ended(_TICK):
            self._context.members.look()
        self._job.done()

    def abandon(self) -> None:
        """Ends running work; nothing writes to its memory after that."""
        job, self._job = self._job, None
        if job is not None:
            job.abandon()
        self._tensors = []

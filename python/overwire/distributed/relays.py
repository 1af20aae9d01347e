"""What brings the stored bytes that each rank reads to the other ranks, and decodes them there.

Each rank reads a share of the stored bytes, over the link of its own GPU, and gets the other
shares from the other ranks; then every rank decodes what it needs (plain tensors: copies it).
A load goes in pieces, each in one of a few buffers; beside the tensors it needs only the ring
of these buffers. The engine reads, lays out and decodes (`gosrc/relay`).

    Mapped       between ranks of a host that map each other's memory. The engine brings the
                 pieces, too; this module only brings the ranks together.
    Collective   between all ranks of the group, by collectives of torch.distributed. On GPUs
                 the thread here only queues, as far ahead as there are buffers.

Failure: what fails on a rank is raised on all when they next agree. A rank that has failed
still takes part in collectives until then, whatever its buffers contain; so no rank waits for
it, and no rank uses its bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from .._verbs import relay, relay_aim, relay_decode, relay_join, relay_offer, relay_shares, relay_wait
from ..errors import IOFailure, NotSupportedError, OverwireError
from ..jobs import Job
from .group import Members, Unmapped

if TYPE_CHECKING:
    from .._engine import JobNumber
    from .._requests import RelayRequest

__all__ = ["BUFFERS", "FEW", "SHARE", "Collective", "Mapped", "begin", "fits", "packed", "request_of", "share_of"]

#: Bytes of each buffer of the ring for each rank that exchanges. It has BUFFERS of them where
#: ranks map each other's memory, FEW by collectives. A chunk fits, and what lies between it and
#: the next.
SHARE = 32 << 20
BUFFERS = 4
FEW = 2

# A buffer is below 2 GiB, however many ranks exchange, and what is decoded together below 4 GiB;
# shares are multiples of _ALIGN.
_MOST, _ALL = (2 << 30) - 1, (4 << 30) - 1
_ALIGN = 256

# Pieces after which the ranks agree that all is well.
_AGREE = 32

# Seconds between two reports of progress, and looks at what the other ranks say.
_TICK = 0.1

# Waits for the engine are in slices of this many milliseconds, for Ctrl-C.
_SLICE_MS = 50

Agree = Callable[[BaseException | None, bool], Any]


def share_of(ranks: int, share: int, together: int = 1) -> int:
    """The bytes of a buffer that each of the ranks has: `share`, or less where the buffer would be
    too large, or where as many as are decoded `together` would be."""
    return min(share, min(_MOST, _ALL // together) // ranks // _ALIGN * _ALIGN)


def fits(ranks: int, room: int) -> bool:
    """Whether every chunk of a model fits where that number of ranks exchange. room: see `Model.room`."""
    return room <= share_of(ranks, SHARE)


def request_of(device: str, ranks: Sequence[int], rank: int, share: int, buffers: int = 0) -> RelayRequest:
    """What a request says of this rank and its ring. ranks: that exchange; buffers: of the ring,
    where the engines do. All runs on torch's current stream, after what is queued there now."""
    stream = 0
    if device != "cpu":
        from ..frameworks.torch import stream_of

        stream = stream_of(device)
    size = share_of(len(ranks), share, max(1, buffers)) * len(ranks)
    request: RelayRequest = {"size": size, "ranks": len(ranks), "rank": ranks.index(rank), "device": device, "stream": stream}
    if buffers:
        request["exchange"], request["buffers"] = True, buffers
    return request


class _Relay:
    """A relay of the engine that has begun to read. The constructor is local: what fails in it
    is said when the ranks next meet."""

    def __init__(self, members: Members, begin: Callable[[], JobNumber]) -> None:
        self.members = members
        self._job: Job | None = None
        self._error: BaseException | None = None
        self._ours = True
        try:
            self._job = Job(begin(), "relay")
        except BaseException as error:
            self.fail(error)

    @property
    def job(self) -> Job:
        """The running job."""
        assert self._job is not None
        return self._job

    def aim(self, requests: bytes) -> None:
        """Local: says what this rank wants, as requests of a load."""
        relay_aim(self.job.number, requests)

    def attempt(self, step: Callable[[], Any]) -> None:
        """Local: does a step unless one has failed; `fail`s if it does."""
        if self._error is None:
            try:
                step()
            except BaseException as error:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Local: ends the job; the ranks hear of the error when they next meet."""
        if self._error is not None:
            return
        self._error = error
        if self._job is not None:
            self._job.cancel()  # nothing writes to the ring any more
            self._ours = bool((self._job.report() or {}).get("ours", True))

    def decoded(self) -> int:
        """Bytes of tensors."""
        return self._job.progress().bytes if self._job is not None else 0

    def abandon(self) -> None:
        """Ends running work; nothing writes to its memory after that."""
        job, self._job = self._job, None
        if job is not None:
            job.abandon()


class Mapped(_Relay):
    """The ranks of each host, whose engines exchange: `join`, then `arrive`. begin: starts a relay
    with `exchange`. report: the engine's, once all has arrived."""

    report: dict[str, Any]

    def join(self) -> None:
        """Collective: brings the engines together. Raises what has failed on a rank; where some
        cannot map each other's memory, `arrive` says so."""

        def offer() -> Any:
            if self._error is not None:
                raise self._error
            return relay_offer(self.job.number)

        try:
            offers = self.members.exchange(offer)
        except BaseException:
            self.abandon()
            raise
        try:
            relay_join([offers[rank] for rank in self.members.local], self.job.number)
        except NotSupportedError as refusal:  # its memory stays, until the others have tried, too
            self._error = Unmapped(str(refusal))
        except BaseException as error:
            self.fail(error)

    def arrive(self, agree: Agree, progress: Callable[[int], None] = lambda _: None) -> Generator[int, None, None]:
        """Collective: the numbers of this rank's requests, as they land; after the last the ranks
        agree. Where a rank is gone, the others of its host raise that by themselves: no
        collective would end.

        progress: gets the bytes of tensors decoded so far, now and then.

        Raises Unmapped on all ranks where some cannot map each other's memory. A caller that closes
        this early has to agree by itself.
        """
        members = self.members
        try:
            try:
                if self._error is None:
                    while (landed := self.job.next(_TICK)) is None or landed.positions:
                        progress(self.decoded())
                        if landed is None:
                            members.look()
                        yield from landed.positions if landed is not None else ()
                    self.job.wait()
            except GeneratorExit:
                raise
            except BaseException as error:
                self.fail(error)
            if isinstance(self._error, OverwireError) and self._job is not None and (lost := (self._job.report() or {}).get("lost")):
                raise IOFailure(f"overwire: group: rank {members.local[lost[0]]} is gone: {self._error}") from self._error
            agree(self._error, self._ours)
            self.report = self.job.report()
            self.job.done()
            self._job = None
        except BaseException:
            self.abandon()
            raise


class Collective(_Relay):
    """All ranks of the group, which gather piece after piece. begin: starts a relay over the
    ring, whose buffers the caller keeps as long. stream: of this rank's device."""

    def __init__(self, members: Members, begin: Callable[[], JobNumber], ring: list[Any], stream: int) -> None:
        self._ring, self._stream = ring, stream
        super().__init__(members, begin)

    def run(self, agree: Agree, progress: Callable[[int], None]) -> None:
        """Collective: loads this rank's requests. Arguments are as of `Mapped.arrive`."""
        shares: list[int] = []
        try:
            self.attempt(lambda: shares.extend(relay_shares(self.job.number)))
            agree(self._error, True)  # from here on all ranks have the same pieces
            for piece, share in enumerate(shares):
                self.attempt(lambda piece=piece: self._await(piece))  # type: ignore[misc]
                self.members.gather(self._ring[piece % len(self._ring)], share)  # what fails here is out of step
                self.attempt(lambda piece=piece: relay_decode(self.job.number, piece, self._stream))  # type: ignore[misc]
                if piece % _AGREE == _AGREE - 1:
                    self.attempt(lambda: progress(self.decoded()))
                    agree(self._error, self._ours)
            self.attempt(self._end)
            agree(self._error, self._ours)
            self.job.done()
            self._job = None
        except BaseException:
            self.abandon()
            raise

    def _await(self, piece: int) -> None:
        while not relay_wait(self.job.number, piece, _SLICE_MS):
            self.members.look()

    def _end(self) -> None:
        while not self.job.ended(_TICK):
            self.members.look()


def packed(requests: Sequence[tuple[int, ...]]) -> bytes:
    """Requests as the engine takes them: position, address, and the ranges of dims 0 and 1."""
    return array("q", [number for request in requests for number in request]).tobytes()


def begin(request: RelayRequest, handle: int, needs: bytes = b"") -> JobNumber:
    """Local: starts a relay of the engine, and returns its job."""
    return relay(request, handle, needs)

"""Runs one load of a group. Each rank reads a share of the stored bytes, and the ranks exchange their shares.

A rank reads its share over the PCIe link of its own GPU, and gets the other shares from the other ranks. Then every
rank decodes the tensors that it needs (plain tensors are copied). A load proceeds in pieces. Each piece is in one of a
few buffers. A load needs no memory other than the buffers and the tensors. The engine reads, assembles and decodes
(`gosrc/relay`). There are two transports, and all ranks choose by the same rule (`choose_carrier`):

    mapped       between ranks of a host that map each other's memory. The engine copies.
    collective   between all ranks of the group, by torch.distributed. On GPUs this thread
                 only queues operations, as far ahead as there are buffers.

An error on one rank is raised on all ranks at the next agreement. Until then the failed rank still takes part in
collectives with undefined bytes. The other ranks thus do not wait for it, and no rank uses these bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from .._undo import after_error, keep_error
from .._verbs import relay, relay_aim, relay_decode, relay_join, relay_offer, relay_shares, relay_wait
from ..errors import IOFailure, OverwireError
from ..jobs import Job
from .group import Members, Unmapped

if TYPE_CHECKING:
    from .._requests import RelayRequest
    from ..model.opened import Model

log = logging.getLogger("overwire")

#: SHARE is the most bytes of a piece that one rank reads. This is enough for a chunk and the gap before the next chunk.
#: If ranks map each other's memory, a rank has `count_own_buffers` buffers that the others map, and on a GPU also
#: STAGES buffers for each other rank. For collectives, each of COLLECTIVE_BUFFERS has room for the shares of all ranks.
SHARE = 32 << 20
STAGES = 3
COLLECTIVE_BUFFERS = 2

# The smallest share if ranks map each other's memory. A share is decoded only when all of it has been read.
_FINE = 16 << 20

# The limits for a buffer and for all buffers that are decoded together, for any number of ranks. Shares are multiples
# of _ALIGN.
_LARGEST, _TOGETHER = (2 << 30) - 1, (4 << 30) - 1
_ALIGN = 256

#: The size of a packed request.
REQUEST = 48

# After this many pieces, the ranks check whether one of them has failed.
_AGREE = 32

# The seconds between two progress reports, and between two polls for failures of the other ranks.
_TICK = 0.1

# The longest wait for the engine in one call, in milliseconds, so that Ctrl-C is handled.
_SLICE_MS = 50

Agree = Callable[[BaseException | None, bool], Any]


class Wants(NamedTuple):
    """The tensors of a load. tensors: their positions, equal on all ranks that take part. needs: the blocks that each
    rank of this host needs, as requests with the rank's number on the host instead of an address, or empty if every
    rank needs all tensors."""

    tensors: Sequence[int]
    needs: bytes = b""


def share_of_rank(ranks: int, share: int, buffers: int = 1) -> int:
    """Returns the size of each rank's share of a buffer: `share`, or less if a buffer, or all `buffers` buffers
    together, would be too large. They are decoded together."""
    return min(share, _LARGEST // ranks, _TOGETHER // buffers // ranks) // _ALIGN * _ALIGN


def mapped_share(ranks: int, room: int) -> int:
    """Returns the size of each rank's share if ranks map each other's memory: room for eight chunks, within limits.
    room: see `Model.room`."""
    return share_of_rank(ranks, min(SHARE, max(_FINE, 8 * room)), STAGES)


def count_own_buffers(ranks: int) -> int:
    """Returns the number of a rank's own buffers if ranks map each other's memory. A rank fills these buffers while it
    waits to map the memory of the other ranks. Until then no buffer is released."""
    return min(7 + ranks, 16)


def do_chunks_fit(ranks: int, room: int, mapped: bool) -> bool:
    """Returns whether every chunk of a model fits into a share of this many ranks. mapped: whether the transport is
    mapped memory instead of collectives. room: see `Model.room`."""
    return room <= (mapped_share(ranks, room) if mapped else share_of_rank(ranks, SHARE))


class Situation(NamedTuple):
    """Facts for the choice of the transport.

    local: the number of ranks on the host with the most ranks. gpu: whether tensors are loaded to GPUs. remote: whether
    the files are in a store or on a network file system. sends: whether the group has a backend for the tensors, and
    every chunk fits into a share. unreachable: whether ranks of a host cannot map each other's memory, or a chunk does
    not fit into a mapped share.
    """

    ranks: int
    hosts: int
    local: int
    gpu: bool
    remote: bool
    sends: bool
    unreachable: bool


def choose_carrier(setting: str, now: Situation) -> str:
    """Returns the transport: "mapped", "collective" or "none". setting: the value of OVERWIRE_EXCHANGE."""
    collective = "collective" if now.sends else "none"
    if setting == "none" or now.ranks == 1:
        return "none"
    if setting == "auto" and not now.gpu and not now.remote:
        return "none"  # the ranks of a host share the page cache, from which plain tensors are mapped
    if setting == "collective" or now.unreachable:
        return collective
    if setting == "auto" and now.sends and now.remote and now.hosts > 1:
        return "collective"  # with mapped memory each host would read all bytes
    return "mapped" if now.local > 1 else "none"


class GroupLoad:
    """The load of open models on one rank. The tensors of the models are numbered consecutively. Call `choose_carrier`
    after the first agreement of the ranks, then `land_requests`, which is collective.

    carrier: the transport: "mapped", "collective", or "none" if each rank reads by itself. link: the device from which
    tensors are sent. report: the engine's report about the last `land_requests`.
    """

    def __init__(self, members: Members, models: Sequence[Model], ring: tuple[int, int] = (0, 0)) -> None:
        """ring: the bytes of a rank's share of a buffer, and the number of buffers, for ranks that map each other's
        memory. (0, 0) means the results of `mapped_share` and `count_own_buffers`."""
        self._members, self._models, self._ring = members, models, ring
        self._device = models[0].device
        self._buffers: list[Any] = []  # buffers of collectives
        self._room = 0
        self.link = members.sending_device(self._device)
        self.carrier = "none"
        self.report: dict[str, Any] = {}

    def describe_files(self) -> dict[str, Any]:
        """Returns the facts that all ranks need to choose a transport. Not collective."""
        remote = any(source["remote"] for model in self._models for source in model.info())
        return {"remote": remote, "room": max(model.room() for model in self._models)}

    def choose_carrier(self, setting: str, reports: Sequence[dict[str, Any]]) -> None:
        """Sets the transport. Not collective, but has the same result on all ranks. setting: the value of
        OVERWIRE_EXCHANGE. reports: the results of `describe_files` on all ranks."""
        members, remote = self._members, any(one["remote"] for one in reports)
        self._room = max(one["room"] for one in reports)
        sends = bool(self.link) and do_chunks_fit(members.size, self._room, mapped=False)
        maps = not members.unreachable and do_chunks_fit(members.most_local, self._room, mapped=True)
        place = members.size, members.hosts, members.most_local
        self.carrier = choose_carrier(setting, Situation(*place, self._device != "cpu", remote, sends, not maps))

    def fall_back(self, reason: str, setting: str) -> None:
        """Switches to another transport, because ranks cannot map each other's memory. All ranks call this, at most
        once per group."""
        self._members.unreachable = reason.removeprefix("overwire: ")
        self.carrier = "collective" if self.link and setting != "none" else "none"
        text = "overwire: ranks exchange bytes through torch.distributed, because they cannot map each other's memory"
        log.warning("%s: %s", text, self._members.unreachable)

    def land_requests(
        self,
        wants: Wants,
        make_requests: Callable[[], bytes],
        agree: Agree,
        tell: Callable[[int], None] = lambda _: None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Generator[int, None, None]:
        """Yields the numbers of this rank's requests as they land. Collective. The ranks agree after the last request.
        A caller that closes this generator early must then call `agree` itself.

        make_requests: returns this rank's requests. make_requests and `meanwhile` run while the first bytes are read,
        and their exceptions are raised on all ranks. agree: the agreement of the ranks. tell: a function that is called
        regularly with the number of tensor bytes decoded so far.

        Raises Unmapped on all ranks if some ranks cannot map each other's memory.
        """
        mapped, engine = self.carrier == "mapped", _Relay(self._members, self._buffers)
        with after_error(engine.abandon_job):
            engine.try_step(lambda: (self._begin_mapped if mapped else self._begin_collective)(engine, wants))
            if mapped:
                engine.join_engines()
            engine.try_step(lambda: engine.set_requests(make_requests()))
            engine.try_step(meanwhile)
            yield from engine.follow_mapped(agree, tell) if mapped else engine.gather_pieces(agree, tell)
            self.report = engine.end_job()
        if mapped and not self._members.reached:
            self._members.reached = True
            log.info("the ranks of each host can map each other's memory")

    def _begin_mapped(self, engine: _Relay, wants: Wants) -> None:
        local = len(self._members.local)
        share, buffers = self._ring if self._ring[1] else (mapped_share(local, self._room), count_own_buffers(local))
        request = self._relay_request(wants, self._members.local, self._device, share)
        request["exchange"], request["buffers"], request["stages"] = True, buffers, min(buffers, STAGES)
        engine.start_job(request, self._models, wants.needs)

    def _begin_collective(self, engine: _Relay, wants: Wants) -> None:
        members = self._members
        request = self._relay_request(wants, range(members.size), self.link, SHARE)
        request["here"] = len(members.local)
        if not self._buffers:
            import torch

            for _ in range(COLLECTIVE_BUFFERS):
                self._buffers.append(torch.empty(request["size"], dtype=torch.uint8, device=self.link))
        request["ring"] = [buffer.data_ptr() for buffer in self._buffers]
        engine.start_job(request, self._models)

    def _relay_request(self, wants: Wants, ranks: Sequence[int], device: str, share: int) -> RelayRequest:
        # Returns a request for these ranks. The load runs on torch's current stream, after the work that is queued
        # there.
        stream = 0
        if device != "cpu":
            from ..frameworks.torch import stream_of, used_on

            used_on(device)
            stream = stream_of(device)
        size = share_of_rank(len(ranks), share) * len(ranks)
        own: RelayRequest = {"rank": ranks.index(self._members.rank), "device": device, "stream": stream}
        return {"tensors": list(wants.tensors), "size": size, "ranks": len(ranks), **own}


class _Relay:
    """The engine's part of a load. Its errors are raised at the next agreement of the ranks. ring: the buffers for
    collectives."""

    def __init__(self, members: Members, ring: list[Any]) -> None:
        self._members, self._ring = members, ring
        self._job: Job | None = None
        self._error: BaseException | None = None
        self._ours = True
        self._stream = self._count = 0  # _count: the number of requests

    def start_job(self, request: RelayRequest, models: Sequence[Model], needs: bytes = b"") -> None:
        views = [model.on(request["device"]) for model in models]
        for view in views:
            view.alone()  # preloaded tensors are not shared with other ranks
        request["more"] = [view.handle for view in views[1:]]
        self._stream = request["stream"]
        self._job = Job(relay(request, views[0].handle, needs), "relay")

    def set_requests(self, requests: bytes) -> None:
        """Sets this rank's requests. Not collective."""
        self._count = len(requests) // REQUEST
        relay_aim(self.job.number, requests)

    @property
    def job(self) -> Job:
        """The running job."""
        assert self._job is not None
        return self._job

    def try_step(self, step: Callable[[], Any]) -> None:
        """Runs a step, unless an earlier step has failed. Not collective. An error ends the job, and is raised on all
        ranks at the next agreement."""
        if self._error is None:
            with self._ending_job():
                step()

    @contextmanager
    def _ending_job(self) -> Iterator[None]:
        with keep_error() as failure:
            yield
        if failure.error is not None:
            self._error = self._error or failure.error
            if self._job is not None:
                self._job.cancel()  # nothing writes to the ring after this call
                self._ours = bool(self._read_report().get("ours", True))

    def _read_report(self) -> dict[str, Any]:
        # Returns the engine's report, or {} while the job runs.
        return (self._job.report() if self._job is not None else None) or {}

    def end_job(self) -> dict[str, Any]:
        """Ends a job that has succeeded on all ranks, and returns its report. Not collective."""
        report: dict[str, Any] = self.job.report()
        self.job.done()
        self._job = None
        return report

    def abandon_job(self) -> None:
        """Ends a running job. Nothing writes to its memory after this call. Not collective."""
        job, self._job = self._job, None
        if job is not None:
            job.abandon()

    def follow_mapped(self, agree: Agree, tell: Callable[[int], None]) -> Generator[int, None, None]:
        """Yields requests while the engines of a host exchange bytes by themselves. If a rank disappears, the other
        ranks of its host raise an error without a collective, because it would never end."""
        members = self._members
        with self._ending_job():
            if self._error is None:
                while (landed := self.job.next(_TICK)) is None or landed.positions:
                    tell(self.job.progress().bytes)
                    if landed is None:
                        members.look_for_failure()
                    yield from landed.positions if landed is not None else ()
                self.job.wait()
        report = self._read_report()
        if report.get("unmapped"):
            self._error = Unmapped(str(self._error))
        if isinstance(self._error, OverwireError) and (lost := report.get("lost")):
            raise IOFailure(f"overwire: group: rank {members.local[lost[0]]} is gone: {self._error}") from self._error
        agree(self._error, self._ours)

    def join_engines(self) -> None:
        """Lets the engines map each other's memory, while this rank creates its requests. Raises the error of a rank
        that has failed. Collective."""

        def offer() -> Any:
            if self._error is not None:
                raise self._error
            return relay_offer(self.job.number)

        offers = self._members.gather_results(offer)
        with self._ending_job():
            relay_join([offers[rank] for rank in self._members.local], self.job.number)

    def gather_pieces(self, agree: Agree, tell: Callable[[int], None]) -> Generator[int, None, None]:
        """Gathers one piece at a time, on all ranks together. All requests land at the end."""
        members, shares = self._members, list[int]()
        self.try_step(lambda: shares.extend(relay_shares(self.job.number)))
        agree(self._error, True)  # afterwards all ranks have the same pieces
        for piece, share in enumerate(shares):
            self.try_step(lambda piece=piece: self._await_share(piece))  # type: ignore[misc]
            members.gather_shares(self._ring[piece % len(self._ring)], share)  # an error here puts ranks out of step
            self.try_step(lambda piece=piece: relay_decode(self.job.number, piece, self._stream))  # type: ignore[misc]
            if piece % _AGREE == _AGREE - 1:
                self.try_step(lambda: tell(self.job.progress().bytes))
                agree(self._error, self._ours)
        self.try_step(self._await_end)
        agree(self._error, self._ours)
        yield from range(self._count)

    def _await_share(self, piece: int) -> None:
        while not relay_wait(self.job.number, piece, _SLICE_MS):
            self._members.look_for_failure()

    def _await_end(self) -> None:
        while not self.job.ended(_TICK):
            self._members.look_for_failure()

"""A process group that loads together: agreeing, failing together, measuring.

Nothing here reads a file. Every method that says *collective* must be called
by all ranks of the group, in the same order; none is called unless the user
gave a group.
"""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from .._verbs import knobs
from ..errors import ArgumentError, CancelledError, IOFailure, MissingPackageError, OverwireError

__all__ = ["Rates", "Members", "agree", "members_of", "rates"]

_T = TypeVar("_T")

# How often each way is tried before the fastest is kept. The first try also
# pays for connections and pinned memory, so one would not do.
_TRIES = 2

#: A batch of fewer bytes says more of latency than of rates.
TELLING = 4 << 20


class Rates:
    """Seconds a byte of each way to load, by kind of tensor: measured, not known.

    The rule: while some way of a kind has been tried less than twice, that one
    is tried; from then on the one with the fewest seconds a byte is taken. A
    try is a real batch of the load; its time is the slowest rank's, so that
    all ranks choose alike. Rates live as long as the group.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, ...], dict[str, list[float]]] = {}

    def choose(self, kind: tuple[Any, ...], ways: tuple[str, ...]) -> tuple[str, bool]:
        """The way for the next batch, and whether it is a try."""
        seen = self._seen.get(kind, {})
        for attempt in range(_TRIES):
            for way in ways:
                if len(seen.get(way, ())) <= attempt:
                    return way, True
        return min(ways, key=lambda way: min(seen[way])), False

    def note(self, kind: tuple[Any, ...], way: str, nbytes: int, seconds: float) -> None:
        """Remembers a try."""
        if nbytes >= TELLING:
            tries = self._seen.setdefault(kind, {}).setdefault(way, [])
            tries.append(seconds / nbytes)
            del tries[:-_TRIES]

    def table(self) -> dict[str, dict[str, float]]:
        """Bytes a second, as texts: kind to way to rate."""
        return {
            " ".join(str(part) for part in kind): {way: 1 / max(min(tries), 1e-15) for way, tries in ways.items()}
            for kind, ways in self._seen.items()
        }


class Members:
    """A process group as a load needs it.

    rank, size: in the group. local: the ranks of it that exchange, in order: those on
    this host. most_local: how many the fullest host has. hosts: how many hosts there are.
    here: how many ranks this one has.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.local: list[int] = []
        self.most_local = 0
        self.hosts = 0
        self.here = 0
        self.rates = Rates()
        self._warm: set[str] = set()
        self.unreachable = ""  # why the ranks of a host cannot map each other's memory
        self.reached = False  # they have done so
        self.said: set[tuple[Any, ...]] = set()  # kinds whose way the log has

    def _config(self) -> str:
        return str(self._dist.get_backend_config(self.group))

    def link_device(self, device: str) -> str:
        """Where tensors must be to be sent: `device`, or "cpu" when the group
        has no backend for it."""
        if device == "cpu":
            # NCCL alone sends no host memory.
            return "cpu" if "cpu:" in self._config() and "cpu:nccl" not in self._config() else ""
        return device if "cuda:nccl" in self._config() else "cpu"

    def _flags_device(self) -> str:
        import torch

        return self.link_device("cpu") or f"cuda:{torch.cuda.current_device()}"

    def exchange(self, work: Callable[[], _T], alike: bool = False) -> list[_T]:
        """Collective: does `work` here and returns what it gave on each rank.

        If it raised on any rank, all raise: that rank its own error, the others
        one of the same class that names the rank. alike: all ranks of a host are
        expected to give the same, which their digests then show in a quarter of the time;
        its repr says all of it.
        """
        result: Any = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        if alike and self.hosts == 1:
            digest = hashlib.sha256(repr(result).encode()).digest()
            words = [int.from_bytes(digest[at : at + 7], "little") for at in range(0, 28, 7)]  # 56 bits: it has no sign
            mine = [*words, *(-word for word in words)]  # the most of these: the greatest and the least of each word
            failed, *most = self._most([int(error is not None), *mine], "int64")
            if not failed and most == mine:
                return [result] * self.size
        found: list[Any] = [None] * self.size
        with _reaching():
            self._dist.all_gather_object(found, (_portable(error), result), group=self.group)
        self._raise_first([fault for fault, _ in found], error)
        return [result for _, result in found]

    def agree(self, error: BaseException | None, seconds: float = 0.0, ours: bool = True) -> float:
        """Collective: raises on all ranks if there is an error on one; else
        returns the most seconds of any rank. ours: an error that may come of
        another rank's (False) is not raised where there is one that does not."""
        failed, most = self._most([0.0 if error is None else 1.0, seconds], "float64")
        if failed:
            faults: list[Any] = [None] * self.size
            with _reaching():
                self._dist.all_gather_object(faults, (_portable(error), ours), group=self.group)
            sure = any(fault is not None and known for fault, known in faults)
            self._raise_first([fault if known or not sure else None for fault, known in faults], error if ours or not sure else None)
        return float(most)

    def _most(self, mine: list[Any], dtype: str) -> list[Any]:
        # Collective: the most of any rank, of each number.
        import torch

        flags = torch.tensor(mine, dtype=getattr(torch, dtype), device=self._flags_device())
        with _reaching():
            self._dist.all_reduce(flags, self._dist.ReduceOp.MAX, group=self.group)
            found: list[Any] = flags.tolist()
        return found

    def _raise_first(self, faults: list[bytes | None], mine: BaseException | None) -> None:
        if mine is not None:
            raise mine
        for rank, fault in enumerate(faults):
            if fault is not None:
                raise _from_rank(rank, pickle.loads(fault))

    def settle(self, hosts: list[str]) -> None:
        """Collective: who is on which host, once a members."""
        if self.local:
            return
        self.local = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self.most_local = max(hosts.count(host) for host in set(hosts))
        self.hosts, self.here = len(set(hosts)), len(self.local)

    def everyone(self) -> Members:
        """Once settled: the same, but all ranks of the group exchange, on whatever host."""
        every = copy.copy(self)
        every.local, every.most_local, every.hosts = list(range(self.size)), self.size, 1
        return every

    def warm_up(self, link_device: str) -> None:
        """Collective: connects the ranks of each host, so that no try pays for it."""
        if link_device not in self._warm:
            import torch

            here = torch.zeros(2, dtype=torch.uint8, device=link_device)
            peers = [rank for rank in self.local if rank != self.rank]
            self.send_receive([(peer, here[:1]) for peer in peers], [(peer, here[1:]) for peer in peers])
            self.gather(torch.zeros(len(self.local), dtype=torch.uint8, device=link_device), 1)
            self._warm.add(link_device)

    def gather(self, buffer: Any, share: int) -> None:
        """Collective among the ranks that exchange: the r-th of them has bytes
        [r * share, (r + 1) * share) of the buffer, and gets the others'."""
        me = self.local.index(self.rank)
        whole, mine = buffer[: share * len(self.local)], buffer[share * me : share * (me + 1)]
        if len(self.local) == self.size > 1:
            with _reaching():
                self._dist.all_gather_into_tensor(whole, mine, group=self.group)
            return
        parts = whole.split(share)
        peers = [(rank, part) for rank, part in zip(self.local, parts, strict=True) if rank != self.rank]
        self.send_receive([(rank, mine) for rank, _ in peers], peers)

    def send_receive(self, outgoing: list[tuple[int, Any]], incoming: list[tuple[int, Any]]) -> None:
        """Collective among those named: sends and receives (rank, contiguous
        tensor), in the order in which each pair of ranks lists them.

        Point to point, and not by a group of the host's ranks: making one would
        take every rank of the world, which may have no part in this.
        """
        dist = self._dist
        operations = [dist.P2POp(dist.isend, tensor, self.global_rank(rank), self.group) for rank, tensor in outgoing if tensor.numel()]
        operations += [dist.P2POp(dist.irecv, tensor, self.global_rank(rank), self.group) for rank, tensor in incoming if tensor.numel()]
        if operations:
            with _reaching():
                for handle in dist.batch_isend_irecv(operations):
                    handle.wait()

    def global_rank(self, rank: int) -> int:
        """The rank in the world, which torch's collectives ask for."""
        return int(self._dist.get_global_rank(self.group, rank))


@contextmanager
def _reaching() -> Iterator[None]:
    # A rank that has died, or a time-out of the group's.
    try:
        yield
    except OverwireError:
        raise
    except RuntimeError as error:  # all of torch.distributed's
        reason = str(error).strip().partition("\n")[0]
        raise IOFailure(f"overwire: group: the other ranks cannot be reached: {reason}") from error


def _portable(error: BaseException | None) -> bytes | None:
    if error is None:
        return None
    if not isinstance(error, OverwireError):
        kind = CancelledError if isinstance(error, KeyboardInterrupt) else OverwireError
        error = kind(f"{type(error).__name__}: {error}")
    return pickle.dumps(error)


def _from_rank(rank: int, error: OverwireError) -> OverwireError:
    error.args = (f"overwire: on rank {rank}: {str(error).removeprefix('overwire: ')}",)
    return error


def host_name() -> str:
    """What tells this host, and this boot of it, from others."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return socket.gethostname() + " " + file.read().strip()


def place_of(uri: str) -> str:
    """What rates depend on: one file system, or one kind of store."""
    if "://" in uri:
        return uri.partition("://")[0]
    try:
        return f"dev{os.stat(uri).st_dev}"
    except OSError:
        return "file"


def exchange_setting() -> str:
    """What OVERWIRE_EXCHANGE says."""
    return next(str(row["value"]) for row in knobs() if row["name"] == "OVERWIRE_EXCHANGE")


_members: weakref.WeakKeyDictionary[Any, Members] = weakref.WeakKeyDictionary()


def members_of(group: Any) -> Members:
    """The members of a `torch.distributed` process group this process is in.

    Raises ArgumentError for anything else.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None:
        raise ArgumentError(f"overwire: group: expected a torch.distributed process group, got {type(group).__name__}")
    if not dist.is_available():
        raise MissingPackageError("overwire: group: this torch was built without torch.distributed")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("overwire: group: this process is not in it; call this on its ranks alone")
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(f"overwire: group: expected a torch.distributed process group, got {type(group).__name__}")
    members = _members.get(group)
    if members is None:
        members = _members[group] = Members(group)
    return members


def rates(group: Any) -> dict[str, dict[str, float]]:
    """What loads over this group have measured: kind of tensor to way to bytes
    a second of tensors, all ranks together counted once. No collective."""
    return members_of(group).rates.table()


def agree(group: Any, error: BaseException | None) -> None:
    """Collective: raises on every rank of the group if one brings an error: that
    rank its own, the others one of the same class that names the rank."""
    members_of(group).agree(error)

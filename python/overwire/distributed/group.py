"""Implements the communication of a process group that loads together: agreement, errors, and data.

This module reads no files. No other module uses collectives. All ranks of the group must call the methods that are
marked as collective, in the same order. Nothing in this module is called unless the user passes a group.

A public function with a group runs inside `group_verb`, including the check of its arguments. If one rank fails, the
other ranks raise the error at the next agreement (`gather_results`, `agree`). A rank that is reading polls for failures
of other ranks (`look_for_failure`). If a rank is interrupted while it waits, the other ranks are informed in the same
way. An exception that leaves the function between two agreements puts the ranks out of step. The other ranks get the
exception through the group's store, which waiting ranks poll. Afterwards the group cannot be used for loads.

This module keeps no reference to a group.
"""

from __future__ import annotations

import ctypes
import math
import pickle
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, TypeVar

from .. import errors
from .._engine import forked
from .._imports import is_of_parent
from .._undo import keep_error
from .._verbs import knobs
from ..errors import (
    ArgumentError,
    CancelledError,
    ForkedError,
    IOFailure,
    MissingPackageError,
    NotSupportedError,
    OverwireError,
)
from ..frameworks.choose import device_number

_T = TypeVar("_T")

# The most bytes that one rank, and all ranks together, contribute to the first collective of `_gather_objects`. Larger
# objects need a second collective.
_BLOCK, _BLOCKS = 64 << 10, 4 << 20

# The seconds between two polls for failures of other ranks, on a rank that waits or reads.
_LOOK = 0.25

# The seconds that an interrupted rank waits for the next agreement.
_GRACE = 0.5

# The seconds by which the clocks of hosts may differ.
_SKEW = 2.0

# The seconds within which ranks must answer when another rank asks which ranks are alive. In this time they poll four
# times.
_ANSWER = 1.0

# The exceptions that torch raises if a group's store cannot be reached.
_UNREACHABLE = (RuntimeError, ValueError, AttributeError, KeyError)

# The seconds that a rank waits for the next agreement after any other error. Ranks that read poll in this time.
_PATIENCE = 4.0

# For this many seconds, a rank that waits for a GPU polls without sleeping.
_SPIN = 0.002


class _VerbState:
    """A rank's state inside and between group calls.

    token: the prefix of the keys in the group's store, or "" before the first agreement. born: the wall-clock time when
    this object was created. number: how many collectives have begun. agreed: how often the ranks have agreed. depth:
    the nesting of calls. known: an error that all ranks know. halt: the error that `look_for_failure` raised after
    another rank had failed. interrupt: an interrupt of this rank's waiting that the other ranks do not know yet.
    failure: the error with which this rank enters an agreement. until: the time until which it waits there for the
    other ranks. broken: why the ranks are out of step.
    """

    def __init__(self) -> None:
        self.token = ""
        self.born = time.time()
        self.number = self.agreed = self.depth = 0
        self.known: BaseException | None = None
        self.halt: BaseException | None = None
        self.interrupt: BaseException | None = None
        self.failure: BaseException | None = None
        self.until = 0.0
        self.looked = 0.0
        self.broken = ""


class Members:
    """A process group, with the facts and functions that a load needs.

    rank: this process in the group. size: the number of ranks. local: the ranks of the group on this host, in
    order. most_local: the number of ranks on the host with the most ranks. hosts: the number of hosts.
    unreachable: why the ranks of a host cannot map each other's memory. reached: whether the ranks of a host have
    mapped each other's memory.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = weakref.ref(group)
        self._backends = str(dist.get_backend_config(group))
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.local: list[int] = []
        self.most_local = 0
        self.hosts = 0
        self.unreachable = ""
        self.reached = False
        self._step = _VerbState()

    @property
    def group(self) -> Any:
        """The process group. Raises IOFailure if it was destroyed, and ForkedError in a forked child, because its
        parent owns the connections."""
        if forked():
            raise errors.forked()
        if (group := self._group()) is None:
            raise IOFailure("overwire: group: the process group has been destroyed")
        return group

    @property
    def timeout_seconds(self) -> float:
        """The group's timeout in seconds."""
        import torch

        backend = self.group._get_backend(torch.device(self._flags_device()))
        limit = getattr(getattr(backend, "options", None), "_timeout", self._dist.distributed_c10d.default_pg_timeout)
        return float(limit.total_seconds())

    def sending_device(self, device: str) -> str:
        """Returns the device from which tensors are sent: `device`, or "cpu" if the group has no backend for it.
        Returns "" if host memory cannot be sent."""
        if device == "cpu":
            # NCCL cannot send host memory.
            return "cpu" if "cpu:" in self._backends and "cpu:nccl" not in self._backends else ""
        return device if "cuda:nccl" in self._backends else "cpu"

    def _flags_device(self) -> str:
        import torch

        return self.sending_device("cpu") or f"cuda:{torch.cuda.current_device()}"

    def gather_results(self, work: Callable[[], _T]) -> list[_T]:
        """Runs `work` on each rank and returns the results of all ranks. Collective.

        If `work` raises an error on a rank, this rank raises its own error, and all other ranks raise an error of the
        same class that names the rank.
        """
        step = self._step
        result: Any = None
        with keep_error(step.interrupt) as failure:
            if failure.error is None:
                result = work()
        error = failure.error
        self._limit_wait(error, math.inf)
        self._post_failed(error)
        fault = _pickle_error(error), _severity_of_error(error, error is not step.halt)
        every = self._gather_objects((fault, result, secrets.token_hex(8)))
        step.agreed += 1
        step.token = step.token or every[0][2]
        self._raise_heaviest([fault for fault, _, _ in every], error)
        return [result for _, result, _ in every]

    def agree(self, error: BaseException | None, ours: bool = True) -> None:
        """Raises an error on all ranks if one of them has an error. Collective. ours: False if the error may be a
        consequence of another rank's error. Such an error is raised only if there is no other error."""
        step = self._step
        if step.interrupt is not None:
            error, ours = step.interrupt, True
        ours = ours and (error is None or error is not step.halt)
        self._limit_wait(error, _PATIENCE)
        self._post_failed(error if ours else None)
        has_failed = self._is_true_on_any_rank(error is not None)
        step.agreed += 1
        if has_failed:
            self._raise_heaviest(self._gather_objects((_pickle_error(error), _severity_of_error(error, ours))), error)

    def raise_alike(self, error: BaseException) -> None:
        """Raises an error on this rank that all ranks raise at this point."""
        self._step.known = error
        raise error

    def _raise_heaviest(self, faults: list[tuple[bytes | None, int]], mine: BaseException | None) -> None:
        # Raises the error with the highest weight. faults: the error and weight of each rank. A rank raises its own
        # error if this has the highest weight, otherwise the error of the first rank for which this is true.
        most = max(weight for _, weight in faults)
        if mine is not None and faults[self.rank][1] == most:
            self.raise_alike(mine)
        for rank, (fault, weight) in enumerate(faults):
            if fault is not None and weight == most:
                self.raise_alike(_name_rank(rank, pickle.loads(fault)))

    def look_for_failure(self) -> None:
        """Raises the error with which another rank has left a call, or CancelledError if another rank has failed and
        waits for the next agreement. Not collective. Ranks that wait for something other than the group call this
        method. It polls a few times per second."""
        now = time.monotonic()
        if now - self._step.looked >= _LOOK:
            self._step.looked = now
            self._raise_posted()
            if self._step.token and self._read_store(f"{self._step.token}/failed/{self._step.agreed}") is not None:
                self._step.halt = CancelledError("overwire: group: another rank has failed")
                raise self._step.halt

    def _raise_posted(self) -> None:
        step = self._step
        self._answer_question()
        message = self._read_store(f"{step.token}/left") if step.token else None
        if message is None and step.agreed <= 1:
            message = self._read_store("left")
            if message is not None and pickle.loads(message)[2] < step.born - _SKEW:
                return  # the message belongs to an earlier group of the same name
        if message is not None:
            rank, fault, _ = pickle.loads(message)
            error = _name_rank(rank, pickle.loads(fault))
            self._step.broken = str(error)
            self.raise_alike(error)

    def _answer_question(self) -> str:
        # Answers a rank that asks which ranks are alive. Returns the key of the question, or "" if no rank asks.
        token = self._step.token
        question = self._read_store(f"{token}/who") or b"0"
        if float(question) < self._step.born - _SKEW:
            return ""  # there is no question, or it belongs to an earlier group of the same name
        key = f"{token}/who/{question.decode()}"
        if self._read_store(f"{key}/{self.rank}") is None:
            self._write_store(f"{key}/{self.rank}", b"1")
        return key

    def _find_silent_ranks(self) -> list[int]:
        # Returns the ranks that do not answer after a collective has failed, or [] if the group's store cannot be
        # reached. Not collective.
        if not self._answer_question():
            self._write_store(f"{self._step.token}/who", str(time.time()).encode())
        until = time.monotonic() + _ANSWER
        while True:
            question = self._answer_question()
            silent = [rank for rank in range(self.size) if self._read_store(f"{question}/{rank}") is None]
            if len(silent) <= 1 or self.rank in silent or time.monotonic() > until:
                return [] if self.rank in silent else silent
            time.sleep(_LOOK / 10)

    def _limit_wait(self, error: BaseException | None, seconds: float) -> None:
        # Sets how long this rank waits for the next agreement after an error. After an interrupt the time is short.
        if isinstance(error, (KeyboardInterrupt, SystemExit, TimeoutError)) and not isinstance(error, OverwireError):
            seconds = _GRACE
        self._step.failure, self._step.until = error, time.monotonic() + seconds

    def _post_failed(self, error: BaseException | None) -> None:
        # Reports a failure to `look_for_failure` on the other ranks, so that they stop reading.
        if error is not None and self._step.token:
            self._write_store(f"{self._step.token}/failed/{self._step.agreed}", b"1")

    def _use_store(self, use: Callable[[Any], _T]) -> _T | None:
        # Calls `use` with the group's store. Returns None if the store cannot be reached.
        with suppress(OverwireError, *_UNREACHABLE):
            return use(self._dist.distributed_c10d._get_process_group_store(self.group))
        return None

    def _read_store(self, key: str) -> bytes | None:
        key = f"overwire/{key}"
        return self._use_store(lambda store: store.get(key) if store.check([key]) else None)

    def _write_store(self, key: str, value: bytes) -> None:
        self._use_store(lambda store: store.set(f"overwire/{key}", value))

    def begin_verb(self) -> int:
        """Begins a call, and returns the number of collectives so far for `tell_failure`. Raises IOFailure if the ranks
        are out of step, and ForkedError in a forked child."""
        step = self._step
        if forked():
            raise errors.forked()
        if step.broken:
            why = f"its ranks are out of step after an error: {step.broken}: create a new group"
            raise IOFailure(f"overwire: group: it cannot be used any more, because {why}")
        step.known = step.halt = step.interrupt = None
        step.depth += 1
        return step.number

    def tell_failure(self, error: BaseException, first: int, meets: bool) -> None:
        """Passes an error that ends a call on this rank to the other ranks, unless they already know the error. If the
        ranks have not agreed yet in this call, the first agreement passes the error. Otherwise the ranks are out of
        step. first: the result of `begin_verb`. meets: as for `group_verb`."""
        step = self._step
        if error is step.known:
            return
        if step.number == first and meets and not step.broken:

            def note_failure() -> None:
                raise error

            with suppress(BaseException):
                self.gather_results(note_failure)
            if step.known is error:
                return
        step.broken = step.broken or f"{type(error).__name__} on rank {self.rank}"
        key = f"{step.token}/left" if step.token else "left"
        self._write_store(key, pickle.dumps((self.rank, _pickle_error(error), time.time())))

    def end_verb(self) -> None:
        """Ends a call. Raises an interrupt that came after the last agreement. Forgets errors when the outermost call
        ends, because their frames refer to the group."""
        step = self._step
        interrupt, step.interrupt, step.depth = step.interrupt, None, step.depth - 1
        if step.depth == 0:
            step.known = step.halt = step.failure = None
        if interrupt is not None:
            raise interrupt

    def _is_true_on_any_rank(self, mine: bool) -> bool:
        # Returns whether `mine` is true on any rank. Collective.
        import torch

        flag = torch.tensor([mine], dtype=torch.int32, device=self._flags_device())
        self._run_collective(self._dist.all_reduce, flag, self._dist.ReduceOp.MAX)
        return bool(flag.item())

    def _gather_objects(self, mine: Any) -> list[Any]:
        # Returns the objects of all ranks. Each object is sent as its length and its pickled bytes. Collective.
        payload = pickle.dumps(mine)
        payload = len(payload).to_bytes(8, "little") + payload
        every = self._gather_blocks(payload, max(4 << 10, min(_BLOCK, _BLOCKS // self.size)))
        sizes = [8 + int.from_bytes(block[:8], "little") for block in every]
        if max(sizes) > len(every[0]):
            every = self._gather_blocks(payload, max(sizes))
        return [pickle.loads(block[8:size]) for block, size in zip(every, sizes, strict=True)]

    def _gather_blocks(self, mine: bytes, size: int) -> list[bytes]:
        # Returns `size` bytes of each rank. Collective.
        import torch

        device = self._flags_device()
        own = torch.frombuffer(bytearray(mine[:size].ljust(size, b"\0")), dtype=torch.uint8)
        every = torch.empty(self.size * size, dtype=torch.uint8, device=device)
        self._run_collective(self._dist.all_gather_into_tensor, every, own.to(device))
        every = every.cpu()
        octets = ctypes.string_at(every.data_ptr(), every.numel())
        return [octets[rank * size :][:size] for rank in range(self.size)]

    def _run_collective(self, begin: Callable[..., Any], tensor: Any, *args: Any, waits: bool = True) -> None:
        # Runs a collective that writes a tensor. torch.distributed raises RuntimeError if a rank has died or the
        # group's timeout has passed.
        self._step.number += 1  # counted first: after an interrupt it counts as begun
        try:
            work = begin(tensor, *args, group=self.group, async_op=waits)
            if waits:
                self._wait_for(work, tensor)
        except OverwireError:
            raise
        except RuntimeError as error:
            silent = self._find_silent_ranks()
            who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}" if silent else "the other ranks"
            reason = str(error).strip().partition("\n")[0]
            raise IOFailure(f"overwire: group: {who} cannot be reached: {reason}") from error

    def _wait_for(self, work: Any, tensor: Any) -> None:
        # Waits for a collective. An interrupt is stored for the next agreement. It is raised here if the other ranks do
        # not join the collective soon, or if one of them has left the call.
        step, began = self._step, time.monotonic()
        gloo = not tensor.is_cuda and "cpu:gloo" in self._backends
        if not (gloo or tensor.is_cuda):
            work.wait()
            return
        while True:
            try:
                if _ends_within(work, _LOOK) if gloo else _is_work_done(work, began):
                    return
            except RuntimeError:
                raise
            except BaseException as interrupt:
                if step.interrupt is None:
                    step.interrupt = interrupt
                    self._limit_wait(interrupt, _GRACE)
                continue
            now = time.monotonic()
            if now - max(step.looked, began) >= _LOOK:
                step.looked = now
                self._raise_posted()
                if step.failure is not None and now > step.until:
                    raise step.failure

    def note_hosts(self, hosts: list[str]) -> None:
        """Notes the host of each rank. Does nothing after the first call. Not collective."""
        if self.local:
            return
        self.local = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self.most_local = max(hosts.count(host) for host in set(hosts))
        self.hosts = len(set(hosts))

    def broadcast(self, tensor: Any, rank: int) -> None:
        """Copies the contiguous tensor of one rank to all ranks. Collective."""
        self._run_collective(self._dist.broadcast, tensor, int(self._dist.get_global_rank(self.group, rank)))

    def gather_shares(self, buffer: Any, share: int) -> None:
        """Fills a buffer on all ranks. Collective. Rank r contributes bytes [r * share, (r + 1) * share) of the buffer
        and receives the other bytes. On a GPU the operation is only queued."""
        whole, part = buffer[: share * self.size], buffer[share * self.rank :][:share]
        self._run_collective(self._dist.all_gather_into_tensor, whole, part, waits=not buffer.is_cuda)


def _ends_within(work: Any, seconds: float) -> bool:
    # Returns whether a gloo collective ends within `seconds`. Raises its error.
    try:
        work.wait(timedelta(seconds=seconds))
        return True
    except RuntimeError:
        if not work.is_completed():
            return False
    work.wait()  # raises the reason if the collective has failed
    return True


def _is_work_done(work: Any, began: float) -> bool:
    # Returns whether a NCCL collective has ended. Polls, because a timeout of NCCL would abort the collective.
    if work.is_completed():
        work.wait()
        return True
    time.sleep(0 if time.monotonic() - began < _SPIN else _SPIN / 10)
    return False


class Unmapped(NotSupportedError):
    """Raised inside the package if the ranks of a host cannot map each other's memory."""


def _severity_of_error(error: BaseException | None, ours: bool) -> int:
    # Returns the weight of an error: 3 for a rank's own error, 2 if ranks cannot map each other's memory, 1 for a
    # consequence of another rank's error, 0 for none.
    return 0 if error is None else 1 if not ours else 2 if isinstance(error, Unmapped) else 3


def _pickle_error(error: BaseException | None) -> bytes | None:
    if error is None:
        return None
    if not isinstance(error, OverwireError):
        kind = CancelledError if isinstance(error, KeyboardInterrupt) else OverwireError
        error = kind(f"{type(error).__name__}: {error}")
    return pickle.dumps(error)


def _name_rank(rank: int, error: OverwireError) -> OverwireError:
    error.args = (f"overwire: on rank {rank}: {str(error).removeprefix('overwire: ')}",)
    return error


def host_identity() -> str:
    """Returns a text that identifies this host and its current boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return socket.gethostname() + " " + file.read().strip()


def exchange_setting() -> str:
    """Returns the value of OVERWIRE_EXCHANGE."""
    return next(str(row["value"]) for row in knobs() if row["name"] == "OVERWIRE_EXCHANGE")


_members: weakref.WeakKeyDictionary[Any, Members] = weakref.WeakKeyDictionary()


def members_of(group: Any) -> Members:
    """Returns the members of a `torch.distributed` process group that includes this process.

    Raises ArgumentError for anything else, and ForkedError for a group that was created before this process was forked.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None:
        raise ArgumentError(f"overwire: group: expected a torch.distributed process group, got {type(group).__name__}")
    if not dist.is_available():
        raise MissingPackageError("overwire: group: this torch was built without torch.distributed")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("overwire: group: this process is not in the group: make the call only on its ranks")
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(f"overwire: group: expected a torch.distributed process group, got {type(group).__name__}")
    if is_of_parent(group):
        raise ForkedError("overwire: group: it belongs to the parent of this forked process: create a new group")
    if (members := _members.get(group)) is None:
        members = _members[group] = Members(group)
    return members


def on_current_gpu(device: Any) -> AbstractContextManager[Any]:
    """Returns a context in which this rank's GPU is the current GPU, because NCCL sends flags and objects from there.
    Ignores an invalid device, which is refused later, where the error reaches all ranks."""
    import torch

    with suppress(OverwireError):
        if not forked() and 0 <= (number := device_number(device)) < torch.cuda.device_count():
            return torch.cuda.device(number)
    return nullcontext()


@contextmanager
def group_verb(group: Any, device: Any = "cpu", meets: bool = True) -> Iterator[Members]:
    """A context for a whole group call on this rank, including the check of its arguments. An exception that leaves the
    context ends the call on every rank. device: the device of this rank's tensors. meets: whether the call begins with
    `gather_results`."""
    members = members_of(group)
    first = members.begin_verb()
    try:
        with on_current_gpu(device):
            yield members
    except BaseException as error:
        with on_current_gpu(device):
            members.tell_failure(error, first, meets)
        members.end_verb()
        raise
    members.end_verb()


def agree(group: Any, error: BaseException | None) -> None:
    """Raises an error on every rank if one of them has an error. Collective. The rank with the error raises it, and the
    other ranks raise an error of the same class that names the rank."""
    members_of(group).agree(error)

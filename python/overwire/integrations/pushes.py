"""Pushes new weights from a trainer to engines.

A push is one compressed file, with all tensors or with the changes since the last push. The file is in a folder or
store that trainer and engines can reach, or a torch process group sends its bytes. The trainer passes the info of a
push, a dict of JSON values, to the engines.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch

__all__ = ["Group", "Publisher", "Push"]

# The size of one broadcast, and the seconds between two polls of the other ranks' answers.
_STEP, _TICK = 64 << 20, 0.002


class Push:
    """One push.

    info: a dict for the engines: kind ("whole" or "delta"), number (from 1), size (bytes of the file), path (None if a
    group sends the file).
    """

    def __init__(self, info: dict[str, Any], file: str, group: Group | None) -> None:
        self.info = info
        self._file, self._group = file, group

    def carry(self, has_ended: Callable[[], bool] = lambda: False) -> None:
        """Sends the file over the group while the engines receive it. Does nothing without a group.

        has_ended: returns whether the engines have answered. If they answer before they have the push, they have
        failed. Raises ArgumentError if an engine refuses the push.
        """
        if self._group is not None:
            self._group.send(self._file, self.info["number"], has_ended)


def reason_against_numbers(**numbers: object) -> str:
    """Describes the invalid numbers of a push, in the order of the arguments. Returns "" if all are valid."""
    return "; ".join(
        f"{name} must be a positive number, got {str(value)[:80]!r}"
        for name, value in numbers.items()
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 63
    )


class Publisher:
    """Writes the pushes of a trainer.

    where: a folder or a URI (s3://, redis://) that the engines reach under the same name. Two file names alternate, so
    all engines must have loaded a push before the next one begins. With `group`, it is the local folder for the file
    that is sent; None uses a temporary folder.
    deltas: whether to keep a copy of the pushed tensors on their device, and to push only changes. The first push, a
    push after an error, and a push in which names, dtypes, shapes or devices have changed contain all tensors.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | None = None,
        *,
        group: Group | None = None,
        deltas: bool = False,
        compress: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if where is None and group is None:
            raise ValueError("overwire: Publisher: expected a folder, a URI or group=")
        self._own = tempfile.TemporaryDirectory(prefix="overwire-push-") if where is None else None
        self._where = os.fspath(where) if where is not None else self._own.name  # type: ignore[union-attr]
        self._group, self._compress, self._reach = group, compress, storage_options
        self._deltas = deltas
        self._last: dict[str, torch.Tensor] | None = None  # the tensors that the engines have
        self.number = 0
        if "://" not in self._where:
            self._where = os.path.abspath(self._where)
            os.makedirs(self._where, exist_ok=True)

    @contextlib.contextmanager
    def push(self, tensors: Mapping[str, torch.Tensor], *, whole: bool = False) -> Iterator[Push]:
        """Returns a context that writes a push. The engines must load the push inside the block. An exception inside
        the block means that they did not load it.

        whole: whether to push all tensors, for example for an engine that has just started.

        Raises the errors of `overwire.save_file` and `overwire.save_delta`. The tensors must not
        change until the end of the block.
        """
        import overwire

        last, self._last = self._last, None
        self.number += 1
        file = f"{self._where.rstrip('/')}/weights-{self.number % 2}.safetensors"
        reach: Any = self._reach
        if whole or last is None or _table_of(last) != _table_of(tensors):
            kind, last, how = "whole", None, {"compress": self._compress, "storage_options": reach}
            size = overwire.save_file(tensors, file, {"format": "pt"}, **how).bytes_out
        else:
            kind, size = "delta", overwire.save_delta(tensors, last, file, storage_options=reach).stored
        facts = {"kind": kind, "number": self.number, "size": size, "path": None if self._group else file}
        yield Push(facts, file, self._group)
        if self._deltas:
            self._last = _copy_tensors(tensors, last)

    def close(self) -> None:
        """Leaves the group and removes the temporary folder."""
        if self._group is not None:
            self._group.close()
        if self._own is not None:
            self._own.cleanup()


def _table_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.shape, tensor.device) for name, tensor in tensors.items()}


def _copy_tensors(tensors: Mapping[str, torch.Tensor], into: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    if into is None:
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        into[name].copy_(tensor.detach())
    return into


class Group:
    """A torch process group (gloo) that is used only for pushes. The trainer is rank 0.

    The constructor waits for all ranks. Collective steps fail after timeout seconds. Before a broadcast the ranks agree
    through the group's store, because a rank that did not take part in a broadcast would block the others.
    """

    def __init__(
        self, address: str, port: int, rank: int, size: int, timeout: float = 300,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Joins the group. has_ended: returns whether ranks that have not joined will never join. If it returns True,
        raises ArgumentError."""
        from ..errors import ArgumentError

        dist: Any = importlib.import_module("torch.distributed")
        limit = timedelta(seconds=timeout)
        self._rank, self._size, self._timeout = rank, size, timeout
        self._last_number = 0  # the number of the last push in which this rank took part
        self._store: Any = dist.TCPStore(address, port, size, rank == 0, timeout=limit, wait_for_workers=False)
        self._store.add("ranks", 1)
        self._wait_for(lambda: self._read_counter("ranks") >= size or has_ended())
        if self._read_counter("ranks") < size:
            raise ArgumentError("overwire: the engines have answered, but not all of them have joined the group")
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("overwire", self._store), rank, size, limit)

    def refuse_push(self, number: object, reason: str) -> None:
        """Informs the trainer that this rank refuses a push for its engine. The trainer informs the other ranks."""
        self._store.set(f"{number}/refusal", f"rank {self._rank}: {reason}")
        self._store.add(f"{number}/refusals", 1)

    def send(self, path: str, number: int = 1, has_ended: Callable[[], bool] = lambda: False) -> None:
        """Sends a file to all other ranks. Raises ArgumentError on all ranks if one of them expects another size or
        refuses the push. number: the number of the push, larger than all earlier ones. has_ended: as for
        `Push.carry`."""
        from ..errors import ArgumentError

        reason = "the trainer failed before it sent the push"
        for key in ("reason", "verdict", "answers", "refusals", "refusal", *range(1, self._size)):
            self._store.delete_key(f"{number - 2}/{key}")  # all ranks have finished with that push
        self._store.set("number", str(number))
        self._store.add("begun", 1)
        try:
            reason = self._reason_of_ranks(number, os.path.getsize(path), has_ended)
        finally:
            self._store.set(f"{number}/reason", reason)
            self._store.add(f"{number}/verdict", 1)
        if reason:
            raise ArgumentError(f"overwire: update_info: {reason}")
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
            self._broadcast_file(memory)

    def _read_counter(self, key: object) -> int:
        return int(self._store.add(key, 0))

    def _reason_of_ranks(self, number: int, size: int, has_ended: Callable[[], bool]) -> str:
        # Returns why a rank does not accept a push of this size, or "" if all accept it.
        def has_all() -> bool:
            return self._read_counter(f"{number}/answers") == self._size - 1

        self._wait_for(lambda: has_all() or self._read_counter(f"{number}/refusals") or has_ended())
        if self._read_counter(f"{number}/refusals"):
            return str(self._store.get(f"{number}/refusal").decode())
        if not has_all():
            return "the engines have answered, but not all of them have accepted the push"
        sizes = {rank: self._store.get(f"{number}/{rank}").decode() for rank in range(1, self._size)}
        wrong = [rank for rank, one in sizes.items() if one != str(size)]
        return f"size is not {size}, the number of bytes sent, on ranks {wrong}" if wrong else ""

    @contextlib.contextmanager
    def received(self, size: int, number: int = 1) -> Iterator[str]:
        """Receives a push of `size` bytes and yields the path of an in-memory file with it. If the trainer sends
        another size or a rank refuses the push, raises ArgumentError on all ranks before it allocates memory."""
        self._agree_to_take(size, number)
        descriptor = os.memfd_create("overwire-push", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            with mmap.mmap(descriptor, size) as memory:
                self._broadcast_file(memory)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)

    def _agree_to_take(self, size: Any, number: Any) -> None:
        from ..errors import ArgumentError

        def is_ready() -> bool:
            # Returns whether the trainer is sending this push. Raises an error if it is sending another push.
            if not self._read_counter("begun"):
                return False
            current = int(self._store.get("number"))
            if current > number or current < number and not self._read_counter(f"{current}/verdict"):
                raise ArgumentError(f"overwire: update_info: number is {number}, but push {current} is being sent")
            return bool(current == number)

        reason = reason_against_numbers(number=number, size=size)
        if not reason and number <= self._last_number:
            reason = f"push {number} was already received"
        if reason:
            self.refuse_push(number, reason)
            raise ArgumentError(f"overwire: update_info: {reason}")
        try:
            self._wait_for(is_ready)
        except ArgumentError as error:
            self.refuse_push(int(self._store.get("number")), str(error))
            raise
        self._last_number = number
        self._store.set(f"{number}/{self._rank}", str(size))
        self._store.add(f"{number}/answers", 1)
        self._wait_for(lambda: self._read_counter(f"{number}/verdict"))
        if reason := self._store.get(f"{number}/reason").decode():
            raise ArgumentError(f"overwire: update_info: {reason}")

    def _wait_for(self, is_so: Callable[[], object]) -> None:
        from ..errors import DeadlineError

        end = time.monotonic() + self._timeout
        while not is_so():
            if time.monotonic() > end:
                raise DeadlineError(f"overwire: pushes: not all ranks have taken part within {self._timeout} s")
            time.sleep(_TICK)

    def _broadcast_file(self, mapped: mmap.mmap) -> None:
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        try:
            for low in range(0, whole.numel(), _STEP):
                self._group.broadcast(whole[low : low + _STEP], 0).wait()
        finally:
            del whole  # a referenced mapping cannot be closed

    def close(self) -> None:
        """Leaves the group."""
        self._group = self._store = None

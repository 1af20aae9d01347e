"""Weights on their way from a trainer to engines: what is pushed, and what carries it.

A push is one file: all tensors, compressed, or what changed since the last push. It lies
in a folder or a store that trainer and engines reach, or its bytes go over a process group
of torch's. The trainer tells the engines by its info, a dict that JSON holds.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch

__all__ = ["Group", "Publisher", "Push"]

# Bytes of one broadcast.
_STEP = 64 << 20


class Push:
    """One push. info: what engines get: kind ("whole" or "delta"), number (from 1), size
    (bytes of the file), path (None if a group carries it)."""

    def __init__(self, info: dict[str, Any], file: str, group: Group | None) -> None:
        self.info = info
        self._file, self._group = file, group

    def carry(self) -> None:
        """Sends the bytes over the group, while the engines receive them; nothing without one."""
        if self._group is not None:
            self._group.send(self._file)


class Publisher:
    """Writes what a trainer pushes.

    where: a folder, or a URI of one (s3://, redis://), that the engines reach by the same
    name. Two names are written in turn, so engines must have taken a push when the next
    one begins. With group, a local folder for the file that is sent; None: a temporary one.
    deltas: keeps a copy of what was pushed, where the tensors are, and pushes what changed
    since. The first push is whole, and so is one after an error, or of other tensors.
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
            raise ValueError("overwire: a push needs a folder, a URI or a group")
        self._own = tempfile.TemporaryDirectory(prefix="overwire-push-") if where is None else None
        self._where = os.fspath(where) if where is not None else self._own.name  # type: ignore[union-attr]
        self._group, self._compress, self._reach = group, compress, storage_options
        self._deltas = deltas
        self._last: dict[str, torch.Tensor] | None = None  # what the engines have
        self.number = 0
        if "://" not in self._where:
            self._where = os.path.abspath(self._where)
            os.makedirs(self._where, exist_ok=True)

    @contextlib.contextmanager
    def push(self, tensors: Mapping[str, torch.Tensor], *, whole: bool = False) -> Iterator[Push]:
        """Writes a push. While it is entered, the engines take it; an error inside says that
        they did not.

        whole: all tensors, as for an engine that has just started.

        Raises what `overwire.save_file` and `overwire.save_delta` raise. The tensors must
        not change before the end.
        """
        import overwire

        last, self._last = self._last, None
        self.number += 1
        file = f"{self._where.rstrip('/')}/weights-{self.number % 2}.safetensors"
        reach: Any = self._reach
        if whole or last is None or _table_of(last) != _table_of(tensors):
            kind, last = "whole", None
            size = overwire.save_file(
                tensors, file, {"format": "pt"}, compress=self._compress, storage_options=reach
            ).bytes_out
        else:
            kind, size = "delta", overwire.save_delta(tensors, last, file, storage_options=reach).stored
        yield Push(
            {"kind": kind, "number": self.number, "size": size, "path": None if self._group else file},
            file,
            self._group,
        )
        if self._deltas:
            self._last = _copy_tensors(tensors, last)

    def close(self) -> None:
        """Leaves the group, and removes a temporary folder."""
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
    """A process group of torch's for pushes alone, by gloo: the trainer is rank 0.

    Making it waits for all ranks. What ranks do together ends with an error after timeout seconds.
    """

    def __init__(self, address: str, port: int, rank: int, size: int, timeout: float = 300) -> None:
        dist: Any = importlib.import_module("torch.distributed")
        limit = timedelta(seconds=timeout)
        self._size = size
        self._store: Any = dist.TCPStore(address, port, size, rank == 0, timeout=limit)
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("overwire", self._store), rank, size, limit)

    def send(self, path: str) -> None:
        """Sends a file to all other ranks; ArgumentError, on all of them, if one expects another size."""
        self._agree_on_size(os.path.getsize(path))
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
            self._broadcast_file(memory)

    @contextlib.contextmanager
    def received(self, size: int) -> Iterator[str]:
        """A path of a file in memory with the next `size` bytes that are sent. ArgumentError, on all ranks and
        before memory is taken, if the trainer sends more or fewer, or another rank expects another size."""
        self._agree_on_size(size)
        number = os.memfd_create("overwire-push", os.MFD_CLOEXEC)
        try:
            os.ftruncate(number, size)
            with mmap.mmap(number, size) as memory:
                self._broadcast_file(memory)
            yield f"/proc/self/fd/{number}"
        finally:
            os.close(number)

    def _agree_on_size(self, size: Any) -> None:
        # Collective: a rank that refused alone would leave the others waiting, and gloo ends a process whose
        # buffer is smaller than what comes.
        from ..errors import ArgumentError

        is_count = isinstance(size, int) and not isinstance(size, bool) and 0 < size < 1 << 63
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        self._group.allgather([sizes], [torch.tensor([size if is_count else -1])]).wait()
        true_size, *others = (int(one) for one in sizes)
        if not is_count:
            raise ArgumentError(f"overwire: update_info: size must be a number of bytes, got {str(size)[:80]!r}")
        if wrong := [rank for rank, one in enumerate(others, 1) if one != true_size]:
            text = f"size is not the {true_size} bytes that are sent, on ranks {wrong}"
            raise ArgumentError(f"overwire: update_info: {text}")

    def _broadcast_file(self, mapped: mmap.mmap) -> None:
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        try:
            for low in range(0, whole.numel(), _STEP):
                self._group.broadcast(whole[low : low + _STEP], 0).wait()
        finally:
            del whole  # a mapping that is referenced cannot be closed

    def close(self) -> None:
        """Leaves the group."""
        self._group = self._store = None

"""CheckpointStager: copies a state to host memory, so that training goes on while it is saved."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from ..errors import NotSupportedError
from .buffers import host_memory

# Copies of tensors begin at multiples of this many bytes.
_ALIGNED = 256


class _Staged(dict[str, Any]):
    """A state whose tensors are in buffers of the stager, as long as anything has it."""

    __slots__ = ("__weakref__",)


class CheckpointStager(AsyncStager):
    """Copies tensors into host memory, pinned where they are on a GPU, for `dcp.async_save`.

    The buffers stay for the next save, whose copies run at the speed of the link. While
    an earlier save still has them, others are made. Copies are not compressed: the host
    needs as much memory as the state of the rank, twice that if a save begins before
    the last one has ended. Ranks of one host map each other's buffers, and take the blocks of
    sharded tensors from there.

    Give one object to all saves, and `close` it after the last one. Use it with torch's
    default, saves in a thread; a save in another process would share the buffers with it.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._sets: list[tuple[weakref.ref[_Staged], dict[bool, torch.Tensor]]] = []

    def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        """A copy of the state, in host memory; when it returns, the tensors may change.

        Raises NotSupportedError for tensors that have no one memory (sparse, nested), and
        OutOfMemoryError.
        """
        busy = [(user, buffers) for user, buffers in self._sets if user() is not None]
        free = [buffers for user, buffers in self._sets if user() is None]
        self._sets = busy
        copying = _Copying()
        copying.measure(state_dict)
        copying.take_buffers(free)
        copies = _Staged({key: copying.copy_of(value) for key, value in state_dict.items()})
        copying.finish()
        self._sets.append((weakref.ref(copies), copying.buffers))
        return copies

    def synchronize_staging(self) -> None:
        """Nothing: `stage` returns when all is copied."""

    def close(self) -> None:
        """Gives the buffers back, those of running saves when they end."""
        self._sets = []


class _Copying:
    """One stage: `measure`, `take_buffers`, then `copy_of` each value, and `finish`.

    buffers: one for the tensors of GPUs, pinned, and one for those of the host."""

    def __init__(self) -> None:
        self.buffers: dict[bool, torch.Tensor] = {}
        self._sizes = {True: 0, False: 0}
        self._ends = {True: 0, False: 0}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copies: dict[int, torch.Tensor] = {}  # tied tensors stay tied
        self._tensors: dict[int, torch.Tensor] = {}

    def measure(self, value: Any) -> None:
        """Adds up the tensors of a value. Raises NotSupportedError for those that cannot be copied."""
        if isinstance(value, torch.Tensor) and id(value) not in self._tensors:
            self._tensors[id(value)] = value
            tensor = value.to_local() if isinstance(value, DTensor) else value
            if hasattr(tensor, "local_shards") or tensor.layout != torch.strided:
                kind = type(tensor).__name__
                raise NotSupportedError(f"overwire: CheckpointStager: a {kind} of layout {tensor.layout}")
            self._sizes[tensor.is_cuda] += _room_of(tensor)
        elif isinstance(value, Mapping):
            for one in value.values():
                self.measure(one)
        elif type(value) in (list, tuple):
            for one in value:
                self.measure(one)

    def take_buffers(self, free: list[dict[bool, torch.Tensor]]) -> None:
        """Takes those of an earlier stage that are large enough, or new ones."""
        for pinned, size in self._sizes.items():
            if not size:
                continue
            some = [buffers[pinned] for buffers in free if pinned in buffers and buffers[pinned].nbytes >= size]
            if not some:
                for buffers in free:
                    buffers.pop(pinned, None)  # too small: given back before there is another
            self.buffers[pinned] = some[0] if some else host_memory(size, pinned)

    def copy_of(self, value: Any) -> Any:
        """The copy of a value."""
        if isinstance(value, torch.Tensor):
            if (staged := self._copies.get(id(value))) is None:
                staged = self._copies[id(value)] = self._copy_tensor(value)
            return staged
        if isinstance(value, Mapping):
            return {key: self.copy_of(one) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.copy_of(one) for one in value)
        if isinstance(value, (int, float, complex, str, bytes, type(None))):
            return value
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            staged: DTensor = tensor.detach()  # type: ignore[assignment]
            staged._local_tensor = self._copy_tensor(tensor.to_local())
            return staged
        tensor = tensor.detach()
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        pinned = tensor.is_cuda
        begin = self._ends[pinned]
        self._ends[pinned] += _room_of(tensor)
        place = self.buffers[pinned][begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if pinned:
            stream = self._streams.get(tensor.device)
            if stream is None:
                stream = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                place.copy_(tensor, non_blocking=True)
        else:
            place.copy_(tensor)
        return place

    def finish(self) -> None:
        """Waits for the copies."""
        for stream in self._streams.values():
            stream.synchronize()


def _room_of(tensor: torch.Tensor) -> int:
    return (tensor.nbytes + _ALIGNED - 1) // _ALIGNED * _ALIGNED

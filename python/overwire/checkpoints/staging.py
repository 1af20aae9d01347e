"""CheckpointStager: copies a state to host memory, so that training goes on while it is saved."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from ..errors import NotSupportedError

__all__ = ["CheckpointStager"]


class _Staged(dict[str, Any]):
    """A state whose tensors are in buffers of the stager, as long as anything has it."""

    __slots__ = ("__weakref__",)


class CheckpointStager(AsyncStager):
    """Copies tensors into host memory, pinned where they are on a GPU, for `dcp.async_save`.

    The buffers stay for the next save, whose copies run at the speed of the link. While
    an earlier save still has them, others are made. Copies are not compressed: the host
    needs as much memory as the state of the rank, twice that if a save begins before
    the last one has ended.

    Give one object to all saves, and `close` it after the last one. Use it with torch's
    default, saves in a thread; a save in another process would share the buffers with it.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._sets: list[tuple[weakref.ref[_Staged], dict[int, list[torch.Tensor]]]] = []

    def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        """A copy of the state, in host memory; when it returns, the tensors may change.

        Raises NotSupportedError for tensors that have no one memory (sparse, nested).
        """
        free: dict[int, list[torch.Tensor]] = {}
        busy = []
        for user, buffers in self._sets:
            if user() is None:
                for size, some in buffers.items():
                    free.setdefault(size, []).extend(some)
            else:
                busy.append((user, buffers))
        self._sets = busy
        copying = _Copying(free)
        staged = _Staged({key: copying.of(value) for key, value in state_dict.items()})
        copying.finish()
        self._sets.append((weakref.ref(staged), copying.used))
        return staged

    def synchronize_staging(self) -> None:
        """Nothing: `stage` returns when all is copied."""

    def close(self) -> None:
        """Gives the buffers back, those of running saves when they end."""
        self._sets = []


class _Copying:
    # One stage. free: buffers by size, which it takes from. used: what the copies are in.
    def __init__(self, free: dict[int, list[torch.Tensor]]) -> None:
        self._free = free
        self.used: dict[int, list[torch.Tensor]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._copies: dict[int, torch.Tensor] = {}  # tied tensors stay tied
        self._kept: list[torch.Tensor] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if (known := self._copies.get(id(value))) is None:
                known = self._copies[id(value)] = self._tensor(value)
                self._kept.append(value)
            return known
        if isinstance(value, Mapping):
            return {key: self.of(one) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.of(one) for one in value)
        if isinstance(value, (int, float, complex, str, bytes, type(None))):
            return value
        return copy.deepcopy(value)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            staged: DTensor = tensor.detach()  # type: ignore[assignment]
            staged._local_tensor = self._tensor(tensor.to_local())
            return staged
        if hasattr(tensor, "local_shards") or tensor.layout != torch.strided:
            raise NotSupportedError(f"overwire: CheckpointStager: a {type(tensor).__name__} of layout {tensor.layout}")
        tensor = tensor.detach()
        size = math.prod(tensor.shape) * tensor.element_size()
        if not size:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        some = self._free.get(size if tensor.is_cuda else -size)
        buffer = some.pop() if some else torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        self.used.setdefault(size if tensor.is_cuda else -size, []).append(buffer)
        place = buffer.view(tensor.dtype).view(tensor.shape)
        if tensor.is_cuda:
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
        for stream in self._streams.values():
            stream.synchronize()

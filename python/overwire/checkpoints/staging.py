"""Defines CheckpointStager, which copies a state to host memory, so that training continues while the copy is saved."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from ..errors import NotSupportedError
from ..frameworks.memory import LAZY, PLAIN, check_memory, users_of
from .buffers import host_memory

# Copies of tensors begin at multiples of this, in bytes.
_ALIGNED = 256


class _Staged(dict[str, Any]):
    """A copied state. Its tensors are in the stager's buffers, which are in use as long as the state is referenced."""

    __slots__ = ("__weakref__",)


class _Buffer(NamedTuple):
    # Memory for staged tensors. idle: the number of references to it while it contains no tensor.
    memory: torch.Tensor
    idle: int


class _Number(int):
    # The number of a tensor. It replaces the tensor in a state until the tensor is copied.
    pass


class CheckpointStager(AsyncStager):
    """Copies tensors into host memory for `dcp.async_save`. The memory is pinned for tensors on a GPU.

    The next save reuses the buffers, and then copies at the speed of the PCIe link. If an earlier save still uses them,
    more buffers are allocated. Copies are not compressed. The host needs as much memory as the rank's state, or twice
    as much if a save begins before the last one has ended. Ranks on one host map each other's buffers and read the
    blocks of sharded tensors from there.

    Use one stager for all saves, and `close` it after the last one. Use it only with saves in a thread, which are
    torch's default. A save in another process would share the buffers.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._sets: list[tuple[weakref.ref[_Staged], dict[bool, _Buffer]]] = []

    def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        """Returns a copy of the state in host memory. The tensors may change after the call.

        Each value is read once. Raises NotSupportedError with the tensor's name for a tensor that is more or less than
        dense memory: sparse, nested, quantised, on the meta device, from a lazy module, or of a subclass (MaskedTensor,
        quantised weights) other than DTensor. Raises ArgumentError for memory that was freed (`sleep`) or shortened,
        and OutOfMemoryError. After an error, no copy remains.
        """
        sets = [(user() is None and not _is_used(buffers), user, buffers) for user, buffers in self._sets]
        self._sets = [(user, buffers) for is_free, user, buffers in sets if not is_free]
        copying = _Copying()
        numbers = {key: copying.number_tensors(value, str(key)) for key, value in state_dict.items()}
        copying.take_buffers([buffers for is_free, _, buffers in sets if is_free])
        copies = _Staged({key: copying.copy_of(value) for key, value in numbers.items()})
        copying.finish()
        self._sets.append((weakref.ref(copies), copying.buffers))
        return copies

    def synchronize_staging(self) -> None:
        """Does nothing, because all tensors are copied when `stage` returns."""

    def close(self) -> None:
        """Frees the buffers. Buffers of running saves are freed when the saves end."""
        self._sets = []


def _is_used(buffers: dict[bool, _Buffer]) -> bool:
    # Checks each buffer, because a tensor of a staged state may outlive the state.
    return any(users_of(one.memory) > one.idle for one in buffers.values())


class _Copying:
    """One call of `stage`. Call `number_tensors` with each value, `take_buffers`, `copy_of` with each result, and
    `finish`, in this order.

    buffers: a pinned buffer for GPU tensors (key True), and a buffer for host tensors (key False)."""

    def __init__(self) -> None:
        self.buffers: dict[bool, _Buffer] = {}
        self._sizes = {True: 0, False: 0}
        self._ends = {True: 0, False: 0}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # Keeps all tensors alive until they are copied, because a mapping may create its tensors when they are read.
        self._tensors: list[torch.Tensor] = []
        self._numbers: dict[int, _Number] = {}  # keyed by id, so that tied tensors stay tied
        self._copies: dict[int, torch.Tensor] = {}

    def number_tensors(self, value: Any, name: str) -> Any:
        """Returns the value with containers copied and tensors replaced by numbers. Raises
        NotSupportedError and ArgumentError for tensors that cannot be copied."""
        if isinstance(value, torch.Tensor):
            if (number := self._numbers.get(id(value))) is None:
                local = value.to_local() if isinstance(value, DTensor) else value
                _check_tensor(local, name)
                self._sizes[local.is_cuda] += _room_of(local)
                number = self._numbers[id(value)] = _Number(len(self._tensors))
                self._tensors.append(value)
            return number
        if isinstance(value, Mapping):
            return {key: self.number_tensors(one, f"{name}.{key}") for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.number_tensors(one, f"{name}.{at}") for at, one in enumerate(value))
        if isinstance(value, (int, float, complex, str, bytes, type(None))):
            return value
        return copy.deepcopy(value)

    def take_buffers(self, free: list[dict[bool, _Buffer]]) -> None:
        """Takes free buffers that are large enough, or allocates new ones."""
        for pinned, size in self._sizes.items():
            if not size:
                continue
            some = [buffers[pinned] for buffers in free if pinned in buffers and buffers[pinned].memory.nbytes >= size]
            if not some:
                for buffers in free:
                    buffers.pop(pinned, None)  # frees the small buffer first
                memory = host_memory(size, pinned)
                some = [_Buffer(memory, users_of(memory))]
            self.buffers[pinned] = some[0]

    def copy_of(self, value: Any) -> Any:
        """Replaces the numbers in a result of `number_tensors` by copies of their tensors."""
        if type(value) is _Number:
            if (staged := self._copies.get(value)) is None:
                staged = self._copies[value] = self._copy_tensor(self._tensors[value])
            return staged
        if type(value) is dict:
            return {key: self.copy_of(one) for key, one in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.copy_of(one) for one in value)
        return value

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
        place = self.buffers[pinned].memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if pinned:
            if (stream := self._streams.get(tensor.device)) is None:
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


def _check_tensor(tensor: torch.Tensor, name: str) -> None:
    where, why = f"overwire: CheckpointStager: {name!r}", ""
    if isinstance(tensor, LAZY):
        why = "the tensor is not initialized: run its module once"
    elif tensor.is_meta:
        why = "a tensor on the meta device has no memory"
    elif tensor.is_quantized:
        why = "a quantised tensor has more data than its elements: save its parts, such as its int_repr()"
    else:
        check_memory(tensor, where, name)
        if type(tensor) not in PLAIN:
            why = f"a {type(tensor).__name__} may have more data than its elements: save the tensors in it"
    if why:
        raise NotSupportedError(f"{where}: {why}", tensor=name)


def _room_of(tensor: torch.Tensor) -> int:
    return (tensor.nbytes + _ALIGNED - 1) // _ALIGNED * _ALIGNED

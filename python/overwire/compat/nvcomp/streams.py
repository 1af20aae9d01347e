"""CudaStream, and the allocators that get one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from ... import codecs

__all__ = ["CudaStream", "cuda_torch", "set_device_allocator", "set_host_allocator", "set_pinned_allocator"]

# The default, legacy and per-thread streams.
_SPECIAL = (0, 1, 2)


def cuda_torch() -> Any:
    """torch, where the program has imported it and it finds a GPU; else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_available() else None


class CudaStream:
    """A CUDA stream by its number: `borrow` views one, `make_new` owns one."""

    __slots__ = ("_device", "_keep", "_ptr")
    _device: int
    _keep: Any
    _ptr: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("nvidia.nvcomp.nvcomp_impl.CudaStream: No constructor defined!")

    @classmethod
    def _made(cls, ptr: int, device: int, keep: Any = None) -> CudaStream:
        made = cls.__new__(cls)
        made._ptr, made._device, made._keep = ptr, device, keep
        return made

    @staticmethod
    def borrow(cuda_stream: int, device_idx: int = -1) -> CudaStream:
        """A view of a stream. -1 is the current device. Raises RuntimeError
        without a GPU, ValueError for a device that is not there."""
        torch = _torch("CudaStream.borrow")
        return CudaStream._made(int(cuda_stream), _device(torch, device_idx))

    @staticmethod
    def make_new(device_idx: int = -1) -> CudaStream:
        """A new stream, which ends with its last holder. Raises as `borrow`."""
        torch = _torch("CudaStream.make_new")
        device = _device(torch, device_idx)
        stream = torch.cuda.Stream(device=device)
        return CudaStream._made(stream.cuda_stream, device, stream)

    @property
    def device(self) -> int:
        """The number of the stream's device; -1 for the host's allocations."""
        return self._device

    @property
    def is_special(self) -> bool:
        """Whether it is the default, legacy or per-thread stream."""
        return self._ptr in _SPECIAL

    @property
    def ptr(self) -> int:
        """The stream as a number."""
        return self._ptr


def _torch(what: str) -> Any:
    torch = cuda_torch()
    if torch is None:
        raise RuntimeError(f"{what}: no CUDA device: torch is not imported, or finds none")
    return torch


def _device(torch: Any, index: int) -> int:
    if index == -1:
        return int(torch.cuda.current_device())
    if not 0 <= index < torch.cuda.device_count():
        raise ValueError(f"device {index}: there are {torch.cuda.device_count()}")
    return index


Allocator = Callable[[int, CudaStream], Any]

_lock = threading.Lock()
_allocators: dict[str, Allocator] = {}


def _set(kind: str, allocator: Allocator | None) -> None:
    if allocator is not None and not callable(allocator):
        raise TypeError(f"set_{kind}_allocator: expected a callable or None, got {type(allocator).__name__}")
    with _lock:
        if allocator is None:
            _allocators.pop(kind, None)
        else:
            _allocators[kind] = allocator


def set_device_allocator(allocator: Allocator | None = None) -> None:
    """Sets what makes device memory from now on: a callable (nbytes, CudaStream)
    that returns an object with an int `ptr`, whose end frees the memory. None
    restores the default. Buffers of an earlier allocator live on."""
    _set("device", allocator)


def set_pinned_allocator(allocator: Allocator | None = None) -> None:
    """As `set_device_allocator`, for what `Array.cpu` copies from a GPU into."""
    _set("pinned", allocator)


def set_host_allocator(allocator: Allocator | None = None) -> None:
    """As `set_device_allocator`, for the host Arrays that a Codec makes. Its
    stream is that of no device: `ptr` 0, `device` -1."""
    _set("host", allocator)


def allocate(kind: str, nbytes: int, stream: CudaStream | None = None) -> codecs.Span | None:
    """Memory of the user's allocator; None where none is set or nothing is asked.

    What the allocator raises is passed on.
    """
    with _lock:
        allocator = _allocators.get(kind)
    if allocator is None or nbytes == 0:
        return None
    made = allocator(nbytes, stream if stream is not None else CudaStream._made(0, -1))
    ptr = getattr(made, "ptr", None)
    if not isinstance(ptr, int):
        raise TypeError(f"the {kind} allocator returned {type(made).__name__}, which has no int ptr")
    if ptr == 0:
        raise MemoryError(f"the {kind} allocator returned no memory for {nbytes} bytes")
    return codecs.Span(ptr, nbytes, made)


def has_allocator(kind: str) -> bool:
    """Whether the user has set an allocator."""
    with _lock:
        return kind in _allocators

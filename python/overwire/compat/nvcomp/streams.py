"""Implements CudaStream and user-defined allocators, and selects GPUs for Codecs and Arrays."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ... import codecs, gpu

# The default, legacy and per-thread streams, which belong to every device.
_SPECIAL = (0, 1, 2)

HOST = (1, 0)


class CudaStream:
    """A CUDA stream. `borrow` returns a view of an existing stream, and `make_new` makes a new stream."""

    __slots__ = ("__weakref__", "_device", "_ptr")
    _device: int
    _ptr: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("nvidia.nvcomp.nvcomp_impl.CudaStream: No constructor defined!")

    @classmethod
    def _from_number(cls, ptr: int, device: int) -> CudaStream:
        stream = cls.__new__(cls)
        stream._ptr, stream._device = ptr, device
        return stream

    @staticmethod
    def borrow(cuda_stream: int, device_idx: int = -1) -> CudaStream:
        """Returns a view of a stream. device_idx=-1 means the current device. Raises RuntimeError without a GPU, and
        ValueError for a device that does not exist or a stream of another device. The special streams belong to every
        device."""
        device = _device("CudaStream.borrow", device_idx)
        check_device(int(cuda_stream), device)
        return CudaStream._from_number(int(cuda_stream), device)

    @staticmethod
    def make_new(device_idx: int = -1) -> CudaStream:
        """Makes a stream, which is freed when its last reference is dropped. Raises the errors of `borrow`."""
        device = _device("CudaStream.make_new", device_idx)
        stream = CudaStream._from_number(gpu.stream_new(device), device)
        weakref.finalize(stream, gpu.stream_free, stream._ptr, device).atexit = False
        return stream

    @property
    def device(self) -> int:
        """The number of the stream's device, or -1 for the stream of a host allocator."""
        return self._device

    @property
    def is_special(self) -> bool:
        """Whether this is the default, legacy or per-thread stream."""
        return self._ptr in _SPECIAL

    @property
    def ptr(self) -> int:
        """The stream as a number."""
        return self._ptr


def current() -> int:
    """Returns the number of torch's current device if torch is imported, else 0."""
    torch = gpu.torch_of()
    return int(torch.cuda.current_device()) if torch is not None else 0


def _device(what: str, index: int) -> int:
    count = gpu.count()
    if count == 0:
        raise RuntimeError(f"{what}: no CUDA device")
    if index == -1:
        return current()
    if not 0 <= index < count:
        raise ValueError(f"device {index}: expected less than {count}, the number of GPUs")
    return index


def check_device(stream: int, device: int) -> None:
    """Raises ValueError (an ArgumentError) if the stream belongs to another device."""
    if stream not in _SPECIAL:
        gpu.stream_check(stream, device)


Allocator = Callable[[int, CudaStream], Any]

_allocators: dict[str, Allocator | None] = {}


def _set_allocator(kind: str, allocator: Allocator | None) -> None:
    if allocator is not None and not callable(allocator):
        raise TypeError(f"set_{kind}_allocator: expected a callable or None, got {type(allocator).__name__}")
    _allocators[kind] = allocator


def set_device_allocator(allocator: Allocator | None = None) -> None:
    """Sets the allocator of device memory: a callable (nbytes, CudaStream) that returns an object with an int `ptr`.
    Freeing that object frees the memory. None restores the default. Buffers of previous allocators stay valid."""
    _set_allocator("device", allocator)


def set_pinned_allocator(allocator: Allocator | None = None) -> None:
    """Sets the allocator of the memory into which `Array.cpu` copies from a GPU, like `set_device_allocator`."""
    _set_allocator("pinned", allocator)


def set_host_allocator(allocator: Allocator | None = None) -> None:
    """Sets the allocator of host Arrays that a Codec makes, like `set_device_allocator`. The stream that it gets has no
    device: `ptr` is 0, and `device` is -1."""
    _set_allocator("host", allocator)


def allocate(kind: str, nbytes: int, stream: int = 0, device: int = -1) -> codecs.Span | None:
    """Allocates with the user's allocator. Returns None if no allocator is set or nbytes is 0.

    Exceptions of the allocator are passed on.
    """
    allocator = _allocators.get(kind)
    if allocator is None or nbytes == 0:
        return None
    memory = allocator(nbytes, CudaStream._from_number(stream, device))
    ptr = getattr(memory, "ptr", None)
    if not isinstance(ptr, int):
        raise TypeError(f"the {kind} allocator returned {type(memory).__name__}, which has no int ptr")
    if ptr == 0:
        raise MemoryError(f"the {kind} allocator returned no memory for {nbytes} bytes")
    return codecs.Span(ptr, nbytes, memory)


def has_allocator(kind: str) -> bool:
    """Returns whether the user has set an allocator."""
    return _allocators.get(kind) is not None


def gpu_memory(nbytes: int, device: int, stream: int) -> codecs.Span:
    """Allocates GPU memory, with the user's device allocator if one is set."""
    memory = allocate("device", nbytes, stream, device)
    return memory if memory is not None else codecs.Span(*gpu.alloc(nbytes, device, stream)[:3])

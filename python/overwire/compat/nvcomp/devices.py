"""GPUs as Codecs and Arrays see them: which there are, and copies to and from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import codecs, gpu
from . import streams
from .streams import current

if TYPE_CHECKING:
    from .arrays import Array

__all__ = ["HOST", "copy_onto", "current", "gpu_memory", "to_device", "to_host"]

HOST = (1, 0)


def _array_like(array: Array, span: codecs.Span, device: tuple[int, int], stream: int = 1) -> Array:
    copy = type(array)._of(span, array.buffer_size, array._kind, device, stream)
    copy._shape, copy._strides = array._shape, array._strides
    return copy


def gpu_memory(nbytes: int, device: int, stream: int) -> codecs.Span:
    """Memory of a GPU: of the user's device allocator where one is set."""
    memory = streams.allocate("device", nbytes, stream, device)
    return memory if memory is not None else codecs.Span(*gpu.alloc(nbytes, device, stream)[:3])


def to_host(array: Array) -> Array | None:
    """A copy on the host, in memory of the pinned allocator where one is set."""
    if array._strides is not None:
        return None
    nbytes = array.buffer_size
    if nbytes == 0:
        return _array_like(array, codecs.Span(0, 0, None), HOST)
    device = array._device[1]
    span = streams.allocate("pinned", nbytes, array._stream, device)
    if span is None:
        torch = gpu.torch_of()
        span = codecs.span(bytearray(nbytes) if torch is None else torch.empty(nbytes, dtype=torch.uint8))
    gpu.copy(span.address, array._span.address, nbytes, device=device, stream=array._stream)
    return _array_like(array, span, HOST)


def copy_onto(array: Array, address: int, device: int, stream: int, wait: bool = True) -> None:
    """Copies an Array's bytes to an address of a GPU."""
    after = []
    if array._device == (2, device):
        after = [array._stream]
    elif array._device != HOST:  # streams of two devices do not wait for each other here
        gpu.stream_sync(array._stream, array._device[1])
    gpu.copy(address, array._span.address, array.buffer_size, device=device, stream=stream, after=after, wait=wait)


def to_device(array: Array, synchronize: bool = True, stream: int = 0, index: int | None = None) -> Array | None:
    """A copy on a GPU, in memory of the device allocator where one is set; None
    where there is no GPU."""
    if array._strides is not None or gpu.count() == 0:
        return None
    index = current() if index is None else index
    stream = stream or 1
    nbytes = array.buffer_size
    if nbytes == 0:
        return _array_like(array, codecs.Span(0, 0, None), (2, index))
    streams.check_device(stream, index)
    span = gpu_memory(nbytes, index, stream)
    copy_onto(array, span.address, index, stream, synchronize)
    # What has not been read yet stays.
    source = span if synchronize else codecs.Span(span.address, nbytes, (span.keep, array))
    return _array_like(array, source, (2, index), stream)

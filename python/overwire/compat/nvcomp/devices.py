"""Copies between the host and a GPU, by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import codecs
from . import streams

if TYPE_CHECKING:
    from .arrays import Array

__all__ = ["current", "to_device", "to_host"]


def current() -> int:
    """The number of the current device."""
    torch = streams.cuda_torch()
    return int(torch.cuda.current_device()) if torch is not None else 0


class _Interface:
    """Bytes at an address of a GPU, for torch to view."""

    def __init__(self, address: int, nbytes: int, keep: Any) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.keep = keep


def _like(array: Array, span: codecs.Span, device: tuple[int, int]) -> Array:
    made = type(array)._of(span, array.buffer_size, array._kind, device)
    made._shape, made._strides = array._shape, array._strides
    return made


def to_host(array: Array) -> Array | None:
    """A copy on the host, in memory of the pinned allocator where one is set."""
    torch = streams.cuda_torch()
    if torch is None or array._strides is not None:
        return None
    nbytes = array.buffer_size
    if nbytes == 0:
        return _like(array, codecs.Span(0, 0, None), (1, 0))
    with torch.cuda.device(array._device[1]):
        held = torch.as_tensor(_Interface(array._span.address, nbytes, array), device=f"cuda:{array._device[1]}")
        span = streams.allocate("pinned", nbytes, streams.CudaStream.borrow(torch.cuda.current_stream().cuda_stream))
        if span is None:
            copy = held.cpu()
            span = codecs.span(copy)
        else:
            codecs_view = torch.frombuffer(_view(span), dtype=torch.uint8)
            codecs_view.copy_(held)
    return _like(array, span, (1, 0))


def _view(span: codecs.Span) -> Any:
    import ctypes

    block = (ctypes.c_ubyte * span.nbytes).from_address(span.address)
    vars(block)["keep"] = span.keep
    return block


def to_device(array: Array, synchronize: bool = True, stream: int = 0, index: int | None = None) -> Array | None:
    """A copy on a GPU, in memory of the device allocator where one is set."""
    torch = streams.cuda_torch()
    if torch is None or array._strides is not None:
        return None
    index = current() if index is None else index
    nbytes = array.buffer_size
    if nbytes == 0:
        return _like(array, codecs.Span(0, 0, None), (2, index))
    with torch.cuda.device(index):
        on = torch.cuda.ExternalStream(stream) if stream else torch.cuda.current_stream()
        with torch.cuda.stream(on):
            held = torch.frombuffer(_view(array._span), dtype=torch.uint8)
            span = streams.allocate("device", nbytes, streams.CudaStream.borrow(on.cuda_stream, index))
            if span is None:
                copy = held.to(f"cuda:{index}", non_blocking=not synchronize)
                span = codecs.Span(copy.data_ptr(), nbytes, copy)
            else:
                into = torch.as_tensor(_Interface(span.address, nbytes, span.keep), device=f"cuda:{index}")
                into.copy_(held, non_blocking=not synchronize)
        if synchronize:
            on.synchronize()
    made = _like(array, span, (2, index))
    made._stream = int(on.cuda_stream) or 1
    return made

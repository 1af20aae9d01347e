"""Defines Array and BatchArray, which share the memory of other objects without a copy and keep it alive."""

from __future__ import annotations

import contextlib
import ctypes
from math import prod
from types import SimpleNamespace
from typing import Any

from ... import codecs, gpu
from ...errors import ArgumentError
from . import streams
from .dtypes import BYTE, Kind, kind_of, numpy_dtype, typestr
from .enums import ArrayBufferKind
from .streams import HOST, gpu_memory

# Formats of memoryview. Types without a format are exported as bytes.
_FORMATS = {
    (0, 8): "b", (0, 16): "h", (0, 32): "i", (0, 64): "q",
    (1, 8): "B", (1, 16): "H", (1, 32): "I", (1, 64): "Q",
    (2, 16): "e", (2, 32): "f", (2, 64): "d", (6, 8): "?",
}  # fmt: skip


#: The DLPack type and the number of a device.
Device = tuple[int, int]


class Later:
    """The pending result of one stream in a GPU batch."""

    NOT_YET = RuntimeError("not yet")
    __slots__ = ("_at", "_batch", "_keep")

    def __init__(self, batch: gpu.Batch, at: int, keep: Any) -> None:
        self._batch, self._at, self._keep = batch, at, keep

    def error(self, wait: bool) -> BaseException | None:
        """Returns the error, None after success, or NOT_YET while the work is running."""
        errors = self._batch.wait() if wait else self._batch.poll()
        if errors is None:
            return Later.NOT_YET
        error = errors[self._at]
        return error if isinstance(error, BaseException) else None


class Array(codecs.exporter()):  # type: ignore[misc]
    """A view of memory on the host or a GPU, or the result of a Codec.

    It is made from a DLPack capsule, or from an object with `__dlpack__`,
    `__array_interface__`, `__cuda_array_interface__` or the buffer protocol. It shares the memory and keeps it alive.
    Arrays on the host support the buffer protocol. The constructor raises TypeError for other objects.
    """

    def __init__(self, src_object: Any, cuda_stream: int = 0) -> None:
        if isinstance(src_object, Array):
            self.__dict__.update(src_object.__dict__)
            return
        stream = int(cuda_stream) or 1
        span, shape, strides, kind, device, readonly = _describe_memory(src_object, stream)
        self._set_memory(span, shape, strides, kind, device)
        self._readonly = readonly
        self._native = False
        self._stream = self._joined = stream

    def _set_memory(
        self, span: codecs.Span, shape: tuple[int, ...], strides: tuple[int, ...] | None, kind: Kind, device: Device
    ) -> None:
        self._span, self._shape, self._strides, self._kind, self._device = span, shape, strides, kind, device
        self._capacity, self._readonly = span.nbytes, False
        self._native = True  # overwire owns the memory, and a Codec may replace it
        self._pending: BaseException | Later | None = None
        self._stream = 1  # the stream that produces the bytes
        self._joined = 1  # a stream that already waits for the bytes

    def _must_wait(self, stream: int) -> bool:
        """Returns whether a stream must wait before it uses the bytes. The caller must then make the stream wait,
        because the next call for this stream returns False."""
        if self._stream == stream or self._joined == stream:
            return False
        self._joined = stream
        return True

    def _fits_content(self, size: int, kind: Kind, device: Device) -> bool:
        """Returns whether content of this length and type can be decoded into this Array."""
        is_alike = self._span[1] == size and self._kind == kind and self._device == device
        return is_alike and not self._readonly and self._strides is None and len(self._shape) == 1

    @classmethod
    def _of(
        cls, span: codecs.Span, nbytes: int, kind: Kind = BYTE, device: Device = HOST, stream: int = 1
    ) -> Array:
        """Makes a one-dimensional Array of the first nbytes of a span."""
        array = cls.__new__(cls)
        content = codecs.Span(span.address, nbytes, span.keep)
        array._set_memory(content, (nbytes // (kind[1] * kind[2] // 8),), None, kind, device)
        array._capacity = span.nbytes
        array._stream = array._joined = stream
        return array

    def _wait_until_ready(self, wait: bool = True) -> None:
        """Raises the decoding error, if there is one and it was not raised before. wait: whether to wait for a GPU that
        is still decoding; otherwise a later call raises the error."""
        pending = self._pending
        if pending is None:
            return
        error = pending.error(wait) if isinstance(pending, Later) else pending
        if error is not Later.NOT_YET:
            self._pending = None
            if error is not None:
                raise error

    def _pending_error(self) -> BaseException | None:
        """Returns the error that `_wait_until_ready` would raise, or None, without consuming it."""
        return self._pending.error(True) if isinstance(self._pending, Later) else self._pending

    @property
    def buffer_kind(self) -> ArrayBufferKind:
        """The kind of memory: on a GPU or on the host."""
        return ArrayBufferKind.STRIDED_HOST if self._device == HOST else ArrayBufferKind.STRIDED_DEVICE

    @property
    def buffer_size(self) -> int:
        """The number of bytes."""
        return self._span.nbytes

    @property
    def capacity(self) -> int:
        """The number of allocated bytes, at least buffer_size."""
        return self._capacity

    @property
    def dtype(self) -> Any:
        """The numpy dtype. bfloat16 and float8 come from ml_dtypes."""
        return numpy_dtype(self._kind)

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return self._kind[1] * self._kind[2] // 8

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._shape)

    @property
    def precision(self) -> int:
        """Significant bits of an element; 0 means all."""
        return 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension."""
        return self._shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self._shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along each dimension. As in nvCOMP, the strides in the array interfaces are None for
        a dense array in C order."""
        if self._strides is not None:
            return self._strides
        return tuple(s * self.item_size for s in _dense_strides(self._shape))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        if self._device != HOST:
            raise AttributeError("__array_interface__: the Array is on a GPU")
        self._wait_until_ready()
        return self._cuda_interface()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self._wait_until_ready(self._device == HOST)  # on a GPU the consumer's stream waits
        return self._cuda_interface() | {"stream": self._stream}

    def _cuda_interface(self) -> dict[str, Any]:
        about = {"shape": self._shape, "typestr": typestr(self._kind), "strides": self._strides, "version": 3}
        return {**about, "data": (self._span.address, False)}

    def to_dlpack(self, cuda_stream: Any = None) -> Any:
        """Returns a DLPack capsule of the same memory. The capsule keeps the memory alive.

        cuda_stream: for GPU memory, the consumer's stream, which will wait for the Array. None means the default
        stream, and -1 that no stream waits. Raises BufferError if the strides are not multiples of the element size.
        """
        self._wait_until_ready(self._device == HOST)
        if self._device != HOST and cuda_stream != -1:
            gpu.follow(int(getattr(cuda_stream, "ptr", cuda_stream) or 1), self._stream, device=self._device[1])
        item = self.item_size
        strides = _dense_strides(self._shape) if self._strides is None else tuple(s // item for s in self._strides)
        if self._strides is not None and any(s % item for s in self._strides):
            why = "which are not multiples of the element size"
            raise BufferError(f"DLPack cannot express the Array's strides of {self._strides} bytes, {why}")
        return codecs.dlpack(self, self._span.address, self._shape, strides, self._kind, self._device)

    def __dlpack__(
        self, stream: Any = None, *, copy: bool | None = None, dl_device: Any = None, max_version: Any = None
    ) -> Any:
        if copy or (dl_device is not None and tuple(dl_device) != self._device):
            raise BufferError("an Array is only exported without a copy, and on its own device")
        if self._readonly:
            raise BufferError("the Array is read-only, which this version of DLPack cannot express")
        return self.to_dlpack(stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def _buffer(self) -> memoryview:
        if self._device != HOST:
            raise BufferError("the Array is on a GPU: use cpu()")
        self._wait_until_ready()
        letter = _FORMATS.get(self._kind[:2])
        nbytes = self._span.nbytes
        if letter is not None and (self._strides is not None or letter == "e" or nbytes == 0):
            # memoryview cannot cast to float16 or to empty shapes, so numpy makes the view.
            with contextlib.suppress(ImportError):
                import numpy

                # Passes the interface instead of the Array, because numpy would otherwise call this method again.
                data = (self._span.address, self._readonly)
                exporter = SimpleNamespace(__array_interface__=self._cuda_interface() | {"data": data}, keep=self)
                return memoryview(numpy.asarray(exporter))  # type: ignore[arg-type,unused-ignore]
            letter = None
        if self._strides is not None:
            raise BufferError("the Array is not dense: install numpy to export it")
        view: Any
        if nbytes == 0:
            view = memoryview(bytearray())
        else:
            block = (ctypes.c_ubyte * nbytes).from_address(self._span.address)
            vars(block)["keep"] = self._span.keep
            view = memoryview(block).cast("B")
            if letter is not None and (letter != "B" or len(self._shape) != 1):
                view = view.cast(letter, self._shape)
        return view.toreadonly() if self._readonly else view  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return self._shape[0] if self._shape else 0

    def cpu(self) -> Array | None:
        """Returns the Array itself if it is on the host, otherwise a copy on the host, or None if the Array is not
        dense. Raises an error of decoding on the GPU if it was not raised before."""
        self._wait_until_ready()
        return self if self._device == HOST else self._copy_to_host()

    def cuda(self, synchronize: bool = True, cuda_stream: int = 0) -> Array | None:
        """Returns the Array itself if it is on a GPU, otherwise a copy on a GPU, or None without a GPU."""
        self._wait_until_ready(self._device == HOST)
        return self if self._device != HOST else self._copy_to_device(synchronize, int(cuda_stream))

    def _with_span(self, span: codecs.Span, device: tuple[int, int], stream: int = 1) -> Array:
        """Makes an Array of the same type and shape in other memory."""
        array = type(self)._of(span, self.buffer_size, self._kind, device, stream)
        array._shape, array._strides = self._shape, self._strides
        return array

    def _copy_to_host(self) -> Array | None:
        """Copies the Array to the host, in memory of the pinned allocator if one is set."""
        if self._strides is not None:
            return None
        nbytes = self.buffer_size
        if nbytes == 0:
            return self._with_span(codecs.Span(0, 0, None), HOST)
        device = self._device[1]
        span = streams.allocate("pinned", nbytes, self._stream, device)
        if span is None:
            torch = gpu.torch_of()
            span = codecs.span(bytearray(nbytes) if torch is None else torch.empty(nbytes, dtype=torch.uint8))
        gpu.copy(span.address, self._span.address, nbytes, device=device, stream=self._stream)
        return self._with_span(span, HOST)

    def _copy_onto(self, address: int, device: int, stream: int, wait: bool = True) -> None:
        """Copies the bytes to an address on a GPU."""
        after = []
        if self._device == (2, device):
            after = [self._stream]
        elif self._device != HOST:  # a stream cannot wait for a stream of another device
            gpu.stream_sync(self._stream, self._device[1])
        gpu.copy(address, self._span.address, self.buffer_size, device=device, stream=stream, after=after, wait=wait)

    def _copy_to_device(self, synchronize: bool = True, stream: int = 0, index: int | None = None) -> Array | None:
        """Copies the Array to a GPU, in memory of the device allocator if one is set. Returns None without a GPU."""
        if self._strides is not None or gpu.count() == 0:
            return None
        index = streams.current() if index is None else index
        stream = stream or 1
        nbytes = self.buffer_size
        if nbytes == 0:
            return self._with_span(codecs.Span(0, 0, None), (2, index))
        streams.check_device(stream, index)
        span = gpu_memory(nbytes, index, stream)
        self._copy_onto(span.address, index, stream, synchronize)
        # Keeps this Array alive until the copy is done.
        source = span if synchronize else codecs.Span(span.address, nbytes, (span.keep, self))
        return self._with_span(source, (2, index), stream)


class BatchArray(list):  # type: ignore[type-arg]
    """A list of Arrays. `encode` and `decode` return a BatchArray for a list."""

    @property
    def buffer_sizes(self) -> list[int]:
        """The number of bytes of each Array."""
        return [a.buffer_size for a in self]

    def cpu(self) -> BatchArray:
        """Returns a batch with all Arrays on the host, or this batch if they are already there."""
        arrays = [a.cpu() for a in self]
        return self if all(a is b for a, b in zip(self, arrays, strict=True)) else BatchArray(arrays)

    def cuda(self, synchronize: bool = True, cuda_stream: int = 0) -> BatchArray | None:
        """Returns a batch with all Arrays on a GPU, or None without a GPU."""
        arrays = [a.cuda(synchronize, cuda_stream) for a in self]
        if any(a is None for a in arrays):
            return None
        return self if all(a is b for a, b in zip(self, arrays, strict=True)) else BatchArray(arrays)


def as_array(source: Any, cuda_stream: int = 0) -> Array:
    """Makes an Array that shares the source's memory; see Array."""
    return Array(source, cuda_stream)


def as_arrays(sources: Any, *args: Any, cuda_stream: int = 0, **named: Any) -> BatchArray:
    """Makes an Array of each source, `as_arrays(list, cuda_stream=0)`, or of parts of one source, `as_arrays(buffer,
    offsets, sizes, cuda_stream=0)`. Offsets and sizes count bytes.

    Raises ValueError for a part outside of the buffer.
    """
    if isinstance(sources, (list, tuple)) and not named and len(args) < 2:
        stream = int(args[0]) if args else cuda_stream
        return BatchArray(Array(s, stream) for s in sources)
    offsets, sizes = (*args, *(named.pop(k) for k in ("offsets", "sizes") if k in named))[:2]
    if named:
        raise TypeError(f"as_arrays: unexpected {', '.join(named)}")
    whole = Array(sources, int(args[2]) if len(args) > 2 else cuda_stream)
    if len(offsets) != len(sizes):
        raise ValueError(f"as_arrays: {len(offsets)} offsets and {len(sizes)} sizes")
    return BatchArray(_part_of(whole, at, n) for at, n in zip(offsets, sizes, strict=True))


def _part_of(whole: Array, at: int, n: int) -> Array:
    item = whole.item_size
    if at < 0 or n < 0 or at + n > whole.buffer_size or n % item or whole._strides is not None:
        size = f"the buffer has {whole.buffer_size}, with {item} per element"
        raise ValueError(f"as_arrays: invalid part of {n} bytes at {at}: {size}")
    span = codecs.Span(whole._span.address + at, n, whole)
    part = Array._of(span, n, whole._kind, whole._device)
    part._readonly, part._native = whole._readonly, False
    return part


def from_dlpack(source: Any, cuda_stream: int = 0) -> Array:
    """Makes an Array that shares the memory of a DLPack capsule or of an object with `__dlpack__`."""
    if not hasattr(source, "__dlpack__") and type(source).__name__ != "PyCapsule":
        raise TypeError(f"from_dlpack: {type(source).__name__} is not a DLPack capsule and has no __dlpack__")
    return Array(source, cuda_stream)


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


MemoryDescription = tuple[codecs.Span, tuple[int, ...], "tuple[int, ...] | None", Kind, tuple[int, int], bool]


def _describe_memory(source: Any, stream: int) -> MemoryDescription:
    """Describes an object's memory through the first protocol that it supports."""
    if type(source).__name__ == "PyCapsule":
        return _from_view(codecs.tensor_view(source))
    if hasattr(source, "__dlpack__"):
        try:
            return _from_view(codecs.tensor_view(source, stream))
        except (BufferError, TypeError, RuntimeError, ArgumentError):
            if not hasattr(source, "__array_interface__") and not hasattr(source, "__cuda_array_interface__"):
                raise
    interface = getattr(source, "__array_interface__", None)
    device = HOST
    if interface is None:
        interface = getattr(source, "__cuda_array_interface__", None)
        if interface is not None:
            device = _interface_device(interface, stream)
    if interface is not None:
        return _from_interface(source, interface, device)
    try:
        view = memoryview(source)
    except TypeError:
        lacks = "has no __dlpack__, __array_interface__, __cuda_array_interface__ or buffer"
        raise TypeError(f"{type(source).__name__} {lacks}") from None
    span = codecs.span(source)
    letter = view.format.lstrip("@=<") or "B"
    kind = next(((code, bits, 1) for (code, bits), f in _FORMATS.items() if f == letter), None)
    if kind is None or kind[1] // 8 != view.itemsize:
        return span, (span.nbytes,), None, (1, 8, 1), HOST, view.readonly
    return span, tuple(view.shape or ()), None, kind, HOST, view.readonly


def _from_view(tensor: codecs.TensorView) -> MemoryDescription:
    item = tensor.kind[1] * tensor.kind[2] // 8
    if item == 0:
        raise ValueError(f"elements of {tensor.kind[1]} bits are not supported: they do not fill whole bytes")
    strides = tensor.strides
    if strides is not None and (0 in tensor.shape or _is_dense(tensor.shape, strides)):
        strides = None
    nbytes = prod(tensor.shape) * item
    device = HOST if tensor.device[0] in (1, 3) else (2, tensor.device[1])
    if tensor.device[0] not in (1, 2, 3, 13):
        raise ValueError(f"the DLPack tensor has device type {tensor.device[0]}: expected the host (1) or CUDA (2)")
    span = codecs.Span(tensor.address, nbytes, tensor.keep)
    return span, tensor.shape, strides and tuple(s * item for s in strides), tensor.kind, device, False


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Returns whether strides (in elements) are those of a dense array."""
    return all(extent == 1 or a == b for extent, a, b in zip(shape, strides, _dense_strides(shape), strict=True))


def _interface_device(interface: dict[str, Any], stream: int) -> tuple[int, int]:
    """Returns the device of a CUDA array interface's memory. Makes the stream wait for the producer's stream."""
    address = int(interface["data"][0] or 0) if interface.get("data") is not None else 0
    number = gpu.device_of(address) if address else streams.current()
    if number < 0:
        return HOST  # nvCOMP's host Arrays also have this interface
    if interface.get("stream"):
        gpu.follow(stream, int(interface["stream"]), device=number)
    return 2, number


def _from_interface(source: Any, interface: dict[str, Any], device: tuple[int, int]) -> MemoryDescription:
    text = interface["typestr"]
    try:
        kind = kind_of(text)
    except ValueError:
        kind = kind_of(source.dtype) if hasattr(source, "dtype") else (1, 8 * int(text[2:]), 1)
    shape = tuple(int(n) for n in interface["shape"])
    item = kind[1] * kind[2] // 8
    data = interface.get("data")
    if data is None:
        raise TypeError("the array interface has no address")
    strides = interface.get("strides")
    if strides is not None and (0 in shape or _is_dense(shape, tuple(s / item for s in strides))):
        strides = None
    span = codecs.Span(int(data[0] or 0), prod(shape) * item, source)
    return span, shape, strides and tuple(strides), kind, device, bool(data[1])

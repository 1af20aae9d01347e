"""Prepares a Codec's sources and outputs, and moves results to their outputs."""

from __future__ import annotations

from typing import Any

from ... import codecs, gpu
from ..._compat_api import apart
from ...errors import ArgumentError, NotSupportedError
from . import streams
from .arrays import Array, BatchArray
from .dtypes import Kind, elements


def as_list(source: Any) -> tuple[bool, list[Array]]:
    many = isinstance(source, (list, tuple))
    return many, [one if isinstance(one, Array) else Array(one) for one in (source if many else [source])]


def check_dense(array: Array) -> None:
    """Raises ValueError for an Array that is not contiguous."""
    if array._strides is not None:
        raise ValueError(f"the Array is not contiguous: its strides are {array._strides}")


def check_out(out: Array) -> None:
    """Raises ValueError if an `out` is not contiguous or not writable."""
    if out._readonly:
        raise ValueError("out is read-only")
    if out._strides is not None:
        raise ValueError("out is not contiguous")


def on_host(array: Array) -> Array:
    check_dense(array)
    host = array.cpu()
    if host is None:
        raise NotSupportedError("overwire: nvcomp: the Array is on a GPU, and its memory cannot be copied to the host")
    return host


def prepare_outputs(out: Any, many: bool, sources: list[Array], stream: int) -> list[Array | None] | None:
    """Returns the Arrays of `out`, ready for a stream. Raises ArgumentError if they overlap each other or a source."""
    if out is None:
        return None
    if many and (not isinstance(out, (list, tuple)) or len(out) != len(sources)):
        raise ValueError(f"out: expected a list of {len(sources)} buffers")
    arrays = [o if o is None or isinstance(o, Array) else Array(o, stream) for o in (out if many else [out])]
    targets = [a for a in arrays if a is not None]
    if len({id(a) for a in targets}) < len(targets):
        raise ArgumentError("overwire: nvcomp: out: two results have the same Array: pass a different Array for each")
    apart([a._span for a in sources], [(a._span.address, a._capacity) for a in targets])
    return arrays


def with_kind(made: Any, kind: Kind) -> Any:
    """Sets the element type of an Array of bytes, or of each Array of a batch."""
    for array in made if isinstance(made, BatchArray) else [made]:
        array._kind, array._shape, array._strides = kind, (elements(array.buffer_size, kind),), None
    return made


def span_of(array: Array | None, need: int) -> codecs.Span | None:
    """Returns the memory of an `out`, or None if new memory is needed: without an `out`, for a Codec's own Array that
    is too small, and for a result that is then copied to a GPU."""
    if array is None:
        return None
    check_out(array)
    if array._device != streams.HOST:
        return None
    if not array._native:
        return codecs.Span(array._span.address, array.buffer_size, array)
    return codecs.Span(array._span.address, array.capacity, array._span.keep) if array.capacity >= need else None


def place_result(
    coded: codecs.Coded, span: codecs.Span | None, out: Array | None, kind: Kind, device: int | None, stream: int
) -> Array:
    elements(coded.nbytes, kind)
    is_in_place = span is not None
    if span is None:
        span = codecs.Span(coded.address, coded.nbytes, coded.memory)
    array = Array._of(span, coded.nbytes, kind)
    if out is not None and not out._native:
        if is_in_place:
            array._native = False
            return array
        return _copy_onto(array, out, stream)
    if device is not None:
        result = array._copy_to_device(index=device, stream=stream)
        array = result if result is not None else array
    if out is None:
        return array
    out.__dict__.update(array.__dict__)
    return out


def _copy_onto(made: Array, out: Array, stream: int) -> Array:
    """Copies a result into the caller's GPU memory."""
    nbytes, device = made.buffer_size, out._device[1]
    if out.buffer_size < nbytes:
        raise ValueError(f"out has {out.buffer_size} bytes, {nbytes} are needed")
    if out._stream != stream:
        gpu.follow(stream, out._stream, device=device)
    if nbytes:
        made._copy_onto(out._span.address, device, stream)
    target = Array._of(codecs.Span(out._span.address, out.buffer_size, out), nbytes, made._kind, out._device, stream)
    target._native = False
    return target

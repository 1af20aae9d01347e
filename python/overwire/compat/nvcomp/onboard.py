"""Decodes and encodes on a GPU with kernels, on the caller's CUDA stream. Compressed streams that are on the host are
copied to the GPU unchanged. Decoding does not wait if the caller passes the sizes of the contents. X16 encoding waits
once, for the compressed sizes."""

from __future__ import annotations

from collections.abc import Sequence

from ... import codecs, gpu
from . import streams
from .arrays import Array, Later
from .dtypes import BYTE, Kind
from .placing import check_out

# The content of one stream: its size, the bytes of a chunk, and the algorithm.
Shape = tuple[int, int, str]

# _MOST_CHUNK: the largest chunk of overwire's encoders. _RATIO: the most content bytes per stream byte.
_MOST_CHUNK = 16 << 20
_RATIO = {"LZ4": 255, "Snappy": 32, "Cascaded": 512, "X16": 1 << 20}


def shape_of(array: Array, algorithm: str, bitstream: str, stream: int) -> Shape | None:
    """Reads the header of a compressed stream on a GPU, after the work queued on the CUDA stream `stream`.
    Returns None if only the host can read the header or report its error."""
    peeks = _peek_all([array], algorithm, bitstream, array._device[1], stream)
    return peeks[0] if peeks is not None else None


def _peek_all(arrays: Sequence[Array], algorithm: str, bitstream: str, device: int, stream: int) -> list[Shape] | None:
    if bitstream != "native" and (not algorithm or (bitstream == "raw" and algorithm not in ("X16", "Snappy"))):
        return None
    after = {a._stream for a in arrays if a._must_wait(stream)}
    where = [(a._span.address, a._span.nbytes) for a in arrays]
    rows = gpu.glance(device, stream, where, algorithm or None, bitstream=bitstream, after=tuple(after))
    shapes = []
    for array, row in zip(arrays, rows, strict=True):
        name = row.algorithm or ""
        most = array._span.nbytes * _RATIO.get(name, 1 << 40)
        if name == "X16" and bitstream != "native":
            most = _MOST_CHUNK
        if row.error is not None or row.size > most or row.chunk > _MOST_CHUNK:
            return None
        shapes.append((row.size, row.chunk if bitstream == "native" and row.size else max(row.size, 1), name))
    return shapes


def decode(
    arrays: Sequence[Array],
    shapes: Sequence[Shape] | None,
    algorithm: str,
    bitstream: str,
    kind: Kind,
    outs: Sequence[Array | None] | None,
    device: int,
    stream: int,
) -> list[Array] | None:
    """Queues the decoding of Arrays that are on the device, and returns Arrays for their
    contents. Returns None, without decoding, if kernels do not support the compressed streams.
    If `shapes` is None, the function first reads the headers of these streams, and waits for them.

    Raises ValueError if an `out` is too small or read-only.
    """
    if shapes is None and (shapes := _peek_all(arrays, algorithm, bitstream, device, stream)) is None:
        return None
    name = shapes[0][2]
    if name not in gpu.algorithms():
        return None
    item = kind[1] * kind[2] // 8
    x16 = name == "X16"
    # Kernels need streams that begin `lead` bytes before a multiple of `step`.
    step, lead = (16 if x16 else 8), (8 if x16 and bitstream == "raw" else 0 if x16 or bitstream == "native" else None)
    where = (2, device)
    outputs: list[Array] = []
    rows = []
    sources: list[Array] = []
    after: list[int] = []
    for i, (array, (size, chunk, algorithm)) in enumerate(zip(arrays, shapes, strict=True)):
        nbytes = array._span[1]
        if algorithm != name or nbytes == 0 or (x16 and chunk % 16 and chunk < size):
            return None
        if size % item:
            raise ValueError(f"{size} bytes are not a whole number of elements of {kind[1]} bits")
        out = None if outs is None else outs[i]
        if out is not None and out._fits_content(size, kind, where):
            result = out  # decodes into `out` without a copy
        elif out is not None and not out._native and out._device != where:
            return None
        else:
            result = _output_for(out, size, kind, device, stream)
        source = array if lead is None else _aligned_to(array, step, lead, device, stream)
        src, dst = source._span[0], result._span[0]
        if x16 and dst % 16:
            return None
        if source._must_wait(stream):
            after.append(source._stream)
        if result._must_wait(stream):
            after.append(result._stream)
        outputs.append(result)
        sources.append(source)
        rows.append((src, nbytes, dst, size, chunk))
    batch = gpu.decode(device, stream, rows, name, bitstream=bitstream, after=list(dict.fromkeys(after)))
    for i, result in enumerate(outputs):
        result._stream = result._joined = stream
        # A source that belongs to another stream must stay alive until it is read.
        result._pending = Later(batch, i, sources[i] if after else None)
    return outputs


def encode(
    arrays: Sequence[Array],
    names: Sequence[str | None],
    bitstream: codecs.Bitstream,
    chunk: int,
    outs: Sequence[Array | None] | None,
    device: int,
    stream: int,
) -> list[Array] | None:
    """Encodes Arrays on the device to X16. names: the safetensors dtype of each Array, or None. Returns None if the
    kernels do not support an Array."""
    native = bitstream == "native"
    contents = []
    sources = []
    outputs: list[Array] = []
    after: list[int] = []
    for i, (array, name) in enumerate(zip(arrays, names, strict=True)):
        size = array._span.nbytes
        step = chunk if native else max(size, 1)
        if step > _MOST_CHUNK or (size > step and step % 16):
            return None
        out = None if outs is None else outs[i]
        if out is not None and not out._native and out._device != (2, device):
            return None
        bound = codecs.max_size(size, "X16", bitstream=bitstream, chunk_size=chunk if native else None)
        how = _transform_of(array, name, device, stream)
        room = _output_for(out, bound, BYTE, device, stream, exact=False)
        if room._span.address % 16:
            return None
        if room._must_wait(stream):
            after.append(room._stream)
        outputs.append(room)
        source = _aligned_to(array, 16, 0, device, stream)
        if source._must_wait(stream):
            after.append(source._stream)
        contents.append((source._span.address, size, room._span.address, room._capacity, step, how))
        sources.append(source)  # keep it alive until it is read
    batch = gpu.encode(device, stream, contents, bitstream=bitstream, after=list(dict.fromkeys(after)))
    for result, size_or_error in zip(outputs, batch.wait(), strict=True):
        if not isinstance(size_or_error, int):
            assert size_or_error is not None
            raise size_or_error
        result._span = codecs.Span(result._span.address, size_or_error, result._span.keep)
        result._shape = (size_or_error,)
        result._stream = result._joined = stream
    return outputs


# The size of the sample from which a transform is chosen if the type does not determine it.
_SAMPLE = 256 << 10


def _transform_of(array: Array, name: str | None, device: int, stream: int) -> int:
    transform = gpu.transform(name)
    if transform is None:
        size = array._span.nbytes
        if not (n := min(size, _SAMPLE)):
            return 0
        sample = bytearray(n)
        at = array._span.address + ((size - n) // 2 & ~15)
        after = [array._stream] if array._must_wait(stream) else []
        gpu.copy(codecs.span(sample).address, at, n, device=device, stream=stream, after=after)
        transform = gpu.transform(name, sample)
    return transform or 0


def _output_for(given: Array | None, size: int, kind: Kind, device: int, stream: int, exact: bool = True) -> Array:
    """Returns the Array for a content: a new Array, or one in the memory of `given`. If that memory is too small, a
    `given` that a Codec made gets new memory. Any other `given` raises ValueError if `exact` is set. Otherwise size is
    only an upper bound."""
    if given is None:
        return Array._of(streams.gpu_memory(size, device, stream), size, kind, (2, device), stream)
    check_out(given)
    native = given._native
    capacity = given._capacity if native else given._span.nbytes
    before = given._stream, given._joined
    if native and (capacity < size or given._device != (2, device)):
        span, capacity, before = streams.gpu_memory(size, device, stream), size, (stream, stream)
    elif capacity < size and exact:
        raise ValueError(f"out has {capacity} bytes, {size} are needed")
    else:
        span = codecs.Span(given._span.address, capacity, given._span.keep if native else given)
    array = Array._of(span, min(size, capacity), kind, (2, device))
    array._stream, array._joined = before
    if native:
        given.__dict__.update(array.__dict__)
        return given
    array._native = False
    return array


def _aligned_to(array: Array, step: int, lead: int, device: int, stream: int) -> Array:
    """Returns `array` if it begins `lead` bytes before a multiple of `step`, otherwise a copy that does."""
    if (array._span[0] + lead) % step == 0:
        return array
    nbytes = array._span.nbytes
    room = streams.gpu_memory(nbytes + step, device, stream)
    at = room.address + (-(room.address + lead)) % step
    array._copy_onto(at, device, stream, wait=False)
    return Array._of(codecs.Span(at, nbytes, (room.keep, array)), nbytes, device=(2, device), stream=stream)

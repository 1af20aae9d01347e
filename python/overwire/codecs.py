"""Encodes and decodes batches of buffers on all cores, with X16 and open algorithms.

    from overwire import codecs

    stored = codecs.encode(weights, "X16")              # a memoryview
    plain = codecs.decode(stored)                       # bytes of the same length
    many = codecs.encode([a, b, c], "Zstd", bitstream="raw")

`bitstream` is the framing of a block. "native" is a container of independent chunks, with the algorithm and the length
in its header. "raw" is a single block without a header, which lz4, zstandard, zlib, python-snappy and nvCOMP can read.
"with_size" is the content length, little-endian in 8 bytes (for LZ4 in 4, as in numcodecs), followed by a raw block.
Native streams are overwire's own format. Native streams of nvCOMP 2.2 can also be read (docs/nvcomp.md).

Streams may be untrusted. Before memory is allocated, a stated length is compared
with the largest length that the stored bytes can decode to. A decoder fills exactly that
length or raises CorruptError. Calls release the GIL, and Ctrl-C interrupts them.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

from . import _engine
from ._apart import apart
from ._undo import after_error
from ._verbs import codec, codec_names, codec_now
from .errors import ArgumentError, NotSupportedError, error_of
from .jobs import Job

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._core import Result

__all__ = [
    "BITSTREAMS", "Coded", "TensorView", "Span", "algorithms", "content_size", "decode", "default_chunk", "dlpack",
    "encode", "exporter", "is_native", "tensor_view", "max_size", "run", "span",
]  # fmt: skip

Bitstream = Literal["native", "raw", "with_size"]
Verify = Literal[True, False, "always"]

#: The bitstream kinds, in the order of nvCOMP's BitstreamKind.
BITSTREAMS: tuple[Bitstream, ...] = ("native", "raw", "with_size")

_VERIFY = {False: "", True: "present", "always": "always"}


class Span(NamedTuple):
    """Host memory: `nbytes` bytes at `address`. `keep` owns the memory: keep this object as long as you use the
    memory."""

    address: int
    nbytes: int
    keep: Any


class Coded(NamedTuple):
    """The result for one buffer; see `run`.

    `memory` is a DLPack capsule of uint8 that owns `nbytes` bytes at `address`. It is None
    if the caller gave an output, if there are no bytes, or if the buffer failed before
    memory was allocated. `error` is the error that `encode` or `decode` would raise; if it is
    set, the bytes are invalid. `summed`: whether checksums were compared.
    """

    memory: Any
    address: int
    nbytes: int
    error: BaseException | None
    summed: bool


class TensorView(NamedTuple):
    """The memory of a DLPack tensor; see `tensor_view`. `strides` count elements and are None for a dense tensor.
    `kind` is (code, bits, lanes). `device` is (type, number); type 1 is the host and 2 is CUDA."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    kind: tuple[int, int, int]
    device: tuple[int, int]
    keep: Any


def algorithms() -> tuple[str, ...]:
    """Returns the algorithm names that `encode` and `decode` accept. Their case does not matter."""
    return tuple(codec_names())


def default_chunk(algorithm: str) -> int:
    """Returns the default `chunk_size` of `encode`: the content bytes of a native chunk."""
    return 1 << 20 if algorithm == "X16" else 64 << 10


def span(source: Any, *, writable: bool = False) -> Span:
    """Returns the memory of a host buffer without a copy. The source must support Python's
    buffer protocol or DLPack, and be dense in C order. A Span is returned unchanged.

    Raises ArgumentError for a source that supports neither, is not dense, or is read-only although `writable` is set,
    and NotSupportedError for GPU memory.
    """
    if isinstance(source, Span):
        return source
    try:
        return Span(*_engine.buffer_of(source, writable))
    except TypeError:
        pass  # the source does not support the buffer protocol
    except (BufferError, ValueError) as error:  # numpy raises ValueError if the array is not dense
        raise ArgumentError(f"overwire: {type(source).__name__}: {error}") from error
    is_dlpack = hasattr(source, "__dlpack__")
    # DLPack's device types 1 and 3: host memory, and pinned host memory.
    if source.__dlpack_device__()[0] not in (1, 3) if is_dlpack else hasattr(source, "__cuda_array_interface__"):
        why = f"{type(source).__name__} is on a GPU, and codecs work on host memory: move it to the host"
        raise NotSupportedError(f"overwire: {why}, or see overwire.gpu and overwire.compat.nvcomp")
    if not is_dlpack:
        raise ArgumentError(f"overwire: {type(source).__name__} is not a buffer or a DLPack tensor")
    tensor = tensor_view(source)
    size = tensor.kind[1] * tensor.kind[2]
    dense = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.strides or tensor.shape), strict=True):
        if tensor.strides is not None and extent > 1 and stride != dense:
            raise ArgumentError("overwire: the tensor is not dense: make it contiguous")
        dense *= extent
    return Span(tensor.address, dense * size // 8, tensor.keep)


def tensor_view(source: Any, stream: int = 1) -> TensorView:
    """Takes ownership of a DLPack tensor: a new capsule, or an object with `__dlpack__`.

    stream: the CUDA stream that will use a GPU tensor (1: the default stream).

    Raises ArgumentError for a capsule that was already taken.
    """
    if not hasattr(source, "__dlpack__"):
        capsule = source
    elif hasattr(source, "__dlpack_device__") and source.__dlpack_device__()[0] == 2:
        capsule = source.__dlpack__(stream=stream)
    else:
        capsule = source.__dlpack__()
    try:
        return TensorView(*_engine.open_library().dlpack_take(capsule))
    except ValueError as error:
        raise ArgumentError(f"overwire: {error}") from error


def dlpack(
    owner: Any,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    kind: tuple[int, int, int],
    device: tuple[int, int],
) -> Any:
    """Makes a DLPack capsule ("dltensor") for memory that `owner` owns. The capsule keeps the
    owner alive. The other arguments are the fields of `TensorView`."""
    return _engine.open_library().dlpack_give(owner, address, shape, strides, kind, device)


def exporter() -> type:
    """Returns a base class that implements the buffer protocol in all versions of Python. An
    instance exports the result of its method `_buffer()`."""
    kind: type = _engine.open_library().Exporter
    return kind


@lru_cache(64)
def _spec_text(cascaded: tuple[Any, ...] | None, **spec: Any) -> str:
    """Returns the JSON of a request (NvcompSpec)."""
    layers = None if cascaded is None else dict(zip(("rles", "deltas", "pack"), cascaded, strict=True))
    return json.dumps({**spec, "cascaded": layers})


def run(
    op: str,
    sources: Sequence[Span],
    *,
    algorithm: str | None = None,
    bitstream: Bitstream = "native",
    chunk_size: int | None = None,
    level: int = 1,
    dtype: str | None = None,
    cascaded: tuple[int, int, bool] | None = None,
    checksums: bool = False,
    verify: bool | str = False,
    out: Sequence[Span | None] | None = None,
    sizes: Sequence[int] = (),
) -> list[Coded]:
    """Implements `encode`, `decode`, `content_size` and `max_size`. Returns one `Coded`
    per source, with that source's error.

    `op` is "encode", "decode", "size" or "bound". `out` has an output for each source,
    or None for new memory. "bound" takes `sizes` and no sources. Errors about the whole
    call are raised before anything is written: ArgumentError (including if an output
    overlaps another output or a source), OutOfMemoryError.
    """
    if bitstream not in BITSTREAMS:
        raise ArgumentError(f"overwire: bitstream {bitstream!r}: expected one of {', '.join(BITSTREAMS)}")
    arguments: list[tuple[str, Any, type]] = [("algorithm", algorithm, str), ("dtype", dtype, str)]
    arguments += [("chunk_size", chunk_size, int), ("level", level, int), ("checksums", checksums, bool)]
    for what, value, kind in arguments:
        if value is not None and not isinstance(value, kind):
            raise ArgumentError(f"overwire: {what} {value!r}: expected {kind.__name__}")
    if cascaded is not None and (not isinstance(cascaded, Sequence) or len(cascaded) != 3):
        raise ArgumentError(f"overwire: cascaded {cascaded!r}: expected two numbers and a bool")
    if not isinstance(verify, (bool, str)) or verify not in _VERIFY:
        raise ArgumentError(f"overwire: verify {verify!r}: expected True, False or 'always'")
    text = _spec_text(
        None if cascaded is None else tuple(cascaded), op=op, algorithm=algorithm or "",
        kind=BITSTREAMS.index(bitstream), chunk=chunk_size or 0, level=level, dtype=dtype or "", sums=checksums,
        verify=_VERIFY[verify], sizes=tuple(sizes),
    )  # fmt: skip
    outs = out if out is not None else [None] * len(sources)
    apart(sources, [o for o in outs if o is not None])
    numbers: list[int] = []
    for s, o in zip(sources, outs, strict=True):
        numbers += (s.address, s.nbytes, 0, 0, 0) if o is None else (s.address, s.nbytes, 1, o.address, o.nbytes)
    operands = struct.pack(f"={len(numbers)}q", *numbers)
    results = codec_now(text, operands)
    if results[1]:
        return _coded_of(results)
    job = Job(codec(text, operands), f"codec {op}")
    with after_error(job.abandon):  # after `abandon`, nothing writes to the buffers
        return _coded_of(job.result())


def _coded_of(made: Result) -> list[Coded]:
    text, numbers, capsules, _, _ = made
    flat = memoryview(numbers).cast("q")
    columns = zip(capsules, flat[1::3], flat[2::3], flat[3::3], strict=True)
    rows = [Coded(capsule, address, size, None, checksum != 0) for capsule, address, size, checksum in columns]
    for at, fields in (json.loads(text) or {}).items() if text else ():
        rows[int(at)] = rows[int(at)]._replace(error=error_of(fields))
    return rows


def _bytes_at(address: int, nbytes: int, keep: Any) -> memoryview:
    if not nbytes:
        return memoryview(bytearray())
    block = (ctypes.c_ubyte * nbytes).from_address(address)
    vars(block)["memory"] = keep  # keep it alive as long as any view of the block
    return memoryview(block).cast("B")


def _written_part(out: Any, place: Span, nbytes: int) -> memoryview:
    """Returns the written part of an output: a buffer, a DLPack tensor or a Span."""
    try:
        return memoryview(out).cast("B")[:nbytes]
    except TypeError:
        return _bytes_at(place.address, nbytes, place.keep)


def _results_of(sources: Any, out: Any, op: str, **spec: Any) -> Any:
    many = isinstance(sources, (list, tuple)) and not isinstance(sources, Span)
    spans = [span(s) for s in (sources if many else [sources])]
    targets = out if many and out is not None else [out] * len(spans)
    if not isinstance(targets, (list, tuple)) or len(targets) != len(spans):
        raise ArgumentError(f"overwire: out: expected a list of {len(spans)} buffers")
    outs = [None if o is None else span(o, writable=True) for o in targets]
    results = run(op, spans, out=outs, **spec)
    for result in results:
        if result.error is not None:
            raise result.error
    values: list[Any]
    if op == "size":
        values = [result.nbytes for result in results]
    else:
        rows = zip(results, targets, outs, strict=True)
        values = [
            _bytes_at(c.address, c.nbytes, c.memory) if p is None else _written_part(o, p, c.nbytes) for c, o, p in rows
        ]
    return values if many else values[0]


class _EncodeOptions(TypedDict, total=False):
    bitstream: Bitstream
    chunk_size: int | None
    level: int
    dtype: str | None
    cascaded: tuple[int, int, bool] | None
    checksums: bool
    out: Any


@overload
def encode(
    source: list[Any] | tuple[Any, ...], algorithm: str = ..., **options: Unpack[_EncodeOptions]
) -> list[memoryview]: ...
@overload
def encode(source: Any, algorithm: str = ..., **options: Unpack[_EncodeOptions]) -> memoryview: ...
def encode(
    source: Any,
    algorithm: str = "X16",
    *,
    bitstream: Bitstream = "native",
    chunk_size: int | None = None,
    level: int = 1,
    dtype: str | None = None,
    cascaded: tuple[int, int, bool] | None = None,
    checksums: bool = False,
    out: Any = None,
) -> Any:
    """Compresses a buffer, or each buffer of a list. See `span` for what counts as a buffer.

    `algorithm` is one of `algorithms()`. `chunk_size` is the content of a native chunk in
    bytes (default 64 KiB; X16: 1 MiB; at most 16 MiB). `level` applies to Deflate, Gzip
    and GDeflate: 0 (only entropy coding) to 5 (smallest). `dtype` is a safetensors dtype
    name. X16 chooses its transform by the dtype ("BF16"; by default X16 examines the bytes). Cascaded takes the size
    and the sign of its elements from the dtype ("I32"; by default elements are single bytes). `cascaded` has the
    numbers of run-length and difference layers, up to 7, and whether bits are packed; None means (2, 1, True).
    `checksums` puts CRC-32 sums of the header, the stored bytes and the plain bytes into native streams.

    Returns a memoryview that owns its memory. With `out` (a writable buffer, or a list with a buffer or None for each
    source) it returns the written part of `out`. Raises ArgumentError, for example if `out` is too small (`max_size`
    returns a sufficient size) or overlaps another output or a source. After such an error, nothing has been written.
    """
    how = {"algorithm": algorithm, "bitstream": bitstream, "chunk_size": chunk_size, "level": level, "dtype": dtype}
    return _results_of(source, out, "encode", cascaded=cascaded, checksums=checksums, **how)


@overload
def decode(
    source: list[Any] | tuple[Any, ...], algorithm: str | None = ..., *, bitstream: Bitstream = ...,
    verify: Verify = ..., out: Any = ...,
) -> list[memoryview]: ...  # fmt: skip
@overload
def decode(
    source: Any, algorithm: str | None = ..., *, bitstream: Bitstream = ..., verify: Verify = ..., out: Any = ...
) -> memoryview: ...
def decode(
    source: Any,
    algorithm: str | None = None,
    *,
    bitstream: Bitstream = "native",
    verify: Verify = True,
    out: Any = None,
) -> Any:
    """Decompresses a stream, or each stream of a list. `out` and the result are as in `encode`.

    A native stream names its algorithm; other streams need `algorithm`. Checksums in a stream are verified, unless
    `verify=False`. verify="always" also refuses streams without checksums. A raw Deflate, Gzip or GDeflate stream does
    not state its length and is decoded twice.

    Raises CorruptError for bad bytes; FormatError for other formats, including streams that
    only nvCOMP reads; NotSupportedError for algorithms that only nvCOMP decodes and for
    nvCOMP's checksums; and ArgumentError. For a list, the first error is raised after all streams are done.
    """
    return _results_of(source, out, "decode", algorithm=algorithm, bitstream=bitstream, verify=verify)


def is_native(source: Any) -> bool:
    """Returns whether a stream begins like a native stream of `encode`. Raises the errors of `span`."""
    place = span(source)
    return place.nbytes >= 64 and ctypes.string_at(place.address, 4) == b"OWBS"


def content_size(source: Any, algorithm: str | None = None, *, bitstream: Bitstream = "native") -> Any:
    """Returns the content bytes of a stream, or of each stream of a list. Raises the errors of `decode`."""
    return _results_of(source, None, "size", algorithm=algorithm, bitstream=bitstream)


def max_size(
    nbytes: int | Iterable[int],
    algorithm: str = "X16",
    *,
    bitstream: Bitstream = "native",
    chunk_size: int | None = None,
    checksums: bool = False,
) -> Any:
    """Returns the maximum size of `encode`'s output for a buffer of `nbytes`, or for each size of a
    list. Raises ArgumentError."""
    sizes = [nbytes] if isinstance(nbytes, int) else list(nbytes)
    if any(n < 0 for n in sizes):
        raise ArgumentError(f"overwire: nbytes {min(sizes)}: expected 0 or more")
    how: Any = {"algorithm": algorithm, "bitstream": bitstream, "chunk_size": chunk_size, "checksums": checksums}
    values = [bound.nbytes for bound in run("bound", [], sizes=sizes, **how)]
    return values[0] if isinstance(nbytes, int) else values

"""Allocates GPU memory, manages streams, and decodes on GPUs, as `overwire.codecs` does on the host.

    from overwire import gpu

    memory = gpu.alloc(nbytes, device=0)
    batch = gpu.decode(0, stream, [(address, stored, memory.address, nbytes, chunk)], "X16")
    ...                                     # queue more work on that stream
    for error in batch.wait(): ...          # the error of each bitstream, or None

CUDA streams are numbers, as in DLPack and the CUDA array interface: 0 and 1 are the legacy default stream, 2 is the
per-thread default stream, and other numbers are handles. The first call loads NVIDIA's driver. torch is not required.
If the program has imported torch, memory comes from torch's allocator.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _verbs
from ._apart import apart
from ._engine import release
from ._imports import imported, skip_at_exit
from .captures import beside_captures, refuse_capture
from .errors import ArgumentError, ForkedError, OutOfMemoryError, error_of

if TYPE_CHECKING:
    from ._core import Result

__all__ = [
    "Batch", "Glance", "Memory", "algorithms", "alloc", "beside_captures", "copy", "count", "current_stream", "decode",
    "device_of", "encode", "follow", "glance", "pack_streams", "refuse_capture", "stream_check", "stream_free",
    "stream_new", "stream_sync", "torch_of", "transform",
]  # fmt: skip

_KINDS = {"native": 0, "raw": 1, "with_size": 2}
_five = struct.Struct("=5q").pack


class Memory(NamedTuple):
    """GPU memory: `nbytes` bytes at `address` on GPU number `device`. `keep` owns the memory."""

    address: int
    nbytes: int
    keep: Any
    device: int


class Glance(NamedTuple):
    """The contents of a bitstream's header, or the error that decoding would raise. size, chunk: the bytes of the
    content and (in native streams) of a chunk."""

    size: int
    chunk: int
    algorithm: str | None
    error: BaseException | None


@cache
def count() -> int:
    """Returns the number of GPUs, or 0 without a driver. The result of the first call is cached."""
    return _verbs.gpu_count()


@cache
def algorithms() -> tuple[str, ...]:
    """Returns the algorithms that `decode` accepts."""
    return tuple(_verbs.gpu_names())


def torch_of() -> Any:
    """Returns torch if the program has imported it and it finds a GPU, otherwise None."""
    torch = imported("torch")
    cuda = getattr(torch, "cuda", None)
    return torch if cuda is not None and cuda.is_available() else None


def current_stream(device: int) -> int:
    """Returns torch's current stream on a device if torch is imported, otherwise 1, the default stream."""
    torch = torch_of()
    return 1 if torch is None else int(torch.cuda.current_stream(device).cuda_stream) or 1


def alloc(nbytes: int, device: int, stream: int = 1) -> Memory:
    """Allocates GPU memory for work on a stream, from torch's allocator if torch is imported, otherwise from the
    driver. The contents are undefined.

    Raises OutOfMemoryError, DeviceError.
    """
    if nbytes == 0:
        return Memory(0, 0, None, device)
    if (torch := torch_of()) is None:
        _, numbers, (keep,), _, _ = _verbs.gpu_alloc(device, nbytes)
        return Memory(int.from_bytes(numbers, "little"), nbytes, keep, device)
    if (int(torch.cuda.current_stream(device).cuda_stream) or 1) == (stream or 1):
        tensor = _empty_tensor(torch, nbytes, device)
    else:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream if stream > 2 else 0, device=device)):
            tensor = _empty_tensor(torch, nbytes, device)
    return Memory(tensor.data_ptr(), nbytes, tensor, device)


def _empty_tensor(torch: Any, nbytes: int, device: int) -> Any:
    with beside_captures():
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            text = f"overwire: cuda:{device}: cannot allocate {nbytes} bytes: {error}"
            raise OutOfMemoryError(text, asked=nbytes, free=free, total=total) from error


def copy(
    dst: int, src: int, nbytes: int, *, device: int, stream: int = 1, after: Sequence[int] = (), wait: bool = True
) -> None:
    """Copies between host and GPU memory in any direction, on a stream. The copy starts after the
    work that is now queued on the streams of `after`. With `wait=False` the call returns before the
    copy is done, except for host memory that is not pinned.

    Raises ArgumentError if source and destination overlap, DeviceError.
    """
    apart([(src, nbytes)], [(dst, nbytes)])
    _verbs.gpu_copy(device, stream, dst, src, nbytes, wait, len(after), _pack_streams(after))


def _pack_streams(after: Sequence[int]) -> bytes:
    return struct.pack(f"={len(after)}Q", *after) if after else b""


def device_of(address: int) -> int:
    """Returns the number of the GPU that owns an address, or -1 for host memory."""
    return _verbs.gpu_of(address)


def follow(stream: int, after: int, *, device: int) -> None:
    """Makes a stream wait for the work that is now queued on the stream `after`. The caller does not wait."""
    if (stream or 1) != (after or 1):
        _verbs.gpu_follow(device, stream, after)


def stream_new(device: int) -> int:
    """Makes a stream on a device. Free it with `stream_free`."""
    return _verbs.gpu_stream_new(device)


def stream_free(stream: int, device: int) -> None:
    """Frees a stream once its work is done, without waiting for it. Does nothing in a forked child, because the stream
    belongs to the parent."""
    with contextlib.suppress(ForkedError):
        _verbs.gpu_stream_free(device, stream)


def stream_sync(stream: int, device: int) -> None:
    """Waits for the work that is queued on a stream."""
    _verbs.gpu_stream_sync(device, stream)


def stream_check(stream: int, device: int) -> None:
    """Raises ArgumentError if a stream belongs to another device."""
    _verbs.gpu_stream_check(device, stream)


class Batch:
    """Queued work. Sources and destinations must stay valid and unchanged until the work is done. Dropping the Batch
    does not stop the work. Threads may share a Batch."""

    __slots__ = ("_errors", "_keep", "_number")

    def __init__(self, number: int, keep: Any = None) -> None:
        self._number = number
        self._errors: list[BaseException | int | None] | None = None
        self._keep = keep

    def poll(self) -> list[BaseException | int | None] | None:
        """Returns the result of `wait`, or None while the work is running."""
        return self._results_of(False)

    def wait(self) -> list[BaseException | int | None]:
        """Waits until all work is done. Returns an item for each bitstream: its error, or None after
        decoding, or its number of bytes after encoding.

        Raises DeviceError if the device failed.
        """
        errors = self._results_of(True)
        assert errors is not None
        return errors

    def _results_of(self, wait: bool) -> list[BaseException | int | None] | None:
        if self._errors is None:
            try:
                results = _decode_results(_verbs.gpu_wait(self._number, wait))
            except ArgumentError:
                if self._errors is None:  # otherwise another thread has fetched the errors
                    raise
                return self._errors
            if results is None:
                return None
            self._errors, self._keep = results, None
        return self._errors

    @skip_at_exit
    def __del__(self) -> None:
        if getattr(self, "_errors", ()) is None:
            release(self._number)


def _decode_results(made: Result) -> list[BaseException | int | None] | None:
    text, numbers, _, _, _ = made
    if not numbers:
        return None
    _, count, *sizes = memoryview(numbers).cast("q")
    became: list[BaseException | int | None] = list(sizes) if sizes else [None] * count
    for at, fields in json.loads(text).items() if text else ():
        became[int(at)] = error_of(fields)
    return became


def decode(
    device: int,
    stream: int,
    streams: Iterable[tuple[int, int, int, int, int]] | bytes,
    algorithm: str,
    *,
    bitstream: str = "native",
    after: Sequence[int] = (),
) -> Batch:
    """Queues the decoding of bitstreams on a GPU stream. Decoding starts after the work that is now queued on the
    streams of `after`. The call does not wait.

    streams: five numbers per bitstream: its address and size, the address and exact size of its content, and the
        content bytes of a chunk (native) or of the whole content (raw, with_size). Bitstreams must be aligned to 8
        bytes; X16 bitstreams to 16 (raw X16: 8 bytes before a multiple of 16). X16 content must be aligned to 16. To
        decode the same bitstreams often, pack the numbers once with `pack_streams`.
    algorithm: one of `algorithms()`. bitstream: as in `codecs.encode`.

    Bitstreams may be untrusted. If a bitstream does not match its numbers, the Batch returns an error for it. Memory
    outside of source and destination is never accessed. Checksums are not compared.

    Raises ArgumentError (including if a content overlaps another content or a bitstream), NotSupportedError,
    DeviceError, OutOfMemoryError.
    """
    rows = streams if isinstance(streams, bytes) else pack_streams(streams)
    numbers = _pack_streams(after) + rows
    return Batch(_verbs.gpu_decode(algorithm, device, stream, _KINDS[bitstream], len(after), numbers))


def pack_streams(streams: Iterable[tuple[int, int, int, int, int]]) -> bytes:
    """Checks and packs the argument `streams` of `decode`."""
    streams = list(streams)
    apart(streams, [one[2:4] for one in streams])
    return b"".join([_five(*one) for one in streams])


def glance(
    device: int,
    stream: int,
    streams: Iterable[tuple[int, int]],
    algorithm: str | None = None,
    *,
    bitstream: str = "native",
    after: Sequence[int] = (),
) -> list[Glance]:
    """Reads the headers of bitstreams on a GPU, given by address and size. Waits for earlier work on the stream.

    Raises NotSupportedError for raw blocks of algorithms other than X16 and Snappy, which
    have no header at a fixed offset.
    """
    rows = b"".join([_five(*one, 0, 0, 1) for one in streams])
    operands = _pack_streams(after) + rows
    text, numbers, *_ = _verbs.gpu_peek(algorithm or "", device, stream, _KINDS[bitstream], len(after), operands)
    facts, sizes = json.loads(text), memoryview(numbers).cast("q")
    errors = {int(at): error_of(fields) for at, fields in facts["errors"].items()}
    heads = enumerate(zip(sizes[::2], sizes[1::2], facts["algorithms"] or (), strict=True))
    return [Glance(size, chunk, None if at in errors else name, errors.get(at)) for at, (size, chunk, name) in heads]


def transform(dtype: str | None, sample: Any = None) -> int | None:
    """Chooses the X16 transform for contents of a dtype (a safetensors name, or None if unknown).
    `sample` is a buffer with some of the content. Returns 0 if no transform saves space, and None if a sample is needed
    to decide."""
    from .codecs import span

    place = None if sample is None else span(sample)  # keeps the sample's memory until it is read
    number = _verbs.gpu_transform(dtype or "", *((0, 0) if place is None else place[:2]))
    return number if number >= 0 else None


def encode(
    device: int,
    stream: int,
    contents: Sequence[tuple[int, int, int, int, int, int]],
    *,
    bitstream: str = "native",
    after: Sequence[int] = (),
) -> Batch:
    """Queues the encoding of GPU contents to X16 bitstreams, on a GPU stream. The call does not wait. The Batch returns
    the lengths.

    contents: six numbers each: address and size of the content, address and size of the output space (`codecs.max_size`
        is enough), content bytes of a chunk, and `transform`. Addresses must be multiples of 16, and so must the chunk
        size if there are several chunks. Bitstreams other than native have one block of at most 16 MiB.

    Until the work is done, it needs extra device memory, as much as the contents. Raises the errors of `decode`.
    """
    apart(contents, [one[2:4] for one in contents])
    slot = (max((min(c[1], c[4]) for c in contents), default=0) + 15) & ~15
    rows = sum(max(1, -(-c[1] // c[4])) for c in contents)
    scratch = alloc(slot * rows, device, stream)
    table = b"".join([struct.pack("=6q", *one) for one in contents])
    place, numbers = scratch[:2], _pack_streams(after) + table
    return Batch(_verbs.gpu_encode(device, stream, _KINDS[bitstream], *place, len(after), numbers), scratch)

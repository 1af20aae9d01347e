"""Memory of GPUs, streams, and decoding there: what `overwire.codecs` is on the host.

    from overwire import gpu

    memory = gpu.alloc(nbytes, device=0)
    batch = gpu.decode(0, stream, [(address, stored, memory.address, nbytes, chunk)], "X16")
    ...                                     # more work on that stream, nothing has waited
    for error in batch.wait(): ...          # what became of each stream

A stream is a number as DLPack and the CUDA array interface count them: 0 and 1
are the legacy default stream, 2 the thread's own, others are handles. NVIDIA's
driver is looked for at the first call; nothing here needs torch, but where it is
imported memory comes out of its allocator.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _verbs
from ._apart import apart
from ._engine import release
from ._imports import imported, skip_at_exit
from .errors import ArgumentError, ForkedError, NotSupportedError, OutOfMemoryError, error_of

if TYPE_CHECKING:
    from ._core import Result

__all__ = [
    "Batch",
    "Glance",
    "Memory",
    "algorithms",
    "alloc",
    "beside_captures",
    "copy",
    "count",
    "current_stream",
    "decode",
    "device_of",
    "encode",
    "follow",
    "glance",
    "pack_streams",
    "refuse_capture",
    "stream_check",
    "stream_free",
    "stream_new",
    "stream_sync",
    "torch_of",
    "transform",
]

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_KINDS = {"native": 0, "raw": 1, "with_size": 2}
_five = struct.Struct("=5q").pack


class Memory(NamedTuple):
    """`nbytes` bytes at `address` of GPU number `device`, which `keep` holds."""

    address: int
    nbytes: int
    keep: Any
    device: int


class Glance(NamedTuple):
    """What a stream says about itself: bytes of content and of a chunk (native
    streams), its algorithm; or the error that decoding would raise."""

    size: int
    chunk: int
    algorithm: str | None
    error: BaseException | None


@cache
def count() -> int:
    """How many GPUs there are; 0 where there is no driver. Asked once."""
    return _verbs.gpu_count()


@cache
def algorithms() -> tuple[str, ...]:
    """The algorithms that `decode` takes."""
    return tuple(_verbs.gpu_names())


def torch_of() -> Any:
    """torch, where the program has imported it and it finds a GPU; else None."""
    torch = imported("torch")
    return (
        torch if torch is not None and getattr(torch, "cuda", None) is not None and torch.cuda.is_available() else None
    )


def current_stream(device: int) -> int:
    """torch's current stream of a device, where it is imported; else the default one, 1."""
    torch = torch_of()
    return 1 if torch is None else int(torch.cuda.current_stream(device).cuda_stream) or 1


def alloc(nbytes: int, device: int, stream: int = 1) -> Memory:
    """Memory of a GPU for work on a stream: from torch's allocator if torch is imported,
    else from the driver. Its contents are undefined.

    Raises OutOfMemoryError, DeviceError.
    """
    if nbytes == 0:
        return Memory(0, 0, None, device)
    torch = torch_of()
    if torch is None:
        _, numbers, (keep,), _, _ = _verbs.gpu_alloc(device, nbytes)
        return Memory(int.from_bytes(numbers, "little"), nbytes, keep, device)
    if (int(torch.cuda.current_stream(device).cuda_stream) or 1) == (stream or 1):
        tensor = _empty_tensor(torch, nbytes, device)
    else:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream if stream > 2 else 0, device=device)):
            tensor = _empty_tensor(torch, nbytes, device)
    return Memory(tensor.data_ptr(), nbytes, tensor, device)


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """For calls of torch: within it they cannot destroy a CUDA graph that another thread
    captures in torch's default mode, as growing its allocator otherwise does."""
    before = _verbs.gpu_mode(_RELAXED)
    try:
        yield
    finally:
        _verbs.gpu_mode(before)


def refuse_capture(torch: Any) -> None:
    """Raises NotSupportedError where torch's current stream is being captured into a
    CUDA graph: what waits for that stream destroys the graph."""
    if torch.cuda.is_current_stream_capturing():
        raise NotSupportedError(
            "overwire: the current stream is being captured into a CUDA graph, of which this cannot be a part: "
            "do it before the capture, or on another stream"
        )


def _empty_tensor(torch: Any, nbytes: int, device: int) -> Any:
    with beside_captures():
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise OutOfMemoryError(
                f"overwire: cuda:{device}: {nbytes} bytes: {error}", asked=nbytes, free=free, total=total
            ) from error


def copy(
    dst: int, src: int, nbytes: int, *, device: int, stream: int = 1, after: Sequence[int] = (), wait: bool = True
) -> None:
    """Copies between any two places, of a GPU or the host, on a stream, after what is
    queued now on those of `after`. Without `wait` the bytes are there when the
    stream has come so far; memory of the host that is not pinned waits anyway.

    Raises ArgumentError where the two overlap, DeviceError.
    """
    apart([(src, nbytes)], [(dst, nbytes)])
    _verbs.gpu_copy(device, stream, dst, src, nbytes, wait, len(after), _pack_streams(after))


def _pack_streams(after: Sequence[int]) -> bytes:
    return struct.pack(f"={len(after)}Q", *after) if after else b""


def device_of(address: int) -> int:
    """The number of the GPU that an address is of; -1 for the host's."""
    return _verbs.gpu_of(address)


def follow(stream: int, after: int, *, device: int) -> None:
    """Lets a stream wait for what is queued on another now; the caller does not wait."""
    if (stream or 1) != (after or 1):
        _verbs.gpu_follow(device, stream, after)


def stream_new(device: int) -> int:
    """A new stream of a device, which `stream_free` ends."""
    return _verbs.gpu_stream_new(device)


def stream_free(stream: int, device: int) -> None:
    """Ends a stream when its work is done, without waiting for that. In a forked
    child it does nothing: the stream is the parent's."""
    with contextlib.suppress(ForkedError):
        _verbs.gpu_stream_free(device, stream)


def stream_sync(stream: int, device: int) -> None:
    """Waits for what is queued on a stream."""
    _verbs.gpu_stream_sync(device, stream)


def stream_check(stream: int, device: int) -> None:
    """Raises ArgumentError for a stream of another device."""
    _verbs.gpu_stream_check(device, stream)


class Batch:
    """Work that was queued. Sources and destinations must stay valid and unchanged until
    it is done; dropping the Batch does not stop it. Threads may share it."""

    __slots__ = ("_errors", "_keep", "_number")

    def __init__(self, number: int, keep: Any = None) -> None:
        self._number = number
        self._errors: list[BaseException | int | None] | None = None
        self._keep = keep

    def poll(self) -> list[BaseException | int | None] | None:
        """As `wait`, but None while the work is under way."""
        return self._results_of(False)

    def wait(self) -> list[BaseException | int | None]:
        """Waits until all is done, and gives for each stream its error; else None, or,
        where streams were made, how many bytes it has.

        Raises DeviceError where the device failed.
        """
        errors = self._results_of(True)
        assert errors is not None
        return errors

    def _results_of(self, wait: bool) -> list[BaseException | int | None] | None:
        if self._errors is None:
            try:
                results = _decode_results(_verbs.gpu_wait(self._number, wait))
            except ArgumentError:
                if self._errors is None:  # another thread got the errors meanwhile
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
    """Queues the decoding of bitstreams on a GPU, on one of its streams, after what is
    queued now on those of `after`. It does not wait.

    streams: of each its address and bytes, the address and exact bytes of its
        content, and the content bytes of a chunk (native; else those of all).
        Stored bytes are aligned to 8, for X16 to 16 (raw: 8 before a multiple of 16), the
        content of X16 to 16. What is decoded again and again can be packed once, by
        `pack_streams`.
    algorithm: one of `algorithms()`. bitstream: as in `codecs.encode`.

    Bytes need not be trusted: a stream that differs from its description becomes an
    error in the Batch, and nothing outside source and destination is touched.
    Checksums are not compared.

    Raises ArgumentError, also where a content overlaps another or a stream,
    NotSupportedError, DeviceError, OutOfMemoryError.
    """
    rows = streams if isinstance(streams, bytes) else pack_streams(streams)
    return Batch(
        _verbs.gpu_decode(algorithm, device, stream, _KINDS[bitstream], len(after), _pack_streams(after) + rows)
    )


def pack_streams(streams: Iterable[tuple[int, int, int, int, int]]) -> bytes:
    """The streams of `decode`, checked and packed."""
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
    """What bitstreams on a GPU, given by address and bytes, say of themselves; waits
    for what comes first on the stream.

    Raises NotSupportedError where that stands at no fixed place: raw blocks of
    others than X16 and Snappy.
    """
    rows = b"".join([_five(*one, 0, 0, 1) for one in streams])
    text, numbers, _, _, _ = _verbs.gpu_peek(
        algorithm or "", device, stream, _KINDS[bitstream], len(after), _pack_streams(after) + rows
    )
    facts, sizes = json.loads(text), memoryview(numbers).cast("q")
    errors = {int(at): error_of(fields) for at, fields in facts["errors"].items()}
    return [
        Glance(size, chunk, None if at in errors else name, errors.get(at))
        for at, (size, chunk, name) in enumerate(zip(sizes[::2], sizes[1::2], facts["algorithms"] or (), strict=True))
    ]


def transform(dtype: str | None, sample: Any = None) -> int | None:
    """The transform of X16 for contents of a dtype (safetensors' name; None: not
    known), of which `sample` (a buffer) is some; 0: none gains anything. None: it
    takes a sample to say."""
    from .codecs import span

    place = span(sample) if sample is not None else None
    number = _verbs.gpu_transform(
        dtype or "", 0 if place is None else place.address, 0 if place is None else place.nbytes
    )
    return number if number >= 0 else None


def encode(
    device: int,
    stream: int,
    contents: Sequence[tuple[int, int, int, int, int, int]],
    *,
    bitstream: str = "native",
    after: Sequence[int] = (),
) -> Batch:
    """Queues the encoding of contents on a GPU to X16 streams, on one of its streams. It
    does not wait; the Batch has their lengths.

    contents: of each its address and bytes, address and bytes of the space for the
        stream (`codecs.max_size` is enough), the content bytes of a chunk, and the
        `transform`. Addresses, and chunks where there are several, are multiples
        of 16. Other bitstreams than native have one block of at most 16 MiB.

    Takes as much memory of the device as the contents have, until it is done.
    Raises as `decode`.
    """
    apart(contents, [one[2:4] for one in contents])
    slot = (max((min(c[1], c[4]) for c in contents), default=0) + 15) & ~15
    rows = sum(max(1, -(-c[1] // c[4])) for c in contents)
    scratch = alloc(slot * rows, device, stream)
    table = b"".join([struct.pack("=6q", *one) for one in contents])
    number = _verbs.gpu_encode(
        device, stream, _KINDS[bitstream], scratch.address, scratch.nbytes, len(after), _pack_streams(after) + table
    )
    return Batch(number, scratch)

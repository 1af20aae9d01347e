"""The engine's functions for GPUs, as `_engine` has the others: memory, streams,
batches.

A stream is a number as DLPack has it; `after`, `streams` and `contents` are packed
native 64-bit integers.
"""

from __future__ import annotations

from . import _engine

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._engine import Capsule

__all__ = [
    "gpu_alloc",
    "gpu_batch_free",
    "gpu_copy",
    "gpu_count",
    "gpu_decode",
    "gpu_encode",
    "gpu_follow",
    "gpu_mode",
    "gpu_names",
    "gpu_of",
    "gpu_peek",
    "gpu_stream_check",
    "gpu_stream_free",
    "gpu_stream_new",
    "gpu_stream_sync",
    "gpu_transform",
    "gpu_used",
    "gpu_wait",
]


def gpu_count() -> int:
    """How many GPUs there are; 0 without a driver."""
    number: int = _engine._call(_engine._core().api_GpuCount)
    return number


def gpu_names() -> str:
    """The algorithms whose streams a GPU decodes: a JSON list."""
    text: str = _engine._call(_engine._core().api_GpuNames)
    return text


def gpu_of(address: int) -> int:
    """The GPU that an address is of; -1: none."""
    number: int = _engine._call(_engine._core().api_GpuOf, address)
    return number


def gpu_alloc(device: int, nbytes: int) -> tuple[Capsule, int]:
    """Memory of a GPU: (capsule that owns it, address)."""
    made: tuple[Capsule, int] = _engine._call(_engine._core().gpu_alloc, device, nbytes)
    return made


def gpu_copy(device: int, stream: int, after: bytes, dst: int, src: int, nbytes: int, wait: bool) -> None:
    """Queue a copy between any two places, after what is queued on streams now."""
    _engine._call(_engine._core().gpu_copy, device, stream, after, dst, src, nbytes, wait)


def gpu_mode(mode: int) -> int:
    """Set this thread's mode of stream capture (CUstreamCaptureMode), and return the
    one before; -1 for no driver, and for -1, which changes nothing."""
    before: int = _engine._call(_engine._core().api_GpuMode, mode)
    return before


def gpu_used(device: int, stream: int) -> None:
    """Tell of a stream that works on memory of the engine's, and lives as long as the process."""
    _engine._call(_engine._core().api_GpuUsed, device, stream)


def gpu_follow(device: int, stream: int, after: int) -> None:
    """Let a stream wait for what is queued on another now."""
    _engine._call(_engine._core().api_GpuFollow, device, stream, after)


def gpu_stream_new(device: int) -> int:
    """A new stream."""
    number: int = _engine._call(_engine._core().api_GpuStreamNew, device)
    return number


def gpu_stream_free(device: int, stream: int) -> None:
    """End a stream when its work is done, without waiting for it."""
    _engine._call(_engine._core().api_GpuStreamFree, device, stream)


def gpu_stream_sync(device: int, stream: int) -> None:
    """Wait for what is queued on a stream."""
    _engine._call(_engine._core().api_GpuStreamSync, device, stream)


def gpu_stream_check(device: int, stream: int) -> None:
    """Refuse a stream of another GPU: ArgumentError."""
    _engine._call(_engine._core().api_GpuStreamCheck, device, stream)


def gpu_decode(device: int, stream: int, after: bytes, kind: int, algorithm: str, streams: bytes) -> int:
    """Queue the decoding of streams, five numbers each (address, bytes, and of the
    content address, bytes and bytes of a chunk); return the batch. No wait."""
    number: int = _engine._call(_engine._core().gpu_decode, device, stream, after, kind, algorithm, streams)
    return number


def gpu_peek(
    device: int, stream: int, after: bytes, kind: int, algorithm: str, streams: bytes
) -> list[tuple[int, int, str | None, BaseException | None]]:
    """Ask streams what they are, and wait: (bytes of content, of a chunk, algorithm, error)."""
    rows = _engine._call(_engine._core().gpu_peek, device, stream, after, kind, algorithm, streams)
    return [(size, chunk, name, None if text is None else _engine._fault(RuntimeError(text))) for size, chunk, name, text in rows]


def gpu_encode(
    device: int, stream: int, after: bytes, kind: int, contents: bytes, scratch: int, room: int
) -> int:
    """Queue the encoding of X16 streams, six numbers each (address and bytes of the
    content, address and bytes of the output, bytes of a chunk, transform); return
    the batch."""
    number: int = _engine._call(_engine._core().gpu_encode, device, stream, after, kind, contents, scratch, room)
    return number


def gpu_transform(dtype: str, sample: int, nbytes: int) -> int:
    """The transform of X16 for a dtype, or a sample in host memory; -1: it takes one."""
    number: int = _engine._call(_engine._core().api_GpuTransform, dtype, sample, nbytes)
    return number


def gpu_wait(batch: int, wait: bool) -> list[BaseException | int | None] | None:
    """What became of a batch's streams, once: an error, else None, or the length of
    what was made. None: not done, and not to be waited for."""
    rows = _engine._call(_engine._core().gpu_wait, batch, wait)
    return None if rows is None else [_engine._fault(RuntimeError(row)) if isinstance(row, str) else row for row in rows]


def gpu_batch_free(batch: int) -> None:
    """Forget a batch, which goes on."""
    _engine._call(_engine._core().api_GpuBatchFree, batch)

"""Bitstreams of codecs as Python calls them, by the rules of `_engine`."""

from __future__ import annotations

from ._engine import _call, _core, _fault, _handle, _Job, _own

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ._engine import Capsule

__all__ = ["codec_names", "codec_now", "codec_start", "codec_take"]


def codec_names() -> str:
    """The algorithms that `codec_start` takes: a JSON list."""
    text: str = _call(_core().api_CodecNames)
    return text


def codec_start(spec: str, buffers: list[tuple[int, int, bool, int, int]]) -> int:
    """Start to encode, decode or measure buffers, return the job.

    A buffer is (address, bytes, own, out address, out bytes): with `own` its
    result goes to `out`, else to new memory. All of it stays alive and
    unchanged until the job has ended. `spec` is the JSON of nvcomp.Spec.
    """
    number: int = _own(_Job, _core().codec_start, spec, buffers)
    return number


def codec_take(job: int) -> list[tuple[Capsule | None, int, int, BaseException | None, bool]]:
    """After the end, for every buffer: (capsule, address, bytes, error, summed).

    The capsule ("dltensor" of uint8) is the caller's; None for a buffer with
    memory of its own, without bytes, or that failed early. A buffer that failed
    late keeps its memory. `summed`: its checksums were compared.
    """
    return _coded(_call(_core().codec_take, _handle(job)))


def codec_now(
    spec: str, buffers: list[tuple[int, int, bool, int, int]]
) -> list[tuple[Capsule | None, int, int, BaseException | None, bool]] | None:
    """What `codec_start` and `codec_take` do, in one call that is not interrupted;
    None, and nothing was done, where it may take longer than a moment."""
    rows = _call(_core().codec_now, spec, buffers)
    return None if rows is None else _coded(rows)


def _coded(
    rows: list[tuple[Capsule | None, int, int, str | None, int]],
) -> list[tuple[Capsule | None, int, int, BaseException | None, bool]]:
    return [
        (capsule, address, size, None if text is None else _fault(RuntimeError(text)), bool(summed))
        for capsule, address, size, text, summed in rows
    ]

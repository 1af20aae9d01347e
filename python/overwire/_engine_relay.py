"""The engine's relays as Python calls them, by the rules of `_engine`: see
gosrc/load/relay.go."""

from __future__ import annotations

from ._engine import _call, _core, _handle

__all__ = ["relay_decode", "relay_start", "relay_wait"]


def relay_start(model: int, spec: str) -> tuple[int, str]:
    """Start one rank's part in a load of several: the JSON of a load.RelaySpec. Returns the job,
    and as JSON where the ranks' shares of each piece begin in its buffer, and the last ends."""
    job: int = _call(_core().api_RelayStart, _handle(model), spec)
    return job, _call(_core().api_RelayShares, job)


def relay_wait(job: int, piece: int, ms: int) -> bool:
    """Wait, `ms` at most, until this rank's share of a piece is in its buffer."""
    return bool(_call(_core().api_RelayWait, _handle(job), piece, ms))


def relay_decode(job: int, piece: int, stream: int) -> None:
    """Decode a piece whose buffer is full, after what is queued on a stream (0: none), and free the buffer."""
    _call(_core().api_RelayDecode, _handle(job), piece, stream)

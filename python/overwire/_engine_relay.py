"""The engine's relays as Python calls them, by the rules of `_engine`: see
gosrc/load/relay.go."""

from __future__ import annotations

from ._engine import _call, _core, _handle, _Job, _own

__all__ = ["relay_aim", "relay_decode", "relay_start", "relay_wait"]


def relay_start(model: int, spec: str) -> tuple[int, str]:
    """Start one rank's part in a load of several: the JSON of a load.RelaySpec. Returns the job,
    and as JSON how many bytes each rank's share of each piece has in its buffer."""
    job: int = _own(_Job, _core().api_RelayStart, _handle(model), spec)
    return job, _call(_core().api_RelayShares, job)


def relay_aim(job: int, requests: str) -> None:
    """Say what this rank wants, before the first decode: the JSON of requests as those of a load."""
    _call(_core().api_RelayAim, _handle(job), requests)


def relay_wait(job: int, piece: int, ms: int) -> bool:
    """Wait, `ms` at most, until this rank's share of a piece is in its buffer; on a GPU until it is
    on its way, and what is queued on the relay's stream then goes after it."""
    return bool(_call(_core().api_RelayWait, _handle(job), piece, ms))


def relay_decode(job: int, piece: int, stream: int) -> None:
    """Decode a piece whose buffer is full, after what is queued on a stream (0: none), and free the buffer."""
    _call(_core().api_RelayDecode, _handle(job), piece, stream)

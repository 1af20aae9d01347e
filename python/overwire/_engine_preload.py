"""How loads join preloads, as Python calls it, by the rules of `_engine`: see
gosrc/preload/preload.go."""

from __future__ import annotations

from ._engine import _SLICE_MS, _call, _core, _handle

__all__ = ["preload_join", "preload_sweep"]


def preload_join(model: int, options: str) -> str:
    """Let loads of a model take what was preloaded of its files. Options are those
    of the loads, JSON {"device", "read", "alone"}; alone: they take nothing, and
    preloads of the files are dropped.

    Returns JSON {"device": where what they take is, null if nothing,
    "notes": [{"text", "routine"}], why preloads were dropped}.
    """
    core = _core()
    while True:  # in slices, for Ctrl-C
        text: str = _call(core.api_PreloadJoin, _handle(model), options, _SLICE_MS)
        if text:
            return text


def preload_sweep(uri: str) -> str:
    """Drop the preloads of what was just replaced at a path or URI; return what
    `preload_join` does, of the notes."""
    import json

    text: str = _call(_core().api_PreloadSweep, json.dumps(uri))
    return text

"""Prevents overwire's torch calls from invalidating CUDA graphs that a program captures, and refuses calls during a
capture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from . import _verbs
from .errors import NotSupportedError

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """A context for torch calls. It protects CUDA graphs that other threads are capturing in torch's default mode.
    Without it, an allocation that grows torch's memory pool would invalidate these graphs."""
    before = _verbs.gpu_mode(_RELAXED)
    try:
        yield
    finally:
        _verbs.gpu_mode(before)


def refuse_capture(torch: Any) -> None:
    """Raises NotSupportedError if torch's current stream is being captured into a CUDA graph.
    Waiting for that stream would invalidate the capture."""
    if torch.cuda.is_current_stream_capturing():
        why = "the current stream is being captured into a CUDA graph, and this call cannot be captured"
        raise NotSupportedError(f"overwire: {why}: make it before the capture, or on another stream")

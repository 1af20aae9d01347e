"""Lets loads reuse tensors that were preloaded from the same files."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .. import _verbs
from .._engine import forked
from ..jobs import log

if TYPE_CHECKING:
    from .._requests import PreloadAnswer

_started = False


def started() -> None:
    """Records that a preload was started. Loads look for preloads only after this call."""
    global _started
    _started = True


def join(model: int, device: str, read: str | None, alone: bool) -> str | None:
    """Lets loads of an open model use preloaded tensors. Returns the device of these tensors ("cpu" or a GPU), or None
    if there are none. alone: whether to drop the preload instead."""
    if not _started:
        return None
    number = _verbs.join({"device": device, "read": read or "", "alone": alone}, model)
    _log_notes(number)
    return None if number["device"] is None else number["device"] or "cpu"


def written(path: str) -> None:
    """Drops the preloads of a path or URI. Call it when anything other than an engine save has changed the file."""
    if _started and not forked():
        _log_notes(_verbs.sweep(path))


def _log_notes(answer: PreloadAnswer) -> None:
    for note in answer["notes"] or ():
        log.log(logging.INFO if note["routine"] else logging.WARNING, "%s", note["text"])

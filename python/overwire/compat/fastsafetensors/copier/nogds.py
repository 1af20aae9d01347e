"""Implements the copier "nogds": overwire's engine."""

from __future__ import annotations

from typing import Any

from ..st_types import Device
from .base import CopierConstructFunc, EngineCopier
from .registry import register_copier_constructor


class NoGdsFileCopier(EngineCopier):
    """Loads through overwire, which chooses how to read."""


@register_copier_constructor("nogds", NoGdsFileCopier)
def new_nogds_file_copier(
    device: Device, bbuf_size_kb: int = 16 * 1024, max_threads: int = 16, **kwargs: Any
) -> CopierConstructFunc:
    """Makes NoGdsFileCopiers. The engine chooses sizes and threads."""
    return lambda metadata, device, framework: NoGdsFileCopier(metadata, device, None, framework)

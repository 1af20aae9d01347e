"""Implements the copier "gds": overwire's engine, with GPUDirect Storage if it is available."""

from __future__ import annotations

from typing import Any

from ..common import SafeTensorsMetadata, is_cuda
from ..frameworks import FrameworkOpBase
from ..st_types import Device
from .base import CopierConstructFunc, EngineCopier
from .registry import register_copier_constructor


class GdsFileCopier(EngineCopier):
    """Loads through overwire. Plain files are loaded to a GPU through GPUDirect Storage. If GPUDirect Storage is not
    available or does not support a file, overwire logs one warning and chooses another method. fallback_cache has no
    effect."""

    def __init__(
        self,
        metadata: SafeTensorsMetadata,
        device: Device,
        reader: Any,
        framework: FrameworkOpBase,
        fallback_cache: Any = None,
    ) -> None:
        super().__init__(metadata, device, reader, framework)
        self.read = "gds" if is_cuda(device) else None


@register_copier_constructor("gds", GdsFileCopier)
def new_gds_file_copier(
    device: Device,
    bbuf_size_kb: int = 16 * 1024,
    max_threads: int = 16,
    device_memory_budget: int | None = None,
    **kwargs: Any,
) -> CopierConstructFunc:
    """Makes GdsFileCopiers. The engine chooses sizes and threads, and takes device memory only for the tensors."""
    return lambda metadata, device, framework: GdsFileCopier(metadata, device, None, framework)

"""The copier "gds": overwire's engine, by GPUDirect Storage where that is real."""

from __future__ import annotations

from typing import Any

from ..common import SafeTensorsMetadata, is_cuda
from ..frameworks import FrameworkOpBase
from ..st_types import Device
from .base import CopierConstructFunc, EngineCopier
from .registry import register_copier_constructor


class GdsFileCopier(EngineCopier):
    """Loads by overwire. Plain files come to a GPU by GPUDirect Storage; where that
    is not real, or does not reach a file, a warning says so once, and overwire
    chooses how to read. fallback_cache has no effect."""

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
    """Makes GdsFileCopiers. Sizes and threads are the engine's choice, which takes
    no memory of the device but the tensors'."""
    return lambda metadata, device, framework: GdsFileCopier(metadata, device, None, framework)

"""Implements the copier "unified": one copy from pinned memory, for GPUs that share the host's memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from overwire._undo import after_error

from .. import cpp
from ..common import SafeTensorsMetadata, is_cuda
from ..frameworks import FrameworkOpBase, TensorBase
from ..st_types import Device, DType
from .base import CopierConstructFunc, EngineCopier
from .registry import register_copier_constructor


def is_unified_memory_system(framework: FrameworkOpBase | None = None) -> bool:
    """Returns whether the GPU shares the host's memory, according to the name of the first GPU. Returns False without a
    framework. FASTSAFETENSORS_UNIFIED_MEM overrides the result: 1 means yes, any other value no."""
    setting = os.environ.get("FASTSAFETENSORS_UNIFIED_MEM")
    if setting is not None:
        return setting == "1"
    return framework is not None and "gb10" in framework.get_device_name(0).lower()


class UnifiedMemCopier(EngineCopier):
    """Reads the file into anonymous pinned memory, and copies it to the GPU in one call. For the host, for compressed
    files and for a selection of names, this class works like EngineCopier. dma_gate has no effect, because a single
    thread copies."""

    def __init__(
        self,
        metadata: SafeTensorsMetadata,
        device: Device,
        framework: FrameworkOpBase,
        dma_gate: threading.Lock | None = None,
    ) -> None:
        super().__init__(metadata, device, None, framework)
        self._pinned: list[TensorBase] = []

    def _direct(self) -> bool:
        plain = not self.metadata.compressed and self.names is None
        return plain and is_cuda(self.device) and self.framework.get_name() == "pytorch"

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> cpp.gds_device_buffer:
        if not self._direct():
            return super().submit_io(use_buf_register, max_copy_block_size)
        start, length = self.metadata.header_length, self.metadata.data_length
        self._pinned = [self.framework.mmap_file_pinned(self.metadata.src, length, start)]
        gbuf = self.framework.alloc_tensor_memory(length, self.device)
        with after_error(self.framework.free_tensor_memory, gbuf, self.device), after_error(self._pinned.clear):
            error = cpp.memcpy_h2d_async(gbuf.get_base_address(), self._pinned[0].data_ptr(), length)
            if error:
                raise RuntimeError(f"{self.metadata.src}: memcpy_h2d_async: CUDA error {error}")
        return gbuf

    def enable_tensor_readiness(self) -> bool:
        return not self._direct()

    def cancel(self) -> None:
        if self._pinned:
            self.framework.synchronize(self.device)  # the copy may still read the memory
            self._pinned = []
        super().cancel()

    def wait_io(
        self, gbuf: cpp.gds_device_buffer, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> Mapping[str, TensorBase]:
        if not self._pinned:
            return super().wait_io(gbuf, dtype, noalign, owner)
        try:
            self.framework.synchronize(self.device)
        finally:
            self._pinned = []
        return self.metadata.get_tensors(gbuf, self.device, self.metadata.header_length, dtype)


@register_copier_constructor("unified", UnifiedMemCopier)
def new_unified_copier(device: Device, **kwargs: Any) -> CopierConstructFunc:
    """Makes UnifiedMemCopiers."""
    return UnifiedMemCopier

"""The copier "unified": one copy from pinned memory, for GPUs that share the
host's memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from .. import cpp
from ..common import SafeTensorsMetadata, is_cuda
from ..frameworks import FrameworkOpBase, TensorBase
from ..st_types import Device, DType
from .base import CopierConstructFunc, EngineCopier
from .registry import register_copier_constructor

__all__ = ["UnifiedMemCopier", "is_unified_memory_system", "new_unified_copier"]


@functools.cache
def is_unified_memory_system() -> bool:
    """Whether the GPU shares the host's memory. FASTSAFETENSORS_UNIFIED_MEM=0|1
    decides where it is set."""
    import os

    forced = os.environ.get("FASTSAFETENSORS_UNIFIED_MEM", "")
    if forced in ("0", "1"):
        return forced == "1"
    if not cpp.is_cuda_found():
        return False
    from ..frameworks import get_framework_op

    return "gb10" in get_framework_op("pytorch").get_device_name(Device.from_str("cuda:0")).lower()


class UnifiedMemCopier(EngineCopier):
    """Reads the file to anonymous pinned memory and copies it in one go. On the
    host, for compressed files, and for some names only, as EngineCopier."""

    def __init__(self, metadata: SafeTensorsMetadata, device: Device, framework: FrameworkOpBase) -> None:
        super().__init__(metadata, device, None, framework)
        self._pinned: Any = None

    def _direct(self) -> bool:
        plain = not self.metadata.compressed and self.names is None
        return plain and is_cuda(self.device) and self.framework.get_name() == "pytorch"

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> cpp.gds_device_buffer:
        if not self._direct():
            return super().submit_io(use_buf_register, max_copy_block_size)
        start, length = self.metadata.header_length, self.metadata.data_length
        self._pinned = self.framework.mmap_file_pinned(self.metadata.src, length, start).get_raw()
        gbuf = self.framework.alloc_tensor_memory(length, self.device)
        try:
            cpp.memcpy_h2d_async(gbuf.get_base_address(), self._pinned.data_ptr(), length)
        except BaseException:
            self._pinned = None
            self.framework.free_tensor_memory(gbuf, self.device)
            raise
        return gbuf

    def enable_tensor_readiness(self) -> bool:
        return not self._direct()

    def cancel(self) -> None:
        if self._pinned is not None:
            import torch

            torch.cuda.synchronize()  # the copy reads it until then
            self._pinned = None
        super().cancel()

    def wait_io(
        self, gbuf: cpp.gds_device_buffer, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> Mapping[str, TensorBase]:
        if self._pinned is None:
            return super().wait_io(gbuf, dtype, noalign, owner)
        import torch

        try:
            torch.cuda.synchronize()
        finally:
            self._pinned = None
        return self.metadata.get_tensors(gbuf, self.device, self.metadata.header_length, dtype)


@register_copier_constructor("unified", UnifiedMemCopier)
def new_unified_copier(device: Device, **kwargs: Any) -> CopierConstructFunc:
    """Makes UnifiedMemCopiers."""
    return UnifiedMemCopier

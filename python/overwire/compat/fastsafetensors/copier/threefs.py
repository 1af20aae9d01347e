"""The copier "3fs": reads by a reader of the caller's, made for 3FS."""

from __future__ import annotations

from typing import Any

from .. import cpp
from ..common import SafeTensorsMetadata
from ..frameworks import FrameworkOpBase, TensorBase
from ..st_types import Device, DType
from .base import CopierConstructFunc, CopierInterface
from .registry import register_copier_constructor

__all__ = ["ThreeFSFileCopier", "new_threefs_file_copier"]


class ThreeFSFileCopier(CopierInterface):
    """Reads a plain file's data by
    `reader.read_chunked(path=, dev_ptr=, file_offset=, total_length=, chunk_size=) -> bytes read`."""

    def __init__(self, metadata: SafeTensorsMetadata, device: Device, reader: Any, framework: FrameworkOpBase) -> None:
        self.metadata, self.device, self.reader, self.framework = metadata, device, reader, framework

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> cpp.gds_device_buffer:
        meta = self.metadata
        if meta.compressed:
            raise ValueError(f"{meta.src}: it is compressed; load it by the loader 'base'")
        offset, length = meta.header_length, meta.size_bytes - meta.header_length
        gbuf = self.framework.alloc_tensor_memory(length, self.device)
        try:
            got = self.reader.read_chunked(
                path=meta.src,
                dev_ptr=gbuf.get_base_address(),
                file_offset=offset,
                total_length=length,
                chunk_size=max(max_copy_block_size, 0),
            )
            if got != length:
                raise RuntimeError(f"{meta.src}: truncated: {got} of {length} bytes at offset {offset} were read")
        except BaseException:
            self.framework.free_tensor_memory(gbuf, self.device)
            raise
        return gbuf

    def wait_io(
        self, gbuf: cpp.gds_device_buffer, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> dict[str, TensorBase]:
        return self.metadata.get_tensors(gbuf, self.device, self.metadata.header_length, dtype, owner)


@register_copier_constructor("3fs", ThreeFSFileCopier)
def new_threefs_file_copier(
    device: Device, mount_point: str, entries: int = 64, io_depth: int = 0, buffer_size: int = 64 << 20, **kwargs: Any
) -> CopierConstructFunc:
    """Makes ThreeFSFileCopiers that share a reader of fastsafetensor_3fs_reader,
    which must be installed."""
    from fastsafetensor_3fs_reader import ThreeFSFileReader  # type: ignore[import-not-found,unused-ignore]

    reader = ThreeFSFileReader(mount_point=mount_point, entries=entries, io_depth=io_depth, buffer_size=buffer_size)

    def construct(metadata: SafeTensorsMetadata, device: Device, framework: FrameworkOpBase) -> ThreeFSFileCopier:
        return ThreeFSFileCopier(metadata, device, reader, framework)

    return construct

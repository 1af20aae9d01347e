"""Implements the copier "3fs", which reads through the caller's reader for 3FS."""

from __future__ import annotations

from typing import Any

from overwire._undo import after_error

from .. import cpp
from ..common import SafeTensorsMetadata, is_cuda
from ..frameworks import FrameworkOpBase, TensorBase
from ..st_types import Device, DType
from .base import CopierConstructFunc, CopierInterface
from .registry import register_copier_constructor

# The size of the host buffer for reads to a GPU.
_PINNED_BYTES = 256 << 20


class ThreeFSFileCopier(CopierInterface):
    """Reads a plain file's data with
    `reader.read_chunked(path=, dev_ptr=, file_offset=, total_length=, chunk_size=) -> bytes read`.

    dev_ptr is an address in host memory. For a GPU, it is a pinned buffer of up to 256 MiB, which is copied to the GPU
    after each read. The reader may write to the buffer from the host or with CUDA copies. With paddle, dev_ptr is an
    address on the GPU."""

    def __init__(self, metadata: SafeTensorsMetadata, device: Device, reader: Any, framework: FrameworkOpBase) -> None:
        self.metadata, self.device, self.reader, self.framework = metadata, device, reader, framework

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> cpp.gds_device_buffer:
        meta = self.metadata
        if meta.compressed:
            raise ValueError(f"{meta.src}: the file is compressed; load it with the loader 'base'")
        offset, length = meta.header_length, meta.size_bytes - meta.header_length
        through_host = is_cuda(self.device) and self.framework.get_name() == "pytorch"
        gbuf = self.framework.alloc_tensor_memory(length, self.device)
        with after_error(self.framework.free_tensor_memory, gbuf, self.device):
            if not through_host:
                self._read_range(gbuf.get_base_address(), offset, length, max_copy_block_size)
            elif length:
                buffer = self.framework.pinned(min(length, _PINNED_BYTES))
                for at in range(0, length, _PINNED_BYTES):
                    size = min(_PINNED_BYTES, length - at)
                    self._read_range(buffer.data_ptr(), offset + at, size, max_copy_block_size)
                    cpp.memcpy_h2d_async(gbuf.get_base_address() + at, buffer.data_ptr(), size)
                    self.framework.synchronize_current_stream(self.device)
        return gbuf

    def _read_range(self, address: int, offset: int, length: int, block: int) -> None:
        count = self.reader.read_chunked(
            path=self.metadata.src, dev_ptr=address, file_offset=offset, total_length=length, chunk_size=max(block, 0)
        )
        if count != length:
            text = f"{self.metadata.src}: truncated: {count} of {length} bytes at offset {offset} were read"
            raise RuntimeError(text)

    def wait_io(
        self, gbuf: cpp.gds_device_buffer, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None
    ) -> dict[str, TensorBase]:
        return self.metadata.get_tensors(gbuf, self.device, self.metadata.header_length, dtype, owner)


@register_copier_constructor("3fs", ThreeFSFileCopier)
def new_threefs_file_copier(
    device: Device, mount_point: str, entries: int = 64, io_depth: int = 0, buffer_size: int = 64 << 20, **kwargs: Any
) -> CopierConstructFunc:
    """Makes ThreeFSFileCopiers that share a reader of the package fastsafetensor_3fs_reader, which
    must be installed."""
    from fastsafetensor_3fs_reader import ThreeFSFileReader  # type: ignore[import-not-found,unused-ignore]

    reader = ThreeFSFileReader(mount_point=mount_point, entries=entries, io_depth=io_depth, buffer_size=buffer_size)

    def construct(metadata: SafeTensorsMetadata, device: Device, framework: FrameworkOpBase) -> ThreeFSFileCopier:
        return ThreeFSFileCopier(metadata, device, reader, framework)

    construct.reader = reader  # type: ignore[attr-defined]
    return construct

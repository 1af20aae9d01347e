"""Implements nvidia.nvcomp.external_memory. A user's allocator returns an ExternalMemory if the stream must outlive the
memory."""

from __future__ import annotations

from typing import Any

__all__ = ["ExternalMemory"]


class ExternalMemory:
    """Owns a memory object and its stream. The stream is released after the memory."""

    def __init__(self, mem_handle: Any, stream_handle: Any = None) -> None:
        self._mem_handle = mem_handle
        self._stream_handle = stream_handle

    @property
    def ptr(self) -> int:
        """The address of the memory."""
        address: int = self._mem_handle.ptr
        return address

    def __del__(self) -> None:
        del self._mem_handle
        del self._stream_handle

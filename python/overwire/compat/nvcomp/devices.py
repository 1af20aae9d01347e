"""GPUs as Codecs and Arrays see them: the current one, and memory of one."""

from __future__ import annotations

from ... import codecs, gpu
from . import streams

HOST = (1, 0)


def gpu_memory(nbytes: int, device: int, stream: int) -> codecs.Span:
    """Memory of a GPU: of the user's device allocator where one is set."""
    memory = streams.allocate("device", nbytes, stream, device)
    return memory if memory is not None else codecs.Span(*gpu.alloc(nbytes, device, stream)[:3])

"""Implements nvCOMP's Python API, `nvidia.nvcomp`, with open codecs on the CPU and on GPUs.

    import overwire.compat.nvcomp as nvcomp

The names are those of nvCOMP 4.2 to 6.0. LZ4, Snappy, Zstd, Deflate, Gzip, GDeflate and Cascaded do not need a GPU. X16
is overwire's own codec. RAW streams have the algorithms' standard formats. Native and sized streams have overwire's
formats. Streams that nvCOMP wrote are passed to an installed nvCOMP (docs/nvcomp.md). `backends()` returns where each
algorithm runs.
"""

from __future__ import annotations

from .arrays import Array, BatchArray, as_array, as_arrays, from_dlpack
from .codec import Codec, CompressConfig, DecompressConfig, backends
from .enums import (
    ArrayBufferKind,
    BitcompMode,
    BitshuffleMode,
    BitstreamKind,
    CascadedCoarseGrainedEncoding,
    CascadedFineGrainedEncoding,
    CascadedMode,
    CascadedTerminalCodec,
    ChecksumPolicy,
    DecompressBackend,
    ExecutionPolicy,
)
from .streams import CudaStream, set_device_allocator, set_host_allocator, set_pinned_allocator

#: The nvCOMP version that has the same names.
__version__ = "6.0.0"
#: The CUDA version that the kernels are compiled with. Without a GPU, CUDA is not needed.
__cuda_version__ = 13000

__all__ = [
    "Array", "ArrayBufferKind", "BatchArray", "BitcompMode", "BitshuffleMode", "BitstreamKind",
    "CascadedCoarseGrainedEncoding", "CascadedFineGrainedEncoding", "CascadedMode", "CascadedTerminalCodec",
    "ChecksumPolicy", "Codec", "CompressConfig", "CudaStream", "DecompressBackend", "DecompressConfig",
    "ExecutionPolicy", "as_array", "as_arrays", "backends", "from_dlpack", "set_device_allocator", "set_host_allocator",
    "set_pinned_allocator",
]  # fmt: skip

# nvCOMP also exports enum members as names of the module, in this order. Several are called NONE; the last one wins.
for _kind in (
    ArrayBufferKind, BitcompMode, BitshuffleMode, CascadedCoarseGrainedEncoding, CascadedFineGrainedEncoding,
    CascadedMode, CascadedTerminalCodec, ChecksumPolicy, DecompressBackend,
):  # fmt: skip
    globals().update(_kind.__members__)
    __all__ += list(_kind.__members__)
__all__ = sorted(set(__all__))
del _kind

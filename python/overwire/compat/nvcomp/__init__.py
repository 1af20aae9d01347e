"""nvCOMP's Python API over open codecs, on the CPU and on GPUs: `nvidia.nvcomp` as
its programs import it.

    import overwire.compat.nvcomp as nvcomp

The names are those of nvCOMP 4.2 to 6.0. LZ4, Snappy, Zstd, Deflate, Gzip,
GDeflate and Cascaded need no GPU; X16 is our own codec, by its own name. RAW
streams are those of the algorithms; native and sized ones are overwire's, and what
nvCOMP itself wrote of these is read by an installed nvCOMP: docs/nvcomp.md.
`backends()` says what does the work of each algorithm.
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

#: The version whose names these are.
__version__ = "6.0.0"
#: The version of CUDA that the kernels are compiled with; none is needed without a GPU.
__cuda_version__ = 13000

__all__ = [
    "Array",
    "ArrayBufferKind",
    "BatchArray",
    "BitcompMode",
    "BitshuffleMode",
    "BitstreamKind",
    "CascadedCoarseGrainedEncoding",
    "CascadedFineGrainedEncoding",
    "CascadedMode",
    "CascadedTerminalCodec",
    "ChecksumPolicy",
    "Codec",
    "CompressConfig",
    "CudaStream",
    "DecompressBackend",
    "DecompressConfig",
    "ExecutionPolicy",
    "as_array",
    "as_arrays",
    "backends",
    "from_dlpack",
    "set_device_allocator",
    "set_host_allocator",
    "set_pinned_allocator",
]

# Members that nvCOMP has as names of the module too, in the order in which it
# exports them: of NONE, the last one stays.
for _kind in (
    ArrayBufferKind,
    BitcompMode,
    BitshuffleMode,
    CascadedCoarseGrainedEncoding,
    CascadedFineGrainedEncoding,
    CascadedMode,
    CascadedTerminalCodec,
    ChecksumPolicy,
    DecompressBackend,
):
    globals().update(_kind.__members__)
    __all__ += list(_kind.__members__)
__all__ = sorted(set(__all__))
del _kind

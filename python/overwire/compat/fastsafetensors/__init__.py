"""Implements fastsafetensors' API with overwire's loads.

    import overwire.compat.fastsafetensors as fastsafetensors

The names are those of fastsafetensors 0.5.0. Intended differences:

- Files that overwire has compressed load like plain files.
- The caller owns the tensors: they outlive `close()`, and each has its own memory.
- A damaged, short or missing file raises an error on every rank of the group.
- `dtype=` also converts to wider types.
- Arguments about threads and buffers are ignored, because the engine chooses both.
  nogds=False reads through GPUDirect Storage if that is available.
"""

from __future__ import annotations

from . import cpp
from . import dlpack as dlpack
from .allocation import live_allocation_bytes, live_allocation_count
from .auto_loader import AutoLoader
from .common import SafeTensorsMetadata, SingleGroup, TensorFrame, get_device_numa_node
from .config import LoaderConfig, load_config
from .ep_slice import expert_parallel_filter, expert_parallel_filter_from_env, owned_expert_range
from .file_buffer import FilesBufferOnDevice
from .loader import SafeTensorsFileLoader, fastsafe_open
from .parallel_loader import BudgetInfeasibleError, ParallelLoader
from .saver import ParallelSaver

__version__ = "0.5.0+overwire"

__all__ = [
    "AutoLoader", "BudgetInfeasibleError", "FilesBufferOnDevice", "LoaderConfig", "ParallelLoader", "ParallelSaver",
    "SafeTensorsFileLoader", "SafeTensorsMetadata", "SingleGroup", "TensorFrame", "__version__", "cpp",
    "expert_parallel_filter", "expert_parallel_filter_from_env", "fastsafe_open", "get_device_numa_node",
    "live_allocation_bytes", "live_allocation_count", "load_config", "owned_expert_range",
]  # fmt: skip

"""Implements safetensors' API with overwire's reader and writer.

    from overwire.compat.safetensors import safe_open
    from overwire.compat.safetensors.torch import load_file, save_file

Compressed files are read like plain ones. Written files are plain, for any safetensors
reader. Modules: `torch`, `numpy`, `flax`, `mlx`, `tensorflow` and `paddle`, each if its framework is installed.

Intended differences:

- Files that violate a rule of the format are refused, for example files with duplicate names.
- The caller owns each tensor. A tensor is never a view of a shared storage.
- Saving replaces a file atomically.
- A TensorSpec at address 0 is refused, where the original crashes.
- Slices for numpy accept negative bounds and empty ranges, for which the original raises an error.
- numpy gets bfloat16 and the fp8 dtypes as ml_dtypes' types.
- `device` may be a torch.device, `load` accepts any bytes-like object, and a file name may be
  any single path that `overwire.load_file` accepts.
- `prefetch` also loads to the host, and its tensors have their own memory.
- A TypeError names its argument in the message, as in 0.8, instead of in a note.

Errors have the original's classes, and their messages begin with its words. `__cause__` is overwire's error, with file,
tensor, chunk and offset. If the package safetensors is installed, `SafetensorError` is a subclass of that package's.
"""

from __future__ import annotations

from ._bytes import TensorSpec, deserialize, serialize, serialize_file
from ._errors import SafetensorError
from ._files import PySafeSlice, _safe_open_handle, safe_open
from ._prefetch import PrefetchLoader, TensorMeta

__version__ = "0.9.0-rc.1"  # the latest release that has these names

__all__ = [
    "PrefetchLoader", "PySafeSlice", "SafetensorError", "TensorMeta", "TensorSpec", "__version__", "_safe_open_handle",
    "deserialize", "safe_open", "serialize", "serialize_file",
]  # fmt: skip

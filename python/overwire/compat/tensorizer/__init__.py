"""CoreWeave's tensorizer over overwire: files, names and error texts are its own,
the work is the engine's.

    import overwire.compat.tensorizer as tensorizer

Importing this imports neither torch nor anything else that it does not need
yet. What stands out: files are opened by Go, with all cores; an index may be
larger than tensorizer's own 256 KiB, which tensorizer reads; nothing is ever
encrypted in the caller's memory; a TensorSerializer is a context manager too.
docs/tensorizer.md lists what is the same and what differs.
"""

from __future__ import annotations

from . import _crypt as _crypt
from . import protobuf, serialization, stream_io, tensors_pb2, torch_compat, utils
from .serialization import (
    CryptographyError,
    DecryptionParams,
    EncryptionParams,
    FilterFuncType,
    TensorDeserializer,
    TensorSerializer,
    TensorType,
)

#: The version whose names these are.
__version__ = "2.12.1"

__all__ = [
    "CryptographyError",
    "DecryptionParams",
    "EncryptionParams",
    "FilterFuncType",
    "TensorDeserializer",
    "TensorSerializer",
    "TensorType",
    "__version__",
    "protobuf",
    "serialization",
    "stream_io",
    "tensors_pb2",
    "torch_compat",
    "utils",
]

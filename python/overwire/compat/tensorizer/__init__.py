"""CoreWeave's tensorizer over overwire: files, names and error texts are its own,
the work is the engine's.

    import overwire.compat.tensorizer as tensorizer

Importing this imports neither torch nor anything else that it does not need
yet. What stands out: files are opened by Go, with all cores; an index may be
larger than tensorizer's own 256 KiB, which tensorizer reads; nothing is ever
encrypted in the caller's memory; a TensorSerializer is a context manager too.
Not here: `protobuf`, `tensors_pb2`, `to_redis`, redis:// and s3:// streams.
"""

from __future__ import annotations

from . import serialization, stream_io, torch_compat, utils
from ._version import __version__
from .serialization import (
    CryptographyError,
    DecryptionParams,
    EncryptionParams,
    FilterFuncType,
    TensorDeserializer,
    TensorSerializer,
    TensorType,
)

__all__ = [
    "CryptographyError",
    "DecryptionParams",
    "EncryptionParams",
    "FilterFuncType",
    "TensorDeserializer",
    "TensorSerializer",
    "TensorType",
    "__version__",
    "serialization",
    "stream_io",
    "torch_compat",
    "utils",
]

"""Implements CoreWeave's tensorizer with overwire. Files, names and error texts are the same as tensorizer's.

    import overwire.compat.tensorizer as tensorizer

Importing this package does not import torch. These are the main differences: The engine opens files and uses all cores.
An index may be larger than 256 KiB, and tensorizer can still read such a file. Encryption never changes the caller's
memory. A TensorSerializer is also a context manager. docs/tensorizer.md lists all differences.
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

#: The tensorizer version that has the same names.
__version__ = "2.12.1"

__all__ = [
    "CryptographyError", "DecryptionParams", "EncryptionParams", "FilterFuncType", "TensorDeserializer",
    "TensorSerializer", "TensorType", "__version__", "protobuf", "serialization", "stream_io", "tensors_pb2",
    "torch_compat", "utils",
]  # fmt: skip

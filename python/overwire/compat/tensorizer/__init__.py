"""Implements CoreWeave's tensorizer with overwire. Files, names and error texts are the same as tensorizer's.

    import overwire.compat.tensorizer as tensorizer

Importing it does not import torch. The main differences: the engine opens files and uses all cores. An index may be
larger than tensorizer's 256 KiB; tensorizer can still read it. Encryption never changes the caller's memory. A
TensorSerializer is
also a context manager. docs/tensorizer.md lists all differences.
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

#: The tensorizer version with these names.
__version__ = "2.12.1"

__all__ = [
    "CryptographyError", "DecryptionParams", "EncryptionParams", "FilterFuncType", "TensorDeserializer",
    "TensorSerializer", "TensorType", "__version__", "protobuf", "serialization", "stream_io", "tensors_pb2",
    "torch_compat", "utils",
]  # fmt: skip

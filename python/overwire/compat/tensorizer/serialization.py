"""Exports tensorizer.serialization's names."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from ...errors import CryptographyError
from . import _crypt, stream_io, utils
from ._encryption import DecryptionParams, EncryptionParams
from ._reader import TensorDeserializer
from ._types import FileFeatureFlags as _FileFeatureFlags
from ._types import FileHeader as _FileHeader
from ._types import HashMismatchError, HashType, TensorEntry, TensorHash, TensorType
from ._writer import TensorSerializer

__all__ = [
    "TensorSerializer", "TensorDeserializer", "TensorType", "CryptographyError", "EncryptionParams", "DecryptionParams",
    "FilterFuncType",
]  # fmt: skip

#: The type of filters, which are called with a name or with the tuple of a path.
FilterFuncType = Callable[[Any], Any]

logger = logging.getLogger(__name__)

#: Separates the numpy dtype of the same size from the name of a dtype that numpy lacks.
OPAQUE_DTYPE_SEP = "\0"

TENSORIZER_MAGIC = b"|TZR|"
NON_OPAQUE_TENSORIZER_VERSION = 1
OPAQUE_TENSORIZER_VERSION = 2
ENCRYPTION_TENSORIZER_VERSION = 3
META_TENSOR_TENSORIZER_VERSION = 4
LONG_TENSOR_TENSORIZER_VERSION = 5
TENSORIZER_VERSION = 5

cpu_count: int = len(os.sched_getaffinity(0))

_MORE = (HashMismatchError, HashType, TensorEntry, TensorHash, _FileFeatureFlags, _FileHeader, _crypt, stream_io, utils)

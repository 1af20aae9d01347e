"""torch's adapter by its original name. Importing this imports torch."""

# Absolute, so that there is one set of classes under whichever name this is imported.
from overwire.compat._fastsafetensors_torch import (
    TorchOp,
    TorchProcessGroup,
    TorchTensor,
    dtype_convert,
    fst_dtype,
    get_framework_op,
    need_workaround_dtypes,
)
from overwire.compat.fastsafetensors.st_types import DTYPE_SIZES

__all__ = [
    "DTYPE_SIZES",
    "TorchOp",
    "TorchProcessGroup",
    "TorchTensor",
    "dtype_convert",
    "fst_dtype",
    "get_framework_op",
    "need_workaround_dtypes",
]

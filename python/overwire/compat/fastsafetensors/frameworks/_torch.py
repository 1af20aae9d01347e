"""torch's adapter by its original name. Importing this imports torch."""

# Absolute, so that there is one set of classes under whichever name this is imported.
from overwire.compat.fastsafetensors.frameworks.torch_op import TorchOp, TorchProcessGroup, TorchTensor, dtype_convert, get_framework_op

__all__ = ["TorchOp", "TorchProcessGroup", "TorchTensor", "dtype_convert", "get_framework_op"]

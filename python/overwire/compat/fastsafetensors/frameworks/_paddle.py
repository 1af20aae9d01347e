"""paddle's adapter by its original name. Importing this imports paddle."""

# Absolute, so that there is one set of classes under whichever name this is imported.
from overwire.compat.fastsafetensors.frameworks.paddle_op import PaddleOp, PaddleProcessGroup, PaddleTensor, get_framework_op

__all__ = ["PaddleOp", "PaddleProcessGroup", "PaddleTensor", "get_framework_op"]

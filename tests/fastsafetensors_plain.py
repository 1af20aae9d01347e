"""What the tests of overwire.compat.fastsafetensors compare values by."""

from __future__ import annotations

from typing import Any

import torch


def plain(value: Any) -> Any:
    """Without the classes, which are two sets."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if type(value).__name__ in ("DType", "DeviceType"):
        return value.value
    if type(value).__name__ in ("Device", "LoaderConfig", "TensorFrame"):
        return {key: plain(one) for key, one in vars(value).items()}
    return value

"""Helpers for the tests of overwire.compat.fastsafetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import overwire as ow
import overwire.compat.fastsafetensors as fst
import torch
from conftest import every_dtype


def plain(value: Any) -> Any:
    """Converts values to plain types, because each package has its own classes."""
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


def two_files(tmp_path: Path) -> list[str]:
    """Writes a plain file and a compressed one. Together they have every dtype."""
    tensors = every_dtype()
    plain, compressed = str(tmp_path / "plain.safetensors"), str(tmp_path / "compressed.safetensors")
    ow.save_file(tensors, plain, {"made": "here"}, compress=False)
    ow.save_file({f"c.{name}": tensor for name, tensor in tensors.items()} | {"c.w": torch.randn(300, 300).bfloat16()}, compressed)
    return [plain, compressed]


def load(paths: list[str], **named: Any) -> tuple[Any, Any]:
    """Loads files without a group, and returns the loader and the buffer."""
    loader = fst.SafeTensorsFileLoader(fst.SingleGroup(), torch.device("cpu"), **named)
    loader.add_filenames({0: paths})
    return loader, loader.copy_files_to_device()

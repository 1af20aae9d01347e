"""Tests that overwire reads safetensors items which the real torch_checkpointing has written, and that
torch_checkpointing reads compressed items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch

pytest.importorskip("torch_checkpointing")

from torch_checkpointing import CheckpointManager, ItemSpec, SyncCheckpointSaverConfig  # noqa: E402
from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization  # noqa: E402
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig  # noqa: E402


def test_items_are_read_compressed_and_loaded(tmp_path: Path) -> None:
    """load_file reads a safetensors item. After the item is compressed in place, torch_checkpointing's manager loads it
    under patch_safetensors. The tensors of a torch.save item can be converted."""
    torch.manual_seed(1)
    model = torch.nn.Linear(300, 200, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 300, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    weights = model.state_dict()
    manager = CheckpointManager.Config(
        items={"model": ItemSpec(layout=LayoutInfo("model.safetensors", SafetensorsSerialization()))},
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()
    at = tmp_path / "step-3"
    manager.save(str(at), {"model": dict(weights), "optimizer": optimizer.state_dict(), "step": 3})

    def same(tensors: Any) -> bool:
        return all(torch.equal(tensors.pop(name), one) for name, one in weights.items()) and not tensors

    assert same(ow.load_file(at / "model.safetensors"))
    assert ow.convert(at / "model.safetensors", at / "model.safetensors").ratio < 0.8
    into = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}}
    with ow.patch_safetensors():
        manager.load(str(at), into)
    assert same(dict(into["model"]))
    ow.convert(at / "optimizer_0.pt", tmp_path / "optimizer.safetensors")
    moments = ow.load_file(tmp_path / "optimizer.safetensors")
    assert torch.equal(moments["state.0.exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    manager.close()

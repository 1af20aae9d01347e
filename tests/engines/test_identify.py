"""Tests the facts that identify the files of a model whose processed state is stored, without an engine."""

from __future__ import annotations

import os
from pathlib import Path

import overwire as ow
import pytest
import safetensors.torch
import torch
from overwire.integrations.kept_model.identify_files import identify_files


@pytest.mark.parametrize("is_list", [True, False])
def test_other_weights_in_files_of_the_same_size_and_time(tmp_path: Path, is_list: bool) -> None:
    """Two plain files differ only in the bytes of one tensor, and have the same size and time of modification, as in
    images and reproducible builds. Their facts differ, whichever tensor it is."""
    weights = {f"layer.{n}": torch.randn(n * 300 + 1, 7) for n in range(30)} | {"large": torch.randn(5_000_000)}
    path = tmp_path / "model.safetensors"

    def facts_of(tensors: dict[str, torch.Tensor]) -> list[object]:
        safetensors.torch.save_file(tensors, path)
        os.utime(path, ns=(0, 10**18))
        return list(identify_files([str(path)] if is_list else str(tmp_path)))

    before = facts_of(weights)
    assert facts_of(weights) == before
    for name, tensor in weights.items():
        assert facts_of({**weights, name: tensor + 1}) != before, name


def test_compressed_files_are_identified_by_their_checksums(tmp_path: Path) -> None:
    """A compressed file has the same facts after a copy at another time, and no samples are read."""
    path = tmp_path / "model.safetensors"
    ow.save_file({"w": torch.randn(300, 300)}, path)
    before = list(identify_files(str(path)))
    os.utime(path, ns=(0, 10**18))
    assert list(identify_files(str(path))) == before

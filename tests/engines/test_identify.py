"""Tests, without an engine, how the files of a model are identified when its processed state is stored."""

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
    """Plain files that differ only in one tensor, and have the same size and modification time, as in container images
    and reproducible builds, are distinguished, whichever tensor differs."""
    weights = {f"layer.{n}": torch.randn(n * 300 + 1, 7) for n in range(30)} | {"large": torch.randn(5_000_000)}
    path = tmp_path / "model.safetensors"

    def facts_of(tensors: dict[str, torch.Tensor]) -> list[object]:
        safetensors.torch.save_file(tensors, path)
        os.utime(path, ns=(0, 10**18))
        return list(identify_files([str(path)] if is_list else str(tmp_path)))

    before = facts_of(weights)
    assert list(identify_files([str(path)] if is_list else str(tmp_path))) == before
    for name, tensor in weights.items():
        assert facts_of({**weights, name: tensor + 1}) != before, name


def test_one_other_element_with_the_same_time(tmp_path: Path) -> None:
    """One element of a large plain tensor is changed in place, and the time of modification is restored. The facts
    differ, although no sample has the element."""
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"large": torch.zeros(5_000_000)}, path)
    before, times = list(identify_files(str(path))), path.stat()
    while path.stat().st_ctime_ns == times.st_ctime_ns:  # until the file system's clock advances
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert list(identify_files(str(path))) != before


def test_compressed_files_are_identified_by_their_checksums(tmp_path: Path) -> None:
    """A copy of a compressed file with another time is identified as the same file, without reading samples of its
    data."""
    path = tmp_path / "model.safetensors"
    ow.save_file({"w": torch.randn(300, 300)}, path)
    before = list(identify_files(str(path)))
    os.utime(path, ns=(0, 10**18))
    assert list(identify_files(str(path))) == before

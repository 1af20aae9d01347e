"""Tests hf:// without the Hub, using files that huggingface_hub has downloaded."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import overwire as ow
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Makes a one-file model in a cache folder, and makes the Hub unreachable. The setting of the folder has ~ and a
    variable in it."""
    tensors = {"a": np.arange(10, dtype=np.float32)}
    repository = tmp_path / "home" / "hf" / "hub" / "models--org--name"
    for folder in (repository / "snapshots" / COMMIT, repository / "refs"):
        folder.mkdir(parents=True)
    ow.save_file(tensors, repository / "snapshots" / COMMIT / "model.safetensors")
    (repository / "refs" / "main").write_text(COMMIT)
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NAME_OF_FOLDER", "hf")
    monkeypatch.setenv("HF_HOME", "~/$NAME_OF_FOLDER")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    return tensors


def test_a_branch_is_the_recorded_commit(model: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture) -> None:
    """If the Hub cannot be reached, a repository loads from the cache, and a warning names the commit."""
    with caplog.at_level(logging.WARNING, "overwire"):
        loaded = ow.load_file("hf://org/name", framework="np", storage_options={"retries": 0})
    assert np.array_equal(loaded["a"], model["a"])
    assert [COMMIT in record.message for record in caplog.records if "hf://" in record.message] == [True]


def test_a_commit_needs_no_server(model: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture) -> None:
    """A repository at a commit loads from the cache without a warning."""
    loaded = ow.load_file(f"hf://org/name@{COMMIT}", framework="np", storage_options={"retries": 0})
    assert np.array_equal(loaded["a"], model["a"])
    assert not caplog.records


def test_files_that_the_cache_lacks(model: dict[str, np.ndarray]) -> None:
    """The error for a missing file names the cache and the Hub."""
    with pytest.raises(ow.NotFoundError, match="not in the huggingface_hub cache, and the Hub cannot be reached"):
        ow.load_file(f"hf://org/name/other.safetensors@{COMMIT}", framework="np", storage_options={"retries": 0})
    with pytest.raises(ow.IOFailure):
        ow.load_file("hf://org/other", framework="np", storage_options={"retries": 0})


def test_the_error_names_the_offline_setting(model: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a repository that is not in the cache names the setting that forbids requests."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ow.NotFoundError, match="not in the huggingface_hub cache, and HF_HUB_OFFLINE is set"):
        ow.load_file("hf://org/other", framework="np")

"""Tests dcp.async_save while training continues. The save and training must use different groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm
from conftest import ROOT, cleaned

pytest.importorskip("torch")


def ranks(folder: Path, count: int, *steps: str) -> None:
    """Runs the steps of async_worker on count ranks, and asserts that all succeed."""
    argv = [ROOT / "tests" / "groups" / "async_worker.py", folder, f"store-{count}", *steps]
    done = warm.run(argv, env=cleaned() | {"WORLD_SIZE": str(count)}, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done ") == count * len(steps), done.stdout + done.stderr


def test_saves_next_to_training(tmp_path: Path) -> None:
    """Background saves work as documented, with and without a process_group, with two writers at once, and after ranks
    that are late, fail, or destroy their groups."""
    ranks(tmp_path, 2, "documented", "given", "several", "late", "failing", "destroyed")


def test_a_group_of_some_ranks_saves(tmp_path: Path) -> None:
    """If only some ranks save as a group, the others need not take part."""
    ranks(tmp_path, 3, "subset")

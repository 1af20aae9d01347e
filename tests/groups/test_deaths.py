"""Tests what the other ranks do if a rank dies, stops, fails or never arrives before or during the first load of a
group."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm
from conftest import ROOT, cleaned

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402

CASES = [(point, "kill") for point in ("before", "opening", "mapped", "collective", "between")]
CASES += [("before", "stop"), ("collective", "fail")]
SLOW = [("before", "leave"), ("before", "away"), ("opening", "fail"), ("mapped", "fail"), ("between", "stop")]


@pytest.mark.parametrize(
    ("point", "way"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_errors_name_the_lost_rank(tmp_path: Path, point: str, way: str) -> None:
    """Every other rank gets an error that names the lost rank: immediately if it has died or failed, or after the
    group's timeout if it stops or never arrives. No thread or descriptor is left, and a new group can load."""
    torch.manual_seed(7)
    ow.save_file({f"w{at}": torch.randn(1024, 1024).bfloat16() for at in range(8)}, tmp_path / "model.safetensors")
    done = warm.run([ROOT / "tests" / "groups" / "group_deaths.py", tmp_path, point, way], env=cleaned())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == (3 if way == "fail" else 2), done.stdout + done.stderr

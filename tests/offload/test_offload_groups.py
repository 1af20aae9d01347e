"""Tests that the ranks of a group stream the blocks of a model together, on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm
from conftest import ROOT, cleaned

pytest.importorskip("torch")

MEETING = ("same", "arguments", "beginning", "order", "escapes")
CASES = [(2, MEETING), (4, ("same", "order")), (8, ("same",)), (2, ("late",))]
CASES += [(3, (case,)) for case in ("killed", "closed", "interrupted", "dies_beginning")]


@pytest.mark.parametrize(("ranks", "cases"), CASES)
def test_ranks_stream_together(tmp_path: Path, ranks: int, cases: tuple[str, ...]) -> None:
    """Each rank gets the resident model's outputs, or an error that names the block and the rank. Afterwards it has all
    weights."""
    command = [ROOT / "tests" / "offload" / "group_ranks.py", tmp_path, str(ranks), *cases]
    done = warm.run(command, env=cleaned())
    assert done.returncode == 0, done.stdout + done.stderr

"""Tests that ranks gather the parts of blocks on fake GPUs.

`make fakepy` runs this on the fake driver. bench/gpu/device_offload_group.py tests offload with a group on real GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import warm
from conftest import ROOT, cleaned
from overwire import gpu

pytest.importorskip("torch")
if gpu.count() < 2 or gpu.torch_of() is not None:
    pytest.skip("needs the fake driver", allow_module_level=True)


CASES = [(2, "mapped"), (4, "mapped"), (8, "mapped"), (2, "file"), (4, "file"), (8, "file"), (2, "host"), (3, "killed")]


@pytest.mark.parametrize(("ranks", "case"), CASES)
def test_ranks_gather_parts(tmp_path: Path, ranks: int, case: str) -> None:
    """Each rank decodes each block from the parts of all ranks, with steps in random order. If a rank dies, every other
    rank raises an error that names it, and still has all parts."""
    done = warm.run([ROOT / "tests" / "gpu" / "gather_ranks.py", tmp_path, str(ranks), case], env=cleaned())
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == ranks - (case == "killed")

"""Each file of examples/ runs as it stands, in an empty folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import warm
from conftest import ROOT, cleaned

# demo.py is the whole main job; `make demo` runs it.
AT_IMPORT = {"preloading.py"}  # what happens while torch is imported
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py") if p.name != "demo.py")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.imports_torch] * (name in AT_IMPORT)) for name in EXAMPLES]
)
def test_example(tmp_path: Path, name: str) -> None:
    shutil.copy(ROOT / "examples" / name, tmp_path)
    done = (warm.fresh if name in AT_IMPORT else warm.run)([name], cwd=tmp_path, env=cleaned())
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6

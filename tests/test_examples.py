"""Each file of examples/ runs as it stands, in an empty folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

# demo.py is the whole main job; `make demo` runs it.
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py") if p.name != "demo.py")


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(tmp_path: Path, name: str) -> None:
    shutil.copy(ROOT / "examples" / name, tmp_path)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OVERWIRE_", "PRELOAD"))}
    done = subprocess.run([sys.executable, name], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6

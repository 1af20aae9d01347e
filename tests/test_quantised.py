"""Quantisers of transformers 5 and 4.57 under `patch_safetensors`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import ROOT
from test_transformers import FIVE, run


@pytest.mark.parametrize("release", [pytest.param("4.57", marks=pytest.mark.slow), "5"])
def test_quantised_models_are_those_of_the_unpatched_load(release: str, tmp_path: Path) -> None:
    """Quantised before and while loading, every part of every tensor: see the program, which says
    what it leaves out. `OVERWIRE_TEST_QUANTISERS` is a path of folders with their packages."""
    if release == "5" and not FIVE.is_dir():
        pytest.skip(f"no transformers 5 in {FIVE}: make venv puts it there")
    pytest.importorskip("transformers")
    more = os.environ.get("OVERWIRE_TEST_QUANTISERS", "")
    if release == "5":
        path: Path | None = Path(os.pathsep.join(filter(None, (str(FIVE), more))))
    else:
        path = Path(more) if more else None
    output = run([str(ROOT / "tests" / "quantised_program.py"), str(tmp_path / "a b")], tmp_path, path)
    print(output)
    assert output.splitlines()[-1].startswith(f"ok {release}"), output
    assert "mxfp4 equal" in output, output  # needs no package

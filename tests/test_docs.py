"""What the documents say is held by tests that are there."""

from __future__ import annotations

import ast
import re

from conftest import ROOT


def test_each_row_on_fastsafetensors_names_its_tests() -> None:
    there = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        there |= {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    rows = [line for line in (ROOT / "docs" / "fastsafetensors.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.endswith("| held by |")]
    assert len(rows) > 30
    for row in rows:
        names = re.findall(r"\btest_\w+", row.rsplit("|", 2)[1])
        assert names, row
        assert set(names) <= there, row

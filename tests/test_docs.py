"""What the documents say is held by tests that are there."""

from __future__ import annotations

import ast
import re

import pytest
from conftest import ROOT


def _tests() -> set[str]:
    """The names of all tests in tests/ and, of Go's, below gosrc."""
    there: set[str] = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        there |= {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    for path in (ROOT / "gosrc").rglob("*_test.go"):
        there |= set(re.findall(r"^func (Test\w+)\(t \*testing\.T\)", path.read_text(), re.M))
    return there


@pytest.mark.parametrize("page, least", [("fastsafetensors", 30), ("nyacomp", 50)])
def test_each_row_names_its_tests(page: str, least: int) -> None:
    there = _tests()
    rows = [line for line in (ROOT / "docs" / f"{page}.md").read_text().split("held by |\n", 1)[1].splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.endswith(("| held by |", "| below | |"))]
    assert len(rows) > least
    for row in rows:
        names = re.findall(r"\b[Tt]est_?\w+", row.rsplit("|", 2)[1])
        assert names, row
        assert set(names) <= there, (row, set(names) - there)


def test_slow_tests_are_marked_as_such() -> None:
    """A * after a test's name says that `make test` leaves it out, and no other does."""
    slow = set()
    for path in (ROOT / "tests").glob("test_nyacomp*.py"):
        slow |= set(re.findall(r"^@pytest\.mark\.slow\n(?:@.*\n)*def (test_\w+)", path.read_text(), re.M))
    page = (ROOT / "docs" / "nyacomp.md").read_text()
    named = set(re.findall(r"\b(test_\w+)", page)) - {"test_"}
    assert set(re.findall(r"\b(test_\w+)\*", page)) == slow & named

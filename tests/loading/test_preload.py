"""Tests preloads that are started by a call or by the import: loads that join them, progress, cancellation and
errors."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from pathlib import Path

import overwire as ow
import pytest
import torch
from conftest import same


def save(folder: Path) -> None:
    """Saves one file of each kind that can be preloaded."""
    ow.save_file({"a": torch.arange(1000), "b": torch.ones(300, 300)}, folder / "m.safetensors")
    ow.save_file({"a": torch.arange(1000)}, folder / "plain.safetensors", compress=False)
    ow.compress_pickle({"w": torch.arange(9)}, folder / "x.pkl")
    index = {"metadata": {}, "weight_map": {"a": "m.safetensors", "b": "m.safetensors"}}
    (folder / "i.index.json").write_text(json.dumps(index))
    (folder / "repo").mkdir()
    shutil.copy(folder / "m.safetensors", folder / "repo" / "model.safetensors")


@pytest.mark.parametrize("compress", [True, False], ids=["compressed", "plain"])
def test_a_load_joins_its_preload(tmp_path: Path, compress: bool) -> None:
    tensors = {"a": torch.randn(500, 400), "e": torch.empty(0), "s": torch.tensor(3)}
    path = tmp_path / "m"
    ow.save_file(tensors, path, compress=compress)
    job = ow.preload(path)
    assert job.wait(60) and job.path == str(path) and str(path) in repr(job)
    progress = job.progress()
    assert progress.bytes == progress.total_bytes == 500 * 400 * 4 + 8 and progress.tensors == 3
    path.rename(tmp_path / "gone")  # the data is in memory and is not read again
    (tmp_path / "m").symlink_to(tmp_path / "gone")
    loaded = ow.load_file(path)
    for name, tensor in tensors.items():
        same(loaded[name], tensor)
    again = ow.load_file(path)
    again["a"].zero_()
    same(loaded["a"], tensors["a"])


def test_every_reading_function_joins_a_preload(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(50, 40) for i in range(9)}
    path = tmp_path / "m"
    ow.save_file(tensors, path)
    verbs = [
        lambda: ow.load_file(path),
        lambda: ow.load_file([path]),
        lambda: ow.load_file(path, keys=["t5", "t1"]),
        lambda: dict(ow.stream(path)),
        lambda: dict(ow.stream(path, keys=["t3"])),
        lambda: {k: torch.from_numpy(v) for k, v in ow.load_file(path, framework="np").items()},
    ]
    for verb in verbs:
        for wait in (True, False):
            job = ow.preload(path)
            if wait:
                job.wait()
            for name, tensor in verb().items():
                same(tensor, tensors[name])


def test_threads_that_load_at_once_get_separate_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m"
    ow.save_file({"a": torch.arange(100_000)}, path)
    ow.preload(path)
    loaded = []
    threads = [threading.Thread(target=lambda: loaded.append(ow.load_file(path)["a"])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({t.data_ptr() for t in loaded}) == 8
    for tensor in loaded:
        same(tensor, torch.arange(100_000))


def test_cancel_and_load_anyway(tmp_path: Path) -> None:
    """A load works after its preload was cancelled."""
    path = tmp_path / "m"
    ow.save_file({"a": torch.randn(3000, 1000)}, path)
    job = ow.preload(path)
    job.cancel()
    with contextlib.suppress(ow.CancelledError):
        job.wait(60)
    assert ow.load_file(path)["a"].shape == (3000, 1000)
    job.cancel()


def test_result_accepts_a_timeout(tmp_path: Path) -> None:
    path = tmp_path / "m"
    ow.save_file({"a": torch.randn(10)}, path)
    assert ow.preload(path).result(60) is None


def test_wait_and_the_load_raise_the_error_of_a_preload(tmp_path: Path) -> None:
    path = tmp_path / "m"
    job = ow.preload(path)
    with pytest.raises(FileNotFoundError):
        job.wait(60)
    with pytest.raises(FileNotFoundError):
        ow.load_file(path)
    path.write_bytes(b"nonsense" * 99)
    job = ow.preload(path)
    with pytest.raises(ow.FormatError):
        job.wait(60)
    with pytest.raises(ow.FormatError):
        ow.load_file(path)
    ow.save_file({"a": torch.arange(3)}, path)
    same(ow.load_file(path)["a"], torch.arange(3))
    job = ow.preload(path, device="cuda:63")  # no machine has such a GPU
    with pytest.raises(ow.DeviceError):
        job.wait(60)
    same(ow.load_file(path)["a"], torch.arange(3))  # does not join the preload, because the device differs
    with pytest.raises(ow.NotSupportedError):
        ow.preload(path.with_suffix(".pkl"), device="cuda")
    with pytest.raises(ow.ArgumentError), open(path, "rb") as file:
        ow.preload(file)


_WHAT = ["m.safetensors", "plain.safetensors", "repo", "i.index.json", "x.pkl", "nya/meta.csv", "meta.csv"]


# Few tests use nyacomp's variable, because each of them imports torch.
@pytest.mark.parametrize(
    ("what", "name"),
    [(what, "OVERWIRE_PRELOAD") for what in _WHAT]
    + [pytest.param(what, "PRELOAD_PATH", marks=[] if what == "meta.csv" else pytest.mark.slow) for what in _WHAT],
)
def test_the_import_starts_a_preload(tmp_path: Path, script, name: str, what: str) -> None:
    """Importing overwire preloads the model that a variable names, without importing torch. The model can be loaded
    from any working folder."""
    save(tmp_path)
    script(
        f"""
import os, sys
{"import overwire.compat.nyacomp" if name == "PRELOAD_PATH" else ""}
import overwire as ow
assert "overwire._core" in sys.modules and "torch" not in sys.modules
{"" if name == "PRELOAD_PATH" else "assert 'numpy' not in sys.modules"}
os.chdir("/")
if {what!r} in ("x.pkl", "nya/meta.csv", "meta.csv"):
    assert ow.load_compressed_pickle({str(tmp_path)!r} + "/x.pkl")["w"].sum() == 36
else:
    framework = "pt" if {what!r} == "m.safetensors" else "np"  # importing torch takes seconds
    assert ow.load_file({str(tmp_path / what)!r}, framework=framework)["a"].sum() == 499500
""",
        **{name: what},
    )


@pytest.mark.parametrize("stop", ["NO_PRELOAD", "LOAD_UNCOMPRESSED", "OVERWIRE_NO_PRELOAD"])
def test_variables_that_prevent_a_preload(tmp_path: Path, script, torch_script, stop: str) -> None:
    """OVERWIRE_PRELOAD works without nyacomp's drop-in. nyacomp's own variables need it."""
    save(tmp_path)
    under = "import sys, overwire.compat.nyacomp\nprint('overwire._core' in sys.modules)"
    alone = "import sys, overwire\nprint('overwire._core' in sys.modules)"
    assert torch_script(under, PRELOAD_PATH="m.safetensors", **{stop: "1"}).stdout == "False\n"
    assert torch_script(under, PRELOAD_PATH="m.safetensors", **{stop: "0"}).stdout == "True\n"
    assert torch_script(under).stdout == "False\n"
    assert script(alone, PRELOAD_PATH="m.safetensors").stdout == "False\n"
    ours = "False\n" if stop == "OVERWIRE_NO_PRELOAD" else "True\n"
    assert script(alone, OVERWIRE_PRELOAD="m.safetensors", **{stop: "1"}).stdout == ours


@pytest.mark.parametrize("what", ["nope.safetensors", "nope/meta.csv", "bad.pkl", "bad.csv", "bad.pt", "scheme://x"])
def test_a_wrong_path_warns_at_import_and_fails_at_the_load(tmp_path: Path, script, what: str) -> None:
    (tmp_path / "bad.pkl").write_bytes(b"\x80\x05N.")
    (tmp_path / "bad.csv").write_text("0\nnonsense")
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04 a zip archive")
    done = script(
        f"""
import logging
logging.basicConfig()
import overwire as ow
try:
    ow.load_file({what!r}, framework="np")
except ow.OverwireError as error:
    print(type(error).__name__, error)
""",
        OVERWIRE_PRELOAD=what,
    )
    assert "OverwireError" not in done.stderr and "Traceback" not in done.stderr
    assert "Error" in done.stdout
    if "://" not in what:
        assert f"OVERWIRE_PRELOAD={what}: nothing is preloaded" in done.stderr


def test_a_preload_runs_without_the_gil(torch_script) -> None:
    torch_script(
        """
import os
import torch, overwire as ow
ow.save_file({f"t{i}": torch.randn(512, 512) for i in range(16)}, "m")
job = ow.preload("m")
before = job.progress()
# This one C call holds the GIL until it returns.
sum(range(60_000_000))
after = job.progress()
assert after.bytes == after.total_bytes > 0, (before, after)
assert job.wait(0)
"""
    )


def test_exit_during_a_preload(tmp_path: Path, script) -> None:
    """The interpreter exits cleanly while a preload runs, even after a failed load."""
    ow.save_file({f"t{i}": torch.randn(700, 700) for i in range(9)}, tmp_path / "m")
    for _ in range(10):
        script("import overwire as ow", OVERWIRE_PRELOAD="m")
    for framework in ["np"] * 4 + ["pt"]:
        source = f"import overwire as ow\ntry:\n    ow.load_file('nope', framework={framework!r})\nexcept OSError: pass"
        script(source, OVERWIRE_PRELOAD="m")


def test_a_preload_to_the_host_touches_no_gpu(script) -> None:
    script("import overwire as ow, numpy as np; ow.save_file({'a': np.arange(1000)}, 'm')")
    script(
        """
import os, overwire as ow
assert ow.preload("m").wait(60)  # joins the preload that OVERWIRE_PRELOAD started
assert "libcuda" not in open("/proc/self/maps").read()
if os.fork() == 0:  # as in a program with workers
    os._exit(0)
assert os.wait()[1] == 0
assert ow.load_file("m", framework="np")["a"][-1] == 999
""",
        OVERWIRE_PRELOAD="m",
        OVERWIRE_PRELOAD_DEVICE="host",
    )

"""Tests background saves: each file is complete or absent, each error is raised or logged, and at most one save runs
per path."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import stores

Run = Callable[..., subprocess.CompletedProcess[str]]
FOLDERS = [str(Path(__file__).parent), str(Path(stores.__file__).parent)]  # programs import from both


def weights(seed: int, count: int = 40_000) -> dict[str, Any]:
    """Returns tied, strided, empty and scalar arrays."""
    r = np.random.default_rng(seed)
    w = (r.standard_normal(count) * 0.02).astype(np.float32)
    return {
        "w": w,
        "tied": w,
        "odd": w[1:1002:3].copy(),
        "scalar": np.array(seed),
        "none": np.zeros((0, 3), np.float16),
        "bytes": w.view(np.uint8)[:999],
    }


def check(path: str | Path, want: dict[str, Any]) -> None:
    """Asserts the contents of a file or folder."""
    got = ow.load_file(path, framework="np")
    assert got.keys() == want.keys()
    for name, one in want.items():
        assert got[name].dtype == one.dtype and got[name].shape == one.shape and got[name].tobytes() == one.tobytes(), (
            name
        )


def hidden(folder: Path) -> list[str]:
    """Returns the temporary files that a save has left."""
    return [name for name in os.listdir(folder) if name.startswith(".")]


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Simulates a full disk: no file that this process writes can become larger than `most` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("how", [{}, {"compress": False}, {"max_shard_size": 50_000}, {"level": "smaller"}, {"digests": True}])
def test_background_saves_write_the_same_files(tmp_path: Path, how: dict[str, Any]) -> None:
    """A background save writes the tensors as they were at the call, in the same bytes as a save that waits."""
    tensors = weights(1)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    want = ow.save_file(tensors, tmp_path / "a/m.safetensors", {"k": "v"}, **how)
    kept = {name: t.copy() for name, t in tensors.items()}
    saving = ow.save_file(tensors, tmp_path / "b/m.safetensors", {"k": "v"}, wait=False, **how)
    for t in tensors.values():
        t.fill(0)
    report = saving.wait()
    assert report is saving.report is saving.wait(5) and saving.done() and not saving.cancel()
    assert report.staged > 0 == want.staged and (report.bytes_in, report.bytes_out) == (want.bytes_in, want.bytes_out)
    assert saving.progress() == (report.bytes_in, report.bytes_in, report.tensors, report.tensors)
    assert sorted(os.listdir(tmp_path / "a")) == sorted(os.listdir(tmp_path / "b"))
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    check(tmp_path / "b", kept)
    ow.verify(tmp_path / "b")


def test_a_report_says_where_the_time_went(tmp_path: Path) -> None:
    """The report of a save, a conversion or a tensorizer file has times for exactly the stages that it consists of."""
    tensors = weights(2)
    rest = {"plan", "write", "publish"}
    ways: list[tuple[Any, set[str]]] = [
        (lambda: ow.save_file(tensors, tmp_path / "c.safetensors"), rest | {"encode", "hash"}),
        (lambda: ow.save_file(tensors, tmp_path / "c.safetensors", wait=False).wait(), rest | {"encode", "hash"}),
        (lambda: ow.save_file(tensors, tmp_path / "p.safetensors", compress=False), rest),
        (lambda: ow.save_file(tensors, tmp_path / "t.tensors"), rest | {"hash"}),
        (lambda: ow.convert(tmp_path / "p.safetensors", tmp_path / "d.safetensors"), rest | {"read", "encode", "hash"}),
        (lambda: ow.convert(tmp_path / "c.safetensors", tmp_path / "e.safetensors", compress=False), rest | {"read", "hash"}),
    ]
    for number, (way, stages) in enumerate(ways):
        report = way()
        assert list(report.stages) == ["plan", "read", "encode", "hash", "write", "publish"]
        assert {name for name, seconds in report.stages.items() if seconds > 0} == stages, number
    assert {"plan", "encode", "hash", "write", "publish"} <= ow.metrics()["save"].stages.keys()


def test_tensorizer_files(tmp_path: Path) -> None:
    """A .tensors file can be saved in the background."""
    tensors = weights(2)
    ow.save_file(tensors, tmp_path / "m.tensors", wait=False).wait()
    check(tmp_path / "m.tensors", tensors)


def test_modules_and_pickles(torch_script: Run) -> None:
    """With wait=False, save_model, compress_pickle and `compress` return a Saving. Their files contain the values at
    the call, not later changes."""
    done = torch_script(
        textwrap.dedent("""
        import torch, overwire as ow
        m = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
        want = {k: v.clone() for k, v in m.state_dict().items()}
        both = [ow.save_model(m, "m.safetensors", wait=False), ow.compress_pickle({"m": m, "n": [1]}, "m.pkl", wait=False)]
        both += [ow.compress(m, "c.pkl", wait=False)]
        with torch.no_grad():
            for t in m.state_dict().values():
                t.zero_()
        for one in both:
            report = one.wait()
            assert isinstance(one, ow.Saving) and report.bytes_in >= 64 * 64 * 4 and one.done(), one
        back = [ow.load_file("m.safetensors"), ow.load_compressed_pickle("m.pkl", trust=True)["m"].state_dict()]
        back += [ow.load_compressed("c.pkl", trust=True).state_dict()]
        for one in back:
            assert one.keys() == want.keys() and all(torch.equal(one[k], want[k]) for k in want)
        import os
        assert not [n for n in os.listdir(".") + os.listdir("nya") if n.startswith(".")]
        try:
            ow.compress_pickle(m, "m.pkl", max_memory=1)
        except ow.ArgumentError as error:
            assert "wait=False" in str(error)
        else:
            raise AssertionError
        """)
    )
    assert done.returncode == 0, done.stderr


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A save that may need more than max_memory is refused before it writes. Contradictory arguments are also
    refused."""
    with pytest.raises(ow.OutOfMemoryError) as caught:
        ow.save_file(weights(3), tmp_path / "m.safetensors", wait=False, max_memory="100KB")
    assert caught.value.asked > 100_000 and not os.listdir(tmp_path)
    with pytest.raises(ow.ArgumentError, match="wait=False"):
        ow.save_file(weights(3), tmp_path / "m.safetensors", max_memory="1GB")
    ow.save_file(weights(3), tmp_path / "m.safetensors", wait=False, max_memory="64MiB").wait()


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A write error is logged, and `wait` raises it. The old file and no temporary file remains, and the next save
    works."""
    path = tmp_path / "m.safetensors"
    ow.save_file(weights(4), path)
    before = path.read_bytes()
    with small_files(20_000), caplog.at_level(logging.ERROR, "overwire"):
        saving = ow.save_file(weights(5), path, wait=False)
        for _ in range(2):
            with pytest.raises(ow.IOFailure):
                saving.wait()
    assert "has failed" in caplog.text and str(path) in caplog.text and "failed" in repr(saving)
    assert saving.report is None and saving.done() and path.read_bytes() == before and not hidden(tmp_path)
    ow.save_file(weights(5), path, wait=False).wait()
    check(path, weights(5))


def test_the_next_save_raises_an_error_that_no_call_has_seen(tmp_path: Path) -> None:
    """If no call has waited for a failed save, the next save to its path raises the error. This happens once, and not
    for saves to other paths."""
    path = tmp_path / "m.safetensors"
    (tmp_path / "link").symlink_to(tmp_path)
    for again, wait in ((path, True), (f"file://{path}", False), (tmp_path / "link/m.safetensors", False)):
        with small_files(20_000):
            saving = ow.save_file(weights(6), path, wait=False)
            while not saving.done():
                time.sleep(0.01)
        ow.save_file({}, tmp_path / "other.safetensors")
        with pytest.raises(ow.IOFailure):
            ow.save_file(weights(7), again) if wait else ow.save_file(weights(7), again, wait=False)
        assert not path.exists()
    ow.save_file(weights(7), path)
    check(path, weights(7))


def test_tensors_that_change(tmp_path: Path) -> None:
    """If a caller changes tensors during a save, which the documentation forbids, nothing crashes and the next save
    works."""
    tensors, over = weights(23, 4_000_000), threading.Event()

    def change() -> None:
        seed = 0
        while not over.is_set():
            seed += 1
            tensors["w"][:: 1 + seed % 7] = seed

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for wait in (True, False):
            with contextlib.suppress(ow.OverwireError):
                saved = (
                    ow.save_file(tensors, tmp_path / "m.safetensors", wait=True)
                    if wait
                    else ow.save_file(tensors, tmp_path / "m.safetensors", wait=False)
                )
                assert isinstance(saved, ow.Report) or saved.wait().tensors == len(tensors)
    finally:
        over.set()
        thread.join()
    ow.save_file(weights(24), tmp_path / "m.safetensors")
    check(tmp_path / "m.safetensors", weights(24))
    assert not hidden(tmp_path)


def test_saves_of_one_path_follow_one_another(tmp_path: Path) -> None:
    """If several threads start saves to one path, the file of the last save remains. The file is complete at all
    times."""
    path, errors = tmp_path / "m.safetensors", []

    def several(seed: int) -> None:
        try:
            for k in range(4):
                ow.save_file(weights(100 * seed + k), path, wait=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=several, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    ow.save_file(weights(8), path, wait=False)
    ow.save_file(weights(9), path)
    check(path, weights(9))
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_cancelled(tmp_path: Path) -> None:
    """After a cancelled save, only the old file remains, `wait` raises CancelledError, and later saves work."""
    path = tmp_path / "m.safetensors"
    ow.save_file(weights(10), path)
    stopped = 0
    for _ in range(20):
        saving = ow.save_file(weights(11, 3_000_000), path, wait=False)
        if saving.cancel():
            stopped += 1
            with pytest.raises(ow.CancelledError):
                saving.wait()
            assert saving.report is None and not hidden(tmp_path)
            check(path, weights(10))
        else:
            ow.save_file(weights(10), path)
    assert stopped
    ow.save_file(weights(12), path)


def test_a_wait_that_times_out(tmp_path: Path) -> None:
    """If a wait times out, its error says so, and the save continues."""
    saving = ow.save_file(weights(13, 3_000_000), tmp_path / "m.safetensors", wait=False)
    try:
        saving.wait(1e-9)
    except ow.DeadlineError as error:
        assert "it continues" in str(error)
    for wrong in (0, -1, True, "1"):
        with pytest.raises(ow.ArgumentError):
            saving.wait(wrong)  # type: ignore[arg-type]
    saving.wait(60)
    check(tmp_path / "m.safetensors", weights(13, 3_000_000))


EXITING = """
import sys
sys.path[:0] = {folders!r}
import overwire as ow, test_saving
tensors = test_saving.weights(14, 2_000_000)
ow.save_file(test_saving.weights(14), "old.safetensors")
saving = ow.save_file(tensors, "m.safetensors", wait=False)
for t in tensors.values():
    t.fill(0)
"""


def test_the_interpreter_ends(tmp_path: Path, script: Run) -> None:
    """A save that is running when the program exits is completed, even after an exception."""
    for end in ("", "sys.exit(0)", "raise SystemExit(0)"):
        done = script(EXITING.format(folders=FOLDERS) + end)
        assert done.returncode == 0, done.stderr
        check(tmp_path / "m.safetensors", weights(14, 2_000_000))
        assert not hidden(tmp_path)


def test_killed(tmp_path: Path) -> None:
    """If the process is killed during a save, the old file stays and the next save removes temporary files."""
    path = tmp_path / "m.safetensors"
    ow.save_file(weights(15), path)
    program = (
        EXITING.format(folders=FOLDERS)
        + "print('staged', flush=True)\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL and "staged" in done.stdout, done.stderr
    try:
        check(path, weights(15))
    except AssertionError:
        check(path, weights(14, 2_000_000))  # the save completed before the signal
    for name in hidden(tmp_path):
        os.utime(tmp_path / name, (1, 1))  # old enough to be removed
    ow.save_file(weights(16), path)
    assert not hidden(tmp_path)


INTERRUPTED = """
import os, signal, sys, threading
sys.path[:0] = {folders!r}
import overwire as ow, test_saving
tensors = test_saving.weights(17, 20_000_000)
ow.save_file(test_saving.weights(18), "m.safetensors")
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    saving = ow.save_file(tensors, "m.safetensors", {how})
    if {background}:
        saving.wait()
except KeyboardInterrupt:
    print("interrupted")
if {background}:
    try:
        saving
    except NameError:
        pass  # interrupted before the tensors were staged
    else:
        saving.wait()
"""


@pytest.mark.parametrize("background", [False, True])
def test_interrupted(tmp_path: Path, script: Run, background: bool) -> None:
    """While a save is still reading its tensors, Ctrl-C ends the save. After that, Ctrl-C only ends the wait."""
    done = script(INTERRUPTED.format(folders=FOLDERS, how="wait=False" if background else "", background=background))
    assert done.returncode == 0, done.stderr
    assert not hidden(tmp_path)
    try:
        check(tmp_path / "m.safetensors", weights(18))
    except AssertionError:
        check(tmp_path / "m.safetensors", weights(17, 20_000_000))


def test_a_forked_child_is_refused(tmp_path: Path, script: Run) -> None:
    """A forked child that waits for its parent's save gets ForkedError at once. The save continues."""
    done = script(
        textwrap.dedent(f"""
        import os, sys
        sys.path[:0] = {FOLDERS!r}
        import overwire as ow, test_saving
        saving = ow.save_file(test_saving.weights(19, 8_000_000), "m.safetensors", wait=False)
        child = os.fork()
        if child == 0:
            refused = 0
            for ask in (saving.wait, saving.cancel, saving.done, saving.progress):
                try:
                    ask()
                except ow.ForkedError:
                    refused += 1
            os._exit(0 if refused in (0, 4) else 1)
        assert os.waitpid(child, 0)[1] == 0
        saving.wait()
        """)
    )
    assert done.returncode == 0, done.stderr
    check(tmp_path / "m.safetensors", weights(19, 8_000_000))


def test_a_signal_handler_saves(tmp_path: Path, script: Run) -> None:
    """If a signal handler interrupts a save and saves to the same path, it gets an error instead of waiting forever."""
    done = script(
        textwrap.dedent(f"""
        import signal, sys
        sys.path[:0] = {FOLDERS!r}
        import overwire as ow, test_saving
        outcomes = []
        def handler(*_):
            try:
                ow.save_file({{}}, "m.safetensors", wait=False)
                outcomes.append("saved")
            except ow.ArgumentError as error:
                outcomes.append("refused")
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        ow.save_file(test_saving.weights(20, 20_000_000), "m.safetensors", wait=False).wait()
        while not outcomes:
            pass
        """)
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wait", [True, False])
def test_s3_refuses_a_part_of_an_upload(wait: bool) -> None:
    """If S3 refuses a part of an upload, save raises a typed error, the existing object stays, and the next save
    works."""
    large = {"noise": np.random.default_rng(22).integers(0, 256, 30_000_000, np.uint8)}
    with stores.s3() as (options, _), stores.front(str(options["endpoint_url"])) as (url, between):
        options["endpoint_url"] = url
        uri = "s3://models/saving.safetensors"

        def save(tensors: dict[str, Any]) -> None:
            if wait:
                ow.save_file(tensors, uri, storage_options=options)
            else:
                ow.save_file(tensors, uri, storage_options=options, wait=False).wait()

        for tensors in (weights(21), large):
            between.refuse = "partNumber=2"
            if tensors is large:
                with pytest.raises(ow.AccessError):
                    save(tensors)
                assert any("partNumber=1" in path for _, path, *_ in between.asked)
                got = ow.load_file(uri, framework="np", storage_options=options)
                assert got["w"].tobytes() == weights(21)["w"].tobytes()
            between.refuse = ""
            save(tensors)
        got = ow.load_file(uri, framework="np", storage_options=options)
        assert got["noise"].tobytes() == large["noise"].tobytes()

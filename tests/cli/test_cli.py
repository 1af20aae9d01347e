"""Tests the command `overwire` as a process: its output, exit status and files."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import overwire
import processes
import pytest


def run(*argv: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "overwire", *argv], capture_output=True, text=True, timeout=120, check=False, **kwargs
    )


def must(*argv: str) -> str:
    done = run(*argv)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "plain.safetensors"
    must("bench", "gen", "llama-bf16", str(path), "--size", "8MB", "--seed", "3")
    return path


def test_the_version_equals_the_packages():
    assert must("-V") == must("--version") == f"overwire {overwire.__version__}\n"
    assert json.loads(must("--version", "--json"))["version"] == overwire.__version__


def test_round_trip(plain: Path, tmp_path: Path):
    """A decompressed file is identical to the original, and `verify --original` confirms this by SHA-256."""
    small, back = tmp_path / "small.safetensors", tmp_path / "back.safetensors"
    report = json.loads(must("compress", str(plain), "-o", str(small), "--json"))
    assert report["ratio"] < 0.68
    assert small.stat().st_size == report["bytes_out"]
    assert "ok" in must("verify", str(small))
    assert "X16/bf16" in must("inspect", str(small))
    said = must("decompress", str(small), "-o", str(back), "--verbose")
    assert back.read_bytes() == plain.read_bytes()
    assert f"identical to the original, sha256: {hashlib.sha256(plain.read_bytes()).hexdigest()}  {back}\n" in said
    assert f"original: identical, sha256 {hashlib.sha256(plain.read_bytes()).hexdigest()}\n" in must("verify", "--original", str(small))
    assert "original" not in must("verify", str(small))
    found = overwire.verify(small, original=True)["files"][0]
    assert found.get("original") == {"file": str(small), "sha256": hashlib.sha256(plain.read_bytes()).hexdigest(), "compared": True}
    with pytest.raises(overwire.ArgumentError, match="original= cannot be used with tensors="):
        overwire.verify(small, tensors={}, original=True)  # type: ignore[call-overload]


def test_the_output_says_that_shards_have_no_original(plain: Path, tmp_path: Path):
    small, back = tmp_path / "small.safetensors", tmp_path / "back.safetensors"
    must("compress", str(plain), "-o", str(small), "--shard", "4MB")
    said = must("verify", "--original", str(small) + ".index.json")
    assert said.count("  original: not stored in this file\n") == said.count("contents verified") > 1
    said = must("decompress", str(small) + ".index.json", "-o", str(back))
    assert f"new header, because the source does not store the original: {back}\n" in said and "sha256" not in said


def test_python_loads_files_of_the_command_line(plain: Path, tmp_path: Path):
    np = pytest.importorskip("numpy")
    pytest.importorskip("ml_dtypes")
    small = tmp_path / "small.safetensors"
    must("compress", str(plain), "-o", str(small))
    a, b = (overwire.load_file(p, framework="np") for p in (plain, small))
    assert a.keys() == b.keys()
    assert all(np.array_equal(a[n].view(np.uint16), b[n].view(np.uint16)) for n in a)


def test_paths_with_a_dash(plain: Path, tmp_path: Path):
    """After `--`, a path may begin with a dash."""
    (tmp_path / "-model.safetensors").write_bytes(plain.read_bytes())
    done = run("inspect", "--summary", "--", "-model.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        ([], 2),
        (["squash"], 2),
        (["compress"], 2),
        (["compress", "no such file"], 3),
        (["inspect", "no such file"], 3),
        (["verify", __file__], 1),
    ],
)
def test_exit_status(argv: list[str], status: int):
    """Each kind of error has its exit status and prints a message without a traceback."""
    done = run(*argv)
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_errors_as_json():
    """With --json, an error is a JSON object with the class and exit status."""
    done = run("inspect", "no such file", "--json")
    error = json.loads(done.stdout)["error"]
    assert error["class"] == "NotFoundError"
    assert error["status"] == done.returncode == 3


def test_output_that_cannot_be_written_is_an_error(plain: Path):
    """If standard output cannot be written, the command exits with status 4."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    for words in (["inspect", str(plain)], ["--help"], ["help", "load"], ["load", "--help"], ["--version"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "overwire", *words], stdout=full, stderr=subprocess.PIPE, check=False
            )
        assert done.returncode == 4, (words, done.stderr)


@pytest.mark.parametrize("number", [1, 2])
def test_closed_streams(plain: Path, tmp_path: Path, number: int):
    """If standard output is closed, the command reports a clear error, and no output file takes its descriptor
    number."""
    small = tmp_path / "small.safetensors"
    done = run("compress", str(plain), "-o", str(small), preexec_fn=functools.partial(os.close, number))
    assert done.returncode == {1: 4, 2: 0}[number] and "Traceback" not in done.stderr
    assert done.stderr == {1: "overwire: i/o error: standard output: write /dev/stdout: bad file descriptor\n", 2: ""}[number]
    must("verify", str(small))


def test_ctrl_c(tmp_path: Path):
    """An interrupted command exits with status 130 and leaves no file."""
    command = [sys.executable, "-m", "overwire", "bench", "--size", "2GB", "--dir", str(tmp_path)]
    with processes.started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_every_setting():
    doctor = json.loads(must("doctor", "--json"))
    assert doctor["machine"]["cores"] >= 1
    text = must("doctor", "--env")
    for row in doctor["settings"]:
        assert row["name"] in text
    assert "PRELOAD_PATH" in text


def test_doctor_lists_gpus_or_says_why_there_is_none():
    gpu = overwire.doctor(measure=True)["gpu"]
    if gpu["devices"]:
        for device in gpu["devices"]:
            assert device["unusable"] if not device.get("kernels") else device["wire"] > 0
    else:
        assert "driver" in gpu["reason"]
        assert gpu["reason"] in must("doctor")


def test_settings_come_from_the_environment():
    """`doctor` shows settings from the environment, and warns about an invalid value."""
    done = run("doctor", "--json", env={**os.environ, "OVERWIRE_THREADS": "1", "OVERWIRE_LOG": "loud"})
    assert done.returncode == 0
    settings = {row["name"]: row for row in json.loads(done.stdout)["settings"]}
    assert settings["OVERWIRE_THREADS"]["value"] == "1"
    assert settings["OVERWIRE_LOG"]["value"] == "warning"
    assert "OVERWIRE_LOG" in done.stderr  # an invalid value is reported and ignored


def test_bench_runs_small():
    """Every row of the benchmark has a value, and no row has fields for a goal."""
    report = json.loads(must("bench", "--size", "8MB", "--repeat", "1", "--json"))
    assert {row["group"] for row in report["rows"]} == {"this machine", "size", "save", "load"}
    assert report["estimate"] > 0
    for row in report["rows"]:
        assert row["value"] > 0, row
        assert not {"goal", "reached", "missing"} & row.keys()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_command_leaves_no_file(plain: Path, tmp_path: Path, number: signal.Signals):
    """A command that gets SIGTERM or SIGHUP removes its temporary file and then dies from the signal."""
    # The server is slow, so that the command is still running.
    folder, out = tmp_path / "out", tmp_path / "out" / "x.safetensors"
    folder.mkdir()
    serve = [sys.executable, "-m", "overwire", "serve", str(plain.parent), "--each", "10KB"]
    with processes.started(serve, stdout=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().strip() + plain.name
        # A fetch of two objects cannot be resumed, so it leaves nothing.
        command = [sys.executable, "-m", "overwire", "fetch", url, url, "-o", str(out)]
        obey = functools.partial(signal.signal, number, signal.SIG_DFL)  # under nohup, children ignore SIGHUP
        with processes.started(command, stderr=subprocess.PIPE, text=True, preexec_fn=obey) as process:
            deadline = time.monotonic() + 60
            while not any(folder.iterdir()) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert [path.name.startswith(".x.safetensors.overwire-") for path in folder.iterdir()] == [True]
            process.send_signal(number)
            _, stderr = process.communicate(timeout=60)
            assert process.returncode == -number, stderr
            assert "Traceback" not in stderr
    assert list(folder.iterdir()) == []


def test_a_command_ends_when_its_reader_exits(tmp_path: Path):
    """If the reader of a command's output exits, as after `| head`, SIGPIPE ends the command silently, and no file is
    left."""
    command = [sys.executable, "-m", "overwire", "bench", "--size", "64MB", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr and process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == -signal.SIGPIPE
    assert list(tmp_path.iterdir()) == []


def test_run_reads_compressed_files_in_an_unmodified_program(tmp_path: Path):
    """`overwire run` keeps a program's arguments, environment, exit status and child processes. Only safetensors is
    patched."""
    numpy = pytest.importorskip("numpy")
    plain, small = tmp_path / "plain.safetensors", tmp_path / "small.safetensors"
    report = overwire.save_file({"w": numpy.arange(9e4, dtype="float32").reshape(300, 300), "b": numpy.ones(7)}, small)
    assert report.compressed
    overwire.convert(small, plain, compress=False)

    def refused(status: int, *words: str) -> str:
        done = run("run", *words)
        assert done.returncode == status and done.stdout == "", done.stderr
        return done.stderr

    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, sys\n"
        "from safetensors.numpy import load_file\n"
        "tensors, plain = map(load_file, sys.argv[1:3])\n"
        "assert sorted(tensors) == sorted(plain) and all((tensors[n] == plain[n]).all() for n in plain)\n"
        "assert os.environ['MINE'] == 'x' and os.environ['PYTHONPATH'].endswith('/mine')\n"
        "again = 'import sys, safetensors.numpy as s; print(len(s.load_file(sys.argv[1])))'\n"
        "sys.exit(subprocess.run([sys.executable, '-c', again, sys.argv[1]]).returncode + 7)\n"
    )
    env = os.environ | {"MINE": "x", "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), "/mine"]))}
    for dashes in ([], ["--"]):
        done = run("run", *dashes, sys.executable, str(program), str(small), str(plain), env=env)
        assert done.returncode == 7 and done.stderr == "", done.stderr
        assert done.stdout == "2\n"
    assert "program not found" in refused(3, "none-of-that-name")
    assert str(tmp_path) in refused(3, str(tmp_path))
    assert "needs a program" in refused(2) and "needs a program" in refused(2, "--")
    assert "no option --fast" in refused(2, "--fast", "python")
    assert "ignores PYTHONPATH" in refused(2, "python3", "-sI", "-c", "1")
    assert must("run", "python3", "-c", "print('-I')", "-I") == "-I\n"
    assert "PROGRAM" in (about := must("run", "--help")) and "--json" not in about and "--help" in about


def test_file_uris(tmp_path: Path) -> None:
    """A file:// URI works like a path: for folders, an index.json, torch.save files, inputs and outputs, in Python and
    on the command line."""
    import torch

    folder = tmp_path / "a folder%"
    folder.mkdir()
    tensors = {f"w{k}": np.arange(1000.0) * k for k in range(3)}
    overwire.save_file(tensors, folder / "m.safetensors", max_shard_size=9000)
    (folder / "config.json").write_text("{}")
    torch.save({"w": torch.ones(3)}, tmp_path / "t.pt")
    index = (folder / "m.safetensors.index.json").as_uri()
    for uri in (folder.as_uri(), folder.as_uri() + "/", index):
        for got in (overwire.load_file(uri, framework="np"), dict(overwire.stream(uri, framework="np"))):
            assert all((got[name] == tensors[name]).all() for name in tensors)
        assert overwire.verify(uri)["ok"]
    overwire.convert(folder.as_uri(), (tmp_path / "out").as_uri(), compress=False)
    overwire.convert((tmp_path / "t.pt").as_uri(), (tmp_path / "t.safetensors").as_uri())
    for words in (
        ["verify", index],
        ["compress", folder.as_uri(), "-o", (tmp_path / "packed").as_uri()],
        ["decompress", (tmp_path / "packed").as_uri(), "-o", (tmp_path / "back").as_uri()],
        ["fetch", (folder / "config.json").as_uri(), "-o", (tmp_path / "fetched").as_uri()],
        ["compress", (tmp_path / "t.pt").as_uri(), "-o", (tmp_path / "u.safetensors").as_uri()],
    ):
        assert run(*words).returncode == 0, words
    for name in ("out", "packed", "back"):
        assert sorted(p.name for p in (tmp_path / name).iterdir()) == sorted(p.name for p in folder.iterdir())
    assert (tmp_path / "fetched").read_text() == "{}"
    assert overwire.load_file(tmp_path / "u.safetensors", framework="np").keys() == {"w"}
    assert "not the URI of a local file" in run("load", "file:///x?y").stderr


def test_fetch_continues_after_any_interruption(tmp_path: Path) -> None:
    """A fetch that is killed or runs out of space leaves hidden files. The next run fetches only the rest and removes
    the hidden files, for a file and for a folder."""
    served, out = tmp_path / "served", tmp_path / "out"
    served.mkdir()
    out.mkdir()
    data = np.random.default_rng(0).bytes(48 << 20)
    (served / "x.bin").write_bytes(data)

    def room(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    serve = [sys.executable, "-m", "overwire", "serve", str(served), "--rate", "60MB"]
    with processes.started(serve, stdout=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().strip()
        for source, target in ((url + "x.bin", out / "y.bin"), (url, out / "folder")):
            hidden = out / f".{target.name}.partial"
            begun = hidden / ".x.bin.partial" if source == url else hidden
            command = [sys.executable, "-m", "overwire", "fetch", source, "-o", str(target), "--json"]
            with processes.started(command, stdout=subprocess.DEVNULL) as process:
                deadline = time.monotonic() + 60
                while not Path(f"{begun}.json").exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
                process.kill()
            assert begun.stat().st_size >= 16 << 20 and not target.exists()
            limit = functools.partial(room, 40 << 20)
            limited = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)
            assert limited.returncode == 4 and "run fetch again" in limited.stderr and not target.exists()
            done = run(*command[3:])
            assert done.returncode == 0 and json.loads(done.stdout)["bytes"] <= 16 << 20, done.stderr
            whole = target / "x.bin" if source == url else target
            assert whole.read_bytes() == data
    assert sorted(path.name for path in out.rglob("*")) == ["folder", "x.bin", "y.bin"]

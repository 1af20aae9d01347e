"""Tests that every writer writes complete files and keeps the mode, owner and link of the file that it replaces.

These tests only check the result of each writer. TestModes in gosrc/internal/atomicfile checks after every file system
call that no file becomes readable by more users.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
from overwire import stores
from overwire.compat.nyacomp import manifests

X = {"x": np.arange(99, dtype="f4")}


def _fetch(path: Path) -> None:
    source = path.parent.parent / "source"
    source.write_bytes(b"bytes")
    subprocess.run([sys.executable, "-m", "overwire", "fetch", "-o", path, source], check=True, timeout=120)


def _convert(path: Path) -> None:
    source = path.parent.parent / "source.safetensors"
    ow.save_file(X, source)
    ow.convert(source, path, compress=False)


def _object_writer(path: Path) -> None:
    with stores.ObjectWriter(str(path)) as file:
        file.write(b"bytes")


WRITERS: dict[str, Callable[[Path], object]] = {
    "save_file": lambda path: ow.save_file(X, path),
    "save_file, plain": lambda path: ow.save_file(X, path, compress=False),
    "compress_pickle": lambda path: ow.compress_pickle(X, path),
    "convert": _convert,
    "write_bytes": lambda path: stores.write_bytes(str(path), b"bytes", None),
    "ObjectWriter": _object_writer,
    "a manifest of nyacomp's": lambda path: manifests.write_file(path, b"bytes"),
    "to_csv": lambda path: manifests.to_csv([], [[]], path),
    "fetch -o": _fetch,
}


def states(folder: Path) -> dict[str, tuple[Path, int | None]]:
    """Returns a target path for each state that a target can be in, with the expected mode. None stands for the mode
    that the umask gives."""
    (folder / "sub").mkdir()

    def file(name: str, mode: int) -> Path:
        path = folder / name
        path.write_bytes(b"old")
        path.chmod(mode)
        return path

    def link(name: str, to: str | Path) -> Path:
        (folder / name).symlink_to(to)
        return folder / name

    file("twin", 0o600).with_name("hard").hardlink_to(folder / "twin")
    link("second", file("sub/chained", 0o600).relative_to(folder))
    return {
        "absent": (folder / "absent", None),
        "0600": (file("private", 0o600), 0o600),
        "0640": (file("group", 0o640), 0o640),
        "0666": (file("open", 0o666), 0o666),
        "absolute link": (link("absolute", file("sub/a", 0o600)), 0o600),
        "relative link": (link("relative", file("sub/r", 0o640).relative_to(folder)), 0o640),
        "chain of links": (link("first", "second"), 0o600),
        "dangling link": (link("dangling", "sub/nothing"), None),
        "hard link": (folder / "hard", 0o600),
    }


def hold(writer: Callable[[Path], object], mask: int, folder: Path) -> None:
    """Runs a writer on a target in every state and checks the results."""
    before = os.umask(mask)
    try:
        for name, (path, mode) in states(folder).items():
            kind = path.is_symlink()
            writer(path)
            assert path.is_symlink() == kind, name
            assert path.read_bytes()[:3] != b"old", name
            assert stat.S_IMODE(path.stat().st_mode) == (0o666 & ~mask if mode is None else mode), name
        assert (folder / "twin").read_bytes() == b"old"
        hidden = [str(p) for p in folder.rglob(".*")]
        assert hidden == []
    finally:
        left = os.umask(before)
    assert left == mask


@pytest.mark.parametrize("name", WRITERS)
def test_modes_and_links(tmp_path: Path, name: str) -> None:
    """Each writer keeps the mode and the link of the file that it replaces, under two umasks."""
    for mask in (0o027, 0o077):
        (tmp_path / f"{mask:o}").mkdir()
        hold(WRITERS[name], mask, tmp_path / f"{mask:o}")


def test_fastsafetensors_shards(tmp_path: Path) -> None:
    """Shards that a caller's function fills keep modes and links, and are private until they are complete."""
    torch = pytest.importorskip("torch")
    from overwire.compat.fastsafetensors import saver

    entries = [saver.plain_entry(name, torch.ones(9)) for name in ("x", "y")]
    plans = saver.plan_shards(entries, saver.shard_paths(str(tmp_path / "m"), 2))
    first, second = saver.write_shards(plans, saver.tensor_fill())
    os.rename(first, tmp_path / "elsewhere")
    os.symlink("elsewhere", first)
    for path in (first, second):
        os.chmod(path, 0o600)
    fill, modes = saver.tensor_fill(), {}

    def watched(work: Any) -> None:
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # listing the folder opened this descriptor, now closed
                if os.readlink(f"/proc/self/fd/{number}").startswith(str(tmp_path)):
                    modes[os.fstat(int(number)).st_ino] = stat.S_IMODE(os.fstat(int(number)).st_mode)
        fill(work)

    saver.write_shards(plans, watched)
    assert list(modes.values()) == [0o600, 0o600]
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in (first, second)] == [0o600, 0o600]
    assert os.path.islink(first) and not os.path.islink(second) and not list(tmp_path.glob(".*"))


def test_private_bundles(tmp_path: Path) -> None:
    """A container that is written for a private pickle is private from the start. meta.csv belongs to the folder, so it
    keeps its own mode."""
    path = tmp_path / "x.pkl"
    path.write_bytes(b"")
    path.chmod(0o600)
    ow.compress_pickle(X, path)
    assert stat.S_IMODE((tmp_path / "nya/x.safetensors").stat().st_mode) == 0o600
    (tmp_path / "nya/meta.csv").chmod(0o640)
    ow.compress_pickle(X, path)
    assert stat.S_IMODE((tmp_path / "nya/meta.csv").stat().st_mode) == 0o640
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_writer_sets_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No writer sets the umask, not even briefly, because the whole process uses it."""

    def never(mask: int) -> int:
        raise AssertionError("the umask was set")

    monkeypatch.setattr(os, "umask", never)
    (tmp_path / "a folder").mkdir()
    for number, writer in enumerate(WRITERS.values()):
        writer(tmp_path / "a folder" / str(number))


def test_failures_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is not a file is refused. If a writer fails halfway, only the old file remains."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "null").symlink_to("/dev/null")
    for name, writer in WRITERS.items():
        if name == "fetch -o":
            continue
        for target in ("fifo", "null") if name == "convert" else ("folder", "fifo", "null"):
            with pytest.raises((ow.ArgumentError, OSError)):
                writer(tmp_path / target)
    for name in ("folder", "fifo", "null"):
        assert (tmp_path / name).exists()
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), stores.ObjectWriter(str(path)) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert not [p for p in tmp_path.rglob(".*")]
    if os.geteuid() != 0:
        (tmp_path / "folder").chmod(0o500)
        for name, writer in WRITERS.items():
            if name != "fetch -o":
                with pytest.raises(ow.AccessError):
                    writer(tmp_path / "folder/x")
        (tmp_path / "folder").chmod(0o700)


def without_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a file system without unnamed files."""
    really = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("kind", [stores.FileWriter, stores.ObjectWriter])
def test_two_threads_close_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """If two threads close one file, one of them writes the file and the other waits."""
    path, results = tmp_path / "x", []
    file = kind(str(path))
    file.write(b"bytes")
    really = file._write_object

    def close() -> None:
        try:
            file.close()
            results.append(path.read_bytes())
        except Exception as error:
            results.append(error)

    other = threading.Thread(target=close)

    def write_beside() -> None:
        other.start()
        other.join(0.1)  # long enough for a thread that does not wait
        really()

    monkeypatch.setattr(file, "_write_object", write_beside)
    close()
    other.join()
    assert results == [b"bytes", b"bytes"] and list(tmp_path.iterdir()) == [path]


def test_a_signal_handler_closes_the_file_that_is_being_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a signal handler closes or drops the file that is just being closed, the handler gets a clear error. The close
    continues."""
    path = tmp_path / "x"
    file = stores.FileWriter(str(path))
    file.write(b"bytes")
    really = file._write_object

    def write_interrupted() -> None:
        for end in (file.close, file.drop):
            with pytest.raises(ow.ArgumentError, match="a signal handler interrupted a close"):
                end()
        really()

    monkeypatch.setattr(file, "_write_object", write_interrupted)
    file.close()
    file.close()
    assert path.read_bytes() == b"bytes" and list(tmp_path.iterdir()) == [path]


def test_ctrl_c_in_a_close_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Ctrl-C arrives after the new file got its temporary name, only the old file remains."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    file, really = stores.FileWriter(str(path)), os.link

    def link_and_stop(*names: Any, **how: Any) -> None:
        really(*names, **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", link_and_stop)
    file.write(b"bytes")
    with pytest.raises(KeyboardInterrupt):
        file.close()
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_writer_is_dropped_before_or_after_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is dropped before anything was written replaces nothing. One that is dropped later still finishes
    its file."""
    path = tmp_path / "x"
    path.write_bytes(b"old")
    for name in (False, True):
        if name:
            without_unnamed_files(monkeypatch)
        for kind in (stores.FileWriter, stores.ObjectWriter):
            kind(str(path))
            assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    tensorizer = pytest.importorskip("overwire.compat.tensorizer")
    tensorizer.TensorSerializer(path)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    file = stores.FileWriter(str(path))
    file.write(b"new")
    del file
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_a_full_disk_keeps_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file object is dropped while the disk is full, no file is written, no temporary file is left and no error is
    raised."""
    without_unnamed_files(monkeypatch)
    path = tmp_path / "x"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(InterruptedError), stores.FileWriter(str(path)) as file:
            file.write(b"bytes" * 99)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            raise InterruptedError
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_no_python_code_writes_by_itself() -> None:
    """Python code publishes files only through the engine's writer, never by os.umask, os.replace or os.rename."""
    import re

    folder = Path(ow.__file__).parent
    allowed = {
        folder / "_bench_faces.py": [".write_text("],  # writes only to its own temporary folder
        folder / "portable/files.py": ["os.replace"],  # the portable reader works without the engine
    }
    for path in folder.rglob("*.py"):
        found = re.findall(r"os\.(?:umask|replace|rename|renames)\b|shutil\.move|\.write_bytes\(|\.write_text\(", path.read_text())
        assert found == allowed.get(path, []), (path, found)


def test_a_single_file_next_to_a_shard_index_is_refused(tmp_path: Path) -> None:
    """save_file refuses to write a single file if a shard index for its name is next to it, because the folder would
    still load the shards."""
    path = tmp_path / "model.safetensors"
    many: dict[str, Any] = {"x": np.zeros(999, "f4"), "y": np.arange(999, dtype="f4")}
    ow.save_file(many, path, max_shard_size=4000)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ow.ArgumentError, match=r"model\.safetensors\.index\.json"):
        ow.save_file(X, path)
    with pytest.raises(ow.ArgumentError, match=r"model\.safetensors\.index\.json"):
        ow.convert(tmp_path, path)
    assert sorted(tmp_path.iterdir()) == before
    ow.save_file(X, path, max_shard_size="1GB")
    assert list(tmp_path.iterdir()) == [path]
    assert set(ow.load_file(tmp_path, framework="np")) == {"x"}


def test_an_output_name_that_ends_with_a_slash_is_refused(tmp_path: Path) -> None:
    """An output name that ends with / is refused."""
    tensors = {"a": np.zeros(4, np.float32)}
    ow.save_file(tensors, tmp_path / "m.safetensors")
    folder = f"{tmp_path}/new/"
    for save in (
        lambda: ow.save_file(tensors, folder),
        lambda: ow.save_bundle(tensors, folder),
        lambda: ow.sleep({}, to_file=folder),
        lambda: ow.save_file(tensors, "s3://bucket/key/"),
    ):
        with pytest.raises(ow.ArgumentError, match="is a folder.s name: name a file in it"):
            save()
    assert os.listdir(tmp_path) == ["m.safetensors"]

"""Tests that every function that writes to a path waits for an earlier background save to that path."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import overwire as ow
import pytest
import safetensors.torch
import torch
from overwire import _order
from overwire.__main__ import main
from overwire.compat.safetensors import torch as drop_in
from overwire.compat.tensorizer import TensorSerializer
from overwire.compat.tensorizer.stream_io import open_stream
from overwire.portable.files import decompress
from overwire.verbs import saving

EARLIER = {"w": torch.arange(40_000.0)}
LATER = {"w": torch.ones(5)}


class Held:
    """A background save that waits in its callback until `leave` is called."""

    all: ClassVar[list[Held]] = []

    def __init__(self, save: Callable[..., Any], path: str, **options: Any) -> None:
        self._leave = threading.Event()
        self.all.append(self)
        self.saving = save(EARLIER, path, wait=False, progress=self._wait, **options)

    def _wait(self, now: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._leave.wait(30)

    def leave_soon(self) -> None:
        threading.Timer(0.1, self._leave.set).start()

    def leave(self) -> None:
        self._leave.set()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "linked").symlink_to("out")
    ow.save_file(LATER, "source")
    os.mkdir("model")
    ow.save_file(LATER, "model/model.safetensors")
    ow.save_delta({"w": torch.zeros(5)}, LATER, "delta")
    yield tmp_path
    while Held.all:
        Held.all.pop().leave()
    for saver in list(_order._savers):
        saver.wait(30)


def serialize(path: str) -> None:
    serializer = TensorSerializer(path)
    serializer.write_state_dict(LATER)
    serializer.close()


def run_command(path: str) -> None:
    """Runs the command line in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["overwire", "compress", "source", "-o", path, "-f"])
        with pytest.raises(SystemExit, match="^0$"):
            main()


def save_patched(path: str) -> None:
    """Calls safetensors' own save function under a patch that only replaces loading."""
    with ow.patch_safetensors():
        safetensors.torch.save_file(LATER, path)


def stream(path: str) -> None:
    with open_stream(path, "wb") as file:
        file.write(b"later")


WRITERS: dict[str, Callable[[str], Any]] = {
    "save_file": lambda path: ow.save_file(LATER, path),
    "save_file, plain": lambda path: ow.save_file(LATER, path, compress=False),
    "in the background": lambda path: ow.save_file(LATER, path, wait=False).wait(),
    "save_model": lambda path: ow.save_model(torch.nn.ParameterDict({"w": torch.nn.Parameter(LATER["w"])}), path),
    "bundle": lambda path: ow.save_bundle(LATER, path),
    "convert": lambda path: ow.convert("source", path),
    "convert, plain": lambda path: ow.convert("source", path, compress=False),
    "sleep": lambda path: ow.sleep({"w": torch.ones(5)}, to_file=path).wake(),
    "save_delta": lambda path: ow.save_delta({"w": torch.zeros(5)}, LATER, path),
    "merge_deltas": lambda path: ow.merge_deltas(["delta"], path),
    "without the engine": lambda path: decompress("source", path, overwrite=True),
    "command": run_command,
    "patched": save_patched,
    "drop-in": lambda path: drop_in.save_file(LATER, path),
    "TensorSerializer": serialize,
    "open_stream": stream,
}
SPELLINGS = ["out/m.safetensors", "{folder}/out/../out/./m.safetensors", "linked/m.safetensors", "link", "file://{folder}/out/m.safetensors"]
NO_URI = {"without the engine", "command", "patched", "bundle", "TensorSerializer", "sleep", "drop-in", "open_stream"}
REPLACES_LINKS = {"without the engine", "patched"}
ENDINGS = {"bundle": ".pkl", "TensorSerializer": ".tensors"}


def size_of_earlier(ending: str) -> int:
    ow.save_file(EARLIER, f"other{ending}")
    return os.stat(f"other{ending}").st_size


@pytest.mark.parametrize("writer", WRITERS)
def test_the_file_of_the_later_save_remains(folder: Path, writer: str) -> None:
    """Whichever function writes, and however the path is spelled, the file of the later save remains."""
    for spelling in SPELLINGS:
        ending = ENDINGS.get(writer, ".safetensors")
        path = spelling.format(folder=folder).replace(".safetensors", ending)
        if spelling.startswith("file") and writer in NO_URI or spelling == "link" and writer in REPLACES_LINKS:
            continue
        if spelling == "link":
            path = "link" + ending
            os.symlink(f"out/m{ending}", path)
        held = Held(ow.save_bundle if writer == "bundle" else ow.save_file, f"out/m{ending}")
        held.leave_soon()
        WRITERS[writer](path)
        size = (folder / f"out/m{ending}").stat().st_size
        held.saving.wait()
        assert (folder / f"out/m{ending}").stat().st_size == size, spelling
        if writer != "bundle":
            assert size not in (size_of_earlier(ending), 0), spelling


def test_a_path_that_becomes_a_link_or_a_file_during_a_save(folder: Path) -> None:
    """If the path becomes a link or a file while a save runs, the file of the later save still remains."""
    for is_link in (False, True):
        if is_link:
            os.symlink("before.safetensors", "m.safetensors")
        held = Held(ow.save_file, "m.safetensors")
        if is_link:
            shutil.copy("source", "new")
        else:
            os.symlink("after.safetensors", "new")
        os.replace("new", "m.safetensors")
        held.leave_soon()
        ow.save_file(LATER, "m.safetensors")
        held.saving.wait()
        assert ow.load_file("m.safetensors")["w"].shape == (5,)
        os.unlink("m.safetensors")


def test_a_save_claims_its_shards_index_and_folder(folder: Path) -> None:
    """A save claims its shards, their index, and the folder that it saves to. Other writers of these paths wait for it,
    but a writer of an unrelated file does not."""
    for act in (
        lambda: ow.save_file(LATER, "model/model-00001-of-00002.safetensors"),
        lambda: stream("model/model.safetensors.index.json"),
    ):
        held = Held(ow.save_file, "model/model.safetensors", max_shard_size=80_000)
        held.leave_soon()
        act()
        assert held.saving.done()
        ow.save_file(LATER, "model/model.safetensors", max_shard_size="1GB")
    held = Held(ow.save_file, "out/m.safetensors")
    ow.save_file(LATER, "out/m-00001-of-00002.safetensors")
    ow.save_file(LATER, "out/n.safetensors")
    assert not held.saving.done()
    held.leave_soon()
    with pytest.raises(ow.OverwireError):
        ow.convert("model", "out")  # not an empty folder
    assert held.saving.done()


def test_bundles_of_one_name(folder: Path) -> None:
    """A save of x.pth waits for a save of x.pkl, because both bundles share a lock, and for a save to its container's
    path. Both bundles load."""
    for second, write in (("x.pth", ow.save_bundle), ("x.pkl", ow.save_bundle), ("tensors/x.safetensors", ow.save_file)):
        held = Held(ow.save_bundle, "x.pkl")
        held.leave_soon()
        write(LATER, second)
        held.saving.wait()
        if write is ow.save_bundle:
            assert ow.load_bundle(second)["w"].shape == (5,)
            assert ow.load_bundle("x.pkl")["w"].shape == ((40_000,) if second == "x.pth" else (5,))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("save", [ow.save_file, ow.save_bundle])
def test_a_callback_of_a_save_that_saves_there_is_refused(
    folder: Path, save: Any, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A progress callback cannot save to the path of its own save, because it would wait for itself, also if it is
    called before the background save returns to its caller."""
    errors: list[BaseException] = []
    if early:
        monkeypatch.setattr(saving, "start_thread", lambda start: (start(), time.sleep(0.5)))

    def act(now: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and not errors:
            for name in ("m.pkl", "m.pth") if save is ow.save_bundle else ("m.safetensors",):
                try:
                    save(LATER, name)
                except ow.ArgumentError as error:
                    errors.append(error)

    save(EARLIER, "m.pkl" if save is ow.save_bundle else "m.safetensors", wait=False, progress=act).wait(60)
    assert len(errors) == (2 if save is ow.save_bundle else 1) and "callback" in str(errors[0])


def test_an_error_reaches_the_next_writer_of_any_kind(folder: Path) -> None:
    """If no call has waited for a failed background save, the next function that writes to the path raises its
    error."""
    held = Held(ow.save_file, "gone/m.safetensors") if os.mkdir("gone") is None else None
    os.rename("gone", "away")
    held.leave()
    while not held.saving.done():
        pass
    with pytest.raises(ow.OverwireError):
        ow.convert("source", "gone/m.safetensors")
    held.saving.forget_saver()


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("s3://bucket/key", "S3://bucket/key"),
        ("redis://host/key", "redis://HOST:6379/key"),
        ("/a/b", "/a/./c/../b"),
        ("/a/b", "file:///a/b"),
    ],
)
def test_spellings_of_one_path(one: str, two: str) -> None:
    """All spellings of one path have equal keys, including URIs of the path."""
    assert _order._keys_of(one) == _order._keys_of(two)

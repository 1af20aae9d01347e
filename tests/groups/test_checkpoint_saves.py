"""Tests that a checkpoint always comes from one complete save, even if it is replaced while others read, write or
publish it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stores
import warm
from conftest import ROOT, cleaned

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from overwire.checkpoints import CheckpointReader, CheckpointWriter, places, reader, writer  # noqa: E402
from overwire.model.forked import ForkedModel  # noqa: E402
from overwire.portable import read as portable  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

NAMES = [f"w{number}" for number in range(4)]


def save(at: Any, value: float, **how: Any) -> None:
    """Saves four tensors that are filled with value, each in its own file."""
    state = {"model": {name: torch.full((64,), value) for name in NAMES}, "step": value}
    dcp.save(state, storage_writer=CheckpointWriter(at, compress=False, **{"max_shard_size": 256, **how}))


def load(at: Any) -> set[float]:
    """Returns the set of values that a checkpoint contains."""
    state = {"model": {name: torch.zeros(64) for name in NAMES}, "step": 0.0}
    dcp.load(state, storage_reader=CheckpointReader(at) if isinstance(at, (str, Path)) else at)
    return {state["step"], *(tensor[0].item() for tensor in state["model"].values())}


def make_old(at: Path) -> None:
    """Changes a checkpoint to version 1, in which files do not have the id of their save."""
    for path in at.rglob("*.safetensors"):
        tensors = ow.load_file(path)
        path.unlink()
        ow.save_file(tensors, path, {"format": "pt"}, compress=False)
    manifest = json.loads((at / "checkpoint.json").read_text())
    del manifest["save"], manifest["dtypes"]
    (at / "checkpoint.json").write_text(json.dumps(manifest | {"version": 1}))


def replace(at: Path, value: float, old: bool, **how: Any) -> None:
    save(at, value, **how)
    if old:  # renamed in one step, as with version 1
        made = at.parent / f"made-{value}"
        os.rename(at, made)
        make_old(made)
        os.rename(made, at)


@pytest.mark.parametrize("old", [False, True], ids=["ids", "version 1"])
@pytest.mark.parametrize("how", [{}, {"max_shard_size": 1 << 20}], ids=["same files", "other files"])
def test_a_checkpoint_that_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool, how: dict[str, Any]
) -> None:
    """If a checkpoint is replaced while it is being opened, it is opened again, and the load gives the complete new
    save. If the checkpoint is replaced again, the load raises a typed error."""
    at = tmp_path / "c"
    replace(at, 1.0, old)
    times, real = [2.0], reader.safe_open

    def open_late(*args: Any, **named: Any) -> Any:
        file = real(*args, **named)
        if times and "training" not in str(args[0]):  # the model's files are open, the other files are not
            replace(at, times.pop(0), old, **how)
        return file

    def read_late(*args: Any) -> Any:
        manifest = read(*args)
        if times:  # checkpoint.json was read, the files are not open yet
            replace(at, times.pop(0), old, **how)
        return manifest

    monkeypatch.setattr(reader, "safe_open", open_late)
    assert load(at) == {2.0} and not times
    monkeypatch.setattr(reader, "safe_open", real)
    read = reader.read_manifest
    monkeypatch.setattr(reader, "read_manifest", read_late)
    times.append(3.0)
    assert load(at) == {3.0} and not times
    times += [4.0, 5.0, 6.0]
    with pytest.raises((ow.CorruptError, ow.NotFoundError)):
        load(at)
    assert times == [6.0]


def test_an_open_reader_stays_on_its_save(tmp_path: Path) -> None:
    """A reader keeps reading the save that it opened, until `reset`."""
    at = tmp_path / "c"
    save(at, 1.0)
    opened = CheckpointReader(at)
    save(at, 2.0)
    assert load(opened) == {1.0}
    opened.reset()
    assert load(opened) == {2.0}


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    """If a folder has files of two saves, as after an interrupted copy, every reader refuses it and names a file. Files
    of version 1 have no ids to compare."""
    one, two = tmp_path / "one", tmp_path / "two"
    save(one, 1.0)
    save(two, 2.0)
    for name in ("model-00002-of-00004.safetensors", "training/model.safetensors"):
        kept = (one / name).read_bytes()
        (one / name).write_bytes((two / name).read_bytes())
        with pytest.raises(ow.CorruptError, match="another save|a different save") as caught:
            CheckpointReader(one)
        assert name in caught.value.source
        (one / name).write_bytes(kept)
    (one / "model-00002-of-00004.safetensors").write_bytes((two / "model-00002-of-00004.safetensors").read_bytes())
    files = sorted(one.glob("model-*"))
    for read in (
        lambda: ow.load_file(one),
        lambda: ow.load_file(files),
        lambda: dict(ow.stream(files)),
        lambda: ow.verify(one),
        lambda: portable.load_file(one),
        lambda: ForkedModel(one),
        lambda: ForkedModel(files),
    ):
        with pytest.raises(ow.CorruptError, match=r"model-0000\d-of-00004.*another save"):
            read()
    make_old(two)
    assert load(two) == {2.0}
    (two / files[0].name).write_bytes(files[0].read_bytes())  # the file has an id, but checkpoint.json has none
    with pytest.raises(ow.CorruptError):
        CheckpointReader(two)


def test_ranks_refuse_to_load_different_saves(tmp_path: Path) -> None:
    """If ranks have opened different saves, each gets a typed error before any tensor changes. The same readers can
    load again when all open one save. Version 1 is also tested."""
    steps = ("replaced", "replaced_old")
    command = [ROOT / "tests" / "groups" / "checkpoint_worker.py", tmp_path, "store", *steps]
    done = warm.run(command, env=cleaned() | {"WORLD_SIZE": "2"})
    assert done.returncode == 0 and done.stdout.count("done ") == 4, done.stdout + done.stderr


def test_a_rank_that_outlives_its_job(tmp_path: Path) -> None:
    """Files that a rank writes after its coordinator was killed never become part of a later checkpoint. When the path
    belongs to another save, the rank fails, and its files are removed."""
    at = tmp_path / "c"
    coordinator, rank = places.Place(at, None, True), places.Place(at, None, True)
    coordinator.begin()
    rank.join_save(coordinator.save)
    late = rank.make("training/model.safetensors")
    Path(late).write_bytes(b"half")
    coordinator._unlock()  # as the kernel does when the process ends
    publish = places.Place.publish

    def outlived(place: places.Place, files: Any) -> None:
        assert not list(Path(late).parent.iterdir()), "the disk needs the space of unfinished files"
        ow.save_file({"x": torch.ones(3)}, late)
        publish(place, files)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places.Place, "publish", outlived)
        save(at, 2.0)
    assert load(at) == {2.0} and os.listdir(tmp_path) == ["c"] and ow.verify(at / "training")["ok"]
    with pytest.raises(ow.NotFoundError):
        ow.save_file({"x": torch.ones(3)}, late)
    with pytest.raises(ow.NotFoundError, match="until the save ends"):
        rank.make("model.safetensors")
    assert os.listdir(tmp_path) == ["c"]


class Fails(Exception):
    """An error that is not a system error."""


@pytest.mark.parametrize("replaces", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt(), Fails()], ids=repr)
@pytest.mark.parametrize("step", ["before the name", "after the name", "sync"])
def test_a_save_that_fails_while_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool, error: BaseException, step: str
) -> None:
    """If publishing a save fails at any point, even by Ctrl-C, the old checkpoint keeps its name and contents, and no
    other file is left."""
    at = tmp_path / "c"
    if replaces:
        save(at, 1.0)
    rename, sync, failed = places._verbs.rename_folder, places._sync_folder, []

    def rename_failing(request: Any) -> None:
        is_first = not failed and not request["made"].endswith((".one", ".two"))
        if is_first and step == "before the name":
            failed.append(step)
            raise error
        rename(request)
        if is_first and step == "after the name":
            failed.append(step)
            raise error

    def sync_failing(folder: str, entry: str = "") -> None:
        sync(folder, entry)
        if entry and step == "sync":
            failed.append(step)
            raise error

    monkeypatch.setattr(places._verbs, "rename_folder", rename_failing)
    monkeypatch.setattr(places, "_sync_folder", sync_failing)
    with pytest.raises((CheckpointException, KeyboardInterrupt)):
        save(at, 2.0)
    monkeypatch.undo()
    assert failed and os.listdir(tmp_path) == (["c"] if replaces else [])
    if replaces:
        assert load(at) == {1.0}
    save(at, 3.0)
    assert load(at) == {3.0} and os.listdir(tmp_path) == ["c"]


def entry_of(kind: str, at: Path) -> Callable[[], bool]:
    """Puts a link, folder or file of the user's into a checkpoint, and returns a function that tells whether it is
    still there."""
    if kind == "link to a folder":
        (at / "mine").symlink_to(at.parent)
    elif kind == "link to nothing":
        (at / "mine").symlink_to("nowhere")
    elif kind == "folder":
        (at / "training/mine").mkdir()
        return (at / "training/mine").is_dir
    else:
        (at / "mine").mkdir()
        (at / "mine/file").write_text("x")
        return (at / "mine/file").exists
    return (at / "mine").is_symlink


@pytest.mark.parametrize("kind", ["link to a folder", "link to nothing", "folder", "file"])
def test_a_checkpoint_with_users_entries_is_not_replaced(tmp_path: Path, kind: str) -> None:
    """A checkpoint is not replaced if a user has put a link, an empty folder or a file into it, even in a subfolder.
    The error names what was found."""
    at = tmp_path / "c"
    save(at, 1.0)
    is_there = entry_of(kind, at)
    with pytest.raises(CheckpointException) as caught:
        save(at, 2.0)
    assert "mine" in str(caught.value.failures[0][0]) and is_there() and load(at) == {1.0}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_a_folder_that_cannot_be_listed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A folder in the checkpoint that cannot be listed counts as not empty: the save fails, and the contents of the
    folder stay."""
    at = tmp_path / "c"
    save(at, 1.0)
    (at / "notes").mkdir()
    (at / "notes/mine").write_text("x")

    def refusing(call: Any) -> Any:
        def refuse(path: Any = ".") -> Any:
            if "notes" in os.fspath(path):
                raise OSError(number, os.strerror(number), path)
            return call(path)

        return refuse

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with pytest.raises(CheckpointException) as caught:
        save(at, 2.0)
    monkeypatch.undo()
    assert isinstance(caught.value.failures[0][0], OSError) and (at / "notes/mine").read_text() == "x"
    assert load(at) == {1.0} and os.listdir(tmp_path) == ["c"]


def raw(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


TYPES = [
    getattr(torch, name)
    for name in ("float4_e2m1fn_x2", "complex128", "complex32", "bcomplex32")
    if hasattr(torch, name)
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(6, 8), (16,), (), (0, 4), (2, 3, 4)], ids=str)
def test_types_that_safetensors_lacks_or_packs(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    """Tensors with dtypes that safetensors does not have, or packs, are loaded bit for bit, with torch's shape."""
    if dtype == torch.float4_e2m1fn_x2 and not shape:
        pytest.skip("half a byte")
    size = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.arange(size, dtype=torch.uint8)
    state = {"model": {"x": bits.view(dtype).view(shape), "y": torch.ones(3)}, "more": bits.view(dtype).view(shape)}
    dcp.save(state, storage_writer=CheckpointWriter(tmp_path / "c"))
    into = {"model": {"x": torch.zeros(size, dtype=torch.uint8).view(dtype).view(shape), "y": torch.zeros(3)},
            "more": torch.zeros(size, dtype=torch.uint8).view(dtype).view(shape)}  # fmt: skip
    dcp.load(into, storage_reader=CheckpointReader(tmp_path / "c"))
    assert raw(into["model"]["x"]) == raw(into["more"]) == raw(state["more"]) and into["model"]["y"].sum() == 3
    entry: Any = CheckpointReader(tmp_path / "c").read_metadata().state_dict_metadata["model.x"]
    assert entry.size == torch.Size(shape) and entry.properties.dtype == dtype


def test_bytes_of_types_into_other_tensors(tmp_path: Path) -> None:
    """Tensors with dtypes that safetensors does not have are loaded by value into strided and conjugated tensors. The
    dtypes in checkpoint.json are validated."""
    at = tmp_path / "c"
    values = torch.randn(4, 6, dtype=torch.complex128)
    dcp.save({"w": values.conj()}, storage_writer=CheckpointWriter(at))
    for into in (torch.zeros(6, 4, dtype=torch.complex128).t(), torch.zeros(4, 6, dtype=torch.complex128).conj()):
        dcp.load({"w": into}, storage_reader=CheckpointReader(at))
        assert torch.equal(into, values.conj())
    text = (at / "checkpoint.json").read_text()
    for name, error in (
        ("complex256", ow.NotSupportedError),
        ("quint8", ow.FormatError),
        ("float32", ow.FormatError),
        ("complex32", ow.FormatError),
    ):
        (at / "checkpoint.json").write_text(text.replace("complex128", name))
        with pytest.raises(error):
            CheckpointReader(at)
    (at / "checkpoint.json").write_text(text.replace('"w": "complex128"', '"w": "complex128", "v": "complex128"'))
    with pytest.raises(ow.CorruptError):
        CheckpointReader(at)


def test_every_file_has_the_id(tmp_path: Path) -> None:
    """checkpoint.json, the metadata of each file, and the indexes have the same id, which differs in every save."""
    seen = set()
    for number in range(2):
        at = tmp_path / f"c{number}"
        save(at, 1.0)
        ids = {json.loads((at / "checkpoint.json").read_text())["save"]}
        for path in at.rglob("*.safetensors"):
            with ow.safe_open(path, "pt") as file:
                ids.add((file.metadata() or {})["overwire.checkpoint"])
        ids |= {json.loads(path.read_text())["metadata"]["checkpoint"] for path in at.rglob("*.index.json")}
        assert len(ids) == 1
        seen |= ids
    assert len(seen) == 2 and writer.SAVE == "overwire.checkpoint"


def test_a_checkpoint_of_a_store_that_is_saved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a checkpoint in a store is removed and saved again while a reader opens it, the reader opens the new
    checkpoint."""
    with stores.s3() as (options, root):
        at = "s3://models/run/step"

        def save_there(value: float) -> None:
            shutil.rmtree(root / "run", ignore_errors=True)
            save(at, value, storage_options=options)

        save_there(1.0)
        times, read = [2.0], reader.read_manifest

        def read_late(*args: Any) -> Any:
            manifest = read(*args)
            if times:
                save_there(times.pop())
            return manifest

        monkeypatch.setattr(reader, "read_manifest", read_late)
        assert load(CheckpointReader(at, storage_options=options)) == {2.0} and not times
        names = {path.name[:17] for path in root.rglob("model-ow*")}
        assert len(names) == 1, "all files of a save have its id in their names"


@pytest.mark.parametrize("name", ["w0", "other.safetensors"])
def test_a_file_that_is_written_during_a_save_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """If another program writes a file into a checkpoint just before a save replaces it, the save fails with this
    reason. The old checkpoint stays, with the file."""
    at = tmp_path / "c"
    save(at, 1)
    path = next(path for path in sorted(at.iterdir()) if path.suffix == ".safetensors") if name == "w0" else at / name
    rename = places._rename_folder

    def rename_late(made: str, target: str, exchange: bool) -> None:
        if target == str(at):
            ow.save_file({"later": torch.ones(5)}, path)
        rename(made, target, exchange)

    with monkeypatch.context() as patch:
        patch.setattr(places, "_rename_folder", rename_late)
        with pytest.raises(CheckpointException) as caught:
            save(at, 2)
    error = caught.value.failures[0][0]
    assert isinstance(error, ow.ArgumentError) and f"{path.name!r} was written during this save" in str(error)
    assert list(ow.load_file(path)) == ["later"] and [entry.name for entry in tmp_path.iterdir()] == ["c"]

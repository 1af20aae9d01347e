"""Tests files, links and folders that another user has put where overwire reads or writes. SECURITY.md has the
rules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import overwire as ow
import processes
import pytest
import torch
from overwire.checkpoints import places
from overwire.integrations.kept_model import keep_files
from overwire.stores import FileWriter, resolve_links

STRANGER = 1234

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the owner of files")


def strangers(path: Path) -> None:
    """Makes another user the owner of a path."""
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    return path


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Makes a folder that everyone can write to, like /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@needs_root
@pytest.mark.parametrize("link", ["file", "folder"])
def test_links_of_others_are_not_followed(tmp_path: Path, shared: Path, link: str) -> None:
    """In a shared folder, writers do not follow another user's link, neither at the end of a path nor inside it."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "out").write_text("mine")
    (shared / "link").symlink_to(home / "out" if link == "file" else home)
    strangers(shared / "link")
    target = shared / "link" if link == "file" else shared / "link/out"
    with pytest.raises(ow.AccessError, match=f"belongs to user {STRANGER}"):
        FileWriter(str(target))
    with pytest.raises(ow.AccessError, match=f"belongs to user {STRANGER}"):
        places.Place(target, None, True)
    if link == "file":  # for links inside a path, the engine relies on the kernel
        with pytest.raises(ow.AccessError, match=f"belongs to user {STRANGER}"):
            ow.save_file({"w": torch.ones(3)}, target)
        with pytest.raises(ow.AccessError, match=f"belongs to user {STRANGER}"):
            ow.compress({"w": torch.ones(3)}, target)
    assert (home / "out").read_text() == "mine" and os.listdir(home) == ["out"]


def test_own_links_are_followed(tmp_path: Path, shared: Path) -> None:
    """The user's own links in a shared folder are followed. Relative links, chains of links and ".." are resolved as
    the kernel does."""
    (tmp_path / "home/deep").mkdir(parents=True)
    (shared / "one").symlink_to("two")
    (shared / "two").symlink_to("../home/deep")
    with FileWriter(str(shared / "one/../out")) as file:
        file.write(b"text")
    assert (tmp_path / "home/out").read_bytes() == b"text"
    (shared / "loop").symlink_to("loop")
    with pytest.raises(ow.ArgumentError, match="symbolic links"):
        FileWriter(str(shared / "loop"))


def test_an_open_file_without_a_name(tmp_path: Path) -> None:
    """Writing to the /proc path of a memfd or a deleted file is refused. An open file with a name is written under this
    name."""
    numbers = [os.memfd_create("x"), os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)]
    named = os.open(tmp_path / "named", os.O_CREAT | os.O_RDWR)
    try:
        for number in numbers:
            with pytest.raises(ow.ArgumentError, match="an open file without a name"):
                ow.save_file({"w": torch.ones(3)}, f"/proc/self/fd/{number}")
            with pytest.raises(ow.ArgumentError, match="an open file without a name"):
                FileWriter(f"/dev/fd/{number}")
        ow.save_file({"w": torch.ones(3)}, f"/dev/fd/{named}")
        assert os.listdir(tmp_path) == ["named"] and not [name for name in os.listdir("/") if "(deleted)" in name]
    finally:
        for number in (*numbers, named):
            os.close(number)
    assert ow.load_file(tmp_path / "named")["w"].sum() == 3


def test_an_index_that_links_to_itself(tmp_path: Path) -> None:
    """A save works even if the name of its index is a link to itself."""
    index = tmp_path / "m.safetensors.index.json"
    index.symlink_to(index.name)
    ow.save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", index.name]


@needs_root
def test_a_link_that_appears_and_disappears(tmp_path: Path, shared: Path) -> None:
    """Another user's link is never followed, even if it appears and disappears all the time."""
    program = """
import os, sys
path, to = sys.argv[1:]
while True:
    os.symlink(to, path + "2")
    os.lchown(path + "2", 1234, 1234)
    os.rename(path + "2", path)
    os.unlink(path)
"""
    path = str(shared / "file")
    stranger = subprocess.Popen([sys.executable, "-c", program, path, str(tmp_path / "home")])
    try:
        while not refuses(path):
            assert stranger.poll() is None
        for _ in range(5000):
            refuses(path)
    finally:
        stranger.kill()
        stranger.wait()


def refuses(path: str) -> bool:
    """Returns whether the path is refused as another user's link at this moment."""
    try:
        assert resolve_links(path) == path
    except ow.AccessError:
        return True
    return False


@needs_root
def test_another_users_index_does_not_set_the_mode(shared: Path) -> None:
    """An index that another user has planted does not change the owner or mode of a new file."""
    index = shared / "m.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "m.safetensors"}}')
    index.chmod(0o666)
    strangers(index)
    ow.save_file({"w": torch.ones(3)}, shared / "m.safetensors")
    state = (shared / "m.safetensors").stat()
    assert state.st_uid == 0 and not state.st_mode & 0o022


@needs_root
def test_a_checkpoint_in_another_users_folder(shared: Path) -> None:
    """If another user has created a folder with the name of a save's temporary folder, the save uses another name, and
    the folder does not change."""
    planted = [shared / ".c.partial", shared / ".c.partial-01234567"]
    for folder in planted:
        folder.mkdir()
        (folder / "theirs").write_text("x")
        strangers(folder)
    place = places.Place(shared / "c", None, True)
    place.begin()
    names = {folder.name for folder in planted}
    assert {*os.listdir(shared)} == names | {".c.partial.lock", f".c.partial-{place.save[:8]}"}
    place.drop()
    assert {*os.listdir(shared)} == names and all((folder / "theirs").exists() for folder in planted)


@needs_root
def test_prepared_state_below_another_users_folder(shared: Path) -> None:
    """A folder for prepared state is refused if another user owns the parent folder and could thus replace it."""
    (shared / "theirs/prepared").mkdir(parents=True, mode=0o700)
    (shared / "theirs/prepared").chmod(0o700)
    strangers(shared / "theirs")
    with pytest.raises(keep_files.Refused, match=f"belongs to user {STRANGER}"):
        keep_files.ensure_folder(str(shared / "theirs/prepared"))
    assert keep_files.ensure_folder(str(shared / "mine"))


def test_modules_in_the_working_folder_are_not_imported(tmp_path: Path) -> None:
    """The command and the processes that it starts run no Python file from the working folder. test_distributed.py
    tests this with ranks."""
    torch.save({"w": torch.ones(3)}, tmp_path / "model.bin")
    words = [*processes.plant_modules(tmp_path), "compress", "model.bin", "-o", "out.safetensors"]
    env = os.environ | {"PYTHONPATH": str(Path(ow.__file__).parents[1])}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("ran-*"))


@needs_root
def test_a_folder_that_can_be_written_but_not_listed(
    torch_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """In another user's folder that can be written but not listed, saves that need no listing work. Other saves are
    refused and leave nothing."""
    torch_script(
        """
import os, tempfile
import pytest, torch
import overwire as ow
import torch.distributed.checkpoint as dcp
from overwire.checkpoints import CheckpointWriter
from overwire.stores import FileWriter, ObjectWriter
def save_all(box):
    for number in range(2):
        state = {"w": torch.full((1000,), number)}
        ow.save_file(state, f"{box}/a.safetensors")
        ow.convert(f"{box}/a.safetensors", f"{box}/b.ow.safetensors")
        dcp.save(state, storage_writer=CheckpointWriter(f"{box}/step"), no_dist=True)
        for kind in (FileWriter, ObjectWriter):
            with kind(f"{box}/{kind.__name__}") as file:
                file.write(bytes([number]))
            with open(f"{box}/{kind.__name__}", "rb") as file:
                assert file.read() == bytes([number])
        for name in ("a.safetensors", "b.ow.safetensors", "step/model.safetensors"):
            assert torch.equal(ow.load_file(f"{box}/{name}")["w"], state["w"]), name

with tempfile.TemporaryDirectory(dir="/tmp") as top:
    box = top + "/box"
    os.chmod(top, 0o755)
    os.mkdir(top + "/own")
    save_all(top + "/own")  # imports everything
    ow.save_bundle({"w": torch.ones(3)}, f"{top}/own/c.pkl")
    os.mkdir(box)
    os.chmod(box, 0o733)
    os.seteuid(%d)
    try:
        with pytest.raises(PermissionError):
            os.listdir(box)
        save_all(box)
        with pytest.raises(ow.AccessError):
            ow.save_bundle({"w": torch.ones(3)}, f"{box}/c.pkl")
        with pytest.raises(ow.AccessError):
            ow.convert(f"{box}/a.safetensors", box, max_shard_size=1000)
    finally:
        os.seteuid(0)
    names = [name for name in sorted(os.listdir(box)) if name != "tensors"]
    assert names == ["FileWriter", "ObjectWriter", "a.safetensors", "b.ow.safetensors", "step"], names
"""
        % STRANGER
    )

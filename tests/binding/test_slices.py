"""Compares safe_open and its slices with numpy's indexing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import safetensors
import torch
from conftest import every_dtype, raw, same
from overwire.model.indexing import plan
from overwire.model.opened import Model

SHAPES = [(), (7,), (1,), (0,), (6, 5), (5, 0), (3, 4, 5), (2, 3, 4, 5)]


def random_index(rng: random.Random, shape: tuple[int, ...]) -> Any:
    entries: list[Any] = []
    for size in shape[: rng.randint(0, len(shape))]:
        kind = rng.randrange(4)
        if kind == 0 and size:
            entries.append(rng.randrange(-size, size))
        elif kind == 1:
            entries.append(slice(None))
        else:
            bound = [None, *range(-size - 2, size + 3)]
            step = rng.choice([None, 1, 1, 2, 3, -1, -2, -3])
            entries.append(slice(rng.choice(bound), rng.choice(bound), step))
    if rng.random() < 0.3:
        entries.insert(rng.randint(0, len(entries)), None)
    if rng.random() < 0.3:
        at = rng.randint(0, len(entries))
        named = sum(e is not None for e in entries)
        if at == len(entries) or named == len(shape):
            entries.insert(at, Ellipsis)
    return entries[0] if len(entries) == 1 and rng.random() < 0.5 else tuple(entries)


@pytest.mark.parametrize("compress", [True, False], ids=["compressed", "plain"])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_random_indices_give_the_same_as_numpy(tmp_path: Path, compress: bool, framework: str, seed: int) -> None:
    rng = random.Random(seed)
    arrays = {str(s): np.random.default_rng(3).random(s).astype(np.float32) for s in SHAPES}
    ow.save_file(arrays, tmp_path / "m", compress=compress)
    with ow.safe_open(tmp_path / "m", framework) as file:
        for shape in SHAPES:
            part = file.get_slice(str(shape))
            assert part.get_shape() == list(shape) and part.get_dtype() == "F32"
            for _ in range(60):
                index = random_index(rng, shape)
                want = np.asarray(arrays[str(shape)][index])
                got = part[index]
                assert tuple(got.shape) == want.shape, (shape, index)
                assert raw(got) == want.tobytes(), (shape, index)
                if framework == "pt" and got.numel():
                    assert got.untyped_storage().nbytes() == want.nbytes


def test_every_dtype_slices(tmp_path: Path) -> None:
    """Slices of every dtype have the same bytes as slices of the tensor. torch cannot hold an odd number of F4 elements
    per row, so such a slice is refused."""
    tensors = every_dtype()
    ow.save_file(tensors, tmp_path / "m")
    with ow.safe_open(tmp_path / "m", "pt") as file:
        for name, tensor in tensors.items():
            if name == "F4":
                want = tensor.view(torch.uint8)[1:].view(tensor.dtype)
                same(file.get_slice(name)[1:], want)
                same(file.get_slice(name)[-2:, :], want)
                with pytest.raises(ow.NotSupportedError):
                    file.get_slice(name)[:, :7]
            else:
                same(file.get_slice(name)[1:, 2:4], tensor[1:, 2:4])
                rows = torch.arange(tensor.shape[0] - 1, -1, -1)
                columns = torch.arange(tensor.shape[1] - 1, -1, -2)
                bytes_of = tensor.view(torch.uint8).reshape(*tensor.shape, -1)[rows][:, columns]
                same(file.get_slice(name)[::-1, ::-2], bytes_of.reshape(len(rows), -1).view(tensor.dtype))
    with ow.safe_open(tmp_path / "m", "np") as file:
        assert file.get_slice("F4")[1, 3:6].shape == (3,)


def test_a_missing_gpu(tmp_path: Path) -> None:
    """Reading from a file that was opened for a missing GPU raises DeviceError."""
    ow.save_file({"x": torch.ones(3)}, tmp_path / "m")
    for read in (lambda file: file["x"], lambda file: file.get_slice("x")[1:], lambda file: file.get_tensors()):
        with pytest.raises(ow.DeviceError), ow.safe_open(tmp_path / "m", "pt", "cuda:99") as file:
            read(file)


@pytest.mark.parametrize("targets", [{"x": 1}, "x", 5, ["x"], ["abc"], [("x", torch.ones(3))], ("x", None, torch.ones(3))])
def test_targets_that_are_not_triples(tmp_path: Path, targets: Any) -> None:
    ow.save_file({"x": torch.ones(3)}, tmp_path / "m")
    with pytest.raises(ow.ArgumentError, match="expected a list of triples"), ow.safe_open(tmp_path / "m", "pt") as file:
        file.load_into(targets)


def test_a_slice_reads_only_its_block() -> None:
    planned = plan((slice(10, 20), slice(3, None, 4)), (100, 50))
    assert planned.block == ((10, 20), (3, 48)) and planned.shape == (10, 45)
    assert plan((-1, ...), (100, 50)).block == ((99, 100), (0, 50))
    assert plan(slice(8, 2, -3), (9,)).block[0] == (5, 9)
    assert plan(..., (4, 5)).cut == ()


MASKS = [np.array([2]), np.array(True), torch.tensor([2]), torch.tensor([True]), torch.tensor(True), np.True_]


@pytest.mark.parametrize("index", [9, -10, (0, 0, 0), (..., ...), [0, 1], True, "a", 1.5, slice(0, 9, 0), slice("a"), *MASKS])
def test_wrong_indices(tmp_path: Path, index: Any) -> None:
    """An invalid index raises SliceError, which is both an IndexError and a ValueError."""
    ow.save_file({"a": np.ones((9, 3))}, tmp_path / "m")
    with ow.safe_open(tmp_path / "m", "np") as file, pytest.raises(ow.SliceError) as caught:
        file.get_slice("a")[index]
    assert isinstance(caught.value, IndexError) and isinstance(caught.value, ValueError)


def test_integers_of_arrays_are_indices(tmp_path: Path) -> None:
    """numpy integers, and arrays and tensors without dimensions, work as indices, as in torch and numpy."""
    ow.save_file({"a": np.arange(27).reshape(9, 3)}, tmp_path / "m")
    with ow.safe_open(tmp_path / "m", "np") as file:
        assert all(
            file.get_slice("a")[index].tolist() == [6, 7, 8] for index in (np.int64(2), np.array(2), torch.tensor(2))
        )


def test_safe_open_equals_safetensors(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(5, 4), "a": torch.arange(3), "c": torch.tensor(1.0)}
    ow.save_file(tensors, tmp_path / "m", {"k": "v"}, compress=False)
    with ow.safe_open(tmp_path / "m", "pt", "cpu") as us, safetensors.safe_open(tmp_path / "m", "pt", "cpu") as them:
        assert us.keys() == list(them.keys()) and us.offset_keys() == list(them.offset_keys())
        assert us.metadata() == them.metadata()
        for name in us.keys():  # noqa: SIM118
            same(us.get_tensor(name), them.get_tensor(name))
            assert us.get_slice(name).get_shape() == them.get_slice(name).get_shape()
            assert us.get_slice(name).get_dtype() == them.get_slice(name).get_dtype()
        same(us.get_slice("b")[1:3, :2], them.get_slice("b")[1:3, :2])
        assert len(us) == 3 and "a" in us and "z" not in us
        assert set(us.get_tensors()) == set(tensors) and list(us.get_tensors(["c", "a"])) == ["c", "a"]


def test_several_files_open_as_one(tmp_path: Path) -> None:
    """Several files are opened as one, with a cast. If they disagree about metadata, the first file wins."""
    ow.save_file({"a": torch.ones(3)}, tmp_path / "1", {"who": "one", "x": "1"})
    ow.save_file({"b": torch.ones(3)}, tmp_path / "2", {"who": "two", "y": "2"})
    with ow.safe_open([tmp_path / "1", tmp_path / "2"], "pt", dtype="bfloat16") as file:
        assert file.keys() == ["a", "b"] and file.metadata() == {"who": "one", "x": "1", "y": "2"}
        assert file.get_tensor("b").dtype == file.get_slice("a")[1:].dtype == torch.bfloat16


def test_a_closed_file_is_refused(tmp_path: Path) -> None:
    ow.save_file({"a": torch.arange(6)}, tmp_path / "m")
    with ow.safe_open(tmp_path / "m") as file:
        part, tensor = file.get_slice("a"), file.get_tensor("a")
        with pytest.raises(ow.TensorNotFoundError):
            file.get_slice("b")
    file.close()
    (tmp_path / "m").unlink()
    same(tensor, torch.arange(6))
    for call in (file.keys, file.metadata, lambda: file.get_tensor("a"), lambda: part[:2]):
        with pytest.raises(ow.ArgumentError, match="closed"):
            call()


def test_a_slice_is_on_the_device_of_the_file(tmp_path: Path) -> None:
    """A slice is on the file's device, even if its block comes from a preload on the CPU."""
    ow.save_file({"a": torch.randn(40, 30)}, tmp_path / "m")
    with ow.safe_open(tmp_path / "m", "pt") as file:
        model = file._live_model()
        model.device, model.lands, model.joined = "meta", "cpu", True  # stands for a GPU
        found = file.get_slice("a")[5:9, 3]
        assert found.device.type == "meta" and found.shape == (4,)


@pytest.mark.parametrize("read", ["get_tensor", "get_tensors", "get_slice", "load_into"])
def test_closed_by_another_thread_while_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str) -> None:
    """If another thread closes the file during a read, the error names the file and not an engine handle."""
    path = tmp_path / "m.safetensors"
    ow.save_file({"a": torch.arange(12.0).reshape(3, 4)}, path)
    reads = {
        "get_tensor": lambda: file.get_tensor("a"),
        "get_tensors": lambda: file.get_tensors(["a"]),
        "get_slice": lambda: file.get_slice("a")[1:],
        "load_into": lambda: file.load_into([("a", None, torch.empty(3, 4))]),
    }
    file = ow.safe_open(path, "pt")
    join = Model.join
    monkeypatch.setattr(Model, "join", lambda self: (file.close(), join(self))[1])
    with pytest.raises(ow.ArgumentError, match=r"m\.safetensors: it is closed") as caught:
        reads[read]()
    assert caught.value.source == str(path)

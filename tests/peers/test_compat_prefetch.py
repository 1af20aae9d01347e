"""Tests, in overwire.compat.safetensors, the methods of open files that safetensors 0.9 adds. If the installed original
has them, both are compared."""

from __future__ import annotations

import json
import os
import pathlib
import threading
from typing import Any

import overwire as ow
import overwire.compat.safetensors as ours
import overwire.compat.safetensors.torch as ours_pt
import pytest
import safetensors as real
import torch
from conftest import every_dtype, same, ugly


@pytest.fixture(params=["plain", "packed"])
def files(request: Any, tmp_path: pathlib.Path) -> tuple[pathlib.Path, dict[str, torch.Tensor]]:
    """Writes a file with difficult tensors of every dtype and returns its path and contents."""
    tensors = {name: tensor.contiguous() for name, tensor in (ugly() | every_dtype()).items()}
    path = tmp_path / "x.safetensors"
    if request.param == "packed":
        ow.save_file(tensors, path)
    else:
        ours_pt.save_file(tensors, path)
    return path, tensors


def is_packed(path: pathlib.Path) -> bool:
    """Returns whether a file is compressed."""
    return bool(ow.inspect(path)["sources"][0]["format"] == "overwire")


def test_entries_of_the_header(files: Any) -> None:
    """get_tensor_meta returns a read-only entry of the header. In a compressed file, its offsets are those of the
    decoded bytes without gaps."""
    path, tensors = files
    plain = ours_pt.save(tensors)
    size = int.from_bytes(plain[:8], "little")
    header = json.loads(plain[8 : 8 + size])
    file = ours.safe_open(path, "pt")
    end = 0
    for name in file.offset_keys():
        meta, entry = file.get_tensor_meta(name), header[name]
        assert (meta.dtype, meta.shape) == (entry["dtype"], entry["shape"])
        assert meta.data_offsets == (end, end + tensors[name].nbytes)
        end = meta.data_offsets[1]
        meta.shape.append(1)
        assert meta.shape == entry["shape"]
        with pytest.raises(AttributeError):
            meta.dtype = "F64"
        if is_packed(path):
            continue
        assert list(meta.data_offsets) == entry["data_offsets"]
        if hasattr(real.safe_open, "get_tensor_meta"):
            theirs = real.safe_open(path, "pt").get_tensor_meta(name)
            assert (repr(theirs), theirs.data_offsets, theirs.shape) == (repr(meta), meta.data_offsets, meta.shape)
    with pytest.raises(ours.SafetensorError, match="^File does not contain tensor nope$"):
        file.get_tensor_meta("nope")
    with pytest.raises(TypeError, match="is not an instance of 'str'"):
        file.get_tensor_meta(3)  # type: ignore[arg-type]
    with file:
        pass
    with pytest.raises(ours.SafetensorError, match="^File is closed$"):
        file.get_tensor_meta("one")


def test_every_tensor_once(files: Any) -> None:
    """Each tensor is returned once, by name or in load order, and unchanged, even if the file is closed."""
    path, tensors = files
    with ours.safe_open(path, "pt") as file:
        order = file.offset_keys()
        loader = file.prefetch()
    assert loader.names() == order and len(loader) == len(tensors)
    last = order[-1]
    came = {last: loader.take(last)}
    for words, name in (("tensor already delivered", last), ("is not in the prefetch plan", "nope")):
        with pytest.raises(ours.SafetensorError, match=words):
            loader.take(name)
    stream = iter(loader)
    assert iter(stream) is stream
    for name, tensor in stream:
        assert name not in came
        came[name] = tensor
    assert list(loader) == [] and came.keys() == tensors.keys()
    for name, tensor in came.items():
        same(tensor, tensors[name])
        tensor.view(-1)[:1].zero_()  # the caller owns each tensor
    assert loader.names() == order


def test_rows_of_a_plan(files: Any) -> None:
    """A plan's rows are the same as a slice of the tensor, and only these rows are returned."""
    path, tensors = files
    rows = [slice(None), slice(1, 3), slice(-2, None), slice(2, 1), slice(3, None), slice(None, -1), slice(True, 2)]
    many = [name for name, tensor in tensors.items() if tensor.dim() and tensor.shape[0] >= 3]
    for at, cut in enumerate(rows):
        plan: dict[str, slice | None] = dict.fromkeys(many[::-1], cut)
        plan |= {"scalar": None, many[at]: None}
        with ours.safe_open(path, "pt").prefetch(plan) as loader:
            assert loader.names() == [name for name in ours.safe_open(path, "pt").offset_keys() if name in plan]
            first = loader.take(many[0])
            came = {many[0]: first, **dict(loader)}
        assert came.keys() == plan.keys()
        for name, tensor in came.items():
            whole = tensors[name]
            same(tensor, whole if plan[name] is None else whole[plan[name]])


def test_closed_loaders(files: Any) -> None:
    """A closed loader returns no more tensors. Those that it has returned stay valid, and the others are freed."""
    path, tensors = files
    with ours.safe_open(path, "pt").prefetch() as loader:
        name, tensor = next(iter(loader))
    same(tensor, tensors[name])
    loader.close()
    rest = next(other for other in tensors if other != name)
    for call in (lambda: loader.take(rest), lambda: next(iter(loader))):
        with pytest.raises(ours.SafetensorError, match="prefetch loader closed$"):
            call()


def test_threads_share_a_loader(files: Any) -> None:
    """If threads iterate over one loader, each tensor is returned once."""
    path, tensors = files
    loader = ours.safe_open(path, "pt").prefetch()
    came: list[tuple[str, torch.Tensor]] = []
    threads = [threading.Thread(target=lambda: came.extend(loader)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(name for name, _ in came) == sorted(tensors)
    for name, tensor in came:
        same(tensor, tensors[name])


def test_threads_share_entries(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """A thread that requests an entry while another thread creates all entries gets the right entry."""
    path = tmp_path / "x.safetensors"
    ours_pt.save_file({f"t{n}": torch.zeros(n) for n in range(3)}, path)
    file = ours.safe_open(path, "pt")
    inner, shapes = ow.TensorSlice, []

    def between(*args: Any) -> Any:
        if not shapes and args[1] == "t1":
            shapes.append([])
            thread = threading.Thread(target=lambda: shapes.append(file.get_tensor_meta("t2").shape))
            thread.start()
            thread.join()
        return inner(*args)

    monkeypatch.setattr(ow, "TensorSlice", between)
    assert file.get_tensor_meta("t0").shape == [0]
    assert shapes == [[], [2]]


def test_a_signal_handler_cannot_take_from_a_loader(files: Any, monkeypatch: Any) -> None:
    """A signal handler that takes from the loader which it interrupts gets an error. The loader continues."""
    path, tensors = files
    refused = []

    def interrupt(now: Any) -> None:  # as in a handler, on the thread that waits for a tensor and holds the lock
        with pytest.raises(ours.SafetensorError, match="a signal handler used"):
            loader.take("one")
        refused.append(now)

    begin = ow.stream
    monkeypatch.setattr(ow, "stream", lambda *args, **options: begin(*args, progress=interrupt, **options))
    loader = ours.safe_open(path, "pt").prefetch()
    came = dict(loader)
    assert refused and came.keys() == tensors.keys()


def test_a_forked_child_cannot_use_its_parents_loader(tmp_path: pathlib.Path, torch_script: Any) -> None:
    """A forked child that uses its parent's loader is refused immediately, even if a thread of the parent waits in the
    loader. The loader continues in the parent."""
    torch_script(
        """
import os, signal, threading, torch, overwire as ow
import overwire.compat.safetensors as ours
ow.save_file({f"t{i}": torch.randn(256, 256) for i in range(8)}, "m")
inside, leave, came, begin = threading.Event(), threading.Event(), [], ow.stream
def wait(now):
    inside.set()
    leave.wait()
ow.stream = lambda *args, **options: begin(*args, progress=wait, **options)
loader = ours.safe_open("m", "pt").prefetch()
thread = threading.Thread(target=lambda: came.extend(loader))
thread.start()
inside.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(10)
    refused = 0
    try:
        for take in (lambda: loader.take("t7"), lambda: next(iter(loader))):
            try:
                take()
            except ow.ForkedError:
                refused += 1
        loader.close()
        os._exit(7 if refused == 2 else 1)
    finally:
        os._exit(1)
leave.set()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
thread.join()
assert len(came) == 8
"""
    )


def test_damaged_and_replaced_files(files: Any) -> None:
    """If a chunk is damaged, each tensor that has not been loaded yet raises an error that names it. A replaced file
    also raises an error."""
    path, tensors = files
    if is_packed(path):
        data = bytearray(path.read_bytes())
        data[-5000:-4000] = bytes(1000)
        path.write_bytes(data)
        loader = ours.safe_open(path, "pt").prefetch()
        raised = set()
        for name in tensors:
            try:
                same(loader.take(name), tensors[name])
            except ours.SafetensorError as error:
                raised.add(str(error))
        assert len(raised) == 1 and "chunk" in raised.pop()
    file = ours.safe_open(path, "pt")
    other = path.with_name("other")
    ours_pt.save_file({"one": torch.ones(1)}, other)
    os.rename(other, path)  # noqa: PTH104
    with pytest.raises(ours.SafetensorError, match="has changed since it was opened"):
        file.prefetch()


PLANS: list[Any] = [
    {"nope": None}, {3: None}, {"a": 3}, {"a": slice(0, 4)}, {"a": slice(4, None)}, {"a": slice(-4, None)},
    {"a": slice(None, -5)}, {"a": slice("x", None)}, {"a": slice(1.5, 2)}, {"a": slice(0, 3, 2)}, {"a": slice(0, 3, -1)},
    {"c": slice(0, 1)}, {}, {"e": slice(0, 1)}, [],
]  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {"device": "mps"}, {"device": "npu:0"}, {"device": -1}, {"device": "bogus"}, {"threads": -1}, {"threads": "x"},
]  # fmt: skip


def test_refusals(tmp_path: pathlib.Path) -> None:
    """A request that cannot be prefetched raises the original's error class and message before anything is read."""
    header = {
        "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
        "c": {"dtype": "F32", "shape": [], "data_offsets": [48, 52]},
        "e": {"dtype": "F32", "shape": [0, 3], "data_offsets": [52, 52]},
        "f6": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [52, 55]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(55))
    calls = [{"plan": plan, "device": "cuda:0"} for plan in PLANS] + SETTINGS
    for call in calls:
        refused = {}
        for module in (real, ours):
            if hasattr(module.safe_open, "prefetch"):
                with pytest.raises((module.SafetensorError, TypeError, OverflowError)) as caught:
                    module.safe_open(path, "pt").prefetch(**call)
                refused[module] = type(caught.value).__name__, str(caught.value)
        if real in refused and call["device" if "device" in call else "threads"] != "cuda:0":
            assert refused[real] == refused[ours], call
        elif real in refused and "CUDA" not in refused[real][1]:
            name, words = refused[ours]
            assert (name, words.removeprefix("argument 'plan': ")) == refused[real], call
    with pytest.raises(ours.SafetensorError, match='only compatible with framework="pt"'):
        ours.safe_open(path, "np").prefetch()
    for plan in (None, {"f6": None}):
        with pytest.raises(ours.SafetensorError, match="F6_E2M3: torch has no matching dtype"):
            ours.safe_open(path, "pt").prefetch(plan)
    for kind in (ours.PrefetchLoader, ours.PySafeSlice, ours.TensorMeta):
        with pytest.raises(TypeError, match="^cannot create '"):
            kind()


def test_a_file_without_tensors(tmp_path: pathlib.Path) -> None:
    """An empty file gives an empty loader."""
    path = tmp_path / "x.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    with ours.safe_open(path, "pt").prefetch() as loader:
        assert loader.names() == list(loader) == [] and len(loader) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: pathlib.Path) -> None:
    """Without a GPU, prefetching to a GPU raises the original's error class, even for some rows, so programs can fall
    back."""
    path = tmp_path / "x.safetensors"
    ours_pt.save_file({"one": torch.ones(1)}, path)
    plans: list[Any] = [None, {"one": slice(0, 1)}]
    for module in (real, ours):
        for plan in plans if hasattr(module.safe_open, "prefetch") else ():
            with pytest.raises(module.SafetensorError):
                module.safe_open(path, "pt").prefetch(plan, device="cuda")


def test_under_the_patch(tmp_path: pathlib.Path) -> None:
    """Under the patch, safetensors can also prefetch from a compressed file."""
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2).half()}
    ow.save_file(tensors, path)
    with ow.patch_safetensors(), real.safe_open(path, "pt") as file:
        assert file.get_tensor_meta("b").dtype == "F16"
        found = dict(file.prefetch({"a": slice(1, None), "b": None}))
    same(found["a"], tensors["a"][1:])
    same(found["b"], tensors["b"])

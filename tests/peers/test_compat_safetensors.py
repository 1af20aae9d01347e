"""Compares overwire.compat.safetensors with the real safetensors package, name by name."""

# ruff: noqa: B023, E501 (every lambda is called where it stands; tables are wide)

from __future__ import annotations

import base64
import importlib
import inspect
import io
import json
import pathlib
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import overwire as ow
import overwire.compat.safetensors as ours
import overwire.compat.safetensors.numpy as ours_np
import overwire.compat.safetensors.torch as ours_pt
import pytest
import safetensors as real
import safetensors.numpy as real_np
import safetensors.torch as real_pt
import torch
from conftest import every_dtype, same
from packaging.version import Version

VECTORS = json.loads((pathlib.Path(__file__).parents[1] / "goldens" / "container" / "vectors.json").read_text())
PAIRS = [(real, ours), (real_pt, ours_pt), (real_np, ours_np)]

# Names that the original's modules import but do not export.
NOT_API = {"os", "sys", "defaultdict", "Any", "Dict", "List", "Optional", "Set", "Tuple", "Union", "torch", "np", "numpy", "_safetensors_rust"}


def outcome(call: Any) -> tuple[Any, BaseException | None]:
    """Returns a call's result and the exception that it raises, or None for each."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(), None
    except Exception as error:
        return None, error


def kind(error: BaseException | None) -> str:
    return "" if error is None else type(error).__name__


def words(error: BaseException | None) -> str:
    """Returns the message of an error. From 0.9 on, a note has the name of the argument."""
    notes = [note.removeprefix("while processing ").strip("'") for note in getattr(error, "__notes__", ())]
    return "".join(f"argument '{name}': " for name in notes) + str(error)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {
        "b": torch.arange(24).reshape(2, 3, 4).float(),
        "a": torch.arange(6, dtype=torch.int16),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "big": torch.randn(513, 257).bfloat16(),
    }


@pytest.fixture
def plain(tensors: Any, tmp_path: pathlib.Path) -> str:
    path = tmp_path / "plain.safetensors"
    real_pt.save_file(tensors, path, metadata={"format": "pt", "x": "y"})
    return str(path)


@pytest.fixture
def packed(tensors: Any, tmp_path: pathlib.Path) -> str:
    path = tmp_path / "packed.safetensors"
    ow.save_file(tensors, path, {"format": "pt", "x": "y"})
    return str(path)


# Names and signatures.


@pytest.mark.parametrize(("theirs", "mine"), PAIRS, ids=["safetensors", "torch", "numpy"])
def test_every_name_exists(theirs: Any, mine: Any) -> None:
    names = {name for name in vars(theirs) if not name.startswith("__")} - NOT_API
    assert names <= set(vars(mine)), names - set(vars(mine))
    if theirs is real:
        assert Version(real.__version__) <= Version(ours.__version__)


@pytest.mark.parametrize(("theirs", "mine"), PAIRS, ids=["safetensors", "torch", "numpy"])
def test_signatures_equal_the_originals(theirs: Any, mine: Any) -> None:
    compared = 0
    for name, original in vars(theirs).items():
        if name in NOT_API or not callable(original) or name == "SafetensorError":
            continue
        want = inspect.signature(original).parameters
        got = inspect.signature(getattr(mine, name)).parameters
        assert [(p.name, p.kind) for p in want.values()] == [(p.name, p.kind) for p in got.values()], name
        for p in want.values():
            assert (p.default is p.empty) == (got[p.name].default is p.empty), (name, p.name)
            if p.default is not p.empty and p.default is not ...:
                assert p.default == got[p.name].default, (name, p.name)
        compared += 1
    assert compared >= 6


def test_every_method_exists(plain: str) -> None:
    for a, b in [
        (real.safe_open(plain, "pt"), ours.safe_open(plain, "pt")),
        (real.safe_open(plain, "pt").get_slice("b"), ours.safe_open(plain, "pt").get_slice("b")),
    ]:
        assert type(a).__name__ == type(b).__name__
        for name in dir(a):
            if not name.startswith("_"):
                want = [p.name for p in inspect.signature(getattr(a, name)).parameters.values()]
                assert [p.name for p in inspect.signature(getattr(b, name)).parameters.values()] == want, name
    assert issubclass(ours.SafetensorError, real.SafetensorError)


@pytest.mark.parametrize("name", ["flax", "mlx", "tensorflow", "paddle"])
def test_other_frameworks(name: str, tmp_path: pathlib.Path) -> None:
    """Each module reads and writes like the original's module. Without its framework, it raises the original's
    error."""
    _, want = outcome(lambda: importlib.import_module(f"safetensors.{name}"))
    module, got = outcome(lambda: importlib.import_module(f"overwire.compat.safetensors.{name}"))
    assert kind(want) == kind(got) and str(want) == str(got)
    if module is None:
        return
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "i": np.arange(3, dtype=np.int32)}
    data = real_np.save(arrays)
    loaded = module.load(data)
    assert module.save(loaded) == ours_np.save(arrays)
    short = {"tensorflow": "tf"}.get(name, name)
    path = tmp_path / "f.safetensors"
    path.write_bytes(real_pt.save({"h": torch.arange(5).bfloat16(), "a": torch.tensor(arrays["a"])}))
    half = module.load_file(path)
    assert "bfloat16" in str(half["h"].dtype)
    assert module.save(half) == ours_pt.save(real_pt.load_file(path))
    for key, array in arrays.items():
        assert np.array_equal(np.asarray(loaded[key]), array)
    part = ours.safe_open(path, short).get_slice("a")[1:]
    assert type(part) is type(half["a"]) and np.array_equal(np.asarray(part), arrays["a"][1:])


def test_integers_that_jax_would_truncate_are_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default jax has no 64-bit integers. The original loads 2**33 + 5 as 5. overwire names the tensor, and loads
    values that fit."""
    from overwire.compat.safetensors._arrays import functions

    try:
        importlib.import_module("jax.numpy")
    except ImportError:  # this stand-in converts as jax does
        narrow = SimpleNamespace(array=lambda array: array.astype({"i": "i4", "u": "u4"}[array.dtype.kind]))
        monkeypatch.setitem(sys.modules, "jax.numpy", narrow)
        monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(numpy=narrow))
    _, _, load_bytes, load_file = functions("safetensors.flax", "flax", np.asarray)
    path = tmp_path / "f.safetensors"
    real_np.save_file({"fits": np.array([2**31 - 1, -(2**31)]), "none": np.zeros((0, 2), np.int64)}, path)
    assert {name: array.tolist() for name, array in load_file(path).items()} == {
        "fits": [2**31 - 1, -(2**31)], "none": [],
    }  # fmt: skip
    for array in (np.array([1, 2**33 + 5]), np.array([-(2**31) - 1]), np.array([2**32], np.uint64)):
        real_np.save_file({"seed": array}, path)
        with ours.safe_open(path, "flax") as file:
            for load in (
                lambda: load_file(path), lambda: load_bytes(path.read_bytes()),
                lambda file=file: file.get_tensor("seed"), lambda file=file: file.get_slice("seed")[:],
            ):  # fmt: skip
                with pytest.raises(ours.SafetensorError, match=r"'seed'.*does not fit.*jax_enable_x64"):
                    load()


def test_the_compiled_module() -> None:
    """The drop-in for the compiled module has every name that the original exports."""
    theirs = importlib.import_module("safetensors._safetensors_rust")
    mine = importlib.import_module("overwire.compat.safetensors._safetensors_rust")
    assert set(theirs.__all__) <= set(vars(mine))


@pytest.mark.slow
def test_under_its_original_name(script: Any) -> None:
    """When the drop-in takes the place of the package, its modules can be imported by their original names."""
    script("""
import sys
sys.modules["safetensors"] = None  # the original is not installed
import overwire.compat.safetensors as ours
sys.modules["safetensors"] = ours
import safetensors, torch
from safetensors.torch import load, load_file, save, save_file
from safetensors.numpy import load_file as load_np
save_file({"a": torch.arange(3)}, "x.safetensors")
assert load_file("x.safetensors")["a"].tolist() == load_np("x.safetensors")["a"].tolist() == [0, 1, 2]
for call in (lambda: load(b"x"), lambda: load_file("y"), lambda: safetensors.safe_open("x.safetensors", "pt").get_tensor("b")):
    try:
        call()
    except (safetensors.SafetensorError, FileNotFoundError) as error:
        assert type(error) in (ours.SafetensorError, FileNotFoundError)
    else:
        raise AssertionError
""")


# Reading.


def test_files(tensors: Any, plain: str, packed: str) -> None:
    """From plain and compressed files, the drop-in reads the same tensors as the original reads from the plain file."""
    want = real_pt.load_file(plain)
    for path in (plain, packed):
        for backend in ("mmap", "pread"):
            got = ours_pt.load_file(path, backend=backend)
            assert set(got) == set(want)
            for name in want:
                same(got[name], want[name])
        with ours.safe_open(path, "pt", device="cpu") as f, real.safe_open(plain, "pt") as g:
            assert f.keys() == g.keys()
            assert f.metadata() == g.metadata()
            assert set(f.get_tensors()) == set(g.offset_keys())
            for name in g.offset_keys():
                same(f.get_tensor(name), g.get_tensor(name))
                a, b = f.get_slice(name), g.get_slice(name)
                assert (a.get_shape(), a.get_dtype()) == (b.get_shape(), b.get_dtype())
    with ours.safe_open(plain, "pt") as f, real.safe_open(plain, "pt") as g:
        assert f.offset_keys() == g.offset_keys()
        assert list(f.get_tensors()) == list(g.get_tensors())
    data = pathlib.Path(packed).read_bytes()
    for loaded in (ours_pt.load(data), ours_pt.load(pathlib.Path(plain).read_bytes())):
        assert set(loaded) == set(want)
        for name in want:
            same(loaded[name], want[name])


def test_every_dtype(tmp_path: pathlib.Path) -> None:
    """Tensors of every dtype are the same in both libraries, from a file and from bytes."""
    made = every_dtype()
    path = tmp_path / "d.safetensors"
    ours_pt.save_file(made, path)
    for loaded in (ours_pt.load_file(path), real_pt.load_file(path), ours_pt.load(ours_pt.save(made))):
        for name, tensor in made.items():
            same(loaded[name], tensor)


def test_numpy(plain: str, tmp_path: pathlib.Path) -> None:
    """Arrays of any memory order and byte order are the same in both libraries."""
    arrays = {
        "f": np.arange(12, dtype=np.float32).reshape(3, 4),
        "t": np.arange(12, dtype=np.int64).reshape(3, 4).T,
        "big": np.arange(4, dtype=">i4"),
        "s": np.array(2.5),
        "e": np.empty((0, 2), np.uint8),
        "c": np.ones(2, np.complex64),
        "o": np.array([True, False]),
    }
    ours_np.save_file(arrays, tmp_path / "n.safetensors", metadata={"k": "v"})
    for loaded in (
        real_np.load_file(tmp_path / "n.safetensors"),
        ours_np.load_file(tmp_path / "n.safetensors"),
        ours_np.load(ours_np.save(arrays)),
    ):
        for name, array in arrays.items():
            assert loaded[name].dtype == array.dtype.newbyteorder("=")
            assert np.array_equal(loaded[name], array)
    assert ours.safe_open(plain, "np").get_tensor("big").dtype.name == "bfloat16"


INDICES: list[Any] = [
    0, -1, 2, -3, slice(None), slice(1, None), slice(None, -1), slice(-5, None), slice(None, 99), slice(5, 9),
    slice(1, 0),
    slice(None, None, 2), slice(None, None, -1), ..., None, (), [0], [0, 1], [-1], [5], [], [True, False], (0, 1),
    (slice(None), 1),
    (..., 1), (1, ...), (slice(None), None), (0, 0, 0), (0, 0, 0, 0), True, 1.0, "a", np.int64(1),
    (slice(None), [0, 2]), ([1], slice(None)),
    (0, [0, 2]), ([0, 1], [0, 2]), (slice(None), slice(None), slice(None, 2)),
    (slice(None), slice(None), slice(None, None, 2)),
    (slice(None), slice(None), [1]), (slice(None), slice(3, 1)), slice(1.0), slice(2, 2), range(2), ((0,),), (None, 0),
    (0, None, 0),
    (..., ...), (slice(None), -1), (slice(None), -4), (slice(None), 3), (slice(0, 1), slice(1, 2), slice(1, 3)),
]  # fmt: skip

# With numpy, the original fails for these indices, which numpy itself accepts.
WIDER = {"OverflowError", "SystemError"}


@pytest.mark.parametrize("name", ["b", "empty", "scalar", "a"])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_every_index(plain: str, packed: str, framework: str, name: str) -> None:
    """Every index gives the original's tensor, or an error of the original's class with its message."""
    theirs = real.safe_open(plain, framework).get_slice(name)
    compared = 0
    for path in (plain, packed):
        mine = ours.safe_open(path, framework).get_slice(name)
        for index in [*INDICES, torch.tensor(1), torch.tensor([0, 1])]:
            (want, refused), (got, error) = (
                outcome(lambda index=index: theirs[index]), outcome(lambda index=index: mine[index]),
            )
            if refused is None:
                assert error is None, (index, error)
                assert tuple(got.shape) == tuple(want.shape) and got.dtype == want.dtype, index
                assert bytes(np.asarray(got)) == bytes(np.asarray(want)), index
                compared += 1
            elif framework == "np" and error is None:
                # Only here does overwire accept more: empty and negative ranges, and ranges beyond the end.
                full = np.arange(24, dtype=np.float32).reshape(2, 3, 4) if name == "b" else real_np.load(ours_np.save({}))
                assert kind(refused) in WIDER or "out of bounds" in str(refused), (index, refused)
                if name == "b":
                    assert np.array_equal(got, full[index]), index
            else:
                # If an index is wrong in two ways, either error may be raised.
                assert kind(error) == kind(refused) or kind(refused) in WIDER, (index, error, refused)
                if kind(refused) == "SafetensorError":
                    assert str(error).split(" with shape")[0] == str(refused).split(" with shape")[0], index
                elif framework == "pt":
                    assert str(error) == str(refused), index
    assert compared >= 2


def test_devices_frameworks_backends(plain: str) -> None:
    """For every device, framework and backend, both libraries accept it or raise an error of the same class."""
    devices = ["cpu", None, 0, 1, True, "cuda", "cuda:0", "mps", "xpu", "npu:3", "hpu", "xx", "cuda:x", "cuda:", "CPU", "0", 1.5, "meta", "cpu:0", -1]
    for device in devices:
        (_, want), (_, got) = (outcome(lambda m=m, d=device: m.safe_open(plain, "pt", device=d)) for m in (real, ours))
        assert kind(want) == kind(got) and str(want) == str(got), device
    for device in ("cuda", "xpu", "mps"):
        (_, want), (_, got) = (
            outcome(lambda m=m, d=device: m.safe_open(plain, "np", device=d).get_tensor("b")) for m in (real, ours)
        )
        assert kind(want) == kind(got) == "SafetensorError" and str(want) == str(got)
    assert ours.safe_open(plain, "pt", device=torch.device("cpu")).get_tensor("b").device.type == "cpu"
    for framework in ("pt", "torch", "pytorch", "np", "numpy", "tf", "tensorflow", "flax", "jax", "mlx", "paddle", "PT", "", None, 3):
        (_, want), (_, got) = (outcome(lambda m=m, f=framework: m.safe_open(plain, f)) for m in (real, ours))
        assert kind(want) == kind(got), framework
        (_, want), (_, got) = (
            outcome(lambda m=m, f=framework: m.safe_open(plain, f).get_tensor("b")) for m in (real, ours)
        )
        assert kind(want) == kind(got), framework
    for backend in ("mmap", "pread", "xx", None, 1):
        (_, want), (_, got) = (outcome(lambda m=m, b=backend: m.safe_open(plain, "pt", backend=b)) for m in (real, ours))
        assert kind(want) == kind(got), backend
        if kind(want) == "SafetensorError":
            assert str(want) == str(got)


def test_errors_of_reading(plain: str, tmp_path: pathlib.Path) -> None:
    """Errors for broken and missing files have the original's class. The message starts like the original's and adds
    the file's name."""
    whole = pathlib.Path(plain).read_bytes()
    for text in (b"", whole[:5], whole[:60], whole[:-3], whole + b"xx", b"PK\3\4" + whole):
        path = tmp_path / "bad.safetensors"
        path.write_bytes(text)
        (_, want), (_, got) = (outcome(lambda m=m: m.safe_open(path, "pt")) for m in (real, ours))
        assert kind(want) == kind(got) == "SafetensorError"
        assert str(got).startswith(str(want)) and "bad.safetensors" in str(got)
        assert isinstance(got.__cause__, ow.OverwireError)  # type: ignore[union-attr]
        with pytest.raises(real.SafetensorError, match="^Error while deserializing: "):
            ours.deserialize(text)
    for call in (lambda m: m.safe_open("/nowhere/x.safetensors", "pt"), lambda m: m.safe_open(3, "pt"), lambda m: m.safe_open(plain)):
        (_, want), (_, got) = (outcome(lambda m=m, call=call: call(m)) for m in (real, ours))
        assert kind(want) == kind(got)
    assert str(outcome(lambda: ours.safe_open("", "pt"))[1]) == str(outcome(lambda: real.safe_open("", "pt"))[1])
    assert str(outcome(lambda: ours.safe_open("/nowhere/x", "pt"))[1]) == str(outcome(lambda: real.safe_open("/nowhere/x", "pt"))[1])
    for name in ("nope", 3):
        for verb in ("get_tensor", "get_slice"):
            (_, want), (_, got) = (
                outcome(lambda m=m, v=verb, n=name: getattr(m.safe_open(plain, "pt"), v)(n)) for m in (real, ours)
            )
            assert kind(want) == kind(got) and words(want) == words(got)


@pytest.mark.parametrize("vector", VECTORS, ids=[v["name"] for v in VECTORS])
def test_every_rule_of_the_format(vector: Any) -> None:
    """For each rule of the format, deserialize raises the original's error class. If both refuse a file for the same
    rule, the message is also the same."""
    data = base64.b64decode(vector["file"])
    (theirs, want), (mine, got) = outcome(lambda: real.deserialize(data)), outcome(lambda: ours.deserialize(data))
    if vector["ours"]:
        assert kind(got) == "SafetensorError"
        if want is not None and "invalid JSON" not in str(want) and "invalid UTF-8" not in str(want) and "2^64" not in vector["name"]:
            assert str(got).startswith(str(want).split("`")[0])  # if a file has two faults, either may be named
    else:
        assert want is None and got is None
        assert sorted(mine) == sorted(theirs)


def test_closed(plain: str) -> None:
    """A closed file raises an error that says so. Slice objects that were made before still work."""
    for module in (real, ours):
        f = module.safe_open(plain, "pt")
        part = f.get_slice("b")
        with f as g:
            assert g is f
        for call in (
            f.keys, f.metadata, f.offset_keys, f.get_tensors, lambda f=f: f.get_tensor("b"),
            lambda f=f: f.get_slice("b"),
        ):
            with pytest.raises(module.SafetensorError, match="^File is closed$"):
                call()
        assert part[0].shape == (3, 4)
    with open(plain, "rb") as file:
        assert ours._safe_open_handle(file, "pt").keys() == ["a", "b", "big", "empty", "scalar"]
    with pytest.raises(AttributeError):
        ours._safe_open_handle(io.BytesIO(), "pt")


# Writing.


def test_saved_files_equal_the_originals(tensors: Any, tmp_path: pathlib.Path) -> None:
    """overwire's file differs from the original's only in the spaces that align the data."""
    a, b = real_pt.save(tensors, {"k": "v"}), ours_pt.save(tensors, {"k": "v"})
    ours_pt.save_file(tensors, tmp_path / "f.safetensors", {"k": "v"})
    assert (tmp_path / "f.safetensors").read_bytes() == b
    n, m = (int.from_bytes(x[:8], "little") for x in (a, b))
    assert json.loads(a[8 : 8 + n]) == json.loads(b[8 : 8 + m])
    assert a[8 + n :] == b[8 + m :]
    assert a[8 : 8 + n].rstrip() == b[8 : 8 + m].rstrip()
    assert (8 + m) % 64 == 0


def test_tensor_spec() -> None:
    """TensorSpec has the original's fields and repr, and both libraries refuse the same arguments."""
    array = np.arange(4, dtype=np.float32)
    for module in (real, ours):
        spec = module.TensorSpec(dtype="float32", shape=(2, 2), data_ptr=array.ctypes.data, data_len=16)
        assert (spec.dtype, spec.shape, spec.data_ptr, spec.data_len) == ("F32", [2, 2], array.ctypes.data, 16)
        assert module.TensorSpec(dtype="float4_e2m1fn_x2", shape=[2, 4], data_ptr=0, data_len=8).shape == [2, 8]
        assert repr(spec).startswith("TensorSpec(dtype='F32', shape=[2, 2], data_ptr=")
        assert module.deserialize(module.serialize({"a": spec})) == [("a", {"dtype": "F32", "shape": [2, 2], "data": bytearray(array.tobytes())})]
        with pytest.raises(AttributeError):
            spec.dtype = "x"
    good: dict[str, Any] = {"dtype": "float32", "shape": [4], "data_ptr": array.ctypes.data, "data_len": 16}
    for wrong in ({"dtype": "xx"}, {"dtype": "complex128"}, {"shape": [-2]}, {"shape": 2}, {"data_ptr": -1}, {"data_len": 15}, {"shape": [5]}):
        (_, want), (_, got) = (
            outcome(lambda m=m, w=wrong: m.serialize({"a": m.TensorSpec(**good | w)})) for m in (real, ours)
        )
        assert kind(want) == kind(got) and want is not None, wrong
    with pytest.raises(ours.SafetensorError):
        ours.serialize({"a": ours.TensorSpec(**good | {"data_ptr": 0})})  # the original crashes in this case
    for call in (
        lambda m: m.serialize([]),
        lambda m: m.serialize({1: m.TensorSpec(**good)}),
        lambda m: m.serialize({"a": m.TensorSpec(**good)}, {"a": 1}),
        lambda m: m.serialize({"a": m.TensorSpec(**good)}, []),
        lambda m: m.TensorSpec("float32", [4], 0, 16),
        lambda m: m.deserialize("x"),
        lambda m: m.serialize_file({"a": m.TensorSpec(**good)}, "/nowhere/x"),
        lambda m: m.serialize_file({"a": m.TensorSpec(**good)}, 3),
    ):
        (_, want), (_, got) = (outcome(lambda m=m, call=call: call(m)) for m in (real, ours))
        assert kind(want) == kind(got) and want is not None


def test_errors_of_saving(tmp_path: pathlib.Path) -> None:
    """Both libraries refuse the same tensors, with the same error class and message, and write nothing."""
    a = torch.ones(4, 4)
    for tensors in (
        [1], {"a": 1}, {1: a}, {"a": a.t()}, {"a": a, "b": a}, {"a": a, "b": a[1:]}, {"a": a.to_sparse()},
        {"a": torch.ones(2, dtype=torch.complex128)}, {"a": torch.ones(2, device="meta")}, {"a": a, "b": a[0], "c": a[2]},
    ):  # fmt: skip
        (_, want), (_, got) = (outcome(lambda m=m, t=tensors: m.save_file(t, tmp_path / "x.safetensors")) for m in (real_pt, ours_pt))
        assert kind(want) == kind(got) and want is not None, tensors
        if "share" in str(want):
            assert sorted(str(want).replace("'", " ")) == sorted(str(got).replace("'", " "))
        else:
            assert words(want) == words(got)
    assert not list(tmp_path.iterdir())
    for arrays in ({"a": np.array(["x"])}, {"a": 1}, [1], {"a": np.ones(2, np.complex128)}):
        (_, want), (_, got) = (outcome(lambda m=m, t=arrays: m.save(t)) for m in (real_np, ours_np))
        assert kind(want) == kind(got) and want is not None


# Shared tensors and modules.


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Linear(8, 8, bias=False)
        self.head = torch.nn.Linear(8, 8, bias=False)
        self.head.weight = self.emb.weight
        self.other = torch.nn.Linear(8, 3)


def states() -> list[dict[str, torch.Tensor]]:
    a, b = torch.arange(10.0), torch.arange(4.0)
    return [
        {},
        {"a": a},
        {"a": a, "b": a},
        {"z": a, "b": a[2:4], "c": b},
        {"a": a[:5], "b": a[5:]},
        {"a": a[:6], "b": a[5:]},
        {"a": a, "b": a[1:2], "c": a[5:6]},
        {"m": torch.ones(2, device="meta"), "n": torch.ones(2, device="meta")},
        {"e": torch.empty(0), "f": torch.empty(0)},
        {"v": a.view(2, 5), "w": a},
    ]


def test_shared_tensors() -> None:
    """The helpers for shared tensors give the original's results for tensors that are equal, overlap, are adjacent,
    empty or on meta."""
    for state in states():
        assert sorted(map(sorted, real_pt._find_shared_tensors(state))) == sorted(
            map(sorted, ours_pt._find_shared_tensors(state))
        )
        for options in ({}, {"preferred_names": ["b", "v"]}, {"discard_names": ["a", "z"]}, {"preferred_names": ["w"], "discard_names": ["w"]}):
            (want, no), (got, error) = (
                outcome(lambda m=m, o=options, s=state: m._remove_duplicate_names(s, **o)) for m in (real_pt, ours_pt)
            )
            assert want == got and kind(no) == kind(error), (state, options)
            assert no is None or str(no).split("amongst")[0] == str(error).split("amongst")[0]
        for tensor in state.values():
            for name in ("storage_ptr", "storage_size", "_is_complete", "_end_ptr"):
                (want, no), (got, error) = (
                    outcome(lambda m=m, t=tensor, n=name: getattr(m, n)(t)) for m in (real_pt, ours_pt)
                )
                assert (want, kind(no)) == (got, kind(error)), name
    assert {k: v for k, v in real_pt._SIZE.items() if k is not None} == ours_pt._SIZE
    assert {k: v for k, v in real_pt._TYPES.items() if v is not None} == ours_pt._TYPES


@pytest.mark.parametrize(("saver", "loader"), [(real_pt, ours_pt), (ours_pt, real_pt), (ours_pt, ours_pt)])
def test_models(saver: Any, loader: Any, tmp_path: pathlib.Path) -> None:
    """Each library loads models that the other saved, including tied weights."""
    torch.manual_seed(1)
    model, twin = Tied(), Tied()
    path = str(tmp_path / "m.safetensors")
    saver.save_model(model, path, {"format": "pt"})
    with real.safe_open(path, "pt") as f:
        assert f.metadata() == {"format": "pt", "head.weight": "emb.weight"}
    missing, unexpected = loader.load_model(twin, path)
    assert (missing, unexpected) == (set(), [])
    for name, tensor in model.state_dict().items():
        same(twin.state_dict()[name], tensor)


def test_models_that_do_not_match(tmp_path: pathlib.Path) -> None:
    """If a model and a file do not match, both libraries report the same missing and unexpected names."""
    path = str(tmp_path / "m.safetensors")
    real_pt.save_file({"emb.weight": torch.ones(8, 8), "extra": torch.ones(1)}, path)
    (_, want), (_, got) = (outcome(lambda m=m: m.load_model(Tied(), path)) for m in (real_pt, ours_pt))
    assert kind(want) == kind(got) == "RuntimeError" and str(want) == str(got)
    for module in (real_pt, ours_pt):
        assert module.load_model(Tied(), path, strict=False) == ({"other.weight", "other.bias"}, ["extra"])
    holder = torch.nn.Module()
    holder.w = torch.nn.Parameter(torch.ones(3, 5).t())
    (_, want), (_, got) = (
        outcome(lambda m=m: m.save_model(holder, path, force_contiguous=False)) for m in (real_pt, ours_pt)
    )
    assert kind(want) == kind(got) == "ValueError" and str(want) == str(got)


def test_functions_of_other_frameworks_can_be_pickled() -> None:
    """Like the original's, the functions can be pickled by name, so a process pool accepts them."""
    from overwire.compat.safetensors._arrays import functions

    for function in functions("safetensors.flax", "np", np.asarray):
        assert (function.__module__, function.__qualname__) == ("safetensors.flax", function.__name__)
        assert hasattr(importlib.import_module("safetensors.numpy"), function.__name__)


def test_save_returns_the_bytes_of_a_file_without_writing_one(torch_script) -> None:
    """`save` and `serialize` return the bytes that `save_file` would write, without writing a file."""
    torch_script("""
import resource, torch
import overwire.compat.safetensors.torch as st
tensors = {"b": torch.randn(3, 5), "a": torch.arange(7, dtype=torch.int8), 'e"\\n\\x01': torch.randn(4).bfloat16(), "": torch.zeros(0)}
for at, metadata in enumerate((None, {}, {"k": "v", "a": "b"})):
    st.save_file(tensors, f"{at}.safetensors", metadata)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    data = st.save(tensors, metadata)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert data == open(f"{at}.safetensors", "rb").read()
""")

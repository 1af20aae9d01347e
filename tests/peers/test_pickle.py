"""Tests that objects saved with compress_pickle load unchanged, with ties and views."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import torch
from conftest import every_dtype, raw, same, ugly
from torch import nn


def trip(obj: Any, folder: Path, trust: bool = False) -> Any:
    ow.compress_pickle(obj, folder / "x.pkl")
    return ow.load_compressed_pickle(folder / "x.pkl", trust=trust)


@dataclasses.dataclass
class Bundle:
    weights: torch.Tensor
    notes: dict[str, Any]


class Special(torch.Tensor):
    pass


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors = every_dtype() | ugly()
    tensors |= {"c128": torch.randn(3, dtype=torch.complex128), "c32": torch.randn(3).to(torch.complex32)}
    got = trip(tensors, tmp_path)
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert got[name].stride() == tensor.stride() and got[name].is_conj() == tensor.is_conj(), name
        assert raw(got[name]) == raw(tensor), name


def test_ties_views_and_identity(tmp_path: Path) -> None:
    """Ties, views and shared storages are restored, and each storage is stored once."""
    base = torch.arange(24.0)
    tied = torch.randn(3)
    obj = {
        "base": base,
        "rows": base.view(4, 6)[1:3],
        "t": base.view(4, 6).t(),
        "bytes": base.view(torch.uint8),
        "tied": [tied, tied],
        "detached": tied.detach(),
        "copy": tied.clone(),
    }
    got = trip(obj, tmp_path)
    assert got["tied"][0] is got["tied"][1]
    got["base"][7] = 100.0
    assert got["rows"][0, 1] == got["t"][1, 1] == 100.0 and got["bytes"].view(torch.float32)[7] == 100.0
    got["detached"][0] = 5
    assert got["tied"][0][0] == 5 and got["copy"][0] == tied[0]
    assert got["rows"].storage_offset() == 6 and got["t"].stride() == (1, 6)
    with ow.safe_open(tmp_path / "nya/x.safetensors") as file:
        assert len(file) == 3  # one tensor for each storage


def test_parameters_buffers_and_modules(tmp_path: Path) -> None:
    """Modules keep their parameters, buffers, strides, ties, modes and results."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.GELU())
    module.to(memory_format=torch.channels_last)
    module[2].weight.requires_grad_(False)
    module[2].bias = module[0].bias
    module.eval()
    got = trip(module, tmp_path)
    assert type(got) is nn.Sequential and not got.training and got[2].bias is got[0].bias
    for (name, a), (_, b) in zip(module.named_parameters(), got.named_parameters(), strict=True):
        assert type(b) is nn.Parameter and a.requires_grad == b.requires_grad and a.stride() == b.stride(), name
        assert torch.equal(a, b)
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(got[1](got[0](x)), module[1](module[0](x)))
    attention = nn.TransformerEncoderLayer(16, 4, activation=nn.functional.relu)
    assert trip(attention, tmp_path).activation is nn.functional.relu


def test_quantised_sparse_subclass_meta(tmp_path: Path) -> None:
    """Quantised, sparse and meta tensors are restored. Tensor subclasses need trust=True."""
    dense = torch.randn(5, 4)
    obj = [
        torch.quantize_per_tensor(dense, 0.1, 3, torch.qint8),
        torch.quantize_per_channel(dense, torch.rand(5), torch.zeros(5), 0, torch.quint8),
        (dense * (dense > 0)).to_sparse(),
        (dense * (dense > 0)).to_sparse_csr(),
        torch.empty(3, 2, device="meta"),
        torch.randn(4, requires_grad=True),
    ]
    got = trip(obj, tmp_path)
    assert torch.equal(got[0].int_repr(), obj[0].int_repr()) and got[0].q_scale() == obj[0].q_scale()
    assert torch.equal(got[1].dequantize(), obj[1].dequantize())
    assert torch.equal(got[2].to_dense(), obj[2].to_dense()) and got[2].layout == torch.sparse_coo
    assert torch.equal(got[3].to_dense(), obj[3].to_dense()) and got[3].layout == torch.sparse_csr
    assert got[4].device.type == "meta" and got[5].requires_grad
    special = torch.randn(3).as_subclass(Special)
    special.note = "kept"
    again = trip({"s": special}, tmp_path, trust=True)["s"]
    assert type(again) is Special and again.note == "kept" and torch.equal(again, special)


def test_numpy_arrays(tmp_path: Path) -> None:
    """Arrays of every kind keep their bytes, flags and shared memory. Scalars and dtypes keep their types."""
    import ml_dtypes

    base = np.arange(30.0).reshape(5, 6)
    frozen = np.arange(3)
    frozen.flags.writeable = False
    record = np.zeros(3, dtype=[("a", "<i4"), ("b", "<f8", (2,))])
    record["b"] = 7
    obj = {
        "base": base,
        "view": base[1:, ::2],
        "back": base[::-1],
        "twice": [base, base],
        "fortran": np.asfortranarray(np.random.default_rng(1).random((3, 4))),
        "0d": np.array(3),
        "empty": np.empty((0, 3), np.int8),
        "frozen": frozen,
        "record": record,
        "dates": np.array(["2024-01-01"], "M8[D]"),
        "texts": np.array(["a", "bc"]),
        "bf16": np.ones(4, ml_dtypes.bfloat16),
        "fp4": np.ones(3, ml_dtypes.float4_e2m1fn),
        "objects": np.array([None, {"x": 1}, base], dtype=object),
        "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("x"), np.datetime64("2024-01-01")],
        "dtypes": [np.dtype("f4"), np.dtype("O"), record.dtype, np.dtype(ml_dtypes.bfloat16), np.float32],
        "foreign": np.frombuffer(b"12345678", np.uint8),
    }
    got = trip(obj, tmp_path)
    for name in obj:
        if isinstance(obj[name], np.ndarray) and name != "objects":
            assert got[name].dtype == obj[name].dtype and got[name].shape == obj[name].shape, name
            assert got[name].tobytes() == obj[name].tobytes(), name
            assert got[name].flags.writeable == obj[name].flags.writeable, name
    assert got["twice"][0] is got["twice"][1] is got["base"] is got["objects"][2]
    got["base"][2, 2] = -1
    assert got["view"][1, 1] == got["back"][2, 2] == -1
    assert got["fortran"].flags.f_contiguous and got["objects"][1] == {"x": 1}
    assert got["scalars"] == obj["scalars"] and [type(x) for x in got["scalars"]] == [type(x) for x in obj["scalars"]]
    assert got["dtypes"] == obj["dtypes"]


def test_plain_python(tmp_path: Path) -> None:
    """Standard types, dtypes, devices and recursive lists are restored."""
    loop: list[Any] = [1]
    loop.append(loop)
    obj = {
        "n": [None, True, 1 << 80, 1.5, 2j, "é", b"\0", bytearray(b"x"), (), {1, 2}, frozenset({3}), range(3), slice(1, 2)],
        "c": [collections.OrderedDict(a=1), collections.defaultdict(list, {1: [2]}), collections.deque([1, 2], 5)],
        "t": [datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc), datetime.timedelta(3)],
        "torch": [torch.float8_e4m3fn, torch.Size([1, 2]), torch.device("cuda", 1), torch.channels_last, torch.strided],
    }
    assert trip(obj, tmp_path) == obj
    got = trip(loop, tmp_path)
    assert got[1] is got
    assert ow.compress_pickle(obj, tmp_path / "y.pkl") == 1.0


def test_any_object_with_trust(tmp_path: Path) -> None:
    """An object of any class loads with trust=True. Without it, the error names the class."""
    bundle = Bundle(torch.randn(9), {"when": datetime.date(2024, 1, 1)})
    with pytest.raises(ow.UntrustedPickleError, match="Bundle"):
        trip(bundle, tmp_path)
    got = ow.load_compressed_pickle(tmp_path / "x.pkl", trust=True)
    assert type(got) is Bundle and torch.equal(got.weights, bundle.weights) and got.notes == bundle.notes


def test_the_callers_object_is_not_changed(tmp_path: Path) -> None:
    module = nn.Linear(5, 5)
    arrays = {"m": module, "a": np.arange(5), "t": torch.randn(3)}
    before = copy.deepcopy(arrays)
    pointers = [p.data_ptr() for p in module.parameters()]
    ow.compress(arrays, tmp_path / "x.pth")
    ow.compress_pickle(arrays, tmp_path / "x.pkl")
    assert [p.data_ptr() for p in module.parameters()] == pointers
    same(arrays["t"], before["t"])
    assert torch.equal(module.weight, before["m"].weight) and np.array_equal(arrays["a"], before["a"])


def test_loaded_tensors_belong_to_the_caller(tmp_path: Path) -> None:
    got = trip({"a": torch.randn(50, 50), "n": np.arange(9)}, tmp_path)
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    got["a"].add_(1)
    got["n"] += 1
    assert got["n"].sum() == 45 and got["a"].isfinite().all()


def test_a_bundle_without_tensors_reports_progress(tmp_path: Path) -> None:
    """Loading a bundle without tensors reports progress once, at the end."""
    seen: list[ow.Progress] = []
    ow.compress_pickle({"a": 1}, tmp_path / "b")
    for _ in range(20):
        seen.clear()
        assert ow.load_compressed_pickle(tmp_path / "b", progress=seen.append) == {"a": 1}
        assert seen == [ow.Progress(0, 0, 0, 0)]

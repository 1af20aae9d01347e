"""Tests overwire.compat.fastsafetensors with paddle, if it is installed."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

paddle = pytest.importorskip("paddle")

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import overwire as ow  # noqa: E402
import overwire.compat.fastsafetensors as fst  # noqa: E402
from overwire.compat.fastsafetensors.frameworks import get_framework_op  # noqa: E402
from overwire.compat.fastsafetensors.st_types import Device, DType  # noqa: E402


@pytest.fixture
def arrays() -> dict[str, Any]:
    made = np.random.default_rng(2)
    found: dict[str, Any] = {name: made.integers(0, 100, (6, 5)).astype(name) for name in ("uint8", "int8", "int16", "int32", "int64")}
    found |= {name: made.normal(size=(6, 5)).astype(name) for name in ("float16", "float32", "float64")}
    return found | {"flags": np.arange(7) % 2 == 0, "bf16": made.normal(size=(300, 20)).astype(ml_dtypes.bfloat16)}


def same(tensor: Any, array: Any) -> None:
    assert isinstance(tensor, paddle.Tensor) and list(tensor.shape) == list(array.shape)
    if array.dtype == ml_dtypes.bfloat16:
        assert tensor.dtype == paddle.bfloat16
        tensor, array = tensor.astype("float32"), array.astype("float32")
    assert np.array_equal(tensor.numpy(), array)


@pytest.mark.parametrize("compress", [False, True])
def test_paddle_tensors_outlive_the_buffer(arrays: dict[str, Any], tmp_path: Path, compress: bool) -> None:
    path = str(tmp_path / "x.safetensors")
    ow.save_file(arrays, path, compress=compress)
    with fst.fastsafe_open(path, framework="paddle") as file:
        assert sorted(file.keys()) == sorted(arrays)
        kept = {name: file.get_tensor(name) for name in arrays}
        assert file.fb.get_tensor("float32", dtype=DType.F64).dtype == paddle.float64
        same(file.fb.get_multi_cols(["int64", "int64"], 1).get_raw(), np.concatenate([arrays["int64"]] * 2, 1))
        same(file.fb.get_sharded("int32", 0), arrays["int32"])
    gc.collect()
    for name, array in arrays.items():
        same(kept[name], array)
    op = get_framework_op("paddle")
    assert op.get_mem_used() == 0 and op.get_name() == "paddle" and op.get_process_group(None).size() == 1
    assert op.is_equal(op.get_empty_tensor([2], DType.F32, Device()), paddle.zeros([3])) is False
    with pytest.raises(TypeError):
        op.is_equal(op.randn((2,), Device(), DType.F32), [1])
    with pytest.raises(ValueError):
        op.get_process_group(3)
    weights = fst.ParallelLoader(None, [path], framework="paddle", use_tqdm_on_load=False).iterate_weights()
    for name, tensor in weights:
        same(tensor, arrays[name])

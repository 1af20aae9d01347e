"""Tests that CheckpointStager copies a state as it is at the call, or refuses it and names the tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from overwire.checkpoints import CheckpointStager, CheckpointWriter, buffers  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.masked import masked_tensor  # noqa: E402


class _Made(Mapping[str, Any]):
    """A mapping that makes a new tensor on each request, and has one entry less after every three requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getitem__(self, key: str) -> Any:
        self.asked.append(key)
        return torch.full((4,), float(len(self.asked)))

    def __iter__(self) -> Iterator[str]:
        return iter(["w0", "w1", "w2"][: 3 - len(self.asked) // 3])

    def __len__(self) -> int:
        return 3


def test_a_stager_requests_each_value_once() -> None:
    """Each value is requested only once, so a mapping that makes its tensors on request is staged consistently."""
    made = _Made()
    staged = CheckpointStager().stage({"model": made, "list": [made, 3]})
    assert [value.tolist() for value in staged["model"].values()] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    assert made.asked == ["w0", "w1", "w2", "w0", "w1"] and staged["list"][1] == 3


def test_tensors_that_outlive_their_staged_state_keep_their_values() -> None:
    """A tensor of a staged state keeps its values even after the state is gone. Its buffer is reused once the tensor
    itself is gone."""
    stager = CheckpointStager()
    kept = stager.stage({"a": torch.full((1000,), 1.0)})["a"][3:9]
    storage = stager.stage({"a": torch.full((1000,), 2.0)})["a"].untyped_storage()
    stager.stage({"a": torch.full((1000,), 3.0)})
    assert kept.tolist() == [1.0] * 6 and storage[3] == torch.full((1,), 2.0).untyped_storage()[3]
    address = kept.untyped_storage().data_ptr()
    del kept
    assert address in [stager.stage({"a": torch.ones(1000)})["a"].data_ptr() for _ in range(3)]


def _emptied(size: int) -> torch.Tensor:
    tensor = torch.ones(64, 64)
    tensor.untyped_storage().resize_(size)
    return tensor


class _Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(one.inner.float() if isinstance(one, _Wrapper) else one for one in args), **(kwargs or {}))


def _asleep() -> torch.Tensor:
    tensor = torch.ones(300, 300)
    ow.sleep({"a": tensor})
    return tensor


UNSTAGED: dict[str, tuple[type[ow.OverwireError], Any]] = {
    "asleep": (ow.ArgumentError, _asleep),
    "emptied": (ow.ArgumentError, lambda: _emptied(0)),
    "shortened": (ow.ArgumentError, lambda: _emptied(400)),
    "wrapper": (ow.NotSupportedError, lambda: _Wrapper(torch.ones(9, dtype=torch.int8))),
    "masked": (ow.NotSupportedError, lambda: masked_tensor(torch.arange(4.0), torch.arange(4) > 1)),
    "subclass": (ow.NotSupportedError, lambda: torch.ones(3).as_subclass(type("Mine", (torch.Tensor,), {}))),
    "nested": (ow.NotSupportedError, lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(5)])),
    "jagged": (ow.NotSupportedError, lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged)),
    "meta": (ow.NotSupportedError, lambda: torch.ones(3, device="meta")),
    "fake": (ow.NotSupportedError, lambda: FakeTensorMode().from_tensor(torch.ones(3))),
    "quantised": (ow.NotSupportedError, lambda: torch.quantize_per_tensor(torch.ones(8), 0.5, 3, torch.quint8)),
    "lazy": (ow.NotSupportedError, lambda: next(torch.nn.LazyLinear(3).parameters())),
    "functional": (ow.NotSupportedError, lambda: torch._to_functional_tensor(torch.ones(3))),
    "sparse": (ow.NotSupportedError, lambda: torch.eye(3).to_sparse_csr()),
}


@pytest.mark.parametrize("what", UNSTAGED)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_memory_of_their_own_are_refused_by_name(what: str, tmp_path: Path) -> None:
    """A tensor without memory for all its elements is refused by name, by the stager (before it allocates) and by the
    writer. No tensor is read past its memory or stored in part."""
    kind, make = UNSTAGED[what]
    held = len(buffers.offer_buffers().buffers)
    one = make()
    with pytest.raises(kind, match=r"model\.layers\.1\.w") as caught:
        CheckpointStager().stage({"a": torch.ones(9), "model": {"layers": [1, {"w": one}]}})
    assert caught.value.tensor == "model.layers.1.w" and len(buffers.offer_buffers().buffers) == held
    if kind is ow.ArgumentError:
        with pytest.raises(CheckpointException) as failed:
            dcp.save({"w": one}, storage_writer=CheckpointWriter(tmp_path / "ck"), no_dist=True)
        assert isinstance(next(iter(failed.value.failures.values()))[0], ow.ArgumentError)
        assert not (tmp_path / "ck").exists()


@pytest.mark.parametrize("there", ["torch", "torch.distributed.tensor"])
def test_an_old_torch_is_named(there: str, script: Any) -> None:
    """If torch is missing or has no public DTensor, the import error says which version is needed."""
    script(
        f"""
import sys
sys.modules[{there!r}] = None  # as if it were not installed
import overwire
try:
    import overwire.checkpoints
except overwire.MissingPackageError as error:
    assert "torch 2.5 or later" in str(error) and isinstance(error, ImportError)
else:
    raise SystemExit("imported")
"""
    )

"""Tests that the recorder of weight loaders undoes its changes to torch, even if it cannot start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import overwire as ow
import pytest
import torch
from overwire.integrations.load_plan import copies, record_copies

NAMES = ("device", "is_meta", "is_cpu", "is_cuda")


def test_a_torch_without_the_recorders_hook_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch lacks the hook that records operations, the model is loaded tensor by tensor, and torch is not
    changed."""
    before = [vars(torch.Tensor).get(name) for name in NAMES]
    record_copies._recorder_keys.cache_clear()
    monkeypatch.setattr(record_copies, "_register_keys", lambda: (_ for _ in ()).throw(RuntimeError("no such key")))
    with pytest.raises(record_copies.Unplannable, match="no such key"):
        record_copies.Recorder(lambda copies: None).__enter__()
    record_copies._recorder_keys.cache_clear()
    assert [vars(torch.Tensor).get(name) for name in NAMES] == before


def test_properties_of_other_packages_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A property that another package has set on torch.Tensor works during the recording and afterwards."""
    other = property(lambda self: "other's")
    monkeypatch.setattr(torch.Tensor, "device", other, raising=False)
    with record_copies._places:
        assert torch.ones(1).device == "other's"
    assert vars(torch.Tensor)["device"] is other


def _copied(loads: Callable[[torch.Tensor, dict[str, torch.Tensor]], None], tmp_path: Path) -> tuple[torch.Tensor, int]:
    """Returns a parameter with 6 rows of 12 columns that a loader fills from a file by slices, and the number of
    recorded copies."""
    torch.manual_seed(3)
    widths = {"q": 6, "k": 2, "v": 4}
    tensors = {name: torch.randint(0, 99, (6, width), dtype=torch.int32) for name, width in widths.items()}
    ow.save_file(tensors, tmp_path / "model.safetensors")
    counts = []
    target = torch.zeros(6, 12, dtype=torch.int32)

    def load(every: list[copies.Copy]) -> None:
        copies.load_copies(every, 1 << 20)
        counts.append(len(every))

    with contextlib.ExitStack() as files:
        recorder = record_copies.Recorder(load)
        source = record_copies.open_source(files, str(tmp_path / "model.safetensors"), "cpu", {})
        with recorder:
            loads(target, dict(record_copies.iter_stand_ins(recorder, source)))
            recorder.load_rest()
    expected = torch.zeros_like(target)
    loads(expected, tensors)
    assert torch.equal(target, expected)
    return target, sum(counts)


def test_columns_of_one_parameter_are_recorded(tmp_path: Path) -> None:
    """GPTQ and AWQ fuse the columns of three tensors into one parameter. All three copies are recorded, and the tensors
    are loaded in place."""

    def loads(target: torch.Tensor, weights: dict[str, torch.Tensor]) -> None:
        for name, low, high in (("v", 8, 12), ("q", 0, 6), ("k", 6, 8)):
            target[:, low:high].copy_(weights.pop(name))

    assert _copied(loads, tmp_path)[1] == 3


def test_columns_that_overlap_are_refused(tmp_path: Path) -> None:
    """The recording ends if two copies write to the same byte, because then their order matters. The cases are
    overlapping columns, part of a row across columns, and columns of every other row."""
    others = [(slice(None), slice(5, 9)), (slice(2, 3), slice(4, 8)), (slice(None, None, 2), slice(8, 12))]
    for rows, columns in others:

        def loads(target: torch.Tensor, weights: dict[str, torch.Tensor], rows=rows, columns=columns) -> None:
            target[:, :6].copy_(weights.pop("q"))
            other = target[rows, columns]
            other.copy_(weights.pop("v")[: other.shape[0], : other.shape[1]])

        with pytest.raises(record_copies.Unplannable):
            _copied(loads, tmp_path)


@pytest.mark.parametrize("reads", [False, True])
def test_small_tensors_that_are_copied_do_not_stop_early_reading(tmp_path: Path, monkeypatch, reads: bool) -> None:
    """A loader gets scales with their data. If it only copies them, reading can start early. If it computes with a
    scale, reading cannot."""
    monkeypatch.setattr(record_copies, "EARLY", 1)
    tensors = {"a": torch.tensor([2.0]), "b": torch.rand(9, 9), "c": torch.rand(9, 9), "shape": torch.tensor([9, 9])}
    ow.save_file(tensors, tmp_path / "model.safetensors")
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    begun: list[str] = []

    def begin(every: list[copies.Copy]) -> list[copies.Copy]:
        begun.extend(copy.of.name for copy in every)
        return every

    with contextlib.ExitStack() as files:
        recorder = record_copies.Recorder(lambda every: copies.load_copies(every, 1 << 20), begin)
        source = record_copies.open_source(files, str(tmp_path / "model.safetensors"), "cpu", {})
        with recorder:
            for name, tensor in record_copies.iter_stand_ins(recorder, source):
                into[name].copy_(tensor * 1 if reads and name == "a" else tensor)
                del tensor
            recorder.load_rest()
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
    assert begun[:1] == ([] if reads else ["b"])


def test_accepted_views_share_no_byte() -> None:
    """For all pairs of small rectangles: two views of one memory are accepted only if they share no byte."""
    memory = torch.arange(48)
    views = [
        memory.as_strided((rows, width), (step, 1), low)
        for rows in (1, 2, 3) for width in (1, 2, 5) for step in (5, 8) for low in range(0, 20, 3)
    ]  # fmt: skip
    places = [set(view.reshape(-1).tolist()) for view in views]
    pairs = 0
    for one, its in zip(views, places, strict=True):
        for other, others in zip(views, places, strict=True):
            noted = copies.Destinations()
            assert noted.note_copy(one, copies.memory_range(one), "one") is None
            if noted.note_copy(other, copies.memory_range(other), "other") is None:
                assert not its & others, (one, other)
                pairs += 1
    assert pairs > 1000


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_packed_tensors_have_torchs_shape(tmp_path: Path) -> None:
    """A loader gets float4 weights as lazy tensors with torch's packed shape. Whole tensors, rows, columns and
    transposes that it copies are loaded."""
    packed = torch.float4_e2m1fn_x2
    bits = {"w": torch.arange(64, dtype=torch.uint8).reshape(8, 8), "v": torch.arange(100, 116, dtype=torch.uint8)}
    parts = {
        "w": (lambda t: t, lambda t: t[2:5], lambda t: t[:, 2:6], lambda t: t.t()),
        "v": (lambda t: t, lambda t: t[4:9]),
    }
    ow.save_file({name: tensor.clone().view(packed) for name, tensor in bits.items()}, tmp_path / "model.safetensors")
    for name, cuts in parts.items():
        for cut in cuts:
            want = cut(bits[name]).contiguous()
            into = torch.zeros_like(want).view(packed)
            with contextlib.ExitStack() as files:
                recorder = record_copies.Recorder(lambda every: copies.load_copies(every, 1 << 20))
                source = record_copies.open_source(files, str(tmp_path / "model.safetensors"), "cpu", {}, wanted=name.__eq__)
                with recorder:
                    for _, weight in record_copies.iter_stand_ins(recorder, source):
                        into.copy_(cut(weight))
                        del weight
                    recorder.load_rest()
            assert torch.equal(into.view(torch.uint8), want), name

"""Tests that loading part of a model reads only that part. Unneeded shards stay closed, slices read their rows, and a
memory limit is checked before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
from conftest import raw, same

LAYERS, EXPERTS = 2, 6


def names_of(kind: str) -> list[str]:
    """Returns the names of an expert's tensors for one kind of quantisation."""
    return {
        "plain": ["gate_proj.weight", "down_proj.weight", "down_proj.bias"],
        "packed": [f"up_proj.{end}" for end in ("weight_packed", "weight_scale", "weight_global_scale", "input_scale", "weight_shape")],
        "gptq": ["up_proj.qweight", "up_proj.qzeros", "up_proj.scales", "up_proj.g_idx"],
        "fp8": ["up_proj.weight", "up_proj.weight_scale_inv", "up_proj.weight_scale_2"],
    }[kind]


def mixture(kind: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a small mixture-of-experts model. Some names contain an expert's number. Others only look
    as if they did."""
    torch.manual_seed(9)
    made = {"model.embed_tokens.weight": torch.randn(40, 8), "experts.weight": torch.randn(3)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}.mlp"
        made[f"{at}.gate.weight"] = torch.randn(EXPERTS, 8)
        made[f"{at}.shared_experts.0.up_proj.weight"] = torch.randn(4, 8)
        made[f"{at}.shared_expert.up_proj.weight"] = torch.randn(4, 8)
        made[f"{at}.experts.gate_up_proj"] = torch.randn(EXPERTS, 4, 8)
        for expert in range(EXPERTS):
            for name in names_of(kind):
                made[f"{at}.experts.{expert}.{name}"] = torch.randn(4, 8)
    return made


def sharded(tensors: dict[str, torch.Tensor], folder: Path, shard: Any, compress: bool = False) -> dict[str, str]:
    """Writes shards and their index, and returns each tensor's file. `shard` maps a tensor name to its shard number."""
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        files.setdefault(f"model-{shard(name):05}.safetensors", {})[name] = tensor
    weight_map = {name: file for file, part in files.items() for name in part}
    for file, part in files.items():
        ow.save_file(part, folder / file, compress=compress)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


@pytest.mark.parametrize("compress", [False, True])
def test_only_needed_shards_are_opened(tmp_path: Path, compress: bool) -> None:
    tensors = {f"t{i}": torch.randn(300 + i) for i in range(12)}
    where = sharded(tensors, tmp_path, lambda name: int(name[1:]) % 4, compress)
    wanted = ["t5", "t1", "t2"]
    for file in set(where.values()) - {where[name] for name in wanted}:
        (tmp_path / file).unlink()  # so that opening it fails
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        for loaded in (
            ow.load_file(source, keys=wanted),
            ow.load_file(source, keys=iter(wanted)),
            ow.load_file(source, filter=lambda name: name in wanted),
            ow.load_file(source, keys=wanted, filter=lambda name: True),
            dict(ow.stream(source, keys=wanted)),
            dict(ow.stream(source, filter=wanted.__contains__)),
        ):
            assert set(loaded) == set(wanted)
            for name in wanted:
                same(loaded[name], tensors[name])
        assert list(ow.load_file(source, keys=wanted)) == wanted
        assert {Path(f.file).name for f in ow.plan(source, keys=wanted).files} == {where[name] for name in wanted}
        assert ow.load_file(source, keys=[]) == {}
        assert ow.load_file(source, filter=lambda name: False) == {}
        with pytest.raises(ow.NotFoundError):
            ow.load_file(source)
        with pytest.raises(ow.NotFoundError):
            ow.load_file(source, keys=["t3"])
    with pytest.raises(ow.ArgumentError):
        ow.load_file(tmp_path, keys="t5")
    with pytest.raises(ow.ArgumentError):
        ow.load_file(tmp_path, filter="t5")  # type: ignore[arg-type]


def test_tensors_that_the_index_does_not_name(tmp_path: Path) -> None:
    """The index decides which tensors belong to the model. Other tensors in its shards are ignored."""
    tensors = {f"t{i}": torch.randn(30) for i in range(4)}
    sharded(tensors, tmp_path, lambda name: int(name[1:]))
    index = tmp_path / "model.safetensors.index.json"
    text = json.loads(index.read_text())
    ow.save_file({"t3": tensors["t3"], "extra": torch.ones(2)}, tmp_path / text["weight_map"]["t3"], compress=False)
    for name in ("extra", "nowhere"):
        with pytest.raises(ow.TensorNotFoundError, match=name):
            ow.load_file(tmp_path, keys=[name, "t0"])
    assert sorted(ow.load_file(tmp_path)) == sorted(tensors) == sorted(ow.load_file(tmp_path, filter=lambda name: True))
    del text["weight_map"]["t1"], text["weight_map"]["t2"]
    text["weight_map"]["t9"] = text["weight_map"]["t0"]  # the file lacks this tensor
    index.write_text(json.dumps(text))
    assert list(ow.load_file(tmp_path, keys=["t3"])) == ["t3"]
    with pytest.raises(ow.FormatError, match="t9"):
        ow.load_file(tmp_path, keys=["t0"])


@pytest.mark.parametrize("kind", ["plain", "packed", "gptq", "fp8"])
@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_experts(tmp_path: Path, kind: str, placement: str, world: int) -> None:
    """Each rank gets its own experts' weights, and every rank gets the scales, zero points and shared tensors.
    Together, the ranks have every tensor, and each expert weight once."""
    tensors = mixture(kind)
    sharded(tensors, tmp_path, lambda name: len(name) % 3)
    heavy = ("weight", "weight_packed", "qweight", "bias")
    seen: dict[str, int] = {}
    for rank in range(world):
        mine = ow.load_file(tmp_path, filter=ow.experts(rank, world, placement=placement))
        for name, tensor in mine.items():
            same(tensor, tensors[name])
            seen[name] = seen.get(name, 0) + 1
        counted = ow.load_file(tmp_path, filter=ow.experts(rank, world, EXPERTS, placement))
        assert list(counted) == list(mine)
    for name in tensors:
        own = ".mlp.experts." in name and name.split(".experts.")[1][0].isdigit() and name.endswith(heavy)
        assert seen[name] == (1 if own else world), name


def test_experts_that_do_not_divide_evenly() -> None:
    """If the experts do not divide evenly, the first ranks have one more expert each."""
    for count in (1, 5, 6, 128):
        for world in (1, 2, 3, 4, 8):
            linear = [ow.experts(0, world, count).owner(e) for e in range(count)]
            assert linear == sorted(linear)
            sizes = [linear.count(rank) for rank in range(world)]
            assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1
            dealt = [ow.experts(0, world, count, "round_robin").owner(e) for e in range(count)]
            assert dealt == [e % world for e in range(count)]
    for wrong in ((2, 2), (-1, 2), (0, 0), (0, 2, 0), (0, 2, 4, "x"), ("0", 2), (0, True)):
        with pytest.raises(ow.ArgumentError):
            ow.experts(*wrong)  # type: ignore[arg-type]
    with pytest.raises(ow.ArgumentError, match="expert 9: expected 0 <= expert < 4"):
        ow.experts(0, 2, 4)("model.experts.9.weight")


def test_experts_leave_shards_closed(tmp_path: Path) -> None:
    """Shards that hold only other ranks' experts are not opened."""
    tensors = {n: t for n, t in mixture("plain").items() if ".experts." in n and n.split(".experts.")[1][0].isdigit()}
    where = sharded(tensors, tmp_path, lambda name: int(name.split(".experts.")[1].split(".")[0]))
    for name, file in where.items():
        if ".experts.0." not in name:
            (tmp_path / file).unlink(missing_ok=True)
    assert len(ow.load_file(tmp_path, filter=ow.experts(0, EXPERTS))) == LAYERS * len(names_of("plain"))


@pytest.mark.parametrize("compress", [False, True])
def test_rows_read_their_bytes(tmp_path: Path, compress: bool) -> None:
    """A slice along dimension 0 reads only the pages that contain its rows or, in a compressed file, the chunks that
    do."""
    rows, row = 8192, 512 * 2
    tensor = torch.randn(rows, row // 2).bfloat16()
    path = tmp_path / "a.safetensors"
    ow.save_file({"a": tensor}, path, compress=compress)
    chunk = (1 << 20) if compress else 0
    with ow.safe_open(path, "pt", mmap=False) as f:
        for lo, hi in ((0, 1), (100, 164), (rows - 7, rows), (0, rows)):
            same(f.get_slice("a")[lo:hi], tensor[lo:hi])
            read = ow.last_report()["stages"]["read_bytes"]  # type: ignore[index]
            wanted = (hi - lo) * row
            if compress:
                assert 0 < read <= wanted + 2 * chunk
                assert hi - lo == rows or read < rows * row / 4
            else:
                assert wanted <= read < wanted + 2 * 4096  # whole pages


def test_max_memory_limits_a_load(tmp_path: Path) -> None:
    """max_memory limits a load's tensors, including both copies during a cast. The error gives the sizes and the
    largest tensor."""
    tensors = {"a": torch.randn(1000), "b": torch.randn(500).half(), "i": torch.arange(10)}
    path = tmp_path / "a.safetensors"
    ow.save_file(tensors, path)
    total = 4000 + 1000 + 80
    for enough in (total, f"{total}B", "1MB", None):
        assert len(ow.load_file(path, max_memory=enough)) == 3
    ow.load_file(path, keys=["i"], max_memory=80)
    with pytest.raises(ow.OutOfMemoryError, match=rf"3 tensors take {total} bytes on cpu, 1 over max_memory of {total - 1}.*'a' with 4000"):
        ow.load_file(path, max_memory=total - 1)
    # During a cast, both copies of a tensor are in memory, here of b.
    with pytest.raises(ow.OutOfMemoryError):
        ow.load_file(path, dtype="float32", max_memory=total + 1999)
    loaded = ow.load_file(path, dtype="float32", max_memory=total + 2000)
    assert sum(t.numel() * t.element_size() for t in loaded.values()) == total + 1000
    # A cast to a dtype of the same size also needs two copies.
    with pytest.raises(ow.OutOfMemoryError, match=rf"{total + 2000} bytes"):
        ow.load_file(path, dtype="bfloat16", max_memory=total)
    half = tmp_path / "half.safetensors"
    ow.save_file({"b": torch.randn(500).half()}, half)
    with pytest.raises(ow.OutOfMemoryError, match="1 tensors take 2000 bytes"):
        ow.load_file(half, dtype="bfloat16", max_memory=1999)
    assert ow.load_file(half, dtype="float16", max_memory=1000)["b"].dtype == torch.float16
    for wrong in (0, -1, "much", 1.5, True):
        with pytest.raises(ow.ArgumentError, match="max_memory"):
            ow.load_file(path, max_memory=wrong)  # type: ignore[arg-type]


def test_plan(tmp_path: Path) -> None:
    """A plan lists the same tensors, sizes and files as a load with the same options."""
    tensors = {f"t{i}": torch.full((64, 40 * i), 0.5).bfloat16() for i in range(6)} | {"i": torch.arange(5)}
    sharded(tensors, tmp_path, lambda name: ord(name[-1]) % 2, compress=True)
    for options in ({}, {"dtype": torch.float32}, {"keys": ["t3", "i"]}, {"filter": lambda name: name > "t2"}, {"framework": "np"}):
        plan, loaded = ow.plan(tmp_path, **options), ow.load_file(tmp_path, **options)  # type: ignore[arg-type]
        assert [t.name for t in plan.tensors] == list(loaded)
        for t in plan.tensors:
            assert t.nbytes == loaded[t.name].nbytes
            assert t.shape == tuple(loaded[t.name].shape)
        assert plan.nbytes == sum(t.nbytes for t in plan.tensors) == sum(f.nbytes for f in plan.files)
        assert plan.stored == sum(t.stored for t in plan.tensors) == sum(f.stored for f in plan.files)
        assert len(plan.tensors) == sum(f.tensors for f in plan.files)
        assert plan.peak >= plan.nbytes and plan.staging > plan.pinned == 0
        for f in plan.files:
            assert f.size == Path(f.file).stat().st_size and f.stored < f.size
    assert ow.plan(tmp_path, keys=[]) == ow.LoadPlan((), (), 0, 0, 0)
    with pytest.raises(ow.TensorNotFoundError):
        ow.plan(tmp_path, keys=["x"])


@pytest.mark.parametrize("compress", [False, True])
def test_many_tensors_while_they_arrive(tmp_path: Path, compress: bool) -> None:
    """Tensors get their destinations while later tensors are still arriving, as in a GPU load. The test does this on
    the CPU, with empty tensors and with tensors that already have a destination."""
    from overwire.frameworks.choose import frame_for
    from overwire.model.opened import Model

    want = {f"t{at}": torch.full((at % 5, 3), float(at)) for at in range(3000)}
    path = tmp_path / "many.safetensors"
    ow.save_file(want, path, compress=compress)
    frame = frame_for("pt")
    assert frame.make is not None
    with Model(path, False) as model:
        rows = model.table
        chosen = [at for at in range(len(rows)) if at % 7]
        mine = {3: torch.full((1,), -1.0)}  # stands for a tensor that already has its destination
        load = model.begin(chosen, frame)
        load.places.update(mine)
        with load.job:
            made = load._make_tensors(frame.make, early=True)
    for at, (number, tensor) in enumerate(zip(chosen, made, strict=True)):
        assert torch.equal(tensor, mine[3] if at == 3 else want[rows[number][0]])


def test_many_tensors_one_by_one(tmp_path: Path) -> None:
    """Tensors that are loaded one by one share one mapping, because a process can have only 65,530 mappings."""
    count = 300
    whole = torch.arange(count * 2, dtype=torch.int16).view(count, 2)
    path = tmp_path / "many.safetensors"
    ow.save_file({f"{i:05}": whole[i] for i in range(count)}, path, compress=False)
    with ow.safe_open(path, "bytes") as f:
        kept = [f.get_tensor(name) for name in f.offset_keys()]
        assert Path("/proc/self/maps").read_text().count(str(path)) <= 1  # small tensors that were read ahead are copied
        kept[0][0] = 9
        assert bytes(f.get_tensor("00000")) == b"\0\0\1\0"  # a second read returns a separate copy
    assert b"".join(kept) == b"\t" + whole.numpy().tobytes()[1:]


def test_bytes_and_specs(tmp_path: Path) -> None:
    """Without a framework, tensors are saved from their addresses and loaded as memoryviews."""
    tensors = {"a": torch.randn(40, 3).bfloat16(), "e": torch.empty(0, 4), "s": torch.tensor(7)}
    specs = {
        name: ow.TensorSpec(
            dtype=str(t.dtype).removeprefix("torch."), shape=t.shape, data_ptr=t.data_ptr(),
            data_len=t.numel() * t.element_size(),
        )
        for name, t in tensors.items()
    }
    for compress in (False, True):
        path = tmp_path / f"{compress}.safetensors"
        ow.save_file(specs, path, compress=compress)
        for name, t in ow.load_file(path, framework="pt").items():
            same(t, tensors[name])
        views = ow.load_file(path, framework="bytes")
        assert {name: bytes(v) for name, v in views.items()} == {name: raw(t) for name, t in tensors.items()}
        views["a"][0] ^= 255  # the view belongs to the caller
        again = ow.load_file(path, framework="bytes")["a"]
        assert bytes(again) == raw(tensors["a"])
    with pytest.raises(ow.ArgumentError, match="79 bytes"):
        ow.save_file({"a": ow.TensorSpec(dtype="BF16", shape=[40], data_ptr=specs["a"].data_ptr, data_len=79)}, tmp_path / "x")
    with pytest.raises(ow.ArgumentError):
        ow.save_file({"a": ow.TensorSpec(dtype="BF16", shape=[40], data_ptr=0, data_len=80)}, tmp_path / "x")
    with pytest.raises(ow.NotSupportedError):
        ow.TensorSpec(dtype="complex128", shape=[1], data_ptr=1, data_len=16)
    assert not (tmp_path / "x").exists()


def test_device_names(tmp_path: Path) -> None:
    """Every name of the CPU is accepted. A value that is not a device is refused before a file is opened."""
    ow.save_file({"a": torch.ones(3)}, tmp_path / "m")
    for host in ("cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)):
        assert ow.load_file(tmp_path / "m", host)["a"].device.type == "cpu"
    for wrong in (None, True, 1.5, [], "", ":", "cuda:", "cuda:x", -1, "cuda:99999999999"):
        with pytest.raises(ow.ArgumentError, match="expected .*torch.device"):
            ow.load_file(tmp_path / "none", wrong)  # type: ignore[arg-type]
    for other in ("mps", "meta", torch.device("meta"), "cu\0da", "\udc80"):
        with pytest.raises(ow.NotSupportedError, match="only .*cpu"):
            ow.load_file(tmp_path / "none", other)
    for framework in ("np", "bytes"):
        with pytest.raises(ow.NotSupportedError, match="cuda:0"):
            ow.load_file(tmp_path / "m", "cuda:0", framework=framework)

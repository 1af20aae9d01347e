"""Tests deltas, which are files with the changes between two models and are applied in place.

The tests cover every dtype and layout, tied tensors and chains. A wrong base is refused before a byte changes.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import torch
from overwire.verbs import states

SEED = random.randrange(1 << 32)


def cli(*words: str) -> str:
    return subprocess.run([sys.executable, "-m", "overwire", *words], check=True, capture_output=True, text=True).stdout


def bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.zeros(0)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(bits(a[name]), bits(b[name])) for name in a)


def model(rng: random.Random) -> dict[str, torch.Tensor]:
    """Returns tensors of all kinds, with random bits."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "bf16": (torch.bfloat16, (700, 513)),
        "f32": (torch.float32, (1000,)),
        "f16": (torch.float16, (3, 5, 7)),
        "f64": (torch.float64, (77,)),
        "i8": (torch.int8, (300_001,)),
        "u8": (torch.uint8, (4,)),
        "bool": (torch.bool, (9,)),
        "c64": (torch.complex64, (20,)),
        "fp8": (torch.float8_e4m3fn, (33,)),
        "i64": (torch.int64, ()),
        "empty": (torch.float32, (0, 3)),
    }
    made = {}
    for name, (dtype, shape) in shapes.items():
        count = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
        raw = np.frombuffer(rng.randbytes(count), np.uint8).copy()
        if dtype == torch.bool:
            raw &= 1
        made[name] = torch.from_numpy(raw).view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    return made


def stepped(base: dict[str, torch.Tensor], rng: random.Random, share: float = 0.02) -> dict[str, torch.Tensor]:
    """Returns a copy in which some bits of some elements are changed. "f16" stays as it is."""
    new = {name: tensor.clone() for name, tensor in base.items()}
    for name, tensor in new.items():
        if name != "f16" and tensor.numel():
            raw = tensor.reshape(-1).view(torch.uint8).numpy()
            some = np.array([rng.randrange(raw.size) for _ in range(max(1, int(raw.size * share)))])
            raw[some] ^= 1
    return new


@pytest.fixture
def rng() -> random.Random:
    print("seed", SEED)
    return random.Random(SEED)


def test_a_delta_changes_the_base_into_the_new_model(tmp_path: Path, rng: random.Random) -> None:
    """Applying a delta in place gives the new model, for every dtype. The file is small and deterministic. Unchanged
    tensors take no space in it."""
    base = model(rng)
    new = stepped(base, rng)
    path = tmp_path / "d.safetensors"
    report = ow.save_delta(new, base, path, metadata={"step": "7"})
    assert report.tensors == len(base) and report.changed == len(base) - 2 and report.stored == path.stat().st_size
    assert report.path == str(path) and report.stored < 0.2 * report.bytes
    again = tmp_path / "again.safetensors"
    ow.save_delta(new, base, again, metadata={"step": "7"})
    assert again.read_bytes() == path.read_bytes()
    delta = ow.open_delta(path)
    assert delta.metadata == {"step": "7"} and set(delta.changed) == set(base) - {"f16", "empty"}
    assert delta.dtype("bf16") == "BF16" and delta.shape("bf16") == (700, 513) and delta.stored("f16") == 0
    assert delta.base("f16") == delta.new("f16") and delta.base("f32") != delta.new("f32")
    assert len(delta) == len(base) and "bf16" in delta and sorted(delta) == sorted(base) and "Delta(" in repr(delta)
    places = {name: tensor.data_ptr() for name, tensor in base.items()}
    done = ow.apply_delta(base, delta)
    assert same(base, new) and done.changed == report.changed
    assert places == {name: tensor.data_ptr() for name, tensor in base.items()}


@pytest.mark.parametrize("form", ["path", "bytes", "memoryview", "open"])
def test_apply_accepts_every_form_of_a_delta(tmp_path: Path, rng: random.Random, form: str) -> None:
    base = model(rng)
    new = stepped(base, rng)
    path = tmp_path / "d.safetensors"
    ow.save_delta(new, base, path)
    raw = path.read_bytes()
    delta = {"path": path, "bytes": raw, "memoryview": memoryview(bytearray(raw)), "open": ow.open_delta(raw)}[form]
    ow.apply_delta(base, delta)
    assert same(base, new)


def test_a_wrong_base_is_refused_before_a_byte_changes(tmp_path: Path, rng: random.Random) -> None:
    """A base with other bits, another shape or dtype, or a missing tensor is refused before a byte changes. So is
    applying a delta a second time."""
    base = model(rng)
    new = stepped(base, rng)
    path = tmp_path / "d.safetensors"
    ow.save_delta(new, base, path)

    def refused(error: type[Exception], says: str, **changes: Any) -> None:
        tensors: dict[str, Any] = {name: tensor.clone() for name, tensor in base.items()} | changes
        kept = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        with pytest.raises(error, match=says):
            ow.apply_delta(tensors, path)
        assert same(tensors, kept)

    other = base["f16"].clone()
    other.view(torch.int16)[0, 0, 0] ^= 1
    refused(ow.DeltaBaseError, "f16", f16=other)
    refused(ow.DeltaBaseError, "bf16", bf16=base["bf16"].reshape(513, 700))
    refused(ow.DeltaBaseError, "f32", f32=base["f32"].view(torch.int32))
    refused(ow.ArgumentError, "i8", i8=None)
    part = {name: tensor.clone() for name, tensor in base.items() if name != "i8"}
    ow.apply_delta(part, path, missing=True)
    assert same(part, {name: tensor for name, tensor in new.items() if name != "i8"})
    ow.apply_delta(base, path)
    with pytest.raises(ow.DeltaBaseError, match="already"):
        ow.apply_delta(base, path)
    assert same(base, new)


def test_tied_and_strided_tensors(tmp_path: Path, rng: random.Random) -> None:
    """A tied tensor is stored and changed once. Slices of a fused tensor change in place, and tensors with gaps change
    through a copy. Numpy arrays also work. Tensors that are not in the delta stay unchanged."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    fused = torch.randn(6, 64, generator=generator)
    head = torch.randn(50, 8, generator=generator)
    plain = np.arange(24, dtype=np.float32).reshape(4, 6)

    def named(fused: torch.Tensor, head: torch.Tensor, plain: Any) -> dict[str, Any]:
        return {"q": fused[:2], "k": fused[2:6], "embed": head, "head": head, "turned": head[:, :3].t(), "plain": plain.T}

    new_fused, new_head, new_plain = fused.clone(), head.clone(), plain.copy()
    new_fused[::2, ::5] += 1
    new_head[7:9, 3:] *= 2
    new_plain[1, 2] = -0.0
    path = tmp_path / "d.safetensors"
    new, base = named(new_fused, new_head, new_plain), named(fused, head, plain)
    for tensors in (new, base):
        del tensors["turned"]
    report = ow.save_delta(new, base, path)
    delta = ow.open_delta(path)
    assert report.changed == 5 and {delta.stored("embed") > 0, delta.stored("head") > 0} == {True, False}
    ow.apply_delta(base | {"more": torch.zeros(3)}, delta)
    assert (
        torch.equal(fused, new_fused)
        and torch.equal(head, new_head)
        and (plain.view(np.int32) == new_plain.view(np.int32)).all()
    )
    turned = {"w": head.t()[1:7:2]}
    after = {"w": turned["w"] * 3}
    ow.save_delta(after, turned, path)
    ow.apply_delta(turned, path)
    assert torch.equal(head.t()[1:7:2], after["w"])
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    ow.save_delta({"w": np.ones(3)}, {"w": frozen}, path)
    with pytest.raises(ow.ArgumentError, match="read-only"):
        ow.apply_delta({"w": frozen}, path)
    with pytest.raises(ow.ArgumentError, match="share memory"):
        both = torch.zeros(10)
        ow.save_delta({"a": torch.ones(8), "b": torch.ones(8)}, {"a": both[:8], "b": both[2:]}, path)
        ow.apply_delta({"a": both[:8], "b": both[2:]}, path)


def test_tensors_that_cannot_be_written_back_are_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that cannot be written back from a copy is refused before any tensor changes. Inference-mode tensors,
    views of leaves, scalars and F4 pairs work. Ctrl-C is raised after the last tensor has been written."""
    path, wide = tmp_path / "d", torch.arange(40.0).reshape(8, 5)
    shared = np.lib.stride_tricks.as_strided(np.ones(8, np.float32), (8, 5), (4, 0), writeable=True)
    for odd in (torch.ones(8, 1).expand(8, 5), torch.ones(20).as_strided((8, 5), (2, 1)), shared):
        base = {"a": torch.zeros(100), "b": odd}
        ow.save_delta({name: tensor + 1 for name, tensor in base.items()}, base, path)
        with pytest.raises(ow.ArgumentError, match="'b'.*share memory"):
            ow.apply_delta(base, path)
        assert not base["a"].any() and (odd == 1).all()
    with torch.inference_mode():
        frozen = wide.clone().t()
    leaf = torch.nn.Parameter(wide.clone())
    pairs = torch.arange(32, dtype=torch.uint8).reshape(8, 4).view(torch.float4_e2m1fn_x2)
    base = {"frozen": frozen, "leaf": leaf.t(), "parts": torch.zeros(6, 6)[::2, 1::2], "pairs": pairs.t()}
    base["scalar"] = torch.tensor(2j).conj()
    new = {name: bits(tensor).clone() for name, tensor in base.items() if name == "pairs"}
    new["pairs"] = (new["pairs"] ^ 1).view(4, 8).view(torch.float4_e2m1fn_x2)
    new |= {name: tensor.detach().clone() + 1 for name, tensor in base.items() if name != "pairs"}
    ow.save_delta(new, base, path)
    write, written = states._write_copy, []

    def interrupted(tensor: Any, copy: Any) -> None:
        written.append(tensor)
        if len(written) == len(base) + 2:  # the second copy after the trial writes
            raise KeyboardInterrupt
        write(tensor, copy)

    monkeypatch.setattr(states, "_write_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ow.apply_delta(base, path)
    assert same({name: tensor.resolve_conj() for name, tensor in base.items()}, new)


def test_a_module_is_changed_in_place(tmp_path: Path) -> None:
    """Parameters and buffers change in place, so an optimiser still refers to them."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with torch.no_grad():
        net[0].weight[3] += 1
    path = tmp_path / "d.safetensors"
    assert ow.save_delta(net, before, path).changed == 1
    twin = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    twin.load_state_dict(before)
    weight = twin[0].weight
    ow.apply_delta(twin, path)
    assert weight is twin[0].weight and same(dict(twin.state_dict()), dict(net.state_dict()))


def test_load_file_with_a_base(tmp_path: Path, rng: random.Random) -> None:
    """load_file accepts a path or tensors as the base and does not change the base. Without a base, the error says what
    to do."""
    base = model(rng)
    one = stepped(base, rng)
    two = stepped(one, rng)
    ow.save_file(base, tmp_path / "base.safetensors")
    ow.save_delta(one, tmp_path / "base.safetensors", tmp_path / "1.safetensors")
    ow.save_delta(two, one, tmp_path / "2.safetensors")
    steps = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    assert same(ow.load_file(steps[0], base=tmp_path / "base.safetensors"), one)
    assert same(ow.load_file(steps, base=tmp_path / "base.safetensors"), two)
    kept = {name: tensor.clone() for name, tensor in base.items()}
    assert same(ow.load_file(steps, base=base), two) and same(base, kept)
    some = ow.load_file(steps, base=tmp_path / "base.safetensors", keys=["f32", "i8"])
    assert same(some, {name: two[name] for name in ("f32", "i8")})
    for read in (ow.load_file, ow.verify, ow.inspect):
        with pytest.raises(ow.NotSupportedError, match="delta, not a model"):
            read(steps[0])
    with pytest.raises(ow.FormatError, match="not a delta"):
        ow.apply_delta(base, tmp_path / "base.safetensors")
    with pytest.raises(ow.NotSupportedError, match="dtype"):
        ow.load_file(steps[0], base=base, dtype="bf16")


def test_chains(tmp_path: Path, rng: random.Random) -> None:
    """A chain of deltas is applied in one call, or merged into one delta from its first base to its last model. A gap
    or a wrong order is refused."""
    states = [model(rng)]
    paths = []
    for step in range(4):
        states.append(stepped(states[-1], rng, 0.001 * 10 ** (step % 3)))
        paths.append(tmp_path / f"{step}.safetensors")
        ow.save_delta(states[-1], states[-2], paths[-1])
    live = {name: tensor.clone() for name, tensor in states[0].items()}
    for wrong in ([paths[0], paths[2]], paths[::-1]):
        with pytest.raises(ow.DeltaBaseError):
            ow.apply_delta(live, wrong)
        assert same(live, states[0])
    merged, direct = tmp_path / "m.safetensors", tmp_path / "direct.safetensors"
    ow.merge_deltas(paths, merged)
    ow.save_delta(states[-1], states[0], direct)
    assert merged.read_bytes() == direct.read_bytes()
    ow.apply_delta(live, paths)
    assert same(live, states[-1])


def test_changed_files_are_refused(tmp_path: Path, rng: random.Random) -> None:
    """Other libraries refuse a delta, and their error names overwire. Damage to any byte is detected."""
    base = model(rng)
    path = tmp_path / "d.safetensors"
    ow.save_delta(stepped(base, rng), base, path)
    raw = path.read_bytes()
    from safetensors import SafetensorError, safe_open

    with pytest.raises(SafetensorError, match="overwire .*pip install"):
        safe_open(path, "pt")
    for _ in range(100):
        at = rng.randrange(len(raw))
        damaged = bytearray(raw)
        damaged[at] ^= 1 << rng.randrange(8)
        with pytest.raises((ow.CorruptError, ow.FormatError, ow.NotSupportedError)):
            ow.open_delta(damaged)
    with pytest.raises((ow.CorruptError, ow.FormatError)):
        ow.open_delta(raw[:-5])
    with pytest.raises(ow.ArgumentError):
        ow.open_delta(b"")
    with pytest.raises(ow.NotFoundError):
        ow.open_delta(tmp_path / "nowhere")
    with pytest.raises(ow.ArgumentError, match="lacks"):
        ow.save_delta(base, {"f32": base["f32"]}, path)
    with pytest.raises(ow.ArgumentError, match="f32"):
        ow.save_delta(base, base | {"f32": base["f32"][:9]}, path)
    assert path.read_bytes() == raw, "a refused save must leave the old file"


def test_many_deltas(tmp_path: Path, rng: random.Random) -> None:
    """Applying a hundred consecutive deltas gives exactly the trained model."""
    trained = {"w": torch.zeros(5000, dtype=torch.bfloat16), "b": torch.zeros(40)}
    live = {name: tensor.clone() for name, tensor in trained.items()}
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    path = tmp_path / "d.safetensors"
    for _ in range(100):
        before = {name: tensor.clone() for name, tensor in trained.items()}
        trained["w"][torch.randint(5000, (50,), generator=generator)] += 0.01
        trained["b"] += torch.randn(40, generator=generator)
        ow.save_delta(trained, before, path)
        ow.apply_delta(live, path)
    assert same(live, trained)


def test_diff(tmp_path: Path) -> None:
    """`diff` reports which tensors differ, by how much, and which are in only one model, in Python and on the command
    line."""
    a = {"w": torch.zeros(1000, dtype=torch.bfloat16), "same": torch.ones(3), "a": torch.zeros(1), "other": torch.zeros(2)}
    b = {"w": torch.zeros(1000, dtype=torch.bfloat16), "same": torch.ones(3), "b": torch.zeros(1), "other": torch.zeros(3)}
    b["w"][[1, 5, 900]] = 1
    found = ow.diff(a, b)
    assert [(row.name, row.changed, row.elements) for row in found.rows] == [("same", 0, 3), ("w", 3, 1000)]
    assert (found.only_a, found.only_b, found.other, found.equal) == (("a",), ("b",), ("other",), False)
    assert found.changed[0].share == 0.003 and ow.diff(a, a).equal and "1 of 2" in repr(found)
    ow.save_file(a, tmp_path / "a.safetensors")
    ow.save_file(b, tmp_path / "b.safetensors", compress=False)
    shown = json.loads(cli("diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--json"))
    assert [(row["name"], row["changed"], row["stored"]) for row in shown["tensors"]] == [("w", 3, found.changed[0].stored)]
    assert (shown["equal"], shown["only_a"], shown["only_b"], shown["other"]) == (1, ["a"], ["b"], ["other"])
    text = cli("diff", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"))
    assert "3 of 1,003 elements changed" in text and "only in A: a" in text


def as_folder(path: Path, tensors: dict[str, torch.Tensor], shard: int | str, name: str = "model") -> Path:
    path.mkdir()
    ow.save_file(tensors, path / f"{name}.safetensors", {"format": "pt"}, max_shard_size=shard)
    (path / "config.json").write_text("{}")
    return path


def test_deltas_of_folders(tmp_path: Path, rng: random.Random) -> None:
    """The delta between two sharded folders is itself a sharded folder, with an index and the new model's auxiliary
    files, even if the two folders are sharded differently. Every function accepts the folder and its index."""
    base = model(rng)
    new = stepped(base, rng)
    for tensors in (base, new):  # this tensor is tied to one of another shard
        tensors["tied"] = tensors["bf16"]
    old = as_folder(tmp_path / "a base", base, "100KB")
    now = as_folder(tmp_path / "new", new, 40_000, "weights")
    at = tmp_path / "the delta"
    report = ow.save_delta(now, old, at, max_shard_size="1KB")
    files = sorted(path.name for path in at.iterdir())
    assert "config.json" in files and "delta.safetensors.index.json" in files and len(files) > 4
    assert sorted(Path(name).name for name in report.files) == files and report.path == str(at)
    assert report.files[-1].endswith(".index.json")
    delta = ow.open_delta(at)
    assert report.stored == delta.nbytes == sum(path.stat().st_size for path in at.glob("*.safetensors"))
    weights = json.loads((at / "delta.safetensors.index.json").read_text())["weight_map"]
    assert set(weights) == set(base) == set(delta)
    one = tmp_path / "one.safetensors"
    ow.save_delta(new, base, one)
    for way in (at, f"{at}/", at / "delta.safetensors.index.json", delta, one):
        assert same(ow.load_file(way, base=old), new)
    live = {name: tensor.clone() for name, tensor in base.items()}
    ow.apply_delta(live, at)
    assert same(live, new)
    two = stepped(new, rng)
    next_ = tmp_path / "next"
    ow.save_delta(as_folder(tmp_path / "newer", two, "1GB"), now, next_)
    assert sorted(path.name for path in next_.iterdir()) == ["config.json", "delta.safetensors"]
    assert same(ow.load_file([at, next_], base=old), two)
    merged = tmp_path / "merged"
    report = ow.merge_deltas([at, next_], f"{merged}/", max_shard_size=1000)
    assert {"config.json", "delta.safetensors.index.json"} <= {path.name for path in merged.iterdir()}
    assert same(ow.load_file(merged, base=old), two)
    for read in (ow.load_file, ow.inspect):
        with pytest.raises(ow.NotSupportedError, match="delta, not a model"):
            read(at)
    found = ow.diff(old, now)
    shown = json.loads(cli("diff", str(old), str(now), "--json"))
    assert {row["name"] for row in shown["tensors"]} == {row.name for row in found.changed} == set(delta.changed)
    (next(at.glob("delta-00002-*"))).unlink()
    live = {name: tensor.clone() for name, tensor in base.items()}
    with pytest.raises(ow.NotFoundError, match="delta-00002-of-"):
        ow.apply_delta(live, at)
    with pytest.raises(ow.NotFoundError, match="shards were given"):
        ow.open_delta(next(at.glob("delta-00001-*")))
    assert same(live, base)
    with pytest.raises(ow.ArgumentError, match="other weights"):
        ow.save_delta(now, old, now)  # a delta next to the weights would look like a second model
    with pytest.raises(ow.ArgumentError, match="base lacks 'f32'"):
        ow.save_delta(now, {name: tensor for name, tensor in base.items() if name != "f32"}, tmp_path / "none")
    with pytest.raises(ow.ArgumentError, match="new lacks 'f32'"):
        ow.save_delta({name: tensor for name, tensor in base.items() if name != "f32"}, old, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    ow.save_delta({}, {}, tmp_path / "empty.safetensors", max_shard_size=1)
    assert ow.apply_delta({"w": torch.zeros(2)}, tmp_path / "empty.safetensors").tensors == 0


def test_a_shard_of_another_step_is_refused(tmp_path: Path) -> None:
    """A shard of another step's delta is refused even if its tensors have the same base in both steps."""
    base = {"a": torch.zeros(100_000), "b": torch.zeros(100_000)}
    one = {"a": base["a"] + 1, "b": base["b"]}
    two = {"a": base["a"] + 1, "b": base["b"] + 1}
    for name, new in (("one", one), ("two", two)):
        (tmp_path / name).mkdir()
        ow.save_delta(new | {"c": torch.ones(9)}, base | {"c": torch.zeros(9)}, tmp_path / name, max_shard_size=1)
    shards = {name: sorted((tmp_path / name).glob("*.safetensors")) for name in ("one", "two")}
    shards["one"][0].write_bytes(shards["two"][0].read_bytes())
    live = {name: tensor.clone() for name, tensor in base.items()} | {"c": torch.zeros(9)}
    with pytest.raises(ow.FormatError, match="a different delta|1 of"):
        ow.apply_delta(live, tmp_path / "one")
    assert not any(tensor.any() for tensor in live.values())


def test_one_delta_applied_by_many(tmp_path: Path, rng: random.Random) -> None:
    """Several threads can apply one open delta at the same time, each to its own copy of the base."""
    base = model(rng)
    new = stepped(base, rng)
    (tmp_path / "d").mkdir()
    ow.save_delta(new, base, tmp_path / "d", max_shard_size=500)
    delta = ow.open_delta(tmp_path / "d")
    copies = [{name: tensor.clone() for name, tensor in base.items()} for _ in range(4)]
    with ThreadPoolExecutor(4) as side:
        list(side.map(lambda tensors: ow.apply_delta(tensors, delta), copies))
    assert all(same(tensors, new) for tensors in copies)


def test_files_are_compared_in_batches(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """When models in files are compared, only a few tensors are in memory at a time. The delta and the reports are the
    same as from a single batch, and tensors that are tied across batches are stored once."""
    from overwire.model.opened import Model

    base = model(rng)
    new = stepped(base, rng)
    for tensors in (base, new):
        tensors["z tied"] = tensors["bf16"]
    old = as_folder(tmp_path / "old", base, "300KB")
    now = as_folder(tmp_path / "now", new, "1MB")
    whole, limit = tmp_path / "whole.safetensors", 400_000
    report, rows = ow.save_delta(new, base, whole), ow.diff(base, new)
    loaded: list[int] = []
    load = Model.load

    def counted(self: Model, chosen: list[int] | None, *more: Any) -> Any:
        assert chosen is not None
        sizes = [self.table[at][3] for at in chosen]
        assert sum(sizes) <= limit or len(sizes) == 1
        loaded.append(sum(sizes))
        return load(self, chosen, *more)

    monkeypatch.setattr(Model, "load", counted)
    monkeypatch.setattr(states, "BATCH", limit)
    for one, two in ((now, old), (new, old), (now, base)):
        got = ow.save_delta(one, two, tmp_path / "d.safetensors")
        assert (tmp_path / "d.safetensors").read_bytes() == whole.read_bytes()
        assert (got.tensors, got.changed, got.bytes, got.stored) == (
            report.tensors, report.changed, report.bytes, report.stored,
        )
        assert ow.diff(two, one) == rows and got.seconds["encode"] > 0
    assert len(loaded) > 12
    with pytest.raises(ow.ArgumentError, match="f32"):
        ow.save_delta(now, base | {"f32": base["f32"][:9]}, tmp_path / "d.safetensors")
    assert (tmp_path / "d.safetensors").read_bytes() == whole.read_bytes()


def test_a_delta_does_not_replace_its_base(tmp_path: Path) -> None:
    """A delta is useless without its base, so it never replaces the base's file or shards."""
    base = {name: torch.randn(1000, 100) for name in "ab"}
    new = {name: tensor + 1 for name, tensor in base.items()}
    single, link, shards = tmp_path / "one.safetensors", tmp_path / "link.safetensors", tmp_path / "m"
    shards.mkdir()
    ow.save_file(base, single)
    ow.save_file(base, shards / "model.safetensors", max_shard_size="300KB")
    link.symlink_to(single)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    for source, target, most in (
        (single, single, None),
        (link, single, None),
        (single, link, "200KB"),
        (shards, shards / "model.safetensors", "200KB"),
        (shards / "model.safetensors.index.json", shards / "model.safetensors", "200KB"),
    ):
        with pytest.raises(ow.ArgumentError, match="it is the base"):
            ow.save_delta(new, source, target, max_shard_size=most)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == files
    ow.save_delta(single, base, single)  # the base is in memory


def test_no_function_writes_over_a_file_of_another_format(tmp_path: Path) -> None:
    """save_delta, merge_deltas and `sleep` refuse the names that save_file refuses, so a mistyped path does not replace
    a torch.save or GGUF file."""
    base, delta = {"a": torch.ones(9)}, tmp_path / "d.safetensors"
    ow.save_delta({"a": torch.zeros(9)}, base, delta)
    for ending in ("pt", "bin", "gguf"):
        path = tmp_path / f"m.{ending}"
        path.write_text("weights")
        for write in (
            lambda path: ow.save_file(base, path),
            lambda path: ow.save_delta({"a": torch.zeros(9)}, base, path),
            lambda path: ow.merge_deltas([delta], path),
            lambda path: ow.sleep({"a": torch.ones(9)}, to_file=path),
        ):
            with pytest.raises(ow.ArgumentError, match="ending of another format"):
                write(path)
        assert path.read_text() == "weights"

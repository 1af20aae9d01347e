"""Tests checkpoints with one file per tensor, and the toggles (nyacomp's patches) with the real diffusers and
transformers and small random weights."""

from __future__ import annotations

import functools
import os
import types
from pathlib import Path

import overwire as ow
import pytest
import safetensors.torch
import torch
from conftest import same
from overwire.compat.nyacomp import hf


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return {
        "big.weight": torch.randn(900, 40).half(),
        "small.bias": torch.randn(30),
        "noise": torch.randint(0, 256, (20_000,), dtype=torch.uint8),
        "mask": torch.arange(20_000) % 3 == 0,
        "other/../big.weight": torch.randn(40000).bfloat16(),
    }


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pth", "model.safetensors"])
def test_a_state_dict_in_files(tmp_path: Path, name: str, monkeypatch) -> None:
    """A state dict in any checkpoint format is stored with one file per tensor, and loads from these files without the
    checkpoint."""
    state, path = _state(), tmp_path / name
    if name.endswith(".safetensors"):
        ow.save_file(state, path, compress=False)
    else:
        torch.save(state, path)
    size, stored = hf.compress_state_dict(str(path))
    assert size == sum(t.nbytes for t in state.values()) and stored < 0.9 * size
    names = sorted(p.name for p in (tmp_path / "nya").iterdir())
    assert names == sorted(["big.weight.gz", "mask.gz", "other%2F..%2Fbig.weight.gz", f"boneless_{name}"])
    assert [p.name for p in tmp_path.iterdir() if p.name != name] == ["nya"]
    with open(tmp_path / "nya" / f"boneless_{name}", "rb") as file:
        boneless = torch.load(file, weights_only=False)
    assert boneless["big.weight"].keys() == {"shape", "dtype", "len", "len_compressed", "digest"} and boneless["big.weight"]["len"] == 72000
    assert sorted(key for part in boneless["meta"] for key in part) == ["big.weight", "mask", "other/../big.weight"]
    files, shapes, dtypes = hf.dry_load(path)
    assert dtypes == ["bfloat16", "float16", "bool"] and [900, 40] in shapes and all(Path(file).exists() for file in files)
    path.unlink()
    for threads in ("1", "7"):
        monkeypatch.setenv("NUM_THREADS", threads)
        got = hf.good_load(str(path))
        assert set(got) == set(state)
        for key, tensor in state.items():
            same(got[key], tensor)
    with pytest.raises(ow.NotFoundError, match="compress_state_dict"):
        hf.good_load(tmp_path / "other.bin")


def test_a_checkpoint_with_an_entry_meta_is_refused(tmp_path: Path) -> None:
    """A checkpoint with an entry named 'meta' is refused, because the layout uses that name."""
    for value in (torch.ones(9999), {"epoch": 3}):
        torch.save({"meta": value, "w": torch.ones(9999)}, tmp_path / "x.bin")
        with pytest.raises(ow.NotSupportedError, match="'meta'"):
            hf.compress_state_dict(tmp_path / "x.bin")
    assert os.listdir(tmp_path) == ["x.bin"]


def test_a_malformed_list_of_tensors_is_refused(tmp_path: Path) -> None:
    """A list that torch cannot read, or with rows that are not sizes, raises FormatError with its name. A pipe instead
    of the list does not block."""
    path, boneless = tmp_path / "x.bin", tmp_path / "nya/boneless_x.bin"
    torch.save({"w": torch.arange(40_000) % 3}, path)
    hf.compress_state_dict(path)
    whole, row = boneless.read_bytes(), torch.load(boneless, weights_only=False)["w"]
    wrong = {"shape": None, "dtype": "int64", "len": "1", "len_compressed": -1}
    lists: list[object] = [{"w": row | {field: value}} for field, value in [*wrong.items(), ("shape", torch.Size([7]))]]
    for content in [[1], {1: row}, {"w": {"len_compressed": 1}}, *lists]:
        torch.save(content, boneless)
        with pytest.raises(ow.FormatError, match="boneless_x.bin"):
            hf.good_load(path)
    for text in (b"", b"x", whole[:-30], whole.replace(b"dtype", b"dt\xff\xffe"), b"\x80\x02c" + b"os\nsystem\n."):
        boneless.write_bytes(text)
        with pytest.raises(ow.FormatError, match="boneless_x.bin"):
            hf.dry_load(path)
    boneless.unlink()
    os.mkfifo(boneless)
    with pytest.raises(ow.ArgumentError, match="not a regular file"):
        hf.good_load(path)


def test_two_checkpoints_of_one_folder_never_share_a_tensor(tmp_path: Path) -> None:
    """If another checkpoint in the folder has replaced the file of a key, loading raises CorruptError. Equal tensors
    share a file."""
    state = _state()
    first, second = tmp_path / "pytorch_model.bin", tmp_path / "pytorch_model.fp16.bin"
    torch.save(state, first)
    torch.save(state, second)
    hf.compress_components([first, second])
    for path in (first, second):
        same(hf.good_load(path)["big.weight"], state["big.weight"])
    torch.save({**state, "big.weight": state["big.weight"].roll(1)}, second)
    hf.compress_state_dict(second)
    same(hf.good_load(second)["big.weight"], state["big.weight"].roll(1))
    with pytest.raises(ow.CorruptError, match=r"big\.weight\.gz.*a different tensor"):
        hf.good_load(first)


def test_files_without_digests_are_read(tmp_path: Path) -> None:
    """Files of earlier versions, which have no digests, can be loaded."""
    state, path = _state(), tmp_path / "x.bin"
    torch.save(state, path)
    hf.compress_state_dict(path)
    boneless = tmp_path / "nya/boneless_x.bin"
    old = torch.load(boneless, weights_only=False)
    for row in old.values():
        if isinstance(row, dict):
            del row["digest"]
    torch.save(old, boneless)
    same(hf.good_load(path)["big.weight"], state["big.weight"])


def test_a_toggle_keeps_another_tools_wrapper(tmp_path: Path) -> None:
    """A toggle that is removed while another tool's wrapper is around it has no effect any more, and the wrapper
    stays."""
    path = tmp_path / "x.bin"
    torch.save(_state(), path)
    hf.compress_state_dict(path)
    module = types.SimpleNamespace(load_state_dict=lambda file: "the original's")
    original = module.load_state_dict
    hf.toggle_patch(module)
    inner = module.load_state_dict
    module.load_state_dict = wrapper = functools.wraps(inner)(lambda file: inner(file))
    assert set(module.load_state_dict(path)) == set(_state())
    hf.toggle_patch(module)
    assert module.load_state_dict is wrapper and wrapper(path) == "the original's"
    module.load_state_dict = original
    hf.toggle_patch(module)
    hf.toggle_patch(module)
    assert module.load_state_dict is original


def test_several_components(tmp_path: Path, monkeypatch) -> None:
    """compress_model finds the checkpoints of one repository, or of all, in the Hugging Face caches."""
    monkeypatch.setenv("HOME", str(tmp_path))
    places = [
        tmp_path / ".cache/huggingface" / rest
        for rest in (
            "diffusers/models--a--b/snapshots/1/unet/x.bin",
            "hub/models--a--b/snapshots/1/y.bin",
            "hub/models--c--d/snapshots/1/z.bin",
        )
    ]
    for place in places:
        place.parent.mkdir(parents=True)
        torch.save({place.name: torch.randn(800, 90).half()}, place)
    assert 0.8 < hf.compress_model("a/b") < 0.95
    assert [place for place in places if (place.parent / "nya").exists()] == places[:2]
    assert 0.8 < hf.compress_model() < 0.95
    assert list(hf.good_load(places[2])) == ["z.bin"]
    assert hf.compress_components([places[0].parent / "nya/boneless_x.bin"]) == 1.0


def _older(path: Path) -> None:
    """Gives a checkpoint an older time than its compressed form."""
    os.utime(path, (0, 0))
    os.utime(hf._boneless(path))


def test_a_replaced_checkpoint_with_an_older_time_is_loaded(tmp_path: Path) -> None:
    """A checkpoint that replaced another and has an older time (cp -p) is loaded, not the compressed form."""
    path, other = tmp_path / "x.pth", tmp_path / "other"
    torch.save(_state(), path)
    hf.compress_state_dict(path)
    assert hf._fresh(path)
    before = hf._boneless(path).stat().st_ctime_ns
    torch.save(_state(), other)
    other.replace(path)
    os.utime(path, (0, 0))
    while path.stat().st_ctime_ns == before:  # within one tick of the kernel's clock, files get the same time
        os.utime(path, (0, 0))
    assert not hf._fresh(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pth", "model.safetensors"])
def test_a_toggle_loads_every_kind_of_checkpoint(tmp_path: Path, name: str) -> None:
    """`toggle_patch` makes a module's `load_state_dict` load what compress_state_dict has written for .bin, .pth and
    safetensors files. Other files are loaded as before. A second call removes the patch."""
    state, path = _state(), tmp_path / name
    save = safetensors.torch.save_file if name.endswith(".safetensors") else torch.save
    save(state, path)
    hf.compress_state_dict(path)
    save({key: torch.zeros_like(value) for key, value in state.items()}, path)
    _older(path)
    other = tmp_path / "other.bin"
    torch.save({"x": torch.ones(3)}, other)
    module = types.ModuleType("modeling_utils")

    def load_state_dict(file, map_location="cpu"):
        return ow.load_file(file) if str(file).endswith(".safetensors") else torch.load(file, map_location=map_location)

    module.load_state_dict = load_state_dict
    module.safe_open = safetensors.safe_open
    hf.toggle_patch(module)
    for asked in (path, str(path)):
        got = module.load_state_dict(asked, map_location="cpu")
        assert set(got) == set(state)
        for key, tensor in state.items():
            same(got[key], tensor)
    shapes = module.load_state_dict(path, map_location="meta")
    assert {key: (value.shape, value.dtype, value.device.type) for key, value in shapes.items()} == {
        key: (value.shape, value.dtype, "meta") for key, value in state.items()
    }
    if name.endswith(".safetensors"):
        with module.safe_open(path, framework="pt", device="cpu") as ours, safetensors.safe_open(path, framework="pt") as theirs:
            assert set(ours.keys()) == set(theirs.keys()) and ours.metadata() == {"format": "pt"}
            for key in theirs.keys():  # noqa: SIM118
                a, b = ours.get_slice(key), theirs.get_slice(key)
                assert a.get_dtype() == b.get_dtype() and a.get_shape() == b.get_shape()
                same(a[3:20], state[key][3:20])
                same(ours.get_tensor(key), state[key])
            with pytest.raises(ow.TensorNotFoundError):
                ours.get_tensor("none")
    assert module.load_state_dict(other)["x"].tolist() == [1, 1, 1]
    hf.toggle_patch(module)
    assert module.load_state_dict is load_state_dict and module.safe_open is safetensors.safe_open
    assert not any(value.any() for value in module.load_state_dict(path).values())


@pytest.mark.slow
@pytest.mark.parametrize("safe", [False, True], ids=["bin", "safetensors"])
def test_toggles(tmp_path: Path, safe: bool) -> None:
    """With a toggle, from_pretrained loads the compressed weights unless the checkpoint is newer. A second call removes
    the toggle."""
    import diffusers
    import transformers

    torch.manual_seed(5)
    config = transformers.CLIPTextConfig(
        hidden_size=64, intermediate_size=70, num_attention_heads=4, num_hidden_layers=1, vocab_size=200,
        max_position_embeddings=16,
    )
    models = [
        (transformers.CLIPTextModel, transformers.CLIPTextModel(config), "pytorch_model.bin", hf.toggle_transformers),
        (
            diffusers.UNet2DModel,
            diffusers.UNet2DModel(
                sample_size=8,
                block_out_channels=(32,),
                layers_per_block=1,
                down_block_types=("DownBlock2D",),
                up_block_types=("UpBlock2D",),
            ),
            "diffusion_pytorch_model.bin",
            hf.toggle_diffusers,
        ),
    ]
    for kind, model, file, toggle in models:
        folder = tmp_path / kind.__name__
        model.save_pretrained(folder, safe_serialization=safe)
        if safe:
            file = file.replace("pytorch_model.bin", "model.safetensors" if "diffusion" not in file else "pytorch_model.safetensors")
        hf.compress_state_dict(folder / file, 1000)
        # The checkpoint has only zeros now, so only the toggle can find the weights.
        held = ow.load_file(folder / file) if safe else torch.load(folder / file)
        zeros = {key: torch.zeros_like(value) for key, value in held.items()}
        ow.save_file(zeros, folder / file, {"format": "pt"}, compress=False) if safe else torch.save(zeros, folder / file)
        _older(folder / file)

        def load(kind=kind, folder=folder):
            return kind.from_pretrained(folder, use_safetensors=safe).state_dict()

        toggle()
        try:
            got = load()
            for key, tensor in model.state_dict().items():
                same(got[key], tensor)
            os.utime(folder / file)  # the checkpoint is newer now, so it is used
            assert not any(value.any() for key, value in load().items() if key in zeros)
            _older(folder / file)
        finally:
            toggle()
        assert not any(value.any() for key, value in load().items() if key in zeros)

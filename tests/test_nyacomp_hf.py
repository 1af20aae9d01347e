"""Checkpoints with a file for each tensor, and what the toggles do to diffusers
and transformers: the real libraries, with tiny random weights."""

from __future__ import annotations

import os
from pathlib import Path

import overwire as ow
import pytest
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
    boneless = torch.load(tmp_path / "nya" / f"boneless_{name}", weights_only=False)
    assert boneless["big.weight"].keys() == {"shape", "dtype", "len", "len_compressed"} and boneless["big.weight"]["len"] == 72000
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


def test_several_components(tmp_path: Path, monkeypatch) -> None:
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


@pytest.mark.slow
def test_toggles(tmp_path: Path) -> None:
    import diffusers
    import transformers

    torch.manual_seed(5)
    config = transformers.CLIPTextConfig(
        hidden_size=64, intermediate_size=70, num_attention_heads=4, num_hidden_layers=1, vocab_size=200, max_position_embeddings=16
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
        model.save_pretrained(folder, safe_serialization=False)
        hf.compress_state_dict(folder / file, 1000)
        # Only the toggle's way can find the weights: the checkpoint is all zeros now.
        zeros = {key: torch.zeros_like(value) for key, value in torch.load(folder / file).items()}
        torch.save(zeros, folder / file)
        os.utime(folder / file, (0, 0))

        def load(kind=kind, folder=folder):
            return kind.from_pretrained(folder, use_safetensors=False).state_dict()

        toggle()
        try:
            got = load()
            for key, tensor in model.state_dict().items():
                same(got[key], tensor)
            os.utime(folder / file)  # a checkpoint that is newer counts
            assert not any(value.any() for key, value in load().items() if key in zeros)
            os.utime(folder / file, (0, 0))
        finally:
            toggle()
        assert not any(value.any() for key, value in load().items() if key in zeros)

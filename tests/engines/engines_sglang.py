"""Tests SGLang's real loader and plug-in machinery with overwire's plug-in.

    python tests/engines/engines_sglang.py      needs SGLang's Python tree on PYTHONPATH (`make engines`)

It runs on the CPU without compiled kernels. Entry points, hooks, LoadConfig, get_model_loader, DefaultModelLoader and
the updater are the released ones. No whole model is built. It is a script because importing SGLang takes long.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import engines_vllm as tiny
import torch

ROOT = Path(__file__).resolve().parents[2]


def refused(words: str, call: Any) -> None:
    try:
        call()
    except ValueError as error:
        assert words in str(error), error
        return
    raise SystemExit(f"{words}: nothing was raised")


class Fused(torch.nn.Module):
    """A model that has rows of q, k and v in one parameter, and half of the output's columns in another."""

    reads = False

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(128, tiny.HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.out = torch.nn.Parameter(torch.zeros(tiny.HIDDEN, 32, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            if name.startswith("model.layers.0.self_attn."):
                part = name.split(".")[-2][0]
                if part == "o":
                    self.out.data.copy_(tensor[:, 32:] * 1 if self.reads else tensor[:, 32:])
                else:
                    low = {"q": 0, "k": 64, "v": 96}[part]
                    self.qkv.data.narrow(0, low, tensor.shape[0]).copy_(tensor)


class Computes(Fused):
    """Like Fused, but its loader computes with the data."""

    reads = True


def planned(loader: Any, folder: str, tensors: dict[str, torch.Tensor]) -> None:
    """Loads a model with SGLang's loader by slices or, if the loader needs data, tensor by tensor."""
    at = "model.layers.0.self_attn."
    fused = torch.cat([tensors[f"{at}{part}_proj.weight"] for part in "qkv"])
    config = types.SimpleNamespace(model_path=folder, revision=None, hf_config=types.SimpleNamespace())
    slices = tiny.planned()
    for kind in (Fused, Fused, Computes):
        slices.clear()
        model = kind()
        loader.load_weights_and_postprocess(model, loader._get_all_weights(config, model), torch.device("cpu"))
        assert torch.equal(model.qkv, fused) and torch.equal(model.out, tensors[f"{at}o_proj.weight"][:, 32:]), kind
        assert slices == ([] if kind.reads else [4]), slices
    print("  loads by slices and by tensors are equal")


def updated(base: Path, tensors: dict[str, torch.Tensor]) -> None:
    """SGLang's updater loads all weights, some weights, a folder that fails, and, for the rollback, the earlier
    weights. Its loader has not loaded a model before."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    at = "model.layers.0.self_attn."
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    places = {}
    for name, content in {"first": tensors, "second": changed, "damaged": changed}.items():
        places[name] = tiny.folder(base / "updates" / name, tiny.LLAMA, content, True)
    file = next(places["damaged"].glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    model = Fused()
    config = types.SimpleNamespace(
        model_path="", revision=None, hf_config=types.SimpleNamespace(), dtype=torch.bfloat16, quantization=None
    )
    fields: dict[str, Any] = {}
    updater = types.SimpleNamespace(
        device="cpu", gpu_id=0, model_config=config, get_model=lambda: model,
        _assert_weight_cache_inactive=lambda _: None,
        update_model_fields=lambda _, **named: fields.update(named),
    )  # fmt: skip

    def update(name: str, wanted: Any = None) -> tuple[bool, str]:
        return WeightUpdater.update_weights_from_disk(updater, str(places[name]), "overwire", wanted)

    def check(content: dict[str, torch.Tensor], out: dict[str, torch.Tensor]) -> None:
        fused = torch.cat([content[f"{at}{part}_proj.weight"] for part in "qkv"])
        assert torch.equal(model.qkv, fused) and torch.equal(model.out, out[f"{at}o_proj.weight"][:, 32:])

    assert update("first")[0] and fields["model_path"] == str(places["first"])
    check(tensors, tensors)
    assert update("second", lambda name: "o_proj" not in name)[0]
    check(changed, tensors)
    assert update("second")[0]
    check(changed, changed)
    try:
        did, words = update("damaged")
        assert not did, words
    except Exception as error:  # SGLang's rollback fails, because it reads the same files
        words = str(error)
    assert file.name in words and "chunk" in words, words
    assert update("first")[0]
    check(tensors, tensors)
    print("  SGLang's updater: all weights, some weights, after a failure")


def read_hosted(folder: str) -> dict[str, torch.Tensor]:
    """Loads a model with the option `host`."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

    loader = get_model_loader(LoadConfig(load_format="overwire", model_loader_extra_config={"host": True}))
    return dict(loader._get_weights_iterator(DefaultModelLoader.Source(folder, None)))


def main(base: Path) -> None:
    sys.path.insert(0, str(tiny.plug_in(base)))
    tensors = tiny.weights(tiny.LLAMA)
    folders = [tiny.folder(base / kind, tiny.LLAMA, tensors, kind == "compressed") for kind in ("plain", "compressed")]

    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES
    from sglang.srt.configs.load_config import LoadConfig, LoadFormat
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    assert LOAD_FORMAT_CHOICES.count("overwire") == 1
    assert LoadConfig(load_format="safetensors").load_format is LoadFormat.SAFETENSORS
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(folders[0]), device="cpu", load_format="overwire"))
    for folder in folders:
        loader = get_model_loader(LoadConfig(load_format="overwire", model_loader_extra_config={"max_memory": "64KiB"}))
        assert isinstance(loader, DefaultModelLoader) and type(loader).__module__.startswith("overwire."), type(loader)
        found = dict(loader._get_weights_iterator(DefaultModelLoader.Source(str(folder), None)))
        assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in found)
        print(f"  {folder.name}: {len(found)} tensors equal the saved ones")
        planned(loader, str(folder), tensors)
    updated(base, tensors)
    with tiny.host_store(os.environ):
        tiny.check_host_store(lambda: tiny.differences(read_hosted(str(folders[1])), tensors))
    refused("unknown key 'speed'", lambda: get_model_loader(LoadConfig(load_format="overwire", model_loader_extra_config={"speed": 1})))
    refused("'nonsense' is not a valid LoadFormat", lambda: LoadConfig(load_format="nonsense"))
    print("SGLang reads through overwire")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
        sys.exit()
    with tempfile.TemporaryDirectory(prefix="overwire-sglang-") as made:  # the host store has its socket in this folder
        sys.exit(subprocess.call([sys.executable, __file__, made], env={**os.environ, "XDG_RUNTIME_DIR": made}))

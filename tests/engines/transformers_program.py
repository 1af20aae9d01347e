"""Loads models with this interpreter's transformers, unpatched and under `patch_safetensors`, and compares every
parameter byte for byte. `test_transformers.py` runs this program with each release. The argument is an empty folder.
The last line of output is "ok" and the release."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
warnings.filterwarnings("ignore")

import overwire as ow  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

FIVE = int(transformers.__version__.split(".")[0]) >= 5
SMALL = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
auto = transformers.AutoModelForCausalLM.from_pretrained


def same(want: torch.nn.Module, got: torch.nn.Module, what: Any) -> None:
    """Asserts that every parameter and buffer has the same dtype, device and bytes."""
    a, b = want.state_dict(), got.state_dict()
    assert a.keys() == b.keys(), (what, a.keys() ^ b.keys())
    for name, left in a.items():
        right = b[name]
        assert (left.dtype, left.device, left.shape) == (right.dtype, right.device, right.shape), (what, name)
        if left.device.type != "meta":
            bits = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
            assert torch.equal(*bits), (what, name)


@contextlib.contextmanager
def passes() -> Iterator[list[tuple[str, int]]]:
    """Records each pass of the engine: the dtype of its cast, or "", and the number of tensors."""
    seen: list[tuple[str, int]] = []
    stream = ow.stream

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs["dtype"] or "", len(kwargs["keys"])))
        return stream(*args, **kwargs)

    ow.stream = counted  # type: ignore[assignment]
    try:
        yield seen
    finally:
        ow.stream = stream


def save(model: Any, folder: Path, size: str = "60KB") -> None:
    """Saves the model, plain and compressed, in many shards."""
    model.save_pretrained(folder / "plain", max_shard_size=size)
    with ow.patch_safetensors(compress=True):
        model.save_pretrained(folder / "packed", max_shard_size=size)
    for kind in ("plain", "packed"):
        for file in (folder / kind).glob("*.safetensors"):
            assert ow.inspect(file)["sources"][0]["format"] == ("overwire" if kind == "packed" else "safetensors")


FORMS = (("plain", None), ("packed", "cpu"), ("plain", "cpu"), ("packed", None))


def compare(
    folder: Path, maps: list[Any], dtypes: tuple[Any, ...] = ("auto", torch.float32), pairs: bool = False, **more: Any
) -> None:
    """Compares each way to load with the unpatched load. pairs: tests every pair of values of map, dtype and form, but
    not every combination of all three."""
    for number, where in enumerate(maps):
        for at, dtype in enumerate(dtypes):
            want = auto(folder / "plain", device_map=where, dtype=dtype, **more)
            for kind, device in FORMS[(number + at) % 2 :: 2] if pairs else FORMS:
                with ow.patch_safetensors(device=device), passes() as seen:
                    got = auto(folder / kind, device_map=where, dtype=dtype, **more)
                same(want, got, (folder.name, kind, device, where, dtype))
                # One pass reads all tensors with the same device and cast. With transformers 4, this is one pass per
                # shard.
                engine = kind == "packed" or device is not None
                assert bool(seen) == engine, (folder.name, kind, device, where, seen)
                if FIVE:
                    assert len(seen) == len({cast for cast, _ in seen}), seen


def dense(folder: Path) -> None:
    config = transformers.LlamaConfig(**SMALL)
    save(transformers.LlamaForCausalLM(config).bfloat16(), folder)
    parts = {
        "model.embed_tokens": "cpu",
        "model.layers": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": torch.device("cpu"),
    }
    compare(folder, [None, "cpu", "auto", {"": "cpu"}, parts], pairs=True)
    if FIVE:  # transformers 4 asks safetensors for a meta device, which safetensors does not support
        with ow.patch_safetensors():
            meta = auto(folder / "packed", device_map={"": "meta"}, dtype="auto")
        assert all(p.device.type == "meta" for p in meta.parameters())
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # transformers 5 without worker threads
    compare(folder, ["cpu"], ("auto",))
    del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
    os.environ["HF_ENABLE_PARALLEL_LOADING"] = "1"  # transformers 4 with worker threads
    compare(folder, ["cpu"], ("auto",))
    del os.environ["HF_ENABLE_PARALLEL_LOADING"]


def tied(folder: Path) -> None:
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    save(transformers.LlamaForCausalLM(config).half(), folder, "5GB")
    compare(folder, ["cpu"])
    with ow.patch_safetensors():
        model = auto(folder / "packed", dtype="auto")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def experts(folder: Path) -> None:
    """Tests a model in which each expert has its own tensors. transformers 5 stacks and joins them."""
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4)
    save(transformers.MixtralForCausalLM(config).bfloat16(), folder)
    stored = json.loads((folder / "plain" / "model.safetensors.index.json").read_text())["weight_map"]
    assert any("experts.3.w2" in name for name in stored), list(stored)[:9]
    compare(folder, ["cpu"])


def quantised(folder: Path) -> None:
    """Tests fp8 weights with a scale for each block."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).bfloat16()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("proj.weight"):
            tensors[name] = tensor.to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = torch.rand(tensor.shape[0] // 32, tensor.shape[1] // 32) + 0.5
        else:
            tensors[name] = tensor
    for kind in ("plain", "packed"):
        model.config.save_pretrained(folder / kind)
        config = json.loads((folder / kind / "config.json").read_text())
        config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "torch_dtype": "bfloat16"}
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
        (folder / kind / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, folder / "plain" / "model.safetensors", {"format": "pt"})
    ow.save_file(tensors, folder / "packed" / "model.safetensors", {"format": "pt"})
    import transformers.quantizers.quantizer_finegrained_fp8 as fp8

    if FIVE:
        compare(folder, ["cpu"], ("auto",))  # a CPU has no fp8 kernels, so the weights are dequantised
    fp8.is_torch_xpu_available = lambda *a, **k: True  # type: ignore[assignment]
    compare(folder, ["cpu"], ("auto",))
    with ow.patch_safetensors():
        weight = auto(folder / "packed", device_map="cpu", dtype="auto").model.layers[1].mlp.up_proj
    assert weight.weight.dtype == torch.float8_e4m3fn and weight.weight_scale_inv.shape == (3, 2)


def odd(folder: Path) -> None:
    """Compares files in which a name occurs twice, a tensor is unknown to the model, and a tensor is missing."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).bfloat16()
    save(model, folder)
    for kind, write in (("plain", safetensors.torch.save_file), ("packed", ow.save_file)):
        index = json.loads((folder / kind / "model.safetensors.index.json").read_text())
        first, last = (folder / kind / name for name in (min(index["weight_map"].values()), max(index["weight_map"].values())))
        with ow.safe_open(first, "pt") as file:
            tensors = file.get_tensors()
        gone = next(name for name in tensors if "layers" in name)
        index["weight_map"].pop(gone)
        del tensors[gone]
        with ow.safe_open(last, "pt") as file:
            twin = file.keys()[0]
            tensors[twin] = torch.ones_like(file.get_tensor(twin))
        tensors["model.no_one.weight"] = torch.ones(5)
        index["weight_map"]["model.no_one.weight"] = first.name
        write(tensors, first, {"format": "pt"})
        (folder / kind / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = []
    for kind, patch in (("plain", contextlib.nullcontext), ("packed", ow.patch_safetensors)):
        with patch():
            torch.manual_seed(3)  # for the random values of missing tensors
            got, info = auto(folder / kind, device_map="cpu", dtype="auto", output_loading_info=True)
        loaded.append((got, {key: sorted(map(str, info[key])) for key in ("missing_keys", "unexpected_keys")}))
    assert loaded[0][1] == loaded[1][1] and loaded[0][1]["missing_keys"] and loaded[0][1]["unexpected_keys"]
    same(loaded[0][0], loaded[1][0], "odd")


def offloaded(folder: Path) -> None:
    """Tensors that are offloaded to disk can be read after the patch has ended."""
    save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).bfloat16().eval(), folder)
    where = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    tokens, logits = torch.arange(9)[None], []
    for kind, patch in (("plain", contextlib.nullcontext), ("packed", ow.patch_safetensors), ("plain", ow.patch_safetensors)):
        with patch(), passes() as seen:
            model = auto(folder / kind, device_map=where, dtype="auto", offload_folder=folder / "off")
        assert not seen, seen  # the tensors are read one by one
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


def ready(folder: Path) -> None:
    """The engine starts to prepare a GPU as soon as transformers has chosen it."""
    import overwire.compat.safetensors._lazy as lazy

    if not FIVE:
        return
    reported: list[str] = []
    prepare, lazy.prepare_gpu = lazy.prepare_gpu, reported.append
    try:
        with ow.patch_safetensors():
            for where in ("cuda:1", "cpu", "auto", None, 2, {"a": "cpu", "b": torch.device("cuda:3"), "c": "disk"}):
                transformers.modeling_utils.check_and_set_device_map(where)
    finally:
        lazy.prepare_gpu = prepare
    assert reported == ["cuda:1", "cuda:2", "cuda:3"], reported


def damaged(folder: Path) -> None:
    """An error names the damaged tensor, and the patch is undone."""
    save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).bfloat16(), folder)
    path = max((folder / "packed").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 1
    path.write_bytes(data)
    before = safetensors.safe_open
    try:
        with ow.patch_safetensors():
            auto(folder / "packed", device_map="cpu", dtype="auto")
        raise AssertionError("a damaged file was loaded")
    except safetensors.SafetensorError as error:
        assert path.name in str(error) and isinstance(error.__cause__, ow.CorruptError) and error.__cause__.tensor, (
            error
        )
    assert safetensors.safe_open is before is transformers.modeling_utils.safe_open


def adapters(folder: Path) -> None:
    """Tests adapters that peft itself loads, and adapters that transformers' integration loads."""
    try:
        import peft
    except ImportError:
        return
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).bfloat16()
    save(base, folder)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder / "adapter")
    with ow.patch_safetensors(compress=True):
        adapted.save_pretrained(folder / "adapter-packed")
    models = []
    for kind, adapter, patch in (("plain", "adapter", contextlib.nullcontext), ("packed", "adapter-packed", ow.patch_safetensors)):
        with patch():
            alone = peft.PeftModel.from_pretrained(auto(folder / kind, dtype="auto"), folder / adapter)
            inside = auto(folder / kind, dtype="auto", device_map="cpu")
            inside.load_adapter(str(folder / adapter))
        models.append((alone, inside))
    for want, got in zip(*models, strict=True):
        same(want, got, "adapter")


CASES = (dense, tied, experts, quantised, odd, offloaded, ready, damaged, adapters)

if __name__ == "__main__":
    torch.manual_seed(11)
    for case in CASES:
        folder = Path(sys.argv[1]) / case.__name__
        (folder / "plain").mkdir(parents=True)
        (folder / "packed").mkdir()
        case(folder)
    print("ok", transformers.__version__)

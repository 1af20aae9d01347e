"""Loads models in the formats of quantisers with the transformers that this interpreter finds,
unpatched and under `patch_safetensors`, from plain and from compressed files, and quantises
while loading; compares every part of every tensor byte for byte. `test_quantised.py` runs it
with each release. The argument is an empty folder, those after it are names of cases. Prints a
line for each case: equal, or why it does not run here. Ends with "ok" and the release."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
warnings.filterwarnings("ignore")

import overwire as ow  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

SMALL = {"vocab_size": 192, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
auto = transformers.AutoModelForCausalLM.from_pretrained


class Missing(Exception):
    """A case that this machine cannot run, and why."""


def parts(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """The plain tensors that a tensor is made of, and what else it holds."""
    if hasattr(type(tensor), "__tensor_flatten__") or hasattr(tensor, "tensor_data_names"):
        inner, rest = tensor.__tensor_flatten__()
        yield f"{name}: {type(tensor).__name__}", repr(rest)
        for part in inner:
            yield from parts(f"{name}.{part}", getattr(tensor, part))
        return
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        for part, held in state.as_dict(packed=True).items():
            yield f"{name}.quant_state.{part}", held
    for part in ("CB", "SCB"):
        if getattr(tensor, part, None) is not None:
            yield f"{name}.{part}", getattr(tensor, part)
    yield name, tensor


def state(model: Any) -> dict[str, Any]:
    """Every parameter and buffer in its parts, those that are not saved included."""
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found |= {f"state {name}": value for name, value in model.state_dict().items()}
    return {part: held for name, value in found.items() for part, held in parts(name, value)}


def same(want: Any, got: Any, what: Any) -> int:
    """How many parts; all are of the same kind, dtype, device and bytes."""
    a, b = state(want), state(got)
    assert a.keys() == b.keys(), (what, sorted(a.keys() ^ b.keys())[:9])
    for name, left in a.items():
        right = b[name]
        assert type(left) is type(right), (what, name, type(left), type(right))
        if not isinstance(left, torch.Tensor):
            assert left == right, (what, name, left, right)
            continue
        about = [(t.dtype, t.device, t.shape, t.stride()) for t in (left, right)]
        assert about[0] == about[1], (what, name, about)
        bits = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left, right))
        assert torch.equal(*bits), (what, name)
    return len(a)


def compare(folder: Path, **more: Any) -> int:
    """The model in `plain` as it loads unpatched, and patched from plain and compressed files."""
    more = {"device_map": "cpu", "dtype": "auto"} | more
    if not (folder / "packed").exists():
        ow.convert(folder / "plain", folder / "packed")
    want = auto(folder / "plain", **more)
    count = 0
    for kind, device in (("plain", None), ("plain", "cpu"), ("packed", None)):
        with ow.patch_safetensors(device=device):
            got = auto(folder / kind, **more)
        count = same(want, got, (folder.name, kind, device))
    return count


def llama(folder: Path, **more: Any) -> Any:
    """A small Llama in bf16, saved in many shards in `source/plain`."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **more)).bfloat16()
    model.save_pretrained(folder / "source" / "plain", max_shard_size="100KB")
    return model


def while_loading(folder: Path, config: Any) -> int:
    """Quantised while it loads; and saved by the library, loaded as that."""
    llama(folder)
    count = compare(folder / "source", quantization_config=config)
    model = auto(folder / "source" / "plain", device_map="cpu", dtype="auto", quantization_config=config)
    try:
        model.save_pretrained(folder / "plain")
    except ValueError as error:
        if "not serializable" not in str(error):
            raise
        print(folder.name, "is not saved by this release: compared while loading only", file=sys.stderr)
        return count
    return count + compare(folder)


def written(folder: Path, config: Any, quantisation: dict[str, Any], tensors: dict[str, Any]) -> None:
    """A checkpoint as another program writes it."""
    config.architectures = [tensors.pop("")]
    config.dtype = "bfloat16"
    config.save_pretrained(folder / "plain")
    path = folder / "plain" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantisation}))
    safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "plain" / "model.safetensors", {"format": "pt"})


def need(package: str) -> None:
    """Missing if a package is not installed."""
    try:
        version(package)
    except Exception as error:
        raise Missing(f"no package {package}") from error


def bnb_nf4(folder: Path) -> int:
    need("bitsandbytes")
    quant = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    return while_loading(folder, transformers.BitsAndBytesConfig(**quant, bnb_4bit_use_double_quant=True))


def bnb_int8(folder: Path) -> int:
    need("bitsandbytes")
    return while_loading(folder, transformers.BitsAndBytesConfig(load_in_8bit=True))


def torchao_int8(folder: Path) -> int:
    need("torchao")
    from torchao.quantization import Int8WeightOnlyConfig

    return while_loading(folder, transformers.TorchAoConfig(Int8WeightOnlyConfig()))


def quanto_int8(folder: Path) -> int:
    need("optimum-quanto")
    llama(folder)
    return compare(folder / "source", quantization_config=transformers.QuantoConfig(weights="int8"))


def compressed_fp8(folder: Path) -> int:
    """compressed-tensors, float-quantized: fp8 with a scale for each row."""
    need("compressed-tensors")
    model, tensors = llama(folder), {"": "LlamaForCausalLM"}
    for name, tensor in model.state_dict().items():
        if name.endswith("proj.weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 448
            tensors |= {name: (tensor / scale).to(torch.float8_e4m3fn), name + "_scale": scale}
        else:
            tensors[name] = tensor
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    written(folder, model.config, _compressed("float-quantized", weights), tensors)
    return compare(folder)


def compressed_int4(folder: Path) -> int:
    """compressed-tensors, pack-quantized: eight int4 in an I32, a scale for each 32 columns."""
    need("compressed-tensors")
    model, tensors = llama(folder), {"": "LlamaForCausalLM"}
    for name, tensor in model.state_dict().items():
        if name.endswith("proj.weight"):
            rows, columns = tensor.shape
            tensors |= {
                name + "_packed": torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32),
                name + "_scale": (torch.rand(rows, columns // 32) * 0.01).bfloat16(),
                name + "_shape": torch.tensor([rows, columns]),
            }
        else:
            tensors[name] = tensor
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
    written(folder, model.config, _compressed("pack-quantized", weights), tensors)
    return compare(folder)


def _compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    quant = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    return {**quant, "config_groups": {"group_0": group}, "ignore": ["lm_head"], "global_compression_ratio": None, "kv_cache_scheme": None}


def mxfp4(folder: Path) -> int:
    """gpt-oss: blocks of 32 fp4 and their exponents, which a CPU gets as bf16."""
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = transformers.GptOssConfig(**SMALL | {"intermediate_size": 64}, **more)
    model, tensors = transformers.GptOssForCausalLM(config).bfloat16(), {"": "GptOssForCausalLM"}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inside, outside = tensor.shape
            tensors |= {
                name + "_blocks": torch.randint(0, 256, (experts, outside, inside // 32, 16), dtype=torch.uint8),
                name + "_scales": torch.randint(110, 130, (experts, outside, inside // 32), dtype=torch.uint8),
            }
        else:
            tensors[name] = tensor
    written(folder, config, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"], "dequantize": True}, tensors)
    return compare(folder)


CASES = (bnb_nf4, bnb_int8, torchao_int8, quanto_int8, compressed_fp8, compressed_int4, mxfp4)

if __name__ == "__main__":
    for case in CASES:
        if sys.argv[2:] and case.__name__ not in sys.argv[2:]:
            continue
        torch.manual_seed(11)
        folder = Path(sys.argv[1]) / case.__name__
        (folder / "source" / "plain").mkdir(parents=True)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                count = case(folder)
            print(case.__name__, "equal:", count, "parts", flush=True)
        except Missing as why:
            print(case.__name__, "skipped:", why, flush=True)
    print("ok", transformers.__version__)

"""Loads models in quantisers' formats with this interpreter's transformers, unpatched and under `patch_safetensors`,
from plain and compressed files, and quantises while loading. Compares every part of every tensor byte for byte.
`test_quantised.py` runs this program with each release. The first argument is an empty folder, the others are names of
cases. Prints for each case that it matches, or why it cannot run. The last line is "ok" and the release."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling layers takes minutes
warnings.filterwarnings("ignore")

import overwire as ow  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

SMALL = {"vocab_size": 192, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUP = 128  # this many columns share a scale
auto = transformers.AutoModelForCausalLM.from_pretrained


class Missing(Exception):
    """A case that cannot run here, with the reason."""


def parts(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yields the plain tensors that a tensor consists of, and its other contents."""
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
    """Returns the parts of all parameters and buffers, including those that are not saved."""
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    found |= {f"state {name}": value for name, value in model.state_dict().items()}
    return {part: held for name, value in found.items() for part, held in parts(name, value)}


def same(want: Any, got: Any, what: Any) -> int:
    """Asserts that all parts have equal types, dtypes, devices, shapes and bytes, and returns their number."""
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


def compare(folder: Path, nibbles: int = 0, answers: bool = False, **more: Any) -> int:
    """Compares the unpatched load of `plain` with patched loads of plain and compressed files, and asserts that no load
    changes a file. nibbles: how many tensors must at least be compressed as packed 4-bit numbers. answers: whether to
    compare the models' outputs as well."""
    more = {"device_map": "cpu", "dtype": "auto"} | more
    if not (folder / "packed").exists():
        ow.convert(folder / "plain", folder / "packed")
    found = ow.inspect(folder / "packed")["sources"]
    coded = sum(tensor["coding"] == "X16/nibbles" for source in found for tensor in source["tensors"])
    assert coded >= nibbles, (folder.name, coded)
    before = _files(folder)
    want = auto(folder / "plain", **more)
    count = 0
    for kind, device in (("plain", None), ("plain", "cpu"), ("packed", None)):
        with ow.patch_safetensors(device=device):
            got = auto(folder / kind, **more)
        count = same(want, got, (folder.name, kind, device))
        if answers:
            tokens = torch.arange(24).view(2, 12)
            with torch.no_grad():
                left, right = want(tokens).logits, got(tokens).logits
            assert left.isfinite().all(), folder.name
            torch.testing.assert_close(left, right)
            same(want, got, (folder.name, kind, device, "after computing"))
    assert _files(folder) == before, folder.name
    return count


def _files(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*/*.safetensors"))}


def llama() -> Any:
    """Builds a small Llama in bf16."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).bfloat16()


def while_loading(folder: Path, config: Any, saved: bool = True) -> int:
    """Quantises a model while it is loaded from many shards, and compares loads of the saved result."""
    llama().save_pretrained(folder / "source" / "plain", max_shard_size="400KB")
    count = compare(folder / "source", quantization_config=config)
    if not saved:
        return count
    model = auto(folder / "source" / "plain", device_map="cpu", dtype="auto", quantization_config=config)
    try:
        model.save_pretrained(folder / "plain")
    except ValueError as error:
        if "not serializable" not in str(error):
            raise
        print(folder.name, "is not saved by this release: compared while loading only", file=sys.stderr)
        return count
    return count + compare(folder)


def replaced(
    model: Any, parts: Callable[[torch.Tensor], dict[str, torch.Tensor]], end: Any = "proj.weight"
) -> dict[str, torch.Tensor]:
    """Returns the tensors of a model, in which those with matching names are replaced by the parts that a quantiser
    stores."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        found = (
            {name.removesuffix("weight") + part: held for part, held in parts(tensor).items()}
            if name.endswith(end)
            else {name: tensor}
        )
        tensors |= {part: held.contiguous() for part, held in found.items()}
    return tensors


def written(folder: Path, model: Any, quantisation: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Writes a checkpoint of two files, as a quantiser would."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "bfloat16"
    model.config.save_pretrained(folder / "plain")
    path = folder / "plain" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantisation}))
    files = {name: f"model-0000{at % 2 + 1}-of-00002.safetensors" for at, name in enumerate(tensors)}
    for file in set(files.values()):
        held = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        safetensors.torch.save_file(held, folder / "plain" / file, {"format": "pt"})
    (folder / "plain" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def need(*packages: str) -> None:
    """Raises Missing if a package is not installed."""
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError as error:
            raise Missing(f"no package {package}") from error


def five(method: str) -> None:
    """Raises Missing if this release does not support a quantiser."""
    if method not in transformers.quantizers.auto.AUTO_QUANTIZER_MAPPING:
        raise Missing(f"transformers {transformers.__version__} does not have it")


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
    return while_loading(folder, transformers.QuantoConfig(weights="int8"), saved=False)


def hqq_int4(folder: Path) -> int:
    need("hqq")
    if transformers.__version__ >= "5":
        raise Missing("transformers 5 raises NotImplementedError for it")
    return while_loading(folder, transformers.HqqConfig(nbits=4, group_size=64))


def compressed_fp8(folder: Path) -> int:
    """Tests compressed-tensors, float-quantized: fp8 with a scale for each row."""
    need("compressed-tensors")
    model = llama()

    def parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 448
        return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}

    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    written(folder, model, _compressed("float-quantized", weights), replaced(model, parts))
    return compare(folder)


def packed(values: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """Packs eight numbers below 16 along the last dimension into each I32. The first number of `order` gets the low
    bits."""
    eights = values.long().unflatten(-1, (-1, 8))[..., list(order)]
    return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns numbers below 16, and a scale and a zero point for each GROUP columns, all with shape (rows, ...)."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    values = (groups / scale[..., None]).round() + zero[..., None]
    return values.clamp(0, 15).flatten(-2), scale, zero


def gptq(folder: Path) -> int:
    """Tests 4-bit GPTQ with columns in the order of activations (g_idx): qweight and qzeros packed in I32, and
    scales."""
    need("gptqmodel", "optimum")
    model = llama()

    def parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        order = torch.randperm(weight.shape[1])
        back = order.argsort()
        values, scale, zero = rounded(weight[:, order])
        return {
            "qweight": packed(values[:, back]).T,
            "qzeros": packed((zero.T - 1) % 16),
            "scales": scale.T.half(),
            "g_idx": (torch.arange(weight.shape[1]) // GROUP)[back].int(),
        }

    quant = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False, "checkpoint_format": "gptq"}
    written(folder, model, quant | {"backend": "torch"}, replaced(model, parts))  # the CPU's backend compiles for minutes
    return compare(folder, nibbles=6) + compare(folder, dtype=torch.float16, answers=True)


def awq(folder: Path) -> int:
    """Tests AWQ's 4-bit GEMM format: qweight and qzeros packed in I32, every second number first, and scales."""
    five = transformers.__version__ >= "5"
    if five:
        need("gptqmodel")
    else:
        _autoawq()
    model = llama()

    def parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scale, zero = rounded(weight)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        return {"qweight": packed(values.T, order), "qzeros": packed(zero.T, order), "scales": scale.T.half()}

    quant = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    backend = {"backend": "torch_awq"} if five else {}
    written(folder, model, {**quant, **backend, "modules_to_not_convert": ["lm_head"]}, replaced(model, parts))
    return compare(folder, nibbles=6) + compare(folder, dtype=torch.float16, answers=five)


def _autoawq() -> None:
    """Makes AutoAWQ importable, which transformers 4.57 needs to load AWQ. AutoAWQ does not support this release, and
    its CPU layers need Intel's kernels. Only what loading does not use is replaced: the layers and transformers' code
    are the real ones, but the model cannot compute."""
    need("autoawq")
    transformers.activations.PytorchGELUTanh = transformers.activations.GELUTanh  # the former name of the class
    kernels = "intel_extension_for_pytorch"
    for name in ("datasets", kernels, f"{kernels}.llm", f"{kernels}.llm.quantization"):
        sys.modules[name] = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, None))
    sys.modules["datasets"].load_dataset = None  # type: ignore[attr-defined]
    linear = type("IPEXWeightOnlyQuantizedLinear", (), {"from_weight": None})
    sys.modules[f"{kernels}.llm.quantization"].IPEXWeightOnlyQuantizedLinear = linear  # type: ignore[attr-defined]


def compressed_int4(folder: Path) -> int:
    """Tests compressed-tensors, pack-quantized: eight int4 in an I32, and a scale for each GROUP columns."""
    need("compressed-tensors")
    model = llama()

    def parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scale, _ = rounded(weight)
        return {"weight_packed": packed(values), "weight_scale": scale.bfloat16(), "weight_shape": torch.tensor(weight.shape)}

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False}
    written(folder, model, _compressed("pack-quantized", weights), replaced(model, parts))
    return compare(folder, nibbles=6)


def _compressed(format: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    quant = {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed"}
    return {**quant, "config_groups": {"group_0": group}, "ignore": ["lm_head"], "global_compression_ratio": None, "kv_cache_scheme": None}


def mxfp4(folder: Path) -> int:
    """Tests gpt-oss: blocks of 32 fp4 and their exponents. A CPU converts them to bf16."""
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 32}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SMALL | {"intermediate_size": 64}, **more)).bfloat16()

    def parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        experts, inside, outside = weight.shape
        return {
            "_blocks": torch.randint(0, 256, (experts, outside, inside // 32, 16), dtype=torch.uint8),
            "_scales": torch.randint(110, 130, (experts, outside, inside // 32), dtype=torch.uint8),
        }

    quant = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"], "dequantize": True}
    written(folder, model, quant, replaced(model, parts, ("experts.gate_up_proj", "experts.down_proj")))
    return compare(folder)


def bitnet(folder: Path) -> int:
    """Tests BitNet: four 2-bit numbers in a U8, and a scale for each matrix."""
    model = llama()

    def parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        quarters = (weight.sign() + 1).byte().unflatten(0, (4, -1))
        return {"weight": (quarters << torch.tensor([0, 2, 4, 6]).view(4, 1, 1)).sum(0).byte(), "weight_scale": torch.rand(1).bfloat16()}

    written(folder, model, {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}, replaced(model, parts))
    return compare(folder)


def metal(folder: Path) -> int:
    """Tests MLX's affine quantisation: eight 4-bit numbers in a U32. A CPU converts them to bf16."""
    five("metal")
    model = llama()

    def parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        values, scale, zero = rounded(weight)
        return {"weight": packed(values).view(torch.uint32), "scales": scale.bfloat16(), "qbiases": (-zero * scale).bfloat16()}

    quant = {"quant_method": "metal", "bits": 4, "group_size": GROUP, "modules_to_not_convert": ["lm_head"]}
    written(folder, model, quant, replaced(model, parts))
    return compare(folder, nibbles=6)


def gemma(folder: Path) -> int:
    """Tests Gemma's format: two 4-bit numbers in a U8, with F32 scales for rows and activations."""
    five("gemma")
    model = llama()

    def parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.float().abs().amax(1, keepdim=True) / 7
        values = ((weight / scale).round() + 8).clamp(0, 15).byte()
        activations = {f"{which}_activation_scale": torch.rand(()) for which in ("input", "output")}
        return {"weight": values[:, ::2] | values[:, 1::2] << 4, "weight_scale": scale, **activations}

    quant = {"quant_method": "gemma", "num_bits": 4, "modules_to_not_convert": ["lm_head"]}
    written(folder, model, quant, replaced(model, parts))
    return compare(folder)


CASES = (
    gptq, awq, bnb_nf4, bnb_int8, torchao_int8, quanto_int8, hqq_int4, compressed_fp8, compressed_int4, mxfp4, bitnet,
    metal, gemma,
)

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

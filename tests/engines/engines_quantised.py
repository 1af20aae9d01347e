"""Compares quantised models that are loaded by slices with vLLM's own loads, for each quantisation method, on the CPU.

    PYTHONPATH=python:build/engines33/vllm-0.33.0:build/engines python tests/engines/engines_quantised.py [CASE ...]

vLLM makes each model as for a GPU. Its parameters, with fused ones split, give a checkpoint of random values, which
vLLM itself and overwire load in one process and in two ranks. Every parameter, buffer and plain attribute is compared
before vLLM processes the weights and, if this needs no compiled kernel, afterwards. With the option `offload`, the
values are compared after all layers have been streamed and restored.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines_vllm as base
import torch

SMALL = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
Where = tuple[int, int, int]  # the number of ranks, this rank, and the port to connect to
MODELS = {"dense": {**base.LLAMA, **SMALL}, "experts": {**base.MIXTRAL, **SMALL}}
BOTH, CT = ("dense", "experts"), "compressed-tensors"
GROUP = 32  # this many columns share a scale

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int"}
GROUPED, CHANNEL, TENSOR = {"strategy": "group", "group_size": GROUP}, {"strategy": "channel"}, {"strategy": "tensor"}
TOKEN = {"strategy": "token", "dynamic": True}
BLOCKS = {"strategy": "block", "block_structure": [16, 32]}
SIXTEEN = {"strategy": "tensor_group", "group_size": 16}


def numbers(bits: int, kind: str, more: dict[str, Any]) -> dict[str, Any]:
    """Describes the number format of weights or inputs as compressed-tensors does."""
    return {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": False, "observer": "minmax", **more}


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the configuration of a compressed-tensors checkpoint."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    more = {"ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


def modelopt(algorithm: str, group: int | None = None) -> dict[str, Any]:
    """Returns the configuration of an NVIDIA ModelOpt checkpoint."""
    more = {} if group is None else {"group_size": group}
    config = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"], **more}
    return {"quant_method": "modelopt", "quantization": config}


def quark(weights: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of an AMD Quark checkpoint."""
    every = {"weight": {**weights, "is_dynamic": False}, "input_tensors": inputs, "output_tensors": None, "bias": None}
    none: dict[str, Any] = {"layer_quant_config": {}, "layer_type_quant_config": {}}
    more = {"export": {"kv_cache_group": [], "pack_method": "reorder"}, "exclude": ["lm_head"]}
    return {"quant_method": "quark", "global_quant_config": every, **none, **more}


E4M3 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
INT8 = {"dtype": "int8", "qscheme": "per_channel", "symmetric": True}
FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
INT4, INT4_128 = numbers(4, "int", GROUPED), numbers(4, "int", {**GROUPED, "group_size": 128})
FP8, NVFP4 = numbers(8, "float", CHANNEL), numbers(4, "float", SIXTEEN)
FP8_INPUT, INT8_INPUT = numbers(8, "float", TOKEN), numbers(8, "int", TOKEN)
BLOCK_INPUT = numbers(8, "float", {**GROUPED, "dynamic": True})
OWN_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FBGEMM = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"], "activation_scale_ub": 1200.0}

# For each case: vLLM's name of the method, the configuration, and its models.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "GPTQ": ("auto_gptq", GPTQ, BOTH),
    "GPTQ, 8 bits": ("auto_gptq", {**GPTQ, "bits": 8}, BOTH),
    "AWQ": ("awq", AWQ, BOTH),
    "AutoRound": ("inc", {**ROUND, "packing_format": "auto_round:auto_gptq"}, ("dense",)),
    "W4A16": (CT, compressed("pack-quantized", INT4), BOTH),
    "W4A16, zero points": (CT, compressed("pack-quantized", {**INT4, "symmetric": False}), ("dense",)),
    "W8A16": (CT, compressed("pack-quantized", numbers(8, "int", CHANNEL)), BOTH),
    "W4A8, int8": (CT, compressed("pack-quantized", INT4, INT8_INPUT), ("dense",)),
    "W4A8, fp8": (CT, compressed("pack-quantized", INT4_128, FP8_INPUT), ("dense",)),
    "W8A8, int8": (CT, compressed("int-quantized", numbers(8, "int", CHANNEL), INT8_INPUT), BOTH),
    "W8A8, int8, static": (
        CT, compressed("int-quantized", numbers(8, "int", TENSOR), numbers(8, "int", TENSOR)), ("dense",)),
    "W8A8, fp8": (CT, compressed("float-quantized", FP8, FP8_INPUT), BOTH),
    "W8A8, fp8, static": (
        CT, compressed("float-quantized", numbers(8, "float", TENSOR), numbers(8, "float", TENSOR)),
        BOTH),
    "W8A8, fp8, blocks": (
        CT, compressed("float-quantized", numbers(8, "float", BLOCKS), BLOCK_INPUT), BOTH),
    "W8A16, fp8": (CT, compressed("float-quantized", FP8), ("dense",)),
    "NVFP4": (
        CT, compressed("nvfp4-pack-quantized", NVFP4, {**NVFP4, "dynamic": "local"}), BOTH),
    "NVFP4A16": (CT, compressed("nvfp4-pack-quantized", NVFP4), BOTH),
    "fp8": ("fp8", OWN_FP8, BOTH),
    "fp8, static": ("fp8", {**OWN_FP8, "activation_scheme": "static"}, BOTH),
    "fp8, blocks": ("fp8", {**OWN_FP8, "weight_block_size": [16, 32]}, BOTH),
    "FBGEMM fp8": ("fbgemm_fp8", FBGEMM, ("dense",)),
    "ModelOpt fp8": ("modelopt", modelopt("FP8"), BOTH),
    "ModelOpt NVFP4": ("modelopt_fp4", modelopt("NVFP4", 16), BOTH),
    "ModelOpt MXFP8": ("modelopt_mxfp8", modelopt("MXFP8", 32), BOTH),
    "MXFP8": ("mxfp8", {**OWN_FP8, "quant_method": "mxfp8", "weight_block_size": [1, 32]}, BOTH),
    "Quark fp8": ("quark", quark(E4M3, E4M3), BOTH),
    "Quark int8": ("quark", quark(INT8, {**INT8, "is_dynamic": True}), BOTH),
    "Quark MXFP4": ("quark", quark(FP4, {**FP4, "is_dynamic": True}), BOTH),
    "int8 from bf16": ("int8_per_channel_weight_only", {}, ("dense",)),
}  # fmt: skip

# Modules of vLLM's expert kernels that can be imported here. Modules in plain torch are always imported.
KINDS = ("marlin_moe", "triton_moe")

# Methods for which vLLM has no experts on CPUs.
INTEGERS = ("GPTQ", "AWQ", "AutoRound", "W4A", "W8A16", "W8A8, int8", "Quark int8")

# Methods that accept weights which vLLM has already processed. Prepared state needs this.
_EITHER = ("fp8", "fp8, static", "fp8, blocks", "ModelOpt NVFP4")
PREPARED = frozenset(f"{kind}, {case}" for case in _EITHER for kind in BOTH) | {
    f"dense, {case}" for case in ("ModelOpt MXFP8", "MXFP8", "int8 from bf16")
}

# Cases for two ranks. They include each way to divide a parameter.
DIVIDED = ("GPTQ", "AWQ", "W4A16", "W8A8, int8", "NVFP4", "fp8", "fp8, blocks", "ModelOpt MXFP8", "Quark MXFP4")


def choose_as_on_a_gpu() -> None:
    """Makes vLLM choose the kernels of an H100 on the CPU. The kernels never run."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe import experts
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
    from vllm.platforms import PlatformEnum, current_platform
    from vllm.platforms.interface import DeviceCapability

    for name in [name for name in dir(_custom_ops) if name.startswith("cutlass_") and "support" in name]:
        setattr(_custom_ops, name, lambda *_: True)
    type(current_platform).get_device_capability = classmethod(lambda *_, **__: DeviceCapability(9, 0))
    for name in dir(linear):
        table = getattr(linear, name)
        if not name.startswith("_POSSIBLE_") or not isinstance(table, dict):
            continue
        for kernel in table[PlatformEnum.CUDA]:
            for test in {"is_supported", "can_implement"}.intersection(dir(kernel)):
                setattr(kernel, test, classmethod(lambda *_: (True, None)))
        # Kernels that process weights in Python come first.
        every = sorted(table[PlatformEnum.CUDA], key=lambda kernel: "Emulation" not in kernel.__name__)
        table[PlatformEnum.CPU] = every
    for found in pkgutil.iter_modules(experts.__path__):
        if found.name in KINDS or found.name.endswith("_emulation_moe"):
            importlib.import_module(f"{experts.__name__}.{found.name}")
    kinds = [FusedMoEExperts]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if kind.__module__.endswith((*KINDS, "_emulation_moe")):
            kind._supports_current_device = staticmethod(lambda: True)


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Makes vLLM treat this machine as a machine with NVIDIA GPUs."""
    from vllm.platforms import current_platform

    kind = type(current_platform)
    kind.is_cpu, kind.is_cuda = lambda self: False, lambda self: True
    try:
        yield
    finally:
        del kind.is_cpu, kind.is_cuda


class Starts:
    """Makes models as for a GPU. Keeps the state of each model before its weights are processed, and the error if
    processing fails."""

    def __init__(self) -> None:
        from vllm.model_executor.model_loader import base_loader

        self.before: dict[str, Any] = {}
        self.failed = ""
        self.integers = False
        self._make, self._process = base_loader.initialize_model, base_loader.process_weights_after_loading
        base_loader.initialize_model, base_loader.process_weights_after_loading = self.make_model, self._process_model

    def make_model(self, *more: Any, **named: Any) -> Any:
        with as_on_a_gpu() if self.integers else contextlib.nullcontext():
            return self._make(*more, **named)

    def _process_model(self, model: Any, *more: Any) -> None:
        self.before, self.failed = everything(model), ""
        try:
            self._process(model, *more)
        except Exception as error:  # where the kernel is missing, processing fails in both loads
            self.failed = f"{type(error).__name__}: {error}".splitlines()[0]


def everything(model: Any) -> dict[str, Any]:
    """Returns parameters and buffers, and the plain attributes of parameters and modules."""
    out = base.state(model)
    holders = [*model.named_modules(), *model.named_parameters()]
    for path, holder in holders:
        for name, value in vars(holder).items():
            if name in ("_overwire_model", "training"):  # models share the modules for positions
                continue
            if isinstance(value, (bool, int, float, str, torch.dtype, torch.Size)):
                out[f"{path}: {name}"] = torch.tensor(list(repr(value).encode()))
    return out


def values(name: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns random values for a parameter in a checkpoint."""
    if dtype in (torch.int32, torch.int64, torch.uint8, torch.int8):
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, dtype=torch.int64).to(dtype)
    if "input" in name:  # the same for all parts of a fused projection
        return torch.full(shape, 0.02).to(dtype)
    return (torch.rand(shape) * 0.02 + 0.01 if "scale" in name else torch.randn(shape) * 0.02).to(dtype)


def checkpoint_of(model: Any, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors that a file of this model would have."""
    torch.manual_seed(7)
    out: dict[str, torch.Tensor] = {}
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for path, module in model.named_modules():
        leaf = path.rpartition(".")[2]
        for own, param in module.named_parameters(recurse=False):
            shape = list(param.shape)
            if own.startswith(("w13_", "w2_")):
                _add_experts(out, path.removesuffix(".routed_experts"), own, param)
            elif leaf not in parts:
                out[f"{path}.{own}"] = values(own, shape, param.dtype)
            else:
                for name, size in zip(parts[leaf], module.output_sizes, strict=True):
                    part = list(shape)
                    dim = getattr(param, "output_dim", None)
                    if dim is not None:
                        part[dim] = part[dim] * size // sum(module.output_sizes)
                    elif shape == [len(parts[leaf])] and own != "weight_shape":  # one scale for each part
                        part = [1]
                    out[f"{path.removesuffix(leaf)}{name}.{own}"] = values(own, part, param.dtype)
    for name in [name for name in out if name.endswith(".qweight") and config.get("quant_method") == "gptq"]:
        columns = out[name].shape[0] * 32 // config["bits"]
        out[name.replace("qweight", "g_idx")] = (torch.arange(columns) // GROUP).int()
    return {name: tensor for name, tensor in out.items() if not name.endswith("input_scale_ub")}


def _add_experts(out: dict[str, torch.Tensor], path: str, own: str, param: Any) -> None:
    fused, _, suffix = own.partition("_")
    shape = list(param.shape[1:])
    if fused == "w13" and len(shape) == 2:
        shape[1 if getattr(param, "is_transposed", False) else 0] //= 2
    elif fused == "w13" and len(shape) == 1 and suffix != "weight_shape":
        shape = [] if shape == [2] else [shape[0] // 2] if shape[0] == 2 * SMALL["intermediate_size"] else shape
    for expert in range(param.shape[0]):
        for part in ("w1", "w3") if fused == "w13" else ("w2",):
            out[f"{path}.{expert}.{part}.{suffix}"] = values(own, shape, param.dtype)


def config_of(path: Path, where: Where, load_format: str, extra: dict[str, Any], method: str | None) -> Any:
    """Returns vLLM's configuration of a start."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(path),
        load_format=load_format,
        model_loader_extra_config=extra,
        tensor_parallel_size=where[0],
        distributed_executor_backend="mp" if where[0] > 1 else None,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        use_tqdm_on_load=False,
        quantization=method,
        allow_deprecated_quantization=True,
    ).create_engine_config()


@contextlib.contextmanager
def current(config: Any, where: Where) -> Iterator[None]:
    """Sets vLLM's configuration and groups for a model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import destroy_model_parallel

    world, rank, port = where
    with set_current_vllm_config(config):
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        destroy_model_parallel()
        initialize_model_parallel(world)
        yield


def write_checkpoint(path: Path, config: dict[str, Any], where: Where, starts: Starts) -> None:
    """Writes a folder with a checkpoint of a model."""
    from vllm.utils.torch_utils import set_default_torch_dtype

    empty = base.folder(path / "empty", config, {}, False)
    vllm_config = config_of(empty, where, "overwire", {}, None)
    with current(vllm_config, where), set_default_torch_dtype(torch.bfloat16):
        model = starts.make_model(vllm_config=vllm_config, model_config=vllm_config.model_config)
    base.folder(path / "plain", config, checkpoint_of(model, config.get("quantization_config", {})), False)


class Log:
    """Collects messages of overwire's loader."""

    def __init__(self) -> None:
        from overwire.integrations.vllm import loader

        self.lines: list[str] = []
        loader.log = self

    def info(self, words: str, *more: Any) -> None:
        self.lines.append(words % more)

    warning = warning_once = info


def compare(root: Path, case: str, kind: str, where: Where, starts: Starts, log: Log) -> None:
    """Loads a model with vLLM itself and with overwire, which uses its defaults, `plan` and `offload`."""
    from overwire.integrations.vllm.methods import COPIED
    from vllm.model_executor.model_loader import get_model

    method, quantised, _ = CASES[case]
    starts.integers = case.startswith(INTEGERS)
    config = {**MODELS[kind], "quantization_config": quantised} if quantised else MODELS[kind]
    path = root / f"{kind} {case}"
    if not path.exists():
        write_checkpoint(path, config, where, starts)
    ways: list[tuple[str, dict[str, Any]]] = [("safetensors", {}), ("overwire", {})]
    if method not in COPIED:
        ways.append(("overwire", {"plan": True}))
    loads, how = [], []
    for load_format, extra in ways:
        log.lines.clear()
        vllm_config = config_of(path / "plain", where, load_format, extra, None if quantised else method)
        with current(vllm_config, where):
            model = get_model(vllm_config=vllm_config)
        loads.append((starts.before, everything(model), starts.failed))
        how.append(next((line for line in log.lines if " slices" in line), "tensor by tensor"))
    named = vllm_config.model_config.quantization
    wrong = [base.differences(one[stage], loads[0][stage]) for one in loads[1:] for stage in (0, 1)]
    if any(wrong) or named != method or any(one[2] != loads[0][2] for one in loads):
        raise SystemExit(f"{kind}, {case} ({named}): not as vLLM's own: {wrong}, {[one[2] for one in loads]}")
    if (method in COPIED) != ("while it ran" in how[1]):
        raise SystemExit(f"{kind}, {case} ({method}): {how[1]}")
    if takes_processed(model) != (f"{kind}, {case}" in PREPARED):
        raise SystemExit(f"{kind}, {case}: prepared state allowed: {takes_processed(model)}")
    vllm_config = config_of(path / "plain", where, "overwire", {"offload": True}, None if quantised else method)
    with current(vllm_config, where):
        model = get_model(vllm_config=vllm_config)
    offloaded = model.__dict__["_overwire_offloaded"]
    count = len(offloaded.blocks)
    offloaded.close()
    if not count or starts.failed != loads[0][2] or (wrong := base.differences(everything(model), loads[0][1])):
        raise SystemExit(f"{kind}, {case}: {count} layers are not streamed as they are: {wrong}, {starts.failed}")
    processed = f"not processed here ({loads[0][2]})" if loads[0][2] else "processed"
    print(f"  {kind}, {case} ({method}): {len(loads[0][0])} values equal vLLM's own load, {processed}; {how[-1]}", flush=True)


def takes_processed(model: torch.nn.Module) -> bool:
    """Returns whether the quantisation methods of a model allow prepared state."""
    from overwire.integrations.kept_model.keep_files import Refused
    from overwire.integrations.vllm.prepared import _check_supported

    try:
        _check_supported(model)
    except Refused:
        return False
    return True


def rank_main(root: Path, world: int, rank: int, port: int, names: list[str]) -> None:
    choose_as_on_a_gpu()
    starts, log = Starts(), Log()
    for case in names:
        for kind in CASES[case][2]:
            compare(root, case, kind, (world, rank, port), starts, log)


def main() -> None:
    if base.run_as_rank(rank_main):
        return
    names = sys.argv[1:] or [*CASES]
    with base.plugged_folder("overwire-quantised-") as (root, env):
        env |= {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        for world, cases in ((1, names), (2, [name for name in names if name in DIVIDED])):
            base.run_ranks(__file__, root, world, cases, env)
        print("quantised models equal vLLM's own loads")


if __name__ == "__main__":
    main()

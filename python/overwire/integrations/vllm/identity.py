"""Computes fingerprints of the inputs that determine a processed vLLM model and are known before it is built."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import torch
import vllm
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ..._compat_api import start_thread
from ..kept_model.check_origins import digest_of_file_times
from ..kept_model.identify_files import identify_files
from ..kept_model.keep_files import Refused, fingerprint

#: The modules that move weights for every model.
CODE = (
    "vllm.model_executor.parameter",
    "vllm.model_executor.utils",
    "vllm.model_executor.models.utils",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.model_loader.utils",
    "vllm.model_executor.model_loader.weight_utils",
    "vllm.distributed.utils",
    "vllm.distributed.parallel_state",
)

#: Prefixes of modules. Of objects of their classes, only the class is compared, because the contents do not affect
#: weights.
OPAQUE = ("vllm.config.", "vllm.distributed.", "vllm.transformers_utils.", "vllm.compilation.", "vllm.v1.core.")

# Prefixes of vLLM's environment variables that may differ between starts and do not affect weights.
_PASSING = (
    "VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_HOST_IP", "VLLM_LOGGING", "VLLM_LOG", "VLLM_PORT", "VLLM_RPC",
    "VLLM_ENGINE", "VLLM_DP_",
)  # fmt: skip

# Packages that provide kernels and layouts for vLLM.
_KERNELS = (
    "flashinfer-python", "flashinfer-cubin", "deep-gemm", "triton", "amd-aiter", "nvidia-cutlass-dsl",
    "compressed-tensors", "transformers",
)  # fmt: skip

_PARALLEL = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "data_parallel_rank",
    "prefill_context_parallel_size", "decode_context_parallel_size", "enable_expert_parallel",
    "expert_placement_strategy", "enable_ep_weight_filter", "all2all_backend",
)  # fmt: skip

_MODEL = (
    "dtype", "quantization", "quantization_config", "is_moe", "multimodal_config", "architectures", "runner_type",
    "convert_type",
)  # fmt: skip
_CACHE = ("cache_dtype", "kv_cache_dtype_skip_layers", "calculate_kv_scales")

# The number of characters at the start of a fingerprint that identify the model's path, device type and rank.
_PLACE = 8

# The largest JSON file that counts as a configuration file of the model, in bytes.
_SETTINGS = 1 << 20


def fingerprint_prefix(config: Any, model_config: Any, prefix: str, device: torch.device) -> str:
    """Returns the first part of a fingerprint. It depends only on the model's path, the device type and the rank."""
    facts = _facts_of_place(config, model_config, prefix)
    return fingerprint(str(model_config.model), device.type, facts)[:_PLACE]


def _facts_of_place(config: Any, model_config: Any, prefix: str) -> list[Any]:
    speculative = getattr(config, "speculative_config", None)
    is_draft = speculative is not None and model_config is getattr(speculative, "draft_model_config", None)
    return [prefix, is_draft, list(_ranks_of_groups())]


def fingerprint_of_load(config: Any, model_config: Any, prefix: str, loader: Any, device: torch.device) -> str:
    """Returns the fingerprint of a rank's processed model. Raises Refused if this configuration's models cannot be
    stored, and the errors of opening the model's files."""
    parallel = config.parallel_config
    if getattr(parallel, "enable_eplb", False):
        raise Refused("experts are moved while the engine runs (EPLB)")
    experts = getattr(parallel_state, "_EP", None)
    if parallel.enable_expert_parallel and experts and experts.world_size > 1 and vllm.__version__.startswith("0.32."):
        raise Refused("vLLM 0.32 cannot build a model on the meta device if its experts are divided among ranks")
    if torch.version.hip or device.type not in ("cpu", "cuda"):
        raise Refused(f"vLLM uses {device.type}{' with ROCm' if torch.version.hip else ''}")
    if getattr(getattr(config, "engram_config", None), "cpu_offload", False) or is_offloading(config):
        raise Refused("weights are offloaded")
    import overwire

    with ThreadPoolExecutor(1) as worker:  # inspects vLLM's code while the headers of the weights are read
        code = start_thread(worker.submit, digest_of_file_times, "vllm")
        weights = list(facts_of_files(model_config, loader))
    whole = fingerprint(
        [1, vllm.__version__, torch.__version__, overwire.__version__, code.result()],
        [(name, _version_of(name)) for name in _KERNELS],
        _machine_facts(device),
        {name: value for name, value in model_config.hf_config.to_dict().items() if name != "_name_or_path"},
        [str(getattr(model_config, name, None)) for name in _MODEL],
        _facts_of_place(config, model_config, prefix),
        [str(getattr(parallel, name, None)) for name in _PARALLEL],
        [str(getattr(config.cache_config, name, None)) for name in _CACHE],
        str(getattr(config, "kernel_config", None)),
        str(getattr(config, "lora_config", None)),
        {name: one for name, one in os.environ.items() if name.startswith("VLLM_") and not name.startswith(_PASSING)},
        weights,
    )
    return fingerprint_prefix(config, model_config, prefix, device) + whole[_PLACE:]


def is_offloading(config: Any) -> bool:
    """Returns whether vLLM's own offloader is enabled."""
    offload = getattr(config, "offload_config", None)
    return bool(
        getattr(config.cache_config, "cpu_offload_gb", 0)
        or getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0)
        or getattr(getattr(offload, "prefetch", None), "offload_group_size", 0)
    )


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine_facts(device: torch.device) -> list[Any]:
    if device.type == "cpu":
        return [platform.machine(), torch.backends.cpu.get_cpu_capability()]
    properties = torch.cuda.get_device_properties(device)
    return [properties.name, properties.major, properties.minor, properties.multi_processor_count, torch.version.cuda]


def _ranks_of_groups() -> Iterator[Any]:
    # Yields rank and size for each kind of group, or None if there is no such group.
    for name in ("world", "tp", "pp", "dp", "ep", "etp", "pcp", "dcp", "eplb"):
        group = getattr(parallel_state, f"_{name}".upper(), None)
        yield None if group is None else (group.rank_in_group, group.world_size)


def facts_of_files(model_config: Any, loader: Any) -> Iterator[Any]:
    """Yields facts that identify a model's weights and configuration files. loader: the loader that knows the files
    (`reader_of`). Raises Refused if nothing identifies the files, and the errors of opening them."""
    where: Any
    if loader.at_source(model_config):
        where = loader.source
    else:
        where, _ = loader.files_of(DefaultModelLoader.Source(model_config.model, model_config.revision))
    yield from identify_files(where, loader.storage_options)
    folder = model_config.model
    if not os.path.isdir(folder):
        folder = os.path.dirname(where[0]) if isinstance(where, list) else ""
    for name in sorted(os.listdir(folder)) if folder else ():
        path = os.path.join(folder, name)
        is_about_text = name.startswith(("tokenizer", "vocab"))
        if name.endswith(".json") and not is_about_text and os.path.getsize(path) <= _SETTINGS:
            with open(path, "rb") as content:
                yield name, hashlib.sha256(content.read()).hexdigest()

"""What a slice plan depends on beside the model and its files: vLLM, its configuration, the rank."""

from __future__ import annotations

import os
from typing import Any

import vllm

__all__ = ["facts", "ranks"]

# Code that moves weights, whatever the model.
_CODE = (
    "vllm.model_executor.parameter",
    "vllm.model_executor.utils",
    "vllm.model_executor.models.utils",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.model_loader.weight_utils",
    "vllm.distributed.utils",
    "vllm.distributed.parallel_state",
)

# Variables of vLLM's that differ from start to start and say nothing about weights.
_PASSING = (
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "VLLM_HOST_IP",
    "VLLM_LOGGING",
    "VLLM_LOG",
    "VLLM_PORT",
    "VLLM_RPC",
    "VLLM_ENGINE",
    "VLLM_DP_",
)

_PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "data_parallel_rank",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "enable_expert_parallel",
    "enable_eplb",
    "eplb_config",
    "expert_placement_strategy",
    "enable_ep_weight_filter",
)

_GROUPS = ("world", "tp", "pp", "dp", "ep", "etp", "pcp", "dcp", "eplb")


def facts(model_config: Any, load_config: Any, options: dict[str, Any], experts: set[int] | None) -> dict[str, Any]:
    """For `keeping.key_of`."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    parallel = getattr(config, "parallel_config", None)
    hf: Any = getattr(model_config, "hf_config", None)
    return {
        "engine": "vllm",
        "version": vllm.__version__,
        "config": _config(hf),
        "model": [
            str(getattr(model_config, name, None)) for name in ("dtype", "quantization", "is_moe", "multimodal_config", "architectures")
        ],
        "quantization": str(type(getattr(config, "quant_config", None))),
        "lora": str(getattr(config, "lora_config", None)),
        "parallel": [str(getattr(parallel, name, None)) for name in _PARALLEL],
        "ranks": _ranks(),
        "experts": None if experts is None else sorted(experts),
        "load": [str(getattr(load_config, name, None)) for name in ("device", "model_loader_extra_config")],
        "options": [options.get("strict", True)],
        "environment": {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and not name.startswith(_PASSING)},
        "modules": list(_CODE),
    }


def ranks() -> Any:
    """The group of the ranks that divide tensors among them and load at the same time, on
    the host; None if there is one rank."""
    try:
        from vllm.distributed import parallel_state
    except ImportError:
        return None
    group = getattr(parallel_state, "_TP", None)
    return None if group is None or group.world_size == 1 else group.cpu_group


def _config(hf: Any) -> Any:
    if not hasattr(hf, "to_dict"):
        return str(hf)
    return {name: value for name, value in hf.to_dict().items() if name != "_name_or_path"}  # where it is says nothing


def _ranks() -> list[Any]:
    # Place and size in each group that there is.
    try:
        from vllm.distributed import parallel_state
    except ImportError:
        return []
    out: list[Any] = []
    for name in _GROUPS:
        group = getattr(parallel_state, f"_{name}".upper(), None)
        out.append(None if group is None else (group.rank_in_group, group.world_size))
    return out

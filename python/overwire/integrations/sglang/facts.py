"""What a slice plan depends on beside the model and its files: SGLang, its settings, the rank."""

from __future__ import annotations

import os
from typing import Any

import sglang

__all__ = ["facts"]

# Code that moves weights, whatever the model.
_CODE = (
    "sglang.srt.distributed.parallel_state",
    "sglang.srt.layers.parameter",
    "sglang.srt.layers.utils",
    "sglang.srt.model_loader.loader",
    "sglang.srt.model_loader.utils",
    "sglang.srt.model_loader.weight_utils",
    "sglang.srt.models.utils",
    "sglang.srt.utils.common",
)

# Settings that differ from start to start and say nothing about weights.
_PASSING = frozenset(
    ("host", "port", "nccl_port", "dist_init_addr", "random_seed", "model_path", "tokenizer_path", "served_model_name", "download_dir")
)


def facts(model_config: Any, load_config: Any, options: dict[str, Any]) -> dict[str, Any] | None:
    """For `keeping.key_of`; None where SGLang does not say what its settings are."""
    settings = _settings()
    if settings is None:
        return None
    hf: Any = getattr(model_config, "hf_config", None)
    config = hf.to_dict() if hasattr(hf, "to_dict") else {"": str(hf)}
    return {
        "engine": "sglang",
        "version": sglang.__version__,
        "config": {name: value for name, value in config.items() if name != "_name_or_path"},
        "model": [str(getattr(model_config, name, None)) for name in ("dtype", "quantization", "is_draft_model")],
        "settings": settings,
        "ranks": _ranks(),
        "load": [str(getattr(load_config, name, None)) for name in ("draft_model_idx", "tp_rank")],
        "options": sorted(name for name in options if name != "max_memory"),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("SGLANG_", "SGL_"))},
        "modules": list(_CODE),
    }


def _settings() -> dict[str, str] | None:
    # Those of the server.
    try:
        from sglang.srt.runtime_context import get_server_args

        held = getattr(get_server_args(), "__dict__", None)
    except (ImportError, ValueError):  # it has none yet
        return None
    return {name: str(value) for name, value in sorted(held.items()) if name not in _PASSING} if held else None


def _ranks() -> dict[str, Any]:
    # Place and size in each group that there is.
    from sglang.srt.distributed import parallel_state

    groups = {name: (getattr(one, "rank_in_group", None), getattr(one, "world_size", None)) for name, one in vars(parallel_state).items()}
    return {name: found for name, found in sorted(groups.items()) if isinstance(found[0], int)}

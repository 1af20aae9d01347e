"""Whether the parameters of a vLLM model hold a checkpoint's bytes as they are.

After loading, vLLM may repack, swap, pad or derive weights for its kernels. Bytes may be
written straight into the parameters only where it has done nothing of that.
"""

from __future__ import annotations

from typing import Any

import torch

# Classes, by name, whose `process_weights_after_loading` leaves the bytes where they are, if
# the parameters also look as they did when they were made.
_METHODS = frozenset(("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"))
_EXPERTS = "UnquantizedFusedMoEMethod"
_BACKENDS = frozenset(("TRITON", "BATCHED_TRITON"))
_ATTENTION = frozenset(("Attention", "MMEncoderAttention"))


def obstacle_of(model: torch.nn.Module, model_config: Any) -> str | None:
    """Why bytes may not be written straight into the parameters; None if they may."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    if model_config.quantization is not None:
        return f"the model is quantized ({model_config.quantization})"
    if torch.version.hip:
        return "ROCm pads weights"
    if hasattr(model, "process_weights_after_loading"):
        return f"{type(model).__name__} processes its weights"
    for path, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__
        if kind == _EXPERTS:
            backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
            if backend not in _BACKENDS:
                return f"{path}: experts for {backend}"
        elif hasattr(method, "process_weights_after_loading") and kind not in _METHODS:
            return f"{path}: {kind}"
        if is_deferred_attention_layer(module) and type(module).__name__ not in _ATTENTION:
            return f"{path}: {type(module).__name__} derives weights"
        info = LAYERWISE_INFO.get(module)
        if info is None:
            return f"{path}: vLLM has not noted how it was made"
        for name, member in info.restore_metadata[0].items():
            param = getattr(module, name, None)
            if param is None or (param.dtype, param.shape, param.stride()) != (
                member.dtype,
                member.shape,
                member.stride(),
            ):
                return f"{path}.{name}: it is not as it was made"
    return None

"""Checks whether the parameters of a vLLM model contain a checkpoint's bytes unchanged.

After loading, vLLM may repack, swap, pad or derive weights for its kernels. New bytes may be written directly into the
parameters only if vLLM has done none of this.
"""

from __future__ import annotations

from typing import Any

import torch

# The names of classes whose `process_weights_after_loading` does not change bytes if it leaves the dtype, shape and
# strides of the parameters unchanged.
_METHODS = frozenset(("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"))
_EXPERTS = "UnquantizedFusedMoEMethod"
_BACKENDS = frozenset(("TRITON", "BATCHED_TRITON"))
_ATTENTION = frozenset(("Attention", "MMEncoderAttention"))


def obstacle_of(model: torch.nn.Module, model_config: Any) -> str | None:
    """Returns the reason why bytes may not be written directly into the parameters, or None if they may."""
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
                return f"{path}: the {backend} back end rearranges experts"
        elif hasattr(method, "process_weights_after_loading") and kind not in _METHODS:
            return f"{path}: {kind} processes its weights"
        if is_deferred_attention_layer(module) and type(module).__name__ not in _ATTENTION:
            return f"{path}: {type(module).__name__} derives weights"
        info = LAYERWISE_INFO.get(module)
        if info is None:
            return f"{path}: vLLM has not recorded the original parameters"
        for name, member in info.restore_metadata[0].items():
            param = getattr(module, name, None)
            was = member.dtype, member.shape, member.stride()
            if param is None or (param.dtype, param.shape, param.stride()) != was:
                return f"{path}.{name}: its dtype, shape or strides have changed"
    return None

"""Lists the vLLM quantisation methods that load by slices."""

from __future__ import annotations

#: The methods with loaders that only copy, by their names in vLLM 0.32 and 0.33. `tests/engines/engines_quantised.py`
#: compares each of them with vLLM's own load, parameter by parameter; see the table in docs/vllm-internals.md.
COPIED = frozenset(
    (
        "auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "gptq_marlin",
        "inc", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "mxfp8", "quark",
    )
)  # fmt: skip

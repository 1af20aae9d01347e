"""Tests in vLLM's real code that a draft model for speculative decoding loads its own weights, although the option
`source` names the target's.

    PYTHONPATH=python:build/engines python tests/engines/engines_drafts.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines_vllm as base


def load(root: Path, port: int) -> None:
    """Loads the draft, the target, and the draft again, as an engine may do."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    base.without_kernels()
    draft = {"model": str(root / "draft"), "method": "draft_model", "num_speculative_tokens": 2}
    config = EngineArgs(
        model=str(root / "target"),
        load_format="overwire",
        model_loader_extra_config={"source": str(root / "store")},
        speculative_config=draft,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        use_tqdm_on_load=False,
    ).create_engine_config()
    target_config, draft_config = config.model_config, config.speculative_config.draft_model_config

    def norm_of(model_config: Any) -> float:
        config.compilation_config.static_forward_context.clear()
        model = get_model(vllm_config=config, model_config=model_config)
        return float(model.model.norm.weight.detach()[0])

    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
        initialize_model_parallel(1)
        values = [norm_of(each) for each in (draft_config, target_config, draft_config)]
    if values != [2.0, 3.0, 2.0]:
        raise SystemExit(f"the draft, the target and the draft have the values {values} instead of 2, 3 and 2")
    print("a draft has its own weights")


def main() -> None:
    if base.run_as_rank(lambda root, world, rank, port, names: load(root, port)):
        return
    with base.plugged_folder("overwire-drafts-") as (root, env):
        for value, name in enumerate(("target", "draft", "store"), start=1):
            tensors = base.weights(base.LLAMA)
            tensors["model.norm.weight"].fill_(value)
            base.folder(root / name, base.LLAMA, tensors, True)
        base.run_ranks(__file__, root, 1, [], env)


if __name__ == "__main__":
    main()

"""Compares the tokens that vLLM's engine generates with each load format. `device_vllm.py --generate` runs it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import device_starts as starts
import device_vllm as base


def compare_tokens(args: argparse.Namespace) -> None:
    """Runs vLLM's engine in this process. Each format must give the same tokens. vLLM's dummy weights must give
    different tokens, because equal tokens would otherwise prove nothing."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    lacks_kernels = starts.without_kernels()
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    if lacks_kernels:
        registry._run_in_subprocess = lambda inspect: inspect()  # a subprocess would lack the replaced modules
    asked = SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in ([5, 17, 101, 7], list(range(1, 33)))]
    tokens: dict[str, list[list[int]]] = {}
    for turn, kind in enumerate([*base.starts_of(args.kinds), "dummy"]):
        form, folder, _ = base.parts(kind)
        llm = LLM(
            model=str(Path(args.dir) / folder),
            load_format="overwire" if form == "prepared" else form,
            model_loader_extra_config=base.extra_of(args, form),
            tensor_parallel_size=args.ranks,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            gpu_memory_utilization=0.3,
            **base.backend_of(args),
        )
        every = llm.generate(prompts, asked, use_tqdm=False)
        name = f"{turn} {kind}"
        tokens[name] = [list(each.outputs[0].token_ids) for each in every]
        print(f"  {name}: generated {tokens[name]}", flush=True)
        if form == "prepared":  # the engine is still writing the state that the next start uses
            from overwire.integrations.vllm import prepared

            prepared.finish_writing()
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
    *ours, dummy = tokens.values()
    if any(each != ours[0] for each in ours) or dummy == ours[0]:
        raise SystemExit("the tokens differ, or other weights give the same tokens")
    print(f"  {len(ours)} starts generated the same tokens, other weights gave different tokens", flush=True)

"""Tests in vLLM's real code on the CPU that streamed layers compute the same as resident layers.

    PYTHONPATH=python:build/engines python tests/engines/engines_offload.py

Each model is loaded by vLLM itself and by overwire with {"offload": ...}, and run by vLLM's own forward. Hidden states
and logits must be the same bit for bit. vLLM's compiled attention kernel is not available here, so torch computes the
attention. All other operations are vLLM's own Python code. Refusals are tested with one rank, and outputs with one and
two ranks.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import engines_vllm as base
import torch

MIB = 1 << 20


def without_kernels() -> None:
    """Replaces the compiled attention with torch's causal attention, for the tokens of one request."""
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers import utils
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    def forward(
        self: Any,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        cache: Any,
        metadata: Any,
        output: Any,
        *_: Any,
        **__: Any,
    ) -> Any:
        q, k, v = (part.view(len(part), -1, self.head_size).transpose(0, 1) for part in (query, key, value))
        attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        output.copy_(attend(q, k, v, scale=self.scale).transpose(0, 1).reshape(output.shape))
        return output

    CPUAttentionBackendImpl.forward = forward
    utils.check_cpu_sgl_kernel = lambda *_: False  # true on processors with AMX
    CustomOp.dispatch_forward = lambda self, *_, **__: self.forward_native


@torch.inference_mode()
def outputs(model: Any, config: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the hidden states and logits of one request."""
    from vllm.forward_context import set_forward_context

    ids = torch.arange(7, 7 + tokens) % 300
    with set_forward_context(None, config, num_tokens=tokens):
        hidden = model(ids, torch.arange(tokens))
    return hidden.clone(), model.compute_logits(hidden).clone()


def streams(path: Path, plain: Path, where: tuple[int, int, int]) -> None:
    """Runs a model with all, all but one, or none of its layers streamed, and compares outputs and weights."""
    theirs, config = base.load(plain, *where, "safetensors")
    wanted = {tokens: outputs(theirs, config, tokens) for tokens in (1, 9)}
    layer = sum(parameter.nbytes for parameter in theirs.model.layers[0].parameters())
    cases = [(True, base.LAYERS, "host"), (f"{layer}B", base.LAYERS - 1, "host"), ("1GB", 0, "host")]
    for keep, count, tier in [*cases, (True, base.LAYERS, "device")]:
        model, config = base.load(path, *where, "overwire", {"offload": keep, "offload_where": tier})
        offloaded = model.__dict__["_overwire_offloaded"]
        if len(offloaded.blocks) != count or offloaded.nbytes != count * layer:
            raise SystemExit(f"{path}, keep {keep}: {offloaded}")
        is_stored = offloaded.stored > 0, offloaded.stored_on_device > 0
        if is_stored != (count > 0 and tier == "host", tier == "device"):
            raise SystemExit(f"{path}, keep {keep}, {tier}: {offloaded}")
        for tokens in (9, 1, 9):
            for ours, own in zip(outputs(model, config, tokens), wanted[tokens], strict=True):
                if not torch.equal(ours, own):
                    raise SystemExit(f"{path}, keep {keep}: outputs differ for {tokens} tokens")
        if count:
            base.fails("state_dict", ("NotSupportedError", "model.layers.", "are offloaded"), model.state_dict)
            away()
        offloaded.close()
        if wrong := base.differences(base.state(model), base.state(theirs)):
            raise SystemExit(f"{path}, keep {keep}: weights differ: {wrong}")
    print(f"  {path.parent.name}, {path.name}: outputs and weights equal vLLM's own", flush=True)


def compiles(path: Path, plain: Path, where: tuple[int, int, int]) -> None:
    """Compiles a model as vLLM does. It is split at attention and at streamed layers, which have fixed slots."""
    from overwire._compat_api import stream_blocks
    from overwire.integrations.vllm.streaming import prepare_config
    from overwire.offloading.fixed import OPERATOR
    from vllm.compilation.backends import split_graph
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.forward_context import set_forward_context

    theirs, config = base.load(plain, *where, "safetensors")
    model, config = base.load(path, *where, "overwire")
    compilation, counts = config.compilation_config, []
    compilation.mode, before = CompilationMode.VLLM_COMPILE, list(compilation.splitting_ops or ())
    if not prepare_config(config, config.model_config) or compilation.splitting_ops != [*before, OPERATOR]:
        raise SystemExit(f"compiled layers have no fixed slots: {compilation.splitting_ops}")

    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    base.fails("full graphs", ("ValueError", "PIECEWISE"), lambda: prepare_config(config, config.model_config))
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    prepare_config(config, config.model_config)

    def backend(graph: Any, inputs: Any) -> Any:
        parts, items = split_graph(graph, [*compilation._attention_ops, OPERATOR])
        for item in items:
            names = [str(node.target) for node in item.graph.graph.nodes if node.op == "call_function"]
            if any("next_block" in name for name in names) != (item.is_splitting_graph and "next_block" in names[0]):
                raise SystemExit(f"a part with other operators loads a layer: {names}")
            counts.append(any("next_block" in name for name in names))
        return parts

    layers = list(model.model.layers)
    with stream_blocks(model, torch.device("cpu"), layers, [], 0, static=True) as offloaded, torch.inference_mode():
        if len(offloaded.blocks) != base.LAYERS:
            raise SystemExit(f"{path}: {offloaded}")
        for tokens in (9, 1, 9):
            for ours, own in zip(outputs(model, config, tokens), outputs(theirs, config, tokens), strict=True):
                if not torch.equal(ours, own):
                    raise SystemExit(f"{path}: outputs of fixed slots differ for {tokens} tokens")
        run = torch.compile(lambda ids, at: model.model.forward(ids, at, None), backend=backend, fullgraph=True)
        ids = torch.arange(7, 16) % 300
        with set_forward_context(None, config, num_tokens=9):
            if not torch.equal(run(ids, torch.arange(9)), outputs(theirs, config, 9)[0]):
                raise SystemExit(f"{path}: outputs of the compiled model differ")
    if sum(counts) != base.LAYERS:
        raise SystemExit(f"{path}: {sum(counts)} parts load a layer")
    print(f"  {path.parent.name}, {path.name}: divided as vLLM does, outputs equal", flush=True)


def away() -> None:
    """Calls that would read or change offloaded weights are refused before the worker does anything."""
    from overwire.integrations import vllm as plug_in

    class Worker:
        changes = 0

        def load_model(self) -> None: ...

        def reload_weights(self) -> None:
            self.changes += 1

        def sleep(self) -> None:
            self.changes += 1

        def update_weights(self) -> None:
            self.changes += 1

    workers = type("workers", (), {"Worker": Worker})
    plug_in._wrap_gpu_worker(workers)
    worker = Worker()
    for name in ("reload_weights", "sleep", "update_weights"):
        base.fails(name, ("ValueError", "layers of the model are compressed"), getattr(worker, name))
    if worker.changes:
        raise SystemExit("a refused change has begun")


def refusals(path: Path, where: tuple[int, int, int]) -> None:
    """Settings that cannot work are refused before a model is made."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.offloader import get_offloader

    def attempt(extra: dict[str, Any], **more: Any) -> None:
        arguments: dict[str, Any] = {
            "load_format": "overwire",
            "model_loader_extra_config": extra,
            "enforce_eager": True,
        }
        arguments |= {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 64, **more}
        config = EngineArgs(model=str(path), **arguments).create_engine_config()
        get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)

    before = get_offloader()
    for words, extra, more in (
        ("compilation mode 3", {"offload": True}, {"enforce_eager": False}),
        ("--cpu-offload-gb", {"offload": True}, {"cpu_offload_gb": 1}),
        ("cannot be combined", {"offload": True, "prepared": True}, {}),
        ("offload must be", {"offload": 5}, {}),
        ("expected a number of bytes", {"offload": "many"}, {}),
        ("offload_where must be 'host' or 'device'", {"offload": True, "offload_where": "auto"}, {}),
        ("offload_where needs offload", {"offload_where": "device"}, {}),
    ):
        base.fails(words, (words,), functools.partial(attempt, extra, **more))
    if get_offloader() is not before:
        raise SystemExit("a refused start has changed vLLM's offloader")


def rank_main(root: Path, world: int, rank: int, port: int, names: list[str]) -> None:
    import vllm

    print(f"vLLM {vllm.__version__}, rank {rank} of {world}", flush=True)
    base.without_kernels()
    without_kernels()
    where = world, rank, port
    for name in names:
        for kind in ("plain", "compressed"):
            streams(root / name / kind, root / name / "plain", where)
    if world == 1:
        compiles(root / "llama/compressed", root / "llama/plain", where)
        refusals(root / "llama/plain", where)


def main() -> None:
    if base.run_as_rank(rank_main):
        return
    with base.plugged_folder("overwire-offload-") as (root, env):
        for name in (names := ("llama", "tied", "padded")):
            tensors = base.weights(base.MODELS[name])
            base.folder(root / name / "plain", base.MODELS[name], tensors, False)
            base.folder(root / name / "compressed", base.MODELS[name], tensors, True)
        for world in (1, 2):
            base.run_ranks(__file__, root, world, names, env)
        print("streamed layers equal vLLM's own")


if __name__ == "__main__":
    main()

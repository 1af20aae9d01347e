"""Tests in vLLM's real code on the CPU that prepared state works with what an engine does to a model.

    PYTHONPATH=python:build/engines python tests/engines/engines_states.py [PART...]

The cases are KV cache scales, LoRA, drafts, and pipeline stages. Each model is loaded by vLLM itself, then by overwire,
which stores the state after vLLM's processing, and then from that state. Every parameter, buffer and attribute must be
the same. Models made from prepared state then receive pushes and sleep.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines_live as live
import engines_prepared as kept
import engines_vllm as base
import safetensors.torch
import torch

Where = tuple[int, int, int]


def compare_scales(root: Path, log: kept.Log, where: Where) -> None:
    """Compares the KV cache scales of a checkpoint, which layers have as buffers and as numbers."""
    tensors = base.quantised(base.weights(kept.FP8), 16, 32)
    for n in range(base.LAYERS):
        at = f"model.layers.{n}.self_attn."
        tensors |= {f"{at}k_scale": torch.tensor(0.25 * (n + 1)), f"{at}v_scale": torch.tensor(0.25 * (n + 2))}
    path = base.folder(root / "scales/plain", kept.FP8, tensors, False)
    _, later, config = kept.starts("scales", path, root / "prepared", log, where, kv_cache_dtype="fp8")
    found = [
        (float(layer._k_scale), layer._k_scale_float, float(layer._v_scale), layer._v_scale_float)
        for layer in later.modules()
        if hasattr(layer, "_k_scale_float")
    ]
    if found != [(0.25 * (n + 1),) * 2 + (0.25 * (n + 2),) * 2 for n in range(base.LAYERS)]:
        raise SystemExit(f"the scales of the KV cache are {found}")


def write_adapter(path: Path) -> Path:
    """Writes a LoRA adapter for two projections of each layer."""
    path.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(settings | {"task_type": "CAUSAL_LM"}))
    torch.manual_seed(3)
    tensors = {}
    for n in range(base.LAYERS):
        for layer, wide, high in (("self_attn.q_proj", base.HIDDEN, 64), ("mlp.down_proj", 160, base.HIDDEN)):
            at = f"base_model.model.model.layers.{n}.{layer}.lora_"
            tensors |= {f"{at}A.weight": torch.randn(4, wide), f"{at}B.weight": torch.randn(high, 4)}
    safetensors.torch.save_file(tensors, path / "adapter_model.safetensors")
    return path


def add_adapters(model: Any, config: Any, path: Path) -> dict[str, Any]:
    """Wraps a model with vLLM's adapter manager and one active adapter, and returns its tensors by name."""
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

    manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), model.embedding_modules)
    model = manager.create_lora_manager(model, config)
    manager.add_adapter(LoRARequest("one", 1, str(path)))
    out = base.state(model)
    for name, layer in model.named_modules():
        for part in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(layer, part, None)
            for at, tensor in enumerate([stacked] if isinstance(stacked, torch.Tensor) else stacked or ()):
                out[f"{name}.{part}.{at}"] = tensor.clone()
    if not any(name.endswith("lora_b_stacked.0") and tensor.any() for name, tensor in out.items()):
        raise SystemExit("no adapter is active")
    return out


def compare_adapters(root: Path, log: kept.Log, where: Where) -> None:
    """Compares two starts of a model. vLLM wraps its layers for adapters before the state is written."""
    from overwire.integrations.vllm import prepared

    path, more = root / "llama/plain", {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    file = write_adapter(root / "adapter")
    own, config = base.load(path, *where, "safetensors", **more)
    theirs = add_adapters(own, config, file)
    for words in ("stored prepared state in", "restored prepared state"):
        model, config = base.load(path, *where, "overwire", {"prepared": str(root / "prepared")}, **more)
        ours = add_adapters(model, config, file)
        prepared.begin_writing()
        prepared.finish_writing()
        log.take(words)
        if wrong := base.differences(ours, theirs):
            raise SystemExit(f"with adapters, {words}: {wrong}")
        print(f"  with adapters, {words}: {len(theirs)} tensors equal vLLM's own load", flush=True)
    kept.start(path, root / "prepared", where)
    log.take("stored prepared state in")  # without adapters, the state is different


def load_draft(kind: str, config: Any, target: Any) -> Any:
    """Loads a draft with vLLM's proposer, which shares parts of the target with it."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.spec_decode.eagle import EagleProposer

    of: Any = {"eagle": EagleProposer, "draft_model": DraftModelProposer}[kind]
    one = of.__new__(of)
    one.vllm_config, one.speculative_config = config, config.speculative_config
    one.use_local_argmax_reduction = False
    with set_current_vllm_config(config):
        one.model = one._get_model()
    one._maybe_share_embeddings(target)
    one._maybe_share_lm_head(target)
    return one.model


def compare_drafts(root: Path, log: kept.Log, where: Where) -> None:
    """Loads models with drafts. A draft has prepared state of its own. One draft shares the model's head and
    embeddings, the other is a small complete model."""
    from overwire.integrations.vllm import prepared

    torch.manual_seed(11)
    one = {**base.LLAMA, "num_hidden_layers": 1}
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in live.other(base.weights(base.LLAMA), 5).items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    tensors["fc.weight"] = torch.randn(base.HIDDEN, 2 * base.HIDDEN).bfloat16()
    paths = {"eagle": base.folder(root / "eagle/plain", one, tensors, False), "draft_model": root / "tied/plain"}
    for kind, path in paths.items():
        speculative = {"method": kind, "model": str(path), "num_speculative_tokens": 2}
        target, config = base.load(root / "llama/plain", *where, "safetensors", speculative_config=speculative)
        own = load_draft(kind, config, target)
        theirs = base.state(own)
        for words in ("stored prepared state in", "restored prepared state"):
            extra = {"prepared": str(root / "prepared" / kind)}
            target, config = base.load(root / "llama/plain", *where, "overwire", extra, speculative_config=speculative)
            draft = load_draft(kind, config, target)
            prepared.begin_writing()
            prepared.finish_writing()
            lines = [line for line in log.lines if words in line]
            log.take(words)
            if len(lines) != 2:
                raise SystemExit(f"{kind}, {words}: {lines}")
            if wrong := base.differences(base.state(draft), theirs):
                raise SystemExit(f"{kind}, {words}: differs from vLLM's own load: {wrong}")
            shares = draft.model.embed_tokens is target.model.embed_tokens, draft.lm_head is target.lm_head
            if shares != (kind == "eagle",) * 2:
                raise SystemExit(f"{kind}, {words}: shares {shares}")
            print(f"  {kind}, {words}: {len(theirs)} tensors equal vLLM's own load", flush=True)


def compare_stages(root: Path, log: kept.Log, where: Where) -> None:
    """Tests pipeline stages. Each rank keeps the state of its own layers."""
    more = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
    for name in ("llama", "tied", "experts"):
        kept.starts(f"{name}, stage {where[1]}", root / name / "plain", root / "prepared" / name, log, where, **more)


def compare_pushes(root: Path, log: kept.Log, where: Where) -> None:
    """Pushes a trainer's weights into a model made from prepared state. The result is the same as after loading these
    weights."""
    from overwire.integrations.vllm import transfer
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    for name, config_of in (("llama", base.LLAMA), ("tied", base.MODELS["tied"]), ("fp8", kept.FP8)):
        tensors = live.other(base.weights(config_of), 1)
        tensors = base.quantised(tensors, 16, 32) if name == "fp8" else tensors
        path = base.folder(root / f"{name}-next/plain", config_of, tensors, False)
        theirs = base.state(base.load(path, *where, "safetensors")[0])
        _, later, config = kept.starts(name, root / name / "plain", root / "prepared/pushed", log, where)
        engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend="overwire"), config, torch.device("cpu"), later
        )
        workers = live.Workers(engine, 1, config)
        info = transfer.TrainerInit(rank=0, deltas=False, where=str(root / f"{name}-pushes"))
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=workers, source=live.Source(tensors))
        trainer.send_weights()
        if wrong := base.differences(base.state(later), theirs):
            raise SystemExit(f"{name}, pushed: {wrong}")
        trainer.shutdown()
        engine.shutdown()
        print(f"  {name}, pushed: {len(theirs)} tensors equal vLLM's own load of them", flush=True)


class Allocator:
    """Replaces vLLM's GPU allocator. The memory of a model is on the CPU, and is zero while the model sleeps."""

    def __init__(self, model: Any) -> None:
        self.memory = {}
        for tensor in tensors_of(model):
            memory = tensor.untyped_storage()
            if memory.nbytes():
                self.memory[memory.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(memory)
        self.pointer_to_data = {
            ptr: types.SimpleNamespace(handle=(0, memory.numel(), ptr), tag="weights", is_asleep=False)
            for ptr, memory in self.memory.items()
        }

    def sleep(self, offload_tags: Any) -> None:
        if "weights" in offload_tags or not all(data.is_asleep for data in self.pointer_to_data.values()):
            raise SystemExit("vLLM would copy the weights")

    def wake_up(self, tags: Any) -> None:
        for data in self.pointer_to_data.values():
            data.is_asleep = False


def tensors_of(model: Any) -> list[torch.Tensor]:
    """Returns all tensors of a model."""
    return [tensor for _, tensor in [*model.named_parameters(), *model.named_buffers()]]


def compare_sleep(root: Path, log: kept.Log, where: Where) -> None:
    """If a model is put to sleep while its state is being written, the writing ends first. Models made from prepared
    state can also sleep."""
    from overwire.integrations import vllm as plugin
    from overwire.integrations.vllm import prepared, sleeping
    from vllm import device_allocator
    from vllm.device_allocator import cumem

    torch.accelerator.synchronize = lambda device: None  # type: ignore[assignment]
    for name in ("llama", "fp8"):
        for words in ("stored prepared state in", "restored prepared state"):
            extra = {"prepared": str(root / "prepared/slept")}
            model, _ = base.load(root / name / "plain", *where, "overwire", extra)
            before = base.state(model), kept.held(model)
            allocator = Allocator(model)
            device_allocator.get_mem_allocator_instance = lambda: allocator  # noqa: B023
            sleeping.memory_of = lambda ptr, size, device: allocator.memory[ptr]  # noqa: B023
            cumem.unmap_and_release = lambda handle: allocator.memory[handle[2]].zero_()  # noqa: B023
            backend = sleeping.SleepBackend()
            prepared.begin_writing()

            def sleep(backend: Any = backend, words: str = words) -> None:
                log.take(words)  # the writing has ended before the memory is released
                backend.suspend(1)

            plugin._finish_writing_before(sleep)()
            if any(memory.any() for memory in allocator.memory.values()):
                raise SystemExit(f"{name} does not sleep")
            backend.resume()
            kept.same(f"{name}, {words}, slept", model, before)


PARTS: dict[str, tuple[int, Callable[[Path, kept.Log, Where], None]]] = {
    "scales": (1, compare_scales),
    "lora": (1, compare_adapters),
    "drafts": (1, compare_drafts),
    "pushes": (1, compare_pushes),
    "sleeps": (1, compare_sleep),
    "stages": (2, compare_stages),
}


def rank_main(root: Path, world: int, rank: int, port: int, names: list[str]) -> None:
    base.without_kernels()
    kept.with_fp8()
    log = kept.Log()
    for name in names:
        if PARTS[name][0] == world:
            PARTS[name][1](root, log, (world, rank, port))


def main() -> None:
    if base.run_as_rank(rank_main):
        return
    names = sys.argv[1:] or list(PARTS)
    with base.plugged_folder("overwire-states-") as (root, env):
        kept.make_folders(root)
        for world in sorted({PARTS[name][0] for name in names}):
            base.run_ranks(__file__, root, world, names, env)
        print("prepared state equals vLLM's own loads after all operations")


if __name__ == "__main__":
    main()

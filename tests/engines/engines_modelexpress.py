r"""Runs ModelExpress's real chain of strategies, with overwire's strategy, in vLLM's real code on the CPU.

    PYTHONPATH=python:build/engines33/express:build/engines33/vllm-0.33.0:build/engines \
        python tests/engines/engines_modelexpress.py

`--load-format modelexpress` loads a compressed model, which no other strategy of the chain can read. Each parameter
must equal vLLM's own load and be processed once.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import engines_vllm as base


def load(root: Path, port: int) -> None:
    """Loads a model with ModelExpress, in one process."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from modelexpress.accelerators.cuda import CudaAcceleratorBackend
    from modelexpress.engines.vllm import adapter, register_modelexpress_loaders

    class CudaOnTheHost(CudaAcceleratorBackend):
        """Replaces ModelExpress's CUDA backend: never waits, and accepts tensors in host memory."""

        synchronize = lambda *_: None  # noqa: E731
        current_device = lambda *_: 0  # noqa: E731
        is_available = lambda *_: True  # noqa: E731

    from vllm.model_executor.model_loader import utils

    register_modelexpress_loaders()
    adapter.accelerator_backend_for = lambda device: CudaOnTheHost()  # ModelExpress only supports GPUs
    adapter._get_vllm_device_id = lambda device: 0
    base.without_kernels()
    processed: list[Any] = []
    own = utils.process_weights_after_loading

    def process(model: Any, *more: Any, **named: Any) -> None:
        processed.append(model)
        own(model, *more, **named)

    utils.process_weights_after_loading = process
    theirs = base.state(base.load(root / "llama/plain", 1, 0, port, "safetensors")[0])
    slices = base.planned()
    processed.clear()
    model, _ = base.load(root / "llama/compressed", 1, 0, port, "modelexpress")
    wrong = base.differences(base.state(model), theirs)
    if wrong or not sum(slices) or len(processed) != 1:
        raise SystemExit(f"tensors differ from vLLM's own load: {wrong}; slices {slices}, processed {len(processed)} times")
    version = metadata.version("modelexpress")
    print(f"ModelExpress {version}: {len(theirs)} tensors equal vLLM's own load, {sum(slices)} slices", flush=True)


def main() -> None:
    if base.run_as_rank(lambda root, world, rank, port, names: load(root, port)):
        return
    with base.plugged_folder("overwire-express-") as (root, env):
        tensors = base.weights(base.LLAMA)
        for kind in ("plain", "compressed"):
            base.folder(root / "llama" / kind, base.LLAMA, tensors, kind == "compressed")
        base.run_ranks(__file__, root, 1, [], env)


if __name__ == "__main__":
    main()

"""Pushes weights from a trainer into vLLM's real code and compares them byte for byte.

    python tests/engines/engines_live.py        needs vLLM's Python tree on PYTHONPATH (`make engines`)

It runs on the CPU without vLLM's compiled parts. The factories, the layers and the loaders are the released ones. Each
model is loaded. Then other weights are pushed, by files and by a process group, to one process and to two
tensor-parallel ranks. Every parameter is compared with a load of the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines_vllm as tiny
import torch

STEPS = 3  # pushed training steps


class Workers:
    """Replaces vLLM's control plane. Calls the engine of each rank over gloo."""

    def __init__(self, engine: Any, world: int, config: Any) -> None:
        self.engine, self.world, self.config = engine, world, config

    def _call(self, name: str, *arguments: Any) -> None:
        if self.world > 1:
            torch.distributed.broadcast_object_list([(name, arguments)], 0)
        self.run(name, arguments)

    def run(self, name: str, arguments: Any) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.config):
            if name == "init_transfer_engine":
                self.engine.init_transfer_engine(self.engine.parse_init_info(*arguments))
            else:
                getattr(self.engine, name)(*arguments)

    def serve(self) -> None:
        """Runs, in another rank, the calls that the first rank sends."""
        while True:
            heard: list[Any] = [None]
            torch.distributed.broadcast_object_list(heard, 0)
            if heard[0] is None:
                return
            self.run(*heard[0])

    def end(self) -> None:
        if self.world > 1:
            torch.distributed.broadcast_object_list([None], 0)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")


class Source(dict):  # type: ignore[type-arg]
    """A WeightSource of tensors by name."""

    def __iter__(self) -> Any:
        return iter(self.items())


def other(tensors: dict[str, Any], n: int) -> dict[str, Any]:
    """Returns the tensors as they are after some training steps."""
    torch.manual_seed(n)
    return {name: (t.float() * (1 + 0.01 * torch.randn(t.shape))).to(t.dtype) for name, t in tensors.items()}


def rank_main(base: Path, world: int, rank: int, port: int, names: list[str]) -> None:
    from overwire.integrations.vllm import transfer
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    tiny.without_kernels()
    for name in names:
        at = base / name
        tensors = tiny.weights(tiny.MODELS[name])
        steps = [other(tensors, n) for n in range(STEPS)]
        loaded = [tiny.state(tiny.load(at / f"step-{n}", world, rank, port, "safetensors")[0]) for n in range(STEPS)]
        model, config = tiny.load(at / "plain", world, rank, port, "safetensors")
        engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend="overwire"), config, torch.device("cpu"), model
        )
        assert type(engine) is transfer.TransferEngine
        config.parallel_config.rank = rank  # as vLLM's worker does
        workers = Workers(engine, world, config)
        way: dict[str, Any] = {"where": str(at / f"pushes-{world}")}
        slices = tiny.planned()
        reason = transfer.obstacle_of(model, config.model_config)
        assert reason is None or "CPU back end rearranges experts" in reason, reason  # vLLM rearranges these experts
        for group, deltas in ((False, False), (True, reason is None)):
            if group:
                way = {
                    "master_address": "127.0.0.1",
                    "master_port": tiny.free_port(),
                    "world_size": world + 1,
                    "timeout": 30,
                }
            if rank:
                workers.serve()
            else:
                source = Source()
                info = transfer.TrainerInit(rank=0, deltas=deltas, **way)
                trainer = WeightTransferTrainerFactory.trainer_init(info, client=workers, source=source)
            for n, step in enumerate(steps):
                if rank == 0:
                    source.update(step)
                    trainer.send_weights()
                if rank == 0 or n == len(steps) - 1:
                    wrong = tiny.differences(tiny.state(model), loaded[n])
                    if wrong:
                        raise SystemExit(
                            f"{name}, push {n}, group {group}, deltas {deltas}, rank {rank} of {world}: {wrong}"
                        )
            if rank == 0:
                workers.end()
                trainer.shutdown()
            engine.shutdown()
        print(
            f"  {name}: {len(steps)} pushes to rank {rank} of {world} as loads of the same, {slices} slices", flush=True
        )


def main() -> None:
    if tiny.run_as_rank(rank_main):
        return
    with tiny.plugged_folder("overwire-live-") as (base, env):
        for name, config in tiny.MODELS.items():
            tensors = tiny.weights(config)
            tiny.folder(base / name / "plain", config, tensors, False)
            for n in range(STEPS):
                tiny.folder(base / name / f"step-{n}", config, other(tensors, n), False)
        for world in (1, 2):
            tiny.run_ranks(__file__, base, world, tiny.MODELS, env)
        print("pushes equal loads")


if __name__ == "__main__":
    main()

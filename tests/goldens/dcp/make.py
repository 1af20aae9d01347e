"""Makes the sharded checkpoints in this folder and, for each, a file KIND.expected with its whole tensors.

    python make.py fsdp2 shards consolidated safetensors     torch 2.15.0
    python make.py megatron                                  torch 2.11.0, megatron-core 0.16.1, einops

Two ranks run with gloo on the CPU. FileSystemWriter(serialization_format=SAFETENSORS) writes `safetensors`, which
torch's own FileSystemReader cannot load.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

HERE = Path(__file__).parent
WHOLE = torch.arange(35.0).reshape(7, 5)


def sharded() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a state of DTensors that are cut unevenly by rows and columns, and its whole tensors."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    whole = {"rows": WHOLE, "columns": WHOLE.bfloat16(), "both": WHOLE + 1, "one": torch.ones(1), "plain": WHOLE - 1}
    cuts = {"rows": Shard(0), "columns": Shard(1), "both": Shard(0), "one": Shard(0)}
    state = whole | {name: distribute_tensor(whole[name], mesh, [cut]) for name, cut in cuts.items()}
    return state, whole


def fsdp2(folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, init_device_mesh

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optim": of_optimizer, "epoch": 3, "kind": torch.float32}, checkpoint_id=folder)
    state = {f"model.{name}": one for name, one in of_model.items()}
    for name, values in of_optimizer["state"].items():
        state[f"optim.state.{name}.momentum_buffer"] = values["momentum_buffer"]
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}


def shards(folder: str, consolidate: bool = False) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    state, whole = sharded()
    places = dict.fromkeys(whole, 1) | {"columns": 2}
    writer = dcp.HuggingFaceStorageWriter(folder, places, save_distributed=True, enable_consolidation=consolidate)
    dcp.save(state, storage_writer=writer)
    return whole


def safetensors(folder: str) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    state, whole = sharded()
    kind = dcp.filesystem.SerializationFormat.SAFETENSORS
    dcp.save(state | {"epoch": 3}, storage_writer=dcp.FileSystemWriter(folder, serialization_format=kind))
    return whole


def megatron(folder: str) -> dict[str, Any]:
    torch.cuda.synchronize = lambda *args: None  # Megatron-core calls this, but does not use a GPU
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank, cut = dist.get_rank(), ShardedTensor.from_rank_offsets
    whole = torch.arange(48.0).reshape(8, 6)
    state = {
        "columns": cut("decoder.columns", whole[:, rank * 3 : rank * 3 + 3].contiguous(), (1, rank, 2), replica_id=0),
        "rows": cut("decoder.rows", whole[rank * 4 : rank * 4 + 4].bfloat16(), (0, rank, 2), replica_id=0),
        "layer": cut("decoder.layers.bias", torch.full((5,), 1.0 + rank), (0, rank, 2), replica_id=0, prepend_axis_num=1),
        "same": cut("same", torch.ones(3), replica_id=rank),
        "object": ShardedObject("extra_state", {"x": rank}, (2,), (rank,), replica_id=0),
        "iteration": 7,
    }
    os.makedirs(folder, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, folder, async_sharded_save=False)
    layers = torch.stack([torch.full((5,), 1.0), torch.full((5,), 2.0)])
    return {"decoder.columns": whole, "decoder.rows": whole.bfloat16(), "decoder.layers.bias": layers, "same": torch.ones(3)}


KINDS = {
    "fsdp2": fsdp2, "shards": shards, "consolidated": lambda folder: shards(folder, True), "safetensors": safetensors,
    "megatron": megatron,
}  # fmt: skip


def rank(number: int, kind: str, meeting: str) -> None:
    from safetensors.torch import save_file

    os.chdir(HERE)  # the checkpoints contain the path to which they were written
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    expected = KINDS[kind](kind)
    dist.barrier()
    if number == 0:
        save_file({name: one.contiguous() for name, one in expected.items()}, HERE / f"{kind}.expected")
    dist.destroy_process_group()


if __name__ == "__main__":
    for kind in sys.argv[1:]:
        shutil.rmtree(HERE / kind, ignore_errors=True)
        with tempfile.TemporaryDirectory() as meeting:
            mp.spawn(rank, args=(kind, f"{meeting}/file"), nprocs=2)

"""Saves training checkpoints in the background, and resumes from one. Each checkpoint is also a model.

Run it in a writable folder. `torchrun --nproc-per-node=2 checkpoints.py` shards the model over two ranks. A run with
one rank can resume from a checkpoint of two ranks, and the reverse.
"""

from __future__ import annotations

import os
from typing import Any

import overwire as ow
import torch
import torch.distributed as dist
from overwire.checkpoints import CheckpointReader, CheckpointStager, CheckpointWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard

device = "cuda" if torch.cuda.is_available() else "cpu"
if "LOCAL_RANK" in os.environ:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


def new() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 3)).to(device)
    if dist.is_initialized():
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    writer, stager = CheckpointWriter(), CheckpointStager()
    saving: Any = None
    for step in steps:
        model(torch.randn(8, 32, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            if saving is not None:
                saving.result()
            state = state_of(model, optimizer, step)
            # async_save copies the tensors before it returns, so training can change them.
            saving = async_save(state, checkpoint_id="latest", storage_writer=writer, async_stager=stager)
    if saving is not None:
        saving.result()
    stager.close()


model, optimizer = new()
train(model, optimizer, range(10))

# Later, in another process.
model, optimizer = new()
state = state_of(model, optimizer, 0)
load(state, storage_reader=CheckpointReader("latest"))
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
print("resumes after step", state["step"])
assert state["step"] == 9
train(model, optimizer, range(state["step"] + 1, 15))

if not dist.is_initialized() or dist.get_rank() == 0:
    print({name: tuple(tensor.shape) for name, tensor in ow.load_file("latest").items()})
if dist.is_initialized():
    dist.destroy_process_group()

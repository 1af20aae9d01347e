"""Measures how long training waits for a checkpoint and how long the checkpoint takes to complete, for overwire and for
torch's own methods, with the same state in GPU memory.

    device_checkpoint.py FOLDER GB

With WORLD_SIZE, that many ranks, forks of this process with one GPU each, save an FSDP2 model. Each checkpoint is
loaded and compared before anything is timed.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from overwire.checkpoints import CheckpointReader, CheckpointStager, CheckpointWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

warnings.filterwarnings("ignore")
ONLY = os.environ.get("ONLY", "")  # parts of the names of methods to run, each three times
FOLDER, SIZE, RANKS = Path(sys.argv[1]), int(float(sys.argv[2]) * 1e9), int(os.environ.get("WORLD_SIZE", "1"))


def state_of(rank: int) -> dict[str, Any]:
    """Returns bf16 weights (a fifth of the bytes) and two fp32 moments for each weight, sharded over the ranks."""
    torch.manual_seed(1)
    rows = max(RANKS, SIZE // 10 // 40 // 4096)
    out: dict[str, Any] = {"model": {}, "optimizer": {}}
    for number in range(40):
        weight = torch.randn(rows, 4096, device="cuda") * 0.02
        parts = {"w": weight.bfloat16(), "m": torch.randn_like(weight) * 1e-4, "v": torch.randn_like(weight).square() * 1e-8}
        for name, tensor in parts.items():
            if RANKS > 1:
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.tensor import Shard, distribute_tensor

                tensor = distribute_tensor(tensor, init_device_mesh("cuda", (RANKS,)), [Shard(0)], src_data_rank=None)
            out["model" if name == "w" else "optimizer"][f"{number}.{name}"] = tensor
    out["step"] = 3
    return out


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def compare(state: dict[str, Any], reader: Any) -> float:
    empty = {key: {n: torch.zeros_like(t) for n, t in state[key].items()} for key in ("model", "optimizer")} | {"step": 0}
    torch.cuda.synchronize()
    began = time.perf_counter()
    dcp.load(empty, storage_reader=reader)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    for key in ("model", "optimizer"):
        for name, tensor in state[key].items():
            assert torch.equal(local(empty[key][name]), local(tensor)), name
    assert empty["step"] == 3
    return took


class Steps:
    """Trains a small model, to time 20 steps with and without a save in the background."""

    def __init__(self) -> None:
        layers = [torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._batch = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            self.run()

    def run(self) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(20):
            loss = self._model(self._batch).float().square().mean()
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            loss.item()  # waits for the GPU, as a loop that logs the loss does
        return time.perf_counter() - began


def barrier() -> None:
    if RANKS > 1:
        dist.barrier()


def run(rank: int) -> None:
    state = state_of(rank)
    total = sum(local(t).nbytes for key in ("model", "optimizer") for t in state[key].values()) * RANKS
    at = FOLDER / "checkpoint"
    say = print if rank == 0 else lambda *_, **__: None
    say(
        f"{RANKS} x {torch.cuda.get_device_name()}, {os.cpu_count()} cores, torch {torch.__version__}, {total / 1e9:.1f} GB, to {FOLDER}",
        flush=True,
    )
    dcp.save(state, storage_writer=CheckpointWriter(at))
    loads = compare(state, CheckpointReader(at))
    stored = sum(f.stat().st_size for f in at.rglob("*") if f.is_file())
    say(f"compared; ratio {stored / total:.3f}; first load {loads:.2f} s", flush=True)
    barrier()
    steps = Steps()
    say(f"20 steps of training without a save {min(steps.run() for _ in range(3)):6.3f} s", flush=True)
    stager = CheckpointStager()
    ways: dict[str, Any] = {
        "overwire save": lambda: dcp.save(state, storage_writer=CheckpointWriter(at)),
        "overwire save, plain": lambda: dcp.save(state, storage_writer=CheckpointWriter(at, compress=False)),
        "overwire async": lambda: dcp.async_save(state, storage_writer=CheckpointWriter(at), async_stager=stager),
        "torch save, 16 threads": lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(at, thread_count=16)),
        "torch async, pinned": lambda: dcp.async_save(
            state,
            storage_writer=dcp.FileSystemWriter(at, thread_count=16),
            async_stager=DefaultStager(StagingOptions(True, False, False, True)),
        ),
        "torch save, 1 thread": lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(at)),
        "torch async, default": lambda: dcp.async_save(state, storage_writer=dcp.FileSystemWriter(at)),
    }
    for name in [name for name in ways if ONLY in name] * (3 if ONLY else 1):
        way = ways[name]
        for turn in range(3 if "async" in name else 2):
            if name.startswith("torch") or ONLY:  # our saves cannot replace torch's checkpoints
                barrier()
                if rank == 0:
                    shutil.rmtree(at, ignore_errors=True)
                barrier()
            gc.collect()
            torch.cuda.synchronize()
            cpu, began = time.process_time(), time.perf_counter()
            try:
                saving = way()
                free = time.perf_counter() - began
                if "async" in name and turn == 2:
                    say(f"{name:24} 20 steps during the save {steps.run():6.3f} s", flush=True)
                if "async" in name:
                    saving.result()
            except Exception as error:
                say(f"{name:24} {type(error).__name__}: {error!s:.150}", flush=True)
                break
            whole = time.perf_counter() - began
            cpu, rate = time.process_time() - cpu, total / 1e9 / whole
            if turn == 2:
                break
            say(f"{name:24} returns after {free:6.2f} s, complete after {whole:6.2f} s ({rate:5.1f} GB/s), processor {cpu:6.1f} s", flush=True)
        if name in ("overwire async", "torch save, 16 threads"):
            took = min(
                compare(state, CheckpointReader(at) if name[0] == "o" else dcp.FileSystemReader(at)) for _ in range(2)
            )
            say(f"{name.split()[0] + ' load':24} {took:6.2f} s ({total / 1e9 / took:5.1f} GB/s), compared", flush=True)
            barrier()
    if RANKS > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    rank = 0
    for other in range(1, RANKS):
        if not os.fork():
            rank = other
            break
    # Ends the process if it hangs.
    watch = threading.Timer(float(os.environ.get("LIMIT", "600")), lambda: os._exit(3))
    watch.daemon = True
    watch.start()
    if RANKS > 1:
        torch.cuda.set_device(rank)
        store = dist.FileStore(str(FOLDER / "store"), RANKS)
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=RANKS, store=store)
    run(rank)
    sys.stdout.flush()
    os._exit(0)

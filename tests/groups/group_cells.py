"""A step of group_worker.py that calls every group function on every kind of source, for whole tensors and slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import overwire as ow
import torch
import torch.distributed as dist
from group_counts import counted

Tensors = dict[str, torch.Tensor]

SHARD = {"rows": 0, "uneven": 0, "columns": 1, "deep": 2, "few": 0}
NAMES = ("whole", "rows", "uneven", "columns", "deep", "few", "scalar", "empty", "flags", "small.0")


def load_file(source: Any, shard: dict[str, int], device: str, _: Tensors) -> Tensors:
    return ow.load_file(source, device, group=dist.group.WORLD, shard=shard, keys=list(NAMES))


def stream(source: Any, shard: dict[str, int], device: str, _: Tensors) -> Tensors:
    return dict(ow.stream(source, device, group=dist.group.WORLD, shard=shard, keys=list(NAMES)))


def stream_windows(source: Any, shard: dict[str, int], device: str, _: Tensors) -> Tensors:
    return dict(ow.stream(source, device, group=dist.group.WORLD, shard=shard, keys=list(NAMES), max_memory="6MB"))


def load_model(source: Any, shard: dict[str, int], device: str, want: Tensors) -> Tensors:
    module = torch.nn.Module()
    parts: dict[str, Any] = {}
    for name, tensor in want.items():
        owner, _, last = name.rpartition(".")
        part = module if not owner else parts.setdefault(owner, torch.nn.Module())
        part.register_buffer(last, torch.zeros_like(tensor, device=device))
    for owner, part in parts.items():
        module.add_module(owner, part)
    ow.load_model(module, source, strict=False, group=dist.group.WORLD, shard=shard)
    return {name: tensor for name, tensor in module.state_dict().items() if name in want}


VERBS: tuple[Callable[..., Tensors], ...] = (load_file, stream, stream_windows, load_model)


@contextmanager
def sources(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields sources by kind: local files, the same files in a store, and models that are pinned in each rank's
    memory."""
    with ExitStack() as stack:
        out: dict[str, Any] = {}
        for coding in ("plain", "compressed"):
            path = folder / f"{coding}.safetensors"
            url = [stack.enter_context(counted(path, [])) if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(url)
            pinned = stack.enter_context(ow.pin(path))
            out |= {f"{coding} file": path, f"{coding} store": url[0], f"{coding} pinned": pinned}
        yield out
        dist.barrier()  # rank 0's `with` block stops the servers


def cells(folder: Path, device: str, expected: Callable[..., Tensors], use: Callable[[str], None]) -> None:
    """With each transport, each function gives the same tensors as loading and slicing on one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with sources(folder) as every:
        for shard in ({}, SHARD):
            full = expected(folder / "plain.safetensors", shard, rank, size)
            want = {name: full[name] for name in NAMES}
            for exchange in ("mapped", "collective", "none"):
                use(exchange)
                for kind, source in every.items():
                    for verb in VERBS if exchange != "none" else VERBS[:1]:
                        tensors = verb(source, shard, device, want)
                        assert tensors.keys() == want.keys(), (verb.__name__, kind, exchange, list(tensors))
                        for name, tensor in want.items():
                            mine = tensors[name].cpu()
                            good = mine.shape == tensor.shape and mine.dtype == tensor.dtype
                            assert good and torch.equal(mine, tensor), (verb.__name__, kind, exchange, name)

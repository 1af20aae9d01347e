"""Runs a rank of tests/peers/test_fastsafetensors_release.py, which shares F4 tensors through the real package and
through overwire's. The arguments are a folder, the rank, and the number of ranks."""

from __future__ import annotations

import datetime
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def raw(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape), tensor.contiguous().view(torch.uint8).flatten().tolist()]


def share(package: Any, paths: list[str]) -> list[Any]:
    """Returns what each collective function of the package returns for the file's tensors."""
    kinds = importlib.import_module(f"{package.__name__}.st_types")
    loader = package.SafeTensorsFileLoader(dist.group.WORLD, "cpu", nogds=True)
    loader.add_filenames(dict(enumerate([path] for path in paths)))
    buffer = loader.copy_files_to_device()
    buffer.auto_mem_delete = False
    op = loader.framework
    seen: list[Any] = [[loader.get_shape(name) for name in ("f4_a", "f4_b")]]
    for name in ("f4_a", "f4_b", "e8m0"):
        wrapped = buffer.get_tensor_wrapped(name)
        seen += [
            raw(wrapped.get_raw()), wrapped.get_shape(), wrapped.get_nbytes(),
            op.is_equal(wrapped, wrapped.get_raw().clone()),
        ]
        seen += [raw(buffer.get_sharded(name, dim)) for dim in (0, 1)]
        pushed = buffer.push_tensor(name, 1)
        seen.append(None if pushed is None else raw(pushed))
    seen += [raw(one.get_raw()) for one in buffer.as_dict({"f4_a": 1, "f4_b": -1}).values()]
    seen += [raw(buffer.get_multi_cols(["f4_a", "f4_b"], dim).get_raw()) for dim in (0, 1)]
    empty = op.get_empty_tensor([8, 32], kinds.DType.F4, kinds.Device())
    seen += [
        list(empty.get_raw().shape), empty.get_shape(),
        op.get_native_slices(kinds.DType.F4, [8, 32], (slice(None), slice(4, 8))),
    ]
    buffer.close()
    loader.close()
    return seen


def main() -> None:
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store, timeout=datetime.timedelta(seconds=60))
    ours = importlib.import_module("overwire.compat.fastsafetensors")
    paths = [str(folder / "a.safetensors"), str(folder / "b.safetensors")]
    seen = [share(package, paths) for package in (importlib.import_module("fastsafetensors"), ours)]
    assert seen[0] == seen[1]
    # A block with an odd number of F4 elements raises an error on every rank. This is only tested with overwire's
    # package, because with the real one the other ranks hang.
    loader = ours.SafeTensorsFileLoader(dist.group.WORLD, "cpu", nogds=True)
    loader.add_filenames({0: [str(folder / "odd.safetensors")]})
    buffer = loader.copy_files_to_device()
    buffer.auto_mem_delete = False
    try:
        buffer.get_sharded("odd", 1)
    except ValueError as error:
        assert "come in pairs" in str(error), error
    else:
        raise AssertionError("a pair of elements was split")
    assert list(buffer.get_sharded("odd", 0).shape) == [2, 5] and list(buffer.get_tensor("odd").shape) == [2 * ranks, 5]
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)
    os._exit(0)  # C++ threads of gloo or of the real package may abort the process in a normal exit


if __name__ == "__main__":
    main()

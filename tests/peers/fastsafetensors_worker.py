"""Runs one of the two ranks of tests/peers/test_fastsafetensors.py. The arguments are a folder and the rank."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import fastsafetensors as fst
import torch
import torch.distributed as dist
from fastsafetensors.st_types import DType

assert "overwire" in fst.__version__, fst.__version__


def blocks(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    block = -(-tensor.shape[dim] // ranks)
    lo, hi = min(rank * block, tensor.shape[dim]), min((rank + 1) * block, tensor.shape[dim])
    return tensor.narrow(dim, lo, hi - lo)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape)
    assert torch.equal(got.contiguous().reshape(-1).view(torch.uint8), want.contiguous().reshape(-1).view(torch.uint8))


def whole(folder: Path) -> dict[str, torch.Tensor]:
    import overwire

    return {**overwire.load_file(folder / "a.safetensors"), **overwire.load_file(folder / "b.safetensors")}


def sharing(folder: Path, group: dist.ProcessGroup, files: dict[int, list[str]]) -> None:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    want = whole(folder)
    loader = fst.SafeTensorsFileLoader(group, torch.device("cpu"), nogds=True)
    loader.add_filenames(files)
    assert loader.get_keys() and loader.get_shape("b0") == [17, 9]
    fb = loader.copy_files_to_device()
    fb.auto_mem_delete = False
    for name in fb.key_to_rank_lidx:
        same(fb.get_tensor(name), want[name])
    same(fb.get_sharded("b0", 0), blocks(want["b0"], 0, rank, ranks))
    same(fb.get_sharded("b0", 1), blocks(want["b0"], 1, rank, ranks))
    same(fb.get_sharded("b.fp8", 1), blocks(want["b.fp8"].view(torch.uint8), 1, rank, ranks).contiguous().view(torch.float8_e4m3fn))
    same(fb.get_sharded("few", 0), blocks(want["few"], 0, rank, ranks))
    same(fb.get_tensor("b0", dtype=DType.F64), want["b0"].double())
    got = fb.get_multi_cols(["a0", "a1", "b1"], 0).get_raw()
    same(got, torch.cat([blocks(want[n], 0, rank, ranks) for n in ("a0", "a1", "b1")]))
    both = fb.as_dict({"a0": 1, "b1": -1})
    same(both["a0"].get_raw(), blocks(want["a0"], 1, rank, ranks))
    same(both["b1"].get_raw(), want["b1"])
    pushed = [fb.push_tensor("b0", dst) for dst in range(ranks)]
    assert [tensor is not None for tensor in pushed] == [at == rank for at in range(ranks)]
    same(pushed[rank], want["b0"])
    fb.close()
    same(pushed[rank], want["b0"])

    # Each file is released when all of its tensors have been taken.
    fb = loader.copy_files_to_device()
    assert fb.auto_mem_delete == (ranks > 1)
    owner, _ = fb.key_to_rank_lidx["a0"]
    first = fb.rank_loaders[owner][0]
    assert (first.gbuf is not None) == (owner == rank)
    for name in ("a0", "a1", "few"):
        fb.get_tensor(name)
    assert (first.gbuf is None) == (ranks > 1)
    fb.close()
    assert fb.framework.get_mem_used() == 0
    loader.close()

    paths = [path for one in files.values() for path in one]
    for queue_size in (-1, 0, 1):
        loads = fst.ParallelLoader(group, paths, queue_size=queue_size, use_tqdm_on_load=False)
        got = dict(loads.iterate_weights())
        loads.close()
        assert set(got) == set(want)
        for name, tensor in got.items():
            same(tensor, want[name])


def failing(folder: Path) -> None:
    """A damaged file on rank 1 raises an error on both ranks, and the group can still be used."""
    bad = [str(folder / "a.safetensors"), str(folder / "damaged.safetensors")]
    loader = fst.SafeTensorsFileLoader(dist.group.WORLD, "cpu", nogds=True)
    loader.add_filenames({0: bad[:1], 1: bad[1:]})
    pipeline = fst.ParallelLoader(dist.group.WORLD, bad, use_tqdm_on_load=False)
    for attempt in (loader.copy_files_to_device, lambda: list(pipeline.iterate_weights())):
        try:
            attempt()
        except ValueError as error:
            assert "damaged.safetensors" in str(error), error
            assert dist.get_rank() == 1 or "on rank 1" in str(error), error
        else:
            raise AssertionError("the damage was not reported")
    assert loader.framework.get_mem_used() == 0


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", rank=int(sys.argv[2]), world_size=2, store=store, timeout=datetime.timedelta(seconds=60))
    a, b = str(folder / "a.safetensors"), str(folder / "b.safetensors")
    sharing(folder, dist.group.WORLD, {0: [a], 1: [b]})
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]  # this rank's number in the group is 0
    sharing(folder, alone, {0: [a, b]})
    failing(folder)
    dist.barrier()
    dist.destroy_process_group()
    print("done")

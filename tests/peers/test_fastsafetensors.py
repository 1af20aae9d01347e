"""Tests that fastsafetensors' own examples run unchanged with the drop-in, and what the drop-in adds or corrects.

test_fastsafetensors_parity.py compares results with the real package. test_fastsafetensors_plugins.py tests plug-ins.
"""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import warm
from conftest import ROOT, cleaned, every_dtype
from fastsafetensors_plain import load, plain, two_files

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
import overwire.compat.fastsafetensors as fst  # noqa: E402
from overwire.compat.fastsafetensors import saver  # noqa: E402
from overwire.compat.fastsafetensors.frameworks import get_framework_op  # noqa: E402
from overwire.compat.fastsafetensors.saver import ShardSetError, validate_shard_set  # noqa: E402
from overwire.compat.fastsafetensors.st_types import DType  # noqa: E402

SINGLE = '''\
import torch
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
loader = SafeTensorsFileLoader(SingleGroup(), device, nogds=True, debug_log=True)
loader.add_filenames({0: ["a.safetensors", "b.safetensors"]}) # {rank: files}
fb = loader.copy_files_to_device()
tensor_a0 = fb.get_tensor(tensor_name="a0")
print(f"a0: {tensor_a0}")
loader.close()
'''

PARALLEL = '''\
import torch
import torch.distributed as dist
from fastsafetensors import SafeTensorsFileLoader
dist.init_process_group(backend="gloo")
dist.barrier()
pg = dist.group.WORLD
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
loader = SafeTensorsFileLoader(pg, device, nogds=True, debug_log=True)
loader.add_filenames({0: ["a.safetensors"], 1:["b.safetensors"]}) # {rank: files}
fb = loader.copy_files_to_device()
tensor_a0 = fb.get_tensor(tensor_name="a0") # broadcast
tensor_b0_sharded = fb.get_sharded(tensor_name="b0", dim=1) # partition and scatter
print(f"RANK {pg.rank()}: tensor_a0={tensor_a0}")
print(f"RANK {pg.rank()}: tensor_b0_sharded={tensor_b0_sharded}")
loader.close()
'''


def rows(columns: int) -> Any:
    return torch.arange(16).repeat_interleave(columns).reshape(16, columns).half()


def run(folder: Path, *argv: str, start: Any = warm.run) -> str:
    """Runs a program in `folder` that imports the drop-in under the name fastsafetensors."""
    clean = cleaned("FASTSAFETENSORS_")
    paths = [ow.compat.path("fastsafetensors"), *filter(None, [os.environ.get("PYTHONPATH")])]
    clean |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = start(argv, cwd=folder, env=clean, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(folder: Path, *argv: str) -> str:
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"]
    return run(folder, *launch, *argv, start=warm.fresh)


def both_ranks(folder: Path, *argv: str) -> None:
    """Runs a program as two ranks, without the launcher, which would also import torch. `warm.run` cannot do this: it
    runs one program at a time, but the ranks wait for each other."""
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda rank: run(folder, *argv, str(rank), start=warm.fresh), range(2)))
    assert said == ["done\n"] * 2


def test_the_single_example_runs_unchanged(tmp_path: Path) -> None:
    ow.save_file({"a0": rows(8)}, tmp_path / "a.safetensors", compress=False)
    ow.save_file({"b0": rows(8)}, tmp_path / "b.safetensors")
    (tmp_path / "run_single.py").write_text(SINGLE)
    assert run(tmp_path, "run_single.py") == f"a0: {rows(8)}\n"


@pytest.mark.slow
def test_the_parallel_example_runs_unchanged(tmp_path: Path) -> None:
    ow.save_file({"a0": rows(8)}, tmp_path / "a.safetensors", compress=False)
    ow.save_file({"b0": rows(8)}, tmp_path / "b.safetensors")
    (tmp_path / "run_parallel.py").write_text(PARALLEL)
    said = torchrun(tmp_path, "run_parallel.py")
    for rank in range(2):
        assert f"RANK {rank}: tensor_a0={rows(8)}" in said
        assert f"RANK {rank}: tensor_b0_sharded={rows(4)}" in said


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_parallel_example_over_nccl(tmp_path: Path) -> None:
    ow.save_file({"a0": rows(8)}, tmp_path / "a.safetensors", compress=False)
    ow.save_file({"b0": rows(8)}, tmp_path / "b.safetensors")
    program = PARALLEL.replace('"gloo"', '"nccl"').replace('"cuda:0"', 'f"cuda:{dist.get_rank()}"')
    program = program.replace("dist.barrier()", "torch.cuda.set_device(dist.get_rank())\ndist.barrier()")
    (tmp_path / "run_parallel.py").write_text(program)
    said = torchrun(tmp_path, "run_parallel.py")
    for rank in range(2):
        assert f"RANK {rank}: tensor_a0={rows(8).to(f'cuda:{rank}')}" in said
        assert f"RANK {rank}: tensor_b0_sharded={rows(4).to(f'cuda:{rank}')}" in said


@pytest.mark.slow
@pytest.mark.imports_torch
def test_ranks_share_their_tensors(tmp_path: Path) -> None:
    """Ranks share their tensors through get_tensor, get_sharded (uneven), get_multi_cols, as_dict, pushes, pipelines
    and a subgroup, and after a load of a file that is damaged on one rank. The cases are in
    fastsafetensors_worker.py."""
    torch.manual_seed(5)
    a = {"a0": torch.randn(10, 12), "a1": torch.randn(7, 12), "few": torch.arange(1)}
    fp8 = torch.randint(0, 255, (6, 5), dtype=torch.uint8).view(torch.float8_e4m3fn)
    b = {"b0": torch.randn(17, 9).bfloat16(), "b1": torch.randn(4, 12), "b.fp8": fp8, "u16": torch.arange(9).to(torch.uint16)}
    ow.save_file(a, tmp_path / "a.safetensors", compress=False)
    ow.save_file(b, tmp_path / "b.safetensors")
    ow.save_file({"big": torch.randn(5000).bfloat16()}, tmp_path / "damaged.safetensors")
    damaged = bytearray((tmp_path / "damaged.safetensors").read_bytes())
    damaged[-2000] ^= 1
    (tmp_path / "damaged.safetensors").write_bytes(damaged)
    with pytest.raises(ow.CorruptError):
        ow.verify(tmp_path / "damaged.safetensors")
    both_ranks(tmp_path, str(ROOT / "tests" / "peers" / "fastsafetensors_worker.py"), str(tmp_path))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return two_files(tmp_path)


# Additions of the drop-in.


@pytest.mark.parametrize("nogds", [True, False])
def test_plain_and_compressed_files_of_every_dtype(files: list[str], nogds: bool) -> None:
    want = {**ow.load_file(files[0]), **ow.load_file(files[1])}
    loader, buffer = load(files, nogds=nogds)
    assert set(loader.get_keys()) == set(want)
    assert loader.meta[files[0]][0].metadata == {"made": "here"}
    assert all(loader.get_shape(name) == list(tensor.shape) for name, tensor in want.items() if "F4" not in name)
    for name, tensor in want.items():
        assert plain(buffer.get_tensor(name)) == plain(tensor), name
    buffer.close()
    loader.close()


def test_tensors_outlive_their_buffer_and_loader(files: list[str]) -> None:
    gc.collect()
    count, nbytes = fst.live_allocation_count(), fst.live_allocation_bytes()
    loader, buffer = load(files)
    used = buffer.framework.get_mem_used()
    assert used == sum(t.numel() * t.element_size() for path in files for t in ow.load_file(path).values())
    kept = buffer.get_tensor("c.w")
    want = ow.load_file(files[1])["c.w"]
    buffer.close()
    loader.close()
    for path in files:
        os.unlink(path)
    del buffer, loader
    gc.collect()
    assert torch.equal(kept, want)
    assert get_framework_op("pt").get_mem_used() == 0, "closed buffers use no budget, even while tensors live"
    assert fst.live_allocation_count() == count + 1
    assert fst.live_allocation_bytes() == nbytes + kept.untyped_storage().nbytes()
    del kept
    gc.collect()
    assert (fst.live_allocation_count(), fst.live_allocation_bytes()) == (count, nbytes)


def test_a_closed_buffer_raises_an_error(files: list[str]) -> None:
    _, buffer = load(files)
    buffer.close()
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        buffer.get_tensor("U8")
    with pytest.raises(ValueError, match="nothing was not found"):
        buffer.get_tensor("nothing")


def test_narrower_and_wider_types(files: list[str]) -> None:
    """dtype= casts floats to a narrower or wider type, except packed types."""
    loader = fst.SafeTensorsFileLoader(None, "cpu")
    loader.add_filenames({0: files})
    for kind, want in ((DType.F64, torch.float64), (DType.F16, torch.float16)):
        buffer = loader.copy_files_to_device(dtype=kind)
        assert torch.equal(buffer.get_tensor("c.w"), ow.load_file(files[1])["c.w"].to(want))
        assert buffer.get_tensor("F32").dtype == buffer.get_tensor("F8_E4M3").dtype == want
        assert buffer.get_tensor("F4").dtype == torch.float4_e2m1fn_x2, "packed types are not cast"
        buffer.close()


def test_damage_raises_and_leaks_nothing(files: list[str]) -> None:
    damaged = bytearray(Path(files[1]).read_bytes())
    damaged[-1000] ^= 1
    Path(files[1]).write_bytes(damaged)
    with pytest.raises(ow.CorruptError) as caught:
        load(files)
    assert caught.value.source == files[1] and caught.value.tensor
    Path(files[0]).write_bytes(Path(files[0]).read_bytes()[:-1])
    with pytest.raises(ValueError, match="MetadataIncompleteBuffer"):
        load(files[:1])
    gc.collect()
    assert get_framework_op("pt").get_mem_used() == 0
    with pytest.raises(ow.CorruptError):
        list(fst.ParallelLoader(None, files[1:], use_tqdm_on_load=False).iterate_weights())
    assert get_framework_op("pt").get_mem_used() == 0


def test_pipelines_keep_the_requested_number_of_batches(tmp_path: Path) -> None:
    paths = []
    for at in range(6):
        paths.append(str(tmp_path / f"{at}.safetensors"))
        ow.save_file({f"t{at}.{i}": torch.full((1000,), float(at * 10 + i)) for i in range(4)}, paths[-1], compress=False)
    used = get_framework_op("pt").get_mem_used
    for queue_size, most in ((-1, 1), (0, 2), (2, 4)):
        loader = fst.ParallelLoader(fst.SingleGroup(), paths, queue_size=queue_size, use_tqdm_on_load=False)
        assert loader.log_prefix == "PG0" and loader.weight_files_batches == [[path] for path in paths]
        seen = {}
        for name, tensor in loader.iterate_weights():
            assert used() <= most * 16000
            seen[name] = tensor
        assert all(
            torch.equal(tensor, torch.full((1000,), float(name[1]) * 10 + float(name[3])))
            for name, tensor in seen.items()
        )
        assert len(seen) == 24 and used() == 0
        loader.close()
    # The batches are smaller than a file, and there are a filter and a budget.
    loader = fst.ParallelLoader(
        None, paths, use_tqdm_on_load=False, max_batch_bytes=8000, queue_size=-1,
        tensor_filter=lambda n: not n.endswith("3")
    )  # fmt: skip
    names = []
    for name, _ in loader.iterate_weights():
        assert used() <= 8000
        names.append(name)
    assert sorted(names) == sorted(f"t{at}.{i}" for at in range(6) for i in range(3))
    loader = fst.ParallelLoader(
        None, paths, use_tqdm_on_load=False, device_memory_budget=9000, queue_size=3, accumulate_resident=False
    )
    for _ in loader.iterate_weights():
        assert used() <= 9000
    with pytest.raises(fst.BudgetInfeasibleError, match="3000.*4000"):
        fst.ParallelLoader(None, paths, device_memory_budget=3000)
    with pytest.raises(fst.BudgetInfeasibleError):
        fst.ParallelLoader(None, paths, device_memory_budget=90000)  # yielded tensors stay allocated and count
    with pytest.raises(ValueError, match="resident_tensor"):
        fst.ParallelLoader(None, paths, device_memory_budget=90000, accumulate_resident=False, resident_tensor=bool)
    loader = fst.ParallelLoader(
        None, paths, device_memory_budget=28000, resident_tensor=lambda n: n.startswith("t0"), use_tqdm_on_load=False
    )  # fmt: skip
    assert len([used() <= 12000 or pytest.fail("over") for _ in loader.iterate_weights()]) == 24
    # After leaving the loop early, the thread ends and all memory is freed.
    loader = fst.ParallelLoader(None, paths, use_tqdm_on_load=False)
    weights = loader.iterate_weights()
    next(weights)
    weights.close()
    loader.close()
    assert used() == 0 and list(loader.iterate_weights()) == []


def test_expert_filters_drop_only_other_experts(tmp_path: Path) -> None:
    shared = ["model.norm.weight", "layers.0.mlp.gate.weight", "layers.0.shared_experts.up.weight", "layers.0.experts.scales"]
    kinds, small = ["weight", "weight_packed", "qweight"], ["weight_scale", "scales", "g_idx", "qzeros"]
    path = str(tmp_path / "moe.safetensors")
    tensors = {name: torch.zeros(3) for name in shared}
    for expert in range(10):
        tensors |= {f"layers.0.mlp.experts.{expert}.up.{kind}": torch.full((3,), float(expert)) for kind in kinds + small}
        shared += [f"layers.0.mlp.experts.{expert}.up.{kind}" for kind in small]
    ow.save_file(tensors, path)
    seen: list[str] = []
    for rank in range(4):
        keep = fst.expert_parallel_filter(10, 4, rank)
        loader = fst.SafeTensorsFileLoader(None, "cpu")
        loader.set_tensor_filter(keep)
        loader.add_filenames({0: [path]})
        buffer = loader.copy_files_to_device()
        names = list(buffer.key_to_rank_lidx)
        assert sorted(loader.get_keys()) == sorted(names)
        assert set(shared) <= set(names)
        first, end = fst.owned_expert_range(10, 4, rank)
        mine = set(names) - set(shared)
        assert mine == {f"layers.0.mlp.experts.{e}.up.{kind}" for e in range(first, end) for kind in kinds}
        assert get_framework_op("pt").get_mem_used() == 12 * len(names), "only tensors that pass the filter are read"
        buffer.close()
        seen += mine
    assert len(seen) == len(set(seen)) == 30
    with pytest.raises(ValueError, match="out of range"):
        fst.owned_expert_range(8, 2, 5)


def test_expert_filter_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables choose a rank's experts. A value that is not a number is refused by name."""
    monkeypatch.delenv("FASTSAFETENSORS_EP_SLICE", raising=False)
    assert fst.expert_parallel_filter_from_env() is None
    for name, value in (("SLICE", "1"), ("NUM_EXPERTS", "4"), ("SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(f"FASTSAFETENSORS_EP_{name}", value)
    keep = fst.expert_parallel_filter_from_env()
    assert keep is not None and [keep(f"a.experts.{e}.weight") for e in range(4)] == [False, False, True, True]
    monkeypatch.setenv("FASTSAFETENSORS_EP_RANK", "one")
    with pytest.raises(ValueError, match="FASTSAFETENSORS_EP_RANK"):
        fst.expert_parallel_filter_from_env()


def test_the_saver_writes_a_valid_shard_set(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randn(100 + i, 7) for i in range(9)}
    for compress in (False, True):
        saver = fst.ParallelSaver(num_shards=3, compress=compress)
        paths = saver.save(tensors, str(tmp_path / f"m{compress}"), metadata={"k": "v"}, shard0_metadata={"z": "0"})
        assert [os.path.basename(path) for path in paths] == [f"m{compress}-0000{at}-of-00003.safetensors" for at in (1, 2, 3)]
        loaded = ow.load_file(paths)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items()) and len(loaded) == 9
        metas = [fst.SafeTensorsMetadata.from_file(path, get_framework_op("pt")) for path in paths]
        validate_shard_set(metas)
        assert metas[0].metadata["z"] == "0" and metas[1].metadata["k"] == "v" and "z" not in metas[1].metadata
        sizes = [meta.data_length for meta in metas]
        assert max(sizes) - min(sizes) <= 108 * 7 * 4
        for wrong in (metas[:2], metas[:2] + metas[1:2], []):
            with pytest.raises(ShardSetError):
                validate_shard_set(wrong)
    other = fst.ParallelSaver(num_shards=3).save(tensors, str(tmp_path / "other"))
    with pytest.raises(ShardSetError, match="belong to 2 saves"):
        validate_shard_set(metas[:2] + [fst.SafeTensorsMetadata.from_file(other[2], get_framework_op("pt"))])
    with pytest.raises(OSError, match="must stay free"):
        fst.ParallelSaver(num_shards=1, min_free_bytes=1 << 60).save(tensors, str(tmp_path / "full"))
    assert not list(tmp_path.glob("full*"))


def test_entries_are_filled_by_the_caller(tmp_path: Path) -> None:
    """save_entries accepts sources of any kind and dtype, and a single fill function for all of them."""
    tensors = every_dtype() | {"none": torch.empty(0, 3), "w": torch.randn(300, 40)}
    entries = [saver.plain_entry(name, tensor) for name, tensor in tensors.items()]
    one = fst.ParallelSaver(num_shards=2, shard_metadata=lambda shard: {"first": shard[0].name})
    assert plain(ow.load_file(one.save_entries(entries, str(tmp_path / "a"), header_align=64))) == plain(tensors)
    order: list[int] = []

    def fill(buffer: memoryview, entry: saver.WriteEntry) -> None:
        order.append(entry.nbytes)
        buffer[:] = bytes(tensors[entry.source].reshape(-1).view(torch.uint8).numpy()) if entry.nbytes else b""

    named = [saver.WriteEntry(e.name, e.dtype, e.shape, e.nbytes, e.name) for e in entries]
    for compress in (False, True):
        two = fst.ParallelSaver(num_shards=2, fill=saver.per_entry_fill(fill, 1), compress=compress)
        paths = two.save_entries(named, str(tmp_path / f"b{compress}"))
        assert plain(ow.load_file(paths)) == plain(tensors) and order == sorted(order, reverse=True)
        order.clear()
    meta = fst.SafeTensorsMetadata.from_file(str(tmp_path / "a-00001-of-00002.safetensors"), get_framework_op("pt"))
    assert meta.metadata["first"] in meta.tensors and meta.header_length % 64 == 0

    def breaks(work: Any) -> None:
        raise KeyError("the source is gone")

    for kind, call in (
        (KeyError, lambda: fst.ParallelSaver(fill=breaks).save_entries(named, str(tmp_path / "c"))),
        (ValueError, lambda: one.save_entries([entries[0], entries[0]], str(tmp_path / "c"))),
        (ValueError, lambda: one.save_entries([saver.WriteEntry("x", DType.F32, [3], 11)], str(tmp_path / "c"))),
        (ValueError, lambda: fst.ParallelSaver(compress=True).save(tensors, str(tmp_path / "c"), header_align=4096)),
        (
            ValueError,
            lambda: fst.ParallelSaver(shard_metadata=lambda _: {saver.KEY_SHARD_SET: "x"}).save(
                tensors, str(tmp_path / "c")
            ),
        ),
    ):
        with pytest.raises(kind):
            call()
    assert not list(tmp_path.glob("c*")), "refused saves write nothing"

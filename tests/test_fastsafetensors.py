"""fastsafetensors' names: its own examples run unchanged, plug-ins plug in, and
what it gets wrong is right. test_fastsafetensors_parity.py compares answers."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, every_dtype
from fastsafetensors_plain import plain

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
import overwire.compat.fastsafetensors as fst  # noqa: E402
from overwire.compat.fastsafetensors import config, copier, cpp, dlpack, saver, threefs_loader  # noqa: E402
from overwire.compat.fastsafetensors.copier.base import CopierInterface  # noqa: E402
from overwire.compat.fastsafetensors.frameworks import get_framework_op  # noqa: E402
from overwire.compat.fastsafetensors.saver import ShardSetError, validate_shard_set  # noqa: E402
from overwire.compat.fastsafetensors.st_types import Device, DType  # noqa: E402

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


def run(folder: Path, *argv: str) -> str:
    """A program in `folder`, which finds ours under fastsafetensors' own name."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OVERWIRE_", "PRELOAD", "FASTSAFETENSORS_"))}
    paths = [ow.compat.path("fastsafetensors"), *filter(None, [os.environ.get("PYTHONPATH")])]
    clean |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *argv], cwd=folder, env=clean, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def torchrun(folder: Path, *argv: str) -> str:
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"]
    return run(folder, *launch, *argv)


def both_ranks(folder: Path, *argv: str) -> None:
    """The same without the launcher, which imports torch once more."""
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda rank: run(folder, *argv, str(rank)), range(2)))
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


@pytest.mark.slow
def test_ranks_share_what_they_loaded(tmp_path: Path) -> None:
    """get_tensor, get_sharded (uneven), push, multi_cols, as_dict, pipelines, a
    subgroup, and damage on one rank: see fastsafetensors_worker.py."""
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
    both_ranks(tmp_path, str(ROOT / "tests" / "fastsafetensors_worker.py"), str(tmp_path))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    tensors = every_dtype()
    plain, compressed = str(tmp_path / "plain.safetensors"), str(tmp_path / "compressed.safetensors")
    ow.save_file(tensors, plain, {"made": "here"}, compress=False)
    ow.save_file({f"c.{name}": tensor for name, tensor in tensors.items()} | {"c.w": torch.randn(300, 300).bfloat16()}, compressed)
    return [plain, compressed]


# What is ours.


def load(paths: list[str], **named: Any) -> tuple[Any, Any]:
    loader = fst.SafeTensorsFileLoader(fst.SingleGroup(), torch.device("cpu"), **named)
    loader.add_filenames({0: paths})
    return loader, loader.copy_files_to_device()


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


def test_tensors_outlive_everything(files: list[str]) -> None:
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
    assert get_framework_op("pt").get_mem_used() == 0, "closed buffers lease nothing, whoever holds tensors"
    assert fst.live_allocation_count() == count + 1
    assert fst.live_allocation_bytes() == nbytes + kept.untyped_storage().nbytes()
    del kept
    gc.collect()
    assert (fst.live_allocation_count(), fst.live_allocation_bytes()) == (count, nbytes)


def test_a_closed_buffer_says_so(files: list[str]) -> None:
    _, buffer = load(files)
    buffer.close()
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        buffer.get_tensor("U8")
    with pytest.raises(ValueError, match="nothing was not found"):
        buffer.get_tensor("nothing")


def test_narrower_and_wider_types(files: list[str]) -> None:
    loader = fst.SafeTensorsFileLoader(None, "cpu")
    loader.add_filenames({0: files})
    for kind, want in ((DType.F64, torch.float64), (DType.F16, torch.float16)):
        buffer = loader.copy_files_to_device(dtype=kind)
        assert torch.equal(buffer.get_tensor("c.w"), ow.load_file(files[1])["c.w"].to(want))
        assert buffer.get_tensor("F32").dtype == buffer.get_tensor("F8_E4M3").dtype == want
        assert buffer.get_tensor("F4").dtype == torch.float4_e2m1fn_x2, "packed types are parts of a scheme"
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


def test_pipelines_hold_as_few_batches_as_was_said(tmp_path: Path) -> None:
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
        assert all(torch.equal(tensor, torch.full((1000,), float(name[1]) * 10 + float(name[3]))) for name, tensor in seen.items())
        assert len(seen) == 24 and used() == 0
        loader.close()
    # Sub-file batches, a filter, a budget.
    loader = fst.ParallelLoader(
        None, paths, use_tqdm_on_load=False, max_batch_bytes=8000, queue_size=-1, tensor_filter=lambda n: not n.endswith("3")
    )  # fmt: skip
    names = []
    for name, _ in loader.iterate_weights():
        assert used() <= 8000
        names.append(name)
    assert sorted(names) == sorted(f"t{at}.{i}" for at in range(6) for i in range(3))
    loader = fst.ParallelLoader(None, paths, use_tqdm_on_load=False, device_memory_budget=9000, queue_size=3, accumulate_resident=False)
    for _ in loader.iterate_weights():
        assert used() <= 9000
    with pytest.raises(fst.BudgetInfeasibleError, match="3000.*4000"):
        fst.ParallelLoader(None, paths, device_memory_budget=3000)
    with pytest.raises(fst.BudgetInfeasibleError):
        fst.ParallelLoader(None, paths, device_memory_budget=90000)  # what was yielded stays, and counts
    with pytest.raises(ValueError, match="resident_tensor"):
        fst.ParallelLoader(None, paths, device_memory_budget=90000, accumulate_resident=False, resident_tensor=bool)
    loader = fst.ParallelLoader(
        None, paths, device_memory_budget=28000, resident_tensor=lambda n: n.startswith("t0"), use_tqdm_on_load=False
    )  # fmt: skip
    assert len([used() <= 12000 or pytest.fail("over") for _ in loader.iterate_weights()]) == 24
    # Leaving early ends the thread and lets go.
    loader = fst.ParallelLoader(None, paths, use_tqdm_on_load=False)
    weights = loader.iterate_weights()
    next(weights)
    weights.close()
    loader.close()
    assert used() == 0 and list(loader.iterate_weights()) == []


def test_expert_filters_drop_other_experts_alone(tmp_path: Path) -> None:
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
        assert get_framework_op("pt").get_mem_used() == 12 * len(names), "only what is kept is read"
        buffer.close()
        seen += mine
    assert len(seen) == len(set(seen)) == 30
    with pytest.raises(ValueError, match="out of range"):
        fst.owned_expert_range(8, 2, 5)


def test_expert_filter_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTSAFETENSORS_EP_SLICE", raising=False)
    assert fst.expert_parallel_filter_from_env() is None
    for name, value in (("SLICE", "1"), ("NUM_EXPERTS", "4"), ("SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(f"FASTSAFETENSORS_EP_{name}", value)
    keep = fst.expert_parallel_filter_from_env()
    assert keep is not None and [keep(f"a.experts.{e}.weight") for e in range(4)] == [False, False, True, True]
    monkeypatch.setenv("FASTSAFETENSORS_EP_RANK", "one")
    with pytest.raises(ValueError, match="FASTSAFETENSORS_EP_RANK"):
        fst.expert_parallel_filter_from_env()


def test_the_saver_writes_a_set_that_can_be_proved(tmp_path: Path) -> None:
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
    with pytest.raises(ShardSetError, match="another save"):
        validate_shard_set(metas[:2] + [fst.SafeTensorsMetadata.from_file(other[2], get_framework_op("pt"))])
    with pytest.raises(OSError, match="to stay free"):
        fst.ParallelSaver(num_shards=1, min_free_bytes=1 << 60).save(tensors, str(tmp_path / "full"))
    assert not list(tmp_path.glob("full*"))


def test_entries_are_filled_by_the_caller(tmp_path: Path) -> None:
    """save_entries: sources of any kind, every dtype, one fill for all of them."""
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
        (ValueError, lambda: one.save(tensors, str(tmp_path / "c"), header_align=4096)),
        (ValueError, lambda: fst.ParallelSaver(shard_metadata=lambda _: {saver.KEY_SHARD_SET: "x"}).save(tensors, str(tmp_path / "c"))),
    ):
        with pytest.raises(kind):
            call()
    assert not list(tmp_path.glob("c*")), "nothing is written of what is refused"


# Plug-ins.


class Reader:
    """3FS's reader, by its shape alone, over ordinary files."""

    short = 0

    def __init__(self, mount_point: str, entries: int, io_depth: int, buffer_size: int) -> None:
        self.mount_point = mount_point

    def read_chunked(self, path: str, dev_ptr: int, file_offset: int, total_length: int, chunk_size: int) -> int:
        with open(path, "rb") as file:
            file.seek(file_offset)
            data = file.read(total_length - self.short)
        ctypes.memmove(dev_ptr, data, len(data))
        return len(data)


@pytest.fixture
def threefs(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Reader]]:
    module = types.ModuleType("fastsafetensor_3fs_reader")
    module.ThreeFSFileReader = Reader  # type: ignore[attr-defined]
    module.extract_mount_point = lambda path: "/mnt/" + path.split("/")[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastsafetensor_3fs_reader", module)
    monkeypatch.setattr(Reader, "short", 0)
    yield Reader


def test_a_3fs_reader_brings_the_bytes(threefs: type[Reader], files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = ow.load_file(files[0])
    loader = threefs_loader.ThreeFSLoader(None, "cpu", mount_point="/mnt/3fs")
    loader.add_filenames({0: files[:1]})
    buffer = loader.copy_files_to_device()
    used = sum(t.numel() * t.element_size() for t in want.values())
    assert buffer.framework.get_mem_used() == used
    got = {name: buffer.get_tensor(name) for name in want}
    buffer.close()
    assert buffer.framework.get_mem_used() == 0
    gc.collect()
    assert plain(got) == plain(want)
    pipeline = threefs_loader.ParallelThreeFSLoader(None, files[:1], use_tqdm_on_load=False)
    assert plain(dict(pipeline.iterate_weights())) == plain(want)
    pipeline.close()
    threefs_loader.ParallelThreeFSLoader(None, files[:1]).close()
    for blank in (None, "", "  "):
        section = threefs_loader.ThreeFSLoader.process_extension_config({"mount_point": blank}, hf_weights_files=["/x/y"])
        assert section == {"mount_point": "/mnt/x"}
    # By a config file.
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"loader": "3fs", "3fs": {"entries": 8}, "parallel": {"use_pipeline": True, "use_tqdm_on_load": False}}))
    monkeypatch.setenv(config.CONFIG_ENV_VAR, str(settings))
    auto = fst.AutoLoader(None, files[:1])
    assert type(auto._loader) is threefs_loader.ThreeFSLoader and auto.config.use_pipeline
    assert plain(dict(auto.iterate_weights())) == plain(want)
    auto.close()
    # A short read, and a file it cannot read.
    monkeypatch.setattr(Reader, "short", 1)
    with pytest.raises(RuntimeError, match="truncated"):
        loader.copy_files_to_device()
    loader.reset()
    loader.add_filenames({0: files[1:]})
    with pytest.raises(ValueError, match="compressed"):
        loader.copy_files_to_device()
    assert buffer.framework.get_mem_used() == 0


def test_without_the_reader_3fs_fails_when_used(files: list[str]) -> None:
    assert threefs_loader.ThreeFSLoader.process_extension_config({}, hf_weights_files=files) == {}
    with pytest.raises(ModuleNotFoundError):
        threefs_loader.ThreeFSLoader(None, "cpu")


def test_a_copier_of_ones_own(files: list[str]) -> None:
    """Registered by name, reading with cpp's readers to the framework's memory."""

    class Mine(CopierInterface):
        def __init__(self, metadata: Any, device: Device, framework: Any) -> None:
            self.metadata, self.device, self.framework = metadata, device, framework
            self.reader = cpp.nogds_file_reader(False, 1024, 4, False, 0)

        def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
            length = self.metadata.size_bytes - self.metadata.header_length
            gbuf = self.framework.alloc_tensor_memory(length, self.device)
            fd = os.open(self.metadata.src, os.O_RDONLY)
            half = length // 2
            start = self.metadata.header_length
            self.reads = [
                self.reader.submit_read(fd, gbuf, start, half, 0),
                self.reader.submit_read(fd, gbuf, start + half, length - half, half),
            ]
            os.close(fd)  # the reads have their own
            return gbuf

        def wait_io(self, gbuf: Any, dtype: DType = DType.AUTO, noalign: bool = False) -> Any:
            assert [self.reader.wait_read(number) > 0 for number in self.reads]
            return self.metadata.get_tensors(gbuf, self.device, self.metadata.header_length, dtype)

    @copier.register_copier_constructor("mine")
    def new(device: Device, **kwargs: Any) -> Any:
        assert kwargs == {"colour": "blue"}
        return Mine

    from overwire.compat.fastsafetensors.loader import BaseSafeTensorsFileLoader

    loader = BaseSafeTensorsFileLoader(None, "cpu", "mine", colour="blue")
    loader.add_filenames({0: files[:1]})
    buffer = loader.copy_files_to_device()
    got = {name: buffer.get_tensor(name) for name in loader.get_keys()}
    buffer.close()
    loader.close()
    del loader, buffer
    gc.collect()
    assert plain(got) == plain(ow.load_file(files[0]))
    assert cpp.get_cpp_metrics().bounce_buffer_bytes == 0


def test_the_extension_s_names(tmp_path: Path) -> None:
    assert cpp.get_alignment_size() == 4096 and cpp.init_gds() == cpp.close_gds() == cpp.set_numa_node(0) == 0
    cpp.load_library_functions()
    cpp.set_gil_release(True)
    assert cpp.get_gil_release() is True
    cpp.set_gil_release(False)
    if not cpp.is_cuda_found():
        assert cpp.get_device_pci_bus(0) == "" and not cpp.is_cufile_found() and cpp.cufile_version() == 0 == cpp.is_gds_supported(0)
        assert get_framework_op("pt").get_cuda_ver() == "0.0"
        with pytest.raises(RuntimeError, match="100"):
            cpp.memcpy_h2d_async(1, 1, 1)

    class Buffer(cpp.gds_device_buffer):
        def __init__(self) -> None:
            super().__init__(0, 0, False)

    assert Buffer().get_length() == 0
    data = bytes(random.Random(1).randbytes(5000))
    (tmp_path / "data").write_bytes(data)
    address = cpp.cpu_malloc(5000)
    buffer = cpp.gds_device_buffer(address, 5000, False)
    reader = cpp.gds_file_reader(4, False, 0)
    handle = cpp.gds_file_handle(str(tmp_path / "data"), False, False)
    assert reader.wait_read(reader.submit_read(handle, buffer, 100, 4900, 50, 5000)) == address + 50
    assert cpp.read_buffer(address + 50, 4900) == data[100:]
    assert buffer.memmove(0, 50, buffer, 4900) == 0 and cpp.read_buffer(address, 4900) == data[100:]
    assert buffer.memmove(1000, 0, buffer, 4900) == -1 and buffer.cufile_register(0, 0) == buffer.cufile_deregister(0) == 0
    number = reader.submit_read(handle, buffer, 4000, 4000, 0, 5000)
    with pytest.raises(RuntimeError, match="truncated"):
        reader.wait_read(number)
    with pytest.raises(ValueError):
        reader.submit_read(handle, buffer, 0, 5001, 0, 5000)
    with pytest.raises(FileNotFoundError):
        cpp.gds_file_handle(str(tmp_path / "absent"), False, False)
    cpp.cpu_free(address)


def test_a_prefix_of_a_read_can_be_waited_for(tmp_path: Path) -> None:
    """0.5's readiness: the bytes that are there, and an error for those that never come."""
    data = random.Random(3).randbytes(40 << 20)
    (tmp_path / "data").write_bytes(data)
    address = cpp.cpu_malloc(len(data) + 10)
    buffer = cpp.gds_device_buffer(address, len(data) + 10, False)
    reader = cpp.nogds_file_reader(False, 1024, 2, False, 0)
    with open(tmp_path / "data", "rb") as file:
        number = reader.submit_read(file.fileno(), buffer, 0, len(data), 0, track_progress=True)
        for length in (1, 17 << 20, len(data)):
            assert reader.wait_read_prefix(number, length) >= length
            assert cpp.read_buffer(address, length) == data[:length]
        with pytest.raises(ValueError, match="wait_read_prefix"):
            reader.wait_read_prefix(number, len(data) + 1)
        assert reader.wait_read(number) == address
        number = reader.submit_read(file.fileno(), buffer, 0, len(data) + 10, 0, track_progress=True)
        assert reader.wait_read_prefix(number, len(data)) == len(data)
        with pytest.raises(RuntimeError, match="truncated"):
            reader.wait_read_prefix(number, len(data) + 1)
        with pytest.raises(RuntimeError, match="truncated"):
            reader.wait_read(number)
        for wrong in (number, 12345, reader.submit_read(file.fileno(), buffer, 0, 10, 0)):
            with pytest.raises(ValueError, match="no read"):
                reader.wait_read_prefix(wrong, 1)
    del reader  # waits for what runs
    cpp.cpu_free(address)


def test_what_later_versions_added(files: list[str]) -> None:
    loader, buffer = load(files)
    names = list(buffer.key_to_rank_lidx)
    for name, tensor in buffer.iter_local_tensors(iter(names)):
        assert plain(tensor) == plain(buffer.get_tensor(name))
        wrapped = buffer.get_tensor_wrapped(name)
        assert wrapped.get_shape() == loader.get_shape(name) and wrapped.get_nbytes() == tensor.nbytes
    buffer.close()
    loader.set_tensor_filter(keep_tensor=lambda name: name == "U8")
    loader.reset()
    loader.add_filenames({0: files[:1]})
    assert loader.get_keys() == ["U8"]
    with fst.fastsafe_open(files[0], use_fgds=False) as opened:
        assert "U8" in opened.keys()  # noqa: SIM118
    settings = fst.LoaderConfig.from_dict({"parallel": {"max_batch_bytes": 7, "device_memory_budget": 9}})
    assert settings.create_parallel_kwargs() == {"queue_size": -1, "max_batch_bytes": 7, "device_memory_budget": 9}
    assert fst.LoaderConfig().create_parallel_kwargs() == {"queue_size": -1}
    kinds = [copier.registry.get_copier_class(kind) for kind in ("gds", "nogds", "unified", "3fs", "none")]
    assert kinds == [copier.GdsFileCopier, copier.NoGdsFileCopier, copier.UnifiedMemCopier, copier.ThreeFSFileCopier, CopierInterface]


def test_gds_is_asked_for_on_a_gpu_alone(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """nogds=False is read="gds" for a GPU; what that gives stands in test_gpu.py."""
    asked: list[Any] = []
    stream = ow.stream
    monkeypatch.setattr(ow, "stream", lambda *args, read=None, **named: (asked.append(read), stream(*args, **named))[1])
    for nogds in (False, True):
        load(files[:1], nogds=nogds)
    op = get_framework_op("pt")
    meta = fst.SafeTensorsMetadata.from_file(files[0], op)
    for kind, want in ((copier.GdsFileCopier, "gds"), (copier.NoGdsFileCopier, None)):
        assert kind(meta, Device.from_str("cuda:0"), None, op).read == want
    assert asked == [None, None]


def test_the_unified_copier_s_seams(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that shares the host's memory: anonymous pinned memory, one copy by
    cpp's name, one wait by torch's, nothing pinned left. Here they are replaced."""
    from overwire.compat.fastsafetensors import loader as loaders
    from overwire.compat.fastsafetensors.copier import unified

    op, calls = get_framework_op("pt"), []
    alloc = op.alloc_tensor_memory
    monkeypatch.setattr(op, "alloc_tensor_memory", lambda length, device: alloc(length, Device()))
    monkeypatch.setattr(op, "view_of", lambda gbuf, begin, frame, device, view=op.view_of: view(gbuf, begin, frame, Device()))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (calls.append("pin"), tensor)[1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append("wait"))
    monkeypatch.setattr(cpp, "memcpy_h2d_async", lambda to, at, size: (calls.append("copy"), ctypes.memmove(to, at, size))[0])
    meta = fst.SafeTensorsMetadata.from_file(files[0], op)
    one = unified.UnifiedMemCopier(meta, Device.from_str("cuda:0"), op)
    got = one.wait_io(one.submit_io(True, 1 << 30))
    assert calls == ["pin", "copy", "wait"] and one._pinned is None
    assert {name: plain(tensor.get_raw()) for name, tensor in got.items()} == {k: plain(v) for k, v in ow.load_file(files[0]).items()}

    some = op.mmap_file_pinned(files[0], 100, 8)
    assert bytes(some.get_raw().numpy()) == Path(files[0]).read_bytes()[8:108] and some.dtype is DType.U8
    with pytest.raises(RuntimeError, match="truncated"):
        op.mmap_file_pinned(files[0], 100, os.path.getsize(files[0]) - 99)

    def fails(*_: Any) -> None:
        raise RuntimeError("memcpy_h2d_async: CUDA error 700")

    used = op.get_mem_used()
    monkeypatch.setattr(cpp, "memcpy_h2d_async", fails)
    with pytest.raises(RuntimeError, match="700"):
        one.submit_io(True, 1 << 30)
    assert one._pinned is None and op.get_mem_used() == used
    # Who has it: by FASTSAFETENSORS_UNIFIED_MEM, or a GPU's name.
    for text, name, want in (("1", "", True), ("0", "NVIDIA GB10", False), ("", "NVIDIA GB10", True), ("", "NVIDIA H200", False)):
        unified.is_unified_memory_system.cache_clear()
        monkeypatch.setenv("FASTSAFETENSORS_UNIFIED_MEM", text)
        monkeypatch.setattr(cpp, "is_cuda_found", lambda: True)
        monkeypatch.setattr(op, "get_device_name", lambda device, name=name: name)
        assert unified.is_unified_memory_system() is want
    unified.is_unified_memory_system.cache_clear()
    # The loader looks copiers up in its own module.
    kinds: list[str] = []
    monkeypatch.setattr(loaders, "create_copier_constructor", lambda kind, device, **named: kinds.append(kind))
    for nogds in (True, False):
        fst.SafeTensorsFileLoader(None, "cpu", nogds=nogds)
    assert kinds == ["nogds", "gds"]


def test_names_and_words_that_programs_look_at(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from overwire.compat.fastsafetensors import auto_loader, common

    for text, words in (("xpu", "Unknown device type: xpu"), ("cuda:x", "Invalid index: x")):
        with pytest.raises(ValueError, match=words):
            Device.from_str(text)
    with pytest.raises(ValueError, match="Unknown framework name"):
        get_framework_op("jax")
    with pytest.raises(ValueError, match="max_concurrent_producers must be 1"):
        fst.ParallelLoader(None, files, max_concurrent_producers=2)
    with pytest.raises(ValueError, match="HeaderTooSmall"):
        fst.SafeTensorsMetadata.from_buffer(0, 7, "x", get_framework_op("pt"))
    op = get_framework_op("pt")
    assert op.get_storage_shape(DType.F4, [8, 16], [16, 1]) == ([64], [1]) and op.get_device_ptr_align() == 16
    for call in (lambda: op.get_native_shape(DType.F4, [3, 3]), lambda: op.get_native_slices(DType.F4, [2, 4], (slice(0, 2), slice(1, 4)))):
        with pytest.raises(ValueError, match="F4"):
            call()
    frame = fst.TensorFrame.from_buffer({"dtype": DType.F32, "shape": [16, 8], "data_offsets": [0, 512]})
    assert frame[()] == frame and frame[3].shape == [1, 8] and frame[4:4].shape == [] and frame[::-2].strides == [-16, 1]
    assert (frame[2:9].sliced, frame[2:9].offsets, frame.data_offsets) == (True, [2, 0], [0, 512])
    meta = fst.SafeTensorsMetadata.from_file(files[0], op)
    assert meta.size_bytes == os.path.getsize(files[0]) and meta.header_length % 8 == 0 and meta.src == files[0] and meta.aligned
    assert common.resolve_cudart_lib_name is common.resolve_runtime_lib_name
    auto = fst.AutoLoader(fst.SingleGroup(), files)
    assert auto._pipeline is not None and auto._pipeline.loader is auto._loader
    auto.close()
    made: list[str] = []

    class Mine(fst.SafeTensorsFileLoader):
        def __init__(self, **named: Any) -> None:
            made.append(named["device"])
            super().__init__(**named)

    monkeypatch.setattr(auto_loader, "SafeTensorsFileLoader", Mine)
    assert len(dict(fst.AutoLoader(None, files, "cpu").iterate_weights())) == len(meta.tensors) * 2 + 1 and made == ["cpu"]
    assert "overwire" in fst.__version__


def test_a_header_s_leniency_stays_here(tmp_path: Path) -> None:
    """Trailing bytes and numbers as metadata: the metadata class reads them, as the
    original does; loading holds the format's rules."""
    head = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "__metadata__": {"x": 3}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"1234")
    meta = fst.SafeTensorsMetadata.from_file(str(path), get_framework_op("pt"))
    assert meta.metadata == {"x": 3} and meta.tensors["a"].shape == [2]
    with pytest.raises(ow.FormatError):
        load([str(path)])
    assert ow.load_file(path, lenient=True)["a"].tolist() == [49, 50]


def test_capsules_of_addresses() -> None:
    live = len(dlpack._live)
    values = (ctypes.c_float * 6)(*range(6))
    address = ctypes.addressof(values)
    tensor = torch.utils.dlpack.from_dlpack(dlpack.from_cuda_buffer(address, [2, 3], [3, 1], DType.F32, Device(), values))
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]] and tensor.data_ptr() == address
    dropped = dlpack.from_cuda_buffer(address, [6], [1], DType.F32, Device())
    assert len(dlpack._live) == live + 2
    del dropped, tensor  # one was taken, one never was
    gc.collect()
    assert len(dlpack._live) == live
    capsule = dlpack.from_cuda_buffer(address, [24], [1], DType.F8_E4M3, Device())
    wrapped = get_framework_op("pt").from_dlpack(capsule, Device(), DType.F8_E4M3)
    assert wrapped.view(DType.F8_E4M3).get_raw().dtype == torch.float8_e4m3fn


def test_headers_come_from_memory_and_in_short_reads(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    op = get_framework_op("pt")
    whole = fst.SafeTensorsMetadata.from_file(files[0], op)
    data = Path(files[0]).read_bytes()
    memory = ctypes.create_string_buffer(data, len(data))
    asked: list[int] = []
    copy = cpp.read_buffer
    monkeypatch.setattr(cpp, "read_buffer", lambda address, size: (asked.append(size), copy(address, size))[1])
    again = fst.SafeTensorsMetadata.from_buffer(ctypes.addressof(memory), len(data), files[0], op)
    assert again.tensors == whole.tensors and sum(asked) == whole.header_length
    read = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, min(size, 7)))
    assert fst.SafeTensorsMetadata.from_file(files[0], op).tensors == whole.tensors
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, 0))
    with pytest.raises(ValueError, match="InvalidHeaderLength"):
        fst.SafeTensorsMetadata.from_file(files[0], op)


def test_there_is_one_set_of_classes_under_both_names(script: Any) -> None:
    done = script(
        "import sys, overwire.compat; overwire.compat.install('fastsafetensors'); import fastsafetensors\n"
        "print('torch' in sys.modules)\n"
        "from fastsafetensors.frameworks._torch import TorchOp, TorchProcessGroup\n"
        "loader = fastsafetensors.SafeTensorsFileLoader(None)\n"
        "print(isinstance(loader.framework, TorchOp), isinstance(loader.pg, TorchProcessGroup))\n"
        "print(fastsafetensors is overwire.compat.fastsafetensors)"
    )
    assert done.stdout.split() == ["False", "True", "True", "True"]


def test_importing_it_imports_no_torch(script: Any) -> None:
    done = script(
        "import sys, overwire.compat.fastsafetensors as f; print('torch' in sys.modules, 'numpy' in sys.modules, f.SingleGroup().size())"
    )
    assert done.stdout.split() == ["False", "False", "1"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["nogds", "gds", "unified", "mine"])
def test_on_a_gpu(files: list[str], kind: str) -> None:
    from overwire.compat.fastsafetensors.loader import BaseSafeTensorsFileLoader

    if kind == "mine":

        class Direct(copier.NoGdsFileCopier):
            def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
                length = self.metadata.size_bytes - self.metadata.header_length
                gbuf = self.framework.alloc_tensor_memory(length, self.device)
                reader = cpp.gds_file_reader(4, True, 0)
                handle = cpp.gds_file_handle(self.metadata.src, False, True)
                reader.wait_read(reader.submit_read(handle, gbuf, self.metadata.header_length, length, 0, self.metadata.size_bytes))
                return gbuf

            def wait_io(self, gbuf: Any, dtype: DType = DType.AUTO, noalign: bool = False) -> Any:
                return self.metadata.get_tensors(gbuf, self.device, self.metadata.header_length, dtype)

        copier.register_copier_constructor("mine")(lambda device, **kw: lambda meta, device, op: Direct(meta, device, None, op))
    chosen = files[:1] if kind == "mine" else files
    want = {name: tensor for path in chosen for name, tensor in ow.load_file(path).items()}
    loader = BaseSafeTensorsFileLoader(None, torch.device("cuda:0"), kind)
    loader.add_filenames({0: chosen})
    buffer = loader.copy_files_to_device()
    got = {name: buffer.get_tensor(name) for name in want}
    buffer.close()
    assert all(tensor.is_cuda for tensor in got.values())
    assert plain({name: tensor.cpu() for name, tensor in got.items()}) == plain(want)
    assert cpp.get_cpp_metrics().bounce_buffer_bytes == 0 == buffer.framework.get_mem_used()
    assert cpp.get_device_pci_bus(0) and cpp.is_cuda_found()

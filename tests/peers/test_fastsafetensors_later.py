"""Tests what fastsafetensors 0.5 has added: shard plans, and copiers that let callers wait for single tensors."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import warm
from conftest import every_dtype
from fastsafetensors_plain import plain, two_files

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
import overwire.compat.fastsafetensors as fst  # noqa: E402
from overwire.compat.fastsafetensors import allocation, copier, cpp, dlpack, saver  # noqa: E402
from overwire.compat.fastsafetensors.copier import base  # noqa: E402
from overwire.compat.fastsafetensors.copier.base import CopierInterface, validated_byte_ranges  # noqa: E402
from overwire.compat.fastsafetensors.frameworks import get_framework_op  # noqa: E402
from overwire.compat.fastsafetensors.loader import BaseSafeTensorsFileLoader  # noqa: E402
from overwire.compat.fastsafetensors.parallel_loader import PipelineParallel  # noqa: E402
from overwire.compat.fastsafetensors.st_types import Device, DType  # noqa: E402

used = get_framework_op("pt").get_mem_used


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[str]]:
    assert used() == 0
    yield two_files(tmp_path)
    gc.collect()
    assert used() == 0, "memory is still allocated"


# Shard plans.


def entries_of(tensors: dict[str, Any]) -> list[Any]:
    return [saver.plain_entry(name, tensor) for name, tensor in tensors.items()]


def test_changed_plans_are_written(tmp_path: Path) -> None:
    """A plan is written as the caller has changed it, with every dtype, empty tensors and an empty shard."""
    tensors = every_dtype() | {"none": torch.empty(0, 3), "w": torch.randn(300, 40)}
    paths = [str(tmp_path / f"{at}.safetensors") for at in range(3)]
    plans = saver.plan_shards(entries_of(tensors), paths, metadata={"k": "v"}, shard0_metadata={"z": "0"}, header_align=4096)
    assert not list(tmp_path.iterdir()), "a plan writes nothing"
    for plan in plans:
        assert len(plan.header) % 4096 == 0 and plan.total_bytes == max(
            [len(plan.header), *(end for _, end in plan.offsets.values())]
        )
        assert all(end - begin == entry.nbytes for entry in plan.entries for begin, end in [plan.offsets[entry.name]])
    sizes = [sum(entry.nbytes for entry in plan.entries) for plan in plans]
    assert sizes[0] == 48000 and abs(sizes[1] - sizes[2]) < max(
        tensor.nbytes for name, tensor in tensors.items() if name != "w"
    ), "the largest tensors are placed first, each in the emptiest shard"
    plans[1].path = str(tmp_path / "deep" / "er" / "mine.safetensors")  # missing folders are created
    # This plan is made entirely by hand.
    table = {"x": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}}
    text = json.dumps(table).encode()
    header = len(text).to_bytes(8, "little") + text
    entry = saver.WriteEntry("x", DType.I8, [3], 3, torch.tensor([1, 2, 3], dtype=torch.int8))
    plans.append(
        saver.ShardPlan(str(tmp_path / "hand.safetensors"), [entry], header, {"x": (len(header), len(header) + 3)}, len(header) + 3)
    )
    order: list[int] = []
    fill = saver.tensor_fill(2)

    def watched(work: list[tuple[memoryview, Any]]) -> None:
        order.extend(entry.nbytes for _, entry in work)
        fill(work)

    written = saver.write_shards(plans, watched)
    assert written == [plan.path for plan in plans] and order == sorted(order, reverse=True)
    assert Path(plans[3].path).read_bytes() == header + b"\x01\x02\x03"
    loaded = {name: tensor for path in written[:3] for name, tensor in ow.load_file(path).items()}
    assert plain(loaded) == plain(tensors)
    metas = [fst.SafeTensorsMetadata.from_file(path, get_framework_op("pt")) for path in written[:3]]
    saver.validate_shard_set(metas)
    assert metas[0].metadata["z"] == "0" and metas[2].metadata["k"] == "v"
    with pytest.raises(saver.ShardSetError, match="expected"):
        saver.validate_shard_set(metas[::-1])
    empty = saver.save_sharded([], str(tmp_path / "empty"), num_shards=2)
    assert [ow.load_file(path) for path in empty] == [{}, {}]
    assert saver.save_sharded(entries_of(tensors), str(tmp_path / "deep" / "s"), num_shards=1, header_align=24)[0].endswith(
        "-of-00001.safetensors"
    )
    assert not [path for path in tmp_path.rglob("*.tmp")]


def test_wrong_plans_write_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "x.safetensors")
    w = saver.WriteEntry("w", DType.F32, [3], 12, torch.ones(3))
    old = b"what was there before"
    Path(path).write_bytes(old)

    def refused(kind: type[Exception], words: str, call: Any) -> None:
        with pytest.raises(kind, match=words):
            call()
        assert os.listdir(tmp_path) == ["x.safetensors"] and Path(path).read_bytes() == old

    for entries, words in (
        ([w, w], "twice"), ([saver.WriteEntry("__metadata__", DType.U8, [1], 1)], "metadata"),
        ([saver.WriteEntry("x", DType.F32, [3], 11)], "11 bytes"),
        ([saver.WriteEntry("x", DType.AUTO, [0], 0)], "AUTO"), ([saver.WriteEntry("x", DType.F4, [2, 3], 3)], "odd"),
        ([saver.WriteEntry("x", DType.U8, [-1, -1], 1)], "shape"),
    ):  # fmt: skip
        refused(ValueError, words, lambda entries=entries: saver.plan_shards(entries, [path]))
    for named, words in (
        ({"header_align": 12}, "multiple of 8"), ({"metadata": {"k": 3}}, "strings"), ({"shard0_metadata": {3: "k"}}, "strings"),
        ({"shard_metadata": lambda _: {saver.KEY_SHARD_SET: "x"}}, "reserved"), ({"shard_metadata": lambda _: {"x": 1}}, "strings"),
    ):  # fmt: skip
        refused(ValueError, words, lambda named=named: saver.plan_shards([w], [path], **named))
    for paths in ([], [path, path], [path, str(tmp_path / "." / "x.safetensors")]):
        refused(ValueError, "paths", lambda paths=paths: saver.plan_shards([w], paths))

    def never(work: Any) -> None:
        raise AssertionError("fill was called")

    def changed(**fields: Any) -> list[Any]:
        [plan] = saver.plan_shards([w], [path])
        for name, value in fields.items():
            setattr(plan, name, value)
        return [plan]

    start = len(changed()[0].header)
    text = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [4, 16]}}).encode()
    late = len(text).to_bytes(8, "little") + text
    for fields in (
        {"offsets": {"w": (start - 4, start + 8)}}, {"offsets": {}}, {"entries": []}, {"header": b"{}"}, {"header": b""},
        {"total_bytes": 4},
        {"entries": [saver.WriteEntry("w", DType.I32, [3], 12)]},
    ):  # fmt: skip
        refused(ValueError, "plan", lambda fields=fields: saver.write_shards(changed(**fields), never))
    # These plans are consistent but break the format: they have a gap before the first tensor, or bytes after the last
    # one.
    hole = {"header": late, "offsets": {"w": (len(late) + 4, len(late) + 16)}, "total_bytes": len(late) + 16}
    for fields in (hole, {"total_bytes": start + 13}):
        refused(ow.FormatError, "x.safetensors", lambda fields=fields: saver.write_shards(changed(**fields), never))
    refused(ValueError, "twice", lambda: saver.write_shards(changed() + changed(), never))
    refused(OSError, "must stay free", lambda: saver.write_shards(changed(), never, min_free_bytes=1 << 60))
    kept: list[memoryview] = []

    def fails(work: Any) -> None:
        kept.append(work[0][0][:4])
        raise KeyError("the source is gone")

    refused(KeyError, "gone", lambda: saver.write_shards(changed(), fails))
    refused(BufferError, "export", lambda: saver.write_shards(changed(), lambda work: kept.append(work[0][0][:4])))
    refused(
        ValueError,
        "buffer of",
        lambda: saver.write_shards(
            changed(entries=[saver.WriteEntry("w", DType.F32, [3], 12, torch.ones(4))]), saver.tensor_fill()
        ),
    )


# Copiers.


class Later(CopierInterface):
    """A plug-in for version 0.5, with byte ranges, single tensors before the whole file is read, and shared ownership.
    It records its calls."""

    asked: list[Any] = []

    def __init__(self, metadata: Any, device: Device, framework: Any) -> None:
        self.metadata, self.device, self.framework = metadata, device, framework
        self.reader = cpp.nogds_file_reader(False, 1024, 2, False, 0)
        self.ranges: Any = None
        self.names: Any = None
        self.size: int | None = None
        self.ready = False
        self.reads: list[tuple[int, int, int]] = []

    def enable_tensor_readiness(self) -> bool:
        self.asked.append("ready")
        self.ready = True
        return True

    def set_byte_ranges(self, byte_ranges: Any) -> None:
        self.asked.append(("ranges", byte_ranges))
        self.ranges = validated_byte_ranges(self.metadata, byte_ranges)

    def set_chunk(self, byte_ranges: Any, names: Any, allocation_size: int | None = None) -> None:
        self.asked.append(("chunk", sorted(names), allocation_size))
        self.ranges, self.names, self.size = byte_ranges, names, allocation_size

    @classmethod
    def chunk_transient_multiplier(cls, paths: list[str]) -> int:
        return 2

    @classmethod
    def chunk_device_overhead(cls, paths: list[str]) -> int:
        return 100

    @classmethod
    def fixed_device_overhead(cls, paths: list[str]) -> int:
        return 1000

    def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
        ranges = [(self.metadata.header_length, self.metadata.size_bytes)] if self.ranges is None else self.ranges
        self.base = ranges[0][0] if self.names is not None and ranges else self.metadata.header_length
        limit = self.metadata.size_bytes if self.names is None else ranges[-1][1] if ranges else self.base
        gbuf = self.framework.alloc_tensor_memory(max(limit - self.base, self.size or 0), self.device)
        with open(self.metadata.src, "rb") as file:
            for begin, end in ranges:
                number = self.reader.submit_read(file.fileno(), gbuf, begin, end - begin, begin - self.base, True)
                self.reads.append((number, begin, end))
        return gbuf

    def prepare_tensors(self, gbuf: Any, owner: Any = None) -> Any:
        return self.metadata._get_tensors(gbuf, self.device, self.base, names=self.names, owner=owner)

    def wait_tensor(self, name: str) -> None:
        self.asked.append(("wait", name))
        begin, end = (self.metadata.header_length + at for at in self.metadata.tensors[name].data_offsets)
        for number, lo, hi in self.reads:
            if lo <= begin < hi:
                self.reader.wait_read_prefix(number, end - lo)

    def finish_io(self) -> None:
        self.asked.append("finish")
        for number, _, _ in self.reads:
            self.reader.wait_read(number)
        self.reads = []

    def wait_io(self, gbuf: Any, dtype: DType = DType.AUTO, noalign: bool = False, owner: Any = None) -> Any:
        self.finish_io()
        assert owner is None or (owner.live and owner.get_base_address() == gbuf.get_base_address())
        return self.metadata._get_tensors(gbuf, self.device, self.base, dtype, self.names, owner)


@pytest.fixture
def later() -> Iterator[type[Later]]:
    def new(device: Device, **kwargs: Any) -> Any:
        return Later if kwargs.get("bare") else lambda *args: Later(*args)

    copier.register_copier_constructor("later", Later)(new)
    copier.register_copier_constructor("renamed")(lambda device, **kwargs: copier.create_copier_constructor("later", device, **kwargs))
    Later.asked = []
    yield Later


def test_the_loader_waits_for_single_tensors_of_a_plug_in(files: list[str], later: type[Later]) -> None:
    want = ow.load_file(files[0])
    loader = BaseSafeTensorsFileLoader(None, "cpu", "later")
    assert loader.copier_class is Later is copier.copier_class_of(Later)
    assert BaseSafeTensorsFileLoader(None, "cpu", "renamed").copier_class is Later, "the class that is made counts, not the requested name"
    assert copier.copier_class_of(lambda *_: None) is CopierInterface  # type: ignore[arg-type,return-value]
    loader.add_filenames({0: files[:1]})
    buffer = loader.copy_files_to_device(allow_inflight=True)
    assert later.asked == ["ready"]
    got = {name: buffer.get_tensor(name) for name in ("F64", "U8")}
    assert later.asked == ["ready", ("wait", "F64"), ("wait", "U8")]
    buffer.close()
    buffer.close()
    assert later.asked[3:] == ["finish"] and used() == 0, "memory is not freed before reads into it end"
    assert plain(got) == plain({name: want[name] for name in got})
    # dtype= needs all bytes first, and so does a load without allow_inflight
    for named in ({"dtype": DType.F32, "allow_inflight": True}, {}):
        later.asked.clear()
        buffer = loader.copy_files_to_device(**named)  # type: ignore[arg-type]
        assert later.asked == ["finish"] and buffer.get_tensor("F16").dtype == (torch.float32 if named else torch.float16)
        buffer.close()
    # A filter becomes byte ranges. After an error, the loader waits for the reads that it has submitted.
    later.asked.clear()
    loader.set_tensor_filter(lambda name: name in ("U8", "F64"))
    loader.reset()
    loader.add_filenames({0: files[:1]})
    buffer = loader.copy_files_to_device(borrowed_tensors=True)
    meta = fst.SafeTensorsMetadata.from_file(files[0], get_framework_op("pt"))
    ranges = meta.select_byte_ranges(lambda name: name in ("U8", "F64"))
    assert later.asked == [("ranges", ranges), "finish"] and plain(buffer.get_tensor("U8")) == plain(want["U8"])
    buffer.close()
    later.asked.clear()
    loader.set_tensor_filter(None)
    loader.reset()
    other = files[0].replace("plain", "a")
    ow.save_file({"other": torch.ones(1000)}, other, compress=False)
    loader.add_filenames({0: [other, files[0]]})
    with open(files[0], "r+b") as file:
        file.truncate(meta.size_bytes - 1)
    with pytest.raises(RuntimeError, match="truncated"):
        loader.copy_files_to_device()
    assert later.asked.count("finish") >= 2 and used() == 0
    loader.reset()
    loader.add_filenames({0: files[1:]})
    with pytest.raises(ValueError, match="compressed"):
        loader.copy_files_to_device()


def test_pipelines_request_chunks_from_plug_ins(files: list[str], later: type[Later]) -> None:
    want = plain(ow.load_file(files[0]))

    def run(kind: str = "later", **named: Any) -> Any:
        later.asked.clear()
        loader = PipelineParallel(
            None, BaseSafeTensorsFileLoader(None, "cpu", kind, bare=True), files[:1], use_tqdm_on_load=False, **named
        )
        assert plain(dict(loader.iterate_weights())) == want
        chunks = [one for one in later.asked if one[0] == "chunk"]
        assert sorted(name for chunk in chunks for name in chunk[1]) == sorted(want)
        loader.close()
        return chunks

    largest = max(
        end - begin
        for frame in fst.SafeTensorsMetadata.from_file(files[0], get_framework_op("pt")).tensors.values()
        for begin, end in [frame.data_offsets]
    )
    chunks = run(max_batch_bytes=largest)
    assert len(chunks) > 1 and {size for _, _, size in chunks} == {None} and ("wait", "U8") in later.asked
    run(max_batch_bytes=largest, overlap_io=False)
    assert "ready" not in later.asked
    assert {size for _, _, size in run(max_batch_bytes=largest, use_chunk_budget_as_allocation_size=True)} == {largest}
    # The memory that the plug-in needs is part of the budget: 1000 once, and 2 x (a chunk + 100) per batch.
    least = {"accumulate_resident": False, "queue_size": 3}
    run(device_memory_budget=1000 + 2 * largest + 100, borrowed_tensors=True, **least)
    with pytest.raises(fst.BudgetInfeasibleError, match="holds 1000; the largest tensor"):
        run(device_memory_budget=1000 + 2 * largest + 99, **least)
    for named, words in (
        ({"use_chunk_budget_as_allocation_size": True}, "max_batch_bytes"), ({"borrowed_tensors": True}, "accumulate_resident"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            run(**named)

    class Plain(Later):
        set_chunk = CopierInterface.set_chunk
        fixed_device_overhead = CopierInterface.fixed_device_overhead  # type: ignore[assignment]

    copier.register_copier_constructor("plain", Plain)(lambda device, **kwargs: Plain)
    for named, words in (({"max_batch_bytes": 1000}, "set_chunk"), ({"device_memory_budget": 1 << 40}, "fixed_device_overhead")):
        with pytest.raises(NotImplementedError, match=words):
            run("plain", **named)
    assert used() == 0


def test_the_engines_copiers_support_all_hooks(files: list[str]) -> None:
    """The engine's copiers support all hooks (byte ranges, chunks, waiting for single tensors) for plain and compressed
    files."""
    op = get_framework_op("pt")
    for path in files:
        want = plain(ow.load_file(path))
        meta = fst.SafeTensorsMetadata.from_file(path, op)
        for kind in (copier.NoGdsFileCopier, copier.GdsFileCopier):
            one = kind(meta, Device(), None, op)
            assert (
                one.enable_tensor_readiness()
                and kind.chunk_transient_multiplier([path]) == 1
                and kind.fixed_device_overhead([path]) == 0
            )
            names = list(meta.tensors)[1:4]
            one.set_byte_ranges(meta.select_byte_ranges(names.__contains__, merge_gap=0))
            gbuf = one.submit_io(True, 1 << 30)
            tensors = one.prepare_tensors(gbuf)
            assert set(names) <= set(tensors) and len(tensors) < len(meta.tensors) and "nothing" not in tensors
            one.wait_tensor(names[2])
            assert {name: plain(tensors[name].get_raw()) for name in names} == {name: want[name] for name in names}
            one.finish_io()
            with pytest.raises(ValueError, match="not loaded"):
                one.wait_tensor("nothing")
            with pytest.raises(KeyError):
                tensors["nothing"]
            op.free_tensor_memory(gbuf, Device())
            one = kind(meta, Device(), None, op)
            ranges = meta.select_byte_ranges(names.__contains__)
            one.set_chunk(ranges, set(names), ranges[-1][1] - ranges[0][0])
            gbuf = one.submit_io(True, 1 << 30)
            assert {name: plain(tensor.get_raw()) for name, tensor in one.wait_io(gbuf).items()} == {
                name: want[name] for name in names
            }
            op.free_tensor_memory(gbuf, Device())
            for method, given in (("set_chunk", (ranges, set(names), 1)), ("set_chunk", (ranges, {"nothing"})), ("submit_io", (True, 0))):
                with pytest.raises(ValueError):
                    getattr(one, method)(*given)
    start, end = meta.header_length, meta.header_length + meta.data_length
    for bad in ([(start, start)], [(start + 1, start)], [(0, start + 1)], [(start, end + 1)],
                [(start + 8, end), (start, start + 8)],
                [(start, True)], [("a", end)], [(start,)], [5]):  # fmt: skip
        with pytest.raises(ValueError, match="byte_ranges"):
            validated_byte_ranges(meta, bad)  # type: ignore[arg-type]
    assert validated_byte_ranges(meta, None) is None and validated_byte_ranges(meta, []) == []


def test_tensors_are_returned_before_their_batch_is_complete(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader returns tensors, and a pipeline yields them, while others are still being loaded."""
    whole = list(ow.stream(files[0]))
    gate = threading.Event()

    def slowly(*args: Any, **named: Any) -> Iterator[tuple[str, Any]]:
        yield from whole[:2]
        assert gate.wait(60), "the first two must be returned before the rest arrives"
        yield from whole[2:]

    monkeypatch.setattr(base, "stream_tensors", slowly)
    loader = fst.SafeTensorsFileLoader(None, "cpu")
    loader.add_filenames({0: files[:1]})
    buffer = loader.copy_files_to_device(allow_inflight=True)
    assert plain(buffer.get_tensor(whole[1][0])) == plain(whole[1][1])
    gate.set()
    assert {name: plain(buffer.get_tensor(name)) for name, _ in whole} == {
        name: plain(tensor) for name, tensor in whole
    }
    buffer.close()
    gate.clear()
    first = [name for name in fst.SafeTensorsMetadata.from_file(files[0], get_framework_op("pt")).tensors][0]
    whole.sort(key=lambda row: row[0] != first)
    weights = fst.ParallelLoader(None, files[:1], use_tqdm_on_load=False).iterate_weights()
    assert next(weights)[0] == first
    gate.set()
    assert len(list(weights)) == len(whole) - 1


def test_errors_are_raised_when_the_tensor_is_requested(files: list[str]) -> None:
    damaged = bytearray(Path(files[1]).read_bytes())
    damaged[-1000] ^= 1
    Path(files[1]).write_bytes(damaged)
    loader = fst.SafeTensorsFileLoader(None, "cpu")
    loader.add_filenames({0: files})
    buffer = loader.copy_files_to_device(allow_inflight=True)
    assert plain(buffer.get_tensor("U8")) == plain(ow.load_file(files[0])["U8"]), "the other file is intact"
    for _ in range(2):
        with pytest.raises(ow.CorruptError) as caught:
            for name in buffer.key_to_rank_lidx:
                if name.startswith("c."):
                    buffer.get_tensor(name)
        assert caught.value.source == files[1] and caught.value.tensor
    buffer.drain()  # drain raises no error
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        buffer.get_tensor("U8")
    # Closing the buffer during the load frees all memory.
    loader.reset()
    loader.add_filenames({0: files[:1]})
    loader.copy_files_to_device(allow_inflight=True).close()
    with pytest.raises(ow.CorruptError):
        list(fst.ParallelLoader(None, files, use_tqdm_on_load=False).iterate_weights())
    del caught


def test_buffers_are_freed_by_their_last_owner() -> None:
    op, freed = get_framework_op("pt"), []
    gbuf = op.alloc_tensor_memory(64, Device())
    ctypes.memset(gbuf.get_base_address(), 7, 64)

    class Op:
        def free_tensor_memory(self, gbuf: Any, device: Device) -> None:
            freed.append(gbuf)
            op.free_tensor_memory(gbuf, device)

    owner = allocation.SharedDeviceAllocation(gbuf, Op(), Device())
    tensor = torch.from_dlpack(dlpack.from_cuda_buffer(owner.get_base_address(), [64], [1], DType.U8, Device(), owner))
    unused = dlpack.from_cuda_buffer(owner.get_base_address(), [64], [1], DType.U8, Device(), owner)
    assert owner.refcount() == 3
    del unused
    assert owner.refcount() == 2 and owner.acquire() is owner
    owner.release()
    owner.release()
    assert owner.live and not freed and bool((tensor == 7).all())
    del tensor
    gc.collect()
    assert freed == [gbuf] and not owner.live
    owner.release()
    with pytest.raises(RuntimeError, match="freed"):
        owner.acquire()
    with pytest.raises(RuntimeError, match="freed"):
        owner.get_base_address()
    assert used() == 0


# Tests with the real package.


@pytest.mark.slow
def test_a_program_gives_the_same_results_with_the_real_package(tmp_path: Path) -> None:
    """A program gives the same results with fastsafetensors 0.5.0 and with the drop-in under its name."""
    real = pytest.importorskip("fastsafetensors")
    if real.__version__ != "0.5.0":
        pytest.skip(f"fastsafetensors {real.__version__} is installed; requirements/test.txt pins 0.5.0")
    there = Path(real.__file__).parents[1]
    known = "BOOL I8 I16 I32 I64 U8 U16 U32 U64 F16 F32 F64 BF16 F8_E5M2 F8_E4M3 F8_E8M0 F4"
    answers = []
    for name, path in (("a", str(there)), ("b", str(Path(ow.__file__).parent / "compat" / "_path" / "fastsafetensors"))):
        folder = tmp_path / name
        folder.mkdir()
        env = dict(os.environ, PYTHONPATH=f"{path}:{Path(ow.__file__).parents[1]}")
        done = warm.run([Path(__file__).with_name("fastsafetensors_program.py"), folder, known], env=env, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    assert len(answers[0]) == len(answers[1]) > 60
    for at, (theirs, ours) in enumerate(zip(*answers, strict=True)):
        assert ours == theirs, at

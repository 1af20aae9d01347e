"""Tests that sharded checkpoints, .nemo and numpy files are read completely or refused, without running code in
them."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import random
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import safetensors.torch
from conftest import ROOT
from test_cli import must, run

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

import torch.distributed.checkpoint as dcp  # noqa: E402
from overwire.foreign import arrays, joined, kinds  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

GOLDENS = ROOT / "tests/goldens/dcp"
pytestmark = pytest.mark.filterwarnings("ignore")


def equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Asserts equal names, dtypes, shapes and bytes."""
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        sides = [one.contiguous().reshape(-1).view(torch.uint8).tolist() for one in (got[name], tensor)]
        assert sides[0] == sides[1], name


@pytest.mark.parametrize("kind", ["fsdp2", "megatron", "shards", "consolidated", "safetensors"])
def test_folders_of_real_writers(tmp_path: Path, kind: str) -> None:
    """Folders that two ranks wrote with FSDP2, Megatron-core and torch's Hugging Face writer (goldens/dcp/make.py) load
    and convert to whole tensors. Auxiliary files are copied. Other objects become metadata or lines in the report."""
    source = tmp_path / kind
    shutil.copytree(GOLDENS / kind, source)
    want = safetensors.torch.load((GOLDENS / f"{kind}.expected").read_bytes())
    equal(ow.load_file(source), want)
    report = ow.convert(source, tmp_path / "out")
    equal(ow.load_file(tmp_path / "out"), want)
    into_file = ow.convert(source, tmp_path / "out.safetensors", compress=False)
    equal(ow.load_file(tmp_path / "out.safetensors"), want)
    assert sum(len(one["tensors"]) for one in ow.inspect(source)["sources"]) == len(want)
    with ow.safe_open(tmp_path / "out.safetensors", "np") as file:
        values = json.loads((file.metadata() or {}).get("torch.values", "{}"))
    beside = {"megatron": ["common.pt", "metadata.json"]}.get(kind, [])
    assert sorted(map(os.path.basename, into_file.left)) == beside or kind not in ("megatron", "shards")
    assert sorted(map(os.path.basename, report.copied)) == beside
    if kind == "fsdp2":
        assert values["epoch"] == 3 and values["optim.param_groups.0.momentum"] == 0.9
        assert report.left == (f"{source}: kind: torch.float32",)
    if kind == "consolidated":
        assert report.left == (str(source / "sharded"),)
    if kind in ("consolidated", "shards"):  # torch's own reader reads the converted folder
        state = {name: torch.zeros_like(one) for name, one in want.items()}
        ow.convert(source, tmp_path / "plain", compress=False)
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "plain")))
        equal(state, want)


def state() -> dict[str, Any]:
    w = torch.randn(6, 8)
    return {
        "model": {"w": w, "tied": w, "part": w[1:3, 2:5], "t": w.t(), "layers": [torch.ones(2), {"b": torch.zeros(1)}]},
        "scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "bf16": w.bfloat16(), "f8": w.to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False]), "strided": w.repeat(2, 2)[::2, ::3], "flip": w.permute(1, 0)[2:4],
        "step": 7, "names": ["a", "b"], "kind": torch.float16, "rng": {"state": torch.get_rng_state()},
    }  # fmt: skip


WANTED = "bf16 bool empty f8 flip model.layers.0 model.layers.1.b model.part model.t model.tied model.w rng.state scalar strided"


@pytest.mark.parametrize("how", ["save", "async_save", "threads"])
def test_one_process(tmp_path: Path, how: str) -> None:
    """A checkpoint that torch saves in one process loads bit for bit, with paths in the state dict as tensor names.
    Plain values become metadata. Every other object becomes a line in the report."""
    own, at = state(), str(tmp_path / "iter_10")
    if how == "async_save":
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
        try:
            dcp.async_save(own, checkpoint_id=at).result()
        finally:
            torch.distributed.destroy_process_group()
    else:
        threads = {"thread_count": 2, "single_file_per_rank": False} if how == "threads" else {}
        dcp.save(own, storage_writer=dcp.FileSystemWriter(at, **threads))
    flat, _ = dcp._nested_dict.flatten_state_dict(own)
    want = {name: flat[name] for name in WANTED.split()}
    equal(ow.load_file(at), want)
    report = ow.convert(at, tmp_path / "m.safetensors")
    equal(ow.load_file(tmp_path / "m.safetensors"), want)
    assert report.left == (f"{at}: kind: torch.float16",)
    with ow.safe_open(tmp_path / "m.safetensors", "np") as file:
        values = json.loads(file.metadata()["torch.values"])
    assert values == {"step": 7, "names": ["a", "b"]}


def test_two_ranks(torch_script: Any, tmp_path: Path) -> None:
    """DTensors that two ranks saved by rows or columns are joined, even if there are more ranks than rows."""
    torch_script("""
import os, torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meeting", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
w = torch.arange(105.0).reshape(5, 7, 3)
whole = {"rows": w, "columns": w, "last": w.half(), "same": w, "one": torch.ones(1, 2)}
cuts = {"rows": Shard(0), "columns": Shard(1), "last": Shard(2), "same": Replicate(), "one": Shard(0)}
from torch.distributed.tensor import distribute_tensor
dcp.save({name: distribute_tensor(one, mesh, [cuts[name]]) for name, one in whole.items()}, checkpoint_id="ckpt")
dist.barrier()
dist.destroy_process_group()
if rank:
    os._exit(0)
os.wait()
import overwire as ow
ow.convert("ckpt", "m.safetensors")
for got in (ow.load_file("ckpt"), ow.load_file("m.safetensors")):
    assert sorted(got) == sorted(whole) and all(torch.equal(got[name], one) for name, one in whole.items())
""")


def test_trees_of_folders(tmp_path: Path) -> None:
    """Converting a trainer's folder of checkpoints keeps its structure and copies torch.save files without tensors. A
    folder that has only such files, or has safetensors files next to a checkpoint, is refused."""
    top = tmp_path / "checkpoint-5"
    dcp.save({"w": torch.ones(4)}, checkpoint_id=top / "pytorch_model_fsdp_0")
    dcp.save({"m": torch.zeros(4)}, checkpoint_id=top / "optimizer_0")
    torch.save({"args": 1}, top / "common.pt")
    must("compress", str(top), "-o", str(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path / "out")) == ["common.pt", "optimizer_0", "pytorch_model_fsdp_0"]
    equal(ow.load_file(tmp_path / "out/pytorch_model_fsdp_0"), {"w": torch.ones(4)})
    for words in (["load", "--plan"], ["diff", str(top / "optimizer_0")]):
        must(*words, str(top / "optimizer_0"))
    (tmp_path / "bare").mkdir()
    shutil.copy(top / "common.pt", tmp_path / "bare")
    done = run("compress", str(tmp_path / "bare"), "-o", str(tmp_path / "none"))
    assert done.returncode == 1 and "have no tensors" in done.stderr and not (tmp_path / "none").exists()
    dcp.save({"n": 1}, checkpoint_id=tmp_path / "values")
    done = run("compress", str(tmp_path / "values"), "-o", str(tmp_path / "none"))
    assert done.returncode == 1 and "no tensor" in done.stderr and not (tmp_path / "none").exists()
    both = top / "optimizer_0"
    ow.save_file({"w": torch.ones(1)}, both / "model.safetensors")
    for call in (ow.load_file, ow.inspect, ow.verify, lambda path: ow.convert(path, tmp_path / "none")):
        with pytest.raises(ow.ArgumentError, match=r"model\.safetensors"):
            call(both)
    equal(ow.load_file(both / "model.safetensors"), {"w": torch.ones(1)})


def test_converted_files_have_no_more_readers(tmp_path: Path) -> None:
    """A converted file can only be read by users who could read the source."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "ckpt")
    torch.save({"w": torch.ones(4)}, tmp_path / "m.pt")
    for source, private in ((tmp_path / "ckpt", tmp_path / "ckpt/__0_0.distcp"), (tmp_path / "m.pt",) * 2):
        private.chmod(0o640)
        ow.convert(source, tmp_path / "m.safetensors")
        assert (tmp_path / "m.safetensors").stat().st_mode & 0o777 == 0o640
        os.remove(tmp_path / "m.safetensors")


def altered(tmp_path: Path, change: Callable[[Any], None]) -> Path:
    """Saves a checkpoint with a plain value and a tensor in two chunks, and changes its `.metadata` file."""
    folder = tmp_path / "ckpt"
    shutil.rmtree(folder, ignore_errors=True)
    w = torch.arange(12.0).reshape(4, 3)
    dcp.save({"a": w, "b": w[2:].clone(), "n": 5}, checkpoint_id=folder)
    meta: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry = meta.state_dict_metadata["a"]
    meta.state_dict_metadata["w"] = TensorStorageMetadata(entry.properties, torch.Size([6, 3]), [
        ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 3])),
        ChunkStorageMetadata(torch.Size([4, 0]), torch.Size([2, 3])),
    ])  # fmt: skip
    for name, at in (("a", 0), ("b", 4)):
        del meta.state_dict_metadata[name]
        meta.storage_data[MetadataIndex("w", [at, 0])] = meta.storage_data.pop(MetadataIndex(name, [0, 0]))
    change(meta)
    (folder / ".metadata").write_bytes(pickle.dumps(meta))
    return folder


def place(meta: Any, row: int = 0) -> Any:
    return meta.storage_data[MetadataIndex("w", [row, 0])]


def chunk(meta: Any, number: int = 1) -> Any:
    return meta.state_dict_metadata["w"].chunks[number]


class Evil:
    """Creates a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def test_hostile_descriptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `.metadata` file that leaves gaps, has overlaps, wrong offsets, shapes or dtypes, paths out of the folder, or
    code to run raises an error that names the file and the tensor. Nothing is written."""
    monkeypatch.chdir(tmp_path)
    w = torch.arange(12.0).reshape(4, 3)
    equal(ow.load_file(altered(tmp_path, lambda meta: None)), {"w": torch.cat([w, w[2:]])})
    (tmp_path / "outside.distcp").write_bytes((tmp_path / "ckpt/__0_0.distcp").read_bytes())

    def set_size(meta: Any, *size: int) -> None:
        meta.state_dict_metadata["w"].size = torch.Size(size)

    def set_box(meta: Any, offsets: Any, sizes: Any) -> None:
        chunk(meta).offsets, chunk(meta).sizes = torch.Size(offsets), torch.Size(sizes)

    def set_place(meta: Any, **fields: Any) -> None:
        vars(place(meta)).update(fields)

    def link(meta: Any) -> None:
        os.symlink(tmp_path / "outside.distcp", tmp_path / "ckpt/link.distcp")
        set_place(meta, relative_path="link.distcp")

    def set_dtype(meta: Any, dtype: Any) -> None:
        meta.state_dict_metadata["w"].properties = TensorProperties(dtype=dtype)

    huge = 1 << 61
    cases: list[tuple[Callable[[Any], None], type[Exception], str]] = [
        (lambda m: set_size(m, 7, 3), ow.FormatError, r"'w'.*from \[6, 0\] to \[7, 3\]"),
        (lambda m: set_size(m, 5, 3), ow.FormatError, "'w': chunk 1: .*outside of shape"),
        (lambda m: set_size(m, huge, 3), ow.FormatError, "no chunk has"),
        (lambda m: set_size(m, huge, huge, huge), ow.FormatError, "'w'.*malformed"),
        (lambda m: set_box(m, (3, 0), (3, 3)), ow.FormatError, "'w': chunk 1: .*overlap"),
        (lambda m: set_box(m, (4, 0), (2, 2)), ow.FormatError, r"only the elements from \[4, 0\] to \[6, 2\]"),
        (lambda m: set_box(m, (4,), (2,)), ow.FormatError, "malformed"),
        (lambda m: chunk(m).__dict__.update(offsets=(-1, 0)), ow.FormatError, "'w'.*malformed"),
        (lambda m: m.state_dict_metadata["w"].chunks.clear(), ow.FormatError, "no chunk has"),
        (lambda m: m.state_dict_metadata["w"].chunks.append(chunk(m)), ow.FormatError, "overlap"),
        (lambda m: m.storage_data.pop(MetadataIndex("w", [4, 0])), ow.FormatError, "'w': chunk 1: no location"),
        (lambda m: m.storage_data.pop(MetadataIndex("n")), ow.FormatError, "'n': no location"),
        (lambda m: set_place(m, offset=place(m).offset + 1), ow.OverwireError, "'w'.*shares bytes"),
        (lambda m: set_place(m, length=place(m).length - 1), ow.CorruptError, "__0_0.distcp: .*truncated.*'w'"),
        (lambda m: set_place(m, offset=-1), ow.FormatError, "malformed"),
        (lambda m: set_place(m, length=huge), ow.CorruptError, "__0_0.distcp: truncated, 'w'"),
        (lambda m: set_place(m, relative_path="../outside.distcp"), ow.FormatError, "not the name of a file"),
        (lambda m: set_place(m, relative_path="__9_0.distcp"), ow.NotFoundError, "__9_0.distcp: it is missing"),
        (lambda m: set_place(m, relative_path=".."), ow.FormatError, "not the name of a file"),
        (link, ow.FormatError, "leads out of the folder"),
        (lambda m: set_place(m, transform_descriptors=["stream.zstd/1"]), ow.NotSupportedError, "stream.zstd.*dcp_to_torch"),
        (lambda m: set_dtype(m, torch.float64), ow.FormatError, r"F32 \[4, 3\] instead of F64"),
        (lambda m: set_dtype(m, torch.complex128), ow.NotSupportedError, "'w'.*complex128"),
        (lambda m: m.state_dict_metadata.pop("w"), ow.FormatError, "'w'.*no entry describes"),
        (lambda m: m.state_dict_metadata.pop("n"), ow.FormatError, "'n'.*no entry describes"),
        (lambda m: m.__dict__.update(planner_data=Evil(), storage_data=None), ow.FormatError, "malformed"),
        (lambda m: m.__dict__.update(state_dict_metadata={3: 4}), ow.FormatError, "malformed"),
        (lambda m: m.__dict__.update(mcore_data={"w": {"nd_reformulated_orig_global_shape": (6, 3)}}),
         ow.NotSupportedError, "Megatron-core"),
    ]  # fmt: skip
    for number, (change, kind, match) in enumerate(cases):
        folder = altered(tmp_path, change)
        for call in (ow.load_file, lambda path: ow.convert(path, tmp_path / "out/")):
            with pytest.raises(kind, match=match) as caught:
                call(folder)
            assert str(folder) in str(caught.value), number
    equal(ow.load_file(altered(tmp_path, lambda m: m.__dict__.update(planner_data=Evil()))), {"w": torch.cat([w, w[2:]])})
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "outside.distcp"]


def test_damaged_folders(tmp_path: Path) -> None:
    """Changed tensor bytes, truncated files, expanded tensors, a missing `.metadata` file, and `.metadata` files that
    ranks saved separately cause typed errors that name the file. The report names files that are not listed."""
    folder = altered(tmp_path, lambda meta: None)
    file, whole = folder / "__0_0.distcp", (folder / "__0_0.distcp").read_bytes()
    at = whole.index(torch.arange(12.0).numpy().tobytes())
    file.write_bytes(whole[: at + 3] + b"\x55" + whole[at + 4 :])
    with pytest.raises(ow.CorruptError, match=r"checksum mismatch.*chunk 0 of tensor 'w'") as caught:
        ow.convert(folder, tmp_path / "x.safetensors")
    assert (caught.value.source, caught.value.tensor, caught.value.chunk) == (str(file), "w", 0)
    file.write_bytes(whole[:-1])
    with pytest.raises(ow.CorruptError, match="truncated"):
        ow.load_file(folder)
    file.write_bytes(whole)
    (folder / "__7_0.distcp").write_bytes(b"old")
    left = ow.convert(folder, tmp_path / "x.safetensors").left
    assert left == (f"{folder}: __7_0.distcp: .metadata does not list it",)
    os.remove(tmp_path / "x.safetensors")

    def expand(meta: Any) -> None:
        buffer = io.BytesIO()
        torch.save(torch.zeros(1).expand(1 << 50, 3), buffer)
        (tmp_path / "ckpt/big.distcp").write_bytes(buffer.getvalue())
        meta.state_dict_metadata["w"].size = chunk(meta, 0).sizes = torch.Size([1 << 50, 3])
        meta.state_dict_metadata["w"].chunks.pop()
        vars(place(meta)).update(relative_path="big.distcp", offset=0, length=len(buffer.getvalue()))

    with pytest.raises(ow.FormatError, match="a tensor of 13510798882111488 bytes has only 4 bytes"):
        ow.load_file(altered(tmp_path, expand))
    os.rename(folder / ".metadata", folder / "__0.metadata")
    shutil.copy(folder / "__0.metadata", folder / "__1.metadata")
    with pytest.raises(ow.NotSupportedError, match="use_collectives=False.*dcp.load"):
        ow.load_file(folder)
    for name in ("__0.metadata", "__1.metadata"):
        os.remove(folder / name)
    for call in (ow.load_file, ow.inspect, lambda path: ow.convert(path, tmp_path / "x.safetensors")):
        with pytest.raises(ow.NotFoundError, match="torch.distributed.checkpoint without its .metadata"):
            call(folder)
    assert os.listdir(tmp_path) == ["ckpt"]


def test_a_shard_is_never_read_as_a_whole_model(tmp_path: Path) -> None:
    """A single shard of torch's Hugging Face writer is not loaded or converted, and a folder that lacks a shard is
    refused. safe_open opens a shard, because torch's reader needs this. A file with one rank's whole state loads."""
    folder = tmp_path / "shards"
    shutil.copytree(GOLDENS / "shards", folder)
    one = folder / "shard-00001-model-00001-of-00002.safetensors"
    renamed = tmp_path / "model.safetensors"
    shutil.copy(folder / "shard-00002-model-00001-of-00002.safetensors", renamed)
    for path in (one, renamed):
        def convert(path: Path) -> Any:
            return ow.convert(path, tmp_path / "x.safetensors")

        for call in (ow.load_file, ow.verify, lambda path: list(ow.stream(path)), convert):
            with pytest.raises(ow.NotSupportedError, match="may be parts.*HuggingFaceStorageWriter"):
                call(path)
        with ow.safe_open(path, "pt") as file:
            assert "DCP_SHARDING_INFO" in file.metadata()
    os.remove(one)
    with pytest.raises(ow.FormatError, match="shard-00002.*tensor .*only the elements from"):
        ow.load_file(folder)
    os.remove(folder / "shard-00001-model-00002-of-00002.safetensors")
    with pytest.raises(ow.NotFoundError, match="shard-00001 are missing"):
        ow.convert(folder, tmp_path / "x.safetensors")
    state = {"w": torch.arange(6.0)}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path / "whole")))
    equal(ow.load_file(tmp_path / "whole"), state)
    equal(ow.load_file(tmp_path / "whole/model-00001-of-00001.safetensors"), state)


def boxes_of(shape: tuple[int, ...], random_: random.Random) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divides a shape into boxes by repeated random cuts."""
    todo, done = [((0,) * len(shape), shape)], []
    while todo:
        offsets, sizes = todo.pop()
        axis = random_.randrange(len(shape))
        if random_.random() < 0.4 or sizes[axis] < 2:
            done.append((offsets, sizes))
            continue
        cut = random_.randrange(1, sizes[axis])
        for start, size in ((0, cut), (cut, sizes[axis] - cut)):
            low, length = list(offsets), list(sizes)
            low[axis], length[axis] = low[axis] + start, size
            todo.append((tuple(low), tuple(length)))
    random_.shuffle(done)
    return done


def test_any_boxes_are_joined_in_small_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are divided into random boxes are joined, with blocks of any size. A missing or surplus box is
    detected."""
    random_ = random.Random(5)
    path = tmp_path / "data"
    for _ in range(150):
        monkeypatch.setattr(joined, "BLOCK", random_.choice([4, 7, 50, 1 << 20]))
        shape = tuple(random_.randrange(1, 7) for _ in range(random_.randrange(1, 5)))
        whole = np.arange(np.prod(shape), dtype="<u4").reshape(shape)
        boxes = boxes_of(shape, random_)
        data, chunks, files = b"", [], joined.Files()
        for offsets, sizes in boxes:
            part = whole[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))].tobytes()
            run_of_part = joined.Run(files, str(path), len(data), len(part), zipfile.crc32(part))
            chunks.append(joined.Chunk(offsets, sizes, run_of_part))
            data += part
        path.write_bytes(data)
        joined.check_cover(shape, boxes, lambda why, number: AssertionError(why))
        assert b"".join(map(bytes, joined.Joined("w", "U32", shape, chunks).read_blocks())) == whole.tobytes()
        files.close_files()
        for wrong in (boxes[1:], [*boxes, random_.choice(boxes)]):
            with pytest.raises(ow.FormatError):
                joined.check_cover(shape, wrong, lambda why, number: ow.FormatError(why))


def tar(path: Path, *members: tuple[Any, ...]) -> None:
    with tarfile.open(path, "w:") as archive:
        for name, data, *fields in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in dict(*fields).items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(data))


def weights(tensors: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


def test_nemo(tmp_path: Path) -> None:
    """The weights in a .nemo file are read without unpacking it, whatever the name of their member. Links, parts of
    tensors, false sizes and truncation cause typed errors."""
    path, target = tmp_path / "m.nemo", tmp_path / "m.safetensors"
    want = {"encoder.w": torch.randn(9, 9), "b": torch.ones(3)}
    for name in ("./model_weights.ckpt", "x" * 160 + "/model_weights.ckpt"):
        for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            with tarfile.open(path, "w:", format=form) as archive:
                for member, data in (("./model_config.yaml", b"a: 1\n"), (name, weights(want))):
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
            equal(ow.load_file(path), want)
    report = ow.convert(path, target)
    equal(ow.load_file(target), want)
    assert report.left == (f"{path}: model_config.yaml (5 bytes)",)
    os.remove(target)
    whole = path.read_bytes()

    def refused(kind: type[Exception], match: str) -> None:
        for call in (ow.load_file, lambda source: ow.convert(source, target)):
            with pytest.raises(kind, match=match) as caught:
                call(path)
            assert str(path) in str(caught.value)

    tar(path, ("model_weights.ckpt", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}))
    refused(ow.FormatError, "link, or sparse")
    tar(path, ("model_weights.ckpt", weights(want), {"type": tarfile.GNUTYPE_SPARSE}))
    refused(ow.FormatError, "link, or sparse")
    tar(path, ("mp_rank_00/model_weights.ckpt", b"x"), ("mp_rank_01/model_weights.ckpt", b"x"))
    refused(ow.NotSupportedError, "merge these parts")
    tar(path, ("model_weights/.metadata", b"x"), ("model_weights/__0_0.distcp", b"x"))
    refused(ow.NotSupportedError, "tar -xf.*convert model_weights")
    tar(path, ("a.txt", b"x"))
    refused(ow.FormatError, "without model_weights.ckpt")
    tar(path, ("model_weights.ckpt", b"not an archive"))
    refused(ow.FormatError, "torch.save")
    path.write_bytes(whole[:-20000])
    refused(ow.CorruptError, "truncated")
    path.write_bytes(b"y" + whole[1:])
    refused(ow.CorruptError, "checksum mismatch in a header")
    for size in (b"77777777777\0", b"\x80" + b"\x7f" * 11, b"junk\0\0\0\0\0\0\0\0"):
        head = bytearray(whole[:512])
        head[124:136] = size
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
        path.write_bytes(bytes(head) + whole[512:])
        refused(ow.OverwireError, "truncated|malformed size")
    path.write_bytes(b"no tar" * 200)
    refused(ow.FormatError, "not a tar archive")
    assert os.listdir(tmp_path) == ["m.nemo"]


def test_numpy_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays in .npy and .npz files load and convert: of every safetensors dtype, in both byte orders, deflated or
    stored. Text arrays become lines in the report. Pickles, unknown dtypes, damage and bombs are refused."""
    every = {f"t{n}": np.arange(6).reshape(2, 3).astype(kind) for n, kind in enumerate("?bBhHiIqQefdF")}
    every |= {"fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)), "empty": np.empty((0, 2)), "zero": np.array(2.5)}
    path, target = tmp_path / "m.npz", tmp_path / "m.safetensors"
    for save in (np.savez, np.savez_compressed):
        save(path, text=np.array("abc"), **every)
        report = ow.convert(path, target)
        assert report.left == (f"{path}: text: an array of <U3",)
        for got in (ow.load_file(path, framework="np"), ow.load_file(target, framework="np")):
            assert sorted(got) == sorted(every)
            for name, array in every.items():
                assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape)
                assert np.array_equal(got[name], array)
        os.remove(target)
    np.save(tmp_path / "one.npy", every["fortran"])
    assert np.array_equal(ow.load_file(tmp_path / "one.npy", framework="np")["one"], every["fortran"])
    os.remove(tmp_path / "one.npy")

    def refused(kind: type[Exception], match: str) -> None:
        for call in (ow.load_file, lambda source: ow.convert(source, target)):
            with pytest.raises(kind, match=match) as caught:
                call(path)
            assert str(path) in str(caught.value)

    for odd, kind, match in (
        (np.array([Evil()], dtype=object), ow.UntrustedPickleError, "a: a pickled array"),
        (np.zeros(2, "V2"), ow.NotSupportedError, "bfloat16"),
        (np.zeros(2, ">f4"), ow.NotSupportedError, ">f4"),
        (np.zeros(2, "D"), ow.NotSupportedError, "c16"),
    ):
        np.savez(path, a=odd)
        refused(kind, match)
    np.savez(path, a=np.zeros(2, [("x", "f4")]))
    refused(ow.FormatError, "no tensor")
    monkeypatch.setattr(arrays, "_SPARE", 1 << 20)
    np.savez_compressed(path, w=np.zeros(1 << 20, np.uint8), x=np.zeros(3 << 20, np.uint8))
    refused(ow.NotSupportedError, "more than 64 times")
    np.savez(path, a=np.arange(9.0))
    whole = path.read_bytes()
    at = whole.index(np.arange(9.0).tobytes())
    path.write_bytes(whole[:at] + b"\1" + whole[at + 1 :])
    refused(ow.CorruptError, "checksum")
    path.write_bytes(whole[: len(whole) // 2])
    refused(ow.CorruptError, "a .npz file, truncated or damaged")
    path.write_bytes(b"y" + whole[1 : len(whole) // 2])
    refused(ow.FormatError, "not a .npz file")
    np.savez_compressed(path, a=np.arange(900.0))
    entry = bytearray(path.read_bytes())
    for offset in (entry.index(b"PK\1\2") + 24, entry.index(b"PK\3\4") + 22):
        entry[offset : offset + 4] = struct.pack("<I", 5000)
    path.write_bytes(entry)
    refused(ow.CorruptError, "bytes")
    path = tmp_path / "one.npy"
    np.save(path, np.arange(9.0))
    path.write_bytes(path.read_bytes().replace(b"(9,)", b"(8,)"))
    refused(ow.CorruptError, "72 bytes of data for shape")
    path.write_bytes(arrays.MAGIC + b"\2\0" + struct.pack("<I", 1 << 31) + b"(" * 1000)
    refused(ow.FormatError, "malformed header")
    os.remove(path)
    assert os.listdir(tmp_path) == ["m.npz"]


def mutants(random_: random.Random, whole: dict[str, bytes]) -> Iterator[dict[str, bytes]]:
    """Yields endless variants of the files, in which some bytes are changed, cut, doubled or exchanged."""
    while True:
        files = dict(whole)
        name = random_.choice(sorted(files))
        data = bytearray(files[name])
        for _ in range(random_.choice([1, 1, 2, 5])):
            at = random_.randrange(len(data) + 1)
            match random_.randrange(6):
                case 0 if at < len(data):
                    data[at] ^= 1 << random_.randrange(8)
                case 1 if at < len(data):
                    data[at] = random_.choice([0, 1, 0x7F, 0x80, 0xFF, random_.randrange(256)])
                case 2:
                    del data[at:]
                case 3:
                    data[at:at] = data[random_.randrange(len(data) + 1) :][: random_.randrange(200)]
                case 4:
                    del data[at : at + random_.randrange(1, 40)]
                case 5:
                    data[at : at + 8] = random_.choice([1 << 62, (1 << 63) - 1, 1 << 31, 0]).to_bytes(8, "little")
        files[name] = bytes(data)
        yield files


def fuzz(folder: Path, seed: int, rounds: int) -> int:
    """Reads variants of each kind of container. Each gives the same tensors, fewer tensors if a `.metadata` file was
    changed, or an overwire error. Returns the number of refused variants."""
    random_ = random.Random(seed)
    made = folder / "made"
    made.mkdir()
    dcp.save({"w": torch.arange(12.0).reshape(4, 3), "t": torch.arange(6.0).reshape(2, 3).t(), "n": 5}, checkpoint_id=made / "dcp")
    shutil.copytree(GOLDENS / "fsdp2", made / "fsdp2")
    shutil.copytree(GOLDENS / "shards", made / "shards")
    shutil.copytree(GOLDENS / "safetensors", made / "safetensors")
    for kind in ("nemo", "npz"):
        (made / kind).mkdir()
    tar(made / "nemo/m.nemo", ("a", b"b"), ("model_weights.ckpt", weights({"w": torch.arange(12.0)})))
    np.savez(made / "npz/m.npz", w=np.arange(12.0), x=np.ones(3))
    np.savez_compressed(made / "npz/c.npz", w=np.arange(500.0))
    wholes: dict[str, dict[str, bytes]] = {}
    for path in made.glob("*/*"):
        wholes.setdefault(path.parent.name, {})[path.name] = path.read_bytes()
    streams = {kind: mutants(random_, whole) for kind, whole in sorted(wholes.items())}
    refused = 0
    work = folder / "work"
    for number, kind in zip(range(rounds), itertools.cycle(streams), strict=False):
        work.mkdir()
        for name, data in next(streams[kind]).items():
            (work / name).write_bytes(data)
        sources = [work / name for name in os.listdir(work)] if kind in ("nemo", "npz") else [work]
        for source in sources:
            try:
                found = kinds.kind_of(str(source))
                with kinds.open_content(str(source), found) as content:
                    for _, tensor in content.tensors:
                        for _ in tensor.read_blocks():
                            pass
            except ow.OverwireError as error:
                assert str(work) in str(error), (seed, number, kind, error)
                refused += 1
            except KeyError:
                assert not found, (seed, number, kind)  # after the change, the file may no longer be recognised
        shutil.rmtree(work)
    return refused


def test_mutants_are_read_or_refused(tmp_path: Path) -> None:
    """A changed file gives tensors or an overwire error that names the file."""
    assert fuzz(tmp_path, int(os.environ.get("FUZZ_SEED", "7")), 400) > 200

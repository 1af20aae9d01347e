"""Tests the drop-in for nyacomp: manifests, bundles in nyacomp's and overwire's layout, downloads, and variables."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import pickle
import random
import re
import struct
from pathlib import Path

import overwire as ow
import pytest
import torch
from conftest import ROOT, every_dtype, same
from overwire import compat
from overwire.compat import nyacomp
from overwire.compat.fastsafetensors import cpp
from overwire.compat.nyacomp import _nyacomp, bundles, hf, manifests, partition, settings
from torch import nn

# -- names


def test_every_name_accepts_nyacomps_arguments() -> None:
    wanted = {
        nyacomp: "compress(model path) compress_pickle(obj path algo) load_compressed(path) load_compressed_pickle(path) "
        "merge_tensors(tensors maxsize) iterative_merge_tensors(tensors) split_tensors(tensors info) split_into_bins(group n_splits) "
        "calculate_makespan(tensors) compress_parameter(param path algo) get_pipeline_params(pipeline) get_tensors(path) get_args(path) "
        "to_csv(meta bins f) ints(i) tensor_size(tensor) tensor_bytes(tensor) empty_cache() timer(msg) cleanup() with_cleanup(path) "
        "stats(times)",
        hf: "compress_model(model) compress_components(components) compress_state_dict(path treshold) dry_load(path) good_load(path) "
        "toggle_patch(module) toggle_diffusers() toggle_transformers() stats(times)",
        partition: "ffd_binpack(sizes capacity) multifit_partition(sizes bins k) to_idx(sizes bins) massage(sizes n_bins)",
        _nyacomp: "compress(data filename algo) decompress(filename shape dtype) batch_decompress(files assignments) "
        "decompress_from_meta(csv_path) AsyncDecompressor(csv_path) "
        "CompressedFile(filename shape dtype decompressed_size compressed_size)",
    }
    for module, text in wanted.items():
        for entry in text.split(")"):
            if name := entry.strip().split("(")[0]:
                found = inspect.signature(getattr(module, name)).parameters.values()
                positional = [p.name for p in found if p.kind is p.POSITIONAL_OR_KEYWORD]
                assert positional == entry.split("(")[1].split(), name
                assert getattr(module, name).__doc__, name
    assert _nyacomp.__version__ and isinstance(nyacomp.NUM_THREADS, int) and nyacomp.HOST == ""
    assert nyacomp.default_path == Path("boneless_model.pth") and nyacomp.MERGE_INFO_FNAME == "merged_tensors.csv"
    assert (
        nyacomp.decompressor is None
        and nyacomp.natsize(5)
        and inspect.signature(hf.compress_state_dict).parameters["treshold"].default == 16000
    )


def test_small_helpers(caplog) -> None:
    """timer, cleanup, stats, annotate and the size functions work as in nyacomp."""
    caplog.set_level(logging.DEBUG, "overwire")
    with nyacomp.timer("a block"), nyacomp.cleanup():
        pass
    assert "a block took" in caplog.text and "GPU memory" in caplog.text
    nyacomp.empty_cache()
    assert nyacomp.stats([1, 2, 3]) == "mean: 2 stdev: 1.0 min: 1"
    assert nyacomp.annotate("x")(lambda: 5)() == 5
    strided = torch.arange(12).reshape(3, 4).t()
    assert (
        nyacomp.tensor_bytes(strided) == strided.contiguous().numpy().tobytes() and nyacomp.tensor_size(strided) == 96
    )
    assert nyacomp.tensor_bytes(torch.empty(0)) == b"" and nyacomp.ints([3, 4]) == "3;4"


@pytest.mark.slow
def test_the_bytes_of_a_large_tensor() -> None:
    """tensor_bytes returns all bytes of a tensor that is larger than 2^32 bytes."""
    size = (4 << 30) + 5
    tensor = torch.zeros(size, dtype=torch.uint8)
    tensor[-5:] = torch.arange(5)
    data = nyacomp.tensor_bytes(tensor)
    assert len(data) == size and data[-6:] == bytes([0, 0, 1, 2, 3, 4])
    data = cpp.read_buffer(tensor.data_ptr(), size)
    assert len(data) == size and data[-6:] == bytes([0, 0, 1, 2, 3, 4])


# -- one tensor, and manifests


def test_compress_parameter(tmp_path: Path, monkeypatch) -> None:
    """A tensor is stored compressed, or raw if it does not compress, with nyacomp's metadata. Variables choose the
    name."""
    monkeypatch.chdir(tmp_path)
    Path("nya").mkdir()
    weights, noise = torch.randn(500, 40).bfloat16(), torch.randint(0, 256, (3000,), dtype=torch.uint8)
    meta, size, stored = nyacomp.compress_parameter(nn.Parameter(weights), "nya/0.gz")
    assert meta == {"filename": "nya/0.gz", "shape": [500, 40], "dtype": "bfloat16", "decompressed_size": 40000, "compressed_size": stored}
    assert size == 40000 and 0.5 < stored / size < 0.8 and Path("nya/0.gz").stat().st_size == stored
    meta, size, stored = nyacomp.compress_parameter(noise, Path("nya/1.gz"), 2)
    assert meta["filename"] == "nya/1.raw" and size == stored == 3000 and not Path("nya/1.gz").exists()
    assert Path("nya/1.raw").read_bytes() == noise.numpy().tobytes()
    # A stale file of either form is never used instead of the new file.
    meta, _, _ = nyacomp.compress_parameter(weights * 2, Path("nya/1.gz"))
    assert meta["filename"] == "nya/1.gz" and not Path("nya/1.raw").exists()
    same(_nyacomp.decompress("nya/1.gz", [500, 40], "bfloat16"), weights * 2)
    monkeypatch.setenv("UNCOMPRESSED", "1")
    assert nyacomp.compress_parameter(weights, "nya/2.gz")[0]["filename"] == "nya/2.raw"
    monkeypatch.setenv("DOWNLOAD", "1")
    assert nyacomp.compress_parameter(weights, "nya/3.gz")[0]["filename"] == "http://localhost:8080/nya/3.raw"
    with pytest.raises(ow.ArgumentError):
        nyacomp.compress_parameter(weights, "nya/4.gz", 3)


class Pipeline:
    """An object that nyacomp takes for a diffusers pipeline, because its config names parts."""

    def __init__(self) -> None:
        torch.manual_seed(6)
        self.unet, self.vae = nn.Linear(200, 30).half(), nn.Conv2d(3, 8, 3)
        self.scheduler = {"betas": torch.linspace(0, 1, 9)}
        self.config = {"_class_name": "Pipeline", "_module": "x", "unet": 1, "vae": 1, "scheduler": 1, "safety_checker": None}


def _leaves(obj: object) -> list[torch.Tensor]:
    if isinstance(obj, torch.Tensor):
        return [obj]
    if isinstance(obj, nn.Module):
        return list(obj.state_dict().values())
    parts = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple)) else vars(obj).values()
    return [leaf for part in parts if not isinstance(part, (str, int, type(None))) for leaf in _leaves(part)]


@dataclasses.dataclass
class Step:
    number: int
    tensors: list[torch.Tensor]


def test_the_functions_of_the_readme(tmp_path: Path, monkeypatch) -> None:
    """compress_pickle accepts any Python object with tensors, and `compress` accepts pipelines, modules and state
    dicts. The files are where nyacomp's README says. The caller's object does not change."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    pipe, checker = Pipeline(), nn.Linear(32, 2)
    anything = {"nested": [(checker, {"deep": [torch.arange(999)]})], "step": Step(3, [torch.randn(80, 80)]), "text": "x"}
    for algo, obj in enumerate(([pipe, checker], anything, anything)):
        before = [leaf.clone() for leaf in _leaves(obj)]
        assert 0 < nyacomp.compress_pickle(obj, "model/boneless_bundle.pkl", algo) < 1.3
        for got in (nyacomp.load_compressed_pickle("model/boneless_bundle.pkl"), obj):
            for a, b in zip(_leaves(got), before, strict=True):
                same(a, b)
    for model in (pipe, pipe.unet, pipe.unet.state_dict()):
        before = [leaf.clone() for leaf in _leaves(model)]
        assert 0 < nyacomp.compress(model, "model/boneless_model.pth") < 1.3
        for got in (nyacomp.load_compressed("model/boneless_model.pth"), model):
            assert type(got) is type(model)
            for a, b in zip(_leaves(got), before, strict=True):
                same(a, b)
    assert {path.name for path in Path("model").iterdir()} >= {"meta.csv", "merged_tensors.csv", "metadata.pkl", "nya"}
    assert [param.shape for param in nyacomp.get_pipeline_params(pipe)] == [(30, 200), (30,), (8, 3, 3, 3), (8,)]


def test_manifests_are_written_once_and_before_the_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each manifest is written once per folder and save, before the pickle that needs it. If a manifest cannot be
    written, the old object stays."""
    path = tmp_path / "line\nbreak" / "x.pkl"
    path.parent.mkdir()
    with monkeypatch.context() as patch:
        written: list[str] = []
        own = manifests.write_file
        patch.setattr(manifests, "write_file", lambda place, data: (written.append(str(place)), own(place, data))[1])
        nyacomp.compress_pickle({"a": torch.arange(999)}, path)
        assert sorted(written) == sorted(
            str(folder / name)
            for name in ("meta.csv", "metadata.pkl", "merged_tensors.csv")
            for folder in (path.parent, path.parent / "nya")
        )
    monkeypatch.setenv("DOWNLOAD", "1")  # names now include the folder, which contains a line break
    with pytest.raises(ow.ArgumentError, match="line break"):
        nyacomp.compress_pickle({"b": torch.arange(9)}, path)
    assert list(ow.load_compressed_pickle(path)) == ["a"]


def test_every_dtype_in_files(tmp_path: Path) -> None:
    """Tensors of every dtype load from tensor files, with any number of bins."""
    tensors = [
        *every_dtype().values(), torch.randn(3, dtype=torch.complex128), torch.tensor(True), torch.empty(2, 0),
        torch.tensor(1.5),
    ]
    meta = [nyacomp.compress_parameter(tensor, tmp_path / f"{at}.gz")[0] for at, tensor in enumerate(tensors)]
    for bins in (1, 3, 64):
        nyacomp.to_csv(meta, partition.massage([row["compressed_size"] for row in meta], bins), tmp_path / "meta.csv")
        assert (tmp_path / "meta.csv").read_text().split("\n")[0].count(",") == bins - 1
        for got, tensor in zip(_nyacomp.decompress_from_meta(tmp_path / "meta.csv"), tensors, strict=True):
            same(got, tensor)


def test_manifests_are_in_both_folders(tmp_path: Path) -> None:
    path = tmp_path / "model" / "x.pkl"
    path.parent.mkdir()
    nyacomp.compress_pickle({"a": torch.randn(400, 30).half(), "b": torch.arange(999)}, path)
    for name in ("meta.csv", "metadata.pkl", "merged_tensors.csv"):
        assert (path.parent / name).read_bytes() == (path.parent / "nya" / name).read_bytes()
    manifest = manifests.read_csv(path.parent / "meta.csv")
    size = (path.parent / "nya/x.safetensors").stat().st_size
    assert manifest.rows == [(str(path.parent / "nya/x.safetensors"), (size,), "uint8", size, size)]
    assert (path.parent / "merged_tensors.csv").read_text() == "0,1"
    rows, bins = manifests.read_metadata(path)
    assert bins == [[0]] and rows == [{**manifest.rows[0]._asdict(), "shape": [size]}]
    (path.parent / "nya/metadata.pkl").unlink()  # either file is enough
    (path.parent / "nya/meta.csv").unlink()
    files, bins = nyacomp.get_args(path)
    assert len(files) == 1 and len(bins) == settings.num_threads()
    same(nyacomp.get_tensors(path)[1], torch.arange(999))
    path.parent.rename(tmp_path / "moved")
    same(nyacomp.get_tensors(tmp_path / "moved/x.pkl")[1], torch.arange(999))
    assert ow.preload(tmp_path / "moved/meta.csv").uris == [str(tmp_path / "moved/nya/x.safetensors")]
    assert list(nyacomp.load_compressed_pickle(tmp_path / "moved/x.pkl")) == ["a", "b"]


def test_hostile_and_broken_manifests(tmp_path: Path) -> None:
    """A manifest with wrong numbers, names, shapes or pickled code raises a typed error."""
    lines = ("f", "f -1 uint8 1 1", "f 1 uint8 1 x", "f\0g 1 uint8 1 1")
    bins = ("0,0\nf 1 uint8 1 1", "1\nf 1 uint8 1 1", "-1\nf 1 uint8 1 1")
    for text in ("x", *bins, *(f"0\n{line}" for line in lines)):
        (tmp_path / "meta.csv").write_text(text)
        with pytest.raises(ow.FormatError):
            manifests.read_csv(tmp_path / "meta.csv")
    (tmp_path / "0.raw").write_bytes(b"")
    for shape in ("0;4611686018427387904;4611686018427387904", "9" * 30 + ";0"):
        (tmp_path / "meta.csv").write_text(f"0\n/0.raw {shape} uint8 0 0")
        with pytest.raises(ow.FormatError, match="shape"):
            _nyacomp.decompress_from_meta(tmp_path / "meta.csv")
    path = tmp_path / "x.pkl"
    row = {"filename": "x", "shape": [1], "dtype": "uint8", "decompressed_size": 1, "compressed_size": 1}
    wrong = {"filename": "a\0b", "shape": [-1], "dtype": 3, "decompressed_size": "1", "compressed_size": -1}
    for field, value in [*wrong.items(), ("filename", 7), ("shape", "1"), ("shape", [True])]:
        (tmp_path / "metadata.pkl").write_bytes(pickle.dumps([row | {field: value}, [[0]]]))
        with pytest.raises(ow.FormatError, match="five fields"):
            nyacomp.get_args(path)
    for data, kind in (
        (pickle.dumps([os.getcwd, []]), ow.UntrustedPickleError),
        (b"nonsense", ow.FormatError),
        (pickle.dumps([{"filename": "x"}, [[0]]]), ow.FormatError),
        (pickle.dumps([{}, [[0]]]), ow.FormatError),
    ):
        (tmp_path / "metadata.pkl").write_bytes(data)
        with pytest.raises(kind):
            manifests.read_metadata(path)
    (tmp_path / "metadata.pkl").unlink()
    with pytest.raises(ow.NotFoundError):
        nyacomp.get_args(path)


# -- bundles in nyacomp's own layout


def _write_layout(folder: Path, tensors: list[torch.Tensor], monkeypatch, anchored: bool = False) -> None:
    """Writes tensor files and manifests in nyacomp's layout, with names relative to folder's parent."""
    monkeypatch.chdir(folder.parent)
    (folder / "nya").mkdir(parents=True, exist_ok=True)
    merged, info = nyacomp.merge_tensors(tensors, 80_000)
    meta = [nyacomp.compress_parameter(t, Path(folder.name, "nya", f"{at}.gz"))[0] for at, t in enumerate(merged)]
    for row in meta:
        row["filename"] = ("/" if anchored else "") + row["filename"]
    (folder / "merged_tensors.csv").write_text(info)
    bins = partition.massage([row["compressed_size"] for row in meta], 5)
    nyacomp.to_csv(meta, bins, folder / "nya/meta.csv")
    (folder / "nya/metadata.pkl").write_bytes(pickle.dumps([*meta, bins]))


class _Numbering(pickle.Pickler):
    def __init__(self, file, tensors: list[torch.Tensor]) -> None:
        super().__init__(file, protocol=5)
        self.tensors = tensors

    def persistent_id(self, obj):
        if isinstance(obj, torch.Tensor) and obj.nbytes >= 1024:
            self.tensors.append(obj)
            return len(self.tensors) - 1
        return None


@pytest.mark.parametrize("anchored", [False, True])
def test_pickles_in_nyacomps_layout(tmp_path: Path, monkeypatch, anchored: bool) -> None:
    """A pickle with one file per tensor loads with any setting, from a preload, and after its folder was moved."""
    obj = {
        "w": [torch.randn(200, 90).bfloat16() for _ in range(5)],
        "n": torch.randint(0, 256, (2000,), dtype=torch.uint8),
        "s": torch.ones(3),
    }
    folder, tensors = tmp_path / "model", []
    folder.mkdir()
    with open(folder / "x.pkl", "wb") as file:
        _Numbering(file, tensors).dump(obj)
    assert len(tensors) == 6
    _write_layout(folder, tensors, monkeypatch, anchored)
    assert {p.suffix for p in (folder / "nya").iterdir()} >= {".gz", ".raw"}
    ways = [{}, {"PYTHON_ARGS": "1"}, {"PYTHON_ARGS": "1", "REDO_PARTITION": "1"}, {"NUM_THREADS": "3"}]
    for env in ways:
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            got = nyacomp.load_compressed_pickle("model/x.pkl")
        for a, b in zip([*got["w"], got["n"], got["s"]], [*obj["w"], obj["n"], obj["s"]], strict=True):
            same(a, b)
    # Each load from a preload gets tensors of its own.
    monkeypatch.setattr(bundles, "decompressor", _nyacomp.AsyncDecompressor("model/nya/meta.csv"))
    first, second = (nyacomp.load_compressed_pickle("model/x.pkl") for _ in range(2))
    first["n"].zero_()
    same(second["n"], obj["n"])
    monkeypatch.setattr(bundles, "decompressor", None)
    monkeypatch.chdir("/")
    folder.rename(tmp_path / "moved")
    same(nyacomp.load_compressed_pickle(tmp_path / "moved/x.pkl")["w"][3], obj["w"][3])
    (tmp_path / "moved/nya/meta.csv").unlink()
    monkeypatch.setenv("PRELOAD_PATH", str(tmp_path / "nope.csv"))
    with pytest.raises(ow.NotFoundError):
        nyacomp.load_compressed_pickle(tmp_path / "moved/x.pkl")


def test_modules_in_nyacomps_layout(tmp_path: Path, monkeypatch) -> None:
    """A module with emptied parameters gets them from tensor files. If their number differs, loading is refused."""
    module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)).half()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    _write_layout(tmp_path / "m", [param.detach().clone() for param in module.parameters()], monkeypatch)
    for param in module.parameters():
        param.data = torch.empty(0, dtype=param.dtype)
    torch.save(module, tmp_path / "m/boneless_model.pth")
    got = nyacomp.load_compressed("m/boneless_model.pth")
    assert all(isinstance(param, nn.Parameter) for param in got.parameters())
    for name, tensor in got.state_dict().items():
        same(tensor, state[name])
    # If the number of parameters and tensors differs, an error is raised, so that no parameter gets the wrong tensor.
    torch.save(module[0], tmp_path / "m/boneless_model.pth")
    with pytest.raises(ow.FormatError, match="empty parameters"):
        nyacomp.load_compressed("m/boneless_model.pth")


def test_files_that_only_nvcomp_reads_are_refused(tmp_path: Path, monkeypatch, script) -> None:
    (tmp_path / "nya").mkdir()
    header = bytearray(64)
    header[4:7] = bytes([3, 0, 5])
    for at, value in ((8, 36), (16, 2048), (24, 1), (48, 65536)):
        header[at : at + 8] = value.to_bytes(8, "little")
    header[56:60] = (64).to_bytes(4, "little")
    (tmp_path / "nya/0.gz").write_bytes(bytes(header) + bytes(36))
    (tmp_path / "nya/meta.csv").write_text("0\n/nya/0.gz 1024 float16 2048 100")
    (tmp_path / "merged_tensors.csv").write_text("0")
    (tmp_path / "x.pkl").write_bytes(b"\x80\x05K\x00Q.")
    with pytest.raises(ow.NotSupportedError, match="Bitcomp of nvCOMP 3.0.*only nvCOMP reads it"):
        nyacomp.load_compressed_pickle(tmp_path / "x.pkl")
    with pytest.raises(ow.NotSupportedError, match="nyacomp itself"):
        ow.preload(tmp_path / "nya/meta.csv")
    (tmp_path / "nya/0.gz").write_bytes(b"nonsense" * 99)
    with pytest.raises(ow.FormatError):
        nyacomp.load_compressed_pickle(tmp_path / "x.pkl")
    # `recompress` of a bundle that overwire itself can read.
    weights = torch.randn(512)
    row, _, _ = nyacomp.compress_parameter(weights.view(1, 512), tmp_path / "nya/0.gz")
    nyacomp.to_csv([row], [[0]], tmp_path / "nya/meta.csv")
    from overwire.compat.nyacomp.__main__ import main

    assert main(["recompress", str(tmp_path / "x.pkl"), str(tmp_path / "new.pkl")]) == 0
    same(ow.load_compressed_pickle(tmp_path / "new.pkl"), weights)
    assert main(["recompress", str(tmp_path / "nope.pkl"), str(tmp_path / "new.pkl")]) == 1 and main([]) == 2


def _nvcomp_file(data: bytes, seed: int) -> bytes:
    """Builds a file in the layout of nvCOMP 3, with chunks in the order in which its blocks have finished."""
    chunk, draw = 65536, random.Random(seed)
    stored = [bytes(ow.codecs.encode(data[at : at + chunk], "GDeflate", bitstream="raw")) for at in range(0, len(data), chunk)]
    order = draw.sample(range(len(stored)), len(stored))
    offsets, payload = [0] * len(stored), b""
    for at in order:
        offsets[at] = len(payload)
        payload += stored[at] + bytes(-len(stored[at]) % 8)
    tables = b"".join(value.to_bytes(8, "little") for value in [*offsets, *map(len, stored)])
    sums = draw.randbytes(8 * len(stored))  # dummies in place of nvCOMP's checksums
    offset = 72 + len(tables) + len(sums)
    head = bytearray(72)
    struct.pack_into("<IBBBxQQQBxxxIIBBxxQI", head, 0, 0, 3, 0, 3, len(payload), len(data), len(stored), 1, 7, 7, 1, 1, chunk, offset)
    return bytes(head) + tables + sums + payload


def test_gdeflate_files_of_nyacomp(tmp_path: Path, caplog) -> None:
    """GDeflate files in nvCOMP's container are decoded, with a warning that their checksums were not compared. Damage
    to a chunk, a table or a size raises a typed error. `recompress` makes a bundle from them without nyacomp or a
    GPU."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    torch.manual_seed(seed)
    weights = torch.randn(3, 50_000).bfloat16()
    data = weights.view(torch.uint8).numpy().tobytes()
    file = _nvcomp_file(data, seed)
    (tmp_path / "nya").mkdir()
    (tmp_path / "nya/0.gz").write_bytes(file)
    (tmp_path / "nya/meta.csv").write_text(f"0\n/nya/0.gz 3;50000 bfloat16 {len(data)} {len(file)}")
    (tmp_path / "merged_tensors.csv").write_text("0,1,2")
    (tmp_path / "x.pkl").write_bytes(b"\x80\x05](K\x00QK\x01QK\x02Qe.")
    with caplog.at_level(logging.WARNING, "overwire"):
        got = nyacomp.load_compressed_pickle(tmp_path / "x.pkl")
    assert "are not compared" in caplog.text
    for one, want in zip(got, weights, strict=True):
        same(one, want)
    assert torch.equal(_nyacomp.decompress(str(tmp_path / "nya/0.gz"), [150_000], "bfloat16"), weights.reshape(-1))
    from overwire.compat.nyacomp.__main__ import main

    assert main(["recompress", str(tmp_path / "x.pkl"), str(tmp_path / "new/new.pkl")]) == 0
    same(ow.load_compressed_pickle(tmp_path / "new/new.pkl")[2], weights[2])
    draw = random.Random(seed)
    for _ in range(60):
        bad = bytearray(file)
        bad[draw.randrange(len(file))] ^= 1 << draw.randrange(8)
        cut = bytes(bad[: draw.randrange(len(bad))]) if draw.random() < 0.3 else bytes(bad)
        (tmp_path / "nya/0.gz").write_bytes(cut)
        try:
            (one,) = _nyacomp.decompress_from_meta(tmp_path / "nya/meta.csv")
            assert one.shape == (3, 50_000) and one.dtype == torch.bfloat16, f"seed {seed}"
        except (ow.FormatError, ow.CorruptError, ow.NotSupportedError) as error:
            assert "0.gz" in str(error), f"seed {seed}"
    # If file and manifest agree on an absurd size, no memory is allocated for it.
    huge = bytearray(file)
    struct.pack_into("<Q", huge, 16, 1 << 62)
    (tmp_path / "nya/0.gz").write_bytes(huge)
    (tmp_path / "nya/meta.csv").write_text(f"0\n/nya/0.gz {1 << 62} uint8 {1 << 62} {len(file)}")
    with pytest.raises(ow.CorruptError, match="0.gz"):
        _nyacomp.decompress_from_meta(tmp_path / "nya/meta.csv")


def test_only_empty_removes_the_callers_weights(tmp_path: Path) -> None:
    module = nn.Linear(30, 30)
    nyacomp.compress(module, tmp_path / "m.pth")
    assert module.weight.shape == (30, 30)
    got = nyacomp.load_compressed(str(tmp_path / "m.pth"))
    nyacomp.compress(module, tmp_path / "m.pth", empty=True)
    assert module.weight.shape == (0,) and torch.equal(nyacomp.load_compressed(tmp_path / "m.pth").weight, got.weight)


def test_uncompressed_bundles(tmp_path: Path, monkeypatch) -> None:
    """With UNCOMPRESSED, a bundle's container is a plain file."""
    monkeypatch.setenv("UNCOMPRESSED", "yes")
    module = nn.Linear(300, 30).half()
    assert nyacomp.compress(module, tmp_path / "m.pth") > 1
    assert ow.inspect(tmp_path / "m.pth")["sources"][0]["format"] == "safetensors"
    assert torch.equal(nyacomp.load_compressed(tmp_path / "m.pth").weight, module.weight)


# -- downloads; file:// stands for every scheme that the engine supports


def test_downloads_from_host(tmp_path: Path, monkeypatch) -> None:
    """With DOWNLOAD, manifests name URLs below HOST, and loads read from there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOWNLOAD", "1")
    monkeypatch.setenv("HOST", f"file://{tmp_path}/bucket/")
    Path("model").mkdir()
    obj = {"w": torch.randn(99, 99), "n": 3}
    nyacomp.compress_pickle(obj, "model/x.pkl")
    url = f"file://{tmp_path}/bucket/model/nya/x.safetensors"
    assert manifests.read_csv("model/meta.csv").rows[0].filename == url
    Path("bucket/model").mkdir(parents=True)
    Path("model/nya").rename("bucket/model/nya")  # simulates the manual upload
    same(nyacomp.load_compressed_pickle("model/x.pkl")["w"], obj["w"])
    job = ow.preload(f"file://{tmp_path}/bucket/model/nya/meta.csv")
    assert job.uris == [f"{tmp_path}/bucket/model/nya/x.safetensors"]
    monkeypatch.setenv("DOWNLOAD", "0")  # "0" turns downloads off
    with pytest.raises(ow.NotFoundError):
        nyacomp.load_compressed_pickle("model/x.pkl")
    with pytest.raises(ow.NotSupportedError, match="ftp"):
        ow.read_bytes("ftp://host/meta.csv")


# -- variables


def test_invalid_values_cause_warnings(monkeypatch, caplog) -> None:
    monkeypatch.setenv("DOWNLOAD", "perhaps")
    monkeypatch.setenv("CHUNK_SIZE", "1MB")
    monkeypatch.setenv("NUM_STREAMS", "-3")
    monkeypatch.setenv("SLEEP", "3")
    monkeypatch.setenv("NUM_THREADS", "many")
    warnings = settings.check()
    assert len(warnings) == 3 and all(name in "".join(warnings) for name in ("DOWNLOAD", "CHUNK_SIZE", "NUM_STREAMS"))
    assert all(warning in caplog.text for warning in warnings)
    assert settings.host() == "" and settings.num_threads() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("NUM_THREADS", "8")
    assert settings.num_threads() == 8
    monkeypatch.setenv("OVERWIRE_THREADS", "5")
    assert settings.num_threads() == 5
    monkeypatch.setenv("DOWNLOAD", "on")
    assert settings.host() == "http://localhost:8080"


VARIABLES = (
    "DEBUG SILENT DEBUG_MALLOC DEBUG_SYNC NOTIME NUM_THREADS NUM_STREAMS CHUNK_SIZE NUM_CIRCLE_BUFFERS UNPINNED_JOBS UNPINNED_THREADS "
    "SLEEP TENSOR_EARLY SYNC_DECOMPRESS SYNC_FREE REUSE_COMP_BUFFER WILLNEED SEQUENTIAL DOWNLOAD REMOTE_CSV DOWNLOADER_PATH DOWNLOAD_LOG "
    "SKIP_SETPIPE_SZ NAME PRELOAD_PATH NO_PRELOAD LOAD_UNCOMPRESSED HOST UNCOMPRESSED RECOMPRESS PYTHON_ARGS REDO_PARTITION "
    "NO_HIDE_MODULES SYMLINK_CUDART RUN_MAIN COMPRESS DIFFUSERS ENV PROF GOOD TORCH HUB_OFFLINE TRANSFORMERS_OFFLINE TOTAL_FILE_SIZE "
    "VMSPLICE DISABLE_REMOTEFILE_CACHE CACHE_IP_OVERRIDE PGET_HOST_IP"
).split()


def test_no_variable_affects_the_import(tmp_path: Path, script) -> None:
    """Even if every variable that nyacomp, its extension and remotefile read or set contains nonsense or a number, the
    import works, sets no variable and writes nothing. docs/nyacomp.md names each variable."""
    source = """
import os, sys
before = dict(os.environ)
import nyacomp, _nyacomp, overwire
overwire.doctor()
nyacomp.hf, nyacomp.partition.massage([3, 4, 5], 2), nyacomp.natsize(3)
assert dict(os.environ) == before and "torch" not in sys.modules
for name in ("jax", "flax", "accelerate", "wandb"):
    assert name not in sys.modules and not any("nyacomp" in type(finder).__module__ for finder in sys.meta_path)
"""
    path = os.pathsep.join(filter(None, [compat.path("nyacomp"), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "tmp").mkdir()
    for value in ("a; b", "7"):
        env = dict.fromkeys(VARIABLES, value) | {"PRELOAD_PATH": "", "PYTHONPATH": path, "TMPDIR": str(tmp_path / "tmp")}
        done = script(source, **env)
        assert done.stdout == "" and "Traceback" not in done.stderr
        if value != "7":
            assert "NUM_STREAMS='a; b' ignored" in done.stderr and "DOWNLOAD='a; b' ignored" in done.stderr
    assert [str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*")] == ["tmp"]
    page = (ROOT / "docs/nyacomp.md").read_text()
    assert not [name for name in VARIABLES if not re.search(rf"\b{name}\b", page)]


def test_preloads_start_as_in_nyacomp(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PRELOAD_PATH", "NO_PRELOAD", "LOAD_UNCOMPRESSED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(bundles, "decompressor", None)
    bundles.start_preload()
    assert bundles.decompressor is None  # no setting and no default file
    Path("data/nya").mkdir(parents=True)
    ow.compress_pickle({"w": torch.arange(99)}, "data/x.pkl")
    monkeypatch.setenv("NO_PRELOAD", "1")
    bundles.start_preload()
    assert bundles.decompressor is None
    monkeypatch.delenv("NO_PRELOAD")
    bundles.start_preload()
    assert bundles.decompressor is not None
    tensors = nyacomp.get_tensors("data/x.pkl")
    assert tensors[0] is nyacomp.get_tensors("data/x.pkl")[0]
    same(tensors[0], torch.arange(99))
    ow.compress_pickle({"w": torch.arange(5)}, tmp_path / "y.pkl")
    same(nyacomp.get_tensors(tmp_path / "y.pkl")[0], torch.arange(5))  # another bundle's path is used


def test_annotate_works_like_nvtxs() -> None:
    """annotate works as a context manager and a decorator, with a positional or named message, even without nvtx."""
    with nyacomp.annotate(message="a"), nyacomp.annotate("b"):
        assert nyacomp.annotate("c")(lambda: 7)() == 7

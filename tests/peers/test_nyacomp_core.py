"""Tests the drop-in for `_nyacomp`, nyacomp's extension, which compresses tensors as bytes and loads them in the
background."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import overwire as ow
import pytest
import torch
from conftest import same
from overwire.compat import nyacomp
from overwire.compat.nyacomp import _nyacomp, tensor_bytes


def _write(folder: Path, tensors: list[torch.Tensor], bins: str = "0") -> Path:
    """Writes files and a meta.csv through `_nyacomp`, like nyacomp."""
    lines = [bins]
    folder.mkdir(parents=True, exist_ok=True)
    for at, tensor in enumerate(tensors):
        data, file = tensor_bytes(tensor), folder / f"{at}.gz"
        size = _nyacomp.compress(data, str(file))
        if size > len(data):
            file.unlink()
            file, size = file.with_suffix(".raw"), len(data)
            file.write_bytes(data)
        dtype = str(tensor.dtype).removeprefix("torch.")
        lines.append(f"/{file} {';'.join(map(str, tensor.shape))} {dtype} {len(data)} {size}")
    (folder / "meta.csv").write_text("\n".join(lines))
    return folder / "meta.csv"


def _some() -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [
        torch.randn(900, 80).bfloat16(),
        torch.randint(0, 256, (999,), dtype=torch.uint8),
        torch.randn(270, 70),
        torch.randn(30000).half(),
    ]


def test_compressed_bytes_are_smaller_and_restored(tmp_path: Path) -> None:
    torch.manual_seed(1)
    weights = torch.randn(300_000) * 0.02
    # The largest allowed ratios for one tensor of 300,000 values. nyacomp itself reaches 0.79, 0.92 and 0.93.
    wanted = {torch.bfloat16: 0.68, torch.float16: 0.86, torch.float32: 0.84, torch.float64: 1.01}
    for algo, (dtype, most) in enumerate(wanted.items()):
        tensor = weights.to(dtype)
        data = tensor_bytes(tensor)
        size = _nyacomp.compress(data, str(tmp_path / "x.gz"), algo % 3)
        assert size == (tmp_path / "x.gz").stat().st_size and size < most * len(data), dtype
        same(_nyacomp.decompress(str(tmp_path / "x.gz"), list(tensor.shape), str(dtype).removeprefix("torch.")), tensor)
    held = weights.bfloat16().float()
    assert _nyacomp.compress(tensor_bytes(held), str(tmp_path / "x.gz")) < 0.4 * held.nbytes


def test_random_bytes_are_restored(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for size in (0, 1, 2, 3, 7, 8, 1000, 1_200_001):
        data = rng.randbytes(size)
        stored = _nyacomp.compress(bytearray(data) if size % 2 else data, tmp_path / "x.gz")
        assert stored >= size  # callers then store the bytes as they are
        assert tensor_bytes(_nyacomp.decompress(tmp_path / "x.gz", [size], "uint8")) == data
    with pytest.raises(ow.ArgumentError):
        _nyacomp.compress(b"", tmp_path / "x.gz", 3)
    with pytest.raises(ow.NotFoundError):
        _nyacomp.compress(b"abc", tmp_path / "no/x.gz")


@pytest.mark.parametrize("bins", ["0;1;2;3", "3,2,1,0", "2;0,,,3,1", ",".join("3210") + "," * 60])
def test_any_number_of_bins(tmp_path: Path, bins: str) -> None:
    """Every way to distribute tensors over bins loads them. Impossible indices are refused."""
    csv = _write(tmp_path / "nya", _some(), bins)
    for got, tensor in zip(_nyacomp.decompress_from_meta(str(csv)), _some(), strict=True):
        same(got, tensor)
        got.zero_()  # the tensor is writable and not shared
    files = [_nyacomp.CompressedFile(str(tmp_path / "nya/0.gz"), [900, 80], "bfloat16", 144000, 1)]
    assert "0.gz" in repr(files[0]) and not files[0].raw
    same(_nyacomp.batch_decompress(files, [[], [0], []])[0], _some()[0])
    assert _nyacomp.batch_decompress([], [[]]) == []
    for wrong in ([[1]], [[0], [0]], [[-1]]):
        with pytest.raises(ow.ArgumentError):
            _nyacomp.batch_decompress(files, wrong)


def test_each_result_has_its_own_storage(tmp_path: Path) -> None:
    got = _nyacomp.decompress_from_meta(_write(tmp_path, _some()))
    assert [t.untyped_storage().nbytes() for t in got] == [t.nbytes for t in _some()]


def test_renamed_and_copied_files(tmp_path: Path) -> None:
    """Tensor files load after a copy, after a move of their folder, and by file:// URI."""
    csv = _write(tmp_path / "a folder", _some())
    shutil.copy(tmp_path / "a folder/0.gz", tmp_path / "copy.gz")
    names = [str(tmp_path / "copy.gz"), str(tmp_path / "a folder/0.gz")]
    files = [_nyacomp.CompressedFile(name, [900, 80], "bfloat16", 144000, 1) for name in names]
    for got in _nyacomp.batch_decompress(files, [[1, 0]]):
        same(got, _some()[0])
    (tmp_path / "a folder").rename(tmp_path / "b")
    csv = tmp_path / "b/meta.csv"
    for got, tensor in zip(_nyacomp.decompress_from_meta(csv), _some(), strict=True):
        same(got, tensor)
    for got, tensor in zip(_nyacomp.decompress_from_meta(f"file://{csv}"), _some(), strict=True):
        same(got, tensor)
    text = csv.read_text()
    (tmp_path / "c").mkdir()
    (tmp_path / "c/meta.csv").write_text(text.replace(f"/{tmp_path}/a folder", f"file://{tmp_path}/b"))
    for got, tensor in zip(_nyacomp.decompress_from_meta(tmp_path / "c/meta.csv"), _some(), strict=True):
        same(got, tensor)


def test_damage_is_refused(tmp_path: Path, seed: int) -> None:
    """Damage anywhere is refused, except in the padding at the end, which no tensor uses."""
    rng = random.Random(seed)
    csv = _write(tmp_path, _some())
    good = (tmp_path / "0.gz").read_bytes()
    padding = len(good) - len(good.rstrip(b"\0"))
    assert padding < 64
    for at in [rng.randrange(len(good)) for _ in range(60)] + [len(good) - padding - 1, len(good) - 1]:
        bad = bytearray(good)
        bad[at] ^= 1 << rng.randrange(8)
        (tmp_path / "0.gz").write_bytes(bad)
        if at < len(good) - padding:
            with pytest.raises(ow.OverwireError):
                _nyacomp.decompress_from_meta(csv)
            continue
        with contextlib.suppress(ow.OverwireError):
            same(_nyacomp.decompress_from_meta(csv)[0], _some()[0])
    for length in (0, 5, 100, len(good) - 1):
        (tmp_path / "0.gz").write_bytes(good[:length])
        with pytest.raises(ow.OverwireError):
            _nyacomp.decompress_from_meta(csv)
    (tmp_path / "0.gz").write_bytes(good)
    for data in (b"", bytes(998), bytes(1000)):
        (tmp_path / "1.raw").write_bytes(data)
        with pytest.raises(ow.CorruptError, match="1.raw"):
            _nyacomp.decompress_from_meta(csv)
    (tmp_path / "1.raw").unlink()
    with pytest.raises(ow.NotFoundError, match="1.raw"):
        _nyacomp.decompress_from_meta(csv)
    for shape, dtype in (
        ([900, 81], "bfloat16"),
        ([900, 80], "float32"),
        ([900, 80], "no_such"),
        ([900, 80], "Tensor"),
        ([1 << 40, 80], "int8"),
    ):
        with pytest.raises(ow.FormatError):
            _nyacomp.decompress(tmp_path / "0.gz", shape, dtype)
    with pytest.raises(ow.FormatError, match="listed"):  # the numbers in the csv must agree with the file
        _nyacomp.batch_decompress([_nyacomp.CompressedFile(tmp_path / "0.gz", [900, 80], "bfloat16", 99, 1)], [[0]])


# -- loads in the background


def test_get_can_be_called_several_times_and_by_threads(tmp_path: Path) -> None:
    csv = _write(tmp_path, _some())
    decompressor = _nyacomp.AsyncDecompressor(str(csv))
    found: list[list[torch.Tensor]] = []
    threads = [threading.Thread(target=lambda: found.append(decompressor.get())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(a is b for other in found for a, b in zip(found[0], other, strict=True))
    shutil.rmtree(tmp_path)
    for got, tensor in zip(decompressor.get(), _some(), strict=True):
        same(got, tensor)


def test_a_decompressor_loads_in_advance(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "overwire")
    csv = _write(tmp_path, [torch.randn(300, 300).half(), torch.randn(50000).bfloat16()])
    wanted = _nyacomp.decompress_from_meta(csv)
    decompressor = _nyacomp.AsyncDecompressor(csv)
    assert decompressor._preload is not None and decompressor._preload.wait(60)
    for got, tensor in zip(decompressor.get(), wanted, strict=True):
        same(got, tensor)
    assert "joins its preload" in caplog.text
    # Files that were rewritten after a preload are read again, so a load never returns old bytes.
    decompressor = _nyacomp.AsyncDecompressor(csv)
    assert decompressor._preload is not None and decompressor._preload.wait(60)
    for at in (0, 1):
        file = tmp_path / f"{at}.gz"
        data = bytearray(file.read_bytes())
        data[-2000:] = bytes(2000)  # changes the bytes of tensors, not headers
        file.write_bytes(data)
    with pytest.raises(ow.CorruptError):
        _nyacomp.decompress(tmp_path / "0.gz", [300, 300], "float16")
    with pytest.raises(ow.CorruptError):
        decompressor.get()


def test_get_raises_errors_and_a_second_get_tries_again(tmp_path: Path) -> None:
    decompressor = _nyacomp.AsyncDecompressor(tmp_path / "meta.csv")
    for _ in range(2):
        with pytest.raises(ow.NotFoundError, match="meta.csv"):
            decompressor.get()
    _write(tmp_path, _some())
    same(decompressor.get()[2], _some()[2])


def test_long_calls_release_the_gil(tmp_path: Path) -> None:
    """Other Python threads run while tensors are compressed, decompressed or waited for."""
    torch.manual_seed(2)
    tensor = torch.randn(12 << 20).bfloat16()
    data = bytearray(tensor.view(torch.uint8).numpy())
    size = _nyacomp.compress(data, tmp_path / "0.gz")
    (tmp_path / "meta.csv").write_text(f"0\n{tmp_path}/0.gz {tensor.numel()} bfloat16 {tensor.nbytes} {size}")
    files = [_nyacomp.CompressedFile(str(tmp_path / "0.gz"), tensor.shape, "bfloat16", tensor.nbytes, size)]
    bundle = tmp_path / "x.pkl"
    calls = {
        "compress": lambda: _nyacomp.compress(data, tmp_path / "0.gz"),
        "decompress": lambda: _nyacomp.decompress(tmp_path / "0.gz", tensor.shape, "bfloat16"),
        "batch_decompress": lambda: _nyacomp.batch_decompress(files, [[0]]),
        "decompress_from_meta": lambda: _nyacomp.decompress_from_meta(tmp_path / "meta.csv"),
        "get": lambda: _nyacomp.AsyncDecompressor(tmp_path / "meta.csv").get(),
        "compress_pickle": lambda: nyacomp.compress_pickle([tensor], bundle),
        "load_compressed_pickle": lambda: nyacomp.load_compressed_pickle(bundle),
    }
    ticks = [0]
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for name, call in calls.items():
            counted: list[int] = []
            while len(counted) < 20 and max(counted, default=0) < 5:  # a busy machine may pause any thread
                before = ticks[0]
                call()
                counted.append(ticks[0] - before)
            assert max(counted) >= 5, (name, counted)
    finally:
        stop.set()
        thread.join()


def test_import_without_torch_gpu_or_csv(tmp_path: Path, script) -> None:
    """The import works without torch, without a GPU, and with a PRELOAD_PATH that names a missing csv. Only the load
    reports what is missing."""
    path = os.pathsep.join(filter(None, [_folder("nyacomp"), os.environ.get("PYTHONPATH", "")]))
    source = """
import sys
sys.modules["torch"] = None
import nyacomp, _nyacomp
from nyacomp import hf, partition
assert partition.massage([5, 4, 3], 2) and _nyacomp.CompressedFile("x", [1], "uint8", 1, 1).filename == "x"
if nyacomp.decompressor is not None:
    try:
        nyacomp.decompressor.get()
    except OSError as error:
        assert "meta.csv" in str(error), error
    else:
        raise AssertionError
"""
    for env in ({}, {"PRELOAD_PATH": str(tmp_path / "none/meta.csv")}):
        done = script(source, PYTHONPATH=path, CUDA_VISIBLE_DEVICES="", **env)
        assert "Traceback" not in done.stderr and ("nothing is preloaded" in done.stderr) == bool(env)


IMPORT = """
import sys, os, threading
before = set(os.listdir("."))
import nyacomp, _nyacomp, nyacomp.hf, nyacomp.partition
from nyacomp import partition
assert not {"torch", "numpy"} & set(sys.modules), "imports torch"
assert nyacomp.hf is sys.modules["nyacomp.hf"] and nyacomp.partition is partition and nyacomp._nyacomp is _nyacomp
assert "overwire" in nyacomp.__file__ and nyacomp.decompressor is None and "overwire._core" not in sys.modules
assert set(os.listdir(".")) == before
"""


def _folder(name: str) -> str:
    done = subprocess.run([sys.executable, "-m", "overwire.compat", "path", name], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_names_on_pythonpath(script) -> None:
    """With the drop-in's folder on PYTHONPATH, programs import `nyacomp` or only `_nyacomp`."""
    def on(name: str) -> str:
        return os.pathsep.join(filter(None, [_folder(name), os.environ.get("PYTHONPATH", "")]))

    done = script(IMPORT, PYTHONPATH=on("nyacomp"), NUM_THREADS="many", CHUNK_SIZE="x")
    assert done.stdout == "" and "CHUNK_SIZE='x' ignored" in done.stderr
    script(
        "import _nyacomp; assert _nyacomp.AsyncDecompressor; import sys; assert 'nyacomp' not in sys.modules", PYTHONPATH=on("nyacomp_core")
    )
    script("import nyacomp.hf; assert nyacomp.hf.good_load; from nyacomp.partition import massage", PYTHONPATH=on("nyacomp"))
    failed = script("import nyacomp", check=False, PYTHONPATH=on("nyacomp_core"))
    assert "No module named 'nyacomp'" in failed.stderr
    wrong = subprocess.run([sys.executable, "-m", "overwire.compat", "path", "other"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and "nyacomp_core" in wrong.stderr


def test_install_in_a_process(script) -> None:
    """`install` makes `nyacomp` or only `_nyacomp` importable, and refuses unknown names."""
    script(
        """
import overwire, sys
assert "overwire.compat.nyacomp" not in sys.modules
overwire.compat.install("nyacomp_core")
import _nyacomp
assert "nyacomp" not in sys.modules
overwire.compat.install("nyacomp")
import nyacomp
assert nyacomp._nyacomp is _nyacomp and {"nyacomp", "nyacomp_core"} <= set(overwire.compat.names())
try:
    overwire.compat.install("other")
except overwire.ArgumentError as error:
    assert "nyacomp" in str(error)
else:
    raise AssertionError
"""
    )

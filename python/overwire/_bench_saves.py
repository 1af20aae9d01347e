"""Measures saving for `overwire bench --device cuda`, compared with machine limits and other libraries.

A row is measured in a fork of a process that has only imported torch. The fork loads the model
to the device, saves it twice, and compares the files of the first save with the model. A row's
limit is the time that os.pwrite takes for the same number of bytes and files.
"""

from __future__ import annotations

import concurrent.futures
import gc
import importlib
import importlib.util
import json
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Tensors = dict[str, Any]
Wait = Callable[[], Any]
Save = Callable[[Tensors, str], Wait | None]  # returns when the tensors may change; its result waits for the end
Run = Callable[[Callable[[], Any]], Any]

_KINDS = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}
_FILES = 8
_PIECE = 8 << 20
_THREADS = 16


# -- save functions: each takes tensors and a folder


def _save_file(tensors: Tensors, folder: str, files: int = 1, wait: bool = True, **how: Any) -> Wait | None:
    import overwire as ow

    if files > 1:
        how["max_shard_size"] = sum(tensor.nbytes for tensor in tensors.values()) // files + (1 << 20)
    if wait:
        ow.save_file(tensors, folder + "/model.safetensors", **how)
        return None
    return ow.save_file(tensors, folder + "/model.safetensors", wait=False, **how).wait


def _save_checkpoint(ours: bool) -> Save:
    writers: dict[str, Any] = {}

    def save_state(tensors: Tensors, folder: str) -> Wait:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        checkpoints: Any = importlib.import_module("overwire.checkpoints")
        dist: Any = importlib.import_module("torch.distributed")
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")

        warnings.simplefilter("ignore")
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        at = folder + "/checkpoint"
        if ours:
            stager: Any = writers.setdefault("stager", checkpoints.CheckpointStager())
            writer: Any = checkpoints.CheckpointWriter(at)
        else:
            on_gpu = next(iter(tensors.values())).is_cuda
            stager = DefaultStager(StagingOptions(on_gpu, False, False, on_gpu))
            writer = dcp.FileSystemWriter(at, thread_count=_THREADS)
        saving = dcp.async_save(tensors, storage_writer=writer, async_stager=stager)
        result: Wait = saving.result
        return result

    return save_state


def _save_by(module: str, name: str, file: str) -> Save:
    def save_state(tensors: Tensors, folder: str) -> None:
        getattr(importlib.import_module(module), name)(tensors, f"{folder}/{file}")

    return save_state


def _read_back(folder: str) -> Tensors:
    """Loads the tensors that a save has written to the folder."""
    import torch

    import overwire as ow

    at = Path(folder)
    if (at / "model.pt").exists():
        tensors: Tensors = torch.load(at / "model.pt", weights_only=True)
        return tensors
    if (at / "model.pkl").exists():
        return ow.load_compressed_pickle(at / "model.pkl", trust=True)  # type: ignore[no-any-return]
    if (at / "checkpoint" / ".metadata").exists():
        dcp: Any = importlib.import_module("torch.distributed.checkpoint")
        reader = dcp.FileSystemReader(at / "checkpoint")
        entries = reader.read_metadata().state_dict_metadata
        into = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in entries.items()}
        dcp.load(into, storage_reader=reader)
        return into
    return ow.load_file(at / "checkpoint" if (at / "checkpoint").exists() else at)


#: Each save by name: its function, its number of files (0: no limit is measured), the required package.
_WAYS: dict[str, tuple[Save, int, str]] = {
    "save_file": (_save_file, 1, ""),
    "save_file, 8 files": (partial(_save_file, files=_FILES), _FILES, ""),
    "save_file, plain, 8 files": (partial(_save_file, files=_FILES, compress=False), _FILES, ""),
    "save_file(wait=False), 8 files": (partial(_save_file, files=_FILES, wait=False), _FILES, ""),
    "compress_pickle": (_save_by("overwire", "compress_pickle", "model.pkl"), 1, ""),
    "dcp.async_save by overwire": (_save_checkpoint(True), 0, ""),
    "dcp.async_save, pinned stager": (_save_checkpoint(False), 0, ""),
    "safetensors save_file": (_save_by("safetensors.torch", "save_file", "model.safetensors"), 0, "safetensors"),
    "torch.save": (_save_by("torch", "save", "model.pt"), 0, ""),
}


# -- measurements


def read_plain(path: Path) -> dict[str, tuple[Any, Any, list[int]]]:
    """Maps a plain file without overwire. Returns the bytes, dtype and shape of each tensor."""
    import torch

    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(size))
    table.pop("__metadata__", None)
    data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    tensors = {}
    for name, entry in table.items():
        low, high = (8 + size + at for at in entry["data_offsets"])
        tensors[name] = data[low:high], getattr(torch, _KINDS[entry["dtype"]]), entry["shape"]
    return tensors


def find_difference(tensors: Tensors, plain: Path) -> str:
    """Returns the name of the first tensor that differs from the plain file, or "" if all are equal."""
    import torch

    file = read_plain(plain)
    if tensors.keys() != file.keys():
        return "tensor names"
    for name, (data, dtype, shape) in file.items():
        tensor = tensors[name].detach()
        octets = tensor.reshape(-1).view(torch.uint8)
        if list(tensor.shape) != shape or tensor.dtype != dtype or not torch.equal(octets, data.to(tensor.device)):
            return name
    return ""


def _seconds_of_pwrite(folder: Path, nbytes: int, files: int) -> float:
    """Returns the seconds that os.pwrite takes to write `nbytes` to `files` files, including fsync."""
    memory = memoryview(mmap.mmap(-1, 16 * _PIECE))
    for at in range(0, len(memory), 4096):
        memory[at] = 1
    paths = [folder / f"floor{number}" for number in range(files)]
    numbers = [os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC) for path in paths]
    pieces = range(max(1, nbytes // _PIECE))

    def put_piece(k: int) -> None:
        place = k % 16 * _PIECE
        os.pwrite(numbers[k % files], memory[place : place + min(_PIECE, nbytes)], k // files * _PIECE)

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(2 * files) as pool:
        list(pool.map(put_piece, pieces))
    for number in numbers:
        os.fsync(number)
        os.close(number)
    seconds = time.perf_counter() - start
    for path in paths:
        path.unlink()
    return seconds


def _save_twice(name: str, plain: Path, device: str, folder: Path) -> dict[str, Any]:
    """Saves a model twice in this process, and checks the files of the first save."""
    import torch

    import overwire as ow

    save, files, _ = _WAYS[name]
    tensors: Tensors = ow.load_file(plain, device=device)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    row: dict[str, Any] = {"way": name, "bytes": nbytes}
    for which in ("first", "second"):
        at = folder / "saved"
        at.mkdir()
        gc.collect()
        if device != "cpu":
            torch.cuda.synchronize(device)
        start, busy = time.perf_counter(), time.process_time()
        wait = save(tensors, str(at))
        free = time.perf_counter() - start
        if wait is not None:
            wait()
        whole = time.perf_counter() - start
        row[which] = {"free": free, "whole": whole, "waits": wait is not None, "processor": time.process_time() - busy}
        if which == "first":
            row["stored"] = sum(path.stat().st_size for path in at.rglob("*") if path.is_file())
            if wrong := find_difference(_read_back(str(at)), plain):
                return {"way": name, "wrong": wrong}
        shutil.rmtree(at)
    if files:
        row["floor"] = _seconds_of_pwrite(folder, row["stored"], files)
    return row


def measure_saves(plain: Path, device: str, folder: Path, names: str, run: Run) -> list[dict[str, Any]]:
    """Measures each save whose name contains one of the comma-separated `names`. run: a function that runs another one
    in a fork."""
    rows = []
    for name, (_, _, package) in _WAYS.items():
        if package and importlib.util.find_spec(package) is None:
            continue
        if any(part.strip() in name for part in names.split(",")):
            row = run(partial(_save_twice, name, plain, device, folder))
            shutil.rmtree(folder / "saved", ignore_errors=True)
            rows.append({"way": name, **row})
    return rows


def show_save(row: dict[str, Any]) -> str:
    """Formats a row as text. All figures are from the second save, except the first rate."""
    title = f"  {row['way']:<32}"
    if "second" not in row:
        return title + (f"WRONG: {row['wrong']}" if "wrong" in row else f"left out: {row['failed']}")
    second = row["second"]
    text = f"{title}{row['bytes'] / row['first']['whole'] / 1e9:6.2f} / {row['bytes'] / second['whole'] / 1e9:.2f} GB/s"
    if second["waits"]:
        text += f", tensors may change after {second['free']:.2f} s"
    text += f", {second['processor']:.1f} CPU s"
    return text + (f", {row['floor'] / second['whole']:.2f} of pwrite" if "floor" in row else "")

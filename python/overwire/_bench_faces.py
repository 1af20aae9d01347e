"""Implements `overwire bench --device cuda`: the engine's rows, then loads through each entry point, then
saves (`_bench_saves`).

A row is measured in new processes, which are forked from a process that has only imported torch. Each process loads the
file twice. The modules that a program imports itself are imported before the timing starts; modules that the first call
imports are part of its time. Each round runs the rows in random order. The tensors are compared with the plain file,
which is read without overwire. The first round compares the tensors of the first load, and the second round those of
the second load.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ._bench import print_line, run_overwire
from ._bench_saves import find_difference, measure_saves, show_save
from ._children import code_command
from ._undo import keep_error
from .model.options import parse_size

Case = tuple[str, str]  # an entry point and a file

_ENGINE = "import sys; from overwire._engine import cli; sys.exit(cli(sys.argv[1:]))"


class _Face(NamedTuple):
    """One entry point: the module that a program imports, a function that loads a file to a device,
    and the files to load. package: a package that must be installed. gpu: whether it only works on a
    GPU. into: whether the load fills a model, which is built before the timing starts."""

    module: str
    load: Callable[..., dict[str, Any]]
    files: tuple[str, ...] = ("plain",)
    package: str = ""
    gpu: bool = False
    into: bool = False


# -- loads: `names` is the imported module


def _load_file(names: Any, file: str, device: str) -> Any:
    return names.load_file(file, device=device)


def _get_tensors(names: Any, file: str, device: str) -> dict[str, Any]:
    with names.safe_open(file, framework="pt", device=device) as reader:
        return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118


def _get_slices(names: Any, file: str, device: str) -> dict[str, Any]:
    with names.safe_open(file, framework="pt", device=device) as reader:
        return {name: reader.get_slice(name)[:] for name in reader.keys()}  # noqa: SIM118


def _load_bundle(names: Any, file: str, device: str) -> Any:
    return names.load_bundle(file, trust=True)  # tensors return to the device they were saved from


def _load_pickle(names: Any, file: str, device: str) -> Any:
    return names.load_compressed_pickle(file)


def _copy_files(names: Any, file: str, device: str, **tuning: int) -> dict[str, Any]:
    loader = names.SafeTensorsFileLoader(names.SingleGroup(), device, nogds=True, **tuning)
    loader.add_filenames({0: [file]})
    buffer = loader.copy_files_to_device()
    return {name: buffer.get_tensor(name) for name in loader.get_keys()}


def _deserialize_file(names: Any, file: str, device: str) -> dict[str, Any]:
    return dict(names.TensorDeserializer(file, device=device))


def _load_into(names: Any, file: str, device: str, model: Any) -> dict[str, Any]:
    names.TensorDeserializer(file, device=device).load_into_module(model)
    return dict(model.state_dict())


def _read_instantly(names: Any, file: str, device: str) -> dict[str, Any]:
    with names.safe_open(file, framework="pt", device=int(device.partition(":")[2])) as reader:
        return dict(reader.tensors())


def _prefetch_tensors(names: Any, file: str, device: str) -> dict[str, Any]:
    with names.safe_open(file, framework="pt", device=device) as reader, reader.prefetch(threads=16) as loader:
        return dict(loader)


def _stream_file(names: Any, file: str, device: str) -> dict[str, Any]:
    with names.SafetensorsStreamer() as streamer:
        streamer.stream_file(file)
        return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}


_copy_tuned = partial(_copy_files, bbuf_size_kb=64 << 10, max_threads=16)
_BOTH, _OURS, _TENSORS = ("plain", "compressed"), "overwire.compat.", ("tensors",)

_FACES = {
    "load_file": _Face("overwire", _load_file, _BOTH),
    "safe_open, get_tensor": _Face("overwire", _get_tensors, _BOTH),
    "load_bundle": _Face("overwire", _load_bundle, ("bundle",)),
    "safetensors' load_file by overwire": _Face(_OURS + "safetensors.torch", _load_file, _BOTH),
    "safetensors' get_slice by overwire": _Face(_OURS + "safetensors", _get_slices, _BOTH),
    "nyacomp's by overwire": _Face(_OURS + "nyacomp", _load_pickle, ("bundle",)),
    "fastsafetensors' by overwire": _Face(_OURS + "fastsafetensors", _copy_files, _BOTH),
    "load_file of .tensors": _Face("overwire", _load_file, _TENSORS),
    "TensorDeserializer by overwire": _Face(_OURS + "tensorizer", _deserialize_file, _TENSORS),
    "load_into_module by overwire": _Face(_OURS + "tensorizer", _load_into, _TENSORS, into=True),
    "safetensors load_file": _Face("safetensors.torch", _load_file, package="safetensors"),
    "safetensors get_slice": _Face("safetensors", _get_slices, package="safetensors"),
    "safetensors prefetch": _Face("safetensors", _prefetch_tensors, package="safetensors", gpu=True),
    "fastsafetensors": _Face("fastsafetensors", _copy_files, package="fastsafetensors", gpu=True),
    "fastsafetensors tuned": _Face("fastsafetensors", _copy_tuned, package="fastsafetensors", gpu=True),
    "Run:ai model streamer": _Face("runai_model_streamer", _stream_file, package="runai_model_streamer", gpu=True),
    "tensorizer TensorDeserializer": _Face("tensorizer", _deserialize_file, _TENSORS, "tensorizer"),
    "tensorizer load_into_module": _Face("tensorizer", _load_into, _TENSORS, "tensorizer", into=True),
    "instanttensor": _Face("instanttensor", _read_instantly, package="instanttensor", gpu=True),
}


def _build_module(shapes: dict[str, list[int]]) -> Any:
    """Builds a module on the meta device with one parameter for each tensor name."""
    import torch

    module = torch.nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        at = module
        for part in path:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        tensor = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        at.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def _write_files(folder: Path, device: str) -> dict[str, int]:
    """Converts the plain file to the other kinds of files. Returns the number of tensor bytes."""
    import overwire as ow

    from .compat.tensorizer import TensorSerializer

    plain = ow.load_file(folder / "plain")
    ow.save_file(plain, folder / "compressed")
    ow.compress_pickle({name: tensor.to(device) for name, tensor in plain.items()}, folder / "bundle")
    shapes = {name: list(tensor.shape) for name, tensor in plain.items()}
    module = _build_module(shapes)
    module.load_state_dict(plain, assign=True)
    serializer = TensorSerializer(str(folder / "tensors"))
    serializer.write_module(module)
    serializer.close()
    (folder / "tensors.shapes").write_text(json.dumps(shapes))
    return {"bytes": sum(tensor.nbytes for tensor in plain.values())}


def _load_twice(face: str, file: Path, device: str, compared: int) -> dict[str, Any]:
    """Loads a file twice in this process. compared: the load (0 or 1) to compare; any other number compares none."""
    import torch

    gpu, one = device != "cpu", _FACES[face]
    began = time.perf_counter()
    names = importlib.import_module(one.module)
    row: dict[str, Any] = {"import": time.perf_counter() - began, "beside": 0}
    shapes = json.loads(Path(f"{file}.shapes").read_text()) if one.into else {}
    if gpu:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.empty(1, device=device)
        unused = torch.cuda.mem_get_info(device)[0]
    for number, which in enumerate(("first", "second")):
        model = [_build_module(shapes)] if one.into else []
        gc.collect()
        began = time.perf_counter()
        tensors = one.load(names, str(file), device, *model)
        if gpu:
            torch.cuda.synchronize(device)
        row[which] = time.perf_counter() - began
        if gpu and not number:  # only the first load: later, torch has cached memory that the comparison used
            total = sum(tensor.nbytes for tensor in tensors.values())
            row["beside"] = unused - torch.cuda.mem_get_info(device)[0] - total
        if number == compared and (wrong := find_difference(tensors, file.parent / "plain")):
            return {"wrong": wrong}
        del tensors, model
    return row


def _run_in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Runs `work` in a fork of this process and returns its result, or {"failed": the reason}."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        failure = keep_error()  # a failing library gets a row
        with failure:
            text = json.dumps(work())
        if error := failure.error:
            text = json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]})
        with os.fdopen(writer, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    row: dict[str, Any] = json.loads(text or '{"failed": "the process ended early"}')
    return row


def _list_cases(device: str, names: str) -> Iterator[Case]:
    for name, face in _FACES.items():
        is_there = not face.package or importlib.util.find_spec(face.package) is not None
        if is_there and not (face.gpu and device == "cpu") and any(part.strip() in name for part in names.split(",")):
            yield from ((name, file) for file in face.files)


def _sum_up(cases: list[Case], runs: dict[Case, list[dict[str, Any]]], nbytes: int) -> list[dict[str, Any]]:
    """Computes the medians over all rounds, compared with load_file of the same tensors."""
    rows: dict[Case, dict[str, Any]] = {}
    for case in cases:
        row: dict[str, Any] = {"face": case[0], "file": case[1], "runs": len(runs[case])}
        if package := _FACES[case[0]].package:
            row["version"] = importlib.metadata.version(package)
        rows[case] = row
        failure = next((run for run in runs[case] if "first" not in run), None)
        if failure is not None:
            row.update(failure)
            continue
        keys = ("first", "second", "import", "beside")
        middle = {key: statistics.median(run[key] for run in runs[case]) for key in keys}
        row.update(first=nbytes / middle["first"] / 1e9, second=nbytes / middle["second"] / 1e9)
        row.update(import_seconds=middle["import"], beside=int(middle["beside"]), verified=True)
        base = {"bundle": ("load_file", "compressed"), "tensors": ("load_file of .tensors", "tensors")}
        floor = rows.get(base.get(case[1], ("load_file", case[1])), {})
        if "first" in floor:
            row.update(first_share=row["first"] / floor["first"], second_share=row["second"] / floor["second"])
    return list(rows.values())


def _show_row(row: dict[str, Any]) -> str:
    version = f" ({row['version']})" if "version" in row else ""
    title = f"  {row['face'] + version + ', ' + row['file']:<52}"
    if "first" not in row:
        return title + (f"WRONG: {row['wrong']}" if "wrong" in row else f"left out: {row['failed']}")
    share = f"   {row['first_share']:.2f} / {row['second_share']:.2f} of load_file" if "first_share" in row else ""
    return f"{title}{row['first']:7.1f} / {row['second']:.1f} GB/s{share}   {row['beside'] / 1e6:.0f} MB extra"


def _measure_faces(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measures all entry points. Leaves the plain file in the folder."""
    run_overwire("bench", "gen", "llama-bf16", "--size", str(args.bytes), "-f", str(folder / "plain"))
    import torch  # noqa: F401  imported once, before the forks

    sys.dont_write_bytecode = False  # cache compiled modules, as for an installed package
    report = _run_in_fork(lambda: _write_files(folder, args.device))
    if "failed" in report:
        sys.exit(f"overwire: bench: {report['failed']}")
    cases = list(_list_cases(args.device, args.faces))
    runs: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for number in range(args.repeat):
        for face, file in random.sample(cases, len(cases)):
            load_it = partial(_load_twice, face, folder / file, args.device, number)
            runs[face, file].append(_run_in_fork(load_it))
    return _sum_up(cases, runs, report["bytes"])


def _read_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("overwire bench", add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", default="2GB")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dir")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--faces", default="")
    args, _ = parser.parse_known_args(words)
    args.bytes = parse_size(args.size, "--size")
    if args.device == "cuda":
        args.device = "cuda:0"
    return args


def main(words: list[str]) -> int:
    """Runs the command with the arguments after `bench`. Returns the engine's exit status, or 1 if tensors differ."""
    as_json = "--json" in words
    engine = code_command(_ENGINE, "bench", *words)  # the engine's rows run in their own process
    result = subprocess.run(engine, text=True, stdout=subprocess.PIPE if as_json else None)
    if result.returncode or importlib.util.find_spec("torch") is None or "-h" in words or "--help" in words:
        sys.stdout.write(result.stdout or "")
        return result.returncode
    args = _read_arguments(words)
    if not as_json:
        print_line("first / second load in a new process, by entry point")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overwire-bench-", dir=args.dir)))
        rows = _measure_faces(args, folder)
        if not as_json:
            print_line("\n".join(map(_show_row, rows)))
            print_line(f"first / second save in a new process, to {args.dir or folder.parent}")
        for file in set(folder.iterdir()) - {folder / "plain"}:  # free space for the saves
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        saves = measure_saves(folder / "plain", args.device, folder, args.faces, _run_in_fork)
    if as_json:
        print_line(json.dumps(json.loads(result.stdout) | {"faces": rows, "saves": saves}, indent=1))
    else:
        print_line("\n".join(map(show_save, saves)))
    return 1 if any("wrong" in row for row in rows + saves) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

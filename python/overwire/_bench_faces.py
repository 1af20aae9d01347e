"""`overwire bench --device cuda`: the engine's rows, and behind them loads by each name, in fresh processes,
and saves (`_bench_saves`).

Every row is a fresh process, a fork of one that has imported torch alone, in which two loads
run one after the other: what a program imports before it loads is imported before, what is
imported by the first call counts. Rows run in random order, one round after the other; the
first compares all bytes of first loads with the plain file, read without overwire, and the
second those of second loads.
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
from typing import Any

from ._bench_saves import measure_saves, show_save
from .plumbing import parse_size

Load = Callable[[], dict[str, Any]]
Make = Callable[[str, str], Load]  # of a file and a device
Case = tuple[str, str]  # of a name to load by, and a file

_ENGINE = "import sys; from overwire._engine import cli; sys.exit(cli(sys.argv[1:]))"
_KINDS = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}


# -- names to load by: what a program imports, and then a load of a file


def _by_load_file(module: str) -> Make:
    def make_load(file: str, device: str) -> Load:
        load_file = importlib.import_module(module).load_file
        return lambda: load_file(file, device=device)

    return make_load


def _by_safe_open(module: str, slices: bool = False) -> Make:
    def make_load(file: str, device: str) -> Load:
        safe_open = importlib.import_module(module).safe_open

        def load_all() -> dict[str, Any]:
            with safe_open(file, framework="pt", device=device) as reader:
                if slices:
                    return {name: reader.get_slice(name)[:] for name in reader.keys()}  # noqa: SIM118
                return {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118

        return load_all

    return make_load


def _by_pickle(module: str, **options: Any) -> Make:
    def make_load(file: str, device: str) -> Load:
        load_pickle = importlib.import_module(module).load_compressed_pickle
        return lambda: load_pickle(file, **options)  # tensors come back to where they were

    return make_load


def _by_copies(module: str) -> Make:
    def make_load(file: str, device: str) -> Load:
        names = importlib.import_module(module)

        def load_all() -> dict[str, Any]:
            loader = names.SafeTensorsFileLoader(names.SingleGroup(), device, nogds=True)
            loader.add_filenames({0: [file]})
            buffer = loader.copy_files_to_device()
            return {name: buffer.get_tensor(name) for name in loader.get_keys()}

        return load_all

    return make_load


def _by_deserializer(module: str) -> Make:
    def make_load(file: str, device: str) -> Load:
        deserializer = importlib.import_module(module).TensorDeserializer
        return lambda: dict(deserializer(file, device=device))

    return make_load


def _into_module(module: str) -> Make:
    def make_load(file: str, device: str) -> Load:
        deserializer = importlib.import_module(module).TensorDeserializer
        shapes = json.loads(Path(file + ".shapes").read_text())
        # A model is made before its weights are loaded: it is none of the load's time.
        modules = [_build_module(shapes) for _ in range(2)]

        def load_all() -> dict[str, Any]:
            model = modules.pop()
            deserializer(file, device=device).load_into_module(model)
            return dict(model.state_dict())

        return load_all

    return make_load


def _by_instanttensor(file: str, device: str) -> Load:
    safe_open = importlib.import_module("instanttensor").safe_open

    def load_all() -> dict[str, Any]:
        with safe_open(file, framework="pt", device=int(device.partition(":")[2])) as reader:
            return dict(reader.tensors())

    return load_all


_BOTH = ("plain", "compressed")
_OURS = "overwire.compat."

#: By name: the maker of a load, the files, the package that has to be there, and whether only for a GPU.
_FACES: dict[str, tuple[Make, tuple[str, ...], str, bool]] = {
    "load_file": (_by_load_file("overwire"), _BOTH, "", False),
    "safe_open, get_tensor": (_by_safe_open("overwire"), _BOTH, "", False),
    "load_compressed_pickle": (_by_pickle("overwire", trust=True), ("bundle",), "", False),
    "safetensors' load_file by overwire": (_by_load_file(_OURS + "safetensors.torch"), _BOTH, "", False),
    "safetensors' get_slice by overwire": (_by_safe_open(_OURS + "safetensors", True), _BOTH, "", False),
    "nyacomp's by overwire": (_by_pickle(_OURS + "nyacomp"), ("bundle",), "", False),
    "fastsafetensors' by overwire": (_by_copies(_OURS + "fastsafetensors"), _BOTH, "", False),
    "load_file of .tensors": (_by_load_file("overwire"), ("tensors",), "", False),
    "TensorDeserializer by overwire": (_by_deserializer(_OURS + "tensorizer"), ("tensors",), "", False),
    "load_into_module by overwire": (_into_module(_OURS + "tensorizer"), ("tensors",), "", False),
    "safetensors load_file": (_by_load_file("safetensors.torch"), ("plain",), "safetensors", False),
    "safetensors get_slice": (_by_safe_open("safetensors", True), ("plain",), "safetensors", False),
    "fastsafetensors": (_by_copies("fastsafetensors"), ("plain",), "fastsafetensors", True),
    "tensorizer TensorDeserializer": (_by_deserializer("tensorizer"), ("tensors",), "tensorizer", False),
    "tensorizer load_into_module": (_into_module("tensorizer"), ("tensors",), "tensorizer", False),
    "instanttensor": (_by_instanttensor, ("plain",), "instanttensor", True),
}


def _build_module(shapes: dict[str, list[int]]) -> Any:
    """A module on the meta device whose parameters have the names of a file's tensors."""
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
    """Makes the other files out of the plain one; returns the tensors' bytes."""
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


def _find_difference(tensors: dict[str, Any], plain: Path) -> str:
    """The first name whose tensor is not that of a plain file, which is read without overwire; "" if there is none."""
    import torch

    with open(plain, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        table = json.loads(file.read(size))
    table.pop("__metadata__", None)
    if tensors.keys() != table.keys():
        return "the names of its tensors"
    data = torch.from_file(str(plain), size=plain.stat().st_size, dtype=torch.uint8)
    name: str
    for name, entry in table.items():
        tensor = tensors[name].detach()
        low, high = (8 + size + at for at in entry["data_offsets"])
        if list(tensor.shape) != entry["shape"] or tensor.dtype != getattr(torch, _KINDS[entry["dtype"]]):
            return name
        if not torch.equal(tensor.reshape(-1).view(torch.uint8), data[low:high].to(tensor.device)):
            return name
    return ""


def _load_twice(face: str, file: Path, device: str, compared: int) -> dict[str, Any]:
    """Loads twice in this process, and compares the load with the number `compared`, 0 or 1; with another, none."""
    import torch

    gpu = device != "cpu"
    began = time.perf_counter()
    load = _FACES[face][0](str(file), device)
    row: dict[str, Any] = {"import": time.perf_counter() - began, "beside": 0}
    if gpu:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.empty(1, device=device)
        unused = torch.cuda.mem_get_info(device)[0]
    for number, which in enumerate(("first", "second")):
        gc.collect()
        began = time.perf_counter()
        tensors = load()
        if gpu:
            torch.cuda.synchronize(device)
        row[which] = time.perf_counter() - began
        if gpu and not number:  # later, torch keeps what the comparison has taken
            total = sum(tensor.nbytes for tensor in tensors.values())
            row["beside"] = unused - torch.cuda.mem_get_info(device)[0] - total
        if number == compared and (wrong := _find_difference(tensors, file.parent / "plain")):
            return {"wrong": wrong}
        del tensors
    return row


def _run_in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a fork of this process returns; "failed" says why it returned nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = json.dumps(work())
        except BaseException as error:  # a peer that fails is a row
            text = json.dumps({"failed": f"{type(error).__name__}: {error}"[:300]})
        with os.fdopen(writer, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    row: dict[str, Any] = json.loads(text or '{"failed": "its process ended"}')
    return row


def _list_cases(device: str, names: str) -> Iterator[Case]:
    for face, (_, files, package, gpu) in _FACES.items():
        is_there = (not package or importlib.util.find_spec(package) is not None) and (device != "cpu" or not gpu)
        if is_there and any(part.strip() in face for part in names.split(",")):
            yield from ((face, file) for file in files)


def _sum_up(cases: list[Case], runs: dict[Case, list[dict[str, Any]]], nbytes: int) -> list[dict[str, Any]]:
    """Medians of the rounds, beside load_file's of the same bytes."""
    rows: dict[Case, dict[str, Any]] = {}
    for case in cases:
        row: dict[str, Any] = {"face": case[0], "file": case[1], "runs": len(runs[case])}
        if package := _FACES[case[0]][2]:
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
    return f"{title}{row['first']:7.1f} / {row['second']:.1f} GB/s{share}   {row['beside'] / 1e6:.0f} MB beside"


def _run_engine(words: list[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    """The engine's own command line, in a process of its own."""
    return subprocess.run([sys.executable, "-c", _ENGINE, *words], text=True, **streams)


def _measure_faces(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rows of all names. Leaves the plain file."""
    gen = ["bench", "gen", "llama-bf16", "--size", str(args.bytes), "-f", str(folder / "plain")]
    result = _run_engine(gen, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if result.returncode:
        sys.exit(f"overwire: bench: gen ended with status {result.returncode}: {result.stdout}")
    import torch  # noqa: F401  what the processes below have in common

    sys.dont_write_bytecode = False  # modules are compiled once, as those of an installed package are
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
    """The command, without `bench`; its exit status: the engine's, or 1 where bytes are wrong."""
    as_json = "--json" in words
    result = _run_engine(["bench", *words], stdout=subprocess.PIPE if as_json else None)
    if result.returncode or importlib.util.find_spec("torch") is None or "-h" in words or "--help" in words:
        sys.stdout.write(result.stdout or "")
        return result.returncode
    args = _read_arguments(words)
    if not as_json:
        sys.stdout.write("first / second load of a fresh process, by each name\n")
        sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overwire-bench-", dir=args.dir)))
        rows = _measure_faces(args, folder)
        if not as_json:
            sys.stdout.write("".join(_show_row(row) + "\n" for row in rows))
            sys.stdout.write(f"first / second save of a fresh process, to {args.dir or folder.parent}\n")
            sys.stdout.flush()
        for file in set(folder.iterdir()) - {folder / "plain"}:  # saves need the space
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        saves = measure_saves(folder / "plain", args.device, folder, args.faces, _run_in_fork)
    if as_json:
        report = json.loads(result.stdout)
        report |= {"faces": rows, "saves": saves}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        sys.stdout.write("".join(show_save(row) + "\n" for row in saves))
    return 1 if any("wrong" in row for row in rows + saves) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What each way to load gives on a GPU beside load_file: bytes first, then figures.

    python tests/device_faces.py --size 6GB --dir /dev/shm [--device cuda] [--rounds 2]

Every face loads the same tensors twice in a fresh process, a fork of one that has
imported torch alone: seconds of the first and the second load, what it shares of
load_file's rate in the same round, and device memory beside the tensors. Faces go in
random order; rows are medians of the rounds. The status is 1 if a byte is wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336), (4096,), (4096,)]


def weights(size: int, device: str) -> dict[str, Any]:
    make = torch.Generator(device).manual_seed(1)
    made, total, layer = {}, 0, 0
    while total < size:
        for n, shape in enumerate(LAYER):
            tensor = torch.randn(shape, generator=make, device=device, dtype=torch.float32).mul_(0.02).bfloat16()
            made[f"layers.{layer:03}.{n}.weight"] = tensor.cpu()
            total += tensor.nbytes
        layer += 1
    return made


def digest(tensors: dict[str, Any]) -> int:
    """A number of the bytes and their places, computed where they lie."""
    found = 0
    for n, name in enumerate(sorted(tensors)):
        words = tensors[name].detach().reshape(-1).view(torch.int16)
        found += (n + 1) * int(words.sum(dtype=torch.int64)) + int((words[::2].to(torch.int64) << 3).sum())
    return found


# Faces: what a process imports first, and a load.


def load_file(file: str, device: str) -> Callable[[], dict[str, Any]]:
    import overwire as ow

    return lambda: ow.load_file(file, device)


def own_loop(file: str, device: str) -> Callable[[], dict[str, Any]]:
    import overwire as ow

    def load() -> dict[str, Any]:
        with ow.safe_open(file, "pt", device) as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

    return load


def dropin_loop(file: str, device: str) -> Callable[[], dict[str, Any]]:
    from overwire.compat.safetensors import safe_open

    def load() -> dict[str, Any]:
        with safe_open(file, framework="pt", device=device) as opened:
            return {name: opened.get_slice(name)[:] for name in opened.keys()}  # noqa: SIM118

    return load


def dropin_load_file(file: str, device: str) -> Callable[[], dict[str, Any]]:
    from overwire.compat.safetensors.torch import load_file

    return lambda: load_file(file, device=device)


def bundle(file: str, device: str) -> Callable[[], dict[str, Any]]:
    import overwire as ow

    return lambda: ow.load_compressed_pickle(file, trust=True, device=device)


def nyacomp(file: str, device: str) -> Callable[[], dict[str, Any]]:
    from overwire.compat import nyacomp

    return lambda: nyacomp.load_compressed_pickle(file)


def fastsafetensors(file: str, device: str) -> Callable[[], dict[str, Any]]:
    from overwire.compat.fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load() -> dict[str, Any]:
        loader = SafeTensorsFileLoader(SingleGroup(), device=device)
        loader.add_filenames({0: [file]})
        buffer = loader.copy_files_to_device()
        return {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}

    return load


def deserializer(file: str, device: str) -> Callable[[], dict[str, Any]]:
    from overwire.compat.tensorizer import TensorDeserializer

    return lambda: dict(TensorDeserializer(file, device=device))


class Named(torch.nn.Module):
    """A module whose parameters have the names of a file's tensors."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: str) -> None:
        super().__init__()
        for name, shape in shapes.items():
            at: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in at._modules:
                    at.add_module(part, torch.nn.Module())
                at = at._modules[part]  # type: ignore[assignment]
            at.register_parameter(last, torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device), requires_grad=False))


def into_module(file: str, device: str) -> Callable[[], dict[str, Any]]:
    from overwire.compat.tensorizer import TensorDeserializer

    shapes = json.loads(Path(file + ".shapes").read_text())

    def load() -> dict[str, Any]:
        module = Named(shapes, "meta")
        deserializer = TensorDeserializer(file, device=device)
        deserializer.load_into_module(module)
        return dict(module.state_dict())

    return load


def tensors_file(file: str, device: str) -> Callable[[], dict[str, Any]]:
    import overwire as ow

    return lambda: ow.load_file(file, device)


def instanttensor(file: str, device: str) -> Callable[[], dict[str, Any]]:
    from instanttensor import safe_open

    def load() -> dict[str, Any]:
        with safe_open(file, framework="pt", device=torch.device(device).index or 0) as opened:
            return dict(opened.tensors())

    return load


FACES: dict[str, tuple[Callable[[str, str], Callable[[], dict[str, Any]]], tuple[str, ...]]] = {
    "load_file": (load_file, ("plain", "small")),
    "safe_open, get_tensor": (own_loop, ("plain", "small")),
    "safetensors' safe_open, get_slice": (dropin_loop, ("plain", "small")),
    "safetensors' load_file": (dropin_load_file, ("plain", "small")),
    "load_compressed_pickle": (bundle, ("bundle",)),
    "nyacomp's": (nyacomp, ("bundle",)),
    "fastsafetensors' get_tensor": (fastsafetensors, ("plain", "small")),
    "load_file of .tensors": (tensors_file, ("tensors",)),
    "TensorDeserializer": (deserializer, ("tensors",)),
    "load_into_module": (into_module, ("tensors",)),
    "InstantTensor": (instanttensor, ("plain",)),
}


def write(folder: Path, size: int, device: str) -> tuple[int, int]:
    """The files; returns their tensors' bytes and digest."""
    import overwire as ow
    from overwire.compat.tensorizer import TensorSerializer

    made = weights(size, device)
    ow.save_file(made, folder / "plain", compress=False)
    ow.save_file(made, folder / "small")
    # nyacomp's verbs have no device: tensors come back to where they were.
    ow.compress_pickle({name: tensor.to(device) for name, tensor in made.items()}, folder / "bundle")
    module = Named({name: tuple(tensor.shape) for name, tensor in made.items()}, "meta")
    module.load_state_dict(made, assign=True)
    serializer = TensorSerializer(str(folder / "tensors"))
    serializer.write_module(module)
    serializer.close()
    (folder / "tensors.shapes").write_text(json.dumps({name: list(tensor.shape) for name, tensor in made.items()}))
    return sum(tensor.nbytes for tensor in made.values()), digest(made)


def one(face: str, file: Path, device: str, want: int) -> dict[str, Any]:
    """Two loads in this process."""
    gpu = device != "cpu"
    seconds: list[float] = []
    beside = 0
    begin = time.perf_counter()
    load = FACES[face][0](str(file), device)
    imported = time.perf_counter() - begin
    if gpu:
        torch.cuda.init()
        torch.empty(1, device=device)
        free = torch.cuda.mem_get_info(device)[0]
    for again in (False, True):
        gc.collect()
        begin = time.perf_counter()
        tensors = load()
        if gpu:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
        total = sum(tensor.nbytes for tensor in tensors.values())
        if gpu and not again:  # later, torch keeps what the digest has taken
            beside = free - torch.cuda.mem_get_info(device)[0] - total
        if digest(tensors) != want:
            return {"wrong": face}
        tensors.clear()
        del tensors
    return {"first": seconds[0], "second": seconds[1], "beside": beside, "import": imported}


def forked(work: Callable[[], Any]) -> Any:
    """What a child of fork returns, as JSON."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            text = json.dumps(work())
        except BaseException as error:  # a face that fails is a row
            text = json.dumps({"failed": repr(error)[:200]})
        with os.fdopen(writer, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text or '{"failed": "ended"}')


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="6GB")
    parser.add_argument("--dir", default="/dev/shm")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget", type=float, default=90, help="seconds after which no round begins")
    parser.add_argument("--faces", default="", help="those whose names contain one of these, by commas")
    args = parser.parse_args()
    begun = time.monotonic()
    size = int(float(args.size[:-2]) * {"GB": 1e9, "MB": 1e6}[args.size[-2:]])
    folder = Path(args.dir) / f"faces.{os.getpid()}"
    folder.mkdir()
    wrong, rows = 0, {}
    try:
        total, want = forked(lambda: write(folder, size, args.device))
        print(f"{total / 1e9:.2f} GB of tensors, written in {time.monotonic() - begun:.1f} s", flush=True)
        cases = [(face, file) for face, (_, files) in FACES.items() for file in files]
        cases = [case for case in cases if any(part in case[0] for part in args.faces.split(","))]
        for _ in range(args.rounds):
            for face, file in random.sample(cases, len(cases)):
                if time.monotonic() - begun < args.budget:
                    rows.setdefault((face, file), []).append(forked(lambda at=(face, file): one(at[0], folder / at[1], args.device, want)))
        print(f"{'face':36}{'file':9}{'first':>8}{'second':>8}  GB/s   first/second of load_file's   MB beside  runs")
        base = {"plain": ("load_file", "plain"), "small": ("load_file", "small"), "bundle": ("load_file", "small")}
        base["tensors"] = ("load_file of .tensors", "tensors")
        for (face, file), runs in rows.items():
            bad = [run for run in runs if "first" not in run]
            wrong += sum("wrong" in run for run in bad)
            if bad:
                print(f"{face:36}{file:9}{bad[0]}")
                continue
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            line = f"{face:36}{file:9}{total / middle['first'] / 1e9:8.1f}{total / middle['second'] / 1e9:8.1f}"
            floors = rows.get(base[file], [{}])
            if all("first" in run for run in floors):
                floor = {key: statistics.median(run[key] for run in floors) for key in ("first", "second")}
                line += f"{floor['first'] / middle['first']:15.2f} {floor['second'] / middle['second']:8.2f}"
            print(f"{line}{middle['beside'] / 1e6:20.0f}{len(runs):6}")
    finally:
        for file in sorted(folder.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        folder.rmdir()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

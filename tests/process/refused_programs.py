"""Runs loads and saves in the child of `refusing` and returns their results. test_refused_calls.py starts this
program."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
from overwire._engine import core, program
from overwire.stores import FileWriter, ObjectWriter
from refusing import serve_tasks


def _tensors(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    large = rng.normal(0, 0.02, 300_000).astype("f4")  # too large to be written on the calling thread
    return {"large": large, "small": np.arange(seed, seed + 9), "none": np.zeros((0, 3), "f2")}


def _digest(tensors: dict[str, Any]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + str(tensors[name].dtype).encode() + tensors[name].tobytes())
    return total.hexdigest()


def _load(path: str, **options: Any) -> str:
    return _digest(ow.load_file(path, framework="np", **options))


def _read_some(path: str) -> str:
    with ow.safe_open(path, "np") as file:
        return _digest({"rows": file.get_slice("large")[1000:2000], "small": file.get_tensor("small")})


def _write(path: str, seed: int, kind: Any) -> None:
    with kind(path) as file:
        for block in range(3):
            file.write(bytes([seed + block]) * 100_000)


# By kind: the file name, and a function (path, seed) that saves the tensors of a seed. `prepare` makes the files that
# it reads.
SAVES = {
    "plain": ("x.safetensors", lambda path, seed: ow.save_file(_tensors(seed), path)),
    "small": ("y.safetensors", lambda path, seed: ow.save_file({"small": np.arange(seed, seed + 9)}, path)),
    "compressed": ("z.safetensors", lambda path, seed: ow.save_file(_tensors(seed), path, compress=True)),
    "set": (
        "s.safetensors.index.json",
        lambda path, seed: ow.save_file(_tensors(seed), path.removesuffix(".index.json"), max_shard_size=500_000),
    ),
    "converted": ("c.safetensors", lambda path, seed: ow.convert(_source(path, seed), path)),
    "tensorizer": ("t.tensors", lambda path, seed: ow.convert(_source(path, seed), path)),
    "delta": ("d.safetensors", lambda path, seed: ow.save_delta(_tensors(seed), _tensors(0), path)),
    "file": ("f.bin", lambda path, seed: _write(path, seed, FileWriter)),
    "object": ("o.bin", lambda path, seed: _write(path, seed, ObjectWriter)),
}

# By kind: a function that reads files of a folder and returns their digest.
LOADS = {
    "load": lambda folder: _load(f"{folder}/source1.safetensors"),
    "load compressed": lambda folder: _load(f"{folder}/packed.safetensors"),
    "load slices": lambda folder: _read_some(f"{folder}/packed.safetensors"),
    "load set": lambda folder: _load(f"{folder}/set/model.safetensors.index.json"),
    "inspect": lambda folder: str(ow.inspect(f"{folder}/packed.safetensors")).replace(folder, ""),
    "verify": lambda folder: str(ow.verify(f"{folder}/set")["ok"]),
}


def _source(path: str, seed: int) -> str:
    return f"{os.path.dirname(path)}/../source{seed}.safetensors"


def _outcome(call: Any, typed: Any = ow.OverwireError) -> list[Any]:
    try:
        return ["done", call()]
    except typed as error:
        return ["error", type(error).__name__, str(error)]
    except BaseException:
        return ["untyped", traceback.format_exc()]


def prepare(folder: str) -> None:
    """Fills a folder with the files that functions of LOADS and SAVES read."""
    os.makedirs(f"{folder}/set", exist_ok=True)
    for seed in (1, 2):
        ow.save_file(_tensors(seed), f"{folder}/source{seed}.safetensors")
    ow.save_file(_tensors(1), f"{folder}/packed.safetensors", compress=True)
    ow.save_file(_tensors(1), f"{folder}/set/model.safetensors", max_shard_size=500_000)


def save(kind: str, folder: str, seed: int) -> list[Any]:
    """Runs a save and returns its outcome. A writer that works like an open file may also raise OSError."""
    name, call = SAVES[kind]
    typed = OSError if kind in ("file", "object") else ow.OverwireError
    return _outcome(lambda: call(f"{folder}/{name}", seed) and None, (ow.OverwireError, typed))


def content(kind: str, folder: str) -> list[Any]:
    """Returns the digest of the tensors or bytes that a kind of save has written."""
    path = f"{folder}/{SAVES[kind][0]}"
    if kind in ("tensorizer", "delta", "file", "object"):
        return ["done", hashlib.sha256(Path(path).read_bytes()).hexdigest()]
    return _outcome(lambda: _load(path))


def load(kind: str, folder: str) -> list[Any]:
    """Runs a load and returns its outcome."""
    return _outcome(lambda: LOADS[kind](folder))


def load_uri(uri: str, options: dict[str, Any]) -> list[Any]:
    """Loads from a server."""
    return _outcome(lambda: _load(uri, storage_options=options))


def save_uri(uri: str, options: dict[str, Any], seed: int) -> list[Any]:
    """Saves to a store."""
    return _outcome(lambda: ow.save_file(_tensors(seed), uri, storage_options=options) and None)


_servers: list[Any] = []


def run_server(address: str, *words: str) -> list[Any]:
    """Starts `overwire serve` and leaves it running."""
    _servers.append(core().start("cli", json.dumps(program(["serve", "--address", address, *words])), b""))
    until = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(address.split(":")).close()
            return ["done", None]
        except ConnectionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


if __name__ == "__main__":
    serve_tasks(int(sys.argv[1]), {
        "prepare": prepare, "save": save, "content": content, "load": load, "load_uri": load_uri, "save_uri": save_uri,
        "run_server": run_server,
    })  # fmt: skip

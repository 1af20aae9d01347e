"""A loop that damages files."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overwire as ow
import torch
from overwire.records import read_records

from .models import Tensors, clones, compare_all, random_tensors, store, version
from .outcomes import Failure, Round

# Loading a damaged file may raise these errors.
REFUSALS = (ow.CorruptError, ow.FormatError, ow.NotSupportedError)


def flip(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, data: bytearray) -> None:
    at, size = rng.randrange(len(data)), rng.choice((1, 8, 100))
    data[at : at + size] = rng.randbytes(len(data[at : at + size]))


def truncate(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def cut_out(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 7, 512, 4096))]


def append(rng: random.Random, data: bytearray) -> None:
    data += rng.randbytes(rng.choice((1, 8, 4096)))


def forget(rng: random.Random, data: bytearray) -> None:
    """Fills a sector with zeros, as a power loss may do."""
    at = rng.randrange(0, len(data), 512)
    data[at : at + 512] = bytes(len(data[at : at + 512]))


def swap(rng: random.Random, data: bytearray) -> None:
    size = rng.choice((1, 16, 512))
    a, b = rng.randrange(len(data)), rng.randrange(len(data))
    if abs(a - b) >= size and max(a, b) + size <= len(data):
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]


DAMAGES: tuple[Callable[[random.Random, bytearray], None], ...] = (
    flip, flip, flip, overwrite, truncate, cut_out, append, forget, swap,
)


def damage(round_: Round) -> None:
    """Files get flipped bits, are cut, overwritten or extended. Loading a damaged compressed file, shard, delta or
    bundle gives a typed error or the right bytes. Loading a damaged plain, torch.save or .tensors file gives a typed
    error or any bytes, and never crashes."""
    rng = round_.rng
    tensors = random_tensors(rng, rng.choice((200, 1 << 14, 1 << 18)))
    kind = rng.choice(("compressed", "digests", "shards", "smaller", "plain", "delta", "bundle", "parts", "torch", "tensors"))
    files, load = _undamaged(rng, round_.folder / "model", tensors, kind)
    load(rng)
    while round_.lasts():
        path = rng.choice(files)
        whole = path.read_bytes()
        data = bytearray(whole)
        damaging = rng.choice(DAMAGES)
        damaging(rng, data)
        path.write_bytes(data)
        round_.count("damaged files")
        round_.doing = f"{kind}, {path.name}, {damaging.__name__}"
        with round_.may_raise(*REFUSALS, *((ow.UntrustedPickleError,) if kind == "torch" else ())):
            load(rng)
            round_.count("harmless")
        path.write_bytes(whole)
    load(rng)


def _undamaged(
    rng: random.Random, folder: Path, tensors: Tensors, kind: str
) -> tuple[list[Path], Callable[[random.Random], None]]:
    """Makes a model's files. Returns them, and a function that loads the model in a randomly chosen way and compares
    it."""
    if kind == "delta":
        folder.mkdir()
        changed, path = version(tensors, 5), folder / "d.safetensors"
        ow.save_delta(changed, tensors, path)

        def apply(rng: random.Random) -> None:
            state = clones(tensors)
            try:
                ow.apply_delta(state, path)
            except ow.OverwireError:
                compare_all(state, tensors)  # a delta that is refused changes nothing
                raise
            compare_all(state, changed)

        return [path], apply
    if kind == "bundle":
        folder.mkdir()
        path = folder / "x.pkl"
        ow.compress_pickle({"tensors": tensors, "text": "kept"}, path)

        def rebuild(rng: random.Random) -> None:
            loaded = ow.load_compressed_pickle(path)
            if loaded["text"] != "kept":
                raise Failure("wrong bytes", f"the text is {loaded['text']!r}")
            compare_all(loaded["tensors"], tensors)

        return [path, folder / "nya" / "x.safetensors"], rebuild
    if kind in ("torch", "tensors"):
        folder.mkdir()
        path, plain = folder / ("x.bin" if kind == "torch" else "x.tensors"), folder / "x.safetensors"
        if kind == "torch":
            torch.save({"step": 3, "state": dict(tensors)}, path)
        else:
            ow.save_file(tensors, path)

        def convert(rng: random.Random) -> None:
            if kind == "tensors" and rng.random() < 0.5:
                read_records(path)
            ow.convert(path, plain)
            plain.unlink()

        return [path], convert
    stored = store(rng, folder, tensors, kind)
    files = [file for file in (folder.iterdir() if stored.path == folder else [stored.path]) if file.name != "model.safetensors.index.json"]

    def load(rng: random.Random) -> None:
        loaded: dict[str, Any]
        way = rng.randrange(4)
        if way == 0:
            loaded = dict(ow.stream(stored.path, framework="pt"))
        elif way == 1:
            with ow.safe_open(stored.path, "pt") as file:
                loaded = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        else:
            loaded = ow.load_file(stored.path, framework="pt", mmap=rng.choice((None, False)))
        if kind != "plain":
            compare_all(loaded, tensors)

    return sorted(files), load

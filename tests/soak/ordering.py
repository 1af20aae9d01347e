"""A loop over background saves: several writers save to the same paths in random order, and some do not wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overwire as ow
import torch
from overwire.compat.safetensors import torch as drop_in

from .models import Tensors, random_tensors, version, which
from .outcomes import Failure, Round

Versions = dict[int, Tensors]


def _spellings(path: Path) -> list[str]:
    """Returns several names of the same file. One name goes through a link to its folder."""
    return [str(path), f"{path.parent}/../{path.parent.name}/./{path.name}", f"file://{path}", f"{path.parent}-link/{path.name}"]


def _sources(folder: Path, versions: Versions) -> dict[int, Path]:
    sources = {number: folder / f"source-{number}.safetensors" for number in versions}
    for number, source in sources.items():
        ow.save_file(versions[number], source, compress=number % 2 == 0)
    return sources


def background_saves(round_: Round) -> None:
    """The file of the save that began last remains, in whatever order saves end, with all save functions and all
    spellings of the path. Readers get one complete save. No hidden file is left."""
    rng, folder = round_.rng, round_.folder / "out"
    folder.mkdir()
    os.symlink(folder, round_.folder / "out-link")
    base = random_tensors(rng, rng.choice((1 << 14, 1 << 20)))
    base["number"] = torch.tensor(0)
    versions = {n: {**version(base, n), "number": torch.tensor(n)} for n in range(6)}
    sources = _sources(round_.folder, versions)
    paths = [folder / "a.safetensors", folder / "b.safetensors"]
    writers: list[Callable[[int, str, Path], Any]] = [
        lambda n, name, path: ow.save_file(versions[n], name, compress=rng.random() < 0.5, wait=False),
        lambda n, name, path: ow.save_file(versions[n], name, compress=rng.random() < 0.5, wait=False),
        lambda n, name, path: ow.save_file(versions[n], name, compress=rng.random() < 0.5),
        lambda n, name, path: ow.convert(sources[n], name, compress=rng.random() < 0.5),
        lambda n, name, path: drop_in.save_file({key: t.clone() for key, t in versions[n].items()}, path),
    ]
    while round_.lasts():
        saves, last = [], dict.fromkeys(paths, -1)
        for _ in range(rng.randint(2, 8)):
            path, number = rng.choice(paths), rng.randrange(len(versions))
            saves.append(rng.choice(writers)(number, rng.choice(_spellings(path)), path))
            last[path] = number
            round_.count("saves")
            if rng.random() < 0.2 and path.exists():
                which(ow.load_file(path, framework="pt"), versions)
                round_.count("loads")
        for save in rng.sample(saves, len(saves)):
            if hasattr(save, "wait"):
                save.wait()
        for path, number in last.items():
            if number >= 0 and (found := which(ow.load_file(path, framework="pt"), versions)) != number:
                raise Failure("wrong bytes", f"{path.name} has save {found}, but the last save begun is {number}")
        if rest := set(os.listdir(folder)) - {path.name for path in paths}:
            raise Failure("leak", f"the saves have left {sorted(rest)}")

"""Loops that write: writers are killed while others read, and disks become full."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import overwire as ow

from .models import Tensors, bytes_of, clones, random_tensors, version, which
from .outcomes import Failure, Round

Versions = dict[int, Tensors]


class Target(NamedTuple):
    """A kind of file or set of files: the functions that write and read it, and the errors that a reader may get while
    it is written."""

    write: Callable[[random.Random, Path, Versions, int], None]
    read: Callable[[Path, Versions], Mapping[str, Any]]
    beside: tuple[type[BaseException], ...] = ()


def _write_file(rng: random.Random, folder: Path, versions: Versions, number: int) -> None:
    ow.save_file(versions[number], folder / "model.safetensors", compress=rng.random() < 0.5)


def _write_shards(rng: random.Random, folder: Path, versions: Versions, number: int) -> None:
    shard = max(1, bytes_of(versions[0]) // 4)
    ow.save_file(versions[number], folder / "model.safetensors", compress=rng.random() < 0.5, max_shard_size=shard)


def _write_bundle(rng: random.Random, folder: Path, versions: Versions, number: int) -> None:
    ow.compress_pickle({"tensors": versions[number], "number": number}, folder / "x.pkl", compress=rng.random() < 0.5)


def _write_copy(rng: random.Random, folder: Path, versions: Versions, number: int) -> None:
    ow.convert(folder.parent / f"source{number}", folder / "copy")


def _write_delta(rng: random.Random, folder: Path, versions: Versions, number: int) -> None:
    ow.save_delta(versions[number], versions[0], folder / "d.safetensors")


def _write_asleep(rng: random.Random, folder: Path, versions: Versions, number: int) -> None:
    sleepers = clones(versions[number])
    with ow.sleep(sleepers, to_file=folder / "model.safetensors", release=rng.random() < 0.5):
        pass
    which(sleepers, {number: versions[number]})


def _read_file(folder: Path, versions: Versions) -> Mapping[str, Any]:
    return ow.load_file(folder / "model.safetensors", framework="pt")


def _read_shards(folder: Path, versions: Versions) -> Mapping[str, Any]:
    return ow.load_file(folder, framework="pt")


def _read_bundle(folder: Path, versions: Versions) -> Mapping[str, Any]:
    loaded = ow.load_compressed_pickle(folder / "x.pkl")
    which(loaded["tensors"], {loaded["number"]: versions[loaded["number"]]})
    tensors: Mapping[str, Any] = loaded["tensors"]
    return tensors


def _read_copy(folder: Path, versions: Versions) -> Mapping[str, Any]:
    return ow.load_file(folder / "copy", framework="pt")


def _read_delta(folder: Path, versions: Versions) -> Mapping[str, Any]:
    tensors = clones(versions[0])
    ow.apply_delta(tensors, folder / "d.safetensors")
    return tensors


# While a set of files is replaced, a reader may find no model, or find that the model was replaced. It never gets a
# mixture.
_SETS = (ow.NotFoundError, ow.CorruptError)

TARGETS: dict[str, Target] = {
    "file": Target(_write_file, _read_file),
    "shards": Target(_write_shards, _read_shards, _SETS),
    "bundle": Target(_write_bundle, _read_bundle),
    "copy": Target(_write_copy, _read_copy, _SETS),
    "delta": Target(_write_delta, _read_delta),
    "asleep": Target(_write_asleep, _read_file),
}


def kills(round_: Round) -> None:
    """A process that writes a file, shards, a bundle, a converted folder or a delta, or puts tensors to sleep in a
    file, is killed at a random time. During the write and after it, readers get the complete old or new model. The next
    save removes the killed writer's files."""
    rng = round_.rng
    name = rng.choice(list(TARGETS))
    target, folder = TARGETS[name], round_.folder / "out"
    base = random_tensors(rng, rng.choice((1 << 14, 1 << 20, 1 << 22)))
    versions = {number: version(base, number) for number in range(4)}
    folder.mkdir()
    round_.doing = name
    round_.in_child(lambda child: _prepare(child, versions, target, folder, name))
    last, log = 0, round_.folder / "log"
    while round_.lasts():
        log.write_text(f"{last}\n")
        writer = round_.child(lambda child: _write_on(child, target, folder, versions, log))
        readers = [
            round_.child(lambda child: _read_on(child, target, folder, versions)) for _ in range(rng.randint(0, 2))
        ]
        _wait_for_an_instant(rng, folder)
        writer.kill()
        for reader in readers:
            reader.result()
        begun = [int(line) for line in log.read_text().split()]
        present, last = round_.in_child(lambda child: _look_and_save(child, target, folder, versions))
        if present not in begun[-2:]:
            raise Failure("wrong bytes", f"version {present} was found; the last saves begun were {begun[-3:]}")
        round_.count(f"kills: {name}")


def _wait_for_an_instant(rng: random.Random, folder: Path) -> None:
    """Waits for a random time, or until just after a file of the folder was renamed, when other files may still have
    their temporary names."""
    time.sleep(rng.choice((0.2, 0.4, 0.8)) * rng.random())
    before, until = _places(folder), time.monotonic() + rng.choice((0, 1))
    while time.monotonic() < until and _places(folder) == before:
        pass
    time.sleep(rng.choice((0, 0, 0.0005)) * rng.random())


def _places(folder: Path) -> set[tuple[str, int]]:
    places = set()
    for path in folder.rglob("[!.]*.*"):
        with contextlib.suppress(FileNotFoundError):
            places.add((path.name, path.stat().st_ino))
    return places


def _prepare(round_: Round, versions: Versions, target: Target, folder: Path, name: str) -> None:
    if name == "copy":
        for number, tensors in versions.items():
            source = folder.parent / f"source{number}"
            source.mkdir()
            ow.save_file(tensors, source / "model.safetensors", compress=False, max_shard_size=max(1, bytes_of(tensors) // 3))
            (source / "config.json").write_text(f'{{"number": {number}}}')
    target.write(round_.rng, folder, versions, 0)


def _names(folder: Path) -> set[str]:
    """Returns the files of a folder, with the shards that the index lists named by their number. Old shards that were
    moved aside are left out, because a later save removes them once they are a minute old."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if ".old-" not in path.name}
    for index in folder.rglob("*.index.json"):
        listed = {str((index.parent / shard).relative_to(folder)) for shard in json.loads(index.read_text())["weight_map"].values()}
        names = {f"shard {sorted(listed).index(name)}" if name in listed else name for name in names}
    return names


def _age(folder: Path) -> None:
    """Makes hidden files an hour old, because a save removes a killed writer's files only if they are older than a few
    seconds."""
    for path in folder.rglob(".*"):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (time.time() - 3600,) * 2)


def _write_on(round_: Round, target: Target, folder: Path, versions: Versions, log: Path) -> None:
    """Saves versions until it is killed, and logs each version before it saves it."""
    with open(log, "ab", buffering=0) as file:
        while True:
            number = round_.rng.randrange(4)
            file.write(b"%d\n" % number)
            target.write(round_.rng, folder, versions, number)


def _read_on(round_: Round, target: Target, folder: Path, versions: Versions) -> None:
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        with round_.may_raise(*target.beside):
            which(target.read(folder, versions), versions)
            round_.count("loads")


def _look_and_save(round_: Round, target: Target, folder: Path, versions: Versions) -> tuple[int, int]:
    """Returns the version that a killed writer has left, and saves another version over it. This must leave the same
    files as a save to an empty folder."""
    present = which(target.read(folder, versions), versions)
    _age(folder)
    number, seed, fresh = round_.rng.randrange(4), round_.rng.random(), folder.parent / "fresh"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    for place in (folder, fresh):
        target.write(random.Random(seed), place, versions, number)
        which(target.read(place, versions), {number: versions[number]})
    if _names(folder) != _names(fresh):
        there, due = sorted(_names(folder)), sorted(_names(fresh))
        raise Failure("leak", f"after the next save the files are {there}; in an empty folder they would be {due}")
    round_.count("loads", 3)
    round_.count("saves", 2)
    return present, number


def full_disks(round_: Round) -> None:
    """If the disk is full, or a file reaches the size limit, a save raises IOFailure, and only the complete old model
    remains. When there is space again, the same save succeeds."""
    rng = round_.rng
    target_name = rng.choice([name for name in TARGETS if name != "copy"])
    base = random_tensors(rng, rng.choice((1 << 16, 1 << 20)))
    versions = {number: version(base, number) for number in range(3)}
    size = 8 * bytes_of(base) + (1 << 20)
    disk = round_.folder / "disk"
    disk.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    mounted = libc.mount(b"soak", os.fsencode(disk), b"tmpfs", 0, b"size=%d" % size) == 0
    try:
        body = _fill if mounted and rng.random() < 0.6 else _limit
        round_.in_child(lambda child: body(child, TARGETS[target_name], disk, versions))
    finally:
        if mounted:
            libc.umount2(os.fsencode(disk), 2)  # MNT_DETACH


def _fill(round_: Round, target: Target, disk: Path, versions: Versions) -> None:
    folder, ballast = disk / "out", disk / "ballast"
    folder.mkdir()
    target.write(round_.rng, folder, versions, 0)
    files = _names(folder)
    while round_.lasts():
        state = os.statvfs(disk)
        with open(ballast, "wb") as file:
            space = state.f_bavail * state.f_frsize
            os.posix_fallocate(file.fileno(), 0, max(1, space - round_.rng.randrange(1, bytes_of(versions[0]) + 4096)))
        _try_to_save(round_, target, folder, versions, files)
        ballast.unlink()


def _limit(round_: Round, target: Target, disk: Path, versions: Versions) -> None:
    folder = disk / "out"
    folder.mkdir()
    target.write(round_.rng, folder, versions, 0)
    files = _names(folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    while round_.lasts():
        resource.setrlimit(resource.RLIMIT_FSIZE, (round_.rng.randrange(1, bytes_of(versions[0]) + 4096), hard))
        try:
            _try_to_save(round_, target, folder, versions, files)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def _try_to_save(round_: Round, target: Target, folder: Path, versions: Versions, files: set[str]) -> None:
    before = which(target.read(folder, versions), versions)
    number = round_.rng.choice([other for other in versions if other != before])
    try:
        target.write(round_.rng, folder, versions, number)
    except ow.IOFailure:
        round_.count("full disks")
        number = before
    present = which(target.read(folder, versions), versions)
    if present != number:
        raise Failure("wrong bytes", f"version {present} was found instead of {number}")
    if {name for name in _names(folder) if not name.startswith("shard ")} != {name for name in files if not name.startswith("shard ")}:
        raise Failure("leak", f"these files are new or missing: {sorted(_names(folder) ^ files)}")
    round_.count("saves")

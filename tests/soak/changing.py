"""Loops in which data changes: files are rewritten in place, tensors sleep, and deltas are applied."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import overwire as ow

from .models import Stored, Tensors, bytes_of, clones, compare_all, random_tensors, store, version, which
from .outcomes import Failure, Round


def rewrites(round_: Round) -> None:
    """While a file is rewritten in place, a load without mmap gives one complete version or an error of a known class.
    Plain files have no checksums, so a load may mix two versions if the file's times do not show the change."""
    rng = round_.rng
    base = random_tensors(rng, rng.choice((1 << 14, 1 << 20, 1 << 23)))
    versions = {number: version(base, number) for number in range(3)}
    form = rng.choice(("compressed", "digests", "plain"))
    bodies = [store(rng, round_.folder / f"v{number}", tensors, form).path.read_bytes() for number, tensors in versions.items()]
    path = round_.folder / "model.safetensors"
    path.write_bytes(bodies[0])
    round_.doing = form
    reading = [partial(_read, path, versions, form == "plain") for _ in range(rng.randint(1, 3))]
    round_.beside(partial(_rewrite, path, bodies), *reading)


def _rewrite(path: Path, bodies: list[bytes], round_: Round, rng: random.Random) -> None:
    body, shorten = rng.choice(bodies), rng.random() < 0.5
    step = rng.choice((len(body), 4096, 1 << 16, 1 << 20))
    with open(path, "wb" if shorten else "r+b", buffering=0) as file:
        for at in range(0, len(body), step):
            file.write(body[at : at + step])
        file.truncate(len(body))
    round_.count("rewrites")
    time.sleep(rng.random() * 0.02)


def _read(path: Path, versions: dict[int, Tensors], plain: bool, round_: Round, rng: random.Random) -> None:
    with round_.may_raise(ow.CorruptError, ow.FormatError, ow.IOFailure):
        way = rng.choice(("buffered", "direct", None))
        if rng.random() < 0.3:
            loaded = dict(ow.stream(path, framework="pt", mmap=False, read=way))
        else:
            loaded = ow.load_file(path, framework="pt", mmap=False, read=way)
        try:
            which(loaded, versions)
            round_.count("loads")
        except Failure:
            if not plain:
                raise
            round_.count("mixtures of plain files")


def sleeps(round_: Round) -> None:
    """Threads put tensors to sleep and wake them during loads. The tensors are restored bit for bit, and their files
    have the same tensors. A sleep that times out, or is refused because of its memory, does not change the tensors. If
    two threads wake the same tensors, they are woken once."""
    rng = round_.rng
    stored = store(rng, round_.folder / "model", random_tensors(rng, 1 << 18))
    sleepers = [
        _Sleeper(random_tensors(rng, 1 << rng.choice((12, 20))), round_, number) for number in range(rng.randint(1, 3))
    ]
    round_.beside(*[sleeper.step for sleeper in sleepers], partial(_load_beside, stored))


def _load_beside(stored: Stored, round_: Round, rng: random.Random) -> None:
    compare_all(ow.load_file(stored.path, device=round_.device, framework="pt"), stored.tensors)
    round_.count("loads")


class _Sleeper:
    """Tensors that one thread puts to sleep and wakes."""

    def __init__(self, tensors: Tensors, round_: Round, number: int) -> None:
        self.want, self.state = tensors, clones(tensors, round_.device)
        self.file = round_.folder / f"asleep{number}.safetensors"

    def step(self, round_: Round, rng: random.Random) -> None:
        options: dict[str, Any] = {"timeout": rng.choice((None, None, 0.002)), "max_memory": rng.choice((None, None, 1000))}
        if to_file := rng.random() < 0.3:
            options["to_file"] = self.file
        asleep = None
        with round_.may_raise(ow.DeadlineError, ow.OutOfMemoryError):
            asleep = ow.sleep(self.state, release=rng.random() < 0.7, **options)
        if asleep is None:
            compare_all(self.state, self.want)
            return
        if rng.random() < 0.2:
            self._wake_twice(round_, asleep)
        else:
            with round_.may_raise(ow.DeadlineError):
                asleep.wake(timeout=rng.choice((None, 0.001)))
            asleep.wake()
        compare_all(self.state, self.want)
        if to_file:
            compare_all(ow.load_file(self.file, framework="pt"), self.want)
        round_.count("sleeps")

    def _wake_twice(self, round_: Round, asleep: Any) -> None:
        errors: list[BaseException] = []

        def wake() -> None:
            try:
                asleep.wake()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=wake) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        round_.count("wakes by two threads")


def deltas(round_: Round) -> None:
    """Deltas and chains of deltas are applied in place during loads, and give the new tensors. A delta that fails
    (wrong base, damage, timeout) changes no tensor. A load with a base gives the same tensors."""
    rng = round_.rng
    base = random_tensors(rng, rng.choice((1 << 12, 1 << 18, 1 << 22)))
    versions = {number: version(base, number) for number in range(4)}
    files = {}
    for number in range(3):
        files[number] = round_.folder / f"delta{number}.safetensors"
        ow.save_delta(versions[number + 1], versions[number], files[number])
    stored = store(rng, round_.folder / "base", versions[0], "compressed")
    damaged = round_.folder / "damaged.safetensors"
    data = bytearray(files[0].read_bytes())
    data[rng.randrange(len(data))] ^= 1
    damaged.write_bytes(data)
    changing = [partial(_change, versions, files, damaged) for _ in range(rng.randint(1, 3))]
    round_.beside(*changing, partial(_load_on_base, versions, files, stored.path))


def _change(
    versions: dict[int, Tensors], files: dict[int, Path], damaged: Path, round_: Round, rng: random.Random
) -> None:
    at, to = rng.randrange(4), rng.randrange(4)
    state = clones(versions[at], round_.device)
    chain: list[Any] = [files[number] for number in range(at, to)] or [files[rng.randrange(3)]]
    refusals: tuple[type[BaseException], ...] = (ow.DeadlineError,)
    expected = to if to > at else None
    if expected is None:
        refusals += (ow.DeltaBaseError,)
        if chain == [files.get(at)]:
            expected = at + 1
    if rng.random() < 0.2:
        chain, expected, refusals = (
            [damaged], None, (*refusals, ow.CorruptError, ow.FormatError, ow.NotSupportedError, ow.DeltaBaseError),
        )
    applied = False
    with round_.may_raise(*refusals):
        ow.apply_delta(state, chain if len(chain) > 1 else chain[0], timeout=rng.choice((None, None, 0.001)))
        applied = True
    present = which(state, {number: versions[number] for number in (at, expected) if number is not None})
    if applied and expected is not None and present != expected and bytes_of(versions[0]):
        raise Failure("wrong bytes", f"after a delta to version {expected}, the tensors are version {present}")
    if not applied and present != at:
        raise Failure("wrong bytes", f"a delta was refused, and the tensors are version {present} instead of {at}")
    round_.count("deltas")


def _load_on_base(
    versions: dict[int, Tensors], files: dict[int, Path], base: Path, round_: Round, rng: random.Random
) -> None:
    to = rng.randint(1, 3)
    loaded = ow.load_file([files[number] for number in range(to)], base=base, framework="pt")
    compare_all(loaded, versions[to])
    round_.count("loads on a base")

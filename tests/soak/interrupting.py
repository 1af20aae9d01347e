"""Loops that interrupt calls: by Ctrl-C and timeouts, signal handlers, and forks."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import overwire as ow

from .models import Stored, Tensors, clones, compare_all, random_tensors, store, version, which
from .outcomes import PATIENCE, Failure, Round

Work = Callable[[random.Random], None]


def _works(round_: Round, stored: Stored, versions: dict[int, Tensors]) -> dict[str, tuple[Work, Callable[[], None]]]:
    """Returns pairs by name: work that may be interrupted at any time, and a check that must succeed afterwards."""
    folder, device = round_.folder / "out", round_.device
    folder.mkdir()
    state = clones(stored.tensors, device)
    sleeping: list[Any] = []
    ow.save_file(versions[0], folder / "model.safetensors")
    ow.save_delta(versions[1], versions[0], folder / "delta.safetensors")
    changed = clones(versions[0], device)

    def load(rng: random.Random) -> None:
        compare_all(ow.load_file(stored.path, device=device, framework="pt", mmap=False), stored.tensors)

    def stream(rng: random.Random) -> None:
        compare_all(dict(ow.stream(stored.path, device=device, framework="pt")), stored.tensors)

    def slices(rng: random.Random) -> None:
        with ow.safe_open(stored.path, "pt", device=device) as file:
            compare_all({name: file.get_tensor(name) for name in stored.tensors}, stored.tensors)

    def pin(rng: random.Random) -> None:
        with ow.pin(stored.path) as pinned:
            compare_all(pinned.load_file(device=device, framework="pt"), stored.tensors)

    def save(rng: random.Random) -> None:
        ow.save_file(versions[rng.randrange(2)], folder / "model.safetensors")

    def sleep(rng: random.Random) -> None:
        limit = rng.choice((None, 0.001, 0.01))
        if not sleeping:
            with round_.may_raise(ow.DeadlineError):
                sleeping.append(ow.sleep(state, timeout=limit))
        else:
            with round_.may_raise(ow.DeadlineError):
                sleeping[0].wake(timeout=limit)
                sleeping.clear()

    def delta(rng: random.Random) -> None:
        # if the tensors have already changed, the delta is refused
        with round_.may_raise(ow.DeadlineError, ow.DeltaBaseError):
            ow.apply_delta(changed, folder / "delta.safetensors", timeout=rng.choice((None, 0.001)))

    def as_saved() -> None:
        compare_all(ow.load_file(stored.path, framework="pt"), stored.tensors)

    def is_one_file() -> None:
        which(ow.load_file(folder / "model.safetensors", framework="pt"), versions)
        names = {path.name for path in folder.iterdir()} - {"model.safetensors", "delta.safetensors"}
        if names:
            raise Failure("leak", f"an interrupted save has left {sorted(names)}")

    def awake() -> None:
        if sleeping:
            sleeping.pop().wake()
        compare_all(state, stored.tensors)

    def is_one_version() -> None:
        if which(changed, versions) == 1:
            for name, tensor in versions[0].items():
                changed[name].copy_(tensor)

    after = {"save": (save, is_one_file), "sleep": (sleep, awake), "delta": (delta, is_one_version)}
    return {work.__name__: (work, as_saved) for work in (load, stream, slices, pin)} | after


def cancels(round_: Round) -> None:
    """At a random time, Ctrl-C ends each function with KeyboardInterrupt, or a timeout ends it with DeadlineError.
    Afterwards the tensors are unchanged, each file is the old or the new one, nothing is open, and the next call
    works."""
    rng = round_.rng
    base = random_tensors(rng, rng.choice((1 << 14, 1 << 20, 1 << 23)))
    stored = store(rng, round_.folder / "model", random_tensors(rng, rng.choice((1 << 16, 1 << 22))))
    if stored.form == "tensorizer":
        stored = store(rng, round_.folder / "model", stored.tensors, "compressed")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    works = _works(round_, stored, {0: version(base, 0), 1: version(base, 1)})
    opened = None
    while round_.lasts():
        round_.doing = rng.choice(list(works))
        work, after = works[round_.doing]
        _interrupted(round_, rng, work)
        after()
        round_.count("cancels")
        if opened is None and round_.counts["cancels"] == 20:
            opened = _opened()
    gc.collect()
    if opened is not None and _opened() > opened + 16:
        raise Failure("leak", f"{_opened()} descriptors are open; {opened} were open after 20 interruptions")


def _opened() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _interrupted(round_: Round, rng: random.Random, work: Work) -> None:
    """Runs work until SIGINT arrives. If the work ends first, waits for SIGINT."""
    delay = rng.choice((0.0005, 0.005, 0.05)) * rng.random()
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    lost: list[str] = []
    sys.unraisablehook = lambda what: lost.append(getattr(what.object, "__qualname__", str(what.object)))
    try:
        timer.start()
        work(rng)
        round_.count("done before Ctrl-C")
        timer.join()
        until = time.monotonic() + PATIENCE
        while not lost and time.monotonic() < until:
            time.sleep(0.001)
    except KeyboardInterrupt:
        timer.join()
        return
    if not lost:
        raise Failure("hang", "Ctrl-C was lost")
    round_.count(f"Ctrl-C lost by Python in {lost[0]}")


def signals(round_: Round) -> None:
    """A signal handler can call overwire even if it interrupts a call into overwire. Both calls get the right bytes."""
    rng = round_.rng
    outer = store(rng, round_.folder / "outer", random_tensors(rng, rng.choice((1 << 16, 1 << 21))))
    inner = store(rng, round_.folder / "inner", random_tensors(rng, 1 << 12))
    target = round_.folder / "saved.safetensors"
    busy: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if busy:
            return
        busy.append(number)
        round_.count("signals")
        if rng.random() < 0.5:
            compare_all(ow.load_file(inner.path, framework="pt"), inner.tensors)
        else:
            ow.save_file(inner.tensors, target)
        busy.clear()

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.003 * rng.random(), 0.001 + 0.01 * rng.random())
    try:
        while round_.lasts():
            compare_all(ow.load_file(outer.path, framework="pt"), outer.tensors)
            compare_all(dict(ow.stream(outer.path, framework="pt")), outer.tensors)
            round_.count("loads", 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def forks(round_: Round) -> None:
    """A child that is forked during loads, also as a DataLoader worker, can read plain files and its parent's tensors.
    All its other calls raise ForkedError. The child exits, and the parent's loads continue."""
    rng = round_.rng
    models = [store(rng, round_.folder / form, random_tensors(rng, 1 << rng.choice((12, 20))), form) for form in ("plain", "compressed")]
    kept = [ow.load_file(model.path, framework="pt") for model in models]
    loading = threading.Thread(target=_load_on, args=(round_, models), daemon=True)
    loading.start()
    try:
        while round_.lasts():
            if rng.random() < 0.1:
                _data_loader(round_, models[0])
                continue
            child = round_.child(partial(_in_fork, models, kept), rng.choice(("at once", "as a program")))
            child.result()
            round_.count("forks")
    finally:
        loading.join(PATIENCE + round_.seconds)
    if loading.is_alive():
        raise Failure("hang", "loads during forks do not end")


def _load_on(round_: Round, models: list[Stored]) -> None:
    try:
        while round_.lasts():
            for model in models:
                compare_all(ow.load_file(model.path, framework="pt"), model.tensors)
                round_.count("loads")
    except BaseException as error:
        round_.fail(error)


def _in_fork(models: list[Stored], kept: list[Tensors], round_: Round) -> None:
    for model, tensors in zip(models, kept, strict=True):
        compare_all(ow.load_file(model.path, framework="pt"), model.tensors)
        compare_all(tensors, model.tensors)
    for refused in (
        lambda: ow.save_file(models[0].tensors, round_.folder / "never.safetensors"),
        lambda: ow.pin(models[0].path),
    ):
        try:
            refused()
        except ow.ForkedError:
            round_.count("refusals")
        else:
            raise Failure("unexpected error", "a forked child has used the engine")


class _Rows:
    """A data set with the rows of a plain file. The file is opened again for each row."""

    def __init__(self, path: Path, name: str, rows: int) -> None:
        self.path, self.name, self.rows = path, name, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: int) -> Any:
        with ow.safe_open(self.path, "pt") as file:
            return file.get_slice(self.name)[row : row + 1].clone()


def _data_loader(round_: Round, model: Stored) -> None:
    import torch

    name = next(name for name, tensor in model.tensors.items() if tensor.dim() and tensor.shape[0])
    want = model.tensors[name]
    rows = min(8, want.shape[0])
    loader = torch.utils.data.DataLoader(
        _Rows(model.path, name, rows), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=PATIENCE
    )
    compare_all({name: torch.cat(list(loader))}, {name: want[:rows]})
    round_.count("data loaders")

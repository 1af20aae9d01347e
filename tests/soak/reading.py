"""Loops that read: with concurrent threads, and with preloads."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import overwire as ow
import torch

from .models import Stored, as_bytes, compare, compare_all, random_tensors, store
from .outcomes import Round


class Shared:
    """A model that threads share, as an open file and as a pinned model. Any thread may close either of them."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self._lock = threading.Lock()
        self._opened: Any = None
        self._pinned: Any = None

    def opened(self, device: str) -> Any:
        with self._lock:
            self._opened = self._opened or ow.safe_open(self.stored.path, "pt", device=device)
            return self._opened

    def pinned(self) -> Any:
        with self._lock:
            self._pinned = self._pinned or ow.pin(self.stored.path)
            return self._pinned

    def close(self, pinned: bool) -> None:
        """Closes the file or the pinned model, which other threads may still use."""
        with self._lock:
            if pinned:
                closing, self._pinned = self._pinned, None
            else:
                closing, self._opened = self._opened, None
        if closing is not None:
            closing.release() if pinned else closing.close()


def threads(round_: Round) -> None:
    """Threads load, slice, stream, pin, verify and close the same models at the same time. Each gets the saved bytes in
    its own memory, or ArgumentError if another thread has closed the model."""
    rng = round_.rng
    size = rng.choice((1 << 14, 1 << 20, 1 << 22))
    models = [Shared(store(rng, round_.folder / f"m{n}", random_tensors(rng, size))) for n in range(rng.randint(1, 3))]
    round_.beside(*[partial(_step, models) for _ in range(rng.randint(2, 6))])
    for model in models:
        model.close(True)
        model.close(False)


def _step(models: list[Shared], round_: Round, rng: random.Random) -> None:
    model = rng.choice(models)
    steps = (_whole, _whole, _slices, _slices, _streamed, _streamed, _from_pinned, _module, _verified)
    if rng.random() < 0.05:
        model.close(rng.random() < 0.5)
        round_.count("closes")
        return
    rng.choice(steps)(round_, rng, model)


def _whole(round_: Round, rng: random.Random, model: Shared) -> None:
    options: dict[str, Any] = {"mmap": rng.choice((None, False)), "read": rng.choice((None, "buffered", "direct"))}
    names = None
    if rng.random() < 0.3:
        names = options["keys"] = rng.sample(list(model.stored.tensors), rng.randint(1, len(model.stored.tensors)))
    framework = rng.choice(("pt", "pt", "bytes")) if round_.device == "cpu" else "pt"
    loaded = ow.load_file(model.stored.path, device=round_.device, framework=framework, **options)
    compare_all(loaded, model.stored.tensors, names)
    round_.count("loads")
    if framework == "pt" and rng.random() < 0.3:  # other loads must not see the change
        for tensor in loaded.values():
            as_bytes(tensor).fill_(77)


def _slices(round_: Round, rng: random.Random, model: Shared) -> None:
    with round_.may_raise(ow.ArgumentError):  # another thread may have closed it
        file = model.opened(round_.device)
        for name in rng.sample(list(model.stored.tensors), min(3, len(model.stored.tensors))):
            want = model.stored.tensors[name]
            if not want.dim() or not want.numel():
                compare(name, file.get_tensor(name), want)
                continue
            first = rng.randrange(want.shape[0])
            rows = slice(first, rng.randint(first + 1, want.shape[0]))
            part: tuple[slice, ...] = (rows,)
            if want.dim() > 1 and rng.random() < 0.5:
                column = rng.randrange(want.shape[1])
                part = (rows, slice(column, rng.randint(column + 1, want.shape[1])))
            compare(f"{name}[{part}]", file.get_slice(name)[part], want[part])
            round_.count("slices")


def _streamed(round_: Round, rng: random.Random, model: Shared) -> None:
    limit = rng.choice((None, None, 2 * sum(tensor.nbytes for tensor in model.stored.tensors.values()) + 4096))
    stream = ow.stream(
        model.stored.path, device=round_.device, framework="pt", in_order=rng.random() < 0.3, max_memory=limit
    )
    last = rng.choice((None, rng.randint(1, len(model.stored.tensors))))
    loaded = {}
    for name, tensor in stream:
        loaded[name] = tensor
        if last is not None and len(loaded) >= last:
            stream.close()  # type: ignore[attr-defined]
            round_.count("closes")
            break
    compare_all(loaded, model.stored.tensors, None if last is None else list(loaded))
    round_.count("streams")


def _from_pinned(round_: Round, rng: random.Random, model: Shared) -> None:
    if model.stored.form == "tensorizer":
        return
    with round_.may_raise(ow.ArgumentError):  # another thread may have released it
        pinned = model.pinned()
        if rng.random() < 0.5:
            compare_all(pinned.load_file(device=round_.device, framework="pt"), model.stored.tensors)
        else:
            compare_all(dict(pinned.stream(device=round_.device, framework="pt")), model.stored.tensors)
        round_.count("loads of pinned models")


def _module(round_: Round, rng: random.Random, model: Shared) -> None:
    module = torch.nn.Module()
    for name, tensor in model.stored.tensors.items():
        module.register_buffer(name, torch.full_like(tensor, 1, device=round_.device))
    ow.load_model(module, model.stored.path)
    compare_all(dict(module.named_buffers(remove_duplicate=False)), model.stored.tensors)
    round_.count("modules")


def _verified(round_: Round, rng: random.Random, model: Shared) -> None:
    ow.verify(model.stored.path)
    round_.count("verifications")


def preloads(round_: Round) -> None:
    """A load that joins a preload gets the current bytes of the file, even if the file was replaced, several loads join
    one preload, or the preload is dropped before it ends."""
    rng = round_.rng
    tensors = random_tensors(rng, rng.choice((1 << 16, 1 << 21)))
    while round_.lasts():
        form = rng.choice(("compressed", "plain", "shards"))
        stored = store(rng, round_.folder / "model", tensors, form)
        preload = ow.preload(stored.path)
        round_.count("preloads")
        if rng.random() < 0.4:
            tensors = random_tensors(rng, 1 << 16)
            stored = store(rng, round_.folder / "model", tensors, form)
            round_.count("replaced files")
        if rng.random() < 0.3:
            preload = None
        if rng.random() < 0.5:
            compare_all(ow.load_file(stored.path, framework="pt"), tensors)
        else:
            compare_all(dict(ow.stream(stored.path, framework="pt")), tensors)
        compare_all(ow.load_file(stored.path, framework="pt"), tensors)
        round_.count("loads", 2)
        if preload is not None and rng.random() < 0.5:
            with round_.may_raise(ow.OverwireError):  # the file may have been replaced
                preload.wait(30)
        for path in list(round_.folder.glob("model/*")):
            path.unlink()

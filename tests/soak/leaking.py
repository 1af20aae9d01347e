"""A loop that searches for leaks."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import overwire as ow

from .models import clones, compare_all, random_tensors, store, version
from .outcomes import Failure, Round

# Growth up to this between two measurements is not a leak, because the allocator's pages and arenas vary.
SLACK = {"descriptors": 0, "threads": 2, "mappings": 64, "KiB": 12 << 10}
DRIVERS_OWN = {"KiB": 48 << 10}  # on a GPU, where the driver fills its own pools slowly


def leaks(round_: Round) -> None:
    """Repeated loads, streams, slices, pins, saves, sleeps, deltas and refused calls leak no descriptor, thread,
    mapping or memory."""
    rng = round_.rng
    tensors = random_tensors(rng, 1 << 16)
    models = [store(rng, round_.folder / form, tensors, form) for form in ("compressed", "plain", "shards")]
    changed = version(tensors, 3)
    ow.save_delta(changed, tensors, round_.folder / "delta.safetensors")
    damaged = round_.folder / "damaged.safetensors"
    data = bytearray(models[0].path.read_bytes())
    data[len(data) // 2] ^= 4
    damaged.write_bytes(data)

    def step() -> None:
        model = rng.choice(models)
        compare_all(ow.load_file(model.path, device=round_.device, framework="pt"), tensors)
        for _ in ow.stream(model.path, device=round_.device, framework="pt"):
            break
        with ow.safe_open(model.path, "pt", device=round_.device) as file:
            file.get_slice("t0")[:1]
        with ow.pin(model.path) as pinned:
            pinned.load_file(device=round_.device, framework="pt")
        state = clones(tensors, round_.device)
        with ow.sleep(state):
            pass
        ow.apply_delta(state, round_.folder / "delta.safetensors")
        compare_all(state, changed)
        ow.save_file(tensors, round_.folder / "saved.safetensors")
        ow.compress_pickle(tensors, round_.folder / "x.pkl")
        compare_all(ow.load_compressed_pickle(round_.folder / "x.pkl"), tensors)
        with round_.may_raise(ow.CorruptError, ow.FormatError, ow.NotFoundError):
            ow.load_file(rng.choice((damaged, round_.folder / "none.safetensors")), device=round_.device, framework="pt")
        with round_.may_raise(ow.TensorNotFoundError):
            ow.load_file(model.path, keys=["none"], framework="pt")
        round_.count("steps")

    looks = []
    for _ in range(4):
        for _ in range(40 if round_.seconds >= 1 else 10):
            step()
        looks.append(_look())
    # Growth in each of three equally long parts is a leak.
    for name, slack in (SLACK | (DRIVERS_OWN if round_.device != "cpu" else {})).items():
        growth = [after[name] - before[name] for before, after in zip(looks, looks[1:], strict=False)]
        if min(growth) > 0 and sum(growth[1:]) > slack:
            raise Failure("leak", f"{name} after each quarter: {[look[name] for look in looks]}")


def _look() -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "KiB": pages * resource.getpagesize() >> 10,
    }

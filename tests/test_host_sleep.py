"""Tests sleeps with host=True: in one process and in several, tensors that the store has sleep without a copy. Also
tests sleeps when the store has ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import torch
from conftest import soon
from test_host import Store

# The engine reads OVERWIRE_HOST only once, so each test runs in its own process.
PROGRAM = """
import os, sys
from pathlib import Path
sys.path[:0] = [FOLDER]
os.environ["OVERWIRE_HOST"] = os.path.abspath("socket")
import test_host_sleep
test_host_sleep.TEST(Path.cwd())
"""


@pytest.mark.parametrize(
    "name",
    [
        "unchanged_tensors",
        "second_engine",
        "killed_engines",
        "store_ends",
        "entries_stay",
        "changed_puts",
        "closed_puts",
        "forged_digests",
        "forged_tensors",
        "arguments",
    ],
)
def test_sleep_in_the_host_store(name: str, torch_script: Callable[..., Any]) -> None:
    """Each case is a function of this file. Its docstring says what it checks."""
    torch_script(PROGRAM.replace("FOLDER", repr(str(Path(__file__).parent))).replace("TEST", name))


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Store]:
    store = Store(folder)
    try:
        yield store
    finally:
        store.kill()


def weights(count: int = 4, megabytes: int = 1) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    numbers = megabytes << 19
    tensors = {f"w{i}": (torch.randn(numbers // 64, 64, generator=made) * 0.02).bfloat16() for i in range(count)}
    return {
        **tensors,
        "bytes": torch.randint(0, 256, (999,), generator=made, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
    }


def copies(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(tensors: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(tensors[name].view(torch.uint8), one.view(torch.uint8)) for name, one in want.items())


def unchanged_tensors(folder: Path) -> None:
    """Only tensors that have changed since they were put into the store are compressed. While tensors sleep, their
    entry counts as used."""
    with running(folder) as store:
        tensors = weights()
        want, size = copies(tensors), sum(one.nbytes for one in tensors.values())
        memory = ow.prepare_sleep(tensors, host=True)
        assert memory.wait(60) and memory.nbytes == size
        assert ow.prepare_sleep(tensors, host=True).wait(60)  # the store already has the tensors
        (entry,) = store.report()["entries"]
        with ow.sleep(tensors, host=True) as asleep:
            assert (asleep.nbytes, asleep.released, asleep.stored) == (size, size, 0), asleep
            assert 0 < asleep.shared <= entry["size"] < 0.8 * size
            assert store.report()["entries"][0]["users"] == 1
            assert all(one.untyped_storage().nbytes() == 0 for one in tensors.values())
        same(tensors, want)
        assert asleep.shared == 0 and store.report()["entries"][0]["users"] == 0
        tensors["w1"].view(torch.int16)[3, 3] ^= 1
        want, one = copies(tensors), tensors["w1"].nbytes
        with ow.sleep(tensors, host=True) as asleep:
            assert asleep.nbytes == size and 0 < asleep.stored < one and asleep.shared > 3 * one * 0.6
        same(tensors, want)
        assert len(store.report()["entries"]) == 1
        alone = {"other": want["w2"].clone(), "w2": want["w2"].clone()}
        with ow.sleep(alone, host=True) as asleep:  # only the tensor with the stored name uses the entry
            assert 0.5 < asleep.stored / asleep.shared < 2
        same(alone, dict.fromkeys(alone, want["w2"]))


def second_engine(folder: Path) -> None:
    """Two processes with the same model share one memfd. The store does not grow, and neither process has a copy."""
    ready, go = os.pipe()
    if not (child := os.fork()):
        os.close(go)
        os.read(ready, 1)
        try:
            engine(weights(4, 8))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    with running(folder) as store:
        tensors = weights(4, 8)
        engine(tensors)
        used, before = store.report()["used"], shared_memory(store)
        assert before >= used > 0
        with ow.sleep(tensors, host=True) as asleep:
            os.write(go, b"x")
            assert os.waitpid(child, 0)[1] == 0
            report = store.report()
            assert asleep.stored == 0
        assert (report["used"], len(report["entries"]), report["counts"]["puts"]) == (used, 1, 1)
        assert shared_memory(store) - before < used / 2


def engine(tensors: dict[str, torch.Tensor]) -> None:
    """Puts tensors to sleep and wakes them, and compares the memory of this process before and after."""
    want = copies(tensors)
    ow.prepare_sleep(tensors, host=True).wait(60)
    with ow.sleep(tensors, host=True):
        pass  # the first wake allocates its buffers
    before = private_memory()
    with ow.sleep(tensors, host=True) as asleep:
        assert asleep.stored == 0
        assert private_memory() - before < asleep.shared / 10
    same(tensors, want)


def closed_puts(folder: Path) -> None:
    """After `close`, no background job reads the tensors, so their memory can be freed."""
    with running(folder):
        for delay in (0.05, 0.1, 0.15):
            tensors = {"w": torch.ones(96 << 20, dtype=torch.bfloat16)}
            memory = ow.prepare_sleep(tensors, host=True)
            time.sleep(delay)
            memory.close()
            del tensors, memory  # unmaps the memory
            time.sleep(0.3)


def forged_digests(folder: Path) -> None:
    """Sleeping tensors never wake with the bytes of a file from elsewhere, even if its tensors have the same names and
    digests."""
    with running(folder) as store:
        good, path = weights()["w0"], folder / "evil.safetensors"
        evil = same_digest(good)
        assert ow.digest(good) == ow.digest(evil) and not torch.equal(good, evil)
        ow.save_file({"w": evil}, path, digests=True)
        assert store.command("put", str(path)).returncode == 0
        assert torch.equal(ow.load_file(path, host=True)["w"], evil) and ow.metrics().host.hits == 1
        tensors = {"w": good.clone()}
        for is_kept in (False, True):
            assert not is_kept or ow.prepare_sleep(tensors, host=True).wait(60)
            with ow.sleep(tensors, host=True) as asleep:
                assert (asleep.shared > 0) == is_kept
            same(tensors, {"w": good})


def forged_tensors(folder: Path) -> None:
    """A tensor never wakes with the bytes of a different tensor in the store that has the same name, size and
    digest."""
    with running(folder):
        good = weights()["w0"]
        evil = {"w": same_digest(good)}
        assert ow.digest(evil["w"]) == ow.digest(good)
        assert ow.prepare_sleep(evil, host=True).wait(60)
        tensors = {"w": good.clone()}
        with ow.sleep(tensors, host=True) as asleep:
            assert asleep.shared == 0
        same(tensors, {"w": good})
        with ow.sleep(evil, host=True) as asleep:
            assert asleep.shared > 0


def same_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with other bytes but the same digest. The digest is a sum of mixed words, so their order does
    not matter."""
    first, second = 0xA54FF53A5F1D36F1, 0xBB67AE8584CAA73B

    def mixed(words: np.ndarray, first: int, second: int) -> np.ndarray:
        words = (words ^ words >> np.uint64(32)) * np.uint64(first)
        words = (words ^ words >> np.uint64(32)) * np.uint64(second)
        return words ^ words >> np.uint64(32)

    words = tensor.view(torch.int16).numpy().view(np.uint64).ravel()
    steps = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    moved = np.roll(mixed(words + steps, first, second), 1)
    forged = mixed(moved, pow(second, -1, 1 << 64), pow(first, -1, 1 << 64)) - steps
    return torch.from_numpy(forged.view(np.int16).reshape(tensor.shape)).view(torch.bfloat16)


def private_memory() -> int:
    rows = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    return sum(int(row[1]) for row in rows if row[0].startswith("Private_")) << 10


def shared_memory(store: Store) -> int:
    """Returns how much memory the memfds of this process and of the store use."""
    sizes: dict[int, int] = {}
    for process in (os.getpid(), store.process.pid):
        for row in map(str.split, Path(f"/proc/{process}/maps").read_text().splitlines()):
            if row[5:] and row[5].startswith("/memfd:"):
                first, end = (int(at, 16) for at in row[0].split("-"))
                sizes[int(row[4])] = sizes.get(int(row[4]), 0) + end - first
        for name in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(link := f"/proc/{process}/fd/{name}").startswith("/memfd:"):
                    sizes[os.stat(link).st_ino] = os.stat(link).st_blocks * 512
    return sum(sizes.values())


def killed_engines(folder: Path) -> None:
    """If an engine is killed while it puts tensors into the store, or while they sleep, the store has the whole entry
    or nothing, and no process uses the entry."""
    delays = [None, 0.0, 0.03]  # None: while the tensors sleep
    children = []
    for delay in delays:
        (ready, report_step), (go, start) = os.pipe(), os.pipe()
        if not (child := os.fork()):
            os.read(go, 1)
            tensors = weights(4, 8)
            os.write(report_step, b"x")
            ow.prepare_sleep(tensors, host=True).wait(60)
            with ow.sleep(tensors, host=True):
                os.write(report_step, b"x")
                time.sleep(300)
        children.append((child, delay, ready, start))
    with running(folder) as store:
        for child, delay, ready, start in children:
            os.write(start, b"x")
            os.read(ready, 1)
            if delay is None:
                os.read(ready, 1)
                assert [entry["users"] for entry in store.report()["entries"]] == [1]
            else:
                time.sleep(delay)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert soon(lambda: all(one["state"] == "ready" and not one["users"] for one in store.report()["entries"]))
            for entry in store.report()["entries"]:
                assert store.command("drop", entry["name"]).returncode == 0
            assert store.report()["used"] == 0
        engine(weights(4, 8))


def store_ends(folder: Path) -> None:
    """If the store is killed and another one starts, sleeping tensors keep the memory of the first. Without a store,
    tensors are compressed for the sleep."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("overwire").addHandler(handler)
    with running(folder) as store:
        tensors = weights()
        want = copies(tensors)
        ow.prepare_sleep(tensors, host=True).wait(60)
        asleep = ow.sleep(tensors, host=True)
        store.kill()
        with ow.sleep(copies(want), host=True) as again:
            assert again.stored > 0 and again.shared == 0
        assert len(lines) == 1 and "host store" in lines[0] and "own memory" in lines[0], lines
    with running(folder) as new:
        assert asleep.stored == 0 and asleep.shared > 0
        asleep.wake()
        same(tensors, want)
        with ow.sleep(tensors, host=True) as asleep:
            assert asleep.stored > 0 and asleep.shared == 0 and new.report()["entries"] == []
        same(tensors, want)
        ow.prepare_sleep(tensors, host=True).wait(60)
        with ow.sleep(tensors, host=True) as asleep:
            assert asleep.stored == 0
        same(tensors, want)


def entries_stay(folder: Path) -> None:
    """While sleeping tensors use an entry, neither another put nor a smaller budget evicts it. Even if it is dropped,
    the tensors wake unchanged."""
    with running(folder) as store:
        tensors = weights()
        want = copies(tensors)
        ow.prepare_sleep(tensors, host=True).wait(60)
        asleep = ow.sleep(tensors, host=True)
        assert store.command("budget", "6MB").returncode == 0
        noise = {"x": torch.randint(0, 256, (5 << 20,), dtype=torch.uint8)}
        with pytest.raises(ow.OutOfMemoryError, match="budget"):
            ow.prepare_sleep(noise, host=True).wait(60)
        (entry,) = store.report()["entries"]
        assert store.command("drop", entry["name"]).returncode == 0
        assert store.report()["entries"][0]["state"] == "dropped"
        asleep.wake()
        same(tensors, want)
        assert store.report()["entries"] == []


def arguments(folder: Path) -> None:
    """Wrong values and combinations of arguments are refused. `prepare_sleep` with host=True needs a running store."""
    tensors = weights(1)
    with pytest.raises(ow.ArgumentError, match="to_file"):
        ow.sleep(tensors, host=True, to_file=folder / "x")
    for amount in ("1GB", 5):
        with pytest.raises(ow.ArgumentError, match="host"):
            ow.prepare_sleep(amount, host=True)
    with pytest.raises(ow.ArgumentError, match="host"):
        ow.sleep(tensors, host="yes")  # type: ignore[arg-type]
    with pytest.raises(ow.NotFoundError, match="socket"):
        ow.prepare_sleep(tensors, host=True).wait(60)


def changed_puts(folder: Path) -> None:
    """If a tensor changes while tensors are put into the store, nothing is put. The tensors later wake with their own
    bytes, even if the change was undone before the sleep."""
    with running(folder) as store:
        tensors = weights(4, 32)
        want = copies(tensors)
        memory = ow.prepare_sleep(tensors, host=True)
        tensors["w3"].add_(1)
        with pytest.raises(ow.ArgumentError, match="the tensor was changed") as error:
            memory.wait(60)
        assert error.value.tensor == "w3"
        tensors["w3"].copy_(want["w3"])
        assert not store.report()["entries"]
        with ow.sleep(tensors, host=True) as asleep:
            assert asleep.shared == 0
        same(tensors, want)

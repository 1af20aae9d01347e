"""Loads random hostile bundles, each of which must load or be refused with an overwire error.

    python tests/peers/pickle_fuzz.py --cases 1000000 --seed 7      also under `make asan`
    python tests/peers/pickle_fuzz.py --seed 7 --only 123456        repeats one case

A case is a pickle and its blobs. The pickle is our own pickler's output with changed and recombined opcodes, names,
numbers, references and bytes, or a program that calls everything on the allow-list with nearly right arguments. After a
load every byte of every tensor and array is read. Blobs are between inaccessible pages, so an access outside ends the
process even in code without sanitizers. A case that takes too long or too much memory is a failure.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import faulthandler
import gc
import mmap
import os
import random
import resource
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from pickle_cases import Maker

CASES_EACH = 20_000  # cases per process
SLOW = 30.0  # at most this many CPU seconds per case; a valid case takes milliseconds
HANG = 300  # a process that makes no progress for this many seconds is ended
GROWTH = 1 << 20  # a process may grow by this many KiB; a case has a few kilobytes

PAGE = mmap.PAGESIZE


class Fenced:
    """Like `unpickling.Blobs`, but each blob has its own pages between inaccessible ones. It starts where its pages
    start, or ends where they end."""

    def __init__(self, count: int, most: int) -> None:
        self._size = -(-most // PAGE) * PAGE
        step = self._size + PAGE
        self._map = mmap.mmap(-1, PAGE + count * step)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for at in range(count + 1):
            if protect(start + at * step, PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._places = [PAGE + at * step for at in range(count)]
        self._now: list[tuple[int, int]] = []
        self._made: dict[int, Any] = {}

    def lay(self, blobs: list[bytes], last: bool) -> None:
        """Writes the blobs of a case to their pages."""
        self._made = {}
        self._now = []
        for place, data in zip(self._places, blobs, strict=False):
            start = place + (self._size - len(data)) if last else place
            self._map[start : start + len(data)] = data
            self._now.append((start, len(data)))

    def _array(self, blob: int, size: int) -> Any:
        import numpy as np
        from overwire import FormatError

        if not 0 <= blob < len(self._now) or self._now[blob][1] != size or size == 0:
            raise FormatError("a reference to a tensor does not match the container")
        start, length = self._now[blob]
        return np.frombuffer(self._map, np.uint8, length, start)

    def storage(self, blob: int, size: int) -> Any:
        import torch
        from overwire import FormatError

        if blob not in self._made:
            self._made[blob] = torch.from_numpy(self._array(blob, size)).untyped_storage()
        found = self._made[blob]
        if not hasattr(found, "untyped") or found.nbytes() != size:
            raise FormatError("a reference to a tensor does not match the container")
        return found

    def base(self, blob: int, size: int) -> Any:
        from overwire import FormatError

        if blob not in self._made:
            self._made[blob] = self._array(blob, size)
        found = self._made[blob]
        if hasattr(found, "untyped") or found.nbytes != size:
            raise FormatError("a reference to a tensor does not match the container")
        return found


# -- running cases


def touch(made: Any) -> None:
    """Reads every byte of all tensors and arrays that can be reached from an object."""
    import numpy as np
    import torch

    seen: dict[int, Any] = {}
    pending = [made]
    while pending:
        one = pending.pop()
        if id(one) in seen or isinstance(one, (str, bytes, int, float, type)):
            continue
        seen[id(one)] = one
        try:
            if isinstance(one, dict):
                pending += [*dict.keys(one), *dict.values(one)]
            elif isinstance(one, (list, tuple, set, frozenset, collections.deque)):
                pending += one
            elif isinstance(one, slice):
                pending += [one.start, one.stop, one.step]
            elif isinstance(one, torch.Tensor):
                touch_tensor(one)
            elif isinstance(one, np.ndarray):
                touch_array(one)
                if one.dtype.hasobject and one.size < 100_000:
                    pending += one.reshape(-1).tolist()
            elif isinstance(one, np.generic):
                one.item()
            elif isinstance(one, (torch.UntypedStorage, torch.storage.TypedStorage)):
                raw = one if isinstance(one, torch.UntypedStorage) else one._untyped_storage
                torch.empty(0, dtype=torch.uint8).set_(raw).sum()
            pending += list(getattr(one, "__dict__", {}).values())
        except (
            KeyError, ValueError, TypeError, RuntimeError, NotImplementedError, IndexError, SystemError, OverflowError,
            AttributeError,
        ):
            continue  # useless but harmless


def touch_tensor(one: Any) -> None:
    import torch

    one = one.detach()
    if one.is_meta:
        return
    if one.layout != torch.strided:
        parts = [one._indices(), one._values()] if one.layout == torch.sparse_coo else [one.values()]
        for part in parts:
            touch_tensor(part)
        if one.numel() < 100_000 and all(part.numel() < 100_000 for part in parts):
            one.to_dense().sum()
            (one + one).to_dense()
        return
    if one.numel() < 100_000:
        (one.dequantize() if one.is_quantized else one.clone()).contiguous()
        if one.dtype == torch.bool:
            one.nonzero()
    elif one.numel():
        one[(-1,) * one.dim()].clone()
        one[(0,) * one.dim()].clone()


def touch_array(one: Any) -> None:
    if 0 < one.size < 100_000:
        one.tobytes()
        if one.flags.writeable:
            one[(-1,) * one.ndim] = one[(-1,) * one.ndim].copy()
        one.tolist()
    elif one.size:
        for at in (0, -1):
            one[(at,) * one.ndim].tobytes()


def run_case(seed: int, number: int, fenced: Fenced) -> str:
    """Runs one case and returns its result. An exception that is not an overwire error is a failure."""
    import overwire as ow
    from overwire.bundles import unpickling

    data, blobs, last = Maker(random.Random(f"{seed}.{number}")).case()
    fenced.lay(blobs, last)
    begin = time.thread_time()
    try:
        made = unpickling.load(data, fenced, "fuzz.pkl", False)
    except ow.OutOfMemoryError as error:
        raise AssertionError(f"memory: {error}") from error
    except ow.OverwireError as error:
        outcome = type(error).__name__
    else:
        outcome = "loaded"
        touch(made)
        del made
    fenced.lay([], last)
    took = time.thread_time() - begin
    assert took < SLOW, f"{took:.1f} s of CPU"
    return outcome


def work(seed: int, first: int, count: int, note: Path | None) -> collections.Counter[str]:
    """Runs cases in this process, and writes the number of the current case to `note`."""
    warnings.simplefilter("ignore")
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    fenced = Fenced(24, 1 << 14)
    run_case(seed, first, fenced)
    outcomes: collections.Counter[str] = collections.Counter()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    shared = None
    if note is not None:
        note.write_bytes(bytes(8))
        with open(note, "r+b") as file:
            shared = mmap.mmap(file.fileno(), 8)
    for number in range(first, first + count):
        if shared is not None:
            shared[:] = struct.pack("<q", number)
        if number % 100 == 0:
            faulthandler.dump_traceback_later(HANG, exit=True)
        try:
            outcomes[run_case(seed, number, fenced)] += 1
        except BaseException:
            print(f"FAILED: --seed {seed} --only {number}", flush=True)
            raise
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown > GROWTH:
            raise SystemExit(f"FAILED: --seed {seed} --only {number}: too much memory")
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, default=None, help="run only this case, in this process")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    if args.only is not None:
        print(work(seed, args.only, 1, None))
        return 0
    if args.worker:
        note = Path(os.environ["PICKLE_FUZZ_NOTE"])
        for outcome, count in work(seed, *args.worker, note).items():
            print("OUTCOME", outcome, count)
        return 0
    print(f"seed {seed}", flush=True)
    total: collections.Counter[str] = collections.Counter()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder, "note")
        for first in range(args.first, args.first + args.cases, CASES_EACH):
            count = min(CASES_EACH, args.first + args.cases - first)
            command = [sys.executable, __file__, "--seed", str(seed), "--worker", str(first), str(count)]
            env = os.environ | {"PICKLE_FUZZ_NOTE": str(note)}
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                (number,) = struct.unpack("<q", note.read_bytes()) if note.exists() else (first,)
                print(done.stdout[-2000:], done.stderr[-6000:])
                print(f"FAILED with {done.returncode}: --seed {seed} --only {number}")
                return 1
            for line in done.stdout.splitlines():
                _, outcome, n = line.split()
                total[outcome] += int(n)
            if first % (5 * CASES_EACH) == 0:
                print(f"{total.total()} cases, {time.monotonic() - begin:.0f} s: {dict(total)}", flush=True)
    print(f"CASES {total.total()} SEED {seed} SECONDS {time.monotonic() - begin:.0f} {dict(total)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

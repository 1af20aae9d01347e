"""Tests work on weights that stay on a GPU: compares bytes, then measures against baselines.

    python bench/gpu/device_resident.py                    every section; needs 40 GB of GPU memory
    python bench/gpu/device_resident.py digest --size 16GB --repeat 7
    python bench/gpu/device_resident.py digest --size 64MB --device cpu     without a GPU or baselines

A section is a function of this file. It compares bytes, then adds rows to the table: name, seconds, bytes, baseline,
goal. Figures are medians of --repeat runs after a warm-up run, and a baseline alternates with its row. The exit status
is 1 if a byte is wrong. Figures that miss their goal are marked but do not change the status.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

import overwire as ow
import torch
from overwire import _verbs
from overwire.jobs import Job

# The tensors of Llama 3 8B, and those of Qwen3 30B-A3B with experts scaled to the same total size.
LLAMA = [(128256, 4096)] + 32 * [
    (4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *3 * [(14336, 4096)], (4096,), (4096,),
]
LLAMA += [(4096,), (128256, 4096)]
QWEN = 48 * (
    384 * [(212, 2048)]
    + [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048), (2048,), (2048,), (128,), (128,)]
)
QWEN += [(75968, 2048), (2048,), (75968, 2048)]


class Row(NamedTuple):
    """A figure: its seconds and those of its baseline (0 if none) for the same number of bytes."""

    what: str
    nbytes: int
    seconds: float
    floor: float
    goal: float  # seconds, or 0 for no goal


class Bench:
    """The arguments, and the timing of runs on their device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device, self.size, self.repeat, self.seed = torch.device(args.device), args.size, args.repeat, args.seed
        self.gpu = self.device.type == "cuda"
        self.wrong: list[str] = []

    def wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def times(self, *runs: Callable[[], object]) -> list[float]:
        """Returns the median seconds of each run, measured alternately. Work queued before a run is not counted."""
        found: list[list[float]] = [[] for _ in runs]
        for round_ in range(self.repeat + 1):
            for run, seconds in zip(runs, found, strict=True):
                self.wait()
                start = time.perf_counter()
                run()
                self.wait()
                if round_:
                    seconds.append(time.perf_counter() - start)
        return [statistics.median(seconds) for seconds in found]

    def check(self, ok: bool, what: str) -> None:
        if not ok:
            self.wrong.append(what)

    def tensors(self, shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
        """Returns separate bf16 tensors on the device, of --size bytes in total."""
        scale = self.size / sum(2 * torch.Size(shape).numel() for shape in shapes)
        made = {}
        torch.manual_seed(self.seed)
        for i, shape in enumerate(shapes):
            rows = max(1, round(shape[0] * scale))
            made[f"layers.{i}.weight"] = torch.randn((rows, *shape[1:]), device=self.device).bfloat16()
        return made


def digest(bench: Bench) -> Iterator[Row]:
    """Compares the digests of all tensors with the CPU's. The baseline is a sum of the same bytes, which only reads."""
    for shapes in (LLAMA, QWEN):
        tensors = bench.tensors(shapes)
        total = sum(t.nbytes for t in tensors.values())
        found = ow.digest(tensors)
        for name, tensor in tensors.items():
            bench.check(found[name] == ow.digest(tensor.cpu()), f"the digest of {name} on {bench.device}")
        name = random.Random(bench.seed).choice(list(tensors))
        tensors[name].view(torch.int16).view(-1)[-1] ^= 1
        bench.check(ow.digest(tensors[name]) != found[name], "the digest of a changed bit")
        [seconds] = bench.times(functools.partial(ow.digest, tensors))
        yield Row(f"digest, {len(tensors):,} tensors", total, seconds, 0, 0.030)
        number, stream = (bench.device.index or 0, 1) if bench.gpu else (-1, 0)
        addresses, sizes = [t.data_ptr() for t in tensors.values()], [t.nbytes for t in tensors.values()]
        numbers = array("q", addresses + sizes).tobytes()
        verb = functools.partial(_verbs.digest, number, stream, len(sizes), numbers)
        [seconds] = bench.times(functools.partial(lambda verb: Job(verb(), "digest").result(), verb))
        yield Row("the same without Python's share", total, seconds, 0, 0.030)
        del tensors
    whole = torch.randint(-(1 << 62), 1 << 62, (bench.size // 8,), device=bench.device)
    reads: list[Callable[[], object]] = [
        lambda: whole.sum(),
        lambda: whole.view(torch.int32).amax(),
        lambda: whole.view(torch.float32).sum(),
    ]
    seconds, *read = bench.times(lambda: ow.digest(whole), *reads)
    yield Row("digest, one tensor", whole.nbytes, seconds, min(read), 0.030)
    rows = whole.nbytes // 2 // 4096
    matrix = whole.view(torch.bfloat16)[: rows * 4096].view(rows, 4096)
    columns = matrix[:, :2048]
    bench.check(ow.digest(columns[:999]) == ow.digest(columns[:999].contiguous().cpu()), "the digest of columns")
    [seconds] = bench.times(lambda: ow.digest(columns))
    yield Row("digest, half of the columns", columns.numel() * 2, seconds, 0, 0)
    turned = matrix[:16384].t()
    bench.check(ow.digest(turned) == ow.digest(turned.contiguous()), "the digest of a transposed tensor")
    [seconds] = bench.times(lambda: ow.digest(turned))
    yield Row("digest, transposed", turned.numel() * 2, seconds, 0, 0)


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {"digest": digest}


def bytes_of(text: str) -> int:
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares and times work on weights that stay on a GPU.")
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--size", type=bytes_of, default=bytes_of("16GB"))
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    bench = Bench(args)
    print(f"overwire {ow.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name() if bench.gpu else 'CPU'}", flush=True)
    print(f"{'what':34} {'GB':>8} {'ms':>10} {'GB/s':>8} {'floor ms':>10} {'of floor':>9}  goal", flush=True)
    for name in args.sections or SECTIONS:
        for row in SECTIONS[name](bench):
            floor = f"{row.floor * 1e3:10.2f} {row.seconds / row.floor:8.2f}x" if row.floor else f"{'':10} {'':9}"
            goal = "" if not row.goal else f"<= {row.goal * 1e3:.0f} ms: {'met' if row.seconds <= row.goal else 'MISSED'}"
            speed = row.nbytes / row.seconds / 1e9
            print(f"{row.what:34} {row.nbytes / 1e9:8.2f} {row.seconds * 1e3:10.2f} {speed:8.1f} {floor}  {goal}", flush=True)
        if bench.gpu:
            torch.cuda.empty_cache()
    for what in bench.wrong[:20]:
        print(f"WRONG: {what}", file=sys.stderr)
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

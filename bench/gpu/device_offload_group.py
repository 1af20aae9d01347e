"""Measures offload with group= on several GPUs of one host. Each rank copies 1/N of each block, and the GPUs exchange
the parts.

    PYTHONPATH=python python bench/gpu/device_offload_group.py [--ranks 2] [--layers 8] [--repeat 7] [--limit 95]

Each rank runs the same Llama-shaped model (0.49 GB of bf16 per layer) in its own process, with passes of 8
tokens and of 16 x 4096 tokens. The modes are resident, group (compressed parts), local (each rank copies all
compressed bytes over its own link, without a group), plain (the same exchange with uncompressed parts) and host (a
group whose GPUs do not map each other's memory). Before a mode is timed, its outputs are compared with the resident
model's, byte for byte. All ranks begin each pass together. A line has the slowest rank's median time of a pass, and
GB/s of weights on each GPU.

Each step has a time limit. If a mode fails, the next one runs. A rank that hangs prints its stacks and ends,
and `--limit` ends all ranks. The exit status is 0 if all modes ran and all outputs were equal. `--device cpu --width
256` tries the program without GPUs.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import faulthandler
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

MODES = ("resident", "group", "local", "plain", "host")
BEGAN = float(os.environ.get("GROUP_BEGAN", time.time()))
# The limit of each step in seconds, and the time at which the current step must end.
STEP = 25
deadline = [time.time() + 60]


def say(text: str) -> None:
    print(f"{time.time() - BEGAN:6.1f} s  {text}", flush=True)


def watch(rank: int) -> None:
    """Ends this process when a step has taken too long."""
    while time.time() < deadline[0]:
        time.sleep(0.2)
    say(f"rank {rank}: a step takes too long")
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(3)


def begin(seconds: float = STEP) -> None:
    deadline[0] = time.time() + seconds


class Bench:
    """One rank's model and inputs, and the resident model's outputs."""

    def __init__(self, options: argparse.Namespace, rank: int, folder: Path) -> None:
        import overwire as ow
        import torch
        import torch.distributed as dist
        from device_offload import Llama
        from overwire.distributed import group as grouping
        from overwire.offloading import stored

        self.ow, self.torch, self.dist, self.grouping, self.stored = ow, torch, dist, grouping, stored
        self.options, self.rank, self.ranks = options, rank, options.ranks
        self.cuda = options.device == "cuda"
        self.device = f"cuda:{rank % torch.cuda.device_count()}" if self.cuda else "cpu"
        if self.cuda:
            torch.cuda.set_device(self.device)
        begin()
        store = dist.FileStore(str(folder / "store"), self.ranks)
        limit = datetime.timedelta(seconds=20)
        dist.init_process_group("gloo", rank=rank, world_size=self.ranks, store=store, timeout=limit)
        torch.manual_seed(1)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(self.device):
            self.model = Llama(options.layers, options.width).requires_grad_(False).eval()
            long = torch.empty(16, 4096 if self.cuda else 16, options.width).normal_()
            self.inputs = {"8 tokens": torch.empty(1, 8, options.width).normal_(), "16 x 4096": long}
        torch.set_default_dtype(torch.float32)
        self.nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        self.before = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.wanted: dict[str, Any] = {}
        self.rates: dict[tuple[str, str], float] = {}
        self.wrong = 0

    def sync(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def largest(self, value: float) -> float:
        """Returns the largest value of all ranks. The ranks continue together."""
        number = self.torch.tensor([value], dtype=self.torch.float64)
        self.dist.all_reduce(number, self.dist.ReduceOp.MAX)
        return float(number)

    def measure_link(self) -> float:
        """Returns the slowest rank's rate in GB/s when all ranks copy pinned memory at the same time."""
        source = self.torch.empty(1 << 29, dtype=self.torch.uint8, pin_memory=True)
        target = self.torch.empty_like(source, device=self.device)
        for count in (1, 6):
            self.largest(0)
            began = time.perf_counter()
            for _ in range(count):
                target.copy_(source, non_blocking=True)
            self.sync()
        return count * source.nbytes / self.largest(time.perf_counter() - began) / 1e9

    def run_shape(self, mode: str, shape: str) -> bool:
        """Compares a pass with the resident model's, and times it. Returns whether all ranks' outputs are equal."""
        x, seconds, equal = self.inputs[shape], [], True
        with self.torch.inference_mode():
            for number in range(2 + self.options.repeat):
                begin()
                self.largest(0)
                began = time.perf_counter()
                output = self.model(x)
                self.sync()
                seconds.append(time.perf_counter() - began)
                if shape not in self.wanted:
                    self.wanted[shape] = output.clone()
                # The last output is also compared, because the first passes copy in another order.
                if number < 2 or number == self.options.repeat + 1:
                    equal = equal and self.torch.equal(output, self.wanted[shape])
                    if self.largest(not equal):
                        say(f"rank {self.rank}: {mode}, {shape}: outputs {'differ' if not equal else 'are equal here'}")
                        return False
        median, best = (self.largest(take(seconds[2:])) for take in (statistics.median, min))
        self.rates[mode, shape] = self.nbytes / median / 1e9
        if self.rank == 0:
            say(
                f"{mode:9}{shape:10}{1e3 * median:9.2f} ms, best{1e3 * best:9.2f}, {self.rates[mode, shape]:7.1f} GB/s "
                "of weights per GPU, outputs equal"
            )
        return True

    def open_mode(self, mode: str) -> Any:
        if mode == "resident":
            return None
        group = self.dist.group.WORLD if mode != "local" else None
        transform, setting = self.stored._transform_of, self.grouping.exchange_setting
        if mode == "plain":
            self.stored._transform_of = lambda *_: 0
        if mode == "host":
            self.grouping.exchange_setting = lambda: "none"
        try:
            return self.ow.offload(self.model, self.device, group=group)
        finally:
            self.stored._transform_of, self.grouping.exchange_setting = transform, setting

    def run_mode(self, mode: str) -> None:
        """Runs a mode on all ranks, and then restores the weights, even after an error."""
        begin()
        began, failed, offloaded = time.perf_counter(), 0, None
        try:
            offloaded = self.open_mode(mode)
            if self.rank == 0 and offloaded is not None:
                if offloaded._group is not None and offloaded._group._whole != (mode == "host"):
                    say(f"{mode}: NOTE: the GPUs do not map each other's memory")
                say(
                    f"{mode:9}ready in {time.perf_counter() - began:.1f} s, host {offloaded.stored / self.nbytes:.3f} "
                    f"of the weights per rank, ring {offloaded.ring / 1e9:.2f} GB"
                )
            failed = sum(not self.run_shape(mode, shape) for shape in self.inputs)
        except Exception as error:
            failed = 1
            say(f"rank {self.rank}: {mode} failed: {type(error).__name__}: {error}\n{traceback.format_exc()}")
        begin()
        if offloaded is not None:
            offloaded.close()
        whole = all(map(self.torch.equal, self.model.parameters(), self.before))
        if not whole:
            say(f"rank {self.rank}: {mode}: close did not restore the weights")
        self.wrong += failed + (not whole)
        self.largest(0)
        if self.cuda:
            self.torch.cuda.empty_cache()

    def print_aims(self) -> None:
        ours, plain = self.rates.get(("group", "8 tokens")), self.rates.get(("plain", "8 tokens"))
        local, resident = (self.rates.get((mode, "8 tokens")) for mode in ("local", "resident"))
        if ours and local:
            say(f"group is {ours / local:.2f} x local at 8 tokens (limit {self.ranks})")
        if ours and plain:
            say(f"group is {ours / plain:.2f} x plain at 8 tokens (aim 1.3), {ours:.1f} GB/s per GPU (aim 135, at least 110)")
        if ours and resident:
            say(f"group takes {resident / ours:.2f} x the resident pass at 8 tokens")
        long, base = self.rates.get(("group", "16 x 4096")), self.rates.get(("resident", "16 x 4096"))
        if long and base:
            say(f"group takes {base / long:.3f} x the resident pass at 16 x 4096 tokens")


def rank_main(options: argparse.Namespace, rank: int) -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the parent
    threading.Thread(target=watch, args=(rank,), daemon=True).start()
    bench = Bench(options, rank, Path(options.folder))
    if rank == 0:
        name = bench.torch.cuda.get_device_name() if bench.cuda else "CPU"
        say(f"{bench.ranks} ranks on {name}, {bench.nbytes / 1e9:.2f} GB of weights, torch {bench.torch.__version__}")
    begin()
    if bench.cuda and (link := bench.measure_link()) and rank == 0:
        say(f"pinned copies of all ranks at the same time: {link:.1f} GB/s per GPU, so at most {bench.ranks * link:.0f} plain")
    try:
        for mode in options.modes.split(","):
            if bench.largest(time.time() - BEGAN) > options.limit - 15:
                say(f"{mode}: left out, because the time limit is near")
                break
            bench.run_mode(mode)
    finally:
        begin()
        if rank == 0:
            bench.print_aims()
    return int(bool(bench.wrong) or bench.rates.keys() != {(m, s) for m in options.modes.split(",") for s in bench.inputs})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--limit", type=float, default=95, help="seconds for the whole run")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.rank is not None:
        status = rank_main(options, options.rank)
        sys.stdout.flush()
        os._exit(status)  # torch.distributed may wait at its end for a rank that is gone
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--rank"]
        env = os.environ | {"GROUP_BEGAN": str(time.time())}
        running = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(options.ranks)]
        end, dead = time.time() + options.limit, 0.0
        while any(one.poll() is None for one in running) and time.time() < (min(end, dead + 10) if dead else end):
            if not dead and any(one.poll() for one in running):  # the others get time to report it
                dead = time.time()
            time.sleep(0.1)
        for rank, one in enumerate(running):
            if one.poll() is None:
                say(f"rank {rank} is killed, because the time limit is over or another rank has ended")
                one.kill()
            one.wait()
    codes = [one.returncode for one in running]
    print("all modes ran, with the resident model's outputs" if not any(codes) else f"FAILED: {codes}")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())

"""Tests deltas on a GPU: compares bytes, then prints a table of figures with baselines and goals.

    python bench/gpu/device_delta.py [--size 16GB] [--tensors 291] [--chain 10000] [--repeat 5]

1 % or 4.5 % of the bf16 weights change by one unit in the last place. The baselines, measured in the same run, are a
copy on the device, which reads and writes each byte, and a copy of the delta's bytes from pinned memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import overwire as ow
import torch


def timed(run: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def on_gpu(run: Any) -> dict[str, float]:
    """Returns the seconds of a call's kernels and copies by name, from the CUDA profiler."""
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as seen:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    total: dict[str, float] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            total[event["name"]] = total.get(event["name"], 0.0) + event["dur"] / 1e6
    return total


def breakdown(
    what: str, wall: float, stages: dict[str, float], kernels: dict[str, float], goal: tuple[tuple[str, ...], str],
    nbytes: int,
) -> None:
    """Prints a call's time by engine stage and GPU kernel."""
    print(f"  stages of {what}, {wall * 1e3:.1f} ms in total:")
    for name, seconds in stages.items():
        print(f"    {name:30} {seconds * 1e3:8.1f} ms")
    print(f"    {'Python, start of the job':30} {(wall - sum(stages.values())) * 1e3:8.1f} ms")
    if not kernels:
        print("    on the GPU: the profiler recorded nothing")
        return
    for name, seconds in sorted(kernels.items(), key=lambda one: -one[1]):
        print(f"    on the GPU: {name[:36]:36} {seconds * 1e3:8.2f} ms")
    alone = sum(kernels.get(name, 0.0) for name in goal[0])
    if alone:
        print(f"    {' + '.join(goal[0])} alone: {alone * 1e3:.2f} ms, {nbytes / alone / 1e9:.0f} GB/s, goal {goal[1]}")


def stepped(base: dict[str, Any], share: float) -> dict[str, Any]:
    """Raises a share of the weights by one unit in the last place."""
    new = {}
    for name, tensor in base.items():
        bits = tensor.view(torch.int16).clone()
        part = 1 << 26
        for at in range(0, bits.numel(), part):
            some = bits[at : at + part]
            some += torch.rand(some.numel(), device=bits.device).lt_(share).to(torch.int16)
        new[name] = bits.view(torch.bfloat16)
    return new


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(a[name].view(torch.int16), b[name].view(torch.int16)) for name in a)


def chain(count: int, folder: Path) -> None:
    """Applies many deltas, compares the bits, and checks that memory returns to its old level."""
    torch.manual_seed(1)
    trained = {"w": torch.randn(1 << 20, device="cuda").bfloat16(), "b": torch.randn(1000, device="cuda")}
    live = {name: tensor.clone() for name, tensor in trained.items()}
    path = folder / "chain.safetensors"
    before = (0, 0)
    start = time.perf_counter()
    for step in range(count):
        old = {name: tensor.clone() for name, tensor in trained.items()}
        at = torch.randint(1 << 20, (1000,), device="cuda")
        trained["w"][at] += 0.01
        trained["b"] *= 1.0001
        ow.save_delta(trained, old, path)
        ow.apply_delta(live, path)
        if step % 1000 == 0 and ow.digest(live) != ow.digest(trained):
            sys.exit(f"delta {step}: bytes differ")
        if step == min(200, count - 1):
            gc.collect()
            before = (torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    if ow.digest(live) != ow.digest(trained):
        sys.exit("bytes differ after the chain")
    del old, at
    gc.collect()
    grown = torch.cuda.memory_allocated() - before[0], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before[1]
    each = (time.perf_counter() - start) / count
    print(f"{count} deltas: equal; {each * 1e3:.2f} ms each; GPU memory {grown[0]:+d} bytes, host's peak {grown[1]:+d} KiB")


def figures(base: dict[str, Any], folder: Path, share: float, size_goal: float, repeat: int) -> None:
    """Prints one table for a delta that changes a share of the weights."""
    nbytes = sum(tensor.nbytes for tensor in base.values())
    new = stepped(base, share)
    there, back = folder / "there.safetensors", folder / "back.safetensors"
    saves: list[tuple[float, dict[str, float]]] = []
    for _ in range(repeat):
        reports: list[Any] = []
        seconds = timed(lambda kept=reports: kept.append(ow.save_delta(new, base, there)))
        saves.append((seconds, reports[0].seconds))
    saves.sort(key=lambda one: one[0])
    encode, encode_stages = saves[len(saves) // 2]
    encode_gpu = on_gpu(lambda: ow.save_delta(new, base, there))
    ow.save_delta(base, new, back)
    report = there.stat().st_size
    opened = statistics.median(timed(lambda: ow.open_delta(there)) for _ in range(3))
    forth, home = ow.open_delta(there), ow.open_delta(back)
    live = {key: tensor.clone() for key, tensor in base.items()}
    pauses: list[tuple[float, dict[str, float]]] = []
    for _ in range(repeat + 1):
        for delta, want in ((forth, new), (home, base)):
            applied: list[Any] = []
            seconds = timed(lambda one=delta, kept=applied: kept.append(ow.apply_delta(live, one)))
            pauses.append((seconds, applied[0].seconds))
            if not same(live, want):
                sys.exit("bytes differ after a delta")
    first_pause = pauses[0][0]
    later = sorted(pauses[2:], key=lambda one: one[0])
    pause, pause_stages = later[len(later) // 2]
    pause_gpu = on_gpu(lambda: ow.apply_delta(live, forth))
    ow.apply_delta(live, home)
    first = next(iter(base.values()))
    copy = statistics.median(timed(lambda: live["layer.0000"].copy_(first)) for _ in range(9)) * len(base)
    pinned = torch.empty(report, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(report, dtype=torch.uint8, device="cuda")
    bus = statistics.median(timed(lambda: card.copy_(pinned)) for _ in range(5))
    digest = statistics.median(timed(lambda: ow.digest(base)) for _ in range(3))
    print(f"\n{share:.1%} of the weights changed")
    for what, value, goal in (
        ("size of the delta / bf16", f"{report / nbytes:.5f}", f"<= {size_goal}"),
        ("save_delta, file in /dev/shm", f"{encode * 1e3:8.1f} ms {nbytes / encode / 1e9:8.0f} GB/s", ">= 400 GB/s"),
        ("open_delta (before the pause)", f"{opened * 1e3:8.1f} ms", ""),
        ("apply_delta: the pause, first", f"{first_pause * 1e3:8.1f} ms", ""),
        ("apply_delta: the pause", f"{pause * 1e3:8.1f} ms {nbytes / pause / 1e9:8.0f} GB/s", ">= 1000 GB/s; 1 % of 16 GB in 30 ms"),
        ("floor: two digests", f"{2 * digest * 1e3:8.1f} ms", ""),
        ("floor: a copy on the device", f"{copy * 1e3:8.1f} ms {nbytes / copy / 1e9:8.0f} GB/s", ""),
        ("floor: the delta over the bus", f"{bus * 1e3:8.1f} ms {report / bus / 1e9:8.1f} GB/s", ""),
    ):
        print(f"  {what:32} {value:28} {goal}")
    breakdown("save_delta", encode, encode_stages, encode_gpu, (("ow_delta_measure", "ow_delta_write"), ">= 400 GB/s"), nbytes)
    breakdown("apply_delta", pause, pause_stages, pause_gpu, (("ow_delta_apply",), ">= 1000 GB/s"), nbytes)


def main() -> None:
    about = argparse.ArgumentParser()
    about.add_argument("--size", default="16GB")
    about.add_argument("--tensors", type=int, default=291)
    about.add_argument("--chain", type=int, default=10_000)
    about.add_argument("--repeat", type=int, default=5)
    asked = about.parse_args()
    units = {"GB": 10**9, "MB": 10**6}
    each = int(asked.size[:-2]) * units[asked.size[-2:]] // 2 // asked.tensors
    torch.manual_seed(0)
    base = {f"layer.{i:04}": (torch.randn(each, device="cuda") * 0.02).bfloat16() for i in range(asked.tensors)}
    nbytes = sum(tensor.nbytes for tensor in base.values())
    print(f"{torch.cuda.get_device_name()}: {nbytes / 1e9:.2f} GB bf16 in {asked.tensors} tensors; medians of {asked.repeat}")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        small = {key: tensor[:300_001].clone() for key, tensor in list(base.items())[:3]}
        ow.save_delta(stepped(small, 0.01), small, folder / "gpu.safetensors")
        torch.manual_seed(7)
        after = stepped(small, 0.02)
        ow.save_delta(after, small, folder / "gpu.safetensors")
        ow.save_delta({k: v.cpu() for k, v in after.items()}, {k: v.cpu() for k, v in small.items()}, folder / "cpu.safetensors")
        if (folder / "gpu.safetensors").read_bytes() != (folder / "cpu.safetensors").read_bytes():
            sys.exit("the files of GPU and CPU differ")
        print("the files of GPU and CPU are equal, byte for byte")
        for share, goal in ((0.01, 0.008), (0.045, 0.03)):
            figures(base, folder, share, goal, asked.repeat)
        base.clear()
        chain(asked.chain, folder)


if __name__ == "__main__":
    main()

"""Implements `overwire bench --ranks N`: several processes load together, compared with the machine's limits.

This process makes the model's files, starts one `_bench_rank` process per rank, and prints their
rows. If there are fewer GPUs than ranks, ranks share them. Each transport runs in new processes, because the first load
of a process is also measured. If a rank fails, all ranks are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ._children import module_command
from .model.options import parse_size

_WAYS = ("mapped", "collective", "none")

_DOC = """Loads a model in several processes of a torch.distributed group. Each rank loads the whole model,
and then a tensor-parallel slice, from a compressed and from a plain file. All transports are measured,
or only the one in OVERWIRE_EXCHANGE. Other rows show the machine's limits and other installed libraries.
A row shows the time of the slowest rank and the CPU time of all ranks, for the fastest of the --repeat loads after the
first one. All tensors are compared with the plain file. The command requires torch, and free space in the folder for
twice --size."""


def _parse_arguments(words: list[str]) -> argparse.Namespace:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("overwire bench", description=_DOC, formatter_class=layout)
    parser.add_argument("--ranks", required=True, help="number of processes, or auto: one per GPU, two without a GPU")
    parser.add_argument("--size", help="size of the model's tensors (default: 2GB, 256MB on the CPU)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--repeat", type=int, default=3, help="loads after the first")
    parser.add_argument("--dir", help="folder for temporary files; a tmpfs folder excludes the disk's speed")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(words)
    try:
        args.bytes = parse_size(args.size, "--size")  # 0 means the default
    except ValueError as error:
        parser.error(str(error))
    if args.repeat < 1 or args.ranks != "auto" and not (args.ranks.isdigit() and 1 <= int(args.ranks) <= 64):
        parser.error("expected --ranks auto or 1 to 64, and --repeat 1 or more")
    return args


def run_overwire(*words: str) -> None:
    """Runs an overwire command in a child process. Exits if it fails."""
    command = module_command("overwire", *words)
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if process.returncode:
        sys.exit(f"overwire: bench: overwire {words[0]} ended with status {process.returncode}: {process.stdout}")


def print_line(line: str) -> None:
    """Prints a line and flushes standard output."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _show_row(row: dict[str, Any]) -> str:
    units = {"rank": "GB/s per rank", "all": "in total", "first": "first load", "cpu": "CPU s"}
    rates = [f"{row[key]:8.2f} {unit}" for key, unit in units.items() if key in row]
    text = f"{row['row']:<58}" + " ".join(rates)
    if "floor" in row:
        text += f"   {row['floor']:.2f} of the limit"
    return text + (f"left out: {row['left_out']}" if "left_out" in row else "")


def _run_ranks(
    ranks: int, folder: Path, way: str, args: argparse.Namespace, floors: dict[str, float]
) -> list[dict[str, Any]]:
    """Runs the ranks of one transport, prints their rows as they arrive, and returns them.
    floors: the limit in GB/s for each kind of file; the first run fills it in."""
    task = {"folder": str(folder), "ranks": ranks, "way": way, "device": args.device, "repeat": args.repeat}
    task |= {"first": not floors, "floors": floors}
    environ = {**os.environ, "OVERWIRE_EXCHANGE": way, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            errors = stack.enter_context(tempfile.TemporaryFile())
            command = module_command("overwire._bench_rank", json.dumps({**task, "rank": rank}))
            one = subprocess.Popen(
                command, stdout=subprocess.PIPE if rank == 0 else errors, stderr=errors, stdin=subprocess.DEVNULL,
                env=environ, text=True,
            )  # fmt: skip
            stack.callback(one.wait)
            stack.callback(one.kill)
            processes.append((one, errors))
        assert processes[0][0].stdout is not None
        for line in processes[0][0].stdout:
            if line.startswith("{"):
                row: dict[str, Any] = json.loads(line)
                if "floors" in row:
                    floors.update(row["floors"])
                    continue
                rows.append(row)
                if not args.json:
                    print_line(_show_row(row))
        for rank, (one, errors) in enumerate(processes):
            if one.wait():
                errors.seek(0)
                text = errors.read().decode(errors="replace").strip()
                sys.exit(f"overwire: bench: rank {rank} of {ranks} ended with status {one.returncode}:\n{text[-4000:]}")
    return rows


def main(words: list[str]) -> None:
    """Runs the command with the arguments after `bench`. Exits with status 2 for invalid arguments, 1 if a rank fails.
    """
    args = _parse_arguments(words)
    if importlib.util.find_spec("torch") is None:
        sys.exit("overwire: bench: --ranks requires torch: install torch")
    gpus = 0
    if args.device != "cpu":
        import torch

        gpus = torch.cuda.device_count()
    if args.device is None:
        args.device = "cuda" if gpus else "cpu"
    if args.device == "cuda" and not gpus:
        sys.exit("overwire: bench: --device cuda: torch finds no GPU: use --device cpu")
    args.bytes = args.bytes or (2 * 10**9 if args.device == "cuda" else 256 * 10**6)
    ranks = (gpus or 2) if args.ranks == "auto" else int(args.ranks)
    exchange = os.environ.get("OVERWIRE_EXCHANGE")
    with tempfile.TemporaryDirectory(prefix="overwire-bench-", dir=args.dir) as name:
        folder = Path(name)
        where = f"{min(gpus, ranks)} GPUs" if gpus else "host memory"
        if not args.json:
            print_line(f"{ranks} ranks, {where}, {args.bytes / 1e9:.3g} GB of bf16 weights in {folder.parent}")
        run_overwire("bench", "gen", "llama-bf16", "--size", str(args.bytes), "-f", str(folder / "plain.safetensors"))
        run_overwire("compress", "-f", str(folder / "plain.safetensors"), "-o", str(folder / "packed.safetensors"))
        rows: list[dict[str, Any]] = []
        floors: dict[str, float] = {}
        for way in [exchange] if exchange else _WAYS:
            rows += _run_ranks(ranks, folder, way, args, floors)
    if args.json:
        report = {"ranks": ranks, "gpus": min(gpus, ranks), "bytes": args.bytes, "repeat": args.repeat, "rows": rows}
        print_line(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])

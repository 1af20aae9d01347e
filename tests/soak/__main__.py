"""Tests overwire's public interface with random loops for a given time, and prints a table of what was done.

    make soak SECONDS=600 SEED=7           or: python tests/soak --seconds 600 --seed 7
    python tests/soak --list               prints the loops and their promises
    python tests/soak --seed 7 --only damage --round 12 --device cpu --seconds 60
                                           repeats one round until it fails

The seed determines the order of the loops, and the models, faults and times of each round. It does not control how
threads and processes run concurrently, so a failure may need several tries. A round runs in a separate process with a
time limit. The exit status is 0 if nothing failed.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[0] = str(TESTS)

import warm  # noqa: E402

from soak.loops import LOOPS, PLANTED  # noqa: E402
from soak.outcomes import KINDS, PATIENCE  # noqa: E402


class Table:
    """Adds up the counts and failures of all rounds by loop."""

    def __init__(self) -> None:
        self.rounds: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.counts: dict[str, Counter[str]] = {}
        self.failures: Counter[str] = Counter()

    def add(self, name: str, seconds: float, counts: dict[str, int], failures: list[tuple[str, str]]) -> None:
        self.rounds[name] += 1
        self.seconds[name] += seconds  # type: ignore[assignment]
        self.counts.setdefault(name, Counter()).update(counts)
        self.failures.update(kind for kind, _ in failures)

    def text(self) -> str:
        lines = []
        for name in sorted(self.rounds):
            done = self.counts[name]
            counts = ", ".join(f"{n:,} {what}" for what, n in sorted(done.items()) if not what.startswith("refused: "))
            refused = ", ".join(f"{n:,} {what[9:]}" for what, n in sorted(done.items()) if what.startswith("refused: "))
            refused = f" ({refused})" if refused else ""
            lines.append(f"{name:15} {self.rounds[name]:5} rounds {self.seconds[name]:6.0f} s  {counts}{refused}")
        total: Counter[str] = sum(self.counts.values(), Counter())
        lines.append("together: " + ", ".join(f"{n:,} {what}" for what, n in sorted(total.items()) if not what.startswith("refused: ")))
        lines.append("must be 0: " + ", ".join(f"{self.failures[kind]} {kind}" for kind in KINDS))
        return "\n".join(lines)


def play(
    name: str, number: int, seed: str, device: str, seconds: float, folder: Path
) -> tuple[dict[str, int], list[tuple[str, str]], str]:
    """Runs one round, and returns its counts, failures and output."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith("OVERWIRE_") or key == "OVERWIRE_SOAK_PATIENCE"}
    env["OVERWIRE_LOG"] = "error"
    argv = [TESTS / "soak" / "loops.py", name, f"{seed} {name} {number}", device, str(seconds)]
    try:
        done = warm.run(argv, cwd=folder, env=env, timeout=seconds + 4 * PATIENCE)
    except subprocess.TimeoutExpired as late:
        output = f"{late.stdout}{late.stderr}"
        return {}, [("hang", f"the round does not end within {late.timeout:.0f} s")], output
    printed, _, last = done.stdout.rpartition("\n{")
    output = printed + done.stderr
    try:
        reported = json.loads("{" + last)
    except ValueError:
        output = done.stdout + done.stderr
        return {}, [("crash", f"the round has ended with {done.returncode}")], output
    failures = [tuple(failure) for failure in reported["failures"]]
    if done.returncode:
        failures.append(("crash", f"the round has ended with {done.returncode}, after its report"))
    return reported["counts"], failures, output


def devices(chosen: str | None) -> list[str]:
    """Returns the devices that the loops load to. A separate process checks whether torch finds a GPU."""
    if chosen:
        return [chosen]
    seen = warm.run(["-c", "import torch; print(torch.cuda.is_available())"])
    return ["cpu", "cuda"] if seen.stdout.strip() == "True" else ["cpu"]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/soak", description="Runs loops with concurrency and faults for a given time.")
    parser.add_argument("--seconds", type=float, default=60, help="total time (60)")
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(1 << 32)), help="seed of all choices, printed at the start (random)")
    parser.add_argument("--only", metavar="NAME", help="one loop, or several separated by commas")
    parser.add_argument("--round", type=int, metavar="N", help="repeat this round of the loop")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only this device (cpu, and cuda if available)")
    parser.add_argument("--each", type=float, default=2.0, metavar="SECONDS", help="time of a round (2)")
    parser.add_argument("--list", action="store_true", help="print the loops and exit")
    chosen = parser.parse_args(argv)
    names = chosen.only.split(",") if chosen.only else list(LOOPS)
    if unknown := [name for name in names if name not in LOOPS | PLANTED]:
        parser.error(f"no loop is called {unknown[0]!r}: {', '.join(LOOPS)}")
    if chosen.round is not None and len(names) != 1:
        parser.error("--round needs one loop: name it with --only")
    chosen.names = names
    return chosen


def soak(chosen: argparse.Namespace) -> int:
    """Runs rounds until the time is up, and returns the exit status."""
    print(f"seed {chosen.seed} for {chosen.seconds:.0f} s: {', '.join(chosen.names)}", flush=True)
    places = devices(chosen.device)
    table, choice, until, number = Table(), random.Random(chosen.seed), time.monotonic() + chosen.seconds, 0
    scratch = Path(tempfile.mkdtemp(prefix="overwire-soak-"))
    loops = [(LOOPS | PLANTED)[name] for name in chosen.names]
    try:
        while number == 0 or (time.monotonic() < until and not (chosen.round is not None and table.failures.total())):
            name, loop = choice.choices(list(zip(chosen.names, loops, strict=True)), [loop.weight for loop in loops])[0]
            device = choice.choice(places) if loop.gpu else places[0]
            played = number if chosen.round is None else chosen.round
            began = time.monotonic()
            counts, failures, output = play(name, played, chosen.seed, device, chosen.each, scratch / "round")
            table.add(name, time.monotonic() - began, counts, failures)
            if failures:
                again = f"python tests/soak --seed {chosen.seed} --only {name} --round {played} --device {device} --each {chosen.each:g}"
                print(f"\nFAILED: seed {chosen.seed}, loop {name}, round {played}, {device}; to repeat it:\n  {again}")
                for kind, text in failures:
                    print(f"  {kind}: {text}")
                print(output[-6000:], flush=True)
            number += 1
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(table.text(), flush=True)
    return 1 if table.failures.total() else 0


if __name__ == "__main__":
    options = arguments()
    if options.list:
        for title, loop in LOOPS.items():
            print(f"{title}\n    {' '.join((inspect.getdoc(loop.body()) or '').split())}")
        sys.exit(0)
    status = soak(options)
    warm.end()
    sys.exit(status)

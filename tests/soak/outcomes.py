"""Records one round of a loop: its counts, failures, threads and child processes.

A round runs in a separate process that has imported torch and not started the engine. It may fork children until it
starts the engine. Every load is compared with the saved tensors. An error is expected only if the loop lists its class.
Everything else is a failure of one of KINDS. A failure does not end the round.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import overwire as ow

# Kinds of failures. The final table uses these names.
KINDS = ("wrong bytes", "hang", "leak", "untyped error", "unexpected error", "crash")

# A child process or a thread that exceeds its time by more than this many seconds is considered to hang.
PATIENCE = float(os.environ.get("OVERWIRE_SOAK_PATIENCE") or 60)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# On this signal, a round's process prints the stacks of its threads.
STACKS = signal.SIGUSR2


class Failure(Exception):
    """A fault that a loop has found. kind is one of KINDS."""

    def __init__(self, kind: str, text: str) -> None:
        assert kind in KINDS, kind
        super().__init__(text)
        self.kind = kind


class Reported(Exception):
    """Raised if a child process has failed. The round has already recorded its failures."""


def end_with_parent() -> None:
    """Tells the kernel to kill this forked process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def kind_of(error: BaseException) -> str:
    """Returns the kind of failure for an unexpected exception."""
    if isinstance(error, Failure):
        return error.kind
    if isinstance(error, ow.EngineError):
        return "crash"
    return "unexpected error" if isinstance(error, ow.OverwireError) else "untyped error"


class Round:
    """One round of a loop: its random numbers, its folder, its device, and its counts."""

    def __init__(self, seed: str, folder: Path, device: str, seconds: float) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.folder = folder
        self.device = device
        self.seconds = seconds
        self._until: float | None = None
        self.counts: Counter[str] = Counter()
        self.failures: list[tuple[str, str]] = []
        self.doing = ""  # what the loop is doing, for messages about failures
        self._lock = threading.Lock()
        self._children = 0

    def lasts(self) -> bool:
        """Returns whether the round has time left and nothing has failed. The first call starts the clock."""
        return self.left() > 0 and not self.failures

    def left(self) -> float:
        """Returns how many seconds are left."""
        now = time.monotonic()
        if self._until is None:
            self._until = now + self.seconds
        return max(0.0, self._until - now)

    def count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self.counts[name] += n

    def fail(self, error: BaseException, where: str = "") -> None:
        """Records an unexpected exception."""
        if isinstance(error, Reported):
            return
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-4000:]
        where += f"{self.doing}: " if self.doing else ""
        with self._lock:
            self.failures.append((kind_of(error), f"{where}{text}"))

    @contextlib.contextmanager
    def may_raise(self, *classes: type[BaseException]) -> Iterator[None]:
        """Allows a block to end with one of these exceptions, which is counted as a refusal."""
        try:
            yield
        except classes as error:
            if kind_of(error) == "crash":
                raise
            self.count("refusals")
            self.count(f"refused: {type(error).__name__}")

    def beside(self, *bodies: Callable[[Round, random.Random], None]) -> None:
        """Runs each body repeatedly in its own thread, until the time is up or a body fails."""
        threads = []
        for number, body in enumerate(bodies):
            rng = random.Random(f"{self.seed} thread {number}")
            threads.append(threading.Thread(target=self._repeat, args=(body, rng), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.left() + PATIENCE)
        if any(thread.is_alive() for thread in threads):
            faulthandler.dump_traceback(all_threads=True)
            raise Failure("hang", "a thread does not end; its stack is in the output")

    def _repeat(self, body: Callable[[Round, random.Random], None], rng: random.Random) -> None:
        try:
            while self.lasts():
                body(self, rng)
        except BaseException as error:
            self.fail(error)

    def child(self, body: Callable[[Round], Any], ends: str = "at once") -> Child:
        """Forks a process that runs body with its own round. With ends="as a program", the process also tests the exit
        of the interpreter."""
        self._children += 1
        for name in ow.__all__ if self._children == 1 else ():
            getattr(ow, name)  # imports the module of each name; the engine does not start
        return Child(self, body, f"{self.seed} child {self._children}", self._children, ends)

    def in_child(self, body: Callable[[Round], Any], limit: float = PATIENCE) -> Any:
        """Runs body in a child process, and returns its result."""
        return self.child(body).result(limit)

    def merge(self, counts: dict[str, int], failures: list[tuple[str, str]]) -> None:
        with self._lock:
            self.counts.update(counts)
            self.failures += [(kind, text) for kind, text in failures]


class Child:
    """A forked process that runs part of a round."""

    def __init__(self, parent: Round, body: Callable[[Round], Any], seed: str, number: int, ends: str) -> None:
        self._round = parent
        self._file = parent.folder / f"child-{number}"
        self.status: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(parent, body, seed, ends)

    def _run(self, parent: Round, body: Callable[[Round], Any], seed: str, ends: str) -> None:
        end_with_parent()
        own, value = Round(seed, parent.folder, parent.device, parent.seconds), None
        try:
            value = body(own)
        except BaseException as error:
            own.fail(error, "in a child process: ")
        with open(f"{self._file}.part", "wb") as file:
            pickle.dump((value, dict(own.counts), own.failures), file)
        os.rename(f"{self._file}.part", self._file)
        sys.stdout.flush()
        sys.stderr.flush()
        if ends == "at once":
            os._exit(0)
        del value
        ctypes.pythonapi.Py_Exit(0)  # exits as a program does, without unwinding the parent's frames

    def kill(self, with_signal: int = signal.SIGKILL) -> None:
        """Sends a signal and waits for the process. Its death from this signal is not a failure."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, with_signal)
        self._wait(PATIENCE)
        if self.status == -with_signal:
            self._round.count("kills")
            self.status = 0

    def wait(self, limit: float = PATIENCE) -> None:
        """Waits for the process, which must end at most `limit` seconds after the time of the round is up."""
        self._wait(self._round.seconds + limit)

    def result(self, limit: float = PATIENCE) -> Any:
        """Returns the result of the child's body, and adds its failures to the round."""
        self.wait(limit)
        if self.status:
            raise Failure("crash", f"a child process has ended with {self.status}")
        value, counts, failures = pickle.loads(self._file.read_bytes())
        self._file.unlink()
        self._round.merge(counts, failures)
        if failures:
            raise Reported
        return value

    def _wait(self, limit: float) -> None:
        until = time.monotonic() + limit
        while self.status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(self.pid, STACKS)
                time.sleep(1)
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                self.status = -int(signal.SIGKILL)
                raise Failure("hang", f"a child process does not end within {limit:.0f} s; its stacks are in the output")
            else:
                time.sleep(0.002)


def report(round_: Round) -> str:
    """Returns the round as one line of JSON for the program that started it."""
    return json.dumps({"counts": dict(round_.counts), "failures": round_.failures})

"""Tests loads, saves and servers while system calls fail, one at a time. Each function returns the right result or
raises a typed error, and existing files stay intact."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import platform
import shutil
import socket
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stores
from process_helper import FEWER
from processes import overwire_serve
from refused_programs import LOADS, SAVES
from refusing import Refusal

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the system call numbers are those of x86-64")

PROGRAM = Path(__file__).with_name("refused_programs.py")
NUMBERS = (errno.EPERM, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.EAGAIN, errno.ENOSPC)

# Saves work without these calls, because some kernels and file systems do not have them.
COURTESIES = (
    "cachestat", "fadvise64", "fallocate", "fchown", "flock", "fremovexattr", "fstatfs", "getxattr", "linkat",
    "madvise", "renameat2", "statfs", "sync_file_range",
)  # fmt: skip


class Child:
    """A `Refusal` that is started again if it ends. It collects the faults that tests find."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self._start()

    def _start(self) -> None:
        try:
            self.refusal = Refusal(PROGRAM)
        except OSError as error:
            pytest.skip(f"this system has no seccomp notifications: {error}")

    def run(self, *task: Any) -> Any:
        """Runs a task in which no call fails, and returns its result."""
        answer = self.refusal.run(task)
        return answer[1] if answer and answer[0] == "done" else answer

    def counts(self, *task: Any) -> dict[str, int]:
        """Returns how many system calls of each kind a task makes."""
        assert self.refusal.run(task)[0] == "done"
        return self.refusal.counts()

    def refused(
        self, task: list[Any], call: str, at: int, number: int, lasts: bool, check: Callable[[list[Any]], str]
    ) -> None:
        """Runs a task in which a call fails. Records the fault that `check` finds in the result, if any."""
        where = f"{task[:2]}: {call} {at}{' and later' if lasts else ''}: {errno.errorcode[number]}"
        try:
            answer = self.refusal.run(task, call, at, number, lasts=lasts, timeout=60 * FEWER)
            if self.refusal.was_refused:
                text = answer[1] if answer[0] == "untyped" else check(answer)
                self.wrong += [f"{where}: {text}"] if text else []
        except (TimeoutError, ConnectionError) as error:
            self.wrong.append(f"{where}: {error!r}")
            self.end()
            self._start()

    def end(self) -> None:
        self.refusal.end()


@pytest.fixture(scope="module")
def module_child() -> Iterator[Child]:
    child = Child()
    yield child
    child.end()


@pytest.fixture
def child(module_child: Child) -> Iterator[Child]:
    module_child.wrong = []
    yield module_child
    assert module_child.wrong == []


@pytest.fixture
def folder(child: Child, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Makes the folder in which the programs read and write. Except in slow tests it is in memory, so that saves do not
    wait for a disk."""
    memory = Path("/dev/shm")
    with contextlib.ExitStack() as stack:
        if memory.is_dir() and request.node.get_closest_marker("slow") is None:
            tmp_path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        child.run("prepare", str(tmp_path))
        yield tmp_path


def each_refusal(counts: dict[str, int], wide: bool) -> Iterator[tuple[str, int, int, bool]]:
    """Yields the call to refuse, its position, the errno, and whether later calls also fail. With `wide`, each call
    fails with each errno. Otherwise there are three cases for each kind of call: the last call fails with EIO, the
    first with EMFILE, and all with EPERM."""
    for call, count in counts.items():
        if not wide:
            yield call, count, errno.EIO, False
            yield call, 1, errno.EMFILE, False
            yield call, 1, errno.EPERM, True
            continue
        ends = {*range(1, 13), count // 2, *range(count - 5, count + 1)}
        for number in NUMBERS:
            yield from ((call, at, number, False) for at in sorted(ends & set(range(1, count + 1))))
            yield call, 1, number, True


def sweep_saves(child: Child, folder: Path, kind: str, wide: bool) -> None:
    work = folder / "work"
    task = ["save", kind, str(work), 2]

    def renew() -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        child.run("save", kind, str(work), 1)

    def check(answer: list[Any]) -> str:
        there = child.run("content", kind, str(work))
        if there != new and (answer[0] == "done" or there != old):
            return f"{answer} and {there}"
        hidden = [name for name in os.listdir(work) if name.startswith(".")]
        return f"{answer} and {hidden} are left" if hidden and not call.startswith("unlink") else ""

    renew()
    old = child.run("content", kind, str(work))
    child.run(*task)
    new = child.run("content", kind, str(work))
    assert old != new
    renew()
    for call, at, number, lasts in each_refusal(child.counts(*task), wide):
        renew()
        child.refused(task, call, at, number, lasts, check)


def sweep(child: Child, task: list[Any], wide: bool, renew: Callable[[], None] = lambda: None) -> None:
    renew()
    whole = child.refusal.run(task)
    assert whole[0] == "done"
    renew()
    for call, at, number, lasts in each_refusal(child.counts(*task), wide):
        # After EAGAIN, a read is retried for seconds, and a socket would wait for the poller.
        if number == errno.EAGAIN and (lasts or task[0] != "load"):
            continue
        renew()
        child.refused(
            task, call, at, number, lasts, lambda answer: str(answer) if answer[0] == "done" and answer != whole else ""
        )


@pytest.mark.parametrize("kind", ["plain", "set", "file"])
def test_saves(child: Child, folder: Path, kind: str) -> None:
    """If a system call fails, a save succeeds, or raises a typed error and keeps the old file or shards."""
    sweep_saves(child, folder, kind, wide=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAVES)
def test_every_save(child: Child, folder: Path, kind: str) -> None:
    """If any system call fails with any errno, each save succeeds, or raises a typed error and keeps the old file."""
    sweep_saves(child, folder, kind, wide=True)


@pytest.mark.parametrize("kind", ["load", "load set"])
def test_loads(child: Child, folder: Path, kind: str) -> None:
    """If a system call fails, a load returns all bytes or raises a typed error."""
    sweep(child, ["load", kind, str(folder)], wide=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOADS)
def test_every_load(child: Child, folder: Path, kind: str) -> None:
    """If any system call fails with any errno, each kind of load returns all bytes or raises a typed error."""
    sweep(child, ["load", kind, str(folder)], wide=True)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("kind", ["plain", "set", "file"])
def test_saves_without_optional_calls(child: Child, folder: Path, kind: str, number: int) -> None:
    """If a sandbox refuses calls that a save can do without, the save succeeds, and private files stay private."""
    work = folder / "work"
    work.mkdir()
    child.run("save", kind, str(work), 2)
    new = child.run("content", kind, str(work))
    used = set(child.counts("save", kind, str(work), 2))
    for call in sorted(used.intersection(COURTESIES)):
        if call == "linkat" and number == errno.ENOSYS:
            continue  # every kernel has linkat
        child.run("save", kind, str(work), 1)
        path = work / SAVES[kind][0]
        path.chmod(0o640)
        task = ["save", kind, str(work), 2]
        child.refused(task, call, 1, number, True, lambda answer: "" if answer[0] == "done" else str(answer))
        assert child.run("content", kind, str(work)) == new, call
        assert path.stat().st_mode & 0o777 in (0o640, 0o600), call


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_a_cache_without_locks(child: Child, folder: Path, number: int) -> None:
    """If files cannot be locked, a process still puts fetched objects into the cache and finds them there."""
    with overwire_serve(folder) as url:
        task = ["load_uri", f"{url}packed.safetensors", {"cache": str(folder / "cache")}]
        whole = child.refusal.run([*task[:2], {}])
        child.refused(task, "flock", 1, number, True, lambda answer: "" if answer == whole else str(answer))
        assert child.refusal.was_refused and [name for name in os.listdir(folder / "cache") if "-" in name]
    assert child.refusal.run(task) == whole


def test_a_read_that_returns_eagain_is_repeated(child: Child, folder: Path) -> None:
    """If a read fails with EAGAIN, as with some FUSE file systems, it is repeated."""
    task = ["load", "load compressed", str(folder)]
    whole = child.refusal.run(task)
    child.refused(task, "pread64", 1, errno.EAGAIN, False, lambda answer: str(answer) if answer != whole else "")
    assert child.refusal.was_refused


@contextlib.contextmanager
def server_child(folder: Path) -> Iterator[tuple[Child, str]]:
    """Starts a child that serves a folder, and yields it with the URL of the packed file."""
    with socket.socket() as free:
        free.bind((stores.HOST, 0))
        address = "%s:%d" % free.getsockname()
    child = Child()
    try:
        child.run("run_server", address, str(folder))
        yield child, f"http://{address}/packed.safetensors"
    finally:
        child.end()


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOMEM])
def test_a_server_that_fails_to_accept(folder: Path, number: int) -> None:
    """If a server fails to accept a connection, it tries again and continues."""
    with server_child(folder) as (child, url):
        child.refusal.refuse("accept4", 1, number)
        for _ in range(2):
            with urllib.request.urlopen(url, timeout=30 * FEWER) as answer:
                assert answer.read() == (folder / "packed.safetensors").read_bytes()
        assert child.refusal.was_refused


@pytest.mark.slow
def test_every_call_of_a_server(folder: Path) -> None:
    """If any system call fails, a server sends the right bytes or an answer that clients reject, and continues."""
    whole, wrong = (folder / "packed.safetensors").read_bytes(), []

    def answer() -> bytes | None:
        try:
            with urllib.request.urlopen(url, timeout=3 * FEWER) as opened:
                return opened.read()
        except (OSError, http.client.HTTPException):
            return None

    with server_child(folder) as (child, url):
        child.refusal.refuse()
        assert answer() == whole
        for call, count in child.refusal.counts().items():
            for number, lasts in ((errno.EPERM, True), (errno.EMFILE, False), (errno.ENOMEM, False)):
                for at in range(1, 2 if lasts else count + 1):
                    child.refusal.refuse(call, at, number, lasts=lasts)
                    if answer() not in (None, whole):
                        wrong.append((call, at, number, lasts, "wrong bytes"))
                    child.refusal.refuse()
                    if not any(answer() == whole for _ in range(3)):
                        wrong.append((call, at, number, lasts, "the server answers no more"))
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("place", ["http", "cache", "s3", "redis"])
def test_remote_loads(child: Child, folder: Path, place: str) -> None:
    """If a system call fails, a load over a network returns all bytes or raises a typed error."""
    options: dict[str, Any] = {"retries": 1, "timeout": 5}
    name, cache = "packed.safetensors", folder / "cache"
    with contextlib.ExitStack() as stack:
        if place in ("http", "cache"):
            uri = stack.enter_context(overwire_serve(folder)) + name
            options |= {"cache": str(cache)} if place == "cache" else {}
        elif place == "s3":
            more, _ = stack.enter_context(stores.s3())
            options, uri = options | dict(more), f"s3://models/{name}"
        else:
            more, begin = stack.enter_context(stores.redis())
            options, uri = options | dict(more), begin + name
        if place in ("s3", "redis"):
            child.run("save_uri", uri, options, 1)
            task = ["save_uri", uri, options, 1]
            sweep(child, task, wide=False)
            child.run(*task)
        sweep(child, ["load_uri", uri, options], False, lambda: shutil.rmtree(cache, ignore_errors=True))

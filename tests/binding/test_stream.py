"""Tests stream, progress, reports and threads."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
from conftest import every_dtype, same, ugly
from overwire.jobs import Job
from overwire.model.loads import Load
from overwire.model.opened import Model


@pytest.mark.parametrize("compress", [True, False], ids=["compressed", "plain"])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_stream_yields_the_same_tensors_as_load_file(tmp_path: Path, compress: bool, framework: str) -> None:
    tensors = ugly() | {f"d.{k}": v for k, v in every_dtype().items()}
    ow.save_file(tensors, tmp_path / "m", compress=compress)
    loaded = ow.load_file(tmp_path / "m", framework=framework)
    streamed = dict(ow.stream(tmp_path / "m", framework=framework))
    assert set(streamed) == set(loaded) == set(tensors)
    for name in loaded:
        same(streamed[name], loaded[name])


def test_stream_accepts_the_arguments_of_load_file(tmp_path: Path) -> None:
    ow.save_file({"a": torch.ones(4), "b": torch.arange(3), "c": torch.ones(2)}, tmp_path / "m")
    got = dict(ow.stream(tmp_path / "m", keys=["a", "b"], dtype="bfloat16", filter=lambda n: n != "c"))
    assert set(got) == {"a", "b"} and got["a"].dtype == torch.bfloat16 and got["b"].dtype == torch.int64
    assert list(ow.stream(tmp_path / "m", keys=[])) == []


def test_stream_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With in_order, a stream yields tensors in the order of load_file's dict or of `keys`, even with max_memory."""
    arrive = Job.next

    def backwards(self: Job, timeout: float | None, raw: bool = False) -> object:
        found: list[tuple[int, object, int]] = []
        while (news := arrive(self, timeout, raw)) is not None and news.capsules:
            found += zip(news.positions, news.capsules, news.addresses, strict=True)
        if news is not None:
            found.sort(key=lambda row: -row[0])
            news.positions, news.capsules, news.addresses = ([row[at] for row in found] for at in range(3))
        return news

    monkeypatch.setattr(Job, "next", backwards)
    ow.save_file({f"t{i}": torch.full((100,), float(i)) for i in range(20)}, tmp_path / "m")
    names = list(ow.load_file(tmp_path / "m"))
    for budget in (None, 4000):
        streamed = list(ow.stream(tmp_path / "m", in_order=True, max_memory=budget))
        assert [name for name, _ in streamed] == names
        assert all(tensor[0] == float(name[1:]) for name, tensor in streamed)
        assert [name for name, _ in ow.stream(tmp_path / "m", max_memory=budget)] != names
    keys = ["t7", "t2", "t11"]
    assert [name for name, _ in ow.stream(tmp_path / "m", in_order=True, keys=keys)] == keys
    early = ow.stream(tmp_path / "m", in_order=True)
    next(early)
    early.close()
    assert list(early) == []


def test_stream_closed_early_ends_its_load(tmp_path: Path) -> None:
    ow.save_file({f"t{i}": torch.randn(200, 200) for i in range(40)}, tmp_path / "m")
    for taken in (0, 1, 7):
        stream = ow.stream(tmp_path / "m")
        kept = [next(stream) for _ in range(taken)]
        stream.close()
        assert list(stream) == []
        assert all(t.isfinite().all() for _, t in kept)
    ow.stream(tmp_path / "m")  # never used
    gc.collect()
    for _name, _tensor in ow.stream(tmp_path / "m"):
        break


@pytest.mark.parametrize("options", [{}, {"in_order": True}, {"max_memory": 20_000}])
def test_threads_share_a_stream(tmp_path: Path, options: dict[str, Any]) -> None:
    """If several threads take from one stream, each tensor is returned once."""
    tensors = {f"t{n}": torch.full((n + 1, 7), float(n)) for n in range(150)}
    ow.save_file(tensors, tmp_path / "m")
    stream = ow.stream(tmp_path / "m", **options)
    begin = threading.Barrier(4)

    def take() -> list[tuple[str, torch.Tensor]]:
        begin.wait(60)
        return list(stream)

    with ThreadPoolExecutor(4) as pool:
        got = [pair for part in [pool.submit(take) for _ in range(4)] for pair in part.result(60)]
    assert sorted(name for name, _ in got) == sorted(tensors)
    for name, tensor in got:
        same(tensor, tensors[name])


@pytest.mark.parametrize("options", [{}, {"max_memory": 20_000}])
def test_a_stream_is_closed_during_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """If a thread closes a stream in which another thread waits, the waiting thread gets CancelledError. If a signal
    handler takes from the stream that it interrupts, the handler gets a clear error."""
    ow.save_file({f"t{n}": torch.zeros(100, 7) for n in range(20)}, tmp_path / "m")
    stream = ow.stream(tmp_path / "m", **options)
    waits, cancelled = threading.Event(), threading.Event()
    cancel = Job.cancel

    def slowly(self: Load) -> list[Any]:
        with pytest.raises(ow.ArgumentError, match="signal handler"):
            next(inner)
        waits.set()
        assert cancelled.wait(60)
        raise ow.CancelledError("overwire: cancelled: by the caller")

    inner = getattr(stream, "_now", [stream])[0]
    monkeypatch.setattr(Load, "next", slowly)
    monkeypatch.setattr(Job, "cancel", lambda self: (cancelled.set(), cancel(self))[1])
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(next, stream)
        assert waits.wait(60)
        stream.close()
        with pytest.raises(ow.CancelledError):
            taken.result(60)
    assert list(stream) == []


@pytest.mark.parametrize("options", [{}, {"in_order": True}, {"max_memory": "30kB"}], ids=["whole", "ordered", "windows"])
def test_a_stream_continues_after_a_refused_signal_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """After a stream has refused a signal handler, it continues and yields every tensor."""
    ow.save_file({f"t{n}": torch.zeros(100, 7) for n in range(20)}, tmp_path / "m")
    stream = ow.stream(tmp_path / "m", **options)
    take = Load.next

    def interrupted(self: Load) -> list[Any]:
        monkeypatch.setattr(Load, "next", take)
        with pytest.raises(ow.ArgumentError, match="signal handler"):
            next(stream)
        return take(self)

    monkeypatch.setattr(Load, "next", interrupted)
    assert len(list(stream)) == 20


def test_stream_holds_no_more_than_max_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are loaded but not yet yielded stay within max_memory."""
    torch.manual_seed(1)
    tensors = {f"t{i}": torch.randn(100 + 37 * (i % 5), 50).bfloat16() for i in range(40)} | {"big": torch.randn(300, 50)}
    ow.save_file(tensors, tmp_path / "m")
    size = {name: tensor.nbytes for name, tensor in tensors.items()}
    begin, started, yielded, most = Model.begin, 0, 0, 0

    def counted(model, chosen, *rest):
        nonlocal started, most
        started += sum(model.table[at][3] for at in chosen)
        most = max(most, started - yielded)
        return begin(model, chosen, *rest)

    monkeypatch.setattr(Model, "begin", counted)
    for budget in (60_000, 100_000, sum(size.values()), "1MB"):
        started = yielded = most = 0
        seen: list[ow.Progress] = []
        got = {}
        for name, tensor in ow.stream(tmp_path / "m", max_memory=budget, progress=seen.append):
            yielded += size[name]
            got[name] = tensor
        assert got.keys() == tensors.keys() and started == yielded
        assert most <= (budget if isinstance(budget, int) else 1_000_000)
        for name, tensor in got.items():
            same(tensor, tensors[name])
        assert seen[-1] == (yielded, yielded, 41, 41)
    stream = ow.stream(tmp_path / "m", max_memory=60_000, keys=["t1", "t2", "t3", "t4"])
    assert next(stream)[0] in tensors
    stream.close()
    assert list(stream) == []
    with pytest.raises(ow.OutOfMemoryError, match="'big' takes 60000 bytes on cpu, 1 over max_memory of 59999"):
        ow.stream(tmp_path / "m", max_memory=59_999)
    with pytest.raises(ow.OutOfMemoryError):  # both copies are in memory during a cast
        ow.stream(tmp_path / "m", max_memory=60_000, dtype="float64")
    data = bytearray((tmp_path / "m").read_bytes())
    data[-1000] ^= 1
    (tmp_path / "bad").write_bytes(data)
    stream = ow.stream(tmp_path / "bad", max_memory=60_000)
    with pytest.raises(ow.CorruptError):
        list(stream)
    assert list(stream) == []


def test_stream_raises_after_the_tensors_that_were_loaded(tmp_path: Path) -> None:
    path = tmp_path / "m"
    ow.save_file({f"t{i}": torch.randn(400, 400).bfloat16() for i in range(9)}, path)
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    stream = ow.stream(path)
    with pytest.raises(ow.CorruptError):
        for _name, tensor in stream:
            assert tensor.isfinite().all()
    assert list(stream) == []


def test_progress_and_reports(tmp_path: Path, capsys) -> None:
    """Progress reaches the totals, `last_report` describes the call, and progress bars leave stdout alone."""
    tensors = {f"t{i}": torch.randn(300, 300) for i in range(5)}
    size = 5 * 300 * 300 * 4
    seen: list[ow.Progress] = []
    ow.save_file(tensors, tmp_path / "m", progress=seen.append)
    assert seen[-1] == (size, size, 5, 5) and seen == sorted(seen)
    seen.clear()
    ow.load_file(tmp_path / "m", progress=seen.append)
    assert seen[-1].bytes == seen[-1].total_bytes == size and seen[-1].tensors == 5
    report = ow.last_report()
    assert isinstance(report, dict) and report
    ow.load_file(tmp_path / "m", progress=True)
    ow.verify(tmp_path / "m", progress=True)
    assert capsys.readouterr().out == ""


def test_a_progress_callable_that_raises_cancels(tmp_path: Path) -> None:
    ow.save_file({"t": torch.randn(300, 300)}, tmp_path / "m")

    def broken(_: ow.Progress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ow.load_file(tmp_path / "m", progress=broken)
    with pytest.raises(ZeroDivisionError):
        ow.save_file({"t": torch.randn(300, 300)}, tmp_path / "n", progress=broken)
    assert not list(tmp_path.glob(".*")) and not list(tmp_path.glob("*tmp*"))


def test_threads_share_files(tmp_path: Path) -> None:
    """Nine threads that load, stream and copy one file at the same time all get the right tensors."""
    tensors = ugly()
    ow.save_file(tensors, tmp_path / "m")
    file = ow.safe_open(tmp_path / "m", "pt")
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for round_ in range(10):
                if number % 3 == 0:
                    got = ow.load_file(tmp_path / "m")
                elif number % 3 == 1:
                    got = dict(ow.stream(tmp_path / "m"))
                else:
                    got = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    ow.save_file(got, tmp_path / f"copy{number}.{round_ % 2}")
                for name, tensor in tensors.items():
                    same(got[name], tensor)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_ctrl_c_stops_a_load_and_a_save(torch_script) -> None:
    done = torch_script(
        """
import os, signal, threading, time
import torch, overwire as ow
big = {f"t{i}": torch.randn(1000, 1000) for i in range(24)}
ow.save_file(big, "m")
old = os.path.getsize("m")
def interrupted(call):
    for delay in (0.0, 0.002, 0.01, 0.03):
        hit = False
        try:
            signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-4))
            call()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            hit = True
        yield hit
signal.signal(signal.SIGALRM, signal.default_int_handler)
hits = [hit for call in (lambda: ow.load_file("m"), lambda: ow.save_file(big, "m"),
                         lambda: ow.compress_pickle(big, "d.pkl"),
                         lambda: sum(t.sum() for _, t in ow.stream("m"))) for hit in interrupted(call)]
assert any(hits), hits
assert os.path.getsize("m") == old
assert torch.equal(ow.load_file("m")["t3"], big["t3"])
# A save that no call waits for completes despite an interrupt.
end = time.monotonic() + 60
while left := [n for root, _, names in os.walk(".") for n in names if "tmp" in n]:
    assert time.monotonic() < end, left
    time.sleep(0.05)
print("interrupted", sum(hits), "of", len(hits))
"""
    )
    assert "interrupted" in done.stdout


def test_a_forked_child_can_load_but_not_verify(tmp_path: Path, torch_script) -> None:
    """A forked child can use its parent's tensors and load local files, but functions that need the engine are refused.
    The parent continues."""
    torch_script(
        """
import os, sys, torch, overwire as ow
ow.save_file({"a": torch.arange(5)}, "m")
kept = ow.load_file("m")["a"]
pid = os.fork()
if pid == 0:
    try:
        assert kept.sum() == 10 and ow.load_file("m")["a"].sum() == 10
        try:
            ow.verify("m")
        except ow.ForkedError as error:
            assert "spawn" in str(error)
            os._exit(7)
    finally:
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert ow.load_file("m")["a"].sum() == 10
"""
    )


def test_a_forked_child_cannot_use_its_parents_stream(tmp_path: Path, torch_script) -> None:
    """If a forked child uses its parent's stream, it is refused immediately, even if a thread of the parent waits in
    the stream. The stream continues in the parent."""
    torch_script(
        """
import os, signal, sys, threading, torch, overwire as ow
ow.save_file({f"t{i}": torch.randn(256, 256) for i in range(8)}, "m")
for options in ({}, {"max_memory": "1MB"}):
    inside, leave, came = threading.Event(), threading.Event(), []
    def wait(now):
        inside.set()
        leave.wait()
    stream = ow.stream("m", mmap=False, progress=wait, **options)
    thread = threading.Thread(target=lambda: came.extend(stream))
    thread.start()
    inside.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        try:
            next(stream)
        except ow.ForkedError as error:
            assert "stream" in str(error)
            stream.close()
            del stream
            os._exit(7)
        finally:
            os._exit(1)
    leave.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    thread.join()
    assert len(came) == 8
"""
    )


def test_a_dropped_stream_is_freed(tmp_path: Path) -> None:
    """A dropped stream is freed immediately, without the cycle collector, even with a progress callable."""
    path = tmp_path / "m.safetensors"
    ow.save_file({f"t{i}": torch.randn(256, 1024) for i in range(16)}, path)
    gc.disable()
    try:
        stream = ow.stream(path, max_memory="4MB", mmap=False, progress=lambda now: None)
        next(iter(stream))
        seen = weakref.ref(stream)
        del stream
        assert seen() is None
    finally:
        gc.enable()


class CloseAtLine:
    """Closes a stream at one line of overwire, as a signal handler could."""

    folder = str(Path(ow.__file__).parent)

    def __init__(self, stream: Any, at: int) -> None:
        self.stream, self.at, self.lines = stream, at, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.folder):
            return None
        self.lines += 1
        if self.lines == self.at:
            sys.settrace(None)
            self.stream.close()
        return self


@pytest.mark.parametrize("options", [{}, {"max_memory": 150_000}], ids=["at once", "windows"])
def test_a_signal_handler_closes_a_stream_within_next(tmp_path: Path, options: dict[str, Any]) -> None:
    """Whichever line of `next` the handler interrupts, `next` returns the right tensor or ends the stream, and the
    stream stays closed."""
    ow.save_file({f"t{at}": torch.full((300, 100), float(at)) for at in range(4)}, tmp_path / "m")
    at = ends = 0
    while True:
        at += 1
        stream = ow.stream(tmp_path / "m", **options)
        next(stream)
        handler = CloseAtLine(stream, at)
        sys.settrace(handler)
        try:
            name, tensor = next(stream)
        except StopIteration:
            ends += 1
        else:
            same(tensor, torch.full((300, 100), float(name[1:])))
        finally:
            sys.settrace(None)
        if handler.lines < at:
            break
        with pytest.raises(StopIteration):
            next(stream)
    assert ends > 10

"""Tests what happens while an import is not finished: on another thread, or in code that a signal handler
interrupts."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from overwire._imports import Undisturbed, imported
from overwire.model.loads import many_objects

HALF = """
import builtins
begun, go = builtins.half_imported
begun.set()
assert go.wait(60)
if builtins.half_fails:
    raise ImportError("no")
from overwire._imports import imported
inside = imported(__name__)
whole = True
"""


@pytest.mark.parametrize("fails", [False, True])
def test_imported_waits_for_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """imported() waits for a module that another thread is importing. If the import fails, imported() returns None."""
    name = f"half_module_{fails}"
    (tmp_path / f"{name}.py").write_text(HALF)
    monkeypatch.syspath_prepend(tmp_path)
    begun, go = threading.Event(), threading.Event()
    monkeypatch.setattr("builtins.half_imported", (begun, go), raising=False)
    monkeypatch.setattr("builtins.half_fails", fails, raising=False)
    assert imported(name) is None
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(__import__, name)
        assert begun.wait(60)
        second = pool.submit(imported, name)
        go.set()
        module = second.result(60)
        assert isinstance(first.exception(60), ImportError) == fails
    assert module is None if fails else module.whole and module.inside is None and imported(name) is module


def test_numpy_is_saved_while_torch_is_imported(tmp_path: Path, script: Callable[..., Any]) -> None:
    """A thread can save arrays while another thread is importing torch."""
    (tmp_path / "torch.py").write_text(HALF + "class Tensor: ...\n")
    program = """
import builtins, sys, threading
import numpy as np, overwire as ow
sys.path.insert(0, ".")
begun, go = builtins.half_imported = threading.Event(), threading.Event()
builtins.half_fails = False
thread = threading.Thread(target=__import__, args=("torch",))
thread.start()
assert begun.wait(60) and not hasattr(sys.modules["torch"], "Tensor")
saves = threading.Thread(target=lambda: print(ow.save_file({"a": np.ones(3)}, "a").tensors))
saves.start()
saves.join(0.2)
go.set()
thread.join()
saves.join()
"""
    assert script(program).stdout.split() == ["1"]


def enter_and_leave() -> None:
    """Does what another thread does that imports at the same time."""
    with Undisturbed():
        pass


def test_signal_handlers_wait(capsys: pytest.CaptureFixture[str]) -> None:
    """Signal handlers run, in order, after the section that must not be disturbed. The program's handlers are then
    restored, even one that was set within the section. Ctrl-C does not wait, and other threads are not affected."""
    ran: list[str] = []
    handlers = {
        number: (lambda n, _: ran.append(signal.Signals(n).name))
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with Undisturbed(), Undisturbed():
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR1)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            assert not ran
        assert ran == ["SIGUSR2", "SIGUSR1"] and signal.getsignal(signal.SIGALRM) is signal.SIG_IGN

        def expire(number: int, frame: object) -> None:
            raise TimeoutError

        signal.signal(signal.SIGALRM, expire)
        with pytest.raises(TimeoutError), Undisturbed():  # an error in a handler does not stop other handlers
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGUSR1)
        assert ran[2:] == ["SIGUSR1"]
        with pytest.raises(KeyboardInterrupt), Undisturbed():
            signal.raise_signal(signal.SIGINT)
        assert all(signal.getsignal(n) is handlers[n] for n in (signal.SIGUSR1, signal.SIGUSR2))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(enter_and_leave).result(60)
        assert signal.getsignal(signal.SIGUSR1) is handlers[signal.SIGUSR1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_cycle_collector_waits() -> None:
    """During an import, the cycle collector runs no finalizer on any thread. Afterwards it is enabled or disabled as
    before."""
    assert gc.isenabled()
    with Undisturbed(), Undisturbed():
        assert not gc.isenabled()
    assert gc.isenabled()
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError), Undisturbed():
        assert not gc.isenabled()
        with Undisturbed():
            pool.submit(enter_and_leave).result(60)
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with Undisturbed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_load_to_the_cpu_imports_few_modules(torch_script: Callable[..., Any]) -> None:
    """A load to the CPU imports no module for GPUs, and starts the engine before it imports the module for torch."""
    program = """
import json, struct, sys
import torch, overwire as ow
order = []
class Watch:
    def find_spec(self, name, path=None, target=None):
        order.append(name)
sys.meta_path.insert(0, Watch())
header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
open("m.safetensors", "wb").write(struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1, 2))
print(ow.load_file("m.safetensors")["a"].tolist())
assert order.index("overwire._core") < order.index("overwire.frameworks.torch")
assert "overwire.gpu" not in sys.modules
"""
    assert torch_script(program).stdout == "[1.0, 2.0]\n"


def test_signal_handlers_use_overwire_during_its_imports(script: Callable[..., Any]) -> None:
    """A signal handler can save and load at any point of overwire's imports, and while the engine is being loaded."""
    program = """
import signal, sys
import numpy as np, overwire as ow

ran = []
def handler(number, frame):
    ow.save_file({"a": np.ones(3)}, "handled")
    ow.compress_pickle([np.ones(3)], "handled.pkl")
    ran.append(ow.load_file("handled", framework="np")["a"].sum() + ow.load_compressed_pickle("handled.pkl")[0].sum())
    with ow.safe_open("handled", "np") as file:
        assert file["a"].sum() == 3

class Poke:
    seen = set()
    def find_spec(self, name, path=None, target=None):
        if name.startswith("overwire.") and name not in self.seen:
            self.seen.add(name)
            signal.raise_signal(signal.SIGUSR1)

signal.signal(signal.SIGUSR1, handler)
sys.meta_path.insert(0, Poke())
ow.save_file({"a": np.zeros(5)}, "own")
assert ow.load_file("own", framework="np")["a"].shape == (5,)
ow.compress_pickle([np.zeros(5)], "own.pkl")
assert ow.load_compressed_pickle("own.pkl")[0].shape == (5,)
with ow.safe_open("own", "np") as file:
    assert file.get_slice("a")[1:3].shape == (2,)
assert ow.verify("own") and ow.digest(np.zeros(3))
assert {"overwire._core", "overwire.verbs.save", "overwire.bundles.pickling"} <= Poke.seen
assert signal.getsignal(signal.SIGUSR1) is handler
print(len(ran) == len(Poke.seen), set(ran) == {6.0})
"""
    done = script(program, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr + done.stdout


def test_a_forked_child_collects_garbage() -> None:
    """If a program forks while another thread has paused the cycle collector, it is enabled in the child."""
    for pause in (Undisturbed, many_objects):
        inside, may_leave = threading.Event(), threading.Event()

        def stay(pause: Any = pause, inside: Any = inside, may_leave: Any = may_leave) -> None:
            with pause():
                inside.set()
                may_leave.wait(30)

        thread = threading.Thread(target=stay)
        thread.start()
        try:
            assert inside.wait(30) and not gc.isenabled()
            child = os.fork()
            if child == 0:
                os._exit(0 if gc.isenabled() else 7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert not gc.isenabled()
        finally:
            may_leave.set()
            thread.join()
        assert gc.isenabled()

"""Tests the context managers of `_undo`, which run functions after an error, or keep an error and raise it later.
Ctrl-C may arrive at any of their lines."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from overwire import _imports, _undo
from overwire._undo import after_error, keep_error, pass_error_to


def test_the_function_runs_only_after_an_error() -> None:
    """The function runs only after an error. It gets its arguments and, with `pass_error_to`, the error."""
    calls: list[Any] = []
    with after_error(calls.append, "unused"):
        pass
    assert calls == []
    with pytest.raises(ValueError, match="first"), after_error(calls.append, 1):
        raise ValueError("first")
    with pytest.raises(ValueError, match="first") as caught, pass_error_to(lambda *all: calls.append(all), 2):
        raise ValueError("first")
    assert calls == [1, (2, caught.value)]


def fail() -> None:
    raise OSError("second")


def test_the_first_error_is_raised_with_notes_about_others() -> None:
    """If two functions fail, the first error has a note with the traceback of each."""
    with pytest.raises(ValueError, match="first") as caught, after_error(fail), after_error(fail):
        raise ValueError("first")
    notes = caught.value.__dict__["__notes__"]
    assert len(notes) == 2 and all("OSError: second" in note and "in fail" in note for note in notes)


def test_an_error_that_is_raised_again_needs_no_note() -> None:
    def raise_again(error: BaseException) -> None:
        raise error

    with pytest.raises(ValueError) as caught, pass_error_to(raise_again):
        raise ValueError
    assert "__notes__" not in caught.value.__dict__


def test_a_generator_that_is_closed_undoes_its_work() -> None:
    """Closing a generator runs the function. An error of the function is raised, in place of GeneratorExit, which
    Python discards."""
    calls: list[int] = []

    def count(undo: Callable[..., object]) -> Iterator[int]:
        with after_error(undo, 1):
            yield 1

    stream = count(calls.append)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert calls == [1]
    stream = count(lambda _: fail())
    next(stream)
    with pytest.raises(OSError, match="second"):
        stream.close()  # type: ignore[attr-defined]


def test_ctrl_c_waits_for_the_function() -> None:
    """Ctrl-C during the function is raised after the function has returned, with the first error as its context."""
    calls: list[int] = []

    def undo() -> None:
        signal.raise_signal(signal.SIGINT)
        calls.append(1)

    with pytest.raises(KeyboardInterrupt) as caught, after_error(undo):
        raise ValueError("first")
    assert calls == [1]
    contexts = [caught.value.__context__]
    while contexts[-1] is not None:
        contexts.append(contexts[-1].__context__)
    assert any(isinstance(one, ValueError) for one in contexts)


class Interrupt:
    """Ctrl-C at one line of a context manager. `at` counts the lines that run after its construction."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        self.files = {_undo.__file__, _imports.__file__}

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self.files or frame.f_code.co_name == "__del__":
            return None
        self.count += 1
        if self.count == self.at:
            signal.raise_signal(signal.SIGINT)
        return self


def run_interrupted(interrupt: Interrupt, calls: list[int]) -> type[BaseException] | None:
    undo = calls.append  # a C function, because Python discards an interrupt in a finalizer that is written in Python
    sys.settrace(interrupt)
    try:
        with after_error(undo, 1):
            raise ValueError("first")
    except BaseException as error:
        sys.settrace(None)
        return type(error)
    finally:
        sys.settrace(None)


def test_ctrl_c_at_any_line_runs_the_function_once() -> None:
    """Whichever line Ctrl-C interrupts, the function runs exactly once, the signal handler is restored, and the cycle
    collector runs."""
    before = signal.getsignal(signal.SIGINT)
    at, kinds = 0, set()
    while True:
        at += 1
        interrupt, calls = Interrupt(at), list[int]()
        kinds.add(kind := run_interrupted(interrupt, calls))
        assert calls == [1], at
        assert signal.getsignal(signal.SIGINT) is before and gc.isenabled(), at
        if interrupt.count < at:
            assert kind is ValueError
            break
        assert kind is KeyboardInterrupt, at
    assert at > 20 and kinds == {ValueError, KeyboardInterrupt}


def test_a_forked_child_runs_the_function() -> None:
    """In a child that is forked within a block, blocks run their functions as usual. The parent's block continues."""
    calls: list[int] = []
    with after_error(calls.append, os.getpid()):
        child = os.fork()
        if not child:
            try:
                with after_error(calls.append, 2):
                    raise ValueError
            except ValueError:
                os._exit(len(calls))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert calls == []


AT_EXIT = """
from overwire._undo import after_error
def count():
    with after_error(print, "undone"):
        yield 1
stream = count()
next(stream)
"""


def test_an_open_generator_is_undone_at_exit() -> None:
    """If a generator is still open when the interpreter exits, the function runs, and nothing else is printed."""
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "undone\n", "")


def test_an_error_is_kept() -> None:
    """Of several blocks, the first error is kept. An earlier error can be passed to the constructor."""
    failure = keep_error()
    with failure:
        pass
    assert failure.error is None
    with failure:
        raise KeyboardInterrupt
    with failure:
        raise ValueError
    assert isinstance(failure.error, KeyboardInterrupt)
    with keep_error(failure.error) as again:
        raise ValueError
    assert again.error is failure.error


def test_errors_of_several_threads_are_kept() -> None:
    failure = keep_error()

    def work() -> None:
        with failure:
            raise ValueError("in a thread")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert str(failure.error) == "in a thread"


def test_a_closed_generator_is_not_kept() -> None:
    failure = keep_error()

    def count() -> Iterator[int]:
        with failure:
            yield 1
            yield 2

    stream = count()
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert failure.error is None


HANGS = """
import http.server, os, signal, sys, threading
import torch
import torch.distributed.checkpoint as dcp
from overwire.checkpoints import CheckpointWriter

ended = threading.Event()

class Server(http.server.BaseHTTPRequestHandler):
    # A store without objects that never answers writes and removals. Each such request causes Ctrl-C.
    def do_GET(self):
        self.send_error(404)
    do_HEAD = do_GET
    def do_PUT(self):
        print(self.command, flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        if self.command == "PUT":  # the first Ctrl-C ends the save, the second ends the wait for its thread
            ended.wait(0.3)
            os.kill(os.getpid(), signal.SIGINT)
        ended.wait(30)
        if not ended.is_set():
            print("too late", flush=True)
    do_POST = do_DELETE = do_PUT
    def log_message(self, *words):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
options = {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "key": "k", "secret": "s", "region": "r"}
try:
    dcp.save({"w": torch.ones(9)}, storage_writer=CheckpointWriter("s3://b/ck", storage_options=options), no_dist=True)
except BaseException as error:  # torch wraps KeyboardInterrupt
    ended.set()
    print("KeyboardInterrupt" in str(error), flush=True)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
os._exit(0)  # a thread still waits
"""


def test_ctrl_c_ends_the_removal_from_a_store(torch_script: Callable[..., Any]) -> None:
    """Ctrl-C ends the save of a checkpoint to a store that does not answer, even while the save removes its objects."""
    done = torch_script(HANGS)
    assert done.stdout.split() == ["PUT", "DELETE", "True", "True"], done.stdout + done.stderr

"""Loads the engine's module `_core` on the first call, refuses it after fork, ends it at
exit, and owns the handles of its jobs and models. The engine's calls are in `_verbs`.

Loading starts Go's runtime and its threads; importing this module does not. Every call
is safe from any thread, releases the GIL while it works or waits, and raises the class of
`overwire.errors` that belongs to the engine's error.

After `fork` in a process that has loaded the engine, every call in the child raises
`ForkedError` at once; existing tensors stay readable. When the interpreter exits, running
jobs are cancelled and given a moment to end.
"""

from __future__ import annotations

import _thread
import os
import sys

from ._environment import engine_text, environment, settings
from ._imports import Undisturbed
from ._locks import new_lock
from .files import may_be_foreign
from .paths import without_scheme

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from ._requests import Program

# How to take from a job and how to free a handle: see gosrc/bind/binding.
TAKE_ALL, TAKE_NEXT, TAKE_RAW, TAKE_LAST = 0, 1, 2, 4
FREE_NOW, FREE_ENDED = 0, 1

_EXIT_MS = 2000  # how long process exit waits for cancelled jobs

# The address space that must be free to load the engine, besides its threads' stacks. Go reserves 1.2 GiB
# for its tables, most of it unused, and grows its heap in steps of 64 MiB.
_START_SPACE = 1344 << 20

# The C library reserves this much for each thread that allocates, up to a number of threads that the option sets.
_ARENA, _M_ARENA_MAX = 128 << 20, -8

# A thread limit above this counts as no limit: finding out how many are left takes time.
_MANY_THREADS = 16384

# The exit status when no one reads the output any more: cli.ExitPipe.
_READER_GONE = 141

# Maps OVERWIRE_LOG to levels of logging.
_LEVELS = {"debug": 10, "info": 20, "json": 20, "warning": 30, "error": 40, "silent": 100}

_lock = new_lock()
_library: Any = None  # the raw module; its runtime may still be starting
_loaded: Any = None  # the same module once it has answered, or its stand-in at exit


class _Exiting:
    """Stands in for the module while the interpreter exits."""

    def __init__(self) -> None:
        from . import errors  # import it now: at exit nothing can be imported

        self._thread, self._refusal = _thread.get_ident(), errors.CancelledError
        errors.hold_daemon = self.hold_daemon

    def hold_daemon(self) -> None:
        if _thread.get_ident() != self._thread:
            # An exception would be printed while stderr is torn down, and CPython answers
            # that with abort. So this thread waits for the end.
            lock = _thread.allocate_lock()
            lock.acquire()
            lock.acquire()

    def __getattr__(self, name: str) -> Any:
        self.hold_daemon()
        if name == "free":
            return lambda *args: None  # finalizers have nothing left to free
        if name == "forked":
            return bool  # False

        def refuse(verb: str, *rest: Any) -> Any:
            if verb in ("cancel", "gpu_stream_free"):
                return "", b"", [], None, None
            raise self._refusal("overwire: the interpreter is exiting")

        return refuse


def core() -> Any:
    """The module, loaded when it is first needed."""
    return _loaded if _loaded is not None else _load_library()


def open_library() -> Any:
    """Opens the engine's library, for a caller that imports more before its first call: Go's
    runtime starts on its own threads meanwhile. Functions that do not enter Go also work in
    forked children and at exit."""
    global _library
    if _library is not None:
        return _library
    with Undisturbed(), _lock:
        if _library is None:
            import atexit

            _refuse_few_descriptors()
            threads = 2 * len(os.sched_getaffinity(0)) + 8  # the number that the engine starts with, and some spare
            _refuse_small_address_space(threads)
            _refuse_few_threads(threads)
            from . import _core as raw

            # From here on Go's threads exist.
            atexit.register(_at_exit)
            _library = raw
        return _library


def _refuse_small_address_space(threads: int) -> None:
    # Go's runtime ends the process if it cannot reserve its first memory or a thread's stack.
    import resource

    try:
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    except OSError:  # a sandbox hides it
        return
    if limit == resource.RLIM_INFINITY:
        return
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    asked = _START_SPACE + threads * (stack if 0 < stack < 64 << 20 else 8 << 20)
    if _is_space_free(asked + threads * _ARENA):
        return
    # The C library gives each thread an arena while there is room, and then no stack fits for the next thread.
    import ctypes

    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):  # not every C library has arenas
        set_option(_M_ARENA_MAX, 1)
    if not _is_space_free(asked):
        from . import errors

        raise errors.OutOfMemoryError(
            f"overwire: start the engine: out of memory: host: it reserves {asked} bytes of address space, and "
            f"this process is limited to {limit}: raise `ulimit -v`",
            asked=asked,
            total=limit,
            device="host",
        )


def _is_space_free(size: int) -> bool:
    import mmap

    try:
        mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0).close()
    except (OSError, MemoryError):
        return False
    return True


def _refuse_few_threads(threads: int) -> None:
    # Go's runtime ends the process if it cannot start a thread.
    import resource

    left, limit = threads, "`ulimit -u`"
    try:
        if 0 <= resource.getrlimit(resource.RLIMIT_NPROC)[0] <= _MANY_THREADS:
            left = _startable_threads(threads)
    except OSError:  # a sandbox hides it
        pass
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/pids"):  # cgroup v2 and v1, as a container sees its own
        try:
            with open(f"{folder}/pids.max") as most, open(f"{folder}/pids.current") as now:
                if (room := int(most.read()) - int(now.read())) < left:
                    left, limit = max(0, room), "the process limit (pids) of the container"
        except (OSError, ValueError):  # no such limit is set
            pass
    if left < threads:
        from . import errors

        raise errors.OutOfMemoryError(
            f"overwire: start the engine: out of memory: host: it needs {threads} threads, and this process can only "
            f"start {left}: raise {limit}",
            device="host",
        )


def _startable_threads(most: int) -> int:
    """How many threads can be started now, up to `most`."""
    import time
    from types import BuiltinFunctionType

    if not isinstance(_thread.start_new_thread, BuiltinFunctionType):  # a replacement such as gevent's starts none
        return most
    gate, started = _thread.allocate_lock(), 0
    ended: list[None] = []
    gate.acquire()

    def wait() -> None:
        with gate:
            ended.append(None)

    try:
        while started < most:
            _thread.start_new_thread(wait, ())
            started += 1
    except RuntimeError:
        pass
    finally:
        gate.release()
    while len(ended) < started:
        time.sleep(0.0001)
    return started


def _refuse_few_descriptors() -> None:
    # Without a free descriptor, importing an extension module fails with ImportError.
    try:
        os.close(os.open(os.path.dirname(__file__), os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        from . import errors

        raise errors.error_of_system(error, "start the engine from", os.path.dirname(__file__)) from error


def _load_library() -> Any:
    global _loaded
    raw = open_library()
    with Undisturbed(), _lock:
        if _loaded is not None:
            return _loaded
        import json

        # Go sees the environment of the process start, not os.environ.
        facts = json.loads(raw.setup(json.dumps(settings()), JobNumber, ModelNumber)[0])
        if facts["warnings"] or facts["log"]:
            import logging

            log = logging.getLogger("overwire")
            if facts["log"]:
                log.setLevel(_LEVELS[facts["log"]])
                log.addHandler(_stderr_writer(log, facts["log"] == "json"))
            for warning in facts["warnings"] or ():
                log.warning("overwire: %s", warning)
        _loaded = raw
        return raw


def _stderr_writer(log: Any, as_json: bool) -> Any:
    """A handler that writes to stderr if OVERWIRE_LOG is set and the program has not configured
    logging. Once the program does, the handler is silent. as_json: one JSON object a line; a
    finished call's counters are in its `report`."""
    import json
    import logging

    class Spoken(logging.Handler):
        def emit(self, record: Any) -> None:
            if sys.stderr is not None and not logging.getLogger().handlers and log.handlers == [self]:
                try:
                    text = self.format(record).removeprefix("overwire: ")
                    if as_json:
                        facts = {
                            "time": record.created,
                            "level": record.levelname.lower(),
                            "logger": "overwire",
                            "message": text,
                        }
                        text = json.dumps(facts | ({"report": record.report} if hasattr(record, "report") else {}))
                    sys.stderr.write(f"{text}\n" if as_json else f"overwire: {text}\n")
                except Exception:
                    self.handleError(record)

    return Spoken()


def _at_exit() -> None:
    global _loaded
    if not isinstance(_loaded, _Exiting) and not _library.forked():
        _loaded = _Exiting()
        _library.call("shutdown", "", _EXIT_MS.to_bytes(8, "little"))


class HandleOwner:
    """An owner of an engine handle, which cannot be copied or pickled: a copy would free
    what the original still uses, and in another process the number means something else."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"overwire: {type(self).__name__} can be neither copied nor pickled: open or begin another one instead, "
            "in the process that uses it"
        )


class Freed(int):
    """The number of something that the engine has freed. It has no `__del__`: Python drops a
    Ctrl-C that arrives as a finalizer begins."""


class _Number(Freed):
    """A number that the engine frees when its last reference goes."""

    how = FREE_NOW
    __reduce_ex__ = HandleOwner.__reduce_ex__

    def __del__(self) -> None:
        if _loaded is not None and not forked():
            try:
                _loaded.free(self, self.how)
            except RuntimeError:
                pass  # the engine has failed


class JobNumber(_Number):
    """The number of a job. When its last reference goes, the job is cancelled and no
    longer uses the caller's memory."""

    how = FREE_ENDED
    #: Kept alive until then.
    memory: object = None


class ModelNumber(_Number):
    """The number of an open model, which is closed when its last reference goes."""


def handle(number: int) -> int:
    """Checks a handle: Go would take True for 1."""
    if type(number) in (int, JobNumber, ModelNumber, Freed) and 0 < number < 1 << 63:
        return number
    from . import errors

    raise errors.not_a_handle(number)


def forget(number: int) -> None:
    """Marks a number as freed, after the engine has freed it."""
    if isinstance(number, _Number):
        number.__class__ = Freed  # type: ignore[assignment]


def release(number: int) -> None:
    """Frees what a number names now; a running job is cancelled. Does nothing in a forked
    child: everything belongs to the parent."""
    if not forked():
        core().free(number, FREE_NOW)
    forget(number)


def buffer_of(source: Any, writable: bool = False) -> tuple[int, int, Any]:
    """Returns the memory of a C-contiguous buffer: (address, bytes, holder).

    The memory stays while the holder lives. Raises what the object raises: TypeError,
    BufferError.
    """
    buffer: tuple[int, int, Any] = open_library().buffer_of(source, writable)
    return buffer


def program(argv: Sequence[str], names: dict[str, str] | None = None) -> Program:
    """Collects what the engine's command line must know about this process. names: what people call some paths."""
    version = "%d.%d.%d" % sys.version_info[:3]
    about: Program = {"argv": [engine_text(word) for word in argv], "python": sys.executable or "", "version": version}
    if any("://" in word for word in argv):
        about["storage"] = {"env": environment()}
    settings_of_argv = {word.rpartition("env:")[2] for word in argv if "env:" in word}
    about["secrets"] = {name: engine_text(os.environ[name]) for name in settings_of_argv if name in os.environ}
    if names:
        about["names"] = names
    return about


def cli(argv: Sequence[str], names: dict[str, str] | None = None) -> int:
    """Run the command line, without the program's name; return the exit code. names: as for `program`.

    The engine writes to descriptors 1 and 2. Ctrl-C, SIGTERM, SIGHUP and a closed output
    (`| head`) cancel the work and wait for the clean-up, so that no temporary file stays.
    Ctrl-C returns 130; the others then end the process as they do by default.
    """
    import json
    import signal

    signals: list[int] = []

    def stop_on_signal(number: int, _frame: object) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        if stream is not None:
            stream.flush()
        else:  # the output is closed: writes must fail, and must not reach the next file that is opened
            nowhere = os.open(os.devnull, os.O_RDONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup SIGHUP is ignored
            signal.signal(number, stop_on_signal)
    job = core().start("cli", json.dumps(program(argv, names)), b"")
    try:
        status = int(core().take(job, None, TAKE_LAST)[0])
        if status == _READER_GONE:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)
        return status
    except KeyboardInterrupt:
        core().call("cancel", "", job.to_bytes(8, "little"))
        from . import errors

        try:
            core().wait(job, 30.0)  # enough on a busy machine; a second Ctrl-C ends the wait
        except (errors.OverwireError, KeyboardInterrupt):
            pass  # the cancelled job's error, or a second signal
        if signals:
            signal.signal(signals[0], signal.SIG_DFL)
            os.kill(os.getpid(), signals[0])
        return 130
    finally:
        core().free(job, FREE_NOW)


# The commands that also take files of other libraries.
_READING = ("compress", "convert", "inspect", "verify", "load", "diff")


def main() -> None:
    """Runs the command `overwire`, after the saves in the background of a program that calls it."""
    from ._order import await_all

    await_all()
    if sys.argv[1:2] == ["run"] and sys.argv[2:3] not in (["-h"], ["--help"]):
        from ._run import run

        run(sys.argv[2:])
    if sys.argv[1:2] == ["bench"] and any(word.partition("=")[0] == "--ranks" for word in sys.argv[2:]):
        _replace_process("overwire._bench", sys.argv[2:])
    if sys.argv[1:2] == ["verify"] and any(word.partition("=")[0] == "--against" for word in sys.argv[2:]):
        _replace_process("overwire._against", sys.argv[2:])
    words = " ".join(["", *sys.argv[2:]]).replace("--device ", "--device=")
    if sys.argv[1:2] == ["bench"] and " --device=cuda" in words:
        _replace_process("overwire._bench_faces", sys.argv[2:])
    if sys.argv[1:2] and sys.argv[1] in _READING and any(
        may_be_foreign(without_scheme(word)) for word in sys.argv[2:]
    ):
        _replace_process("overwire._torch", sys.argv[1:])
    try:
        sys.exit(cli(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # Ctrl-C while the engine was being loaded


def _replace_process(module: str, words: list[str]) -> NoReturn:
    # Runs another program in place of this one.
    from ._children import module_command

    os.execv(sys.executable, module_command(module, *words))


def is_loaded() -> bool:
    """Whether the engine is loaded and the interpreter is not exiting."""
    return _loaded is not None and not isinstance(_loaded, _Exiting)


def forked() -> bool:
    """Whether this is a child of a process that had loaded the engine."""
    return _library is not None and bool((_loaded or _library).forked())


def refuse_child(what: str) -> None:
    """Raises ForkedError in a forked child. what: the start of a sentence that says what runs in the parent."""
    if forked():  # check before taking a lock: a thread of the parent may hold it
        from .errors import ForkedError

        raise ForkedError(f"{what} the process that this one was forked from")

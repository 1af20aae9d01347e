"""Loads the engine's extension module `_core` on the first call, refuses calls after a fork, shuts
the engine down at exit, and owns the handles of jobs and models. `_verbs` has the engine's functions.

Loading the module starts Go's runtime and its threads; importing this file does not. Every call is
safe from any thread, releases the GIL while it works or waits, and raises the errors of
`overwire.errors`.

If a process forks after it has loaded the engine, every call in the child raises `ForkedError` immediately; existing
tensors stay readable. When the interpreter exits, running jobs are cancelled and get up to two seconds to end.
"""

from __future__ import annotations

import _thread
import os
import sys

from ._imports import Undisturbed
from ._locks import new_lock

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from ._requests import Program, VerifyCopy

# Modes of `take` and `free`: see gosrc/bind/binding.
TAKE_ALL, TAKE_NEXT, TAKE_RAW, TAKE_LAST = 0, 1, 2, 4
FREE_NOW, FREE_ENDED = 0, 1

_EXIT_MS = 2000  # how long the exit of the process waits for cancelled jobs

# The free address space that the engine needs to start, without its threads' stacks. Go reserves 1.2 GiB
# for its tables, most of it unused, and grows its heap in steps of 64 MiB.
_START_SPACE = 1344 << 20

# The limits that are compared before the engine starts: their names in /proc/self/limits, and in the module `resource`.
_LIMITS = {"Max address space": "RLIMIT_AS", "Max stack size": "RLIMIT_STACK", "Max processes": "RLIMIT_NPROC"}

# glibc reserves an arena of this size for each thread that allocates. The mallopt option limits the number of arenas.
_ARENA, _M_ARENA_MAX = 128 << 20, -8

# Higher thread limits are not checked, because counting the remaining threads takes time.
_MANY_THREADS = 16384

# The exit status if the reader of the output has exited: cli.ExitPipe.
_READER_GONE = 141

# Maps OVERWIRE_LOG to levels of logging.
_LEVELS = {"debug": 10, "info": 20, "json": 20, "warning": 30, "error": 40, "silent": 100}

_lock = new_lock()
_library: Any = None  # the raw module; its runtime may still be starting
_loaded: Any = None  # the same module once its runtime has started; an _Exiting at exit


class _Exiting:
    """Stands in for the module while the interpreter exits."""

    def __init__(self) -> None:
        from . import errors  # import it now: at exit nothing can be imported

        self._thread, self._refusal = _thread.get_ident(), errors.CancelledError
        errors.hold_daemon = self.hold_daemon

    def hold_daemon(self) -> None:
        if _thread.get_ident() != self._thread:
            # CPython aborts if a thread prints an exception while stderr is torn down. So block until the process ends.
            lock = _thread.allocate_lock()
            lock.acquire()
            lock.acquire()

    def __getattr__(self, name: str) -> Any:
        self.hold_daemon()
        if name == "free":
            return lambda *args: None  # for finalizers, which have nothing left to free
        if name == "forked":
            return bool  # called without arguments, it returns False

        def refuse(verb: str, *rest: Any) -> Any:
            if verb in ("cancel", "gpu_stream_free"):
                return "", b"", [], None, None
            raise self._refusal("overwire: the interpreter is exiting")

        return refuse


def core() -> Any:
    """Returns the extension module, which the first call loads."""
    return _loaded if _loaded is not None else _load_library()


def open_library() -> Any:
    """Opens the engine's library without waiting for Go's runtime, which starts on other threads while
    the caller continues. Functions that do not enter Go also work in forked children and at exit."""
    global _library
    if _library is not None:
        return _library
    with Undisturbed(), _lock:
        if _library is None:
            import atexit

            _refuse_few_descriptors()
            threads = 2 * len(os.sched_getaffinity(0)) + 8  # the engine's first threads, and a reserve
            limits = _read_limits()
            _refuse_small_address_space(threads, limits)
            _refuse_few_threads(threads, limits)
            from . import _core as raw

            # Go's threads exist from here on.
            atexit.register(_at_exit)
            _library = raw
        return _library


def _read_limits() -> dict[str, int]:
    # Reads the limits of this process that are not "unlimited".
    limits: dict[str, int] = {}
    try:
        with open("/proc/self/limits") as file:
            for line in file:
                if (value := line[26:46].strip()).isdigit():
                    limits[line[:26].strip()] = int(value)
    except OSError:  # a sandbox without /proc
        import resource  # takes longer to import than reading the file

        for name, limit in _LIMITS.items():
            try:
                number = resource.getrlimit(getattr(resource, limit))[0]
            except OSError:  # the sandbox forbids the call
                continue
            if number != resource.RLIM_INFINITY:
                limits[name] = number
    return limits


def _refuse_small_address_space(threads: int, limits: dict[str, int]) -> None:
    # Go's runtime ends the process if it cannot reserve its first memory or a thread's stack.
    limit = limits.get("Max address space")
    if limit is None:
        return
    stack = limits.get("Max stack size", 0)
    asked = _START_SPACE + threads * (stack if 0 < stack < 64 << 20 else 8 << 20)
    if _is_space_free(asked + threads * _ARENA):
        return
    # With one arena per thread, glibc would leave no address space for the stacks of later threads.
    import ctypes

    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):  # not every C library has arenas
        set_option(_M_ARENA_MAX, 1)
    if not _is_space_free(asked):
        from . import errors

        raise errors.OutOfMemoryError(
            f"overwire: start the engine: out of memory: host: the engine reserves {asked} bytes of address space, but "
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


def _refuse_few_threads(threads: int, limits: dict[str, int]) -> None:
    # Go's runtime ends the process if it cannot start a thread.
    left, limit = threads, "`ulimit -u`"
    if limits.get("Max processes", _MANY_THREADS + 1) <= _MANY_THREADS:
        left = _startable_threads(threads)
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/pids"):  # cgroup v2 and v1, as seen inside a container
        try:
            with open(f"{folder}/pids.max") as most, open(f"{folder}/pids.current") as now:
                if (room := int(most.read()) - int(now.read())) < left:
                    left, limit = max(0, room), "the process limit (pids) of the container"
        except (OSError, ValueError):  # there is no limit
            pass
    if left < threads:
        from . import errors

        raise errors.OutOfMemoryError(
            f"overwire: start the engine: out of memory: host: the engine needs {threads} threads, but this process "
            f"can only start {left}: raise {limit}",
            device="host",
        )


def _startable_threads(most: int) -> int:
    """Counts how many threads can be started now, up to `most`, by starting them."""
    import time
    from types import BuiltinFunctionType

    if not isinstance(_thread.start_new_thread, BuiltinFunctionType):  # gevent's replacement starts no threads
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

        from ._environment import settings

        # Go reads the environment once, so it does not see later changes to os.environ.
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
    """Makes a log handler that writes to stderr until the program configures logging. as_json: whether to
    write one JSON object per line, in which `report` has the counters of a finished call."""
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
    """An owner of an engine handle. It cannot be copied or pickled: a copy would free the handle while the
    original still uses it, and the number is meaningless in another process."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"overwire: {type(self).__name__} cannot be copied or pickled: make another one in the process that uses it"
        )


class Freed(int):
    """A handle number that the engine has freed. The class has no `__del__`, because Python discards a Ctrl-C that
    arrives when a finalizer begins."""


class _Number(Freed):
    """A handle number. Dropping the last reference frees the handle."""

    how = FREE_NOW
    __reduce_ex__ = HandleOwner.__reduce_ex__

    def __del__(self) -> None:
        if _loaded is not None and not forked():
            try:
                _loaded.free(self, self.how)
            except RuntimeError:
                pass  # the engine has failed


class JobNumber(_Number):
    """The number of a job. Dropping the last reference cancels the job and waits until it has
    stopped using the caller's memory."""

    how = FREE_ENDED
    #: An object that must live until the job has stopped using its memory.
    memory: object = None


class ModelNumber(_Number):
    """The number of an open model. Dropping the last reference closes the model."""


def handle(number: int) -> int:
    """Returns a valid handle number unchanged. Raises ArgumentError for other values, also for True, which Go would
    read as 1."""
    if type(number) in (int, JobNumber, ModelNumber, Freed) and 0 < number < 1 << 63:
        return number
    from . import errors

    raise errors.not_a_handle(number)


def forget(number: int) -> None:
    """Marks a number as freed, after the engine has freed it."""
    if isinstance(number, _Number):
        number.__class__ = Freed  # type: ignore[assignment]


def release(number: int) -> None:
    """Frees a handle immediately; a running job is cancelled. In a forked child it only marks the number as freed,
    because the object belongs to the parent."""
    if not forked():
        core().free(number, FREE_NOW)
    forget(number)


def buffer_of(source: Any, writable: bool = False) -> tuple[int, int, Any]:
    """Returns the memory of a C-contiguous buffer: (address, bytes, holder).

    The memory is valid as long as the holder is alive. Raises TypeError or BufferError if
    `source` does not have such a buffer.
    """
    buffer: tuple[int, int, Any] = open_library().buffer_of(source, writable)
    return buffer


def program(
    argv: Sequence[str], names: dict[str, str] | None = None, copies: dict[str, VerifyCopy] | None = None
) -> Program:
    """Collects the facts about this process that the engine's command line needs. names: maps paths to the names
    that messages show. copies: describes the originals of plain copies, by the copy's path."""
    from ._environment import engine_text, environment

    version = "%d.%d.%d" % sys.version_info[:3]
    about: Program = {"argv": [engine_text(word) for word in argv], "python": sys.executable or "", "version": version}
    if any("://" in word for word in argv):
        about["storage"] = {"env": environment()}
    settings_of_argv = {word.rpartition("env:")[2] for word in argv if "env:" in word}
    about["secrets"] = {name: engine_text(os.environ[name]) for name in settings_of_argv if name in os.environ}
    if names:
        about["names"] = names
    if copies:
        about["copies"] = copies
    return about


def cli(
    argv: Sequence[str], names: dict[str, str] | None = None, copies: dict[str, VerifyCopy] | None = None
) -> int:
    """Runs a command line and returns its exit status. argv excludes the program's name. names, copies: as for
    `program`.

    The engine writes to descriptors 1 and 2. Ctrl-C, SIGTERM, SIGHUP and a closed output (`| head`) cancel the work.
    The function then waits until temporary files are removed. After Ctrl-C it returns 130; after another signal, that
    signal's default action ends the process.
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
        else:  # the descriptor is closed: writes must fail instead of reaching the file that is opened next
            nowhere = os.open(os.devnull, os.O_RDONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup SIGHUP is ignored
            signal.signal(number, stop_on_signal)
    job = core().start("cli", json.dumps(program(argv, names, copies)), b"")
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
            pass  # ignores the error of the cancelled job, or a second signal
        if signals:
            signal.signal(signals[0], signal.SIG_DFL)
            os.kill(os.getpid(), signals[0])
        return 130
    finally:
        core().free(job, FREE_NOW)


# Commands that also accept files of other libraries.
_READING = ("compress", "convert", "inspect", "verify", "load", "diff")


def main() -> None:
    """Runs the `overwire` command. If a program calls it, it first waits for the program's background saves."""
    from ._order import await_all
    from .files import may_be_foreign
    from .paths import without_scheme

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
        sys.exit(130)  # Ctrl-C while the engine is loading


def _replace_process(module: str, words: list[str]) -> NoReturn:
    from ._children import module_command

    os.execv(sys.executable, module_command(module, *words))


def is_loaded() -> bool:
    """Returns whether the engine is loaded and the interpreter is not exiting."""
    return _loaded is not None and not isinstance(_loaded, _Exiting)


def forked() -> bool:
    """Returns whether this process was forked after the engine was loaded."""
    return _library is not None and bool((_loaded or _library).forked())


def refuse_child(what: str) -> None:
    """Raises ForkedError in a forked child. what: the message up to "the process that this one was forked from"."""
    if forked():  # check before taking a lock, because a thread of the parent may have held it during the fork
        from .errors import ForkedError

        raise ForkedError(f"{what} the process that this one was forked from")

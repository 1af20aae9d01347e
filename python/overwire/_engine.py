"""The engine as Python calls it: typed functions over the raw module `_core`.

Nothing here decides anything. The engine is loaded at the first call, which
starts Go's runtime and its threads; importing this module does not. Models and
jobs are numbers that are never used twice. Every function is safe to call from
any thread, runs without the GIL while it works or waits, and raises what
`overwire.errors` has for the engine's error classes.

After `fork` in a process that has loaded the engine, every call in the child
raises `ForkedError` at once; tensors that were there stay readable. When the
interpreter exits, running jobs are cancelled and given a moment to end.
"""

from __future__ import annotations

import _thread
import os
import sys

from ._environment import environment, told

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, ParamSpec, TypeVar

    P = ParamSpec("P")
    T = TypeVar("T")

    # What a capsule is to Python: nothing but something to hand on.
    Capsule = Any

__all__ = [
    "buffer_of",
    "call",
    "cli",
    "close_model",
    "convert_start",
    "device_prepare",
    "dlpack_give",
    "dlpack_take",
    "doctor",
    "empty_cache",
    "exporter",
    "fetch_start",
    "forked",
    "forked_error",
    "job_cancel",
    "job_capsules",
    "job_free",
    "job_gather",
    "job_next",
    "job_progress",
    "job_report",
    "job_take",
    "job_wait",
    "knobs",
    "load_settle",
    "load_start",
    "main",
    "model_info",
    "model_pin",
    "model_table",
    "open_model",
    "preload_start",
    "save_start",
    "verify_start",
]

# How long the exit of the process waits for cancelled jobs, and how long a
# preload that opens its files may keep Ctrl-C waiting, in milliseconds.
_EXIT_MS = 2000
_SLICE_MS = 50

_PREFIX = "overwire-fault:"

# OVERWIRE_LOG, as levels of logging.
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "silent": 100}

_lock = _thread.allocate_lock()
_loaded: Any = None  # the raw module, or what stands in for it


class _Forked:
    """Stands in for the module in a forked child, where Go must not be entered."""

    def __getattr__(self, name: str) -> Any:
        raise forked_error()


class _Exiting:
    """Stands in for the module while the interpreter exits."""

    def __init__(self) -> None:
        self._thread = _thread.get_ident()

    def __getattr__(self, name: str) -> Any:
        if _thread.get_ident() != self._thread:
            # A daemon thread. An exception would be printed while stderr is
            # torn down, which CPython answers with abort: it waits for the end.
            lock = _thread.allocate_lock()
            lock.acquire()
            lock.acquire()
        if name in ("api_CloseModel", "api_JobFree", "api_JobCancel", "api_GpuBatchFree", "api_GpuStreamFree"):
            return lambda *args: 1  # finalizers: it is all going away
        from . import errors

        raise errors.CancelledError("overwire: the interpreter is exiting")


def _core() -> Any:
    """The raw module, loaded when it is first needed."""
    return _loaded if _loaded is not None else _load()


def _load() -> Any:
    global _loaded
    with _lock:
        if _loaded is not None:
            return _loaded
        import atexit
        import json

        from . import _core as raw

        # From here on Go's threads exist.
        os.register_at_fork(after_in_child=_in_child)
        atexit.register(_at_exit)

        # Go sees the environment that the process started with, not os.environ:
        # it gets from here what its settings are called.
        names = {name for row in json.loads(raw.api_Knobs()) for name in (row["name"], *row.get("aliases", ()))}
        env = {k: told(v) for k, v in os.environ.items() if k in names or k.startswith("OVERWIRE_")}
        warnings = json.loads(raw.api_Setup(json.dumps(env)))
        level = next(row for row in json.loads(raw.api_Knobs()) if row["name"] == "OVERWIRE_LOG")
        if warnings or "from" in level:
            import logging

            log = logging.getLogger("overwire")
            if "from" in level:
                log.setLevel(_LEVELS[level["value"]])
            for warning in warnings:
                log.warning("%s", warning)
        _loaded = raw
        return raw


def _in_child() -> None:
    global _loaded, _lock
    _lock = _thread.allocate_lock()  # another thread may have held it
    _loaded = _Forked()


def _at_exit() -> None:
    global _loaded
    raw = _loaded
    if raw is not None and not forked():
        _loaded = _Exiting()
        raw.api_Shutdown(_EXIT_MS)


def _fault(error: RuntimeError) -> BaseException:
    """The exception that an error text of the engine names."""
    text = str(error)
    if not text.startswith(_PREFIX):
        return error
    import json

    from . import errors

    fields = json.loads(text[len(_PREFIX) :])
    kind = getattr(errors, fields["class"], errors.EngineError)
    made: BaseException = kind(
        fields["message"],
        source=fields.get("source"),
        tensor=fields.get("tensor"),
        chunk=fields.get("chunk"),
        offset=fields.get("offset"),
        **{name: fields[name] for name in ("asked", "free", "total") if name in fields},
    )
    return made


def _call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        fault = _fault(error)
        if fault is error:
            raise
    raise fault


def call(verb: str, text: str) -> str:
    """One verb of the engine that may wait, from its start to its result. Its name
    and text are those of the table in gosrc/bind/face/calls.go: JSON, mostly.

    Ctrl-C raises KeyboardInterrupt within 50 ms or so. The verb is cancelled then,
    what it had opened is closed, and memory that it was lent is no longer in use.
    """
    found: str = _call(_core().call, verb, text)
    return found


class _Job(int):
    """The number of a job, which ends with its last holder: it is cancelled, and what
    it was lent is no longer in use then."""

    __slots__ = ()

    def __del__(self) -> None:
        _finish("api_JobEnd", self)


class _Model(int):
    """The number of an open model, which its last holder closes."""

    __slots__ = ()

    def __del__(self) -> None:
        _finish("api_CloseModel", self)


def _finish(function: str, number: int) -> None:
    if number and _loaded is not None and not isinstance(_loaded, (_Forked, _Exiting)):
        try:
            getattr(_loaded, function)(number)
        except RuntimeError:
            pass  # a forked child, or an engine that has failed


def _own(kind: Callable[[Any], T], function: Callable[..., Any], *args: Any) -> T:
    """`kind(function(*args))` without a moment for a signal handler in between, in
    which a number would be nobody's: both calls are made by C."""
    found: T = _call(next, map(kind, map(function, *((arg,) for arg in args))))
    return found


def _handle(number: int) -> int:
    """A handle, checked: Go would take -1 for 2**64 - 1."""
    if type(number) in (int, _Job, _Model) and 0 < number < 1 << 64:
        return number
    from . import errors

    raise errors.ArgumentError(f"overwire: {number!r} is not a handle")


# Models.


def open_model(spec: str) -> int:
    """Open and index files: JSON {"uris": [...], "map": true | false | null,
    "lenient": bool, "keys": [...], "storage": {...}}."""
    return _own(_Model, _core().call, "open", spec)


def close_model(model: int) -> None:
    """Close a model; loads that run go on. A handle that is gone is no error."""
    _call(_core().api_CloseModel, _handle(model))


def model_table(model: int) -> list[tuple[str, str, tuple[int, ...], int, int, int, int]]:
    """Every tensor: (name, dtype, shape, bytes, stored bytes, source, alias or -1)."""
    table: list[tuple[str, str, tuple[int, ...], int, int, int, int]] = _call(_core().model_table, _handle(model))
    return table


def model_info(model: int) -> str:
    """JSON {"sources": [{"uri", "size", "metadata", "overwire"}]}."""
    text: str = _call(_core().api_ModelInfo, _handle(model))
    return text


def model_pin(model: int, options: str) -> int:
    """Start to bring a model's files into memory, where later loads find them;
    return the job. Fails while loads of the model run. JSON {"device", "threads"}."""
    number: int = _own(_Job, _core().api_ModelPin, _handle(model), options)
    return number


# Jobs.


def load_start(model: int, requests: bytes | None, options: str) -> int:
    """Start to load, return the job.

    `requests` has six native int64 a request: tensor, destination address (0:
    allocate), and the ranges lo0, hi0, lo1, hi1 of the first two dimensions
    (hi -1: to the end); None asks for every tensor, whole. A destination stays
    valid until the job has ended. `options` is JSON: {"threads": n}.
    """
    number: int = _own(_Job, _core().load_start, _handle(model), requests, options)
    return number


def load_settle(job: int, pairs: int, count: int, stream: int) -> None:
    """Tell a load where requests with the destination 1 land: `count` pairs of
    int64 at an address, request and place. What is queued on the stream now
    precedes what lands there."""
    _call(_core().api_LoadSettle, job, pairs, count, stream)


def device_prepare(name: str) -> None:
    """Begin to make a GPU ready for a load, without waiting."""
    _call(_core().api_DevicePrepare, name)


def job_wait(job: int, timeout: float | None) -> bool:
    """Wait for the end, `timeout` seconds at most; raise the job's error.

    True: ended. False: not yet. Ctrl-C raises KeyboardInterrupt within 50 ms
    and leaves the job running.
    """
    ended: bool = _call(_core().job_wait, _handle(job), timeout)
    return ended


def job_next(job: int, timeout: float | None, raw: bool = False) -> list[tuple[int, Capsule | None, int]]:
    """What has landed since the last call: (request, capsule, address).

    Waits for the first of it; [] when nothing will follow, or after `timeout`
    seconds. None stands for requests with a destination of their own, or
    handed out before. `raw` as in `job_take`. Raises the job's error when
    everything that landed before it was handed out.
    """
    landed: list[tuple[int, Capsule | None, int]] = _call(_core().job_next, _handle(job), timeout, raw)
    return landed


def job_take(job: int, raw: bool = False) -> list[tuple[Capsule | None, int]]:
    """After the end, for every request: (capsule, address).

    Capsules are "dltensor", owned by the caller; None as in `job_next`. With
    `raw` dtypes are those of unsigned integers of the same width.
    """
    landed: list[tuple[Capsule | None, int]] = _call(_core().job_take, _handle(job), raw)
    return landed


def job_capsules(job: int) -> tuple[list[Capsule | None], list[int]]:
    """`job_take` as columns: the capsules, and the positions of those that are
    None: without a capsule, or without bytes."""
    columns: tuple[list[Capsule | None], list[int]] = _call(_core().job_capsules, _handle(job), False)
    return columns


def job_gather(job: int, timeout: float | None) -> tuple[list[Capsule], list[int]] | None:
    """`job_next` as columns: capsules and their positions, of what has a capsule
    and bytes; None when nothing will follow, or after `timeout` seconds."""
    columns: tuple[list[Capsule], list[int]] | None = _call(_core().job_gather, _handle(job), timeout, False)
    return columns


def job_progress(job: int) -> tuple[int, int, int, int]:
    """Bytes done, bytes in all, tensors done, tensors in all."""
    text: str = _call(_core().api_JobProgress, _handle(job))
    done, total, tensors, all_tensors = map(int, text.split())
    return done, total, tensors, all_tensors


def job_report(job: int) -> str:
    """What the job says of itself: JSON, "null" before it has something to say."""
    text: str = _call(_core().api_JobReport, _handle(job))
    return text


def job_cancel(job: int) -> None:
    """Ask a job to stop. Its memory is at rest when `job_wait` says it has ended."""
    _call(_core().api_JobCancel, _handle(job))


def job_free(job: int) -> None:
    """Forget a job: cancelled if it runs, tensors not taken are freed.

    A preload goes on. A handle that is gone is no error.
    """
    _call(_core().api_JobFree, _handle(job))


def save_start(spec: str, tensors: list[tuple[str, str, tuple[int, ...], int, int]]) -> int:
    """Start to write tensors (name, dtype, shape, address, bytes), return the job.

    The memory stays alive and unchanged until the job has ended. `spec` is the
    JSON of save.Spec: {"path", "metadata", "compress", "parts", "shard", ...}, and
    "cuda": for each tensor 1 + the GPU that its address is of, or 0.
    """
    number: int = _own(_Job, _core().save_start, spec, tensors)
    return number


def convert_start(spec: str) -> int:
    """Start to rewrite files: JSON {"uris": [...]} and the fields of save.Spec."""
    number: int = _own(_Job, _core().api_ConvertStart, spec)
    return number


def verify_start(spec: str) -> int:
    """Start to prove files: JSON {"uris": [...]}; see `job_report`."""
    number: int = _own(_Job, _core().api_VerifyStart, spec)
    return number


def fetch_start(spec: str) -> int:
    """Start to write the bytes of JSON {"uris": [...], "storage": {...}, "most": n, "from", "to"} to its open file "fd"."""
    number: int = _own(_Job, _core().api_FetchStart, spec)
    return number


# Preloads.


def preload_start(spec: str) -> int:
    """Start a preload: JSON {"uris": [...], "map", "threads"}, return its job.

    The files are opened by the engine too: this returns at once. `job_wait`,
    `job_progress` and `job_cancel` work on the job; its tensors go to the loads
    that join it.
    """
    number: int = _call(_core().api_PreloadStart, spec)
    return number


# Memory of other objects.


def buffer_of(source: Any, writable: bool = False) -> tuple[int, int, Any]:
    """The memory of a C-contiguous buffer: (address, bytes, holder).

    It stays while the holder lives. Raises what the object raises: TypeError,
    BufferError.
    """
    found: tuple[int, int, Any] = _raw().buffer_of(source, writable)
    return found


def dlpack_take(
    capsule: Any,
) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, tuple[int, int, int], tuple[int, int], Any]:
    """Take over a "dltensor" capsule: (address, shape, strides in elements,
    (code, bits, lanes), (device type, device), holder). ValueError for others."""
    found: tuple[int, tuple[int, ...], tuple[int, ...] | None, tuple[int, int, int], tuple[int, int], Any]
    found = _raw().dlpack_take(capsule)
    return found


def dlpack_give(
    owner: Any,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    kind: tuple[int, int, int],
    device: tuple[int, int],
) -> Any:
    """A new "dltensor" capsule of memory that lives as long as owner, which it keeps."""
    return _raw().dlpack_give(owner, address, shape, strides, kind, device)


def exporter() -> type:
    """A base class whose instances are buffers: those of what their method
    `_buffer()` returns."""
    kind: type = _raw().Exporter
    return kind


def _raw() -> Any:
    """The module for what enters no Go: usable in forked children and at exit."""
    _ = _core()
    from . import _core as raw

    return raw


# The rest.


def empty_cache() -> None:
    """Give back device and pinned memory that is only kept for the next load."""
    _call(_core().api_EmptyCache)


def doctor(measure: bool = False) -> str:
    """What the engine finds on this machine, as JSON."""
    return call("doctor", _program(["--measure"] if measure else []))


def knobs() -> str:
    """The table of settings with their present values, as JSON."""
    text: str = _call(_core().api_Knobs)
    return text


def _program(argv: Sequence[str]) -> str:
    """What the command line of the engine must know of this process."""
    import json

    version = "%d.%d.%d" % sys.version_info[:3]
    about: dict[str, Any] = {"argv": [told(word) for word in argv], "python": sys.executable or "", "version": version}
    if any("://" in word for word in argv):
        about["storage"] = {"env": environment()}
    named = {word.rpartition("env:")[2] for word in argv if "env:" in word}
    about["secrets"] = {name: told(os.environ[name]) for name in named if name in os.environ}
    return json.dumps(about)


def cli(argv: Sequence[str]) -> int:
    """Run the command line, without the program's name; return the exit code.

    The engine writes to the descriptors 1 and 2. Ctrl-C cancels, waits for the
    clean-up and gives 130.
    """
    import json

    sys.stdout.flush()
    sys.stderr.flush()
    job: int = _own(_Job, _core().api_CliStart, _program(argv))
    try:
        job_wait(job, None)
        code: int = json.loads(job_report(job))
        return code
    except KeyboardInterrupt:
        job_cancel(job)
        from . import errors

        try:
            job_wait(job, 30.0)  # of a busy machine; a second Ctrl-C ends it
        except (errors.OverwireError, KeyboardInterrupt):
            pass  # its own words for having been cancelled, or a second Ctrl-C
        return 130
    finally:
        job_free(job)


def main() -> None:
    """The command `overwire`."""
    try:
        sys.exit(cli(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # while the engine was being loaded


def forked() -> bool:
    """Whether this is a child of a process that had loaded the engine."""
    if isinstance(_loaded, (_Forked, _Exiting)):
        return isinstance(_loaded, _Forked)
    return _loaded is not None and bool(_loaded.forked())


def forked_error() -> BaseException:
    """What every call raises in such a child."""
    from . import errors

    return errors.ForkedError(
        "overwire: this process was forked from one that had started the engine, and cannot use it; "
        "use the spawn or forkserver start method, or fork before the first call"
    )

"""Runs saves in the background, and defines the report of a save."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .. import _verbs
from .._engine import HandleOwner, refuse_child
from .._imports import start_thread
from .._order import Saver
from .._order import lock as _lock
from .._undo import after_error, keep_error, pass_error_to
from ..errors import ArgumentError, CancelledError, DeadlineError
from ..jobs import Job, log, shown, time_limit
from ..progress import Progress, spell_count


@dataclass(frozen=True)
class Report:
    """The result of a save.

    bytes_in, bytes_out: bytes of the tensors, and of the files with them. bytes_copied: bytes of the files in `copied`.
    ratio: bytes_out / bytes_in, or 1.0 if there are no tensors.
    seconds: wall time.
    stages: seconds of each stage, summed over concurrent threads: "plan" (samples of the tensors, ties, memory for the
        save), "read" (bytes of files and GPU memory), "encode" (by the host, or waiting for a GPU), "hash" (checksums
        and hashes by the host), "write" (to a store, or to files until they are on the disk; with wait=False first to
        memory) and "publish" (names of the files).
    compressed, aliases: the number of tensors stored compressed, and of tensors stored as a reference to another's
        bytes (tied or identical).
    files: absolute paths, or URIs, in the order in which they were written, an index.json last.
    copied: files next to the weights of a converted folder, which were copied unchanged.
    left: files of a converted folder that were not copied: weights that do not belong to the model (if they are not
        safetensors, only files of 64 MiB and more), hidden files, and links that lead out of the folder, except to the
        blobs of its Hugging Face cache. Also lists objects in a torch.save file that are not tensors, and
        `save_model`'s extra states that are not tensors.
    originals: for `convert`, the SHA-256 (hex) of each plain file, by file name. For a compressed file, this is the
        hash of its source, which it stores; for a restored plain file, the hash of the file itself. It is "" if the
        source came over a network or was not hashed (`sha256=False`), or if the compressed file stores no hash.
    on_gpu: the part of bytes_in that was encoded on the tensors' GPU. The host encodes the rest.
    staged: with wait=False, the seconds until the caller may change the tensors; otherwise 0.
    anew: plain files made from compressed files that cannot restore the original file. The tensors are the same, but
        the header is new.
    """

    __module__ = "overwire"

    bytes_in: int
    bytes_out: int
    ratio: float
    seconds: float
    tensors: int
    compressed: int
    aliases: int
    files: tuple[str, ...]
    left: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    originals: Mapping[str, str] = field(default_factory=dict, hash=False)
    anew: tuple[str, ...] = ()
    on_gpu: int = 0
    staged: float = 0.0
    bytes_copied: int = 0
    stages: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        return (
            f"Report({spell_count(self.tensors, 'tensor')}, {self.compressed} compressed, "
            f"in {spell_count(len(self.files), 'file')}: bytes_in={self.bytes_in}, "
            f"bytes_out={self.bytes_out}, ratio={self.ratio:.4f}, seconds={self.seconds:.3f})"
        )

    def _repr_html_(self) -> str:
        from .. import _notebook as html

        facts = [
            ("tensors", f"{self.tensors:,}"), ("compressed", f"{self.compressed:,}"), ("in", html.size(self.bytes_in)),
            ("out", html.size(self.bytes_out)), ("ratio", f"{self.ratio:.3f}"), ("seconds", f"{self.seconds:.2f}"),
            *((f"  {name}", f"{seconds:.2f}") for name, seconds in self.stages.items()),
        ]  # fmt: skip
        columns = ("file", "SHA-256 of the original") if self.originals else ("file",)
        rows = ((file, self.originals.get(file, ""))[: len(columns)] for file in self.files)
        tables = [html.table("Files written", columns, rows, len(self.files))]
        if self.left:
            tables.append(html.table("Not copied", ("file",), ((f,) for f in self.left), len(self.left)))
        return html.block("Report", facts, *tables)

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Report:
        """Makes a report from the engine's JSON."""
        fields = dict(report)
        for name in ("ratio", "seconds"):
            fields[name] = float(fields[name])
        for name in ("files", "left", "copied", "anew"):
            fields[name] = tuple(fields.get(name) or ())
        fields["originals"] = {one["file"]: one["sha256"] for one in fields.get("originals") or ()}
        stages: Mapping[str, int] = fields.get("stages") or {}
        fields["stages"] = {name.removesuffix("_ns"): count / 1e9 for name, count in stages.items()}
        return cls(**fields)


class After(NamedTuple):
    """Functions that a background save calls in its thread: `then` when its files are complete, `undo` after an error
    of the save or of `then`, and always `over` at the end. The caller calls `on_start` before that thread starts."""

    then: Callable[[Report], None] | None
    undo: Callable[[], None]
    over: Callable[[], None]
    on_start: Callable[[Saving], None]


class Saving(HandleOwner, Saver):
    """A save that writes its files in the background; see `save_file(wait=False)`. The tensors may already change.
    Threads may share this object.

    All files appear atomically when they are complete. An error is logged, and raised by `wait` or by the next save to
    the path. When the interpreter exits, it first waits for the save. If a save is cancelled or killed, the old files
    stay.
    """

    __module__ = "overwire"

    def __init__(self, paths: list[str], is_sharded: bool) -> None:
        super().__init__(paths, is_sharded)
        #: The path or URI to which the tensors are saved.
        self.path = paths[0]
        self._job: Job | None = None
        self._ended = threading.Event()
        self._report: Report | None = None
        self._left: tuple[str, ...] = ()  # for `Report.left`
        self._error: BaseException | None = None
        self._cancelled = False
        self._seen = Progress(0, 0, 0, 0)

    def __repr__(self) -> str:
        state = "running"
        if self._ended.is_set():
            state = "complete" if self._error is None else f"failed: {self._error}"
        return f"Saving({shown(self.path)!r}, {state})"

    def shown_path(self) -> str:
        """Returns the path without credentials."""
        return shown(self.path)

    def done(self) -> bool:
        """Returns whether the save has ended, with or without an error. Raises ForkedError in a forked child, if the
        save was running when the process forked."""
        self._refuse_child("done")
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Report:
        """Waits until the files are complete, and returns the report.

        timeout: seconds after which DeadlineError is raised. The save then continues.

        Each call raises the save's error (IOFailure, AccessError, CancelledError ...). Raises ForkedError in a forked
        child. Ctrl-C ends the wait, not the save.
        """
        self._refuse_child("wait")
        time_limit(timeout)
        if not self._ended.is_set() and not self._ended.wait(timeout):
            raise DeadlineError(f"overwire: save {shown(self.path)}: not done within {timeout} s; it continues")
        self.forget_saver()
        if self._error is not None:
            raise self._error
        report = self.report
        assert report is not None
        return report

    def cancel(self) -> bool:
        """Stops the save unless it is complete, and waits for its end. Returns whether the save was stopped. If so,
        `wait` raises CancelledError, and the old files are unchanged."""
        self._refuse_child("cancel")
        with _lock:
            job = None if self._ended.is_set() else self._job
            self._cancelled = self._cancelled or job is not None
        if job is not None:
            with contextlib.suppress(ArgumentError):  # the job has just ended
                _verbs.cancel(job.number)
        if not self._ended.is_set():
            self._ended.wait()
        self.forget_saver()
        return isinstance(self._error, CancelledError)

    def progress(self) -> Progress:
        """Returns the numbers of bytes and tensors, written and in total. Raises ForkedError in a forked child, if the
        save was running when the process forked."""
        self._refuse_child("progress")
        if not self._ended.is_set() and self._job is not None:
            with contextlib.suppress(ArgumentError):  # the job has just ended
                self._seen = self._job.progress()
        return self._seen

    @property
    def report(self) -> Report | None:
        """The report, or None until the save is complete and after an error."""
        if self._left and self._report is not None:
            self._report, self._left = replace(self._report, left=self._left), ()
        return self._report

    def _refuse_child(self, what: str) -> None:
        if not self._ended.is_set():
            refuse_child(f"overwire: Saving.{what}: the save runs in")

    def _run_saving(self, after: After) -> None:
        # Runs in a thread of its own.
        assert self._job is not None
        self._thread = threading.get_ident()
        failure = keep_error()
        try:
            with failure:
                with contextlib.ExitStack() as stack:
                    stack.callback(after.over)
                    stack.enter_context(after_error(self._undo_files, after))
                    with self._job as job:
                        report = Report.of(job.finish())
                    if after.then is not None:
                        if self._cancelled:
                            raise CancelledError(f"overwire: save {shown(self.path)}: cancelled")
                        self._is_publishing = True
                        after.then(report)
                self._report = report
                self._seen = Progress(report.bytes_in, report.bytes_in, report.tensors, report.tensors)
            self._error = failure.error
            if self._error is not None and not isinstance(self._error, CancelledError):
                log.error("a save in the background has failed: %s", self._error)
        finally:
            self._thread = 0
            self._ended.set()
            if self._error is None or isinstance(self._error, CancelledError):
                self.forget_saver()

    def _undo_files(self, after: After) -> None:
        self._is_publishing = True
        after.undo()

    def _end_unstarted(self, after: After, error: BaseException) -> None:
        try:
            after.undo()
        finally:
            after.over()
            self._error = error
            self._ended.set()
            self.forget_saver()


def begin(
    path: str, start: Callable[[], Job], after: After, *, key: str | None = None, is_sharded: bool = False
) -> Saving:
    """Starts a save in the background when earlier saves to the same path have ended. Returns when the tensors may
    change. start: starts the job. key: the path of the bundle or checkpoint to which `path` belongs. is_sharded:
    whether `path` names a set of shards."""
    saving = Saving([key, path] if key else [path], is_sharded)
    with pass_error_to(saving._end_unstarted, after):
        saving.claim_paths()
        saving._job = start()
        with after_error(saving._job.abandon):
            while saving._job.next(0.1) is None:
                pass
    saving._thread = 0
    after.on_start(saving)
    try:
        start_thread(threading.Thread(target=saving._run_saving, args=(after,), name="overwire saving").start)
    except RuntimeError:  # the interpreter exits
        saving._run_saving(after)
    return saving

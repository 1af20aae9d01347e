"""Preloads models: the engine loads them while Python does other things.

A preload starts with a call of `preload`, or when overwire is imported and OVERWIRE_PRELOAD is set (for nyacomp's
drop-in: PRELOAD_PATH). Loads of the same files join the preload and take its tensors. Each tensor can be taken once.
When such a load ends, the remaining tensors of its files are freed. Tensors of other files are freed when the process
exits.

A load gets the same bytes that it would read itself. It opens its files, and the engine compares each of them with the
preloaded file, by device, inode, size and times (objects in stores by ETag or date). If a file was replaced or written
to, or if the load needs other tensors (on another GPU, or read or mapped differently), the preload is dropped with a
warning in the log. The load then reads the files itself. It also does this if the preload has failed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

from .. import _engine, _verbs
from .._engine import HandleOwner, core, release
from .._environment import adopt_nyacomp, truth
from .._imports import skip_at_exit
from .._tables import SETTINGS
from ..bundles.manifest import Manifest, uris_of
from ..errors import ArgumentError, DeadlineError, FormatError, NotFoundError, NotSupportedError
from ..frameworks.choose import check_device, device_number, frame_for
from ..jobs import check_wait, log, progress_of, shown
from ..model.joining import started
from ..model.sourcelike import SourceLike
from ..model.sources import resolve
from ..model.storage import storage
from ..model.storageoptions import StorageOptions
from ..progress import Progress

if TYPE_CHECKING:
    from .._requests import FormatAccess


class Preload(HandleOwner):
    """A running preload, which `preload` begins. Dropping the object does not stop the preload."""

    __module__ = "overwire"

    def __init__(self, path: str, uris: list[str], device: str, reach: FormatAccess | None = None) -> None:
        if not (isinstance(uris, list) and all(isinstance(text, str) for text in (path, device, *uris))):
            why = "expected a path, a list of URIs and a device: call preload() instead"
            raise ArgumentError(f"overwire: Preload: {why}")
        #: The path or URI that was passed to `preload`.
        self.path = path
        #: The files that are read.
        self.uris = uris
        #: The device of the tensors: "cpu" or "cuda:N".
        self.device = device
        self._job = _verbs.preload({"uris": uris, "device": device, "storage": reach or {}})
        started()

    def __repr__(self) -> str:
        return f"Preload({self.path!r})"

    @skip_at_exit
    def __del__(self) -> None:
        # Frees only the handle, and the preload continues. The attribute is missing if the constructor has failed.
        if (job := getattr(self, "_job", None)) is not None:
            release(job)

    def progress(self) -> Progress:
        """Returns the numbers of bytes and tensors, loaded and in total. The totals are 0 until the files are open."""
        return progress_of(self._job)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds. Returns whether all tensors are in memory. Raises the preload's error."""
        check_wait(timeout)
        has_ended: bool = core().wait(self._job, timeout)
        return has_ended

    def result(self, timeout: float | None = None) -> None:
        """Waits like `wait`, but raises DeadlineError after the timeout."""
        if not self.wait(timeout):
            raise DeadlineError(f"overwire: preload {self.path}: not done in {timeout} s", source=self.path)

    def cancel(self) -> None:
        """Stops the preload and frees its tensors, except those of files that a load uses. Later loads read the
        files again."""
        _verbs.cancel(self._job)


def preload(source: SourceLike, *, device: Any = "cpu", storage_options: StorageOptions | None = None) -> Preload:
    """Starts to load a model in the engine's threads, without the GIL, and returns immediately. torch need not be
    imported.

    source: as for `load_file`, except an open file; or a bundle's pickle or meta.csv. `load_file`, `stream`,
        `safe_open`, `load_model`, `load_compressed*` and the compat modules use the preload, even if they need only
        some of its files or name them by another path. `load_file` with group does not use it.
    device: "cpu" (or "host") loads to host memory, without CUDA, for programs that fork. A load to a GPU then copies
        the tensors. Tensors of plain files are mapped, so it copies them from the page cache. "cuda:1" loads to that
        GPU, for loads to the same GPU. "cuda" is torch's current GPU. Before torch is imported, it is the GPU that
        LOCAL_RANK, SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK or MPI_LOCALRANKID names, or the first GPU if none of
        these is set or if CUDA_VISIBLE_DEVICES names a single GPU. Bundles are preloaded only to the host.
    storage_options: as for `load_file`. Only loads with the same options use the preload.

    Each tensor can be taken once. A `safe_open` that needs a tensor again reads it from the file. If a file was saved
    just before, the preload waits 40 ms (2 s if file times have whole seconds), so that later changes of the file can
    be detected.

    Raises NotFoundError, FormatError, NotSupportedError for a pickle or meta.csv that names no container, and
    ArgumentError if the source is neither a file nor a folder. `wait` raises later errors, and loads then read the
    files themselves. `wait` raises NotSupportedError for an object of a server that reports neither an ETag nor a date,
    because no load could compare the object.
    """
    target = _device_of(device)
    if hasattr(source, "read"):
        raise ArgumentError("overwire: preload: an open file cannot be preloaded: pass its path")
    paths, _ = resolve(source)
    for path in paths:
        _refuse_special(path)
    uris = [uri for path in paths for uri in uris_of(path, storage_options)]
    if target != "cpu" and any(path.endswith((".pkl", ".pth", ".csv")) for path in paths):
        names = ", ".join(map(shown, paths))
        raise NotSupportedError(f"overwire: preload {names}: bundles are preloaded to the host only")
    return Preload(", ".join(map(shown, paths)), uris, target, storage(storage_options, uris))


def _refuse_special(path: str) -> None:
    # Reading a FIFO or a device may never end.
    with contextlib.suppress(OSError):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ArgumentError(f"overwire: preload {path}: not a regular file", source=path)


def _refuse_other_kinds(path: str) -> None:
    # Without this check, a variable that names a file of another kind would silently have no effect.
    if path.endswith((".pkl", ".pth", ".csv", ".json")) or not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        start = file.read(9)
    if start[8:] != b"{" and not start.startswith(b"|TZR|"):
        raise FormatError(f"overwire: preload {path}: not a safetensors, overwire or tensorizer file", source=path)


# The variables with the number of this process on its machine.
_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def _device_of(device: Any) -> str:
    if device == "host":
        return "cpu"
    number = device_number(device)
    if number == -1 and "torch" not in sys.modules:
        number = _local_rank()
    return f"cuda:{number}" if number >= 0 else check_device(device, None if number == -2 else frame_for("torch"))


def _local_rank() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible and "," not in visible:
        return 0
    for name in _RANKS:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0


def _is_child() -> bool:
    """Returns whether multiprocessing has started this process, as a worker that imports the program again or as the
    server that forks workers. Each such process would preload the whole model."""
    if any(arg == "--multiprocessing-fork" or "from multiprocessing.forkserver import" in arg for arg in sys.orig_argv):
        return True
    if (process := sys.modules.get("multiprocessing.process")) is None:
        return False
    return process.parent_process() is not None or hasattr(process.current_process(), "_inheriting")


def honour_nyacomp() -> None:
    """Turns nyacomp's variables into settings when its drop-in is imported, and starts the preload of PRELOAD_PATH
    unless OVERWIRE_PRELOAD is set. If the engine has already started, a warning names the variables that have no
    effect."""
    adopt_nyacomp()
    late = sorted(name for name in SETTINGS if not name.startswith("OVERWIRE_") and os.environ.get(name))
    if _engine._loaded is not None and late:
        log.warning("overwire: %s: no effect, because overwire was used before nyacomp was imported", ", ".join(late))
    is_named = os.environ.get("PRELOAD_PATH") and not os.environ.get("OVERWIRE_PRELOAD")
    if is_named and not any(map(truth, ("NO_PRELOAD", "LOAD_UNCOMPRESSED"))):
        start_from_environment("PRELOAD_PATH")


def start_from_environment(name: str = "OVERWIRE_PRELOAD") -> None:
    """Starts the preload that the variable `name` asks for, when overwire is imported. Never raises an error. If the
    path is wrong, a warning is logged here, and the load raises the error.

    Ranks of torchrun preload, but processes that multiprocessing starts do not. vLLM's first process also does not
    preload, because it forks a child that loads the model, and the engine cannot run in the child if it has started in
    the parent. With VLLM_ENABLE_V1_MULTIPROCESSING=0, the first process loads the model itself, and preloads.
    OVERWIRE_NO_PRELOAD turns preloads off.
    """
    is_launcher = "vllm.plugins" in sys.modules and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") != "0"
    if truth("OVERWIRE_NO_PRELOAD") or _is_child() or is_launcher:
        return
    path = os.environ[name]
    if "://" not in path:
        path = os.path.abspath(path)
    try:
        if "://" not in path and not os.path.exists(path) and not path.endswith(".csv"):
            raise NotFoundError(f"overwire: open {path}: not found", source=path)
        _refuse_special(path)
        _refuse_other_kinds(path)
        if "://" not in path and path.endswith(".csv"):
            Manifest.read_csv(path).refuse_urls()
        preload(path, device=os.environ.get("OVERWIRE_PRELOAD_DEVICE") or "cpu")
    except Exception as error:  # an import must not fail because of a preload
        log.warning("overwire: %s=%s: nothing is preloaded: %s", name, shown(os.environ[name]), error)

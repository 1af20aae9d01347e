"""Keeps models in pinned host memory, and frees the memory and files that the engine caches or keeps open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

from .. import _verbs
from .._engine import HandleOwner, is_loaded, refuse_child
from .._undo import after_error
from ..errors import ArgumentError, DeadlineError
from ..frameworks.choose import check_device, frame_for
from ..jobs import Job, time_limit
from ..model.opened import Model
from ..model.options import (
    ArrayName,
    BytesName,
    DeviceLike,
    FrameworkName,
    PinnedOptions,
    TorchName,
    check_options,
    spell_out,
)
from ..model.sourcelike import SourceLike
from ..progress import ProgressLike, watch
from .load import load_file
from .stream import stream

if TYPE_CHECKING:
    import numpy
    import torch
    from typing_extensions import Unpack


def empty_cache() -> None:
    """Frees memory that the engine has cached for later calls: about 112 MiB for each GPU that was used, at most 128
    MiB of small tensors that were dropped, and the pinned memory of the last `sleep` of each GPU, or of its last save
    with wait=False. The call first waits for the work that uses this memory. The memory of running loads, of tensors
    and of pinned models is not freed. The next load to a GPU allocates its memory again, which takes about 50 ms.

    Does nothing if no GPU was used. Raises DeviceError for a lost device.
    """
    _verbs.empty_cache()


def quiesce(*, timeout: float | None = None) -> None:
    """Frees everything that the engine holds outside the process's own memory, for example before CRIU writes a
    snapshot of the process: GPU memory, registered host memory, connections and open files. Also frees the memory that
    `empty_cache` frees, and drops preloads. The call first waits for running calls and background saves.

    timeout: seconds after which DeadlineError is raised; None: never.

    Later calls work as before, even in a restored process. The next load to a GPU allocates its memory again, which
    takes about 50 ms. GPU contexts, and the epoll descriptor and control group files of Go's runtime, stay open.

    Raises DeadlineError if calls still run after the timeout. In this case only preloads and cached host memory are
    freed. Raises ArgumentError if the program itself still holds open models (`safe_open`, `pin`, `sleep`) or similar
    objects. In this case everything else is freed. Also raises DeviceError for a lost device. Does nothing if the
    engine has not been used.
    """
    end = time_limit(timeout)
    if not is_loaded():
        return
    refuse_child("overwire: quiesce: the engine belongs to")
    while (state := _verbs.quiesce(50))["running"]:  # short waits, so that Ctrl-C takes effect
        if end is not None and time.monotonic() >= end:
            running = ", ".join(sorted(set(state["running"])))
            raise DeadlineError(f"overwire: quiesce: calls still run after the timeout: {running}")
    if state["held"]:
        raise ArgumentError(f"overwire: quiesce: the program still holds {', '.join(state['held'])}: close them first")


class Pinned(HandleOwner):
    """A model with its stored bytes in host memory; see `pin`. The object is a context manager that ends with
    `release`.

    You can pass it to `load_file`, `stream`, `load_model` and `safe_open` instead of a path. Threads may share it.
    """

    __module__ = "overwire"

    def __init__(self, source: SourceLike, device: str, progress: ProgressLike) -> None:
        watcher = watch(progress, "pin")
        model = Model(source, False)
        with after_error(model.close):
            model.alone()
            with Job(_verbs.pin({"device": device}, model.handle), "pin", watcher) as job:
                job.wait()
            #: Bytes of host memory, the same as the size of the files.
            self.nbytes: int = sum(part["size"] for part in model.info())
        self._model: Model | None = model
        #: The files, as the caller named them.
        self.uris: list[str] = model.uris

    def shared_model(self) -> Model:
        """Returns the open model, for the functions of this package."""
        model = self._model
        if model is None:
            raise ArgumentError("overwire: the pinned model was released")
        return model

    @overload
    def load_file(
        self, device: DeviceLike = "cpu", *, framework: TorchName | None = None, **options: Unpack[PinnedOptions]
    ) -> dict[str, torch.Tensor]: ...

    @overload
    def load_file(
        self, device: DeviceLike = "cpu", *, framework: ArrayName, **options: Unpack[PinnedOptions]
    ) -> dict[str, numpy.ndarray[Any, Any]]: ...

    @overload
    def load_file(
        self, device: DeviceLike = "cpu", *, framework: BytesName, **options: Unpack[PinnedOptions]
    ) -> dict[str, memoryview]: ...

    @overload
    def load_file(
        self, device: DeviceLike = "cpu", *, framework: FrameworkName | None, **options: Unpack[PinnedOptions]
    ) -> dict[str, Any]: ...

    def load_file(self, device: Any = "cpu", *, framework: Any = None, **options: Any) -> dict[str, Any]:
        """Calls `overwire.load_file` for this model. options: dtype, keys, filter, progress."""
        check_options("load_file", options, PinnedOptions)
        return load_file(self, device, framework=framework, **options)

    @overload
    def stream(
        self, device: DeviceLike = "cpu", *, framework: TorchName | None = None, **options: Unpack[PinnedOptions]
    ) -> Iterator[tuple[str, torch.Tensor]]: ...

    @overload
    def stream(
        self, device: DeviceLike = "cpu", *, framework: ArrayName, **options: Unpack[PinnedOptions]
    ) -> Iterator[tuple[str, numpy.ndarray[Any, Any]]]: ...

    @overload
    def stream(
        self, device: DeviceLike = "cpu", *, framework: BytesName, **options: Unpack[PinnedOptions]
    ) -> Iterator[tuple[str, memoryview]]: ...

    @overload
    def stream(
        self, device: DeviceLike = "cpu", *, framework: FrameworkName | None, **options: Unpack[PinnedOptions]
    ) -> Iterator[tuple[str, Any]]: ...

    def stream(self, device: Any = "cpu", *, framework: Any = None, **options: Any) -> Iterator[tuple[str, Any]]:
        """Calls `overwire.stream` for this model. options: dtype, keys, filter, progress."""
        check_options("stream", options, PinnedOptions)
        return stream(self, device, framework=framework, **options)

    def release(self) -> None:
        """Frees the memory when running loads have ended. Loaded tensors stay valid. A second call does nothing."""
        model, self._model = self._model, None
        if model is not None:
            model.close()

    def __repr__(self) -> str:
        return f"Pinned({', '.join(self.uris)!r}, {self.nbytes} bytes{'' if self._model else ', released'})"

    def __enter__(self) -> Pinned:
        self.shared_model()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


for _verb in (Pinned.load_file, Pinned.stream):
    spell_out(_verb, PinnedOptions)


def pin(source: SourceLike, *, device: DeviceLike | None = None, progress: ProgressLike = None) -> Pinned:
    """Reads the stored bytes of a model into host memory, and keeps them there until `release`. The model can then be
    loaded repeatedly without the disk or network. Compressed files take about two thirds of the tensors' bytes.

        with ow.pin("model.safetensors", device="cuda") as pinned:
            weights = pinned.load_file(device="cuda")

    A GPU copies the bytes at the full rate of its link, and decodes them. This call compares every checksum, and later
    loads do not compare them again.

    source: as for `load_file`, local or remote. The files may be changed or deleted afterwards.
    device: a GPU ("cuda", "cuda:1") with which to register the memory now. By default the first load to a GPU registers
        the memory for all GPUs, at about 35 GB/s. Until then CUDA is not used, and the memory is not pinned.
    progress: as for `load_file`, but counts bytes of the files.

    Returns a `Pinned`. Raises the errors of `load_file`. After an error no memory is kept.
    """
    kind = "cpu" if device is None else check_device(device, None if device == "cpu" else frame_for("torch"))
    return Pinned(source, kind, progress)

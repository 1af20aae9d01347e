"""Memory that the engine keeps: models pinned in host memory, and what it holds
for the next load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

from .. import _verbs
from .._engine import HandleOwner
from ..errors import ArgumentError
from ..frameworks.choose import check_device, frame_for
from ..jobs import Job
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
from ..model.sources import SourceLike
from ..progress import ProgressLike, watch
from .load import load_file
from .stream import stream

if TYPE_CHECKING:
    import numpy
    import torch
    from typing_extensions import Unpack


def empty_cache() -> None:
    """Frees the device and pinned memory that the engine keeps for the next load: about
    112 MiB for each GPU that was used, and at most 128 MiB of dropped small tensors; and
    the pinned memory that the last `sleep`, or save with wait=False, of each GPU had.
    It waits for the work that uses that memory. Running loads, tensors in use and
    pinned models keep theirs. The next load to a GPU allocates it again, which takes
    about 50 ms.

    Does nothing if no GPU was used. Raises DeviceError for a lost device.
    """
    _verbs.empty_cache()


class Pinned(HandleOwner):
    """A model whose files are kept in host memory as they are stored, compressed: see
    `pin`. A context manager that ends with `release`.

    `load_file`, `stream`, `load_model` and `safe_open` take it in place of a path.
    Threads may share it.
    """

    __module__ = "overwire"

    def __init__(self, source: SourceLike, device: str, progress: ProgressLike) -> None:
        watcher = watch(progress, "pin")
        model = Model(source, False)
        try:
            model.alone()
            with Job(_verbs.pin({"device": device}, model.handle), "pin", watcher) as job:
                job.wait()
            #: Bytes of host memory: what the files have.
            self.nbytes: int = sum(part["size"] for part in model.info())
        except BaseException:
            model.close()
            raise
        self._model: Model | None = model
        #: The files as they were named.
        self.uris: list[str] = model.uris

    def shared_model(self) -> Model:
        """For the verbs of this package: the model that they all share."""
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
        """`overwire.load_file` of this model. options: dtype, keys, filter, progress."""
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
        """`overwire.stream` of this model. options: dtype, keys, filter, progress."""
        check_options("stream", options, PinnedOptions)
        return stream(self, device, framework=framework, **options)

    def release(self) -> None:
        """Frees the memory, once running loads have ended. Loaded tensors stay valid. A
        second call does nothing."""
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
    """Reads a model's files into host memory as they are stored, and keeps them until
    `release`: to load the model again and again without disk or network. Compressed
    files take about two thirds of the tensors' bytes.

        with ow.pin("model.safetensors", device="cuda") as pinned:
            weights = pinned.load_file(device="cuda")

    A GPU copies from this memory at the full rate of its link, and decodes. Every
    checksum is compared once, here, and not again by later loads.

    source: as for `load_file`, local or remote. The files may be changed or deleted
        afterwards.
    device: a GPU ("cuda", "cuda:1") to register the memory with now. None: the first
        load to a GPU registers it, once for all GPUs, at about 35 GB/s; until then
        CUDA is not used, and without a GPU the memory is ordinary.
    progress: as for `load_file`; its bytes are those of the files.

    Returns a `Pinned`. Raises what `load_file` raises: CorruptError names tensor, chunk
    and offset; OutOfMemoryError and DeviceError leave nothing behind.
    """
    where = "cpu" if device is None else check_device(device, None if device == "cpu" else frame_for("torch"))
    return Pinned(source, where, progress)

"""load_file: whole tensors in a dict."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, overload

from .. import _engine
from ..frameworks.choose import check_device, check_dtype, frame_for
from ..model.opened import Model, many_objects, opening, prepare
from ..model.options import ArrayName, BytesName, DeviceLike, FrameworkName, LoadOptions, TorchName, check_options
from ..model.plan import fit
from ..model.sources import SourceLike, named
from ..progress import watch

if TYPE_CHECKING:
    import numpy
    import torch
    from typing_extensions import Unpack

__all__ = ["load_file"]


@overload
def load_file(
    source: SourceLike | None = None,
    device: DeviceLike = "cpu",
    *,
    filename: SourceLike | None = None,
    framework: TorchName | None = None,
    **options: Unpack[LoadOptions],
) -> dict[str, torch.Tensor]: ...


@overload
def load_file(
    source: SourceLike | None = None,
    device: DeviceLike = "cpu",
    *,
    filename: SourceLike | None = None,
    framework: ArrayName,
    **options: Unpack[LoadOptions],
) -> dict[str, numpy.ndarray[Any, Any]]: ...


@overload
def load_file(
    source: SourceLike | None = None,
    device: DeviceLike = "cpu",
    *,
    filename: SourceLike | None = None,
    framework: BytesName,
    **options: Unpack[LoadOptions],
) -> dict[str, memoryview]: ...


@overload
def load_file(
    source: SourceLike | None = None,
    device: DeviceLike = "cpu",
    *,
    filename: SourceLike | None = None,
    framework: FrameworkName | None,
    **options: Unpack[LoadOptions],
) -> dict[str, Any]: ...


def load_file(
    source: SourceLike | None = None, device: Any = "cpu", *, filename: SourceLike | None = None, framework: Any = None, **options: Any
) -> dict[str, Any]:
    """Loads tensors from plain or compressed safetensors files.

    source: a path of a file, a folder or an index.json; a list of paths; a file
        open for reading in binary mode; or a `Pinned` model. A name that stands in two files
        is an error.
    device: where the tensors shall be: "cpu", "cuda", "cuda:1", a torch.device.
        On a GPU they are torch tensors out of torch's own allocator, and
        compressed ones are decoded there.
    framework: "pt", "np", or "bytes" for writable memoryviews of the bytes;
        None: torch if it is installed, else numpy.
    filename: another word for source, that of safetensors.
    options: those of `LoadOptions`: dtype, keys, filter, progress, mmap, read,
        storage_options, lenient, max_memory, group, shard.

    Returns name -> tensor, in the order of the files (with keys: of keys).
    The tensors are the caller's: writable, each in a storage of its own, valid
    after the file is closed or deleted; freeing one frees its memory. F4 comes
    as torch.float4_e2m1fn_x2 with the last dimension halved, or unpacked in
    numpy; F6 comes as its bytes, U8.

    Raises NotFoundError, FormatError, CorruptError (which tensor, chunk and
    offset), TensorNotFoundError for keys, OutOfMemoryError, NotSupportedError,
    ArgumentError; TypeError for an option that there is not. Ctrl-C cancels the load and frees what had landed. In a child of
    fork, where the engine cannot run, plain local files are read through the package
    safetensors, and all else is ForkedError.
    """
    check_options("load_file", options, LoadOptions)
    source = named("load_file", source, filename)
    group, shard = options.pop("group", None), options.pop("shard", None)
    if group is not None or shard is not None:
        from ..distributed import load

        return load(source, group, shard, device=device, framework=framework, **options)
    frame = frame_for(framework)
    where = check_device(device, frame)
    max_memory = options.get("max_memory")
    wanted = check_dtype(frame, options.get("dtype"))  # a wrong one is refused before anything is read
    if _engine.forked():
        from ..model.forked import ForkedModel

        alone = ForkedModel(source, where, options.get("keys"), options.get("filter"), options.get("storage_options"))
        fit(alone, frame, wanted, max_memory)
        return alone.load(alone.chosen, frame, wanted, None)
    prepare(where)
    with ExitStack() as stack:
        stack.enter_context(many_objects())  # the table has as many as the tensors, and is gone before the collector looks
        model = stack.enter_context(Model(source, device=where, **opening(options)))
        fit(model, frame, wanted, max_memory)
        return model.load(model.chosen, frame, wanted, watch(options.get("progress"), "load"))

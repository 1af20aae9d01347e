"""load_file: whole tensors in a dict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from .. import _engine
from ..errors import NotSupportedError, forked
from ..model.budget import fit
from ..model.loads import many_objects
from ..model.opened import Model, check_target, opening, prepare, start_engine
from ..model.options import (
    ArrayName,
    BytesName,
    DeviceLike,
    FrameworkName,
    LoadOptions,
    TorchName,
    check_options,
    spell_out,
)
from ..model.sources import SourceLike, named
from ..progress import watch
from .grouped import group_context

if TYPE_CHECKING:
    import numpy
    import torch
    from typing_extensions import Unpack


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
    source: SourceLike | None = None,
    device: DeviceLike = "cpu",
    *,
    filename: SourceLike | None = None,
    framework: FrameworkName | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Loads tensors from plain or compressed safetensors files.

    source: the path or URI of a file, a folder or an index.json; a list of them; a
        file open for reading in binary mode; or a `Pinned` model. A tensor name that
        two files have is an error.
    device: the device of the tensors: "cpu", "cuda", "cuda:1", a torch.device. On a
        GPU they are torch tensors from torch's allocator; compressed tensors are
        decoded there.
    framework: "pt", "np", or "bytes" for writable memoryviews; None: torch if it is
        installed, else numpy.
    filename: source, by the name that safetensors gives it.
    options: those of `LoadOptions`: dtype, keys, filter, progress, mmap, read,
        storage_options, lenient, max_memory, group, shard, base.

    Returns a dict of name to tensor, in the order of the files, or of keys. The
    tensors belong to the caller: they are writable, have a storage each, stay valid
    when the file is deleted, and free their memory one by one. F4 is
    torch.float4_e2m1fn_x2 with the last dimension halved, or unpacked in numpy; F6
    is returned as its bytes, U8.

    Raises NotFoundError, FormatError, CorruptError (with tensor, chunk and offset),
    TensorNotFoundError for keys, OutOfMemoryError, NotSupportedError, ArgumentError;
    TypeError for an unknown option. Ctrl-C cancels the load and frees its memory.

    The engine cannot run in a forked child. There, `load_file`, `safe_open`, `stream` and
    `load_model` read local files and folders to the host without it: plain ones by a copy,
    compressed ones slowly, with numpy, which a warning says once. All else is a ForkedError: URIs,
    GPUs, groups, max_memory, and a folder with several models, or with several files that are
    no whole set.
    """
    with group_context(options, device):
        check_options("load_file", options, LoadOptions)
        source = named("load_file", source, filename)
        if options.get("base") is not None and (options.get("group") is not None or options.get("shard") is not None):
            raise NotSupportedError(
                "overwire: load_file: base= is not for group= or shard=: load the base, then apply_delta"
            )
        group, shard = options.pop("group", None), options.pop("shard", None)
        if group is not None or shard is not None:
            start_engine(source)
            from ..distributed.tensors import open_load

            options.pop("base", None)
            opening_load = open_load(source, group, shard, device=device, framework=framework, **options)
            with many_objects(), opening_load as group_load:
                return group_load.load_all()
    if (base := options.pop("base", None)) is not None:
        from .deltas import load_on

        return load_on(base, source, device, framework, options, load_file)
    frame, where, frame_dtype = check_target(source, framework, device, options.get("dtype"))
    max_memory, watcher = options.get("max_memory"), watch(options.get("progress"), "load")
    if _engine.forked():
        from ..model.forked import ForkedModel

        if max_memory is not None:
            raise forked("max_memory=")
        alone = ForkedModel(source, where, options.get("keys"), options.get("filter"), options.get("storage_options"))
        return alone.load(alone.chosen, frame, frame_dtype, None)
    prepare(where)
    # the table has as many as the tensors, and is gone before the collector looks
    with many_objects(), Model(source, device=where, **opening(options)) as model:
        fit(model, frame, frame_dtype, max_memory)
        return model.load(model.chosen, frame, frame_dtype, watcher)


spell_out(load_file, LoadOptions)

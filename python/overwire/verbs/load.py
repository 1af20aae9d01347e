"""Implements load_file, which returns a dict of whole tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from .._imports import many_objects
from ..model.options import ArrayName, BytesName, DeviceLike, FrameworkName, LoadOptions, TorchName, spell_out
from .starting import open_loader

if TYPE_CHECKING:
    import numpy
    import torch
    from typing_extensions import Unpack

    from ..model.sourcelike import SourceLike


@overload
def load_file(
    source: SourceLike | None = None, device: DeviceLike = "cpu", *, filename: SourceLike | None = None,
    framework: TorchName | None = None, **options: Unpack[LoadOptions],
) -> dict[str, torch.Tensor]: ...  # fmt: skip


@overload
def load_file(
    source: SourceLike | None = None, device: DeviceLike = "cpu", *, filename: SourceLike | None = None,
    framework: ArrayName, **options: Unpack[LoadOptions],
) -> dict[str, numpy.ndarray[Any, Any]]: ...  # fmt: skip


@overload
def load_file(
    source: SourceLike | None = None, device: DeviceLike = "cpu", *, filename: SourceLike | None = None,
    framework: BytesName, **options: Unpack[LoadOptions],
) -> dict[str, memoryview]: ...  # fmt: skip


@overload
def load_file(
    source: SourceLike | None = None, device: DeviceLike = "cpu", *, filename: SourceLike | None = None,
    framework: FrameworkName | None, **options: Unpack[LoadOptions],
) -> dict[str, Any]: ...  # fmt: skip


def load_file(
    source: SourceLike | None = None,
    device: DeviceLike = "cpu",
    *,
    filename: SourceLike | None = None,
    framework: FrameworkName | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Loads tensors from plain or compressed safetensors files.

    source: the path or URI of a file, a folder or an index.json; a list of these; a file open for reading in binary
        mode; or a `Pinned` model. Two files must not have a tensor with the same name.
    device: the device of the tensors: "cpu", "cuda", "cuda:1", a torch.device. On a GPU, they are torch tensors from
        torch's allocator, and compressed tensors are decoded on the GPU.
    framework: "pt", "np", or "bytes" for writable memoryviews. By default torch if it is installed, otherwise numpy.
    filename: an alias of source, for programs written for safetensors.
    options: the options of `LoadOptions`: dtype, keys, filter, progress, mmap, read, storage_options, lenient,
        max_memory, group, shard, base.

    Returns a dict of names to tensors, in the order of the files, or of keys. The tensors belong to the caller: they
    are writable, have their own storage, and stay valid when the file is deleted, and each frees its own memory. F4 is
    torch.float4_e2m1fn_x2 with the last dimension halved, or unpacked in numpy; F6 is returned as its bytes, U8.

    Raises NotFoundError, FormatError, CorruptError (with tensor, chunk and offset), TensorNotFoundError for keys,
    OutOfMemoryError, NotSupportedError, ArgumentError, and TypeError for an unknown option. Ctrl-C cancels the load and
    frees its memory.

    The engine cannot run in a forked child. There, `load_file`, `safe_open`, `stream` and `load_model` read local files
    and folders to the host without the engine. They copy plain tensors, and decode compressed tensors slowly with
    numpy, after a warning. They raise ForkedError for URIs, GPUs, groups, max_memory, folders with several models, and
    folders with an incomplete set of files.
    """
    # `many_objects` comes first, so that the model's table, which has an object for each tensor, is freed before the
    # cycle collector runs again.
    with many_objects(), open_loader("load_file", LoadOptions, options, source, device, framework, filename) as loader:
        return loader.load_all()


spell_out(load_file, LoadOptions)

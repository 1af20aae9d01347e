"""Defines the types of the options of saves and bundles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from ..progress import ProgressLike
    from .options import Level
    from .storageoptions import StorageOptions


class BundleOptions(TypedDict, total=False):
    """The options of `save_bundle`, and of `compress` for objects.

    compress: False stores the tensors uncompressed, in a container that every safetensors reader can read.
    storage_options: as for `load_file`, for a path that is a URI.
    max_memory: as for `save_file`.
    """

    compress: bool
    progress: ProgressLike
    storage_options: StorageOptions | None
    max_memory: int | str | None


class SaveOptions(BundleOptions, total=False):
    """The options of `save_file` and `save_model`.

    compress: True writes overwire's container, which only overwire can read. A tensor is compressed, without loss, if
        that saves at least 1 %. False writes a plain file for every safetensors reader.
    level: "default" decodes at full speed on CPU and GPU. "smaller" saves another 0.2 to 1.5 % of the original size,
        but saving is slow. Such tensors are decoded on the CPU, even for a GPU, and about ten times as slowly. Readers
        need an overwire that supports format 1.2.
    digests: whether to store the digest of each tensor in a compressed file (see `digest`), so that `verify(path,
        tensors=)` need not read the file's tensors.
    max_shard_size: the most tensor bytes in one file ("5GB", "512MiB", int). A larger model is split into
        model-00001-of-00002.safetensors and so on, with model.safetensors.index.json. If the folder already contains
        shards, or weights that no index lists, the new names get a mark (model-ow1f2e3d4c-00001-of-00002.safetensors).
        The old and the new shards are then both complete until the index is replaced. Afterwards the old shards are
        removed.
    storage_options: as for `load_file`, if path is a URI. If several processes write to one key at the same time, the
        file of one of them remains. `encryption_key` (32 bytes or 64 hex digits) or `encryption_password` encrypts a
        .tensors file with tensorizer's XSalsa20-Poly1305. Tensor bytes are encrypted, but names and shapes are not.
    max_memory: with wait=False, the most host memory for the copy of the tensors ("20GB", int). By default only the
        available memory is a limit. A save that would need more if no tensor could be compressed is refused before it
        begins. For GPU tensors the memory is pinned, and cached for the next save or sleep until `empty_cache` is
        called.
    """

    level: Level
    digests: bool
    max_shard_size: int | str | None


class UnpickleOptions(TypedDict, total=False):
    """The options of `load_bundle`.

    trust: whether to allow every class and function. The pickle can then run any code. False allows containers, plain
        data, tensors, parameters, numpy arrays and torch.nn's own modules. Anything else raises UntrustedPickleError
        with its name.
    device: the device for all torch tensors: "cpu", "cuda", "cuda:1". None loads each tensor to the device from which
        it was saved, and raises DeviceError if this device is not available. numpy arrays stay on the host. GPU tensors
        are decoded on the GPU.
    tensors: the path or URI of the container, if it is not next to the pickle as `save_bundle` wrote it.
    storage_options: as for `load_file`, for a path that is a URI.
    """

    trust: bool
    device: Any
    tensors: Any
    progress: ProgressLike
    storage_options: StorageOptions | None

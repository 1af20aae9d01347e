"""Loads the objects that `bundle` saves as a pickle and a container."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._engine import open_library
from .._imports import Undisturbed
from ..frameworks.choose import check_device, frame_for, prepare_gpu
from ..jobs import shown
from ..model.options import check_options, spell_out
from ..model.saveoptions import UnpickleOptions
from ..model.sourcelike import SourceLike
from ..model.storage import storage
from ..model.storageoptions import StorageOptions
from ..progress import ProgressLike, watch
from . import containers
from .landing import Landing
from .opening import open_pair, resolve_pickle

if TYPE_CHECKING:
    from typing_extensions import Unpack


def load_bundle(path: str | os.PathLike[str], **options: Unpack[UnpickleOptions]) -> Any:
    """Loads an object that `save_bundle` saved. Tensors are read and decoded while the pickle imports and builds
    objects. If the bundle was preloaded, the function uses that preload. It also loads bundles in nyacomp's layout. In
    a store, it searches for the container in `tensors` first, then in `nya`.

    options: see `UnpickleOptions`.

    Returns the object. Its tensors own their memory. Raises UntrustedPickleError,
    NotFoundError if one of the files is missing, CorruptError, and FormatError.
    """
    check_options("load_bundle", options, UnpickleOptions)
    return _load_object(path, (containers.OWN, containers.NYACOMP), **options)


def load_compressed_pickle(path: str | os.PathLike[str], **options: Unpack[UnpickleOptions]) -> Any:
    """Loads a bundle. The function has nyacomp's name; new programs use `load_bundle`, which has the same options and
    errors. In a store, this function searches for the container in `nya` first."""
    check_options("load_compressed_pickle", options, UnpickleOptions)
    return _load_object(path, (containers.NYACOMP, containers.OWN), **options)


def load_compressed(path: str | os.PathLike[str], **options: Unpack[UnpickleOptions]) -> Any:
    """Works like `load_compressed_pickle`."""
    check_options("load_compressed", options, UnpickleOptions)
    return load_compressed_pickle(path, **options)


for _verb in (load_bundle, load_compressed_pickle, load_compressed):
    spell_out(_verb, UnpickleOptions)


def _load_object(
    path: str | os.PathLike[str],
    folders: Sequence[str],
    trust: bool = False,
    device: Any = None,
    tensors: SourceLike | None = None,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> Any:
    # folders: the folders in which to search for the container in a store, in this order.
    watcher, target = watch(progress, "load"), resolve_pickle(path)
    open_library()  # the Go runtime starts during the imports below
    where = None if device is None else check_device(device, None if device == "cpu" else frame_for("torch"))
    if where is not None:
        prepare_gpu(where)
    storage(storage_options, [target])  # raises for a local path with options
    data, model = open_pair(target, folders, tensors, storage_options)
    with model, Landing(model, shown(target), where, watcher) as blobs:
        with Undisturbed():  # the load reads about 100 MB during these imports
            from . import unpickling
        content = unpickling.load(data, blobs, shown(target), trust)
        blobs.wait()  # raises the errors of unused blobs
    return content

"""nyacomp's verbs that load: an object from its pickle and its container, which `bundle` saves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._engine import open_library
from .._imports import Undisturbed
from ..frameworks.choose import check_device, frame_for
from ..jobs import shown
from ..model import layout
from ..model.opened import prepare
from ..model.options import StorageOptions, UnpickleOptions, check_options, spell_out
from ..model.sources import SourceLike
from ..model.storage import storage
from ..progress import ProgressLike, watch
from .landing import Landing
from .opening import open_pair, resolve_pickle

if TYPE_CHECKING:
    from typing_extensions import Unpack


def load_compressed_pickle(path: str | os.PathLike[str], **options: Unpack[UnpickleOptions]) -> Any:
    """Loads what `compress_pickle` saved; reading and decoding continue while the
    pickle imports and builds. Joins a preload of the same bundle.

    trust: a pickle can run any code. False allows containers, plain data,
        tensors, parameters, numpy arrays and torch.nn's own modules, and raises
        UntrustedPickleError naming the first other global; True allows all.
    device: where torch's tensors shall be, wherever they were when saved: "cpu",
        "cuda", "cuda:1". None: where each was; DeviceError if that is not here.
        numpy arrays stay on the host. On a GPU they are decoded there.
    tensors: the container, where it is not in its place beside the pickle: a
        path or URI.
    storage_options: as for `load_file`, for a path that is a URI.

    Returns the object; its tensors own their memory. Raises UntrustedPickleError,
    NotFoundError if one of the files is missing, CorruptError, FormatError.
    """
    check_options("load_compressed_pickle", options, UnpickleOptions)
    return _load_object(path, (layout.NYACOMP, layout.OWN), **options)


def load_compressed(path: str | os.PathLike[str], **options: Unpack[UnpickleOptions]) -> Any:
    """Loads what `compress` saved: see `load_compressed_pickle`."""
    check_options("load_compressed", options, UnpickleOptions)
    return load_compressed_pickle(path, **options)


def load_bundle(path: str | os.PathLike[str], **options: Unpack[UnpickleOptions]) -> Any:
    """Loads what `save_bundle` saved: see `load_compressed_pickle`. Each of them loads what the
    other's twin saved, too; in a store this one looks into `tensors` first, that one into `nya`.
    """
    check_options("load_bundle", options, UnpickleOptions)
    return _load_object(path, (layout.OWN, layout.NYACOMP), **options)


for _verb in (load_compressed_pickle, load_compressed, load_bundle):
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
    # folders: where a store is asked for the container, in this order.
    watcher, target = watch(progress, "load"), resolve_pickle(path)
    open_library()  # what is imported next takes as long as Go's runtime to start
    where = None if device is None else check_device(device, None if device == "cpu" else frame_for("torch"))
    if where is not None:
        prepare(where)
    storage(storage_options, [target])  # refused for a local path
    data, model = open_pair(target, folders, tensors, storage_options)
    with model, Landing(model, shown(target), where, watcher) as blobs:
        with Undisturbed():  # these imports take as long as some 100 MB, which arrive meanwhile
            from . import unpickling
        content = unpickling.load(data, blobs, shown(target), trust)
        blobs.wait()  # an error in a blob that nothing asked for
    return content

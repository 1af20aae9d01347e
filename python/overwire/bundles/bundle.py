"""Saves any Python object with tensors as a small pickle and a compressed container next to it.

A bundle consists of the pickle `D/x.pkl` and the container `D/tensors/x.safetensors`. nyacomp's functions write
`D/nya/x.safetensors` and `D/nya/meta.csv` instead (see `manifest`). The container is written before the pickle, and
contains the pickle's digest. The previous container remains until the new pickle has replaced the old one. So a reader
always gets the old or the new object, even while a bundle is replaced or after a save was killed. Writers of the same
bundle wait for each other (see `turns`), and the object of the last writer remains.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from .._imports import Undisturbed, imported
from .._order import await_path
from .._tables import OTHER_FILES
from .._undo import after_error
from ..errors import ArgumentError, CorruptError, FormatError, IOFailure, NotFoundError, OutOfMemoryError, OverwireError
from ..files import regular
from ..jobs import shown
from ..model.opened import Model
from ..model.options import check_options, check_values, spell_out
from ..model.reading import read_uri
from ..model.saveoptions import BundleOptions
from ..model.storage import storage
from ..model.storageoptions import StorageOptions
from ..paths import classed_errors, is_remote, is_there
from ..stores import publish, resolve_links, write_bytes
from ..verbs.save import save_bytes, stage_bytes
from ..verbs.saving import Report, Saving
from . import containers, manifest
from .landing import DEVICES, ORDER, devices_of
from .opening import DIGEST, MOST_PICKLE, resolve_pickle
from .turns import Turn, turn_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def save_bundle(
    obj: Any, path: str | os.PathLike[str], *, wait: Literal[True] = True, **options: Unpack[BundleOptions]
) -> Report: ...


@overload
def save_bundle(
    obj: Any, path: str | os.PathLike[str], *, wait: Literal[False], **options: Unpack[BundleOptions]
) -> Saving: ...


def save_bundle(obj: Any, path: str | os.PathLike[str], *, wait: bool = True, **options: Any) -> Report | Saving:
    """Saves any Python object as a bundle: a training checkpoint, a pipeline, an optimizer's state. A bundle is a
    pickle, and a container next to it with the object's compressed tensors. `load_bundle` loads it.

    Everything that can be pickled is saved bit for bit: torch tensors with their ties, views of one storage,
    strides, memory format, requires_grad and subclass; parameters, buffers, modules; bool, complex, fp8, sub-byte,
    quantised and sparse tensors; numpy arrays with their views and strides. As with torch.save, a view saves its
    whole storage, and `.grad` and hooks are not saved. The object is not changed. GPU tensors are encoded on the
    GPU, as by `save_file`, and their device is saved.

    Writes `path`, and `tensors/<stem>.safetensors` in its folder. Tensors in the container have the names that they
    have in the object ("unet.conv_in.weight"), and `safe_open` and `inspect` show them. Both files are written
    atomically, the pickle last. Writers of the same path wait for each other, and the object of the last writer
    remains. In a store (s3://, redis://) the container alternates between `tensors/<name>.safetensors` and
    `tensors/<name>.b.safetensors`, so that the old object stays complete until the new one replaces it. Stores have no
    locks, so only one writer may write to a path in a store at a time. If the bundle replaces one in nyacomp's layout,
    the old container is removed.

    options: see `BundleOptions`.
    wait: False returns a `Saving` as soon as the object may change again. At that time it is pickled, and the bytes of
        its tensors are in host memory.

    Returns the `Report` of the container or, with wait=False, a `Saving`.

    Raises the errors of pickle for objects that cannot be pickled, AccessError, IOFailure, NotSupportedError for
    storages without bytes (meta), and ArgumentError if a signal handler saves a bundle while it interrupts a save of
    the same bundle.
    """
    check_options("save_bundle", options, BundleOptions)
    return _save_bundle(obj, path, _How(containers.OWN, _names_of_tensors(obj), wait), options)


@overload
def compress_pickle(
    obj: Any, path: str | os.PathLike[str], *, wait: Literal[True] = True, **options: Unpack[BundleOptions]
) -> float: ...


@overload
def compress_pickle(
    obj: Any, path: str | os.PathLike[str], *, wait: Literal[False], **options: Unpack[BundleOptions]
) -> Saving: ...


def compress_pickle(obj: Any, path: str | os.PathLike[str], *, wait: bool = True, **options: Any) -> float | Saving:
    """Saves any Python object. The function has nyacomp's name; new programs use `save_bundle`.

    It works like `save_bundle`, but writes `nya/<stem>.safetensors` and `nya/meta.csv`, and numbers the tensors.

    Returns stored bytes / original tensor bytes, as nyacomp does, or 1.0 if there are no tensors. For example, 0.67
    means that the file is a third smaller. With wait=False, returns a `Saving`. Raises the errors of `save_bundle`.
    """
    check_options("compress_pickle", options, BundleOptions)
    return _ratio_of(_save_bundle(obj, path, _How(containers.NYACOMP, {}, wait, _list_container), options))


def compress_model(model: Any, path: str | os.PathLike[str], *, wait: bool = True, **options: Any) -> float | Saving:
    """Implements `overwire.compress` for an object. It works like `compress_pickle`, but tensors keep the names that
    they have in the model."""
    check_options("compress", options, BundleOptions)
    how = _How(containers.NYACOMP, _names_in_model(model, path), wait, _list_container)
    return _ratio_of(_save_bundle(model, path, how, options))


for _save_verb in (save_bundle, compress_pickle):
    spell_out(_save_verb, BundleOptions)


def _ratio_of(saved: Report | Saving) -> float | Saving:
    return saved if isinstance(saved, Saving) else saved.ratio


#: A function that lists a container for nyacomp. Its arguments are the paths of the pickle and the container, the
#: report of the save, and the storage options.
Lister = Callable[[str, str, Report, StorageOptions | None], None]


def save_listed(obj: Any, path: str | os.PathLike[str], compress: bool, is_model: bool, lister: Lister) -> float:
    """Saves a model like `compress_model`, or any other object like `compress_pickle`, but calls `lister` instead of
    writing meta.csv. lister is called before the pickle is written."""
    names = _names_in_model(obj, path) if is_model else {}
    report = _save_bundle(obj, path, _How(containers.NYACOMP, names, True, lister), {"compress": compress})
    assert not isinstance(report, Saving)
    return report.ratio


def _list_container(target: str, container: str, report: Report, options: StorageOptions | None) -> None:
    place = container.rpartition("/")[2] if is_remote(target) else container
    text = manifest.meta_text(place, report.bytes_out)
    write_bytes(manifest.meta_of(target), os.fsencode(text), options)


def _names_in_model(model: Any, path: str | os.PathLike[str]) -> dict[int, str]:
    if isinstance(model, (str, bytes, os.PathLike)):
        raise ArgumentError(
            "overwire: compress: expected a module, a pipeline or a state dict, got a path: compress files and folders "
            f"with overwire.compress({shown(os.fsdecode(model))!r}, {shown(os.fsdecode(path))!r})"
        )
    return _names_of_tensors(model)


class _How(NamedTuple):
    # folder: the container's folder. names: the names of its tensors by id. wait: see `save_bundle`. lister: lists the
    # container.
    folder: str
    names: Mapping[int, str]
    wait: bool
    lister: Lister = lambda *place: None


def _save_bundle(obj: Any, path: str | os.PathLike[str], how: _How, options: dict[str, Any]) -> Report | Saving:
    # options: see `BundleOptions`.
    with Undisturbed():
        from .pickling import described, dump

    check_values(wait=how.wait, **options)
    max_memory = options.pop("max_memory", None)
    target = resolve_pickle(path)
    if target.endswith(".safetensors"):
        raise ArgumentError(
            f"overwire: compress {shown(target)}: the name of a pickle must not end in .safetensors, because it could "
            f"replace the container of another bundle: name it .pkl, or save only tensors with overwire.save_file"
        )
    if os.path.splitext(target)[1].lower() in OTHER_FILES:
        text = "the name has the ending of another format: name it .pkl"
        raise ArgumentError(f"overwire: compress {shown(target)}: {text}")
    access = options.get("storage_options")
    storage(access, [target])  # raises for invalid options before anything is done
    if how.wait and max_memory is not None:
        raise ArgumentError("overwire: max_memory: it applies only to saves with wait=False")
    data, blobs = dump(obj, how.names)
    remote = is_remote(target)
    tensors = [(blob.name, described(blob)) for blob in blobs]
    digest = hashlib.sha256(data).hexdigest()
    # This list defines the blobs' numbers, because the container sorts tensors by name.
    order = "\n".join(blob.name for blob in blobs)
    metadata = {DIGEST: digest, ORDER: order, DEVICES: devices_of(blobs)} if blobs else {DIGEST: digest}
    await_path(target)
    with contextlib.ExitStack() as turn:
        turns: list[Turn] = []
        one = _remote_place(target, data, how, access) if remote else _local_place(target, data, how, turn, turns)
        if not how.wait:
            cleanup = turn.pop_all()
            options |= {"like": one.like, "key": target, "max_memory": max_memory}

            def pass_turns(saving: Saving) -> None:
                for one_turn in turns:
                    one_turn.saver = saving

            options["on_start"] = pass_turns  # before a callback can run in the save's thread
            return stage_bytes(tensors, one.container, metadata, one.publish, one.undo, cleanup.close, **options)
        with after_error(one.undo):
            report = save_bytes(tensors, one.container, metadata, like=one.like, **options)
            one.publish(report)
    return report


class _Place(NamedTuple):
    # container: its path. publish: completes the bundle after the container is written. undo: cleans up after an error.
    container: str
    like: str | None
    publish: Callable[[Report], None]
    undo: Callable[[], None]


def _local_place(target: str, data: bytes, how: _How, turn: contextlib.ExitStack, turns: list[Turn]) -> _Place:
    folder = how.folder
    container = containers.container_of(target, folder)
    if "\n" in os.path.basename(container):
        raise ArgumentError(
            f"overwire: compress {target!r}: the name must not have a line break, because meta.csv has a line per file"
        )
    if len(os.fsencode(os.path.basename(container))) > 255:
        raise ArgumentError(f"overwire: compress {target!r}: the name of its container would exceed 255 bytes")
    with classed_errors(target):
        os.makedirs(os.path.dirname(container), exist_ok=True)
        for one in containers.FOLDERS:
            lock = containers.lock_of(target, one)
            if not os.path.isdir(os.path.dirname(lock)):
                continue
            try:
                turns.append(turn.enter_context(turn_of(lock)))
            except OSError as error:  # this user may not be allowed to write to the other folder
                if one == folder or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
        container = containers.container_of(target, folder)  # another writer may have created one meanwhile
        rivals = containers.rivals_of(target)
        if _is_anothers(container) or any(_has_digest(container, _digest_of_file(rival)) for rival in rivals):
            container = containers.second_container_of(target, folder)
        _keep_previous(target, container)
        elsewhere = _elsewhere(target, folder)

    def publish_local(report: Report) -> None:
        with classed_errors(target):
            how.lister(target, container, report, None)
            write_bytes(target, data, None)
            for old in (containers.previous_of(container), *elsewhere):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(old)

    return _Place(container, target, publish_local, lambda: _take_back(target, container))


def _remote_place(target: str, data: bytes, how: _How, options: StorageOptions | None) -> _Place:
    # Two names alternate, so the container of the current pickle does not change until the new pickle has replaced the
    # old one.
    new, old = containers.store_containers_of(target, how.folder)
    stale = []
    with contextlib.suppress(NotFoundError):
        if _has_digest(new, hashlib.sha256(read_uri(target, options, MOST_PICKLE)).hexdigest(), options):
            new, old = old, new
        others = (one for one in containers.FOLDERS if one != how.folder)
        stale = [name for one in others for name in containers.store_containers_of(target, one)]

    def publish_remote(report: Report) -> None:
        how.lister(target, new, report, options)
        write_bytes(target, data, options, stale=[old, *stale])

    return _Place(new, None, publish_remote, lambda: None)


def _elsewhere(target: str, folder: str) -> list[str]:
    # Returns the old pickle's files in the other folders: its container, and meta.csv if that lists only this
    # container.
    if not is_there(target):
        return []
    files = []
    for other in (containers.container_of(target, one) for one in containers.FOLDERS if one != folder):
        if is_there(other) and _has_digest(other, _digest_of_file(target)):
            files.append(other)
            with contextlib.suppress(OverwireError):
                if manifest.local_uris_of(manifest.meta_of(target)) == [other]:
                    files.append(manifest.meta_of(target))
    return files


def _keep_previous(target: str, container: str) -> None:
    # Gives the old container a second name, for readers of the old pickle. After an earlier save was killed, the file
    # that has the second name may be the container of the current pickle. It is then not replaced.
    previous = containers.previous_of(container)
    if is_there(previous) and is_there(target) and not _has_digest(container, _digest_of_file(target)):
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(previous)
    with contextlib.suppress(FileNotFoundError):  # there may be no old bundle
        try:
            os.link(resolve_links(container), previous)
        except FileNotFoundError:
            raise
        except OSError:
            publish(container, previous)  # renames it, because the file system may not support links


def _take_back(target: str, container: str) -> None:
    # Gives the old pickle's container its first name again, after a failed save.
    previous = containers.previous_of(container)
    with contextlib.suppress(OSError, OverwireError):
        if is_there(previous) and _has_digest(previous, _digest_of_file(target)):
            publish(previous, container)
            os.unlink(previous)  # both names may belong to one file


def _digest_of_file(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0, opener=regular) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _has_digest(container: str, digest: str, options: StorageOptions | None = None) -> bool:
    try:
        with Model(container, storage_options=options, probe=True) as model:
            return model.metadata().get(DIGEST) == digest
    except (FormatError, CorruptError, NotFoundError):
        return False
    except OverwireError as error:
        if options is not None or is_remote(container) or isinstance(error, (IOFailure, OutOfMemoryError)):
            raise  # the container may have the digest, but it cannot be read
        return False


def _is_anothers(container: str) -> bool:
    # Returns whether the path is a file that does not belong to a bundle.
    try:
        with Model(container, probe=True) as model:
            return DIGEST not in model.metadata()
    except NotFoundError:
        return False
    except (IOFailure, OutOfMemoryError):  # the file could not be checked
        raise
    except OverwireError:
        return True


def _names_of_tensors(model: Any) -> dict[int, str]:
    """Returns the first name of each tensor in a model, by id."""
    names: dict[int, str] = {}
    torch, numpy = imported("torch"), imported("numpy")
    kinds = (*([] if torch is None else [torch.Tensor]), *([] if numpy is None else [numpy.ndarray]))

    def name_tensors(value: Any, prefix: str, depth: int) -> None:
        if torch is not None and isinstance(value, torch.nn.Module):
            for kind in (value.named_parameters, value.named_buffers):
                for name, tensor in kind():
                    names.setdefault(id(tensor), prefix + name)
                    # A parameter is pickled through its `.data`, which is another object with the same storage.
        elif isinstance(value, kinds):
            names.setdefault(id(value), prefix.rstrip("."))
        elif isinstance(value, Mapping) and depth < 8:
            for key, part in value.items():
                name_tensors(part, f"{prefix}{key}.", depth + 1)
        elif isinstance(value, (list, tuple)) and depth < 8:
            for at, part in enumerate(value):
                name_tensors(part, f"{prefix}{at}.", depth + 1)
        elif isinstance(getattr(value, "config", None), Mapping) and depth < 8:
            # Reads only instance attributes, because diffusers warns about other keys.
            attributes = getattr(value, "__dict__", {})
            for key in value.config:
                if not str(key).startswith("_"):
                    name_tensors(attributes.get(key), f"{prefix}{key}.", depth + 1)

    name_tensors(model, "", 0)
    return names

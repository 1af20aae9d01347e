"""Writes a checkpoint under a temporary name, and publishes it when it is complete.

The coordinator of a save creates an id for it. The id is in checkpoint.json, in the metadata of all files,
and in the temporary name, so that two saves never write to the same folder.

A local checkpoint is written to a hidden folder next to the target, `.NAME.partial-ID`. When it is complete, one rename
gives it its name, or exchanges it with the checkpoint that it replaces. In a store, checkpoint.json is written after
the tensors, and a checkpoint does not exist without it. The files of each save have different names in a store, and
checkpoint.json is written only if it does not exist. If several saves run at the same time, one of them writes
checkpoint.json and then the indexes, and the others fail.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from .. import _verbs
from .._undo import after_error
from ..errors import AccessError, ArgumentError, IOFailure, NotFoundError, OverwireError
from ..files import lock_path, state_of_file
from ..model.reading import read_bytes
from ..paths import classed_errors, is_file, is_remote, local, path_of
from ..stores import ObjectReader, refuse_planted, remove_objects, resolve_links, write_bytes
from .manifest import LIMIT, NAME, TRAINING, Manifest, decode

#: The name of the index, in the checkpoint and in its training folder.
INDEX = "model.safetensors.index.json"


class Located:
    """The path of a reader or writer, with the methods that torch calls for it."""

    _path: str | None = None
    _schemes: tuple[str, ...] = ()

    @property
    def checkpoint_id(self) -> str | None:
        """The path of the checkpoint."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Returns whether this is a path, or a URI with a supported scheme."""
        try:
            uri = local(checkpoint_id)
        except OverwireError:
            return False
        return not is_remote(uri) or uri.partition("://")[0] in cls._schemes


class Place:
    """The destination of one checkpoint. Each rank has one. The coordinator calls `begin`, then `publish` or `drop`.
    The other ranks call `join_save`. All write to `path_of`."""

    def __init__(
        self, path: str | os.PathLike[str], storage_options: Mapping[str, object] | None, overwrite: bool
    ) -> None:
        self.path = local(path).rstrip("/")
        self.remote = is_remote(self.path)
        self.options = storage_options
        self._objects: list[str] = []  # objects that this save has written to a store
        self._overwrite = overwrite
        self._unlock: weakref.finalize[..., Any] | None = None  # set while the coordinator holds the lock
        self._own_folder: os.stat_result | None = None  # the coordinator's folder, until it is published
        self._remains: list[str] = []  # folders to remove at the end
        self._replaced: dict[str, tuple[int, int, int]] | None = None  # files of the checkpoint to replace
        self._target = self._prefix = self.path
        if not self.remote:
            self._target = resolve_links(path_of(self.path) if is_file(self.path) else self.path)
            folder, name = os.path.split(self._target)
            if name in ("", ".", ".."):
                raise self._error_at("expected a path that ends in a folder name")
            self._prefix = os.path.join(folder, f".{name}.partial")
        self.join_save(secrets.token_hex(16))

    def join_save(self, save: str) -> None:
        """Joins the coordinator's save with this id. From now on, `path_of` returns paths of that save."""
        self.save = save
        #: A part of all file names in a store, "" for a local folder.
        self.mark = f"-ow{save[:8]}" if self.remote else ""
        self._partial = self.path if self.remote else f"{self._prefix}-{save[:8]}"

    def path_of(self, file: str) -> str:
        """Returns the temporary path of a file of the checkpoint."""
        return f"{self._partial}/{file}"

    def make(self, file: str) -> str:
        """Returns `path_of` a file, and creates its folder. Raises NotFoundError if the save's folder does not exist.
        Then the coordinator has ended, or it writes to another disk."""
        path = self.path_of(file)
        if self.remote:
            self._objects.append(path)
            return path
        with classed_errors(self.path, "write to"):
            if not os.path.isdir(self._partial):
                why = f"{self._partial} does not exist: all ranks must write to one file system until the save ends"
                raise self._error_at(why, NotFoundError)
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(path))
        return path

    def write(self, file: str, text: bytes) -> None:
        """Writes a small file. In a store, raises ArgumentError if another save has written checkpoint.json."""
        if not self.remote:
            write_bytes(self.make(file), text, self.options)
            return
        path, objects = self.path_of(file), self._objects
        if file == NAME:  # the file may exist even if the request failed, so the files that it lists must stay
            self._objects = []
        try:
            write_bytes(path, text, self.options, once=file == NAME)
        except ArgumentError as error:
            self._objects = objects
            raise self._error_at("another save of this checkpoint has finished first") from error
        except AccessError:
            self._objects = objects
            raise
        self._objects = [*objects, path]

    def begin(self) -> None:
        """Locks the destination, and removes the remains of killed saves.

        Raises ArgumentError if the destination exists and either is not a checkpoint or must not be overwritten, or if
        another save is running. Raises NotSupportedError if the file system cannot replace a checkpoint in one step. In
        these cases the destination is unchanged.
        """
        old = self._has_checkpoint()
        if self.remote:
            self._refuse_indexes()
            return
        with classed_errors(self.path, "make"):
            os.makedirs(os.path.dirname(self._prefix), exist_ok=True)
            # The lock file is next to the folder. The lock is held until the new checkpoint is published and the old
            # one is removed.
            try:
                lock = lock_path(f"{self._prefix}.lock", 0o600, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._error_at("another save of this checkpoint is running") from None
            self._unlock = weakref.finalize(self, _release_lock, lock, f"{self._prefix}.lock", os.getpid())
            self._unlock.atexit = False
            with after_error(self.drop):
                self._replaced = _states_below(self._target) if old else None
                self._remains = self._empty_leftovers()
                os.mkdir(self._partial)
                self._own_folder = os.stat(self._partial)
                self._try_to_publish(old)

    def hand_over(self) -> None:
        """Makes the coordinator responsible for publishing or removing this rank's objects."""
        self._objects = []

    def take_over(self, files: Iterable[str]) -> None:
        """Makes this rank responsible for publishing or removing the objects of all ranks."""
        if self.remote:
            self._objects = [self.path_of(file) for file in files]

    def publish(self, files: Collection[str]) -> None:
        """Gives the checkpoint its name if all its files exist. After an error, the old checkpoint still has the name.
        After Ctrl-C, either checkpoint may have it."""
        if self.remote:
            self._objects = []
            return
        try:
            with classed_errors(self.path, "publish"):
                for file in files:
                    if not os.path.isfile(path := self.path_of(file)):
                        why = f"{path} does not exist: all ranks must write to one file system"
                        raise IOFailure(f"overwire: {why}", source=self.path)
                for folder in sorted({os.path.dirname(self.path_of(file)) for file in files}, reverse=True):
                    _sync_folder(folder)
                replaces = self._has_checkpoint()
                _rename_folder(self._partial, self._target, replaces)
                if replaces and self._replaced is not None:
                    self._refuse_later_files(self._replaced)
                _sync_folder(os.path.dirname(self._target), self._target)
            self._own_folder = None
            self._remains.append(self._partial)  # the replaced checkpoint
        finally:
            self.drop()

    def drop(self) -> None:
        """Removes everything that this rank has written and that was not published, and unlocks the destination."""
        objects, self._objects = self._objects, []
        state, self._own_folder = self._own_folder, None
        try:
            if objects:
                with contextlib.suppress(OverwireError):  # the save raises its own error
                    remove_objects(objects[::-1], self.options)  # files that list other files are removed first
            if state is not None:
                with contextlib.suppress(OSError, OverwireError):  # both checkpoints stay after an error
                    self._take_back(state)
            for folder in self._remains:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            self._remains = []
            unlock, self._unlock = self._unlock, None
            if unlock is not None:
                unlock()

    def _refuse_later_files(self, before: dict[str, tuple[int, int, int]]) -> None:
        # Raises an error if the replaced checkpoint, which now has the hidden name, has changed. `drop` then restores
        # its name.
        after = _states_below(self._partial)
        if changed := sorted(file for file in before.keys() | after.keys() if before.get(file) != after.get(file)):
            why = "was written during this save, and would be removed: move it, or save elsewhere"
            raise self._error_at(f"{changed[0]!r} {why}")

    def _take_back(self, state: os.stat_result) -> None:
        # Looks for the new folder, because a rename may have taken place although it returned an error. In that case
        # the old checkpoint has the hidden name.
        if _is_at(state, self._target):
            _rename_folder(self._target, self._partial, os.path.isdir(self._partial))
        if _is_at(state, self._partial):
            self._remains.append(self._partial)

    def _error_at(self, why: str, kind: type[OverwireError] = ArgumentError) -> OverwireError:
        return kind(f"overwire: {self.path}: {why}", source=self.path)

    def _has_checkpoint(self) -> bool:
        # Returns whether a checkpoint exists. Raises ArgumentError if the destination must not be replaced.
        if self.remote:
            with contextlib.suppress(NotFoundError):
                read_bytes(f"{self.path}/{NAME}", LIMIT, storage_options=self.options)
                raise self._error_at("the checkpoint exists and cannot be replaced in a store: save to another name")
            return False
        with classed_errors(self.path, "list"):
            try:
                entries = sorted(os.listdir(self._target))
            except FileNotFoundError:
                return False
            except NotADirectoryError:
                raise self._error_at("it is not a folder") from None
            if not entries:
                return False
            if not self._overwrite:
                raise self._error_at("it exists, and overwrite is False: save to another name")
            if NAME not in entries:
                raise self._error_at(f"the folder has {entries[0]!r} and is not a checkpoint: save to another name")
            manifest = decode(read_bytes(f"{self._target}/{NAME}", LIMIT), f"{self._target}/{NAME}")
            own_files = {NAME, INDEX, f"{TRAINING}/{INDEX}", *(file for part in manifest.parts for file in part.files)}
            if strange := sorted(set(_entries_below(self._target)) - own_files):
                why = f"the folder also has {strange[0]!r}, which would be removed"
                raise self._error_at(f"{why}: move it, or save to another name")
            return True

    def _empty_leftovers(self) -> list[str]:
        # Removes the files of killed saves to free their space. The folders stay until this save ends, because a rank
        # of a killed save may still write to them.
        folder, name = os.path.split(self._prefix)
        leftovers = []
        with contextlib.suppress(PermissionError):  # the folder may be writable but not listable
            for entry in os.scandir(folder):
                is_ours = re.fullmatch(re.escape(name) + "(-[0-9a-f]{8})?", entry.name)
                if is_ours and entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(AccessError):  # the folder may belong to another user
                        refuse_planted(entry.path)
                        leftovers.append(entry.path)
        for path in leftovers:
            for at, _, files in os.walk(path):
                for file in files:
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(at, file))
        return leftovers

    def _refuse_indexes(self) -> None:
        # Raises ArgumentError for the index of another model. The index of a killed or running save is allowed, because
        # the save that writes checkpoint.json overwrites it.
        for file in (INDEX, f"{TRAINING}/{INDEX}"):
            path = self.path_of(file)
            with contextlib.suppress(NotFoundError):
                try:
                    index = json.loads(read_bytes(path, LIMIT, storage_options=self.options))
                    checkpoint = "checkpoint" in index["metadata"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    checkpoint = False
                if not checkpoint:
                    why = "it belongs to another model: save to another name"
                    raise ArgumentError(f"overwire: {path}: {why}", source=self.path)

    def _try_to_publish(self, replaces: bool) -> None:
        # Raises NotSupportedError before anything is written if the file system does not support the renames of
        # `publish`.
        names = [self.path_of(".one"), self.path_of(".two")]
        try:
            for name in names:
                os.mkdir(name)
            _rename_folder(names[0], names[1], replaces)
        finally:
            for name in names:
                with contextlib.suppress(OSError):
                    os.rmdir(name)


def read_manifest(path: str, options: Mapping[str, object] | None) -> Manifest:
    """Returns the manifest of a checkpoint. Raises NotFoundError if no complete checkpoint exists, and FormatError if
    the manifest is invalid."""
    source = f"{path.rstrip('/')}/{NAME}"
    try:
        return decode(read_bytes(source, LIMIT, storage_options=options), source)
    except NotFoundError:
        text = f"overwire: {path}: no complete overwire checkpoint exists (no {NAME})"
        raise NotFoundError(text, source=path) from None


def state_of(path: str, options: Mapping[str, object] | None) -> Any:
    """Returns a value that changes when another save replaces the checkpoint, or None if no checkpoint exists."""
    source = f"{path.rstrip('/')}/{NAME}"
    if not is_remote(source):
        return state_of_file(path_of(source) if is_file(source) else source)
    try:
        with ObjectReader(source, storage_options=options) as file:
            return file.read(1), file.found()
    except NotFoundError:
        return None


def _entries_below(folder: str, below: str = "") -> Iterator[str]:
    # Yields files, links, and empty folders (which end with /). Raises OSError if a folder cannot be listed.
    with os.scandir(os.path.join(folder, below)) as entries:
        for entry in entries:
            name = below + entry.name
            if not entry.is_dir(follow_symlinks=False):
                yield name
            elif os.listdir(entry.path):
                yield from _entries_below(folder, name + "/")
            else:
                yield name + "/"


def _states_below(folder: str) -> dict[str, tuple[int, int, int]]:
    # Returns inode, size and modification time of each entry of `_entries_below`.
    states = {file: os.lstat(os.path.join(folder, file)) for file in _entries_below(folder)}
    return {file: (state.st_ino, state.st_size, state.st_mtime_ns) for file, state in states.items()}


def _is_at(state: os.stat_result, path: str) -> bool:
    # Returns whether the path is the folder that `state` describes. A missing path returns False; other errors are
    # raised.
    try:
        return os.path.samestat(state, os.lstat(path))
    except FileNotFoundError:
        return False


def _release_lock(number: int, path: str, process: int) -> None:
    # A forked child does not remove the file, because its parent holds the lock.
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            os.unlink(path)
    os.close(number)


def _rename_folder(made: str, path: str, exchange: bool) -> None:
    _verbs.rename_folder({"made": made, "path": path, "exchange": exchange})


def _sync_folder(folder: str, entry: str = "") -> None:
    # entry: a path in the folder. If the folder cannot be opened, because it cannot be listed, syncs the file system of
    # `entry`.
    _verbs.sync_names(entry or f"{folder}/{NAME}")

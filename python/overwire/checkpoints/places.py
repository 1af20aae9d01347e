"""Where a checkpoint is written, and how it appears.

A local one is written to a hidden folder beside its own, `.NAME.partial`, and renamed when
it is whole: into its place, or in exchange for the one that it replaces, in one step. In a
store, checkpoint.json is written behind the tensors: without it there is no checkpoint. The
files of each save have names of their own there, and checkpoint.json is written only where none
is: of several saves at once one makes the checkpoint and then its indexes, and the others fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import shutil
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import (
    AccessError,
    ArgumentError,
    IOFailure,
    NotFoundError,
    NotSupportedError,
    OverwireError,
    error_of_system,
)
from ..files import lock_file
from ..model.reading import read_bytes
from ..paths import is_remote, local, refuse_planted_entry, resolve_links
from ..stores import remove_objects, write_bytes
from .manifest import LIMIT, NAME, TRAINING, decode

#: The index of each of the two folders.
INDEX = "model.safetensors.index.json"

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Located:
    """What torch asks a reader or a writer about the path of its checkpoint."""

    _path: str | None = None
    _schemes: tuple[str, ...] = ()

    @property
    def checkpoint_id(self) -> str | None:
        """The path."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is a path, or a URI of a scheme that this one takes."""
        try:
            uri = local(checkpoint_id)
        except OverwireError:
            return False
        return not is_remote(uri) or uri.partition("://")[0] in cls._schemes


class Place:
    """The place of one checkpoint, on every rank. The coordinator calls `begin`, then
    `publish` or `drop`; all ranks write to `path_of`."""

    def __init__(
        self, path: str | os.PathLike[str], storage_options: Mapping[str, object] | None, overwrite: bool
    ) -> None:
        self.path = local(path).rstrip("/")
        self.remote = is_remote(self.path)
        self.options = storage_options
        #: In the names of the checkpoint's files; "": they need none.
        self.mark = f"-ow{secrets.token_hex(4)}" if self.remote else ""
        self._objects: list[str] = []  # to a store, by this save
        self._overwrite = overwrite
        self._unlock: weakref.finalize[..., Any] | None = None  # of the coordinator, while it has the place
        self._target = self._partial = self.path
        if not self.remote:
            self._target = resolve_links(self.path)
            folder, name = os.path.split(self._target)
            if not name:
                raise self._error_at("a checkpoint is a folder of its own")
            self._partial = os.path.join(folder, f".{name}.partial")

    def path_of(self, file: str) -> str:
        """Where a file of the checkpoint is written, until it is published."""
        return f"{self._partial}/{file}"

    def make(self, file: str) -> str:
        """`path_of`, whose folder is there afterwards."""
        path = self.path_of(file)
        if self.remote:
            self._objects.append(path)
        else:
            with self._naming_failures("write to"):
                os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def write(self, file: str, text: bytes) -> None:
        """Writes a small file. In a store, ArgumentError if another save has written checkpoint.json."""
        if not self.remote:
            write_bytes(self.make(file), text, self.options)
            return
        path = self.path_of(file)
        try:
            write_bytes(path, text, self.options, once=file == NAME)
        except ArgumentError as error:
            raise self._error_at("another save of this checkpoint has ended before") from error
        except AccessError:
            raise
        except BaseException:
            if file == NAME:  # it may be there, though no answer says so: what it names stays
                self._objects = []
            raise
        self._objects.append(path)

    def begin(self) -> None:
        """Takes the place, and removes what a killed save has left of itself.

        Raises ArgumentError where something else than a checkpoint is, or, without `overwrite`,
        anything, and where another save is running; NotSupportedError where a checkpoint
        cannot be replaced in one step. Then nothing has changed.
        """
        old = self._has_checkpoint()
        if self.remote:
            self._refuse_indexes()
            return
        with self._naming_failures("make"):
            os.makedirs(os.path.dirname(self._partial), exist_ok=True)
            # Beside the folder: it is held until that has its name, and what was replaced is gone.
            lock = _lock_file(f"{self._partial}.lock")
            if lock is None:
                raise self._error_at("another save of this checkpoint is running")
            self._unlock = weakref.finalize(self, _release_lock, lock, f"{self._partial}.lock", os.getpid())
            self._unlock.atexit = False
            try:
                if os.path.islink(self._partial):
                    raise ArgumentError(
                        f"overwire: {self._partial} is a link, and what it leads to would be removed", source=self.path
                    )
                os.makedirs(self._partial, exist_ok=True)
                refuse_planted_entry(self._partial)  # its owner would be the checkpoint's
                self._clear_partial()
                if old:
                    self._try_exchange()
            except BaseException:
                self.drop()
                raise

    def hand_over(self) -> None:
        """What this rank has written is there, and is the coordinator's to publish or to remove."""
        self._objects = []

    def take_over(self, files: Iterable[str]) -> None:
        """What all ranks have written is this one's to publish or to remove."""
        if self.remote:
            self._objects = [self.path_of(file) for file in files]

    def publish(self, files: Iterable[str]) -> None:
        """Gives the checkpoint its name, if all its files are there. Where it raises, the old one is whole."""
        if self.remote:
            self._objects = []
            return
        try:
            with self._naming_failures("publish"):
                for file in files:
                    if not os.path.isfile(self.path_of(file)):
                        raise IOFailure(
                            f"overwire: {self.path_of(file)} is not there: all ranks must write to one file system",
                            source=self.path,
                        )
                for folder in (self.path_of(TRAINING), self._partial):
                    _sync_folder(folder)
                if self._has_checkpoint():
                    _exchange_folders(self._partial, self._target)
                    _sync_folder(os.path.dirname(self._target), self._target)
                    shutil.rmtree(self._partial, ignore_errors=True)
                else:
                    os.rename(self._partial, self._target)
                    _sync_folder(os.path.dirname(self._target), self._target)
            self._unlock_folder()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Removes what this rank has written and no one published."""
        objects, self._objects = self._objects, []
        if objects:
            with contextlib.suppress(OverwireError):  # the save's own error counts
                remove_objects(objects[::-1], self.options)  # what names the others goes first
        if self._unlock is not None:
            if not os.path.islink(self._partial):
                shutil.rmtree(self._partial, ignore_errors=True)
            self._unlock_folder()

    def _unlock_folder(self) -> None:
        unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()

    def _error_at(self, why: str, kind: type[OverwireError] = ArgumentError) -> OverwireError:
        return kind(f"overwire: {self.path}: {why}", source=self.path)

    def _has_checkpoint(self) -> bool:
        # Whether a checkpoint is there; ArgumentError where it is not to be replaced.
        if self.remote:
            with contextlib.suppress(NotFoundError):
                read_bytes(f"{self.path}/{NAME}", LIMIT, storage_options=self.options)
                raise self._error_at("a checkpoint is there, and in a store none is replaced: save to another name")
            return False
        with self._naming_failures("list"):
            try:
                entries = sorted(os.listdir(self._target))
            except FileNotFoundError:
                return False
            except NotADirectoryError:
                raise self._error_at("it is no folder") from None
            if not entries:
                return False
            if not self._overwrite:
                raise self._error_at("something is there already (overwrite=False)")
            if NAME not in entries:
                raise self._error_at(f"the folder has {entries[0]!r} and is no checkpoint: save to another name")
            manifest = decode(read_bytes(f"{self._target}/{NAME}", LIMIT), f"{self._target}/{NAME}")
            own_files = {NAME, INDEX, f"{TRAINING}/{INDEX}", *(file for part in manifest.parts for file in part.files)}
            below = {
                os.path.relpath(os.path.join(at, file), self._target)
                for at, _, files in os.walk(self._target)
                for file in files
            }
            if strange := sorted(below - own_files):
                raise self._error_at(
                    f"beside the checkpoint it has {strange[0]!r}, which would go: save to another name, or move it"
                )
            return True

    def _clear_partial(self) -> None:
        for entry in os.scandir(self._partial):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)

    def _refuse_indexes(self) -> None:
        # ArgumentError for one of another model. One of a save that was killed, or that runs, stays: the
        # save that makes checkpoint.json writes its own over it.
        for file in (INDEX, f"{TRAINING}/{INDEX}"):
            path = self.path_of(file)
            with contextlib.suppress(NotFoundError):
                try:
                    index = json.loads(read_bytes(path, LIMIT, storage_options=self.options))
                    checkpoint = "checkpoint" in index["metadata"]
                except (ValueError, KeyError, TypeError, RecursionError):
                    checkpoint = False
                if not checkpoint:
                    raise ArgumentError(f"overwire: {path} is of another model: save to another name", source=self.path)

    def _try_exchange(self) -> None:
        names = [self.path_of(".one"), self.path_of(".two")]
        try:
            for name in names:
                os.mkdir(name)
            _exchange_folders(*names)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            why = "its file system cannot exchange two folders in one step: save to another name"
            raise self._error_at(why, NotSupportedError) from None
        finally:
            for name in names:
                with contextlib.suppress(OSError):
                    os.rmdir(name)

    @contextlib.contextmanager
    def _naming_failures(self, what: str) -> Any:
        try:
            yield
        except OverwireError:
            raise
        except OSError as error:
            raise error_of_system(error, what, self.path) from error


def read_manifest(path: str, options: Mapping[str, object] | None) -> Any:
    """The manifest of a checkpoint. Raises NotFoundError where none is whole, FormatError."""
    source = f"{path.rstrip('/')}/{NAME}"
    try:
        return decode(read_bytes(source, LIMIT, storage_options=options), source)
    except NotFoundError:
        raise NotFoundError(
            f"overwire: {path}: no whole checkpoint of overwire is there (no {NAME})", source=path
        ) from None


def _lock_file(path: str) -> int | None:
    # The lock of a file, as a descriptor; None: another process, or Place, has it.
    while True:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            lock_file(number, path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(number), os.lstat(path)):
                return number
        except FileNotFoundError:  # its holder has just ended, and removed it
            pass
        except BlockingIOError:
            os.close(number)
            return None
        except BaseException:
            os.close(number)
            raise
        os.close(number)


def _release_lock(number: int, path: str, process: int) -> None:
    # A fork's copy does not end the lock of the process that has it.
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            os.unlink(path)
    os.close(number)


def _exchange_folders(one: str, two: str) -> None:
    _call_libc("renameat2", _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(two), _RENAME_EXCHANGE)


def _sync_folder(folder: str, entry: str = "") -> None:
    # A folder that may be written and not listed cannot be opened: there the whole file system is synced, by an entry.
    is_listable = not entry or os.access(folder, os.R_OK, effective_ids=True)
    with contextlib.suppress(FileNotFoundError):
        number = os.open(folder if is_listable else entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number) if is_listable else _call_libc("syncfs", number)
        finally:
            os.close(number)


def _call_libc(name: str, *args: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, name):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if getattr(libc, name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

"""Stores models in a folder after an engine has processed them, one file per rank.

A file is an overwire container. The name of the file is a fingerprint of all inputs of the engine's processing that are
known before the model is built. The metadata lists the name and kind of each tensor in the model, and describes every
attribute of every module. A model that is restored from the file is used only if its description is the same.

A file appears only when it is complete, and only its owner can write it. When the folder exceeds its limit,
the least recently used files are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

#: The metadata key of the record that describes a file's model.
KEY = "overwire.prepared"

_SUFFIX = ".safetensors"
_BEGUN = ".begun-"

# The names of overwire's files. Other files in the folder are never removed.
_OURS = re.compile(r"[0-9a-f]{40}" + re.escape(_SUFFIX))

# The most seconds between the creation of a new file and the time when its writer locks it.
_LATE = 60.0

_GB = 10**9

# The parts of a complete record.
_RECORD = {"tensors": dict, "names": dict, "modules": dict, "origins": str}

# The size of each read. The same bytes are then read again, from the processor's cache.
_BLOCK = 1 << 20


class Refused(Exception):
    """Raised if a model is not stored, or is not restored from a stored file. The message gives the reason."""


class Damaged(Refused):
    """Raised if the stored file was damaged and has been removed. The model may be stored again."""


class Kept(NamedTuple):
    """A file in the folder, and the record that describes its model."""

    path: str
    record: dict[str, Any]


def ensure_folder(chosen: bool | str) -> str:
    """Returns the folder that an engine's configuration asks for, and creates it. True means OVERWIRE_PREPARED, or
    overwire/prepared in the user's cache folder. Raises Refused if the folder cannot be used."""
    from ..._compat_api import setting
    from ...errors import AccessError
    from ...stores import refuse_planted

    path = chosen if isinstance(chosen, str) else str(setting("OVERWIRE_PREPARED"))
    if not path:
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # the XDG rules ignore a relative path
            base = os.path.expanduser("~/.cache")
        path = os.path.join(base, "overwire", "prepared")
    path = os.path.abspath(os.path.expanduser(path))
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        _check_owner(os.stat(path), path)
        refuse_planted(path)  # the owner of a parent folder could replace this folder
    except AccessError as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}") from None
    return path


def _check_owner(found: os.stat_result, path: str) -> None:
    # A user who can write to these files controls the model's weights and attributes.
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Refused(f"{path} belongs to another user, or other users may write to it")


def find_file(folder: str, name: str) -> Kept | None:
    """Returns the file of a fingerprint, or None if it does not exist. Raises Refused if the file cannot be used, or if
    it contains a note that the model cannot be stored."""
    import overwire

    path = os.path.join(folder, name + _SUFFIX)
    try:
        state = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(state.st_mode):
        raise Refused(f"{path} is not a regular file")
    _check_owner(state, path)
    try:
        with overwire.safe_open(path, framework="pt", device="cpu") as file:
            record = json.loads((file.metadata() or {})[KEY])
        if not isinstance(record, dict):
            raise ValueError("its record is not valid")
        whole = all(isinstance(record.get(part), kind) for part, kind in _RECORD.items())
        if not record.get("refused") and not whole:
            raise ValueError("its record is incomplete")
    except (overwire.CorruptError, overwire.FormatError, KeyError, ValueError, RecursionError) as error:
        try_remove(path)
        raise Damaged(f"{path} is damaged: {error}") from None
    except overwire.NotFoundError:
        return None  # another process has removed it
    except (overwire.OverwireError, OSError) as error:  # the file is not removed, because it may be intact
        raise Refused(f"{path} cannot be read: {error}") from None
    if record.get("refused"):
        raise Refused(str(record["refused"]))
    return Kept(path, record)


def newest_name(folder: str, place: str) -> str | None:
    """Returns the most recently used fingerprint that begins with `place`, or None if there is none."""
    files = [(0, "")]
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(place) and entry.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):  # another process may remove it
                    files.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name.removesuffix(_SUFFIX)))
    return max(files)[1] or None


def note_use(path: str) -> None:
    """Sets a file's time of last use to now."""
    with contextlib.suppress(OSError):
        os.utime(path)


def try_remove(path: str) -> None:
    """Removes a file if it exists and can be removed."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def keep_file(
    folder: str, name: str, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], digests: Mapping[str, str]
) -> str:
    """Writes the file of a fingerprint, removes old files, and returns its path.

    digests: the digests of the tensors when they were described. Raises Refused if the tensors have changed since then,
    or if they are larger than the folder's limit. Also raises the errors of saving. After an error there is no file.
    """
    import overwire

    from ..._compat_api import setting
    from ...stores import publish

    most = int(setting("OVERWIRE_PREPARED_GB")) * _GB
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > most:
        raise Refused(f"its {size / 1e9:.1f} GB exceed the limit of {folder} (OVERWIRE_PREPARED_GB)")
    _remove_left(folder)
    path = os.path.join(folder, name + _SUFFIX)
    temporary = os.path.join(folder, f"{_BEGUN}{secrets.token_hex(8)}-{name}{_SUFFIX}")
    try:
        overwire.save_file(tensors, temporary, {KEY: json.dumps(record)}, digests=True)
        with open(temporary, "rb") as file:
            with contextlib.suppress(OSError):  # without locks, unfinished files are never removed
                fcntl.flock(file, fcntl.LOCK_SH)
            os.chmod(temporary, 0o600)
            if tensors and not overwire.verify(temporary, tensors=tensors)["ok"] or overwire.digest(tensors) != digests:
                raise Refused("its weights have changed since it was loaded")
            _activate_pages(temporary)
            publish(temporary, path)
    finally:
        try_remove(temporary)
    _evict_files(folder, path, most)
    return path


def _remove_left(folder: str) -> None:
    # Removes unfinished files of writers that have ended. No process holds the locks of these files, not even a process
    # in another OS container.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(_BEGUN) or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                if entry.name.endswith(_SUFFIX) and time.time() - os.fstat(file.fileno()).st_mtime > _LATE:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    try_remove(entry.path)


def _activate_pages(path: str) -> None:
    # Reads each block of a new file twice, so that Linux moves its pages to the active list. This takes a lock that all
    # processors share. Otherwise the first load would do this, and would take 0.2 s longer for 16 GB.
    block = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            file.seek(-count, os.SEEK_CUR)
            file.readinto(block[:count])


def is_passing(error: BaseException | None) -> bool:
    """Returns whether an error or its cause is temporary, so that later starts may succeed: an error of loading,
    memory, the GPU, or of starting a thread."""
    import overwire

    of_gpu = torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError)
    while error is not None:
        if isinstance(error, (overwire.OverwireError, MemoryError, OSError, *of_gpu)):
            return True
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):  # it has no class
            return True
        error = error.__cause__
    return False


def note_refusal(folder: str, name: str, reason: str) -> None:
    """Notes why the model of a fingerprint cannot be stored, so that later starts do not try again."""
    import overwire

    with contextlib.suppress(overwire.OverwireError, OSError):
        keep_file(folder, name, {}, {"refused": reason}, {})


def _evict_files(folder: str, newest: str, most: int) -> None:
    # Removes the least recently used files until the folder is within its limit.
    files = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                state = entry.stat(follow_symlinks=False)
                if _OURS.fullmatch(entry.name) and stat.S_ISREG(state.st_mode):
                    files.append((entry.path == newest, state.st_mtime_ns, state.st_size, entry.path))
    files.sort(reverse=True)
    total = 0
    for _, _, size, path in files:
        total += size
        if total > most and path != newest:
            try_remove(path)


def fingerprint(*parts: Any) -> str:
    """Returns a digest of the parts as JSON. A value that JSON cannot express is converted to text first."""
    out = hashlib.sha256()
    for part in parts:
        text = json.dumps(part, default=str, sort_keys=True).encode()
        out.update(len(text).to_bytes(8, "little") + text)
    return out.hexdigest()[:40]

"""Models as an engine holds them after its processing: kept as files of a folder, one for each rank.

A file is one of overwire's containers. Its name is a fingerprint of all that the engine's
processing goes by, as far as that is known before the model is made; its metadata says
which tensor is what in the model, and describes every attribute of every module. A model that is made
of it counts only if all of that is so again.

Files appear complete, are written by their owner alone, and leave when the folder is
larger than it may be: those first that were not used for the longest time.
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

#: Under which name the metadata of a container has what a file says about its model.
KEY = "overwire.prepared"

_SUFFIX = ".safetensors"
_BEGUN = ".begun-"

# What files of the folder are called: others in it are not ours to remove.
_OURS = re.compile(r"[0-9a-f]{40}" + re.escape(_SUFFIX))

# Seconds that a writer needs, at most, from the last byte of a file that it has begun to its lock.
_LATE = 60.0

_GB = 10**9

# What a record has of a model that fits.
_RECORD = {"tensors": dict, "names": dict, "modules": dict, "origins": str}

# Read at once, and still in the processor's cache when it is read again.
_BLOCK = 1 << 20


class Refused(Exception):
    """Why a model is not kept, or not made of what was kept."""


class Damaged(Refused):
    """The file that was kept is damaged, and removed: the model may be kept again."""


class Kept(NamedTuple):
    """A file of a folder, and what it says about its model."""

    path: str
    record: dict[str, Any]


def ensure_folder(chosen: bool | str) -> str:
    """The folder that an engine's configuration asks for: True is that of OVERWIRE_PREPARED, or
    overwire/prepared in the cache folder of the user. Raises Refused where there is none."""
    from ...errors import AccessError
    from ...plumbing import refuse_planted, setting

    path = chosen if isinstance(chosen, str) else str(setting("OVERWIRE_PREPARED"))
    if not path:
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # the rules ignore a relative one
            base = os.path.expanduser("~/.cache")
        path = os.path.join(base, "overwire", "prepared")
    path = os.path.abspath(os.path.expanduser(path))
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        _check_owner(os.stat(path), path)
        refuse_planted(path)  # who has a folder above may put another in its place
    except AccessError as error:
        raise Refused(str(error)) from None
    except OSError as error:
        raise Refused(f"{path}: {error.strerror or error}") from None
    return path


def _check_owner(found: os.stat_result, path: str) -> None:
    # What lies here becomes the model's memory and attributes.
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise Refused(f"{path} belongs to another user, or others may write it")


def find_file(folder: str, name: str) -> Kept | None:
    """The file of a fingerprint; None if there is none. Raises Refused for one that cannot be
    used, and where the model was found not to fit for it."""
    import overwire

    path = os.path.join(folder, name + _SUFFIX)
    try:
        state = os.lstat(path)
    except OSError:
        return None
    if not stat.S_ISREG(state.st_mode):
        raise Refused(f"{path} is not a file")
    _check_owner(state, path)
    try:
        with overwire.safe_open(path, framework="pt", device="cpu") as file:
            record = json.loads((file.metadata() or {})[KEY])
        if not isinstance(record, dict):
            raise ValueError("its record is none")
        whole = all(isinstance(record.get(part), kind) for part, kind in _RECORD.items())
        if not record.get("refused") and not whole:
            raise ValueError("its record lacks a part")
    except (overwire.CorruptError, overwire.FormatError, KeyError, ValueError, RecursionError) as error:
        try_remove(path)
        raise Damaged(f"{path} is damaged: {error}") from None
    except overwire.NotFoundError:
        return None  # another process has removed it
    except (overwire.OverwireError, OSError) as error:  # of this process or machine: the file may be whole
        raise Refused(f"{path} cannot be read: {error}") from None
    if record.get("refused"):
        raise Refused(str(record["refused"]))
    return Kept(path, record)


def newest_name(folder: str, place: str) -> str | None:
    """The fingerprint that begins so of the file that was used last; None if there is none."""
    files = [(0, "")]
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(place) and entry.name.endswith(_SUFFIX):
                with contextlib.suppress(OSError):  # another process may remove it
                    files.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name.removesuffix(_SUFFIX)))
    return max(files)[1] or None


def note_use(path: str) -> None:
    """Notes that a file was used."""
    with contextlib.suppress(OSError):
        os.utime(path)


def try_remove(path: str) -> None:
    """Removes a file, if it is there and can be removed."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def keep_file(
    folder: str, name: str, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any], digests: Mapping[str, str]
) -> str:
    """Writes the file of a fingerprint, and removes old ones; returns its path.

    digests: those of the tensors when they were described. Raises Refused if they are others
    now, or were while they were written, and where the folder may not hold the file; and
    what saving raises. Nothing appears then.
    """
    import overwire

    from ...plumbing import publish, setting

    most = int(setting("OVERWIRE_PREPARED_GB")) * _GB
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > most:
        raise Refused(f"its {size / 1e9:.1f} GB are more than {folder} may hold (OVERWIRE_PREPARED_GB)")
    _remove_left(folder)
    path = os.path.join(folder, name + _SUFFIX)
    temporary = os.path.join(folder, f"{_BEGUN}{secrets.token_hex(8)}-{name}{_SUFFIX}")  # of this writer alone
    try:
        overwire.save_file(tensors, temporary, {KEY: json.dumps(record)}, digests=True)
        with open(temporary, "rb") as file:
            with contextlib.suppress(OSError):  # where files cannot be locked, nothing that was begun is removed
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
    # What writers have begun that have ended since, in whatever container: no one has it locked.
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(_BEGUN) or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                if entry.name.endswith(_SUFFIX) and time.time() - os.fstat(file.fileno()).st_mtime > _LATE:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    try_remove(entry.path)


def _activate_pages(path: str) -> None:
    # Linux moves each page of a new file to the list of those in use when it is read again, under one lock for all
    # processors: without this the first load of 16 GB takes 0.2 s longer than later ones.
    block = memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            file.seek(-count, os.SEEK_CUR)
            file.readinto(block[:count])


def is_passing(error: BaseException | None) -> bool:
    """Whether an error, or one that has led to it, is of this process or machine now, and says nothing about other
    starts: of loading, of memory, of the GPU, of threads that the system does not start."""
    import overwire

    of_gpu = torch.OutOfMemoryError, getattr(torch, "AcceleratorError", MemoryError)
    while error is not None:
        if isinstance(error, (overwire.OverwireError, MemoryError, OSError, *of_gpu)):
            return True
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):  # Python has no class for it
            return True
        error = error.__cause__
    return False


def note_refusal(folder: str, name: str, reason: str) -> None:
    """Notes that the model of a fingerprint does not fit, so that later starts do not try."""
    import overwire

    with contextlib.suppress(overwire.OverwireError, OSError):
        keep_file(folder, name, {}, {"refused": reason}, {})


def _evict_files(folder: str, newest: str, most: int) -> None:
    # Removes what is too much of our files.
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
    """The digest of parts, as JSON has them or as text."""
    out = hashlib.sha256()
    for part in parts:
        text = json.dumps(part, default=str, sort_keys=True).encode()
        out.update(len(text).to_bytes(8, "little") + text)
    return out.hexdigest()[:40]

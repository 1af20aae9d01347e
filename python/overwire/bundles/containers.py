"""Finds the container that belongs to a pickle.

`D/x.pkl` is the pickle, and `D/tensors/x.safetensors` contains its tensors. nyacomp's functions write to `D/nya`
instead (see `manifest`). Readers search both folders. This module opens no tensor file and imports little.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from .. import _verbs
from .._tables import HEAD_BYTES
from ..errors import ArgumentError, FormatError, NotFoundError
from ..filekinds import kind_of_file
from ..files import regular
from ..paths import is_there, raise_unless_absent

OWN, NYACOMP = "tensors", "nya"
#: The folders next to a pickle that may have its container, in the order in which they are searched.
FOLDERS = (OWN, NYACOMP)


def container_of(pickle_path: str, folder: str) -> str:
    """Returns the container of a pickle: D/x.pkl -> D/FOLDER/x.safetensors. If that belongs to another pickle
    (D/x.pth), returns D/FOLDER/x.pkl.safetensors."""
    for other in store_containers_of(pickle_path, folder):  # the second choice, or a file copied from a store
        if is_there(other):
            return other
    parent, name = os.path.split(pickle_path)
    return os.path.join(parent, folder, os.path.splitext(name)[0] + ".safetensors")


def containers_of(pickle_path: str) -> list[str]:
    """Returns the possible containers of a pickle: existing ones first, then those in existing folders."""
    places = [container_of(pickle_path, folder) for folder in FOLDERS]
    return sorted(places, key=lambda path: (not os.path.exists(path), not os.path.isdir(os.path.dirname(path))))


def second_container_of(pickle_path: str, folder: str) -> str:
    """Returns the path that a container gets if another pickle uses the first choice."""
    parent, name = os.path.split(pickle_path)
    return os.path.join(parent, folder, name + ".safetensors")


def rivals_of(pickle_path: str) -> list[str]:
    """Returns the other pickles in the folder that have the same container as their first choice."""
    folder, name = os.path.split(pickle_path)
    stem = os.path.splitext(name)[0]
    others = [other for other in os.listdir(folder) if other != name and os.path.splitext(other)[0] == stem]
    return [path for path in (os.path.join(folder, other) for other in others) if is_pickle(path)]


def previous_of(container: str) -> str:
    """Returns the name for the previous container while a bundle is replaced."""
    folder, name = os.path.split(container)
    if len(os.fsencode(name)) > 251:  # the limit for names is 255 bytes
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return os.path.join(folder, name + ".old")


def lock_of(pickle_path: str, folder: str) -> str:
    """Returns the lock file for writing a bundle. Pickles that differ only in their endings share a lock file, because
    they may have the same container."""
    parent, name = os.path.split(pickle_path)
    stem = os.path.splitext(name)[0]
    if len(os.fsencode(stem)) > 240:  # the limit for names is 255 bytes
        stem = hashlib.sha256(os.fsencode(stem)).hexdigest()
    return os.path.join(parent, folder, f".{stem}.lock")


def store_containers_of(uri: str, folder: str) -> tuple[str, str]:
    """Returns the two paths or URIs that alternate for a pickle's container in a store. They include the pickle's
    ending, so pickles with different endings do not share them."""
    first = second_container_of(uri, folder)
    return first, first.removesuffix(".safetensors") + ".b.safetensors"


def remote_containers_of(uri: str, folders: Sequence[str]) -> list[str]:
    """Returns the URIs that the container of a remote pickle may have, folder by folder. Only opening them shows which
    one exists."""
    name = _verbs.beside({"uri": uri})["name"]
    stem = os.path.splitext(name)[0]
    parts = (stem, name, name + ".b")
    names = [f"{folder}/{part}.safetensors" for folder in folders for part in parts]
    return _verbs.beside({"uri": uri, "names": names})["uris"]


def not_beside(path: str, container: str) -> NotFoundError | FormatError:
    """Returns the error for a local pickle that has no container."""
    kind = kind_of_file(path, _read_head(path, HEAD_BYTES))
    if kind is not None and kind.what != "a pickle":
        return FormatError(f"overwire: open {path}: this is {kind.what}, not a bundle: {kind.do}", source=path)
    text = f"overwire: open {path}: there is no container {container}: copy that folder together with the pickle; "
    text += "if save_bundle did not write this file, use load_file (safetensors), torch.load or pickle"
    return NotFoundError(text, source=path)


def is_pickle(path: str) -> bool:
    """Returns whether a file begins like a pickle of protocol 2 or later."""
    head = _read_head(path)
    return head[:1] == b"\x80" and not _is_header(head)


def is_container(path: str) -> bool:
    """Returns whether a file begins like a safetensors file, whatever its name."""
    return _is_header(_read_head(path))


def _is_header(head: bytes) -> bool:
    # The header length takes 8 bytes, and the upper 4 are always 0.
    return head[4:9] == b"\0\0\0\0{"


def _read_head(path: str, size: int = 9) -> bytes:
    try:
        with open(path, "rb", opener=regular) as file:
            return file.read(size)
    except (IsADirectoryError, ArgumentError):
        return b""
    except OSError as error:  # an unreadable file may be a pickle that needs its container
        raise_unless_absent(error, path)
        return b""  # opening it reports why

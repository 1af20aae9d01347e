"""Finds the files of a pickled bundle, and reads and writes nyacomp's meta.csv.

`D/x.pkl` is the pickle, and `D/tensors/x.safetensors` contains its tensors. nyacomp's functions write to `D/nya`
instead, and also write `D/nya/meta.csv`. Readers search both folders. The csv has nyacomp's format, so scripts that
upload the files it lists, or set PRELOAD_PATH to it, still work:

    line 1        thread bins: commas between threads, semicolons between files
    other lines   filename shape dtype decompressed_size compressed_size

A shape has semicolons between dimensions. overwire writes one row, which describes the container as a uint8 tensor.
This module opens no tensor file and imports little.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from .. import _verbs
from .._environment import truth
from .._tables import HEAD_BYTES
from ..errors import AccessError, ArgumentError, FormatError, NotFoundError, NotSupportedError
from ..filekinds import kind_of_file
from ..files import regular
from ..jobs import shown
from ..paths import is_remote, is_there, raise_unless_absent
from .reading import read_bytes

OWN, NYACOMP = "tensors", "nya"
#: The folders next to a pickle that may have its container, in the order in which they are searched.
FOLDERS = (OWN, NYACOMP)
META = "meta.csv"
_MODEL_ENDINGS = (".safetensors", ".json")


class MetaRow(NamedTuple):
    """One file that a meta.csv lists."""

    filename: str
    shape: tuple[int, ...]
    dtype: str
    decompressed_size: int
    compressed_size: int


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
    """Returns the path of the container if another pickle uses the first choice."""
    parent, name = os.path.split(pickle_path)
    return os.path.join(parent, folder, name + ".safetensors")


def rivals_of(pickle_path: str) -> list[str]:
    """Returns the other pickles in the folder with the same first choice of a container."""
    folder, name = os.path.split(pickle_path)
    stem = os.path.splitext(name)[0]
    paths = [os.path.join(folder, other) for other in os.listdir(folder) if other != name]
    return [p for p in paths if os.path.splitext(os.path.basename(p))[0] == stem and is_pickle(p)]


def previous_of(container: str) -> str:
    """Returns the path to which the previous container is moved while a bundle is replaced."""
    folder, name = os.path.split(container)
    if len(os.fsencode(name)) > 251:  # the limit for names is 255 bytes
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return os.path.join(folder, name + ".old")


def lock_of(pickle_path: str, folder: str) -> str:
    """Returns the lock file for writing a bundle. Pickles that differ only in their endings share it,
    because they may have the same container."""
    parent, name = os.path.split(pickle_path)
    stem = os.path.splitext(name)[0]
    if len(os.fsencode(stem)) > 240:  # the limit for names is 255 bytes
        stem = hashlib.sha256(os.fsencode(stem)).hexdigest()
    return os.path.join(parent, folder, f".{stem}.lock")


def store_containers_of(uri: str, folder: str) -> tuple[str, str]:
    """Returns the two paths or URIs that alternate for a pickle's container in a store. They include the pickle's
    ending, so pickles with other endings do not share them."""
    first = second_container_of(uri, folder)
    return first, first.removesuffix(".safetensors") + ".b.safetensors"


def meta_of(pickle_path: str) -> str:
    """Returns the csv that nyacomp's functions write for a pickle: D/x.pkl -> D/nya/meta.csv."""
    return os.path.join(os.path.dirname(pickle_path), NYACOMP, META)


def meta_text(container: str, size: int) -> str:
    """Returns the text of a csv next to a container of `size` bytes. The row has the container's full path, or only its
    name if the path has a line break."""
    name = os.path.basename(container) if "\n" in container else container
    return f"0\n{name} {size} uint8 {size} {size}"


def read_meta(path: str) -> list[MetaRow]:
    """Returns the rows of a meta.csv (a path or a URI) that overwire or nyacomp wrote. Raises FormatError for other
    files."""
    return meta_rows(path, os.fsdecode(read_bytes(path, 1 << 24)))  # names may be any bytes


def meta_rows(path: str, text: str) -> list[MetaRow]:
    """Returns the rows in the text of a meta.csv. path: the csv, for messages. Raises FormatError if the text is
    invalid, and AccessError if a local csv names a Redis server, because the csv may come from an attacker."""
    rows = []
    for number, line in enumerate(text.split("\n")[1:], start=2):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        try:
            # Splits from the right, because a filename may contain spaces.
            filename, shape, dtype, plain, stored_size = line.rsplit(" ", 4)
            dims = tuple(int(d) for d in shape.split(";") if d)
            row = MetaRow(filename, dims, dtype, int(plain), int(stored_size))
            if min((*dims, row.decompressed_size, row.compressed_size)) < 0 or "\0" in filename:
                raise ValueError
            rows.append(row)
        except ValueError as error:
            raise FormatError(
                f"overwire: open {shown(path)} line {number}: expected 'filename shape dtype decompressed_size "
                f"compressed_size'",
                source=path,
            ) from error
        scheme = filename.partition("://")[0].lower()
        if scheme in ("redis", "rediss") and not is_remote(path):
            raise AccessError(
                f"overwire: open {path} line {number}: it names {shown(filename)}, but REDISCLI_AUTH is not sent to "
                "a server that a file names: pass the URI yourself",
                source=path,
            )
    return rows


def containers_in(path: str) -> list[str]:
    """Returns the paths of the containers that a meta.csv (a path or a URI) lists, even if its folder was moved. Raw
    entries are not containers and are left out."""
    # Old versions of nyacomp put the csv at D/meta.csv.
    if not os.path.exists(path) and os.path.basename(path) == META:
        newer = os.path.join(os.path.dirname(path), NYACOMP, META)
        path = newer if os.path.exists(newer) else path
    containers = []
    for name in _listed_names(path, read_meta(path)):
        place = place_of(path, name)
        if not name.endswith(".safetensors") and os.path.exists(place) and not is_container(place):
            raise _by_nyacomp(path, name)
        containers.append(place)
    return containers


def _listed_names(meta: str, rows: list[MetaRow]) -> list[str]:
    names = [row.filename for row in rows if not row.filename.endswith("raw")]
    if not names:
        raise FormatError(f"overwire: open {meta}: it lists no container", source=meta)
    return names


def _by_nyacomp(meta: str, filename: str) -> NotSupportedError:
    """Returns the error for a file in a meta.csv that is not a container."""
    name = os.path.basename(filename)
    return NotSupportedError(
        f"overwire: open {meta}: {name!r} was written by nyacomp itself: compress the model again with overwire",
        source=meta,
    )


def remote_containers_of(uri: str, folders: Sequence[str]) -> list[str]:
    """Returns the URIs that the container of a remote pickle may have, folder by folder. Only opening them shows which
    one exists."""
    name = _verbs.beside({"uri": uri})["name"]
    stem = os.path.splitext(name)[0]
    parts = (stem, name, name + ".b")
    names = [f"{folder}/{part}.safetensors" for folder in folders for part in parts]
    return _verbs.beside({"uri": uri, "names": names})["uris"]


def remote_containers_in(uri: str, text: str) -> list[str]:
    """Returns the URIs of the containers that a remote meta.csv lists. Each is next to the csv, or in the folder nya
    next to the csv if an old version of nyacomp wrote it."""
    folder = _verbs.beside({"uri": uri})["path"].rpartition("/")[0] + "/"
    names = _listed_names(shown(uri), meta_rows(uri, text))
    for name in names:
        if not name.endswith(".safetensors"):
            raise _by_nyacomp(shown(uri), name)
    return _verbs.beside({"uri": uri, "names": [beside(folder, name) for name in names]})["uris"]


def beside(folder: str, filename: str) -> str:
    """Returns the path of a file that a csv lists, relative to the csv's folder (which ends with a slash)."""
    parent, name = os.path.split(filename)
    below = os.path.basename(parent) == NYACOMP and not folder.endswith(f"/{NYACOMP}/")
    return f"{NYACOMP}/{name}" if below else name


def refuse_urls(meta: str) -> None:
    """Raises AccessError if a local meta.csv names URLs, unless nyacomp's DOWNLOAD allows them. An import must not
    request them, because the file may come from an attacker."""
    if truth("DOWNLOAD"):
        return
    for place in containers_in(meta):
        if is_remote(place):
            raise AccessError(
                f"overwire: open {meta}: it names {shown(place)}, but a preload at import does not follow URLs in a "
                "local manifest: set DOWNLOAD=1, or call preload yourself",
                source=meta,
            )


def place_of(meta: str, filename: str) -> str:
    """Returns the current path of a file that a meta.csv lists: next to the csv, or the listed path. nyacomp's names
    begin with a slash even if they are relative."""
    folder, name = os.path.split(meta)[0], os.path.basename(filename)
    standing = filename if "://" in filename else os.path.join(folder, filename)
    candidates = [os.path.join(folder, name), os.path.join(folder, NYACOMP, name), standing, filename.lstrip("/")]
    for place in candidates:
        if os.path.exists(place):
            return place
    return candidates[0] if "://" in meta and "://" not in filename else standing


def preload_uris(path: str) -> list[str]:
    """Returns what a preload of this path reads: the containers of a pickle or a meta.csv, otherwise the path
    itself."""
    if path.endswith(".csv"):
        return containers_in(path)
    if "://" in path:
        return [path]
    if not path.endswith(_MODEL_ENDINGS) and not os.path.isdir(path):
        container = containers_of(path)[0]
        if os.path.exists(container):
            return [container]
        if is_pickle(path):
            raise not_beside(path, container)
    return [path]


def not_beside(path: str, container: str) -> NotFoundError | FormatError:
    """Returns the error for a local pickle that has no container."""
    kind = kind_of_file(path, _read_head(path, HEAD_BYTES))
    if kind is not None and kind.what != "a pickle":
        return FormatError(f"overwire: open {path}: this is {kind.what}, not a bundle: {kind.do}", source=path)
    return NotFoundError(
        f"overwire: open {path}: there is no container {container}: copy that folder together with the pickle; "
        "if save_bundle did not write this file, use load_file (safetensors), torch.load or pickle",
        source=path,
    )


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
    except OSError as error:  # an unreadable file may be a pickle, and its container must be kept
        raise_unless_absent(error, path)
        return b""  # opening it reports why

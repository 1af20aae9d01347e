"""Reads and writes nyacomp's meta.csv, and finds the files to read for a bundle.

nyacomp's functions write `D/nya/meta.csv` next to the containers. The file has nyacomp's format, so scripts still work
that upload the listed files or set PRELOAD_PATH to the csv:

    line 1        thread bins: commas between threads, semicolons between files
    other lines   filename shape dtype decompressed_size compressed_size

A shape has semicolons between dimensions. overwire writes one row, which describes the container as a uint8 tensor.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import NamedTuple

from .. import _verbs
from .._environment import truth
from ..errors import AccessError, FormatError, NotFoundError, NotSupportedError
from ..jobs import shown
from ..model.opened import Model
from ..model.reading import read_bytes, read_uri
from ..paths import is_remote
from . import containers
from .containers import NYACOMP

META = "meta.csv"
# The largest manifest that is read, in bytes.
_LARGEST = 1 << 24
_MODEL_ENDINGS = (".safetensors", ".json")
_PICKLE_ENDINGS = (".pkl", ".pickle", ".pth", ".pt")


class ListedFile(NamedTuple):
    """One file that a meta.csv lists."""

    filename: str
    shape: tuple[int, ...]
    dtype: str
    decompressed_size: int
    compressed_size: int


class Manifest:
    """The files that a meta.csv lists. Raises FormatError if its text is invalid, and AccessError if a local csv names
    a Redis server, because the csv may come from an attacker."""

    def __init__(self, path: str, text: str) -> None:
        #: The path or URI of the csv.
        self.path = path
        self.rows: list[ListedFile] = []
        for number, line in enumerate(text.split("\n")[1:], start=2):
            line = line.removesuffix("\r")
            if line.strip():
                self.rows.append(self._parse_line(number, line))

    @classmethod
    def read_csv(cls, path: str) -> Manifest:
        """Reads the csv at a path. Raises FormatError for files that neither overwire nor nyacomp wrote."""
        # Old versions of nyacomp put the csv at D/meta.csv.
        if not os.path.exists(path) and os.path.basename(path) == META:
            newer = os.path.join(os.path.dirname(path), NYACOMP, META)
            path = newer if os.path.exists(newer) else path
        return cls(path, os.fsdecode(read_bytes(path, _LARGEST)))  # names may be any bytes

    def _parse_line(self, number: int, line: str) -> ListedFile:
        try:
            # Splits from the right, because a filename may contain spaces.
            filename, shape, dtype, plain, stored_size = line.rsplit(" ", 4)
            dims = tuple(int(d) for d in shape.split(";") if d)
            row = ListedFile(filename, dims, dtype, int(plain), int(stored_size))
            if min((*dims, row.decompressed_size, row.compressed_size)) < 0 or "\0" in filename:
                raise ValueError
        except ValueError as error:
            text = "expected 'filename shape dtype decompressed_size compressed_size'"
            where = f"overwire: open {shown(self.path)} line {number}"
            raise FormatError(f"{where}: {text}", source=self.path) from error
        scheme = filename.partition("://")[0].lower()
        if scheme in ("redis", "rediss") and not is_remote(self.path):
            text = "but REDISCLI_AUTH is not sent to a server that a file names: pass the URI yourself"
            where = f"overwire: open {self.path} line {number}"
            raise AccessError(f"{where}: it names {shown(filename)}, {text}", source=self.path)
        return row

    def place_of(self, filename: str) -> str:
        """Returns the current path of a listed file: next to the csv, or the listed path. nyacomp's names begin with a
        slash even if they are relative paths."""
        folder, name = os.path.split(self.path)[0], os.path.basename(filename)
        standing = filename if "://" in filename else os.path.join(folder, filename)
        candidates = [os.path.join(folder, name), os.path.join(folder, NYACOMP, name), standing, filename.lstrip("/")]
        for place in candidates:
            if os.path.exists(place):
                return place
        return candidates[0] if "://" in self.path and "://" not in filename else standing

    @staticmethod
    def name_in(folder: str, filename: str) -> str:
        """Returns the path of a listed file relative to the csv's folder (which ends with a slash): in that folder, or
        in its subfolder nya if an old version of nyacomp wrote the csv."""
        parent, name = os.path.split(filename)
        below = os.path.basename(parent) == NYACOMP and not folder.endswith(f"/{NYACOMP}/")
        return f"{NYACOMP}/{name}" if below else name

    def list_containers(self) -> list[str]:
        """Returns the paths of the listed containers, even if their folder was moved. For a remote csv, returns their
        URIs. Raw entries are left out, because they are not containers."""
        names = [row.filename for row in self.rows if not row.filename.endswith("raw")]
        remote = is_remote(self.path)
        source = shown(self.path) if remote else self.path
        if not names:
            raise FormatError(f"overwire: open {source}: it lists no container", source=source)
        places = [] if remote else [self.place_of(name) for name in names]
        for at, name in enumerate(names):
            is_named = name.endswith(".safetensors")
            if not is_named and (remote or os.path.exists(places[at]) and not containers.is_container(places[at])):
                text = "was written by nyacomp itself: compress the model again with overwire"
                raise NotSupportedError(f"overwire: open {source}: {os.path.basename(name)!r} {text}", source=source)
        if not remote:
            return places
        folder = _verbs.beside({"uri": self.path})["path"].rpartition("/")[0] + "/"
        return _verbs.beside({"uri": self.path, "names": [self.name_in(folder, name) for name in names]})["uris"]

    def refuse_urls(self) -> None:
        """Raises AccessError if this local csv names URLs, unless nyacomp's DOWNLOAD allows them. An import must not
        request these URLs, because the file may come from an attacker."""
        for place in () if truth("DOWNLOAD") else self.list_containers():
            if is_remote(place):
                text = f"it names {shown(place)}, but a preload at import does not follow URLs in a local manifest"
                advice = "set DOWNLOAD=1, or call preload yourself"
                raise AccessError(f"overwire: open {self.path}: {text}: {advice}", source=self.path)


def meta_of(pickle_path: str) -> str:
    """Returns the csv that nyacomp's functions write for a pickle: D/x.pkl -> D/nya/meta.csv."""
    return os.path.join(os.path.dirname(pickle_path), NYACOMP, META)


def meta_text(container: str, size: int) -> str:
    """Returns the text of a csv next to a container of `size` bytes. The row has the container's full path, or only its
    name if the path has a line break."""
    name = os.path.basename(container) if "\n" in container else container
    return f"0\n{name} {size} uint8 {size} {size}"


def uris_of(path: str, options: Mapping[str, object] | None) -> list[str]:
    """Returns the paths or URIs that a preload reads: the containers of a pickle or a meta.csv, otherwise the path
    itself."""
    if not is_remote(path):
        return local_uris_of(path)
    name = path.partition("?")[0].partition("#")[0]
    if name.endswith(".csv"):
        try:
            text = read_uri(path, options, _LARGEST).decode()
        except UnicodeDecodeError as error:
            why = f"overwire: open {shown(path)}: not a meta.csv, because it is not UTF-8 text"
            raise FormatError(why, source=shown(path)) from error
        return Manifest(path, text).list_containers()
    if name.endswith(_PICKLE_ENDINGS):
        candidates = containers.remote_containers_of(path, containers.FOLDERS[::-1])
        for candidate in candidates:
            with contextlib.suppress(NotFoundError):
                Model(candidate, storage_options=options, probe=True).close()
                return [candidate]
        return candidates[:1]  # opening it reports that it does not exist
    return [path]


def local_uris_of(path: str) -> list[str]:
    """Like `uris_of`, for a local path."""
    if path.endswith(".csv"):
        return Manifest.read_csv(path).list_containers()
    if "://" in path:
        return [path]
    if not path.endswith(_MODEL_ENDINGS) and not os.path.isdir(path):
        container = containers.containers_of(path)[0]
        if os.path.exists(container):
            return [container]
        if containers.is_pickle(path):
            raise containers.not_beside(path, container)
    return [path]

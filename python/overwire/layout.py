"""Where the pieces of a pickled bundle lie, and nyacomp's meta.csv.

For `D/x.pkl`: the pickle itself, `D/nya/x.safetensors` (every tensor of it) and
`D/nya/meta.csv`. The csv has nyacomp's form, so that scripts that upload what
it lists, or point PRELOAD_PATH at it, keep working:

    line 1        thread bins: commas between threads, semicolons between files
    other lines   filename shape dtype decompressed_size compressed_size

where a shape has semicolons between dims, and ours is one line: the container
as a tensor of bytes. This module opens no tensor file and imports little.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from .errors import FormatError, NotFoundError, NotSupportedError
from .storage import shown

__all__ = [
    "MetaRow",
    "container_of",
    "far_containers_of",
    "far_name",
    "meta_of",
    "previous_of",
    "preload_uris",
    "read_meta",
    "remote_containers_in",
    "remote_containers_of",
    "rivals_of",
    "second_container_of",
]

FOLDER = "nya"
META = "meta.csv"
_MODEL_ENDINGS = (".safetensors", ".json")


class MetaRow(NamedTuple):
    """One file that a meta.csv lists."""

    filename: str
    shape: tuple[int, ...]
    dtype: str
    decompressed_size: int
    compressed_size: int


def container_of(pickle_path: str) -> str:
    """The container of a pickle: D/x.pkl -> D/nya/x.safetensors; or, where that
    is another's (D/x.pth), D/nya/x.pkl.safetensors."""
    for other in far_containers_of(pickle_path):  # the second choice, or a copy out of a store
        if os.path.exists(other):
            return other
    folder, name = os.path.split(pickle_path)
    stem = os.path.splitext(name)[0] or name
    return os.path.join(folder, FOLDER, stem + ".safetensors")


def second_container_of(pickle_path: str) -> str:
    """The name for a pickle whose first choice is taken."""
    folder, name = os.path.split(pickle_path)
    return os.path.join(folder, FOLDER, name + ".safetensors")


def rivals_of(pickle_path: str) -> list[str]:
    """Other pickles in the folder with the same first choice."""
    folder, name = os.path.split(pickle_path)
    stem = os.path.splitext(name)[0] or name
    paths = [os.path.join(folder, other) for other in os.listdir(folder) if other != name]
    return [p for p in paths if os.path.splitext(os.path.basename(p))[0] == stem and is_pickle(p)]


def previous_of(container: str) -> str:
    """Where the container before it is kept while a bundle is replaced."""
    return container + ".old"


def far_containers_of(uri: str) -> tuple[str, str]:
    """The two names that the container of a pickle in a store takes in turn.
    Neither is that of a pickle with another ending."""
    first = second_container_of(uri)
    return first, first.removesuffix(".safetensors") + ".b.safetensors"


def far_name(uri: str) -> str:
    """The last name of a URI."""
    return uri.rpartition("/")[2]


def meta_of(pickle_path: str) -> str:
    """The csv of a pickle: D/x.pkl -> D/nya/meta.csv."""
    return os.path.join(os.path.dirname(pickle_path), FOLDER, META)


def meta_text(container: str, size: int) -> str:
    """The csv for one container of `size` bytes."""
    row = MetaRow(container, (size,), "uint8", size, size)
    shape = ";".join(map(str, row.shape))
    return f"0\n{row.filename} {shape} {row.dtype} {size} {size}"


def read_meta(path: str) -> list[MetaRow]:
    """The rows of a meta.csv, ours or nyacomp's. FormatError if it is none."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read(1 << 24).splitlines()
    except FileNotFoundError as error:
        raise NotFoundError(f"overwire: open {path}: not found", source=path) from error
    except (UnicodeDecodeError, IsADirectoryError) as error:
        raise FormatError(f"overwire: open {path}: not a meta.csv", source=path) from error
    return _rows(path, lines)


def _rows(path: str, lines: list[str]) -> list[MetaRow]:
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            # From the right: a filename may have spaces.
            filename, shape, dtype, plain, stored = line.rsplit(" ", 4)
            dims = tuple(int(d) for d in shape.split(";") if d)
            rows.append(MetaRow(filename, dims, dtype, int(plain), int(stored)))
        except ValueError as error:
            raise FormatError(
                f"overwire: open {shown(path)} line {number}: expected 'filename shape dtype decompressed_size compressed_size'",
                source=path,
            ) from error
    return rows


def containers_in(path: str) -> list[str]:
    """The containers that a meta.csv lists, wherever the folder has gone since:
    a name is looked for beside the csv first, then as it stands."""
    # D/meta.csv is nyacomp's older place of D/nya/meta.csv.
    if not os.path.exists(path) and os.path.basename(path) == META:
        newer = os.path.join(os.path.dirname(path), FOLDER, META)
        path = newer if os.path.exists(newer) else path
    folder = os.path.dirname(path)
    found = []
    for name in _containers(path, read_meta(path)):
        beside = os.path.join(folder, os.path.basename(name))
        standing = os.path.join(folder, name)
        found.append(beside if os.path.exists(beside) else standing)
    return found


def _containers(path: str, rows: list[MetaRow]) -> list[str]:
    path = shown(path)
    for row in rows:
        if not row.filename.endswith(".safetensors"):
            raise NotSupportedError(
                f"overwire: open {path}: {os.path.basename(row.filename)!r} was written by "
                "nyacomp itself; compress the model again with overwire",
                source=path,
            )
    if not rows:
        raise FormatError(f"overwire: open {path}: it lists no file", source=path)
    return [row.filename for row in rows]


def _cut(uri: str) -> tuple[str, str, str]:
    """A URI's folder with its slash, its last name, and what follows that: a
    query, or the revision of hf://."""
    marks = "@" if uri.startswith("hf://") else "?#" if uri.startswith(("http://", "https://")) else ""
    start = uri.index("://") + 3
    end = min((at for at in (uri.find(mark, start) for mark in marks) if at >= 0), default=len(uri))
    if marks == "?#":
        # A user's password may have any of these; it ends before the host.
        host = uri.find("/", start)
        end = min((at for at in (uri.find(mark, max(host, start)) for mark in marks) if at >= 0), default=len(uri))
    slash = uri.rfind("/", start, end) + 1
    return uri[:slash], uri[slash:end], uri[end:]


def remote_containers_of(uri: str) -> list[str]:
    """Where the container of a pickle behind a URI may be: as `container_of`,
    which of the names it has only opening tells."""
    folder, name, rest = _cut(uri)
    stem = os.path.splitext(name)[0] or name
    return [f"{folder}{FOLDER}/{part}.safetensors{rest}" for part in (stem, name, name + ".b")]


def remote_containers_in(uri: str, text: str) -> list[str]:
    """The containers that a meta.csv behind a URI lists: each is beside it."""
    folder, _, rest = _cut(uri)
    names = [os.path.basename(name) for name in _containers(uri, _rows(uri, text.splitlines()))]
    return [f"{folder}{name}{rest}" for name in names]


def preload_uris(path: str) -> list[str]:
    """What a preload of this path reads: a container, folder or index.json is
    read itself; a pickle or a meta.csv stands for its containers."""
    if "://" in path:
        return [path]
    if path.endswith(".csv"):
        return containers_in(path)
    if not path.endswith(_MODEL_ENDINGS) and not os.path.isdir(path):
        container = container_of(path)
        if os.path.exists(container):
            return [container]
        if is_pickle(path):
            raise NotFoundError(
                f"overwire: open {path}: its tensors are not at {container}; copy the folder beside the pickle with it",
                source=path,
            )
    return [path]


def is_pickle(path: str) -> bool:
    # Protocol 2 and later begin with this opcode.
    try:
        with open(path, "rb") as file:
            return file.read(1) == b"\x80"
    except OSError:
        return False  # whoever opens it says why

"""Converts files of other libraries to plain files in anonymous memory, for functions that only read a model.

The readers are imported only for paths that may need them.
"""

from __future__ import annotations

import os
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ArgumentError
from ..files import AnonymousMemory, folders_of, has_weights, may_be_foreign
from ..jobs import log
from ..paths import classed_errors, is_remote

if TYPE_CHECKING:
    from .._requests import VerifyCopy

# What `write_plain` returns for a numpy array in a pickle: its name, and the function that makes it.
_ARRAY = re.compile(r"(.*): numpy\.[\w.]*\b(?:_reconstruct|_frombuffer)", re.DOTALL)

# The largest number of names in a warning, and the most characters of each.
_SHOWN, _LONGEST = 3, 200


class InMemory(NamedTuple):
    """A plain file in memory. memory: the owner of the memory. name, original: the path and a description of the file
    or folder from which it was made."""

    memory: AnonymousMemory
    name: str
    original: VerifyCopy

    @property
    def uri(self) -> str:
        """The path that the engine opens."""
        return f"/proc/self/fd/{self.memory.number}"


def read_foreign(path: str, is_header: bool = False, is_usual: bool = False) -> list[InMemory]:
    """Converts a local file or folder of another library to plain files, which take as much memory as the tensors.
    Returns no files for other paths. is_header: whether to leave out the tensors, which then take no memory.
    is_usual: see `kinds.weights_of`.

    Raises ArgumentError for a checkpoint folder that also has other weights, and the errors of
    `kinds.open_content`.
    """
    if is_remote(path) or not may_be_foreign(path, is_tree=False):
        return []
    from .kinds import kind_of, listed_weights

    with classed_errors(path, "open"):
        kind = kind_of(path)
        if kind == "dcp":
            _refuse_second_model(path)
        if kind or not os.path.isdir(path):
            sources: dict[str, set[str] | None] = {path: None} if kind else {}
        else:
            weights = {} if has_weights(os.listdir(path)) else listed_weights(path, is_usual)
            sources = {os.path.join(path, name): listed for name, listed in weights.items()}
    return [_in_memory(source, kind or "torch", is_header, listed) for source, listed in sources.items()]


def read_components(path: str) -> tuple[list[InMemory], bool]:
    """Converts the weights of a local pipeline, which has weights only in subfolders. Returns plain files for other
    libraries' weights, and whether other folders have safetensors files. Returns no files and True for any other path.
    Raises the errors of `read_foreign`."""
    if is_remote(path) or not os.path.isdir(path) or not may_be_foreign(path) or may_be_foreign(path, is_tree=False):
        return [], True
    with classed_errors(path, "open"):
        folders = [folder for folder, _ in folders_of(path)]
        has_others = any(has_weights(os.listdir(folder)) for folder in folders)
    files = [one for folder in folders for one in read_foreign(folder, is_usual=has_others)]
    return files, has_others or not files


def _refuse_second_model(folder: str) -> None:
    from .dcp import ENDING
    from .kinds import has_usual_name

    names = os.listdir(folder)
    others = sorted(name for name in names if has_weights([name]) or has_usual_name(name))
    if others and any(name.endswith(ENDING) for name in names):
        text = f"the folder contains several models: a torch.distributed.checkpoint and {others[0]}"
        cure = "name that file, or move it to another folder to load the checkpoint"
        raise ArgumentError(f"overwire: open {folder}: {text}: {cure}", source=folder)


def _in_memory(source: str, kind: str, is_header: bool, listed: set[str] | None) -> InMemory:
    from .content import write_plain
    from .kinds import open_content, refuse_empty, select_listed, size_of

    memory, start = AnonymousMemory(), time.perf_counter()
    with open_content(source, kind, compare=not is_header) as content:
        refuse_empty(content, source, kind)
        select_listed(content, source, listed)
        notes = write_plain(content, memory.number, source, is_header)
        has_compared = content.has_sums and not is_header
    matches = (_ARRAY.fullmatch(line[len(source) + 2 :]) for line in notes)
    arrays = [] if is_header else [match[1] for match in matches if match]
    if arrays:
        names = [repr(name[:_LONGEST]) for name in arrays[:_SHOWN]]
        text = "overwire: open %s: %d numpy arrays are left out, because only tensors are loaded: %s"
        log.warning(text, source, len(arrays), ", ".join(names) + ", ..." * (len(arrays) > _SHOWN))
    seconds = time.perf_counter() - start
    original: VerifyCopy = {"kind": kind, "bytes": size_of(source, kind), "compared": has_compared, "seconds": seconds}
    return InMemory(memory, source, original)

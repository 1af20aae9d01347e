"""Files of other libraries as plain files in anonymous memory, for the functions that only read a model.

Every load imports this module. It imports the readers when a path may need one of them.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ..errors import ArgumentError
from ..files import AnonymousMemory, has_weights, may_be_foreign
from ..paths import classed_errors, is_remote


class InMemory(NamedTuple):
    """A plain file in memory, which the object keeps; name, kind: of the file or folder that it was made of."""

    memory: AnonymousMemory
    name: str
    kind: str

    @property
    def uri(self) -> str:
        """What the engine opens."""
        return f"/proc/self/fd/{self.memory.number}"


def read_foreign(path: str, is_header: bool = False) -> list[InMemory]:
    """The plain files that a local path stands for, which take as much memory as its tensors; none where it is not
    a file or folder of another library. is_header: the tensors are left out, and take no memory.

    Raises ArgumentError for a checkpoint's folder that also has safetensors files, and what
    `kinds.open_content` raises.
    """
    if is_remote(path) or not may_be_foreign(path, is_tree=False):
        return []
    from .kinds import kind_of, listed_weights

    with classed_errors(path, "open"):
        kind = kind_of(path)
        if kind == "dcp":
            _refuse_second_model(path)
        if kind or not os.path.isdir(path):
            sources = [path] if kind else []
        else:
            names = [] if has_weights(os.listdir(path)) else listed_weights(path)
            sources = [os.path.join(path, name) for name in names]
    return [_in_memory(source, kind or "torch", is_header) for source in sources]


def _refuse_second_model(folder: str) -> None:
    from .dcp import ENDING

    names = os.listdir(folder)
    others = sorted(name for name in names if has_weights([name]) and not name.startswith("."))
    if others and any(name.endswith(ENDING) for name in names):
        text = f"the folder contains several models: a torch.distributed.checkpoint and {others[0]}"
        cure = "name that file, or move it to another folder to load the checkpoint"
        raise ArgumentError(f"overwire: open {folder}: {text}: {cure}", source=folder)


def _in_memory(source: str, kind: str, is_header: bool) -> InMemory:
    from .content import write_plain
    from .kinds import open_content, refuse_empty

    memory = AnonymousMemory()
    with open_content(source, kind, compare=not is_header) as content:
        refuse_empty(content, source, kind)
        write_plain(content, memory.number, source, is_header)
    return InMemory(memory, source, kind)

"""Which files and folders of other libraries are read here, and by what: the one table of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ..bundles import torchfiles
from ..errors import FormatError
from ..files import FOREIGN_ENDINGS, TORCH_ENDINGS
from ..paths import classed_errors
from . import arrays, dcp, shards, tars
from .content import Content, Mapped


def kind_of(path: str) -> str:
    """The kind of a local file, or of the files of a folder itself; "": none that is read here.

    "torch", "nemo", "numpy"; for a folder "dcp" (torch.distributed.checkpoint) or "shards"
    (of torch's HuggingFaceStorageWriter). Raises where the disk fails.
    """
    with classed_errors(path, "open"):
        if os.path.isdir(path):
            names = os.listdir(path)
            return "dcp" if dcp.is_checkpoint(path, names) else "shards" if shards.shards_in(names) else ""
    if path.endswith(TORCH_ENDINGS):
        return "torch" if torchfiles.is_torch_file(path) else ""
    if not path.endswith(FOREIGN_ENDINGS):
        return ""
    return "nemo" if path.endswith(".nemo") else "numpy"


@contextlib.contextmanager
def opened(path: str, kind: str) -> Iterator[Content]:
    """The content of a file or folder of that kind. Raises what its reader raises."""
    with contextlib.ExitStack() as stack:
        if kind == "torch":
            mode = os.stat(path).st_mode
            file = stack.enter_context(torchfiles.opened(path))
            tensors = [(name, Mapped(memory)) for name, memory in file.tensors]
            content = Content(list(tensors), file.values, file.left, mode)
        elif kind == "dcp":
            content = stack.enter_context(dcp.opened(path, os.listdir(path)))
        elif kind == "shards":
            content = stack.enter_context(shards.opened(path, shards.shards_in(os.listdir(path))))
        else:
            content = stack.enter_context({"nemo": tars.opened, "numpy": arrays.opened}[kind](path))
        yield content


def refuse_empty(content: Content, path: str, kind: str) -> None:
    """Raises FormatError for what has no tensor; a torch.save file of plain values only has these."""
    if not content.tensors and (content.left or kind != "torch"):
        what = f", only {content.left[0]:.200}" if content.left else ""
        raise FormatError(f"overwire: open {path}: it has no tensor{what}", source=path)

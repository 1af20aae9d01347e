"""Which files and folders of other libraries are read here, and by what: the one table of it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from ..bundles import torchfiles
from ..errors import FormatError
from ..files import FOREIGN_ENDINGS, TORCH_ENDINGS
from ..paths import classed_errors
from . import arrays, dcp, shards, tars
from .content import Content, Mapped

# Names of weights in a folder, by libraries that save no others beside them.
_WEIGHTS = re.compile(r"(pytorch_model|diffusion_pytorch_model|adapter_model|open_clip_pytorch_model)([-.].*)?\.bin")
#: What trainers save beside weights.
_OTHERS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|trainer_state)\b.*|.*_states")


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
def opened(path: str, kind: str, compare: bool = True) -> Iterator[Content]:
    """The content of a file or folder of that kind. compare: as for `torchfiles.opened`. Raises what its reader
    raises."""
    with contextlib.ExitStack() as stack:
        if kind == "torch":
            mode = os.stat(path).st_mode
            file = stack.enter_context(torchfiles.opened(path, compare=compare))
            tensors = [(name, Mapped(memory)) for name, memory in file.tensors]
            content = Content(list(tensors), file.values, file.left, mode)
        elif kind == "dcp":
            content = stack.enter_context(dcp.opened(path, os.listdir(path)))
        elif kind == "shards":
            content = stack.enter_context(shards.opened(path, shards.shards_in(os.listdir(path))))
        elif kind == "nemo":
            content = stack.enter_context(tars.opened(path, compare))
        else:
            content = stack.enter_context(arrays.opened(path))
        yield content


def has_usual_name(name: str) -> bool:
    """Whether a file is called as libraries call weights."""
    return bool(_WEIGHTS.fullmatch(name))


def weights_of(folder: str) -> list[str]:
    """The names of the torch.save files of weights in a folder."""
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(TORCH_ENDINGS) and not name.startswith(".")]
    usual = [name for name in names if has_usual_name(name)]
    weights = usual or [name for name in names if not _OTHERS.fullmatch(os.path.splitext(name)[0])]
    return [name for name in weights if torchfiles.is_torch_file(os.path.join(folder, name))]


def refuse_empty(content: Content, path: str, kind: str) -> None:
    """Raises FormatError for what has no tensor; a torch.save file of plain values only has these."""
    if not content.tensors and (content.left or kind != "torch"):
        what = f", only {content.left[0]:.200}" if content.left else ""
        raise FormatError(f"overwire: open {path}: it has no tensor{what}", source=path)

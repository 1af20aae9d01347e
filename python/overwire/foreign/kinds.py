"""Which files and folders of other libraries are read here, and by what: the one table of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

from ..bundles import torchfiles
from ..errors import FormatError, NotFoundError
from ..files import FOREIGN_ENDINGS, TORCH_ENDINGS, read_file
from ..paths import classed_errors
from . import arrays, dcp, shards, tars
from .content import Content, Mapped

# Names of weights in a folder, by libraries that save no others beside them.
_WEIGHTS = re.compile(r"(pytorch_model|diffusion_pytorch_model|adapter_model|open_clip_pytorch_model)([-.].*)?\.bin")
#: What trainers save beside weights.
_OTHERS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|trainer_state)\b.*|.*_states")


#: How the names of indexes of torch's shards end.
INDEX = ".bin.index.json"


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
def open_content(path: str, kind: str, compare: bool = True) -> Iterator[Content]:
    """The content of a file or folder of that kind. compare: as for `torchfiles.opened`. Raises what its reader
    raises."""
    with contextlib.ExitStack() as stack:
        if kind == "torch":
            mode = os.stat(path).st_mode
            file = stack.enter_context(torchfiles.opened(path, compare=compare))
            tensors = [(name, Mapped(memory)) for name, memory in file.tensors]
            content = Content(list(tensors), file.values, file.left, mode)
        elif kind == "dcp":
            content = stack.enter_context(dcp.open_checkpoint(path, os.listdir(path)))
        elif kind == "shards":
            content = stack.enter_context(shards.open_shards(path, shards.shards_in(os.listdir(path))))
        elif kind == "nemo":
            content = stack.enter_context(tars.open_nemo(path, compare))
        else:
            content = stack.enter_context(arrays.open_arrays(path))
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


def listed_weights(folder: str) -> list[str]:
    """Those of `weights_of` that are the model's: where one index is there, the files that it lists.
    Raises FormatError for an index that is none, NotFoundError for a file that is missing."""
    indexes = [name for name in os.listdir(folder) if name.endswith(INDEX)]
    if len(indexes) != 1:
        return weights_of(folder)
    path = os.path.join(folder, indexes[0])
    names = sorted(set(read_index(path)["weight_map"].values()))
    for name in names:
        if not os.path.isfile(os.path.join(folder, name)) or "/" in name:
            text = f"overwire: open {path}: {name} is missing, and this index lists it: fetch the model again"
            raise NotFoundError(text, source=path)
    return names


def read_index(path: str) -> dict[str, Any]:
    """The index of shards; its "weight_map" has a file's name for each tensor. Raises FormatError."""
    try:
        index = json.loads(read_file(path, 64 << 20))
        if not all(isinstance(name, str) for name in index["weight_map"].values()):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"overwire: open {path}: no index of shards", source=path) from error
    return dict(index)


def refuse_empty(content: Content, path: str, kind: str) -> None:
    """Raises FormatError for what has no tensor; a torch.save file of plain values only has these."""
    if not content.tensors and (content.left or kind != "torch"):
        what = f", only {content.left[0]:.200}" if content.left else ""
        raise FormatError(f"overwire: open {path}: it has no tensor{what}", source=path)

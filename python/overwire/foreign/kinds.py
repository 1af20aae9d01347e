"""The files and folders of other libraries that are read, and by which module; names of weights in a folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

from ..bundles import torchfiles
from ..bundles.torcharchive import FOREIGN, refusal_of
from ..errors import FormatError, NotFoundError
from ..files import FOREIGN_ENDINGS, TORCH_ENDINGS, read_file
from ..paths import classed_errors
from . import arrays, dcp, shards, tars
from .content import Content, Mapped

#: Names of weights in a folder, by libraries that save no others with them. A number tells several models apart.
_WEIGHTS = re.compile(
    r"(pytorch_model|diffusion_pytorch_model|adapter_model|open_clip_pytorch_model)(_\d+)?([-.].*)?\.bin"
)
#: Names of what trainers save with weights.
_OTHERS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state|trainer_state)(\b|_\d).*|.*_states"
)
#: How the names of indexes of torch's shards end.
INDEX = ".bin.index.json"


def kind_of(path: str) -> str:
    """The kind of a local file, or of the files of a folder itself; "": none that is read here.

    "torch", "nemo", "numpy"; for a folder "dcp" (torch.distributed.checkpoint) or "shards"
    (of torch's HuggingFaceStorageWriter). Raises where the disk fails, and for an archive of
    torch.save that is damaged.
    """
    with classed_errors(path, "open"):
        if os.path.isdir(path):
            names = os.listdir(path)
            return "dcp" if dcp.is_checkpoint(path, names) else "shards" if shards.shards_in(names) else ""
    if path.endswith(TORCH_ENDINGS):
        refusal = refusal_of(path)
        if refusal is not None and type(refusal) is not FormatError:
            raise refusal
        return "" if refusal else "torch"  # the engine says what another file is
    if not path.endswith(FOREIGN_ENDINGS):
        return ""
    return "nemo" if path.endswith(".nemo") else "numpy"


@contextlib.contextmanager
def open_content(path: str, kind: str, compare: bool = True, scratch: str | None = None) -> Iterator[Content]:
    """The content of a file or folder of that kind. compare, scratch: as for `torchfiles.opened`. Raises what its
    reader raises."""
    with contextlib.ExitStack() as stack:
        if kind == "torch":
            mode = os.stat(path).st_mode
            file = stack.enter_context(torchfiles.opened(path, None, compare, scratch))
            tensors = [(name, Mapped(memory)) for name, memory in file.tensors]
            content = Content(list(tensors), file.values, file.left, mode)
        elif kind == "dcp":
            content = stack.enter_context(dcp.open_checkpoint(path, os.listdir(path)))
        elif kind == "shards":
            content = stack.enter_context(shards.open_shards(path, shards.shards_in(os.listdir(path))))
        elif kind == "nemo":
            content = stack.enter_context(tars.open_nemo(path, compare, scratch))
        else:
            content = stack.enter_context(arrays.open_arrays(path))
        yield content


def has_usual_name(name: str) -> bool:
    """Whether a file is called as libraries call weights."""
    return bool(_WEIGHTS.fullmatch(name))


def weights_of(folder: str) -> list[str]:
    """The names of the files of weights in a folder. Raises for what has the name or the ending of weights and cannot
    be read as such, or is missing: without it the model would lack tensors."""
    entries = sorted(os.listdir(folder))
    names = [
        name
        for name in entries
        if name.endswith(TORCH_ENDINGS)
        and not name.startswith(".")
        and not _OTHERS.fullmatch(os.path.splitext(name)[0])
        and not os.path.isdir(os.path.join(folder, name))
    ]
    refusals = {name: refusal_of(os.path.join(folder, name)) for name in names}
    usual = {name for name in names if has_usual_name(name)}
    for index in (name for name in entries if name.endswith(INDEX)):
        shards = set(read_index(os.path.join(folder, index))["weight_map"].values())
        if lacking := shards - set(names):
            text = f"{min(lacking)} is missing, and {index} lists it: fetch the model again"
            raise NotFoundError(f"overwire: open {folder}: {text}", source=folder)
        usual |= shards
    for name, refusal in refusals.items():
        if refusal is not None and (refusal.rule != FOREIGN or name in usual):
            raise refusal
    return [name for name in sorted(usual or names) if refusals[name] is None]


def listed_weights(folder: str) -> list[str]:
    """Those of `weights_of` that are the model's: where one index is there, the files that it lists."""
    names, indexes = weights_of(folder), [name for name in os.listdir(folder) if name.endswith(INDEX)]
    if len(indexes) != 1:
        return names
    listed = set(read_index(os.path.join(folder, indexes[0]))["weight_map"].values())
    return [name for name in names if name in listed]


def read_index(path: str) -> dict[str, Any]:
    """The index of shards; its weight_map has names only. Raises FormatError."""
    try:
        index: dict[str, Any] = json.loads(read_file(path, 64 << 20))
        if all(type(shard) is str for shard in index["weight_map"].values()):
            return index
        raise ValueError("a shard without a name")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"overwire: open {path}: not an index of shards", source=path) from error


def refuse_empty(content: Content, path: str, kind: str) -> None:
    """Raises FormatError for what has no tensor; a torch.save file of plain values only has these."""
    if not content.tensors and (content.left or kind != "torch"):
        what = f", only {content.left[0]:.200}" if content.left else ""
        raise FormatError(f"overwire: open {path}: it has no tensor{what}", source=path)

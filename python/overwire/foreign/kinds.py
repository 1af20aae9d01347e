"""Chooses the reader for a file or folder of another library, and finds the weights in a folder by their names."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any

from ..bundles import torchfiles
from ..bundles.torcharchive import FOREIGN, refusal_of
from ..errors import ArgumentError, FormatError, NotFoundError
from ..files import FOREIGN_ENDINGS, TORCH_ENDINGS, read_file
from ..paths import classed_errors, named_errors
from ..portable.container import STRICTLY
from ..portable.folders import choose_files, refuse_incomplete
from . import arrays, dcp, shards, tars
from .content import Content, Mapped

#: The usual names of weights. A library that uses one of these names uses them for all weights. A number in a name
#: distinguishes models.
_WEIGHTS = re.compile(
    r"(pytorch_model|diffusion_pytorch_model|adapter_model|open_clip_pytorch_model)(_\d+)?([-.].*)?\.bin"
)
#: Names of other files that trainers save next to weights.
_OTHERS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|sampler|dl_state_dict|rng_state|trainer_state)(\b|_\d).*|.*_states"
)
# Parts of Llama's layout: consolidated.00.pth, consolidated.01.pth and so on.
_NUMBERED = re.compile(r"consolidated\.(\d{1,4})\.pth")
#: The name ending of indexes of torch.save shards.
INDEX = ".bin.index.json"


def kind_of(path: str) -> str:
    """Returns the kind of a local file or folder, or "" if this package does not read it.

    A file is "torch", "nemo" or "numpy". A folder is "dcp" (torch.distributed.checkpoint) or "shards" (torch's
    HuggingFaceStorageWriter). Raises an error if the disk fails, or for a damaged torch.save archive.
    """
    with classed_errors(path, "open"):
        if os.path.isdir(path):
            names = os.listdir(path)
            return "dcp" if dcp.is_checkpoint(path, names) else "shards" if shards.shards_in(names) else ""
    if path.endswith(TORCH_ENDINGS):
        refusal = refusal_of(path)
        if refusal is not None and type(refusal) is not FormatError:
            raise refusal
        return "" if refusal else "torch"  # the engine reports the kind of other files
    if not path.endswith(FOREIGN_ENDINGS):
        return ""
    return "nemo" if path.endswith(".nemo") else "numpy"


@contextlib.contextmanager
def open_content(path: str, kind: str, compare: bool = True, scratch: str | None = None) -> Iterator[Content]:
    """Opens a file or folder of a kind. compare, scratch: as for `torchfiles.opened`. Raises the errors of the
    kind's reader."""
    with contextlib.ExitStack() as stack:
        if kind == "torch":
            mode = os.stat(path).st_mode
            file = stack.enter_context(torchfiles.opened(path, None, compare, scratch))
            tensors = [(name, Mapped(memory)) for name, memory in file.tensors]
            content = Content(list(tensors), file.values, file.left, mode, file.has_sums)
        elif kind == "dcp":
            content = stack.enter_context(dcp.open_checkpoint(path, os.listdir(path)))
        elif kind == "shards":
            content = stack.enter_context(shards.open_shards(path, shards.shards_in(os.listdir(path))))
        elif kind == "nemo":
            content = stack.enter_context(tars.open_nemo(path, compare, scratch))
        else:
            content = stack.enter_context(arrays.open_arrays(path))
        yield content


def size_of(path: str, kind: str) -> int:
    """Returns the size of a file, or of the files in a folder that belong to a model of this kind, in bytes."""
    if kind not in ("dcp", "shards"):
        return os.stat(path).st_size
    names = os.listdir(path)
    parts = dcp.files_of(names) if kind == "dcp" else shards.shards_in(names)
    return sum(os.stat(os.path.join(path, name)).st_size for name in parts)


def has_usual_name(name: str) -> bool:
    """Returns whether a file name is a usual name of weights."""
    return bool(_WEIGHTS.fullmatch(name))


def weights_of(folder: str, is_usual: bool = False) -> list[str]:
    """Returns the names of the weights in a folder. Raises an error if a file that is named like weights is missing or
    cannot be read, because the model would lack tensors. is_usual: whether to include only usual names."""
    entries = sorted(os.listdir(folder))
    files = [name for name in entries if name.endswith(TORCH_ENDINGS) and not name.startswith(".")]
    files = [name for name in files if not os.path.isdir(os.path.join(folder, name))]
    names = [name for name in files if not _OTHERS.fullmatch(os.path.splitext(name)[0])]
    usual = {name for name in names if has_usual_name(name)}
    if is_usual:
        names = [name for name in names if name in usual]
    refusals = {name: refusal_of(os.path.join(folder, name)) for name in names}
    for index in (name for name in entries if name.endswith(INDEX)):
        shards = set(read_index(os.path.join(folder, index))["weight_map"].values())
        if lacking := shards - set(names):
            text = f"{min(lacking)} is missing, and {index} lists it: fetch the model again"
            raise NotFoundError(f"overwire: open {folder}: {text}", source=folder)
        usual |= shards
    numbers = {int(one[1]) for one in map(_NUMBERED.fullmatch, names) if one}
    if gap := sorted(set(range(max(numbers, default=0))) - numbers):
        text = f"consolidated.{gap[0]:02d}.pth is missing, but there are files with higher numbers"
        raise NotFoundError(f"overwire: open {folder}: {text}: fetch the model again", source=folder)
    for name, refusal in refusals.items():
        if refusal is not None and (refusal.rule != FOREIGN or name in usual):
            raise refusal
    weights = [name for name in sorted(usual or names) if refusals[name] is None]
    by_plain = {plain_name(name): name for name in [*weights, *entries] if name in usual or name.endswith(INDEX)}
    with named_errors(by_plain):
        refuse_incomplete(folder, list(by_plain))
    return weights


def plain_name(name: str) -> str:
    """Converts the name of weights, or of their index, to the corresponding safetensors name."""
    stem = name.removesuffix(INDEX) if name.endswith(INDEX) else os.path.splitext(name)[0]
    stem = re.sub(r"^pytorch_model(?=(_\d+)?\b)", "model", stem)  # accelerate numbers its models
    return f"{stem}.safetensors.index.json" if name.endswith(INDEX) else f"{stem}.safetensors"


def listed_weights(folder: str, is_usual: bool = False) -> dict[str, set[str] | None]:
    """Selects the weights of the folder's model, by the rules for safetensors files. Maps each file to the tensors that
    an index lists, or to None for all tensors. Raises ArgumentError if the folder contains several models."""
    names = [*weights_of(folder, is_usual), *(name for name in os.listdir(folder) if name.endswith(INDEX))]
    by_plain: dict[str, str] = {}
    for name in names:
        if (other := by_plain.setdefault(plain_name(name), name)) != name:
            text = f"the folder contains several models: {other} and {name}: name one of them"
            raise ArgumentError(f"overwire: open {folder}: {text}", source=folder)
    if not by_plain:
        return {}
    with named_errors(by_plain):
        chosen = choose_files(folder, sorted(by_plain))
    if not isinstance(chosen, str):
        return {by_plain[name]: None for name in chosen}
    listed: dict[str, set[str]] = {}
    for tensor, shard in read_index(os.path.join(folder, by_plain[chosen]))["weight_map"].items():
        listed.setdefault(shard, set()).add(tensor)
    return {name: listed[name] for name in sorted(listed)}


def select_listed(content: Content, path: str, listed: set[str] | None) -> None:
    """Removes tensors that the index does not list. Raises FormatError if the file lacks a listed tensor."""
    if listed is None:
        return
    if lacking := listed - {name for name, _ in content.tensors}:
        text = f"the shards' index lists the tensor {min(lacking)!r}, which is not in this file: fetch both again"
        raise FormatError(f"overwire: open {path}: {text}", source=path, tensor=min(lacking))
    content.tensors[:] = [(name, tensor) for name, tensor in content.tensors if name in listed]


def read_index(path: str) -> dict[str, Any]:
    """Reads an index of shards, and checks that it lists only torch.save files. Raises FormatError."""
    try:
        index: dict[str, Any] = json.loads(read_file(path, 64 << 20).decode(), **STRICTLY)
        if not index["weight_map"]:
            raise ValueError("it lists no tensor")
        if strange := [shard for shard in index["weight_map"].values() if not shard.endswith(TORCH_ENDINGS)]:
            raise ValueError(f"it lists {strange[0]:.200}, which is not the name of a torch.save file")
        return index
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"overwire: open {path}: not an index of shards: {error!s:.300}", source=path) from error


def refuse_empty(content: Content, path: str, kind: str) -> None:
    """Raises FormatError for content without tensors. A torch.save file may consist of plain values only."""
    if not content.tensors and (content.left or kind != "torch"):
        what = f", only {content.left[0]:.200}" if content.left else ""
        raise FormatError(f"overwire: open {path}: it has no tensor{what}", source=path)

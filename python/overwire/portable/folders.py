"""Chooses the files of a folder that are its model, by the rules in docs/folders.md."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import ArgumentError, CorruptError, FormatError, NotFoundError
from .container import STRICTLY

EXTENSION = ".safetensors"
_LONGEST_INDEX = 100_000_000

#: Stems of files for which libraries write variants (fp16). In any other stem, a dot has no meaning.
_WITH_VARIANTS = ("model", "diffusion_pytorch_model")
_INDEX_NAME = re.compile(r"(.+)\.safetensors(?:\.([^.]+))?\.index(?:\.([^.]+))?\.json")
_SHARD_NAME = re.compile(r"(.*)-([0-9]{1,9})-of-([0-9]{1,9})(?:\.([^.]+))?")
#: A mark in the names of files that replaced an earlier set. Without an index that lists it, such a file is ignored.
_MARK = re.compile(r"-ow[0-9a-f]{8}\Z")
#: The metadata entry with the id of a save, which is the same in all files of one save of a checkpoint.
_SAVE = "overwire.checkpoint"


class _Name(NamedTuple):
    """The parsed name of a file of weights, or of an index. of: the number of shards, or 0 if the file is not a
    shard."""

    stem: str
    variant: str
    number: int
    of: int
    is_marked: bool
    is_index: bool


class _Family(NamedTuple):
    """A model in a folder: an index, a file, or shards without an index, with their numbers."""

    name: _Name
    files: list[str]
    numbers: list[int]


class Model(NamedTuple):
    """The files of a model. index_path, text: the path and bytes of the index.json that lists them. tensors: the listed
    tensors of each file, or None for all tensors."""

    files: list[str]
    index_path: str | None
    text: bytes
    tensors: dict[str, set[str]] | None


def parse_name(name: str) -> _Name | None:
    """Parses the name of weights or of an index. Returns None for any other name, and for hidden files."""
    if name.startswith("."):
        return None
    if index := _INDEX_NAME.fullmatch(name):
        own = _name_of_stem(index[1])
        return own._replace(is_index=True, variant=own.variant or (index[2] or "") + (index[3] or ""))
    if not name.endswith(EXTENSION):
        return None
    base = name.removesuffix(EXTENSION)
    if (shard := _SHARD_NAME.fullmatch(base)) and int(shard[3]):
        own = _name_of_stem(shard[1])._replace(number=int(shard[2]), of=int(shard[3]))
        own = own._replace(variant=own.variant or shard[4] or "")
        if not shard[4] or own.stem in _WITH_VARIANTS:
            return own
    return _name_of_stem(base)


def _name_of_stem(base: str) -> _Name:
    stem, variant = _MARK.sub("", base), ""
    for one in _WITH_VARIANTS:
        if stem.startswith(f"{one}.") and len(stem) > len(one) + 1:
            stem, variant = one, stem[len(one) + 1 :]
    return _Name(stem, variant, 0, 0, bool(_MARK.search(base)), False)


def model_of(place: str) -> Model:
    """Returns the model at a path: a file, an index.json, or a folder.

    Raises NotFoundError for a folder without a model and for a listed file that is missing, FormatError for incomplete
    shards and for a malformed index, and ArgumentError for several models."""
    if os.path.isdir(place):
        name = choose_files(place, sorted(os.listdir(place)))
        if isinstance(name, list):
            return Model([os.path.join(place, file) for file in name], None, b"", None)
        return _read_index(os.path.join(place, name))
    own = parse_name(os.path.basename(place))
    if own is not None and own.is_index or place.endswith(".index.json"):
        return _read_index(place)
    return Model([place], None, b"", None)


def choose_files(folder: str, names: list[str]) -> str | list[str]:
    """Returns the index that lists the model, or the model's files. Raises the errors of `model_of`."""
    families, leftovers = _families_of(names)
    families = _without_others(families)
    indexes = [one for one in families if one.name.is_index]
    shard_sets = [one for one in families if one.name.of]
    files = sorted(file for one in families if not one.name.is_index for file in one.files)
    variants = {one.name.variant for one in families} - {""}
    if len(indexes) > 1 or not indexes and (len(variants) > 1 or len(shard_sets) > 1):
        text = ", ".join(os.path.join(folder, one.files[0]) for one in families)
        raise ArgumentError(f"overwire: {folder}: several models in one folder, name one of them: {text}")
    if indexes:
        return indexes[0].files[0]
    if not files and leftovers:
        text = f"{leftovers[0]} is a shard of a save that did not finish, or the index.json that lists it is missing"
        raise FormatError(f"overwire: {folder}: {text}: save or fetch the model again", source=folder)
    if not files:
        raise NotFoundError(f"overwire: {folder}: no {EXTENSION} file in this folder", source=folder)
    _refuse_incomplete(folder, shard_sets)
    return files


def refuse_incomplete(folder: str, names: list[str]) -> None:
    """Raises FormatError if the shards of a model, without an index, are not all among the names."""
    families = _without_others(_families_of(names)[0])
    indexed = {(one.name.stem, one.name.variant) for one in families if one.name.is_index}
    _refuse_incomplete(folder, [one for one in families if (one.name.stem, one.name.variant) not in indexed])


def _refuse_incomplete(folder: str, families: list[_Family]) -> None:
    for one in families:
        if one.name.of and (lacking := _lacking_shards(one)):
            text = f"{one.files[0]} has no index.json, and {lacking}: fetch the model again"
            raise FormatError(f"overwire: {folder}: {text}", source=folder)


def _families_of(names: list[str]) -> tuple[list[_Family], list[str]]:
    # Returns the models in a list of names, and marked files that an index may not list.
    by_name: dict[_Name, _Family] = {}
    families: list[_Family] = []
    leftovers = []
    for file in names:
        if (name := parse_name(file)) is None:
            continue
        if name.is_marked and not name.is_index:
            leftovers.append(file)
            continue
        key = name._replace(number=0)
        if key not in by_name or name.is_index:  # each index is a separate model
            by_name[key] = _Family(name, [], [])
            families.append(by_name[key])
        by_name[key].files.append(file)
        by_name[key].numbers.append(name.number)
    return families, leftovers


def _without_others(families: list[_Family]) -> list[_Family]:
    # Leaves out variants if there is a default, shards without an index if there is a single file, and consolidated
    # weights if there is another model.
    def is_other(one: _Family) -> bool:
        name = one.name
        alike = [other.name for other in families if other.name.stem == name.stem]
        return bool(
            name.variant and any(not other.variant for other in alike)
            or name.of and any(other.variant == name.variant and not other.of and not other.is_index for other in alike)
            or name.stem == "consolidated" and any(other.name.stem == "model" for other in families)
        )  # fmt: skip

    return [one for one in families if not is_other(one)]


def _lacking_shards(family: _Family) -> str:
    # Describes the missing shards of a set without an index. Returns "" if the set is complete. Some sets count from 0.
    first, count = int(0 not in family.numbers), family.name.of
    if count > len(family.numbers):
        have = set(family.numbers)
        lacking = [str(n) for n in range(first, first + min(count, len(have) + 5)) if n not in have][:5]
        verb = "shard {} is missing" if len(lacking) == 1 else "shards {} are missing"
        return f"{len(family.files)} of {count} shards exist, and {verb.format(', '.join(lacking))}"
    if len(family.numbers) != count or set(family.numbers) != set(range(first, first + count)):
        return f"{len(family.files)} shards exist, but their names say {count}"
    return ""


def _read_index(path: str) -> Model:
    with open(path, "rb") as file:
        text = file.read(_LONGEST_INDEX + 1)
    try:
        if len(text) > _LONGEST_INDEX:
            raise ValueError(f"expected {_LONGEST_INDEX} bytes or fewer")
        weights = json.loads(text.decode(), **STRICTLY)["weight_map"]
        by_name: dict[str, set[str]] = {}
        for tensor, file_name in weights.items():
            while file_name.startswith("./"):
                file_name = file_name[2:]
            if file_name in ("", ".", "..") or set(file_name) & set("/\\\0:"):
                raise ValueError(f"{file_name!r} is not the name of a file next to it")
            by_name.setdefault(file_name, set()).add(tensor)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"overwire: {path}: not an index of shards: {error}", source=path) from None
    if not by_name:
        why = "the index lists no tensors: fetch it again, or remove it if the files next to it are the model"
        raise FormatError(f"overwire: {path}: {why}", source=path)
    folder = os.path.dirname(path)
    by_file = {os.path.join(folder, name): by_name[name] for name in sorted(by_name)}
    for file_path in by_file:
        if not os.path.exists(file_path):
            why = f"{file_path} is missing, and {path} lists it: fetch the model again"
            raise NotFoundError(f"overwire: {why}", source=file_path)
    return Model(list(by_file), path, text, by_file)


def was_replaced(model: Model) -> bool:
    """Returns whether the index of a model has changed since it was read, for instance because a saver replaced the
    model."""
    if model.index_path is None:
        return False
    try:
        with open(model.index_path, "rb") as file:
            return file.read(_LONGEST_INDEX + 1) != model.text
    except FileNotFoundError:
        return True


def select_names(model: Model, path: str, names: Any) -> list[str]:
    """Returns the names of a file that belong to the model, in order. Raises FormatError if the file lacks a listed
    name."""
    if model.tensors is None:
        return list(names)
    own = model.tensors[path]
    if lacking := own - set(names):
        name = min(lacking)
        text = f"the index lists a tensor {name!r}, which this file lacks"
        raise FormatError(f"overwire: {path}: {text}", source=path, tensor=name)
    return [name for name in names if name in own]


def refuse_mixture(files: Iterable[tuple[str, Mapping[str, str] | None]]) -> None:
    """Raises CorruptError if files of one checkpoint, given by path and metadata, are from several saves."""
    first: dict[str, tuple[str, str | None]] = {}
    for path, metadata in files:
        folder, file_name = os.path.split(path)
        name = parse_name(file_name)
        if name is None or name.stem != "model" or name.variant:
            continue
        save = (metadata or {}).get(_SAVE)
        other, other_save = first.setdefault(folder.removesuffix("/training"), (path, save))
        if save != other_save:
            text = "the checkpoint was replaced while it was read, or files of two saves were mixed"
            text = f"it is from another save of the checkpoint than {other}: {text}"
            raise CorruptError(f"overwire: {path}: {text}", source=path)

"""Reads and writes checkpoint.json, which describes a checkpoint. It is written after the tensors, so a folder with
this file is complete.

    {"format": "overwire checkpoint", "version": 2, "save": "0123456789abcdef0123456789abcdef",
     "parts": [{"prefix": "model.", "files": ["model.safetensors"]},
               {"prefix": "", "files": ["training/model-00001-of-00002.safetensors", ...]}],
     "bytes": ["optimizer.param_groups"], "dtypes": {"model.phase": "complex128"},
     "paths": {"model.weight": ["model", "weight"], ...} or null}

The name of a tensor in the state is the prefix of its part plus its name in the files. `bytes` lists the tensors that
contain the torch.save bytes of an object. `dtypes` lists tensors with a torch dtype that safetensors lacks. They are
stored as bytes, with an extra last dimension for the bytes of an element. `paths` lists the keys that lead to each
entry of a nested state. `save` is the id of the save, which is also in the metadata of its files (SAVE). Version 1 has
neither `save` nor `dtypes`. The file may come from an attacker, so all its values are checked against limits, and it
cannot name files outside of the folder.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from ..errors import ArgumentError, FormatError, NotSupportedError

#: The name of the file.
NAME = "checkpoint.json"

#: The metadata key for the id of the save in a checkpoint's files. The engine uses the same key.
SAVE = "overwire.checkpoint"

#: The subfolder of a checkpoint for everything that is not the model.
TRAINING = "training"

#: The largest size of the file, in bytes.
LIMIT = 64 << 20

_FORMAT = "overwire checkpoint"
_FILE = re.compile(rf"(?:{TRAINING}/)?model(?:-ow[0-9a-f]{{8}})?(?:-\d{{5,9}}-of-\d{{5,9}})?\.safetensors")

_SAVE = re.compile(r"[0-9a-f]{32}")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{1,40}")

# The keys in each version.
_KEYS = {1: {"format", "version", "parts", "bytes", "paths"}}
_KEYS[2] = _KEYS[1] | {"save", "dtypes"}

# The most keys in a path. Because of Python's recursion limit, torch already fails with fewer keys.
_DEEP = 1000

Path = tuple[str | int, ...]


class Part(NamedTuple):
    """The files of the model, or of everything else. Their tensors have a common prefix in the state. Paths are
    relative to the checkpoint."""

    prefix: str
    files: tuple[str, ...]


class Manifest(NamedTuple):
    """The contents of checkpoint.json. save: "" in version 1. dtypes: maps tensors to torch's names of their dtypes."""

    parts: tuple[Part, ...]
    bytes: frozenset[str]
    paths: dict[str, Path] | None
    save: str
    dtypes: dict[str, str]


def encode(manifest: Manifest) -> bytes:
    """Returns the text of the file. Raises NotSupportedError if it is longer than `decode` accepts."""
    parts = [{"prefix": part.prefix, "files": list(part.files)} for part in manifest.parts]
    document = {"format": _FORMAT, "version": 2, "save": manifest.save, "parts": parts}
    document |= {"bytes": sorted(manifest.bytes), "dtypes": manifest.dtypes, "paths": manifest.paths}
    text = json.dumps(document, ensure_ascii=True, indent=0).encode()
    if len(text) > LIMIT:
        raise NotSupportedError(f"overwire: {NAME}: it would have {len(text)} bytes: expected {LIMIT} or fewer")
    return text


def paths_of(planner_data: Any) -> dict[str, Path] | None:
    """Returns the paths from torch's planner, after checking them. Raises NotSupportedError for other planner data."""
    if planner_data is None:
        return None
    limit = "only paths of names can be stored"
    if not isinstance(planner_data, dict):
        raise NotSupportedError(f"overwire: the planner's data is a {type(planner_data).__name__}: {limit}")
    for name, path in planner_data.items():
        if not isinstance(name, str) or not _is_path(path, tuple):
            raise NotSupportedError(f"overwire: the planner's data for {name!r} is {path!r:.200}: {limit}")
    if not _are_dense(planner_data):
        text = "overwire: the state has a list, or integer keys, with far larger indices than it has entries"
        raise NotSupportedError(text)
    return planner_data


def decode(text: bytes, source: str) -> Manifest:
    """Parses the file. Raises FormatError with the source's name if anything is invalid."""

    def malformed_error(what: str) -> FormatError:
        return FormatError(f"overwire: {source}: {what}", source=source)

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise malformed_error("a key appears twice")
        return out

    if len(text) > LIMIT:
        raise malformed_error(f"expected {LIMIT} bytes or fewer")
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=refuse_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise malformed_error(f"not JSON: {error!s:.200}") from None
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise malformed_error("a number has too many digits") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise malformed_error("not an overwire checkpoint")
    version = document.get("version")
    if type(version) is not int or version not in _KEYS:
        raise malformed_error(f"version: expected 1 or 2, got {version!r:.20}")
    if set(document) != _KEYS[version]:
        raise malformed_error(f"expected the keys of version {version}: {', '.join(sorted(_KEYS[version]))}")
    if not isinstance(document["parts"], list) or len(document["parts"]) > 2:
        raise malformed_error("parts: expected two or fewer")
    parts = tuple(_decode_part(one, malformed_error) for one in document["parts"])
    files = [file for part in parts for file in part.files]
    if len(set(files)) != len(files):
        raise malformed_error("a file appears twice")
    nbytes = document["bytes"]
    if not isinstance(nbytes, list) or not all(isinstance(name, str) for name in nbytes):
        raise malformed_error("bytes: expected names")
    paths = document["paths"]
    if paths is not None:
        if not isinstance(paths, dict) or not all(_is_path(path, list) for path in paths.values()):
            raise malformed_error("paths: expected lists of keys")
        paths = {name: tuple(path) for name, path in paths.items()}
        if not _are_dense(paths):
            raise malformed_error("paths: the indices are far larger than the number of names")
    save, dtypes = document.get("save", ""), document.get("dtypes", {})
    if version > 1 and not (isinstance(save, str) and _SAVE.fullmatch(save)):
        raise malformed_error("save: expected 32 hexadecimal digits")
    if not isinstance(dtypes, dict) or not all(isinstance(d, str) and _DTYPE.fullmatch(d) for d in dtypes.values()):
        raise malformed_error("dtypes: expected names of dtypes")
    for name in (*nbytes, *dtypes, *(paths or ())):
        if _has_lone_surrogate(name):
            raise malformed_error("a name is not valid Unicode")
    return Manifest(parts, frozenset(nbytes), paths, save, dtypes)


def _decode_part(one: Any, bad: Any) -> Part:
    if not isinstance(one, dict) or set(one) != {"prefix", "files"}:
        raise bad("parts: expected a prefix and files")
    prefix, files = one["prefix"], one["files"]
    if not isinstance(prefix, str) or _has_lone_surrogate(prefix):
        raise bad("parts: expected a prefix and files")
    if not isinstance(files, list) or not files:
        raise bad("parts: expected files")
    for file in files:
        if not isinstance(file, str) or not _FILE.fullmatch(file):
            raise bad(f"{file!r:.100} is not a valid name for a file of a checkpoint")
    if len({file.startswith(TRAINING) for file in files}) != 1:
        raise bad(f"a part has files both inside and outside of {TRAINING}/")
    return Part(prefix, tuple(files))


def _is_path(path: Any, kind: type[Any]) -> bool:
    return type(path) is kind and 0 < len(path) <= _DEEP and {type(key) for key in path} <= {str, int}


def _are_dense(paths: dict[str, Path]) -> bool:
    """Returns whether the lists that torch allocates for integer keys have a reasonable size for the number of
    paths."""
    room = (1 << 20) + 16 * len(paths)
    places: dict[tuple[int, str | int], int] = {}  # numbers of containers by parent and key; 0 is the root
    sizes: dict[int, int] = {}
    for path in paths.values():
        place = 0
        for key in path:
            if isinstance(key, int):
                grown = key + 1 - sizes.get(place, 0)
                if key < 0 or grown > room:
                    return False
                if grown > 0:
                    sizes[place], room = key + 1, room - grown
            place = places.setdefault((place, key), len(places) + 1)
    return True


def _has_lone_surrogate(text: str) -> bool:
    """Returns whether a text has an unpaired surrogate, which UTF-8 cannot encode."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def check_prefix(model: Any) -> str:
    """Checks the `model=` argument. Raises ArgumentError if it cannot be a key of a state."""
    if not isinstance(model, str) or not model:
        raise ArgumentError(f"overwire: model: expected a key of the state, got {model!r:.100}")
    return model

"""Handles tensor names. A name is a string, or a path of strings and numbers through a structure."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Path = tuple[str | int, ...]

_MARK = "\x1e"

# The most nesting levels, because the code that walks structures is recursive.
_DEEPEST = 200


def parse(name: str) -> Path:
    """Returns the path for a name in a file. The engine has already checked the name."""
    return tuple(json.loads(name[1:])) if name.startswith(_MARK) else (name,)


def text(path: Path) -> str:
    """Returns a path's name in the file."""
    if len(path) == 1 and isinstance(path[0], str):
        return path[0]
    return _MARK + json.dumps(list(path), ensure_ascii=True, separators=(",", ":"))


def plain(path: Path) -> Any:
    """Returns the name that users see: a string, or the path as a tuple."""
    return path[0] if len(path) == 1 and isinstance(path[0], str) else path


# A tree consists of nested dicts, with the paths as leaves. The keys of one level are all strings or all numbers, and
# no path is a prefix of another path.
Tree = dict[Any, Any]


def add(tree: Tree, path: Path) -> None:
    """Adds a path. Raises ValueError if the path exists, conflicts with another path, or has more than 200 levels."""
    if len(path) > _DEEPEST:
        raise ValueError(f"Tensor paths of more than {_DEEPEST} levels are not supported; got one of {len(path)}")
    level = tree
    for depth, part in enumerate(path):
        if level and type(next(iter(level))) is not type(part):
            text = f"Conflicting tensor paths: {plain(path)} has a different key type ({type(part).__name__!r}) than "
            text += f"existing keys at the prefix {path[: depth + 1]} ({type(next(iter(level))).__name__!r})"
            raise ValueError(text)
        if depth == len(path) - 1:
            if part in level:
                how = (
                    "is both a leaf and a prefix of another path"
                    if isinstance(level[part], dict)
                    else "is used multiple times"
                )
                raise ValueError(f"Conflicting tensor paths: {plain(path)} {how}")
            level[part] = path
            return
        level = level.setdefault(part, {})
        if not isinstance(level, dict):
            raise ValueError(f"Conflicting tensor paths: {path}, {level}")


def remove(tree: Tree, path: Path) -> None:
    """Removes a leaf. The levels above it stay."""
    for part in path[:-1]:
        tree = tree[part]
    del tree[path[-1]]


def leaves(level: Any) -> Iterator[Path]:
    """Yields the paths at or below a level of a tree."""
    if isinstance(level, tuple):
        yield level
    else:
        for below in level.values():
            yield from leaves(below)


def build(level: Any, values: Mapping[Path, Any], proxies: bool) -> Any:
    """Builds a level of a tree with values at its leaves. Leaves without a value, and levels without values, are left
    out. Levels with numbers as keys become lists. proxies: makes every level a read-only mapping instead."""
    if isinstance(level, tuple):
        return values[level]
    tree = {}
    for key, below in level.items():
        if isinstance(below, tuple) and below not in values:
            continue
        if isinstance(below, dict) and not any(path in values for path in leaves(below)):
            continue
        tree[key] = build(below, values, proxies)
    if proxies:
        return types.MappingProxyType(tree)
    if tree and isinstance(next(iter(tree)), int):
        return [tree[key] for key in sorted(tree)]
    return tree


def flatten(obj: Any, leaf: Callable[[Any], bool], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields every leaf of nested mappings and sequences with its path."""
    if len(prefix) >= _DEEPEST:
        raise ValueError(f"Cannot serialize structures that contain themselves or have more than {_DEEPEST} levels")
    if isinstance(obj, Mapping):
        for key in obj:
            if not isinstance(key, str):
                raise TypeError(f"Invalid key type for state_dict: expected str, got {key.__class__.__name__!r}")
        items: Any = obj.items()
    elif isinstance(obj, Sequence) and not isinstance(obj, (str, bytes)):
        items = enumerate(obj)
    else:
        raise TypeError(f"Cannot serialize type as part of a state_dict: {obj.__class__.__name__!r}")
    for key, value in items:
        path = (*prefix, key)
        if leaf(value):
            yield path, value
        else:
            yield from flatten(value, leaf, path)

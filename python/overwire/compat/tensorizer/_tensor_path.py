"""tensorizer._tensor_path: nested structures flat, by path, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import _paths

_TensorPath = tuple[str | int, ...]


def key_value_iterator(obj: Sequence[Any] | Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
    """Keys, or numbers, with their values. TypeError for what has neither."""
    if isinstance(obj, Mapping):
        return obj.items()
    if isinstance(obj, Sequence):
        return enumerate(obj)
    raise TypeError(f"Cannot serialize type as part of a state_dict: {obj.__class__.__name__!r}")


def flatten_structure(leaf_type: type, obj: Any, prefix: _paths.Path = ()) -> Iterable[tuple[_paths.Path, Any]]:
    """Every leaf of that type in nested mappings and sequences, with its path."""
    return _paths.flatten(obj, lambda value: isinstance(value, leaf_type), tuple(prefix))


def restructure(flat: Mapping[_paths.Path, Any], use_dict_proxies: bool = False) -> Any:
    """What `flatten_structure` has made flat; with proxies, every level as a
    read-only mapping. ValueError for paths that contradict each other."""
    tree: _paths.Tree = {}
    for path in flat:
        _paths.add(tree, tuple(path))
    return _paths.build(tree, {tuple(path): value for path, value in flat.items()}, use_dict_proxies)

"""Checks arguments of a call before the ranks of a group meet."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def group_context(options: Mapping[str, Any], device: Any) -> AbstractContextManager[Any]:
    """Returns a context for checking a call's arguments. If the options have a group, an error inside is raised on
    all its ranks. device: of this rank's tensors. Raises ArgumentError if it is not a
    group."""
    group = options.get("group")
    if group is None:
        return nullcontext()
    from ..distributed.group import group_verb

    return group_verb(group, device)

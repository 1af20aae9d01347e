"""What verbs do before the ranks of a group meet."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any


def group_context(options: Mapping[str, Any], device: Any) -> AbstractContextManager[Any]:
    """For a verb's look at its arguments: what that raises is raised on all ranks of the
    group among them, if there is one. device: of this rank's tensors. ArgumentError for what
    is no group."""
    group = options.get("group")
    if group is None:
        return nullcontext()
    from ..distributed.group import group_verb

    return group_verb(group, device)

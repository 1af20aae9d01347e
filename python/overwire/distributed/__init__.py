"""Loads models on several ranks of a process group that share the reading."""

from __future__ import annotations

from ..model.options import ShardLike
from .cuts import shard_range
from .group import agree

__all__ = ["ShardLike", "agree", "shard_range"]

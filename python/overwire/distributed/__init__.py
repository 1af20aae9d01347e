"""Loads by the ranks of a process group together, and what they have measured."""

from __future__ import annotations

from ..model.options import ShardLike
from .exchange import shard_range
from .group import agree, rates
from .loading import load

__all__ = ["ShardLike", "agree", "load", "rates", "shard_range"]

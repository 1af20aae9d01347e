"""Loads by the ranks of a process group together, and what they have measured."""

from __future__ import annotations

from ..model.options import ShardLike
from .exchange import shard_range
from .loading import agree, load, rates

__all__ = ["ShardLike", "agree", "load", "rates", "shard_range"]

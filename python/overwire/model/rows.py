"""Defines the rows of the engine's tensor table."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """One row of the engine's tensor table."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stored: int
    source: int
    alias: int

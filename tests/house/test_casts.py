"""Tests the generated lists of casts that the engine does on a GPU. tests/house/test_build.py compares them with the
engine."""

from __future__ import annotations

from overwire._tables import BITS, CAST_FROM, CAST_TO, FLOATS


def test_the_lists_of_casts_agree() -> None:
    """Only floats are cast. A dtype can be the target of a cast exactly if it can be a source and has more than 8
    bits."""
    assert CAST_FROM <= FLOATS
    assert {name for name in CAST_FROM if BITS[name] > 8} == CAST_TO

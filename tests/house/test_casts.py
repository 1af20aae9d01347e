"""Tests that Python lists the same casts as the engine does for a GPU."""

from __future__ import annotations

import re

from conftest import ROOT
from overwire._tables import BITS, CAST_FROM, CAST_TO, FLOATS


def test_the_kernels_table_is_ours() -> None:
    text = (ROOT / "gosrc/device/cuda/queue/cast.go").read_text()
    table = re.search(r"var castable = .*?\n}", text, re.S)
    assert table is not None
    names = {name.replace("F8E", "F8_E") for name in re.findall(r"tensor\.(\w+): C\.", table[0])}
    assert names == CAST_FROM and CAST_FROM <= FLOATS
    assert {name for name in names if BITS[name] > 8} == CAST_TO

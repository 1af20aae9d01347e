"""Tests that a wrong checksum of an index or a header is reported with its rule."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import overwire as ow
import pytest


@pytest.mark.parametrize("part", ["index", "header"])
def test_wrong_checksums_of_index_and_header(tmp_path: Path, part: str) -> None:
    """The error for a changed bit in the index or the header names the same rule as the error for a wrong checksum of a
    chunk."""
    path = tmp_path / "m.safetensors"
    ow.save_file({"w": np.zeros((256, 256), np.float32)}, path, metadata={"note": "abcd"})
    stored = bytearray(path.read_bytes())
    length = int.from_bytes(stored[:8], "little")
    assert json.loads(stored[8 : 8 + length])["__metadata__"]["note"] == "abcd"
    stored[8 + length + 9 if part == "index" else stored.index(b"abcd")] ^= 1
    path.write_bytes(stored)
    with pytest.raises(ow.CorruptError, match=f"checksum mismatch of the {part}") as caught:
        ow.load_file(path, framework="np")
    assert caught.value.rule == "Checksum"

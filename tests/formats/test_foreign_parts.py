"""Tests that a part of another library's checkpoint is never read as the whole checkpoint."""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import overwire as ow
import pytest

torch = pytest.importorskip("torch")

from test_foreign import GOLDENS, altered, equal  # noqa: E402


def test_a_part_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """A folder is refused if it has the `.metadata` file of only one rank, a second model, a file number that no rank
    has, or headers that break the rules of safetensors."""
    folder, read = altered(tmp_path, lambda meta: None), (ow.load_file, lambda path: ow.convert(path, tmp_path / "out/"))
    before = ow.load_file(folder)
    os.rename(folder / ".metadata", folder / "__0.metadata")
    equal(ow.load_file(folder), before)
    shutil.copy(folder / "__0_0.distcp", folder / "__1_0.distcp")
    cases: list[tuple[Path, type[Exception], str]] = [(folder, ow.NotFoundError, "__1_0.distcp is another rank's")]
    shutil.copytree(folder, second := tmp_path / "second")
    os.remove(second / "__1_0.distcp")
    torch.save({"w": torch.ones(3)}, second / "pytorch_model.bin")
    cases.append((second, ow.ArgumentError, "pytorch_model.bin"))
    shutil.copytree(GOLDENS / "shards", shards := tmp_path / "shards")
    for name in os.listdir(shards):
        if "-model-00002-of-" in name:
            os.remove(shards / name)
    cases.append((shards, ow.NotFoundError, "no rank has a file 00002 of 00002"))
    for number, (header, data, text) in enumerate([
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"ab", "twice"),
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}', b"ab", "a gap before it"),
        ('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"ab", "1 unused bytes follow"),
        ('{"__metadata__":{"k":1},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"a", "not strings"),
    ]):  # fmt: skip
        path = tmp_path / f"header{number}/shard-00001-model-00001-of-00001.safetensors"
        path.parent.mkdir()
        path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data)
        cases.append((path.parent, ow.FormatError, text))
    for source, kind, text in cases:
        for call in read:
            with pytest.raises(kind, match=text):
                call(source)
    assert not (tmp_path / "out").exists()


def test_malformed_tar_records_and_npy_entries(tmp_path: Path) -> None:
    """Malformed sizes in tar records are refused. An .npy entry that is not an array is also refused."""
    path = tmp_path / "m.nemo"
    for digits in (b"9" * 5000, "\u00b2".encode(), b"-1"):
        pax, record = tarfile.TarInfo("p"), b"9 size=" + digits + b"\n"
        pax.type, pax.size = tarfile.XHDTYPE, len(record)
        data = record.ljust(-(-len(record) // 512) * 512, b"\0") + tarfile.TarInfo("x").tobuf() + bytes(1024)
        path.write_bytes(pax.tobuf(tarfile.USTAR_FORMAT) + data)
        with pytest.raises(ow.FormatError, match="malformed size"):
            ow.load_file(path)
    with zipfile.ZipFile(tmp_path / "m.npz", "w") as archive:
        archive.writestr("a.npy", b"")
        with archive.open("b.npy", "w") as file:
            np.save(file, np.ones(3))
    with pytest.raises(ow.FormatError, match="a: it does not begin like an array"):
        ow.load_file(tmp_path / "m.npz")

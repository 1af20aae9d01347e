"""Build the sdist, and the wheel from the unpacked sdist: python wheels/build.py DIR

So the wheel shows that the sdist is whole. It is built twice, in folders of
different names, and has to have the same bytes. Then it is compressed anew by
libdeflate, which makes it 4 % smaller than zlib's best.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import deflate

ROOT = Path(__file__).resolve().parents[1]


def hook(tree: Path, name: str, out: Path) -> Path:
    """Run one hook of the build backend in a process of its own, as pip does."""
    code = f"import sys, setup; print(setup.{name}(sys.argv[1]))"
    env = dict(os.environ, PYTHONPATH=str(tree))
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return out / done.stdout.split()[-1]


def compress(wheel: Path) -> None:
    """Write a wheel anew with the same files, in the same order, at libdeflate's best level."""
    content, directory, count = b"", b"", 0
    with zipfile.ZipFile(wheel) as z:
        for entry in z.infolist():
            data = z.read(entry)
            packed, name = deflate.deflate_compress(data, 12), entry.filename.encode()
            # PKWARE's APPNOTE 6.3, sections 4.3.7 and 4.3.12; version 2.0, Deflate, 1980-01-01.
            common = struct.pack("<4H3I2H", 0, 8, 0, 33, entry.CRC, len(packed), len(data), len(name), 0)
            directory += b"PK\1\2" + struct.pack("<2H", 3 << 8 | 20, 20) + common
            directory += struct.pack("<3H2I", 0, 0, 0, entry.external_attr, len(content)) + name
            content += b"PK\3\4" + struct.pack("<H", 20) + common + name + packed
            count += 1
    end = b"PK\5\6" + struct.pack("<4H2IH", 0, 0, count, count, len(directory), len(content), 0)
    wheel.write_bytes(content + directory + end)


def main(out: Path) -> None:
    for old in [*out.glob("overwire-*.whl"), *out.glob("overwire-*.tar.gz")]:
        old.unlink()
    sdist = hook(ROOT, "build_sdist", out)
    with tempfile.TemporaryDirectory() as t:
        wheels = []
        for folder, into in (("one", out), ("an other, too", Path(t))):
            shutil.unpack_archive(sdist, Path(t, folder))
            wheels.append(hook(Path(t, folder, sdist.name.removesuffix(".tar.gz")), "build_wheel", into))
        wheel, again = wheels
        if again.name != wheel.name or again.read_bytes() != wheel.read_bytes():
            sys.exit(f"{wheel.name}: built twice in different folders, and not the same")
    compress(wheel)
    for path in (sdist, wheel):
        print(f"{path.name}  {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

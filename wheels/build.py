"""Builds the sdist, and the wheels from the unpacked sdist: python wheels/build.py DIR

This proves that the sdist is complete. The wheels are this machine's wheel, and the platform-independent wheel, which
reads files with only numpy. Each wheel is built twice, in differently named folders, and both builds must have the same
bytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def hook(tree: Path, name: str, out: Path) -> Path:
    """Runs one hook of the build backend in a separate process, as pip does."""
    code = f"import sys, setup; print(setup.{name}(sys.argv[1]))"
    env = dict(os.environ, PYTHONPATH=str(tree))
    done = subprocess.run([sys.executable, "-c", code, str(out)], cwd=tree, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return out / done.stdout.split()[-1]


def main(out: Path) -> None:
    for old in [*out.glob("overwire-*.whl"), *out.glob("overwire-*.tar.gz")]:
        old.unlink()
    sdist = hook(ROOT, "build_sdist", out)
    with tempfile.TemporaryDirectory() as t:
        wheels: list[list[Path]] = []
        for folder, into in (("one", out), ("an other, too", Path(t))):
            shutil.unpack_archive(sdist, Path(t, folder))
            tree = Path(t, folder, sdist.name.removesuffix(".tar.gz"))
            wheels.append([hook(tree, name, into) for name in ("build_wheel", "build_portable_wheel")])
        for wheel, again in zip(*wheels, strict=True):
            if again.name != wheel.name or again.read_bytes() != wheel.read_bytes():
                sys.exit(f"{wheel.name}: two builds in different folders are not the same")
    for path in (sdist, *wheels[0]):
        print(f"{path.name}  {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())

"""Runs, on a machine without a GPU, the tests/gpu/test_gpu_*.py files that do not need torch on a GPU.

The engine uses the fake driver of gosrc/device/cuda, which runs the kernels on the CPU.

    python tests/gpu/fake_gpu.py [pytest's arguments]

The engine is compiled into build/fake, next to links to the package's files. `make fakepy` runs this program with the
same CGO_CXXFLAGS as `make fakegpu`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "build" / "fake"


def main() -> int:
    sys.path.insert(0, str(ROOT))
    import setup

    package = FAKE / "overwire"
    package.mkdir(parents=True, exist_ok=True)
    for link in package.iterdir():
        if link.is_symlink():
            link.unlink()
    for source in (ROOT / "python" / "overwire").iterdir():
        if source.suffix != ".so" and source.name != "__pycache__":
            (package / source.name).symlink_to(source)
    setup.build_library(package / "_core.abi3.so", fake=True)
    names = ("codecs", "deltas", "digest", "gather", "nvcomp", "ring", "sleep")
    files = [f"tests/gpu/test_gpu_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(FAKE)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

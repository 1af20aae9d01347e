"""Tests, without a GPU, that the committed GPU kernels match their sources.

cuda/built has the compiled modules and the hashes of their inputs. Without the compiler, which pip installs, only the
hashes are compared.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "cuda"
BUILT = CUDA / "built"
MODULES = {"x16.fatbin", "x16_aarch64.fatbin", "resident.fatbin", "resident_aarch64.fatbin"}
SOURCES = ("kernels.cu", "resident.cu")
WHEELS = "cuda-toolkit[nvcc,cudart]==13.0.*"


def noted() -> dict[str, str]:
    lines = (BUILT / "sources.sha256").read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def included(name: str, seen: set[str]) -> set[str]:
    """Returns all files that nvcc includes for a source. Files that only the kernels' CPU versions include are left
    out."""
    if name not in seen:
        seen.add(name)
        for other in re.findall(r'^#include "([^"]+)"', (CUDA / name).read_text(encoding="utf-8"), re.M):
            if other != "warp_host.h":
                included(other, seen)
    return seen


def test_hashes_match_sources_and_modules() -> None:
    """The recorded hashes are those of the kernels' sources and compiled modules."""
    hashes = noted()
    assert set(hashes) == set().union(*(included(name, set()) for name in SOURCES)) | MODULES
    for name, digest in hashes.items():
        path = BUILT / name if name in MODULES else CUDA / name
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        assert found == digest, f"{name} has changed: run `make kernels` and commit cuda/built"


def test_every_kernel_is_in_the_module() -> None:
    # The module is compressed, so the names come from the sources and from the Go code that looks them up.
    names = set(re.findall(r"ow_\w+", (ROOT / "gosrc/device/cuda/queue/pool.go").read_text(encoding="utf-8")))
    text = "".join((CUDA / f).read_text(encoding="utf-8") for f in ("x16_decode.cu", "move.cu"))
    kernels = {f"ow_x16_{n}" for n in re.findall(r"^OW_X16_KERNEL\((\w+),", text, re.M)}
    kernels |= set(re.findall(r"^\s*(ow_\w+_kernel)\(", text, re.M))
    assert {n for n in names if n.startswith("ow_x16_") or n.endswith("_kernel")} == kernels


def test_every_batch_kernel_is_in_the_module() -> None:
    # abi_batch.h lists the kernels for the code that launches them.
    listed = set(re.findall(r"^ \*   (ow_\w+) +\d", (CUDA / "abi_batch.h").read_text(encoding="utf-8"), re.M))
    text = (CUDA / "batch.cu").read_text(encoding="utf-8")
    kernels = set(re.findall(r"^OW_WARP_KERNEL\((\w+),", text, re.M)) | set(re.findall(r"__launch_bounds__\([^)]*\) (ow_\w+)\(", text))
    assert listed == kernels
    assert '#include "batch.cu"' in (CUDA / "kernels.cu").read_text(encoding="utf-8")


def test_every_resident_kernel_is_in_the_module() -> None:
    asked = re.search(r'residentNames\s*= "([^"]*)"', (ROOT / "gosrc/device/cuda/stream/resident.go").read_text(encoding="utf-8"))
    assert asked is not None
    kernels = re.findall(r"__launch_bounds__\([^)]*\)\s+(ow_\w+)\(", (CUDA / "resident.cu").read_text(encoding="utf-8"))
    assert set(asked[1].split(r"\x00")[:-1]) == set(kernels)


@pytest.fixture(scope="module")
def nvcc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the pinned compiler of `make kernels`, or installs it from wheels."""
    if shutil.which("g++") is None:
        pytest.skip("nvcc needs g++")
    kept = ROOT / "build" / "nvcc" / "nvidia" / "cu13" / "bin" / "nvcc"
    if kept.exists():
        return kept
    if os.environ.get("OVERWIRE_TEST_NVCC") != "1":
        pytest.skip("no build/nvcc (make kernels), and OVERWIRE_TEST_NVCC=1 is not set, which fetches 100 MB")
    folder = tmp_path_factory.mktemp("nvcc")
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(folder), WHEELS]
    got = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if got.returncode != 0:
        pytest.skip(f"the compiler's wheels cannot be installed: {got.stderr[-200:]}")
    return folder / "nvidia" / "cu13" / "bin" / "nvcc"


def test_rebuild_gives_the_same_bytes(nvcc: Path, tmp_path: Path) -> None:
    # build.sh also fails if the PTX version is not 9.0, because only newer drivers can read later versions.
    subprocess.run(["sh", str(BUILT / "build.sh"), str(nvcc), str(tmp_path)], check=True, timeout=600)
    assert (tmp_path / "sources.sha256").read_text() == (BUILT / "sources.sha256").read_text()
    for name in MODULES:
        assert (tmp_path / name).read_bytes() == (BUILT / name).read_bytes()


@pytest.mark.parametrize("source", SOURCES)
def test_ptx_version(nvcc: Path, tmp_path: Path, source: str) -> None:
    """Each kernel compiles to PTX 9.0, because only newer drivers can read later versions."""
    out = tmp_path / "kernels.ptx"
    subprocess.run(
        [str(nvcc), "-ptx", "-std=c++17", "-O3", "-arch=compute_80", "-o", str(out), str(CUDA / source)], check=True, timeout=600
    )
    assert ".version 9.0\n" in out.read_text()

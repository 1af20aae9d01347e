"""Audits wheels and imports them in every CPython of this machine: python wheels/check.py FILE...

The library must export only PyInit__core. It may need only libc, in no newer glibc version than its tag states, and
Python's stable ABI of 3.10. The wheel must have a correct RECORD, the licences of all linked modules, and at most
LARGEST bytes. Then each interpreter that is on PATH, in pyenv, or downloaded by wheels/pythons.sh imports the wheel and
calls the engine. Wheels of another machine are imported by downloaded interpreters under qemu-user. The wheel without
the engine must read all golden files with only numpy.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from elf import DT_RPATH, DT_RUNPATH, Elf

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
LARGEST = 8_550_000
E_MACHINE = {"x86_64": 62, "aarch64": 183}  # in the ELF header

# Names outside of the stable ABI of 3.10 that the shim could use by mistake. PyObject_GetBuffer and PyBuffer_Release
# are allowed, because they are in the stable ABI since 3.11 and the same in 3.10 (gosrc/bind/core/memory.c).
NOT_STABLE = re.compile(
    r"^_Py(?!Arg_\w+_SizeT$|_(Dealloc|IncRef|DecRef|NoneStruct|TrueStruct|FalseStruct|BuildValue_SizeT)$)"
    r"|^Py(Complex_AsC|Run_|Buffer_(?!Release$))"
)

SMOKE = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from overwire import _engine, _verbs
assert _engine._loaded is None
assert any(row["name"].startswith("OVERWIRE_") for row in _verbs.knobs())
try:
    _verbs.open({})
except ValueError as error:
    assert type(error).__name__ == "ArgumentError", error
else:
    raise SystemExit("opened nothing")
"""


READ = """
import hashlib, json, sys
sys.path[:0] = sys.argv[1:3]
import overwire
for name in ("pin", "patch_safetensors", "codecs"):
    try:
        getattr(overwire, name)
    except ImportError as error:
        assert "needs the engine" in str(error), error
    else:
        raise SystemExit(f"has {name}")
try:
    import overwire.frameworks.torch
except ModuleNotFoundError as error:
    assert "needs the engine" in str(error), error
digests = {}
for path in sys.argv[3:]:
    loaded = overwire.load_file(path, framework="bytes")
    assert [t["name"] for t in overwire.inspect(path)["sources"][0]["tensors"]] == list(loaded)
    digests[path] = {name: hashlib.sha256(data).hexdigest() for name, data in loaded.items()}
assert not [name for name in sys.modules if name.split(".")[0] in ("torch", "ml_dtypes", "safetensors")]
print(json.dumps(digests))
"""


def pythons(machine: str = platform.machine()) -> dict[str, str | None]:
    """Returns the interpreter of each version for a machine, or None."""
    found: dict[str, str | None] = {}
    for version in PYTHONS:
        fetched = ROOT / "build" / "pythons" / machine / f"python{version}"
        if machine != platform.machine():
            found[version] = str(fetched) if fetched.exists() else None
            continue
        roots = sorted(Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob(f"versions/{version}.*/bin/python"))
        candidates = [str(p) for p in (*roots, shutil.which(f"python{version}"), fetched) if p and Path(p).exists()]
        found[version] = next((p for p in candidates if works(p, version)), None)
    return found


def works(python: str, version: str) -> bool:
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return said.stdout.strip() == version


def audit(wheel: Path) -> list[str]:
    """Returns the faults of a wheel."""
    if wheel.name.endswith("-py3-none-any.whl"):
        return audit_portable(wheel)
    wrong = []
    tag = re.fullmatch(r"overwire-[^-]+-cp310-abi3-manylinux_(\d+)_(\d+)_(x86_64|aarch64)\.whl", wheel.name)
    if not tag:
        return [f"the name {wheel.name}"]
    floor = (int(tag[1]), int(tag[2]))
    if wheel.stat().st_size > LARGEST:
        wrong.append(f"has {wheel.stat().st_size} bytes, more than {LARGEST}")
    with zipfile.ZipFile(wheel) as z:
        files = {name: z.read(name) for name in z.namelist()}
    elf = Elf(files["overwire/_core.abi3.so"])
    if elf.machine != E_MACHINE[tag[3]]:
        wrong.append(f"has code for ELF machine {elf.machine}, expected {tag[3]}")
    if elf.exports() != ["PyInit__core"]:
        wrong.append(f"exports {elf.exports()}")
    if set(elf.needed()) - {"libc.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-aarch64.so.1"}:
        wrong.append(f"needs {elf.needed()}")
    if elf.dynamic(DT_RPATH) or elf.dynamic(DT_RUNPATH):
        wrong.append("has a run path")
    for v in elf.needed_versions():
        found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", v.version)
        if not found or (int(found[1]), int(found[2])) > floor:
            wrong.append(f"needs {v.library} {v.version}, newer than the tag")
    wrong += [f"uses {s.name}" for s in elf.symbols() if not s.defined and NOT_STABLE.match(s.name)]

    info = next(name for name in files if name.endswith(".dist-info/METADATA")).removesuffix("METADATA")
    named = re.findall(r"^License-File: (.*)$", files[f"{info}METADATA"].decode(), re.M)
    if len(named) < 2 or {f"{info}licenses/{name}" for name in named} - set(files):
        wrong.append(f"lacks some of the licences {named}")
    bill = json.loads(files.get(f"{info}sboms/overwire.cdx.json", b"{}"))
    texts = files.get(f"{info}licenses/THIRD-PARTY.txt", b"").decode()
    modules = [part for part in bill.get("components", []) if part["type"] == "library"]
    if len(modules) < 10 or any(f"\n{part['name']} {part['version']}: " not in texts for part in modules):
        wrong.append("the bill of materials and the licences list different modules")

    return wrong + wrong_records(files)


def wrong_records(files: dict[str, bytes]) -> list[str]:
    """Returns the differences between RECORD and the contents of a wheel."""
    wrong = []
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    listed = {row[0]: row[1:] for row in csv.reader(io.StringIO(files[record].decode()))}
    if set(listed) != set(files):
        wrong.append(f"RECORD and contents differ: {set(listed) ^ set(files)}")
    for name, data in files.items():
        digest = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if name != record and listed.get(name) != [digest, str(len(data))]:
            wrong.append(f"RECORD is wrong about {name}")
    return wrong


def audit_portable(wheel: Path) -> list[str]:
    """Returns the faults of the wheel without the engine."""
    wrong = []
    with zipfile.ZipFile(wheel) as z:
        files = {name: z.read(name) for name in z.namelist()}
    if extra := [name for name in files if not re.fullmatch(r"overwire/(portable/)?\w+\.py|overwire/py\.typed|overwire-.*", name)]:
        wrong.append(f"has {extra}")
    info = next(name for name in files if name.endswith(".dist-info/METADATA")).removesuffix("METADATA")
    if b"\nRequires-Dist: numpy\n" not in files[f"{info}METADATA"] or b"\nRoot-Is-Purelib: true\n" not in files[f"{info}WHEEL"]:
        wrong.append("does not declare that it is pure and requires numpy")
    if f"{info}licenses/LICENSE" not in files:
        wrong.append("has no licence")
    return wrong + wrong_records(files)


def smoke(wheel: Path, python: str) -> str:
    """Imports a wheel. Returns the error, or "" if there is none."""
    with tempfile.TemporaryDirectory() as t:
        with zipfile.ZipFile(wheel) as z:
            z.extractall(t)
        done = subprocess.run([python, "-I", "-c", SMOKE, t], capture_output=True, text=True, timeout=300, check=False)
        return done.stderr if done.returncode else ""


def read_goldens(wheel: Path, paths: Iterable[Path]) -> dict[str, dict[str, str]]:
    """Returns the SHA-256 of each tensor in some files, read by the wheel without the engine in this Python, with numpy
    and, for level "smaller", zstandard. Raises RuntimeError if reading fails."""
    with tempfile.TemporaryDirectory() as t:
        with zipfile.ZipFile(wheel) as z:
            z.extractall(Path(t, "wheel"))
        Path(t, "beside").mkdir()
        for name in ("numpy", "zstandard"):
            spec = find_spec(name)
            if spec is not None and spec.origin is not None:
                place = Path(spec.origin).parent
                Path(t, "beside", name).symlink_to(place)
                if (libraries := place.with_name(f"{name}.libs")).is_dir():
                    Path(t, "beside", libraries.name).symlink_to(libraries)
        command = [sys.executable, "-I", "-S", "-c", READ, f"{t}/wheel", f"{t}/beside", *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        digests: dict[str, dict[str, str]] = json.loads(done.stdout)
        return digests


def goldens() -> list[Path]:
    """Returns the golden files that this Python can read. Files of level "smaller" need zstandard."""
    paths = sorted((ROOT / "tests" / "goldens").rglob("*.safetensors"))
    return [path for path in paths if "level" not in str(path) or find_spec("zstandard")]


def main(wheels: list[Path]) -> None:
    bad = False
    for wheel in wheels:
        for fault in audit(wheel):
            bad = True
            print(f"FAIL {wheel.name}: {fault}")
        if wheel.name.endswith("-py3-none-any.whl"):
            print(f"ok   {len(read_goldens(wheel, goldens()))} goldens read with only numpy")
            continue
        machine = next((name for name in E_MACHINE if wheel.stem.endswith(name)), "")
        for version, python in pythons(machine).items():
            if python is None:
                print(f"skip CPython {version}: not on this machine; get it with wheels/pythons.sh")
                continue
            fault = smoke(wheel, python)
            bad = bad or bool(fault)
            print(f"{'FAIL' if fault else 'ok  '} CPython {version} {machine} {fault}")
    sys.exit(bad)


if __name__ == "__main__":
    main([Path(a) for a in sys.argv[1:]])

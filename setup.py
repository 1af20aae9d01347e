"""The PEP 517 and PEP 660 backend that builds overwire, with only the standard library.

    pip install .          needs Go 1.26, a C compiler and the headers of this Python
    pip install -e .       the same; rerun it after a change of Go or C code
    python setup.py ext [FILE.so]   only compile python/overwire/_core.abi3.so, or FILE.so
    python setup.py asan FILE.so    compile for AddressSanitizer, to FILE.so
    python setup.py goflags         print the GOFLAGS with which other Go commands use the
                                    build cache of the engine

GOARCH=arm64 CC=aarch64-linux-gnu-gcc builds for aarch64 on another machine.

Only Go modules are downloaded, by Go itself (GOPROXY, GOMODCACHE as usual).
With a filled module cache, or after `go mod vendor`, no network is needed.
One wheel supports CPython 3.10 and later. Its tag is derived from the
library's symbol versions; a library that needs a newer glibc than FLOOR is
refused. The same tree and tools produce the same bytes in any folder.

setuptools is not used, because the build would have to download it. Its wheels depend on the umask, and it does not
write dist-info/sboms.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import importlib
import io
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import types
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = ROOT / "python" / "overwire"
LIBRARY = PACKAGE / "_core.abi3.so"
CORE = ROOT / "gosrc" / "bind" / "core"
GO = (1, 26)
FLOOR = (2, 17)  # glibc of manylinux2014
PORTABLE = "py3-none-any"  # the wheel tag without the engine
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # Go's name -> the name in wheels
# source/route and serve use only HTTP/1.1. Without HTTP/2 a wheel is 0.2 MB smaller.
GO_TAGS = "netgo,osusergo,nethttpomithttp2"
TAGS = "pyext," + GO_TAGS
# Packages that are compiled without inlining, which makes a wheel 0.5 MB smaller. They do not process tensor bytes.
LEAN = (
    "crypto/tls crypto/x509/... encoding/asn1 encoding/json encoding/xml fmt github.com/aws/... github.com/redis/... "
    "golang.org/x/net/... golang.org/x/text/... html/... math/big mime/... net/... os/... reflect regexp/... text/... "
    "time vendor/..."
)
LEAN_OWN = (
    "bench cli companions delta errs fetch format/gguf knob page serve source/cache source/http source/open "
    "source/redis source/retry source/route source/s3 tensorizer"
)
EPOCH = 315532800 # 1980-01-01, the oldest time that a zip can store

# Folders of an sdist. Built, cached and hidden files are left out.
SDIST = ("bench", "cuda", "docs", "examples", "gosrc", "python", "requirements", "tests", "vendor", "wheels")
LEFT_OUT = re.compile(r"(^|/)(__pycache__|\.[^/]*)(/|$)|\.(so|pyc|whl)$|(^|/)testdata/fuzz/")


# Metadata comes from pyproject.toml. It is parsed here, because Python 3.10 has no TOML parser.


def sections() -> dict[str, str]:
    """Returns the lines of each section of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return dict(re.findall(r"^\[([^\n]+)\]\n(.*?)(?=^\[|\Z)", text, re.M | re.S))


def texts(section: str) -> dict[str, str]:
    """Returns the simple `key = "value"` lines of a section."""
    return dict(re.findall(r'^([\w-]+) = "(.*)"$', sections()[section], re.M))


def items(section: str, key: str) -> list[str]:
    """Returns the strings of one list of a section."""
    listed = re.search(rf"^{key} = \[(.*?)\]$", sections()[section], re.M | re.S)
    return re.findall(r'"([^"]*)"', listed[1]) if listed else []


def project() -> dict[str, str]:
    """Returns the strings of [project], and the version, which is defined in gosrc/cli."""
    version = re.search(r'^const Version = "(.*)"$', (ROOT / "gosrc/cli/cli.go").read_text(encoding="utf-8"), re.M)
    assert version is not None
    return texts("project") | {"version": version[1]}


def entry_points() -> str:
    """Returns the wheel's entry_points.txt: the commands, then each group of plug-ins."""
    groups = {"console_scripts": "project.scripts"}
    groups |= {name.split('"')[1]: name for name in sections() if name.startswith("project.entry-points.")}
    parts = ([f"[{name}]", *(f"{k} = {v}" for k, v in texts(section).items()), ""] for name, section in groups.items())
    return "\n".join("\n".join(part) for part in parts)


def metadata(licence: str = "", files: list[str] | None = None, requires: Iterable[str] = ()) -> str:
    """Returns METADATA. For a wheel, it has the licence of all contents, the licence files and the required packages.
    For an sdist, it has only the project's own licence, because an sdist has no library."""
    p = project()
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {p['name']}",
        f"Version: {p['version']}",
        f"Summary: {p['description']}",
        f"License-Expression: {licence or p['license']}",
        *(f"License-File: {name}" for name in files or []),
        *(["Dynamic: License-Expression", "Dynamic: License-File"] if files is None else []),
        f"Requires-Python: {p['requires-python']}",
    ]
    lines.append("Keywords: " + ",".join(items("project", "keywords")))
    lines += [f"Classifier: {c}" for c in items("project", "classifiers")]
    urls = texts("project.urls")
    lines += [f"Project-URL: {label}, {url}" for label, url in urls.items()]
    lines += [f"Requires-Dist: {name}" for name in requires]
    for extra in ("torch", "numpy", "progress"):
        packages = items("project.optional-dependencies", extra)
        if packages:
            lines.append(f"Provides-Extra: {extra}")
            lines += [f'Requires-Dist: {r}; extra == "{extra}"' for r in packages]
    readme = ROOT / p["readme"]
    if readme.exists():
        lines += ["Description-Content-Type: text/markdown", "", with_full_links(readme.read_text(encoding="utf-8"), urls["Repository"])]
    return "\n".join(lines) + "\n"


def with_full_links(page: str, repository: str) -> str:
    """Replaces relative pictures and links of a page with links to the repository, for the page of the package index."""
    page = re.sub(r"^(!\[[^\]]*\]\()(?!https?://)([^)]*\))", rf"\1{repository}/raw/main/\2", page, flags=re.M)
    return re.sub(r"(?<!!)(\[[^\]]+\]\()(?!https?://|#)([^)]*\))", rf"\1{repository}/blob/main/\2", page)


def name_version() -> str:
    p = project()
    return f"{p['name']}-{p['version']}"


# The library.


def go_command() -> str:
    go = shutil.which("go")
    if not go:
        sys.exit("overwire: building needs Go %d.%d or later on PATH (https://go.dev/dl)" % GO)
    said = subprocess.run([go, "env", "GOVERSION"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout
    found = re.match(r"go(\d+)\.(\d+)", said)
    if not found or (int(found[1]), int(found[2])) < GO:
        sys.exit(f"overwire: building needs Go {GO[0]}.{GO[1]} or later; {go} says {said.strip() or 'nothing'}")
    return go


def machine() -> str:
    """Returns the target machine's name in wheels, from GOARCH."""
    here = {name: go for go, name in MACHINES.items()}.get(platform.machine(), platform.machine())
    target = MACHINES.get(os.environ.get("GOARCH") or here)
    if sys.platform != "linux" or target is None or platform.python_implementation() != "CPython":
        sys.exit("overwire: only CPython on Linux, x86-64 or aarch64, is supported so far")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        sys.exit("overwire: free-threaded CPython has no stable ABI, which the engine needs: use the standard build of CPython")
    return target


def go_environment() -> dict[str, str]:
    """Returns the environment for building the library."""
    env = dict(os.environ)
    env.update(
        CGO_ENABLED="1",
        # Go supports vector instructions only on amd64.
        GOEXPERIMENT=os.environ.get("GOEXPERIMENT", "simd") if machine() == "x86_64" else "",
        GOFLAGS=(env.get("GOFLAGS", "") + " -buildvcs=false").strip(),
        GOAMD64="v1",
        # With this value the compiler takes a quarter less time, but 0.9 instead of 0.5 GB for the largest package.
        GOGC=os.environ.get("GOGC", "400"),
    )
    return env


def lean() -> list[str]:
    """Returns build flags that make the packages of LEAN small. The flags also omit debug tables, which take a sixth of
    the compile time, and which the linker would drop."""
    packages = [*LEAN.split(), *(f"github.com/overwire/overwire/gosrc/{name}" for name in LEAN_OWN.split())]
    return ["-gcflags=all=-dwarf=false", *(f"-gcflags={package}=-l -dwarf=false" for package in packages)]


def third_parties() -> tuple[dict[str, str], str]:
    """Returns the files that list the linked modules, and the licence of the whole library."""
    licences = of_wheels("licences")
    p = project()
    modules = licences.linked(ROOT, go_command(), TAGS, go_environment())
    suffix = "_aarch64" if machine() == "aarch64" else ""
    bill = licences.bill(p["name"], p["version"], p["license"], modules, ROOT, suffix)
    return {licences.TEXTS: licences.notices(modules), licences.BOM: bill}, licences.expression(p["license"], modules)


def build_library(out: Path = LIBRARY, asan: bool = False, fake: bool = False) -> None:
    """Compiles gosrc/bind/core to the extension module at out. fake: with the fake GPU driver, for tests."""
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        sys.exit(f"overwire: the C headers of this Python are missing in {include} (install python3-dev)")
    cflags = ["-O2", "-g0", "-I", str(CORE / "shim"), "-I", include, "-Wno-implicit-function-declaration", "-Wno-int-conversion"]
    ldflags = f"""-s -w -B none -buildid= '-extldflags=-Xlinker "--version-script={CORE / "exports.map"}"'"""
    if not asan:
        # Go's build cache ignores changes of a file that a flag includes, so the file's hash is also a flag.
        symver = CORE / "symver.h"
        cflags += ["-include", str(symver), f"-DOW_SYMVER={hashlib.sha256(symver.read_bytes()).hexdigest()[:16]}"]
    env = go_environment() | {"CGO_CFLAGS": shlex.join(cflags), "CGO_LDFLAGS": "-O2 -g0"}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build", dir=out.parent) as t:
        made = Path(t) / out.name
        tags = TAGS + (",nostores" if asan or fake else "")  # the stores are pure Go, which the sanitizer cannot check
        tags += ",owfake,owfakeauto" if fake else ""
        command = [go_command(), "build", "-trimpath", f"-tags={tags}", "-buildmode=c-shared"]
        command += ["-asan"] if asan else []
        command += lean()
        command += [f"-ldflags={ldflags}", "-o", str(made), "./gosrc/bind/core"]
        done = subprocess.run(command, cwd=ROOT, env=env, check=False)
        if done.returncode:
            sys.exit(f"overwire: go build failed (exit code {done.returncode}): see its messages above")
        if not asan and not fake:
            symbol_floor(made)
        os.replace(made, out)  # processes that have mapped the old file keep using it


def of_wheels(module: str) -> types.ModuleType:
    """Imports a module from the folder wheels."""
    sys.path.insert(0, str(ROOT / "wheels"))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.pop(0)


def symbol_floor(library: Path) -> tuple[int, int]:
    """Returns the newest glibc version that a library needs, at least FLOOR. Exits if it is newer than FLOOR."""
    versions = of_wheels("elf").Elf(library.read_bytes()).needed_versions()
    glibc = [(int(m[1]), int(m[2])) for v in versions if (m := re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", v.version))]
    newest = max(glibc, default=(2, 5))
    if newest > FLOOR:
        above = sorted(f"{v.library} {v.version}" for v in versions if f"GLIBC_{newest[0]}.{newest[1]}" in v.version)
        sys.exit(f"overwire: {library.name} needs {', '.join(above)}, newer than glibc {FLOOR[0]}.{FLOOR[1]}")
    return max(newest, FLOOR)


def tag(library: Path) -> str:
    """Returns the wheel's tag. It names the glibc version FLOOR; a library that needs a newer version is refused."""
    return "cp310-abi3-manylinux_%d_%d_" % symbol_floor(library) + machine()


# Archives.


def write_wheel(directory: str, label: str, files: dict[str, bytes], parties: dict[str, str] | None = None, licence: str = "") -> str:
    """Writes a reproducible wheel (sorted files, fixed time and modes, RECORD last) with the files of
    `third_parties`. Returns its name."""
    info = f"{name_version()}.dist-info"
    files = {**files, f"{info}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes()}
    for name, text in (parties or {}).items():
        folder = "sboms" if name.endswith(".json") else "licenses"
        files[f"{info}/{folder}/{name}"] = text.encode()
    listed = sorted(name.partition("/licenses/")[2] for name in files if "/licenses/" in name)
    pure = label == PORTABLE
    files[f"{info}/METADATA"] = metadata(licence, listed, ["numpy"] if pure else []).encode()
    wheel = ["Wheel-Version: 1.0", "Generator: overwire-setup", f"Root-Is-Purelib: {str(pure).lower()}", f"Tag: {label}", ""]
    files[f"{info}/WHEEL"] = "\n".join(wheel).encode()
    entries = "[console_scripts]\noverwire = overwire.portable.files:main\n" if pure else entry_points()
    files[f"{info}/entry_points.txt"] = entries.encode()
    record = []
    for name, data in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(data)}\n")
    record.append(f"{info}/RECORD,,\n")
    path = Path(directory) / f"{name_version()}-{label}.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as z:
        for name, data in [*sorted(files.items()), (f"{info}/RECORD", "".join(record).encode())]:
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.create_system = 3
            entry.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            z.writestr(entry, data)
    return path.name


def tree(folder: Path) -> list[Path]:
    """Returns the files below a folder that belong in archives, in order."""
    files = (p for p in folder.rglob("*") if p.is_file())
    return sorted(p for p in files if not LEFT_OUT.search(p.relative_to(ROOT).as_posix()))


# The hooks of PEP 517 and 660. The build needs no packages, so the hooks that list packages are omitted.


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    with tempfile.TemporaryDirectory() as t:  # so that the tree stays unchanged
        library = Path(t) / LIBRARY.name
        build_library(library)
        label = tag(library)
        files = {f"overwire/{LIBRARY.name}": library.read_bytes()}
    files |= {path.relative_to(PACKAGE.parent).as_posix(): path.read_bytes() for path in tree(PACKAGE)}
    return write_wheel(wheel_directory, label, files, *third_parties())


def build_portable_wheel(wheel_directory: str) -> str:
    """Builds the platform-independent wheel, for machines without the engine: a reader that needs only numpy."""
    homes = re.search(r"^_HOMES = (\{.*?^\})", (PACKAGE / "__init__.py").read_text(encoding="utf-8"), re.M | re.S)
    assert homes is not None
    public = tuple(sorted(name for names in ast.literal_eval(homes[1]).values() for name in names))
    facts = (PACKAGE / "portable" / "facts.py").read_text(encoding="utf-8")
    facts = facts.replace("NAMES: tuple[str, ...] = ()", f"NAMES: tuple[str, ...] = {public!r}")
    facts = facts.replace('__version__: str = "0"', f'__version__: str = "{project()["version"]}"')
    files = {f"overwire/portable/{path.name}": path.read_bytes() for path in tree(PACKAGE / "portable")}
    files["overwire/__init__.py"] = files.pop("overwire/portable/door.py")
    files["overwire/portable/facts.py"] = facts.encode()
    files["overwire/__main__.py"] = b"from .portable.files import main\n\nraise SystemExit(main())\n"
    files |= {f"overwire/{name}": (PACKAGE / name).read_bytes() for name in ("errors.py", "py.typed")}
    return write_wheel(wheel_directory, PORTABLE, files)


def build_editable(wheel_directory: str, config_settings: object = None, metadata_directory: str | None = None) -> str:
    build_library()
    return write_wheel(wheel_directory, tag(LIBRARY), {"_overwire_editable.pth": f"{PACKAGE.parent}\n".encode()})


def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
    top = [p for p in sorted(ROOT.iterdir()) if p.is_file() and not p.name.startswith(".") and not LEFT_OUT.search(p.name)]
    files = top + [f for d in SDIST if (ROOT / d).is_dir() for f in tree(ROOT / d)]
    name = f"{name_version()}.tar.gz"
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:

        def add(path: str, data: bytes, mode: int) -> None:
            entry = tarfile.TarInfo(f"{name_version()}/{path}")
            entry.size, entry.mode, entry.mtime = len(data), mode, EPOCH
            tar.addfile(entry, io.BytesIO(data))

        add("PKG-INFO", metadata().encode(), 0o644)
        for part, text in sorted(third_parties()[0].items()):
            add(f"licenses/{part}", text.encode(), 0o644)
        for f in sorted(files):
            rel = f.relative_to(ROOT).as_posix()
            if rel != "PKG-INFO":
                add(rel, f.read_bytes(), 0o755 if os.access(f, os.X_OK) else 0o644)
    out = Path(sdist_directory) / name
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=EPOCH) as z:
        z.write(raw.getvalue())
    return name


if __name__ == "__main__":
    if sys.argv[1:2] == ["ext"] and len(sys.argv) <= 3:
        build_library(Path(sys.argv[2]).resolve() if sys.argv[2:] else LIBRARY)
    elif len(sys.argv) == 3 and sys.argv[1] == "asan":
        build_library(Path(sys.argv[2]).resolve(), asan=True)
    elif sys.argv[1:] == ["goflags"]:
        print(shlex.join([f"-tags={GO_TAGS}", "-trimpath", "-buildmode=pie", *lean()]))
    else:
        sys.exit("usage: python setup.py ext [FILE.so] | asan FILE.so | goflags   (everything else: pip)")

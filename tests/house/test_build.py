"""Tests that the archives of a release have the right contents, are reproducible and install offline.

Archives that take long to build are built once for all tests of this file.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from conftest import cleaned

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "wheels"), str(ROOT)]

import check  # noqa: E402
import licences  # noqa: E402
from elf import Elf  # noqa: E402

import setup  # noqa: E402

pytestmark = pytest.mark.xdist_group("build")

VERSIONS = check.pythons()


def tool(*argv: object, cwd: Path = ROOT, **env: str) -> str:
    clean = cleaned("PYTHONPATH")
    done = subprocess.run([str(a) for a in argv], cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the sdist and the wheel that is built from it. build.py compares this wheel with a wheel
    that is built from the tree."""
    if os.environ.get("OVERWIRE_TEST_DIST"):  # already built
        return Path(os.environ["OVERWIRE_TEST_DIST"])
    out = tmp_path_factory.mktemp("dist")
    tool(sys.executable, ROOT / "wheels/build.py", out)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*manylinux*.whl")
    return path


def test_the_wheel_passes_its_audit(wheel: Path) -> None:
    """The wheel's library exports one symbol, depends only on libc, uses the stable ABI, and needs no later glibc than
    the wheel's tag says. RECORD is correct."""
    assert check.audit(wheel) == []
    assert re.fullmatch(rf"overwire-[\d.]+-cp310-abi3-manylinux_2_17_{platform.machine()}\.whl", wheel.name)


def test_every_linked_module_has_its_licence() -> None:
    """The bill of materials lists exactly the modules that the library reports, each with a licence text."""
    modules = licences.linked(ROOT, "go", setup.TAGS, setup.go_environment())
    said = tool("go", "version", "-m", ROOT / "python/overwire/_core.abi3.so")
    linked = {tuple(line.split("\t")[2:4]) for line in said.splitlines() if line.startswith("\tdep\t")}
    assert len(linked) > 20 and {(one.path, one.version) for one in modules if one.path != "std"} == linked
    texts, bill = licences.notices(modules), json.loads(licences.bill("overwire", "1", "Apache-2.0", modules, ROOT))
    for one in modules:
        assert one.licences and all(f"{one.path} {one.version}: {name}" in texts for name in one.texts), one.path
    assert "golang.org/x/sys v" in texts and "std 1." in texts and "Copyright (c) 2015 Klaus Post" in texts
    refs = [part["bom-ref"] for part in bill["components"]]
    assert len(refs) == len(set(refs)) == len(modules) + 2 and bill["dependencies"][0]["dependsOn"] == refs
    assert {"resident.fatbin", "x16.fatbin"} == {part["name"] for part in bill["components"] if part["type"] == "file"}
    page = (ROOT / "docs/dependencies.md").read_text()
    for name in {name for one in modules for name in one.licences}:
        assert name in page


def test_the_package_page_has_full_links() -> None:
    """The package page is the README with absolute links. It names the tested Python versions."""
    page = setup.metadata()
    links = "[a](https://r/blob/main/b.md) [`c`](https://r/blob/main/d#e) [f](https://g/h) [i](#j)"
    assert setup.with_full_links("[a](b.md) [`c`](d#e) [f](https://g/h) [i](#j)", "https://r") == links
    assert setup.with_full_links("a\n\n![b c](d.svg)\n", "https://r") == "a\n\n![b c](https://r/raw/main/d.svg)\n"
    assert "docs/benchmarks.md" in page and not re.search(r"\]\((?!https?://)", page.partition("\n\n")[2])
    assert re.findall(r"^Project-URL: (\w+), https://", page, re.M)[:3] == ["Homepage", "Documentation", "Repository"]
    assert [line for line in page.splitlines() if re.match(r"Classifier: .*Python :: 3\.\d+$", line)] == [
        f"Classifier: Programming Language :: Python :: {version}" for version in check.PYTHONS
    ]
    assert "\nKeywords: safetensors," in page and "\nProvides-Extra: torch\n" in page


def test_an_unknown_licence_ends_the_build(tmp_path: Path) -> None:
    """The build fails if a module's licence is unknown or missing."""
    assert licences.kinds("do what you like") == set()
    three = "Redistribution and use in source and binary\n forms ... Neither the name of"
    assert licences.kinds(three) == {"BSD-3-Clause"} and licences.kinds(three.partition("Neither")[0]) == {"BSD-2-Clause"}
    package = {"Dir": str(tmp_path / "sub"), "Module": {"Path": "x.org/y", "Version": "v1", "Dir": str(tmp_path)}}
    (tmp_path / "sub").mkdir()
    go = tmp_path / "go"
    go.write_text(f"#!/bin/sh\ncase $1 in list) echo '{json.dumps(package)}';; *) printf 'go1.26.1-X:simd\\n{tmp_path}/root\\n';; esac\n")
    go.chmod(0o755)
    (tmp_path / "root").mkdir()
    (tmp_path / "root/LICENSE").write_text(three)
    for text, well in ((None, False), ("do what you like", False), ("Permission is hereby granted, free of charge", True)):
        if text:
            (tmp_path / "sub/LICENCE.md").write_text(text)
        if not well:
            with pytest.raises(SystemExit, match="x.org/y v1"):
                licences.linked(tmp_path, str(go), "", dict(os.environ))
            continue
        one, std = licences.linked(tmp_path, str(go), "", dict(os.environ))
        assert one.licences == ["MIT"] and list(one.texts) == ["sub/LICENCE.md"]
        assert (std.version, std.licences) == ("1.26.1", ["BSD-3-Clause"])


def test_wheel_contents(wheel: Path) -> None:
    """The wheel contains the package, its types, the library and the command, and no tests, caches or sources."""
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        entry = z.read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
        infos = z.infolist()
    package = {p.relative_to(ROOT / "python").as_posix() for p in (ROOT / "python/overwire").rglob("*.py*") if p.suffix != ".pyc"}
    assert package | {"overwire/_core.abi3.so", "overwire/py.typed"} <= set(names)
    assert all(n.startswith(("overwire/", "overwire-")) for n in names)
    assert not [n for n in names if "__pycache__" in n or n.endswith((".go", ".c", ".h"))]
    assert entry == (
        "[console_scripts]\noverwire = overwire._engine:main\n\n"
        "[vllm.general_plugins]\noverwire = overwire.integrations.vllm:register\n\n"
        "[sglang.srt.plugins]\noverwire = overwire.integrations.sglang:register\n"
    )
    assert {i.date_time for i in infos} == {(1980, 1, 1, 0, 0, 0)}
    assert names[:-1] == sorted(names[:-1]) and names[-1].endswith("/RECORD")


def test_a_free_threaded_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The build and the import refuse a free-threaded Python and give the reason."""
    monkeypatch.setattr(setup.sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    with pytest.raises(SystemExit, match="free-threaded"):
        setup.machine()
    code = "import sys; sys.abiflags = 't'\ntry: import overwire\nexcept ImportError as error: print(error)"
    assert "free-threaded" in tool(sys.executable, "-c", code, PYTHONPATH=str(ROOT / "python"))


def test_goarch_selects_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """GOARCH selects the wheel's architecture and GOEXPERIMENT. An architecture without an engine is refused."""
    for goarch, machine, vectors in (("arm64", "aarch64", ""), ("amd64", "x86_64", "simd")):
        monkeypatch.setenv("GOARCH", goarch)
        monkeypatch.delenv("GOEXPERIMENT", raising=False)
        assert setup.machine() == machine and setup.go_environment()["GOEXPERIMENT"] == vectors
    monkeypatch.setenv("GOARCH", "riscv64")
    with pytest.raises(SystemExit, match="x86-64 or aarch64"):
        setup.machine()


@pytest.mark.parametrize("version", VERSIONS)
def test_wheel_runs_on(version: str, wheel: Path) -> None:
    """The same wheel works in every CPython from 3.10 to 3.15 that is installed."""
    python = VERSIONS[version]
    if python is None:
        pytest.skip(f"CPython {version} is not on this machine")
    assert check.smoke(wheel, python) == ""


def test_the_library_has_no_path_of_the_build_machine(wheel: Path) -> None:
    """The library contains no path of the build machine. build.py also builds it in two folders and compares the
    files."""
    with zipfile.ZipFile(wheel) as z:
        built = z.read("overwire/_core.abi3.so")
    for word in (str(ROOT), str(Path.home()), tempfile.gettempdir()):
        assert f"{word}/".encode() not in built


@pytest.mark.slow
def test_the_committed_glue_equals_the_generated_glue(tmp_path: Path) -> None:
    """gopy generates exactly the committed glue."""
    tools = ROOT / "build/bin"
    if not (tools / "gopy").exists():
        tools = tmp_path / "bin"
        tools.mkdir()
        tool("go", "build", "-o", f"{tools}/", "tool", GOEXPERIMENT="")
    tool(sys.executable, "gosrc/bind/gen.py", tools, tmp_path)
    for name in ("core.go", "core_go.h"):
        assert (tmp_path / name).read_text() == (ROOT / "gosrc/bind/core" / name).read_text(), f"{name}: run make gen"


def test_the_committed_python_tables_equal_the_generated_tables(tmp_path: Path) -> None:
    """gen_python.py generates exactly the committed functions, types, dtypes, names and error classes from the engine's
    tables."""
    tool(sys.executable, "gosrc/bind/gen_python.py", tmp_path)
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py*"))
    assert written == ["_core.pyi", "_requests.py", "_tables.py", "_verbs.py", "errors.py", "verbs/results.py"]
    for name in written:
        assert (tmp_path / name).read_text() == (ROOT / "python/overwire" / name).read_text(), f"{name}: run make gen"


def test_the_stub_matches_the_module() -> None:
    """The generated stub lists exactly what is in the module, and its signatures have the arguments of the
    functions."""
    from overwire import _core

    stub = (ROOT / "python/overwire/_core.pyi").read_text()
    listed = re.findall(r"^(?:def|class) (\w+)", stub, re.M)
    assert sorted(listed) == sorted(name for name in dir(_core) if not name.startswith("__"))
    for signature, name, parameters in re.findall(r"^def ((\w+)\((.*)\) -> .*): \.\.\.$", stub, re.M):
        function = getattr(_core, name)
        assert function.__doc__.startswith(signature + "\n")
        takes = parameters.count(": ")
        for wrong in {max(takes - 1, 0), takes + 1} - {takes}:
            with pytest.raises(TypeError):
                function(*[None] * wrong)


def test_the_sdist_has_all_sources(dist: Path) -> None:
    """The sdist contains everything that the build of the wheel needs, with one timestamp, and no built or hidden
    file."""
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    names = {m.name.split("/", 1)[1] for m in members}
    assert {"LICENSE", "licenses/THIRD-PARTY.txt", "licenses/overwire.cdx.json"} <= names
    for name in ("PKG-INFO", "setup.py", "pyproject.toml", "go.mod", "go.sum", "gosrc/bind/core/call.c", "python/overwire/py.typed"):
        assert name in names
    assert not [n for n in names if n.endswith((".so", ".pyc", ".whl")) or "/." in n or n.startswith(".")]
    assert len({m.mtime for m in members}) == 1 and all(m.uid == 0 for m in members)


@pytest.mark.parametrize("how", ["wheel", pytest.param("sdist", marks=pytest.mark.slow)])  # compiles everything
def test_installs_offline(how: str, dist: Path, wheel: Path, tmp_path: Path) -> None:
    """The wheel and the sdist install into a fresh environment with build isolation, without an index or Go's proxy."""
    what = {"wheel": wheel, "sdist": next(dist.glob("*.tar.gz"))}[how]  # `make build` tests the editable install
    venv = tmp_path / "venv"
    tool(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "GOPROXY": "off", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    tool(*pip, "install", what, cwd=tmp_path, **offline)
    said = tool(python, "-c", "import overwire, overwire._verbs as e; e.knobs(); print(overwire.__file__)", cwd=tmp_path)
    assert Path(said.strip()).is_relative_to(venv)
    assert re.match(r"overwire \d", tool(venv / "bin/overwire", "--version", cwd=tmp_path))
    tool(*pip, "uninstall", "-y", "overwire", cwd=tmp_path)
    assert not list(venv.glob("lib/*/site-packages/*overwire*"))


def test_a_build_without_go_says_so(tmp_path: Path) -> None:
    """Without Go on PATH, the build says what is missing and prints no traceback."""
    done = subprocess.run(
        [sys.executable, "setup.py", "ext"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode and "needs Go" in done.stderr and "Traceback" not in done.stderr


def test_the_elf_reader() -> None:
    """The ELF reader finds the exports, the libraries and the glibc versions of the built library."""
    elf = Elf((ROOT / "python/overwire/_core.abi3.so").read_bytes())
    assert elf.exports() == ["PyInit__core"] and elf.needed() == ["libc.so.6"]
    assert all(v.version.startswith("GLIBC_2.") for v in elf.needed_versions())
    names = {s.name for s in elf.symbols() if not s.defined}
    assert "PyModuleDef_Init" in names and "malloc" in names


def test_there_is_one_version() -> None:
    """The version in gosrc/cli equals that of the package, its archives and the newest release in CHANGELOG.md."""
    import overwire

    version = setup.project()["version"]
    assert overwire.__version__ == version and f"\nVersion: {version}\n" in setup.metadata()
    assert not re.search(r"^version = ", (ROOT / "pyproject.toml").read_text(), re.M)
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = [re.fullmatch(r"(\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d", heading) for heading in headings[1:]]
    assert headings[0] == "Unreleased" and all(released)
    assert (
        not released
        or released[0][1] == version
        or tuple(map(int, released[0][1].split("."))) < tuple(map(int, version.split(".")))
    )


def test_the_changelog_keeps_its_form() -> None:
    """Each version in the changelog uses each section of keepachangelog.com at most once. Entries have at most two
    lines of 120 columns."""
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = text.split("\n## ")[1:]
    for version in versions:
        kinds = re.findall(r"^### (.*)$", version, re.M)
        assert kinds and len(kinds) == len(set(kinds)), version[:40]
        assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
        for section in version.split("\n### ")[1:]:
            lines = [line for line in section.splitlines()[1:] if line]
            assert lines and all(line.startswith("- ") for line in lines), section[:80]
            assert [line[:60] for line in lines if len(line) > 240] == []

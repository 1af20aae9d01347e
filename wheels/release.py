"""Builds and checks the files of a release, without uploading them:

    python wheels/release.py [--rehearse] --twine TWINE DIR
    python wheels/release.py --reproduce DIR

A release is a tagged commit. The tree must be clean, the tag must match the version, and
CHANGELOG.md must have an entry for it. A rehearsal needs only a clean tree. The program
then regenerates all generated files, builds the site, and writes the sdist, a wheel for
each architecture, and their hashes to DIR. --reproduce builds the commit in two new
folders, one of them with an empty build cache, and compares their files with each other and with DIR.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import build
from changes import list_fragments

ROOT = Path(__file__).resolve().parents[1]
SUMS = "SHA256SUMS"

# Maps each architecture with a wheel to the environment of its build on x86-64.
ARCHITECTURES: dict[str, dict[str, str]] = {
    "x86_64": {},
    "aarch64": {"GOARCH": "arm64", "CC": "aarch64-linux-gnu-gcc", "GOEXPERIMENT": "", "GOFLAGS": ""},
}


def ask(root: Path, *command: str) -> str:
    """Returns the output of a command. Raises CalledProcessError if it fails."""
    return subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def version_of(root: Path) -> str:
    """Returns the version in the sources."""
    found = re.search(r'^const Version = "(.*)"$', (root / "gosrc/cli/cli.go").read_text(encoding="utf-8"), re.M)
    return found[1] if found else ""


def unclean(root: Path) -> list[str]:
    """Returns the differences between the tree and the commit."""
    return [f"the tree is not clean: {line}" for line in ask(root, "git", "status", "--porcelain").splitlines()]


def unready(root: Path) -> list[str]:
    """Returns the reasons why a commit cannot be released."""
    version = version_of(root)
    wrong = []
    if f"v{version}" not in ask(root, "git", "tag", "--points-at", "HEAD").split():
        wrong.append(f"no tag v{version} at this commit: git tag -a v{version}")
    first, *entries = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.M | re.S)
    if first[0] != "Unreleased" or first[1].strip():
        wrong.append("CHANGELOG.md: Unreleased is not empty: move its lines to the entry of this version")
    wrong += [f"changes/{path.name} is not released: run python wheels/changes.py" for path in list_fragments(root)]
    if not entries or not re.fullmatch(re.escape(version) + r" - \d{4}-\d\d-\d\d", entries[0][0]):
        wrong.append(f'CHANGELOG.md: the newest entry is not "## {version} - YEAR-MONTH-DAY"')
    placeholders = re.findall(r'^\w+ = "https://[^/"]*\.example/', (root / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    if placeholders:
        wrong.append(f"pyproject.toml: {len(placeholders)} addresses of [project.urls] are placeholders")
    return wrong


def incomplete(out: Path, tracked: Iterable[str], version: str) -> list[str]:
    """Returns the missing archives of a folder, and the missing contents of archives."""
    wrong = []
    for architecture in ARCHITECTURES:
        found = list(out.glob(f"overwire-{version}-*_{architecture}.whl"))
        if len(found) != 1:
            wrong.append(f"{len(found)} wheels of {version} for {architecture}")
    if not (out / f"overwire-{version}-py3-none-any.whl").exists():
        wrong.append(f"no wheel of {version} for all machines")
    sdist = out / f"overwire-{version}.tar.gz"
    if not sdist.exists():
        return [*wrong, f"no {sdist.name}"]
    with tarfile.open(sdist) as tar:
        files = {member.name.partition("/")[2]: member for member in tar.getmembers()}
        bill = tar.extractfile(files["licenses/overwire.cdx.json"]) if "licenses/overwire.cdx.json" in files else None
        bytes_of = bill.read() if bill else b""
    hidden = re.compile(r"(^|/)\.|testdata/fuzz/")
    wrong += [f"{sdist.name} lacks {name}" for name in tracked if name not in files and not hidden.search(name)]
    wrong += [f"{sdist.name} lacks licenses/{name}" for name in ("THIRD-PARTY.txt", "overwire.cdx.json") if f"licenses/{name}" not in files]
    for wheel in sorted(out.glob("*manylinux*.whl")):
        with zipfile.ZipFile(wheel) as z:
            bills = [z.read(name) for name in z.namelist() if name.endswith("/overwire.cdx.json")]
        # An architecture may link fewer modules than the sdist lists, but not other modules.
        if len(bills) != 1 or parts(bills[0]) - parts(bytes_of):
            wrong.append(f"the bill of materials of {wheel.name} is missing, or lists modules that {sdist.name} does not list")
    return wrong


def parts(bill: bytes) -> set[str]:
    """Returns the modules that a bill of materials lists, without kernels, which differ between architectures."""
    return {part["bom-ref"] for part in json.loads(bill or b"{}").get("components", []) if part["type"] == "library"}


def sums(out: Path) -> str:
    """Returns the hashes of a folder's archives in the format of sha256sum."""
    files = sorted([*out.glob("overwire-*.whl"), *out.glob("overwire-*.tar.gz")])
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


def step(what: str, wrong: list[str]) -> None:
    """Prints the result of a step. Exits if it failed."""
    print(f"{'FAIL' if wrong else 'ok  '} {what}", *wrong, sep="\n     ", flush=True)
    if wrong:
        sys.exit(1)


def ran(*command: str | Path, **env: str) -> list[str]:
    """Runs a command in the tree. Returns its error, if any."""
    done = subprocess.run([str(word) for word in command], cwd=ROOT, env=os.environ | env, check=False)
    return [f"{' '.join(map(str, command))}: exit status {done.returncode}"] if done.returncode else []


def built(out: Path) -> list[str]:
    """Builds the sdist and the wheels in a folder. Returns errors."""
    wrong = ran(sys.executable, ROOT / "wheels/build.py", out)
    for architecture, env in ARCHITECTURES.items():
        if env and not wrong:
            if not shutil.which(env["CC"]):
                return [f"no {env['CC']} for {architecture}: wheels/aarch64.sh installs it"]
            with tempfile.TemporaryDirectory() as t:
                wrong = ran(sys.executable, ROOT / "wheels/build.py", t, **env)
                for wheel in Path(t).glob("*.whl"):
                    shutil.copy(wheel, out)
    return wrong


def release(out: Path, twine: Path, rehearse: bool) -> None:
    """Runs all steps of a release except the upload."""
    version = version_of(ROOT)
    step(f"overwire {version}, {ask(ROOT, 'git', 'describe', '--always', '--dirty')}: a clean tree", unclean(ROOT))
    if rehearse:
        print("     a rehearsal: the tag and the entry of CHANGELOG.md are not checked")
    else:
        step("the tag, and the entry of CHANGELOG.md", unready(ROOT))
    step("generated files are up to date", ran("make", "-s", "gen", "plots") or unclean(ROOT))
    step("the site", ran("make", "-s", "docs"))
    step("the sdist, and each wheel, twice with the same bytes", built(out))
    wheels = sorted(out.glob("*.whl"))
    step("the wheels' symbols, licences and records; imports", ran(sys.executable, ROOT / "wheels/check.py", *wheels))
    step("a wheel for each architecture; the sdist has the tree, licences and bill", incomplete(out, tracked(), version))
    step("the checks of the package index", ran(twine, "check", "--strict", *wheels, *out.glob("*.tar.gz")))
    step("the tree is unchanged", unclean(ROOT))
    (out / SUMS).write_text(sums(out))
    print(f"\n{sums(out)}\nNothing was uploaded: see docs/releasing.md for the next step.")


def tracked() -> list[str]:
    """Returns the files of the commit that an sdist must contain."""
    top = ("bench", "cuda", "docs", "examples", "gosrc", "python", "tests", "wheels")
    names = ask(ROOT, "git", "ls-files").splitlines()
    return [name for name in names if "/" not in name or name.startswith(tuple(f"{folder}/" for folder in top))]


def reproduce(out: Path) -> None:
    """Builds the commit in two folders, and compares the files."""
    with tempfile.TemporaryDirectory(prefix="overwire-") as t:
        made = []
        for name, cache in (("first", None), ("the second, elsewhere", Path(t, "cache"))):
            tree, into = Path(t, name), Path(t, f"{name} out")
            ask(ROOT, "git", "clone", "-q", "--no-local", str(ROOT), str(tree))
            ask(tree, "git", "checkout", "-q", ask(ROOT, "git", "rev-parse", "HEAD"))
            if cache:
                os.environ["GOCACHE"] = str(cache)
            build.hook(tree, "build_sdist", into)
            for wheel in ("build_wheel", "build_portable_wheel"):
                build.hook(tree, wheel, into)
            print(f"built in {tree}{', with an empty build cache' if cache else ''}", flush=True)
            made.append(sums(into))
            shutil.rmtree(tree)
        step("two builds of the commit are the same", [] if made[0] == made[1] else made)
    there = {line.split()[1]: line for line in sums(out).splitlines()} if out.is_dir() else {}
    other = [line for line in made[0].splitlines() if there.get(line.split()[1], line) != line]
    why = "built from another commit or with other tools: expected"
    step(f"{len(there)} files in {out.name} are the same", [f"{why} {line}" for line in other])
    print(made[0], end="")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--reproduce", action="store_true")
    parser.add_argument("--twine", type=Path)
    parser.add_argument("out", type=lambda text: Path(text).resolve())
    args = parser.parse_args()
    if args.reproduce:
        reproduce(args.out)
    elif args.twine is None:
        parser.error("--twine is missing: make release installs it")
    else:
        release(args.out, args.twine.absolute(), args.rehearse)


if __name__ == "__main__":
    main()

"""Collects the licences of everything linked into the library, and a bill of materials.

The modules are those that `go list` reports for the build. Their texts come from Go's copies of the sources, in the
module cache or vendor/. A missing or unknown licence fails the build.

Standard tools do not replace this. go-licenses 1.6 finds the same licences except Go's own, needs the network, and
takes 36 s (10 s of processor time) instead of 0.4 s. cyclonedx-gomod 1.9 takes 9 s, misses Go's own licence and those
of packages in subfolders (klauspost/compress, smithy-go), and takes the BSD-3-Clause text of golang.org/x for another
licence.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["BOM", "TEXTS", "Module", "bill", "expression", "linked", "notices"]

# File names in the sdist's folder licenses, and in the wheel's dist-info.
TEXTS = "THIRD-PARTY.txt"
BOM = "overwire.cdx.json"

# Names of licence files and related files.
NAMED = re.compile(r"(licen[cs]e|copying|copyright|notice|patents)([._-].*)?", re.I)
LICENCE = re.compile(r"licen[cs]e|copying", re.I)

# Maps an SPDX id to words that its text contains, and words that it must not contain.
KNOWN = {
    "Apache-2.0": ("Apache License Version 2.0", ""),
    "BSD-3-Clause": ("Redistribution and use in source and binary forms", ""),
    "BSD-2-Clause": ("Redistribution and use in source and binary forms", "Neither the name"),
    "MIT": ("Permission is hereby granted, free of charge", ""),
}


@dataclass
class Module:
    """A Go module that is linked into the library; `std` is Go's own."""

    path: str
    version: str
    texts: dict[str, str] = field(default_factory=dict)  # file -> text

    @property
    def url(self) -> str:
        """Returns the module's package URL."""
        return f"pkg:golang/{'stdlib' if self.path == 'std' else self.path}@{self.version}"

    @property
    def licences(self) -> list[str]:
        """Returns the SPDX ids of the module's licences."""
        return sorted({name for text in self.texts.values() for name in kinds(text)})


def kinds(text: str) -> set[str]:
    """Returns the SPDX ids of the licences in a text, or an empty set for a notice or a patent grant."""
    words = " ".join(text.split())
    found = {name for name, (has, lacks) in KNOWN.items() if has in words and not (lacks and lacks in words)}
    # A two-clause text also matches the words for the three-clause licence.
    return found - {"BSD-3-Clause"} if "BSD-2-Clause" in found else found


def linked(root: Path, go: str, tags: str, env: dict[str, str]) -> list[Module]:
    """Returns the modules of the library that is built from root, sorted by path."""

    def ask(*words: str) -> str:
        return subprocess.run([go, *words], cwd=root, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout

    found: dict[str, Module] = {}
    listed, decoder, at = ask("list", "-deps", f"-tags={tags}", "-json=Dir,Module", "./gosrc/bind/core"), json.JSONDecoder(), 0
    while start := re.compile(r"\S").search(listed, at):
        package, at = decoder.raw_decode(listed, start.start())
        module: dict[str, Any] = package.get("Module") or {}
        if not module or module.get("Main"):
            continue
        source = module.get("Replace") or module
        one = found.setdefault(module["Path"], Module(module["Path"], source.get("Version", module.get("Version", ""))))
        top = Path(source.get("Dir") or root / "vendor" / module["Path"])
        folder = Path(package["Dir"])
        for parent in (folder, *folder.parents):
            one.texts |= texts_in(parent, top)
            if parent == top:
                break
    modules = sorted(found.values(), key=lambda one: one.path)
    version, goroot = ask("env", "GOVERSION", "GOROOT").split("\n")[:2]
    own = texts_in(Path(goroot), Path(goroot)) or found["golang.org/x/sys"].texts  # both have the same text
    modules.append(Module("std", version.removeprefix("go").split("-")[0], own))
    for one in modules:
        unknown = [name for name, text in one.texts.items() if LICENCE.match(name.rpartition("/")[2]) and not kinds(text)]
        if unknown or not one.licences:
            sys.exit(f"overwire: module {one.path} {one.version} has an unknown licence {unknown}: add it to wheels/licences.py")
    return modules


def texts_in(folder: Path, top: Path) -> dict[str, str]:
    """Returns the texts in a folder, by their paths relative to top."""
    return {
        path.relative_to(top).as_posix(): path.read_text(encoding="utf-8", errors="replace").strip() + "\n"
        for path in sorted(folder.iterdir())
        if NAMED.fullmatch(path.name) and path.suffix != ".go" and path.is_file()
    }


def notices(modules: list[Module]) -> str:
    """Returns all texts, each of them once, after a list of the modules that have it."""
    owners: dict[str, list[str]] = {}
    for one in modules:
        for name, text in sorted(one.texts.items()):
            owners.setdefault(text, []).append(f"{one.path} {one.version}: {name}")
    parts = ["The library _core.abi3.so contains the following modules, each under its own licence.\n"]
    for text, names in sorted(owners.items(), key=lambda item: item[1]):
        parts.append("\n".join(["=" * 80, *names, "-" * 80, "", text]))
    return "\n".join(parts)


def expression(own: str, modules: list[Module]) -> str:
    """Returns the SPDX expression of the project and all modules."""
    return " AND ".join(sorted({own, *(name for one in modules for name in one.licences)}))


def bill(name: str, version: str, own: str, modules: list[Module], root: Path, suffix: str = "") -> str:
    """Returns the bill of materials in CycloneDX 1.6. The result is reproducible. suffix: the suffix of the names of
    the GPU modules."""
    url = f"pkg:pypi/{name}@{version}"
    sums = dict(re.findall(r"^(\S+ \S+) (h1:\S+)$", (root / "go.sum").read_text(encoding="utf-8"), re.M))
    components: list[dict[str, Any]] = []
    for one in modules:
        component: dict[str, Any] = {"type": "library", "bom-ref": one.url, "name": one.path, "version": one.version, "purl": one.url}
        component["licenses"] = [{"expression": " AND ".join(one.licences)}]
        if checked := sums.get(f"{one.path} {one.version}"):
            component["properties"] = [{"name": "go.sum", "value": checked}]
        components.append(component)
    for path in (root / "cuda" / "built" / f"{module}{suffix}.fatbin" for module in ("resident", "x16")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        components.append({
            "type": "file", "bom-ref": f"file:{path.name}", "name": path.name, "description": "GPU kernels, compiled from cuda/ by nvcc",
            "hashes": [{"alg": "SHA-256", "content": digest}], "licenses": [{"expression": own}],
        })  # fmt: skip
    main = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url, "licenses": [{"expression": own}]}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": main},
        "components": components,
        "dependencies": [{"ref": url, "dependsOn": [component["bom-ref"] for component in components]}],
    }
    return json.dumps(document, indent=1) + "\n"

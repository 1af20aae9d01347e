"""Checks that modules of python/overwire import only from their own and lower layers, and not in a circle.

Imports inside functions and for type checkers also count, and so do modules named in a string
(`sys.modules["overwire..."]`). ALLOWED lists the exceptions and their reasons.
"""

from __future__ import annotations

import ast
import pickle
import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

import overwire
import pytest
from conftest import ROOT
from overwire import _compat_api

pytestmark = pytest.mark.xdist_group("house")  # one worker parses the package once

PACKAGE = Path(overwire.__file__).parent

# Layers from bottom to top, with patterns of module names without "overwire.". A module may import modules of its own
# layer and of lower ones.
LAYERS: list[tuple[str, str]] = [
    ("words", """errors dtypes paths files filekinds _apart _children _environment _imports _locks _notebook _order _run
                 _tables _undo"""),
    ("portable", "portable portable.*"),  # forked children read with these modules
    ("engine", "_core _engine _requests _verbs progress captures counting metering jobs codecs gpu"),
    ("frameworks", "frameworks frameworks.*"),
    # These modules read files of other libraries, and pickles that may be hostile. Loads also use them. The name of
    # `rebuild` is in pickles, so it cannot change.
    ("foreign", """foreign foreign.* rebuild bundles.allowlist bundles.budget bundles.machine bundles.tensors
                   bundles.torcharchive bundles.torchfiles bundles.unpickling"""),
    # Loads and preloads have to find the containers of bundles, so these two modules are in this layer.
    ("model", "model model.* stores records fleet fleet.* bundles.containers bundles.manifest"),
    ("distributed", "distributed distributed.*"),  # below the public functions, because load_file(group=...) uses it
    ("verbs", "verbs verbs.*"),
    ("offloading", "offloading offloading.*"),
    ("bundles", "bundles bundles.*"),
    ("checkpoints", "checkpoints checkpoints.*"),
    ("compat_api", "_compat_api"),
    ("outside", "compat compat.* integrations integrations.*"),
    ("programs", "__main__ _against _bench _bench_* _torch"),  # programs that run in their own processes
]

# Code outside the core may import these modules and the names in overwire.__all__. `_undo` is among them because its
# context managers do not depend on overwire.
PUBLIC = {"checkpoints", "codecs", "distributed", "errors", "gpu", "_compat_api", "_undo", "records", "stores"}

# Users import these modules by name, and they define __all__. In other modules, names without an underscore are public.
DOORS = [*PUBLIC, *"""
    portable.door integrations integrations.vllm integrations.sglang compat compat.fastsafetensors compat.nvcomp
    compat.nyacomp compat.fastsafetensors.copier compat.nvcomp.external_memory compat.nyacomp.hf
    compat.safetensors compat.safetensors.[!_]* compat.safetensors._safetensors_rust
    compat.tensorizer compat.tensorizer.[!_]*
    integrations.accelerate integrations.diffusers integrations.modelexpress integrations.pushes
    integrations.ray integrations.transformers
""".split()]

# Several integrations use these modules. `pushes` is also an entry point for trainers.
COMMON = "integrations.pushes integrations.devices integrations.load_plan* integrations.kept_model*"

# Allowed exceptions: (importer, imported) -> reason.
ALLOWED = {
    ("integrations.vllm", "_core"): "checks sys.modules for a running engine, because a fork would break it; imports nothing",
    ("integrations.vllm", "integrations.modelexpress"): "vLLM's call in each process is the only hook for ModelExpress",
    ("_engine", "_torch"): "runs it as a program; imports nothing",
    ("_engine", "_against"): "runs it as a program; imports nothing",
    ("_engine", "_bench"): "runs it as a program; imports nothing",
    ("_engine", "_bench_faces"): "runs it as a program; imports nothing",
    ("compat.safetensors._errors", "compat.safetensors"): "sets a class's __module__; imports nothing",
    ("compat.tensorizer._s3", "compat.tensorizer.stream_io"): "looks up names at each use, because programs replace them there",
    ("compat.tensorizer._sums", "compat.tensorizer.serialization"): "looks up TensorHash at each use, because programs replace it there",
}


class Import(NamedTuple):
    importer: str
    imported: str
    names: tuple[str, ...]
    line: int


def modules(package: Path) -> dict[str, Path]:
    """Returns every module by its name without "overwire.". The package itself is ""."""
    found = {}
    for path in sorted(package.rglob("*.py*")):
        parts = path.relative_to(package).with_suffix("").parts
        if path.suffix in (".py", ".pyi") and "_path" not in parts:
            found[".".join(parts).removesuffix("__init__").removesuffix(".")] = path
    return found


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def tree_of(path: Path) -> ast.Module:
    return parsed(path.read_text(encoding="utf-8"))


def imports(package: Path) -> list[Import]:
    known = modules(package)
    out = []
    for name, path in known.items():
        whole = ["overwire", *name.split(".")] if name else ["overwire"]
        own = whole if path.stem == "__init__" else whole[:-1]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                base = [*own[: len(own) - node.level + 1]] if node.level else []
                base += (node.module or "").split(".") if node.module else []
                if base[:1] != ["overwire"]:
                    continue
                at = ".".join(base[1:])
                for alias in node.names:
                    inner = f"{at}.{alias.name}".removeprefix(".")
                    if inner in known:
                        out.append(Import(name, inner, (), node.lineno))
                    else:
                        out.append(Import(name, at, (alias.name,), node.lineno))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    first, _, rest = alias.name.partition(".")
                    if first == "overwire":
                        out.append(Import(name, rest, (), node.lineno))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said = node.value.removeprefix("overwire.")
                if said != node.value and said in known:
                    out.append(Import(name, said, (), node.lineno))
    return [found for found in out if found.imported != found.importer]


def layer_of(name: str) -> int | None:
    for at, (_, patterns) in enumerate(LAYERS):
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return at
    return None


def findings(package: Path, public: set[str]) -> list[str]:
    """Returns a line for each broken rule."""
    out = []
    outside = [name for name, _ in LAYERS].index("outside")
    known = modules(package)
    for name in known:
        if name and layer_of(name) is None:
            out.append(f"{name}: in no layer")
    edges: dict[str, set[str]] = {name: set() for name in known}
    for one in imports(package):
        where = f"{one.importer}:{one.line} imports {one.imported or 'overwire'}"
        mine, theirs = layer_of(one.importer), layer_of(one.imported)
        if not one.importer or one.importer == "_compat_api" or mine is None or (one.importer, one.imported) in ALLOWED:
            continue  # a table of names, or a name that is reported above
        if mine == outside:
            wing, other = one.importer.split(".")[:2], one.imported.split(".")[:2]
            shared = any(fnmatchcase(one.imported, pattern) for pattern in COMMON.split())
            if one.imported == "":
                out += [f"{where}: {name} is not a public name" for name in one.names if name not in public]
            elif theirs != outside and one.imported.split(".")[0] not in PUBLIC:
                out.append(f"{where}: not public")
            elif theirs == outside and len(wing) == len(other) == 2 and other != wing and not shared:
                out.append(f"{where}: a neighbour, which may be removed")
            edges[one.importer].add(one.imported)
            continue
        if one.imported == "":
            out += [f"{where}: the package itself, which is above"] if mine < outside else []
        elif theirs is not None and theirs > mine:
            out.append(f"{where}: upward, from {LAYERS[mine][0]} to {LAYERS[theirs][0]}")
        else:
            edges[one.importer].add(one.imported)
    out += [f"a circle: {' -> '.join(circle)}" for circle in circles(edges)]
    return out


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Returns one circle for each module that closes a circle."""
    state: dict[str, int] = {}
    path: list[str] = []
    out = []

    def visit(name: str) -> None:
        state[name] = 1
        path.append(name)
        for other in sorted(edges.get(name, ())):
            if state.get(other) == 1:
                out.append([*path[path.index(other) :], other])
            elif other not in state:
                visit(other)
        path.pop()
        state[name] = 2

    for name in sorted(edges):
        if name not in state:
            visit(name)
    return out


def test_imports_only_go_to_lower_layers() -> None:
    assert findings(PACKAGE, {*overwire.__all__, *overwire._NYACOMP}) == []


def test_every_exception_is_needed() -> None:
    """Every exception in ALLOWED is used."""
    assert set(ALLOWED) <= {(one.importer, one.imported) for one in imports(PACKAGE)}


# Names of collectives and sends in torch.distributed.
COLLECTIVE = (
    "all_gather* all_reduce* all_to_all* barrier batch_isend_irecv broadcast broadcast_object_list gather* irecv isend monitored_barrier "
    "new_group new_subgroups* recv* reduce* scatter* send send_object_list"
).split()


def collectives(path: Path) -> list[int]:
    """Returns the lines of a module that call a collective of torch.distributed under any import name."""
    tree = tree_of(path)
    names = {"dist", "_dist", "torch_dist"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname and "distributed" in alias.name}
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and any(fnmatchcase(node.attr, one) for one in COLLECTIVE)
    ]
    return [node.lineno for node in calls if ast.unparse(node.value).rpartition(".")[2] in {*names, "distributed"}]


def test_two_modules_call_collectives() -> None:
    """Only distributed.group calls collectives for loads, and only checkpoints.exchange for saves, so all ranks call
    them in the same order. Integrations have groups of their own."""
    inside = {name: path for name, path in modules(PACKAGE).items() if (layer_of(name) or 0) < layer_of("compat")}
    assert [name for name, path in inside.items() if collectives(path)] == ["checkpoints.exchange", "distributed.group"]


# Names that say nothing about what a package or module is for. The rules for Go have the same list.
VAGUE = {"util", "utils", "common", "helper", "helpers", "misc", "shared", "base", "lib"}


def test_modules_are_named_after_their_duty() -> None:
    """No package or module has a vague name, such as "shared". compat is left out, because its names are those of other
    libraries."""
    own = [name for name in modules(PACKAGE) if not name.startswith("compat.")]
    assert [name for name in own if VAGUE.intersection(part.strip("_") for part in name.split("."))] == []


# The modules that define the modes of loading.
MODES = {"ForkedModel": "model.forked", "open_load": "distributed.tensors", "load_on": "verbs.deltas"}


def names_in(tree: ast.AST) -> set[str]:
    """Returns the names that a module imports or uses."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        found |= {getattr(node, "id", ""), getattr(node, "attr", "")}
    return found


def test_one_module_chooses_the_mode_of_a_load() -> None:
    """Functions that load a model get a `Loader`. They do not decide themselves between a forked child, a group and
    deltas."""
    used = {module: names_in(tree_of(path)) for module, path in modules(PACKAGE).items()}
    for name, home in MODES.items():
        assert {module for module, names in used.items() if name in names} - {home} == {"verbs.loader"}, name


# These modules have handlers that catch every exception and then decide what to do. The values are how many, and why.
# All other modules use the context managers of `_undo`.
CATCHING = {
    "_imports": 1,  # used by `after_error`
    "checkpoints.exchange": 1,  # send the error to the other ranks
    "checkpoints.groups": 1,  # raises another error
    "compat.fastsafetensors.copier.base": 1,  # keeps another error
    "distributed.group": 2,  # send the error to the other ranks, or keep an interrupt
    "integrations.transformers": 1,  # passes the error to a Future
    "model.opened": 1,  # counts errors by their kind
    "verbs.ahead": 1,  # raises only some errors
    "verbs.streams": 1,  # the end of a stream is not an error
}


def catching(path: Path) -> int:
    """Returns how many handlers of a module catch every exception."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = [node.type for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return sum(kind is None or "BaseException" in ast.unparse(kind) for kind in kinds)


def test_few_handlers_catch_every_exception() -> None:
    """Only the listed modules catch every exception. Others undo their work with `after_error`, which works even after
    Ctrl-C, and if the undoing itself fails."""
    found = {name: catching(path) for name, path in modules(PACKAGE).items() if path.suffix == ".py"}
    assert {name: count for name, count in found.items() if count} == CATCHING


# These functions publish files or make them durable. Only the listed modules call them. All others use the engine,
# through `stores`.
PUBLISHING = ("os.replace", "os.rename", "os.renames", "os.link", "os.symlink", "os.fsync", "os.fdatasync", "shutil.move")
SCRATCH = "tempfile"
WRITING = {
    "_against": {"tempfile"},  # converts to a temporary folder
    "_bench": {"tempfile"},  # measures in a temporary folder
    "_bench_faces": {"tempfile"},
    "_bench_saves": {"os.fsync"},  # measures the disk
    "bundles.bundle": {"os.link"},  # gives a published container another name
    "bundles.torcharchive": {"tempfile"},  # an unnamed file
    "bundles.torchfolders": {"os.link", "tempfile"},  # a temporary folder that the engine reads
    "compat.nyacomp._nyacomp": {"tempfile"},
    "integrations.pushes": {"tempfile"},  # the default folder of trainers
    "portable.files": {"os.replace", "os.fsync", "tempfile"},  # works without the engine
    "stores": {"os.link", "tempfile"},  # gives an unnamed file a name so that the engine can publish it
}


def writing(path: Path) -> set[str]:
    """Returns the functions of PUBLISHING that a module uses, under any import name, and SCRATCH if the module imports
    it."""
    uses = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            uses.add(ast.unparse(node).lstrip("_"))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            uses |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            uses |= {alias.name for alias in node.names}
    return uses & {*PUBLISHING, SCRATCH}


def test_the_engine_publishes_files() -> None:
    """Only the engine syncs new files and gives them their names, so one place handles links, modes, owners and
    interrupted writes. Modules with temporary files are listed with a reason."""
    found = {name: writing(path) for name, path in modules(PACKAGE).items() if path.suffix == ".py"}
    assert {name: uses for name, uses in found.items() if uses} == WRITING


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("import os\nos.replace(a, b)", {"os.replace"}),
        ("from os import rename as move\nmove(a, b)", {"os.rename"}),
        ("def f():\n    from tempfile import mkstemp", {"tempfile"}),
        ("import shutil, os.path\nshutil.move(a, b)\nname.replace(a, b)", {"shutil.move"}),
    ],
)
def test_a_module_that_publishes_is_found(tmp_path: Path, text: str, uses: set[str]) -> None:
    (tmp_path / "m.py").write_text(text)
    assert writing(tmp_path / "m.py") == uses


TREE = {
    "__init__.py": "",
    "_engine.py": "",
    "errors.py": "",
    "jobs.py": "from . import errors\n",
    "model/__init__.py": "",
    "model/plan.py": "",
    "model/sources.py": "from .plan import x\n",
    "verbs/load.py": "from ..model.sources import x\n",
    "compat/__init__.py": "",
    "compat/one/__init__.py": "from overwire import load_file\n",
    "compat/one/part.py": "from . import x\n",
    "compat/two.py": "from .. import errors\nfrom . import names\n",
    "integrations/load_plan/__init__.py": "",
    "integrations/load_plan/copies.py": "",
    "integrations/engine.py": "from .load_plan.copies import x\n",
}


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("errors.py", "def f():\n    from .jobs import Job\n", "errors:2 imports jobs: upward, from words to engine"),
        ("jobs.py", "TYPE_CHECKING = 0\nif TYPE_CHECKING:\n    from .model.plan import x\n", "jobs:3 imports model.plan: upward"),
        ("model/sources.py", "import sys\nsys.modules['overwire.verbs.load']\n", "model.sources:2 imports verbs.load: upward"),
        ("verbs/load.py", "from overwire import load_file\n", "verbs.load:1 imports overwire: the package itself"),
        ("model/plan.py", "from . import sources\n", "a circle: model.plan -> model.sources -> model.plan"),
        ("compat/one/__init__.py", "from ...verbs.load import f\n", "compat.one:1 imports verbs.load: not public"),
        ("compat/one/__init__.py", "from ... import _engine, errors\n", "compat.one:1 imports _engine: not public"),
        ("compat/one/__init__.py", "from overwire import load_file, hidden\n", "compat.one:1 imports overwire: hidden is not a public name"),
        ("compat/one/__init__.py", "from ..two import x\n", "compat.one:1 imports compat.two: a neighbour"),
        ("compat/one/__init__.py", "from .part import x\n", "a circle: compat.one -> compat.one.part -> compat.one"),
        ("integrations/other.py", "from .engine import x\n", "integrations.other:1 imports integrations.engine: a neighbour"),
        ("new.py", "", "new: in no layer"),
    ],
)
def test_broken_rules_are_found(tmp_path: Path, path: str, text: str, found: str) -> None:
    for name, content in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert findings(tmp_path, {"load_file"}) == []
    (tmp_path / path).write_text(text)
    got = findings(tmp_path, {"load_file"})
    assert len(got) == 1 and got[0].startswith(found), got


def test_the_makefile_is_short() -> None:
    """The Makefile has at most 150 lines. Longer scripts are in .ci."""
    assert len((ROOT / "Makefile").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_tables_of_names_agree() -> None:
    """Type checkers find each public name in the same module as the table of names."""
    for door in (overwire, _compat_api):
        tree = ast.parse(Path(door.__file__ or "").read_text(encoding="utf-8"))
        [block] = [one for one in tree.body if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"]
        imports = [one for one in block.body if isinstance(one, ast.ImportFrom)]
        checked = {(one.module or "", name.name) for one in imports for name in one.names}
        assert checked == {(home, name) for home, names in door._HOMES.items() for name in names}
        hidden = getattr(door, "_NYACOMP", set())
        assert len(door.__all__) == len(checked) - len(hidden) == len(set(door.__all__) - hidden)
        for name in door.__all__:
            assert getattr(door, name) is not None, name


# Drop-ins and integrations may use these internal names. The list only gets shorter: remove a name with its last use,
# and add a public name rather than a new entry.
COMPAT_API = """
    Hosted KeptFile Manifest apart apply_part await_path bytes_of_plain check_memory
    check_switches error_of_system forked group_verb honour_nyacomp imported is_compressed is_remote landing
    load_plain many_objects meet_to_load new_lock number_of parse_size path_of prepare_gpu
    regular resolve save_bytes save_listed setting should_share_reading
    skip_at_exit start_thread state_of_file states_of stream_blocks table_of torch_dtype torch_shape
    written
""".split()


def test_drop_ins_use_no_new_internal_names() -> None:
    """Drop-ins and integrations use exactly the listed internal names."""
    assert _compat_api.__all__ == sorted(COMPAT_API) and len(COMPAT_API) <= 40
    outside = [one for one in imports(PACKAGE) if one.imported == "_compat_api" and layer_of(one.importer) == layer_of("compat")]
    texts = "".join(path.read_text(encoding="utf-8") for name, path in modules(PACKAGE).items() if layer_of(name) == layer_of("compat"))
    used = {name for one in outside for name in one.names} | set(re.findall(r"\b_compat_api\.(\w+)", texts))
    assert set(COMPAT_API) - used == set()


def test_only_entry_modules_define_all() -> None:
    """Only entry modules define __all__. In other modules, a list next to the definitions would become outdated."""
    lists = {name for name, path in modules(PACKAGE).items() if "\n__all__ = " in path.read_text(encoding="utf-8")}
    doors = {name for name in lists if any(fnmatchcase(name, pattern) for pattern in DOORS)}
    assert lists == doors


def test_classes_name_their_public_module() -> None:
    """Classes name the module in which users find them, because pickles must not contain internal names."""
    reports = [
        overwire.Report(1, 1, 1.0, 0.1, 1, 0, 0, ("m",)),
        overwire.Progress(1, 2, 3, 4),
        overwire.LoadPlan((overwire.PlannedTensor("t", "F32", (1,), 4, 4, "m"),), (overwire.PlannedFile("m", 1, 4, 4, 80),), 4, 4, 4),
    ]
    for name in overwire.__all__:
        kind = getattr(overwire, name)
        if isinstance(kind, type) and not issubclass(kind, Exception) and kind.__module__ != "overwire.compat.safetensors.patching":
            assert kind.__module__ == "overwire", name
    for report in reports:
        said = pickle.dumps(report)
        assert pickle.loads(said) == report and b"overwire." not in said


def test_two_modules_start_jobs() -> None:
    """Only _verbs and the command line start jobs of the engine. Functions of _verbs that write to a path first wait
    for background saves to this path."""
    calls = re.compile(r"\bcore\(\)\.(?:start|run|call)\(")
    found = {path.name for path in PACKAGE.rglob("*.py") if calls.search(path.read_text(encoding="utf-8"))}
    assert found == {"_engine.py", "_verbs.py"}
    verbs = (PACKAGE / "_verbs.py").read_text(encoding="utf-8")
    waiting = set(re.findall(r"^def (\w+)\((?:(?!^def ).)*?await_saves\(request\)", verbs, re.M | re.S))
    assert {"save", "sleep", "put", "rename", "convert", "delta_save", "delta_merge"} <= waiting

"""Runs the code in the README and the guides unchanged."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import overwire
import processes
import pytest
import stores
import warm
from conftest import ROOT, cleaned


def blocks(page: str, language: str) -> list[str]:
    """Returns the code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def prepare(folder: Path) -> None:
    """Creates a model in one file and one in shards, for the examples and commands of the pages."""
    np = pytest.importorskip("numpy")
    weights = {"embed": np.random.default_rng(0).normal(0, 0.02, (512, 64)).astype("float32"), "bias": np.zeros(512, "float32")}
    overwire.save_file(weights, folder / "model.safetensors")
    weights |= {f"layers.0.experts.{n}.up.weight": weights["embed"] for n in range(4)}
    (folder / "model").mkdir()
    overwire.save_file(weights, folder / "model/model.safetensors", max_shard_size="64KiB")


GUIDES = (
    "../README", "index", "start", "train", "gpu", "several-gpus", "preload", "parts", "saving", "sleep", "offload", "checkpoints", "deltas",
    "metrics", "production", "troubleshooting", "coming-from", "fastsafetensors", "nvcomp", "nyacomp", "tensorizer",
)  # fmt: skip
API = ("deltas", "errors", "inspecting", "libraries", "loading", "memory", "objects", "saving")

# Runs the examples of a page and compares their output with the page.
EXAMPLES = """
import doctest
import sys

example = doctest.DocTestParser().get_doctest(open("page.txt").read(), {}, "page", "page.txt", 0)
failed, attempted = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
sys.exit(failed or not attempted)
"""


@pytest.mark.parametrize("page", GUIDES)
def test_guides_run(page: str, tmp_path: Path) -> None:
    """The Python blocks of a guide run unchanged, in order, in an empty folder."""
    pytest.importorskip("torch")
    (tmp_path / "page.py").write_text("\n".join(blocks(f"docs/{page}.md", "python")))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = warm.run(["page.py"], cwd=tmp_path, env=cleaned() | alone)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", API)
def test_examples_of_the_api_print_their_output(page: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    prepare(tmp_path)
    (tmp_path / "page.txt").write_text("\n".join(blocks(f"docs/api/{page}.md", "pycon")))
    (tmp_path / "run.py").write_text(EXAMPLES)
    done = warm.run(["run.py"], cwd=tmp_path, env=cleaned())
    assert done.returncode == 0, done.stdout + done.stderr


# Other tests run the Python code of these pages.
ELSEWHERE = {"portable": "formats/test_portable.py", "stores": "house/test_guides.py", "transformers": "engines/test_transformers.py"}
# No test can run the code of these pages here. The values say what is tested instead.
UNRUN = {"live-updates": "needs a trainer and engines; examples/live_updates.py runs instead, and engine tests run vLLM and SGLang"}


def test_the_code_of_each_page_is_run() -> None:
    """A test runs the Python code of each page, or the page is in UNRUN with a reason. All names that pages import from
    overwire exist."""
    for path in sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/api").glob("*.md")]):
        page = str(path.relative_to(ROOT / "docs").with_suffix(""))
        code = blocks(f"docs/{page}.md", "python") + blocks(f"docs/{page}.md", "pycon")
        if code and page not in GUIDES and page.removeprefix("api/") not in API and page not in UNRUN:
            assert f"docs/{page}.md" in (ROOT / "tests" / ELSEWHERE[page]).read_text(encoding="utf-8"), page
        for block in blocks(f"docs/{page}.md", "python"):
            compile(block, str(path), "exec")
            for module, names in re.findall(r"^from (overwire\S*) import ([\w, ]+)", block, re.M):
                place = ROOT / "python" / module.replace(".", "/")
                text = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text(encoding="utf-8")
                assert all(re.search(rf"\b{name.strip()}\b", text) for name in names.split(",")), (page, module, names)


def test_commands_of_all_pages_exist() -> None:
    """Each overwire command on any page has a name and options that the command line accepts."""
    helps: dict[str, str] = {}
    for path in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]):
        page = str(path.relative_to(ROOT).with_suffix(""))
        for words in commands(f"{page}.md"):
            verb = words[1]
            if verb not in helps:
                done = subprocess.run([sys.executable, "-m", "overwire", verb, "--help"], capture_output=True, text=True, check=False)
                helps[verb] = done.stdout + done.stderr
            assert f"overwire {verb}" in helps[verb], (page, words)
            for word in words[2:]:
                name = word.partition("=")[0]
                assert not name.startswith("-") or name == "--" or re.search(rf"(^|[\s,]){name}\b", helps[verb]), (page, words)


def test_the_commands_of_encrypted_files_run(tmp_path: Path) -> None:
    """The shell commands of the tensorizer page run unchanged after the page's Python code. Decrypting with the keys
    and passwords gives the same tensors."""
    np = pytest.importorskip("numpy")
    weights = {"w": np.arange(4096, dtype="f4")}
    overwire.save_file(weights, tmp_path / "model.tensors")
    (block,) = (text for text in blocks("docs/tensorizer.md", "sh") if "--encrypt-key" in text)
    shell = f'set -e; overwire() {{ {shlex.quote(sys.executable)} -m overwire "$@"; }}\n{block}'
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=cleaned(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (overwire.load_file(tmp_path / "plain.tensors", framework="np")["w"] == weights["w"]).all()
    for name in ("secret", "other"):
        with pytest.raises(overwire.CryptographyError):
            overwire.load_file(tmp_path / f"{name}.tensors", framework="np")


@pytest.mark.slow
@pytest.mark.imports_torch
@pytest.mark.parametrize("name", ["fastsafetensors", "nyacomp", "tensorizer"])
def test_the_shell_lines_of_drop_ins_run(name: str, tmp_path: Path) -> None:
    """Each shell line on a drop-in's page runs unchanged, with a program that imports the library by its own name."""
    (block,) = (text for text in blocks(f"docs/{name}.md", "sh") if "program.py" in text)
    ours = f'import overwire.compat; assert "overwire" in {name}.__file__, {name}.__file__\n'
    (tmp_path / "program.py").write_text(f"import {name}\n{ours}")
    env = cleaned() | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    for line in block.splitlines():
        if "nyacomp_core" not in line:  # nyacomp's own file, which is not a package
            done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (line, done.stderr)


def test_functions_show_an_example() -> None:
    """Each public function has an example after its entry on the API page."""
    text = "".join((ROOT / f"docs/api/{page}.md").read_text(encoding="utf-8") for page in API)
    without = re.findall(r"autofunction:: overwire\.(\w+)\n```\n(?!\n```pycon)", text)
    assert set(without) <= {"compress", "load_compressed", "prepare_sleep"}, without


def test_the_commands_run(tmp_path: Path) -> None:
    """The commands of docs/command-line.md run unchanged, with a local server in place of https://host. Commands that
    need a GPU, take minutes or never end are left out."""
    prepare(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    overwire.convert(tmp_path / "model", tmp_path / "model.safetensors", compress=False)
    plain = (tmp_path / "model.safetensors").read_bytes()
    ran = set()
    serve = [sys.executable, "-m", "overwire", "serve", str(tmp_path)]
    with processes.started(serve, stdout=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().strip().rstrip("/")
        for words in commands("docs/command-line.md"):
            if words[1] in ("bench", "serve", "run", "host") or "cuda" in words:
                continue
            words = [word.replace("https://host", url) for word in words]
            done = subprocess.run(
                [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, (words, done.stderr)
            ran.add(words[1])
    assert ran >= {"compress", "decompress", "inspect", "verify", "doctor", "fetch"}
    for name in ("plain", "fetched"):
        assert (tmp_path / f"{name}.safetensors").read_bytes() == plain, name


def test_the_guide_to_stores_runs(tmp_path: Path) -> None:
    """The stores guide and its commands run with a bucket on a real server."""
    prepare(tmp_path)
    (tmp_path / "page.py").write_text("\n".join(blocks("docs/stores.md", "python")))
    with stores.s3() as (options, _):
        env = {
            "BUCKET": "s3://models/guide/",
            "AWS_ACCESS_KEY_ID": str(options["key"]),
            "AWS_SECRET_ACCESS_KEY": str(options["secret"]),
            "AWS_ENDPOINT_URL_S3": str(options["endpoint_url"]),
            "AWS_REGION": str(options.get("region", "us-east-1")),
        }
        done = warm.run(["page.py"], cwd=tmp_path, env=cleaned("AWS_") | env)
        assert done.returncode == 0, done.stdout + done.stderr
        ours = [words for words in commands("docs/stores.md") if "s3://" in " ".join(words)]
        assert len(ours) >= 3
        for words in ours:
            said = subprocess.run(
                [sys.executable, "-m", *words], cwd=tmp_path, env=cleaned("AWS_") | env, capture_output=True, text=True
            )
            assert said.returncode == 0, (words, said.stderr)


def commands(page: str) -> list[list[str]]:
    """Returns a page's overwire commands, split into words as a shell does."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("overwire ")]


@pytest.mark.parametrize("page, least", [("README", 2), ("docs/start", 5)])
def test_the_first_minute_runs(page: str, least: int, tmp_path: Path) -> None:
    """The commands of a page run in order in an empty folder."""
    lines = commands(f"{page}.md")
    assert len(lines) >= least
    for words in lines:
        done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stderr)


def test_files_for_production_name_existing_settings() -> None:
    """Settings, commands and load formats in the Dockerfile and the Kubernetes deployment exist. The YAML is valid."""
    yaml = pytest.importorskip("yaml")
    folder = ROOT / "examples/production"
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.iterdir()))
    from overwire._tables import SETTINGS

    assert set(re.findall(r"\bOVERWIRE_\w+", text)) <= SETTINGS
    verbs = subprocess.run([sys.executable, "-m", "overwire", "--help"], capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"\boverwire ([a-z]+) s3:", text))
    assert named and all(f"\n  {verb} " in verbs for verb in named)
    (deployment,) = yaml.safe_load_all((folder / "kubernetes.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["initContainers"] + pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["securityContext"]["readOnlyRootFilesystem"]

"""The code of the README and of the guides runs as it stands."""

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
    """The code blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def prepare(folder: Path) -> None:
    """What the guides take for granted: a model in one file, and one in shards."""
    np = pytest.importorskip("numpy")
    weights = {"embed": np.random.default_rng(0).normal(0, 0.02, (512, 64)).astype("float32"), "bias": np.zeros(512, "float32")}
    overwire.save_file(weights, folder / "model.safetensors")
    weights |= {f"layers.0.experts.{n}.up.weight": weights["embed"] for n in range(4)}
    (folder / "model").mkdir()
    overwire.save_file(weights, folder / "model/model.safetensors", max_shard_size="64KiB")


GUIDES = (
    "../README", "start", "gpu", "several-gpus", "preload", "parts", "saving", "sleep", "offload", "checkpoints", "deltas",
    "metrics", "production", "troubleshooting", "coming-from", "fastsafetensors", "nvcomp", "nyacomp", "tensorizer",
)  # fmt: skip
API = ("deltas", "errors", "inspecting", "libraries", "loading", "memory", "objects", "saving")

# Runs the examples of a page and compares what each prints.
EXAMPLES = """
import doctest
import sys

example = doctest.DocTestParser().get_doctest(open("page.txt").read(), {}, "page", "page.txt", 0)
failed, attempted = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
sys.exit(failed or not attempted)
"""


@pytest.mark.parametrize("page", GUIDES)
def test_guides_run(page: str, tmp_path: Path) -> None:
    """The Python of a guide runs as it stands, one block after the other, in a folder with a model."""
    pytest.importorskip("torch")
    prepare(tmp_path)
    (tmp_path / "page.py").write_text("\n".join(blocks(f"docs/{page}.md", "python")))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = warm.run(["page.py"], cwd=tmp_path, env=cleaned() | alone)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", API)
def test_examples_of_the_api_print_what_they_show(page: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    prepare(tmp_path)
    (tmp_path / "page.txt").write_text("\n".join(blocks(f"docs/api/{page}.md", "pycon")))
    (tmp_path / "run.py").write_text(EXAMPLES)
    done = warm.run(["run.py"], cwd=tmp_path, env=cleaned())
    assert done.returncode == 0, done.stdout + done.stderr


def test_functions_show_an_example() -> None:
    """Each public function has one below its entry in the API."""
    text = "".join((ROOT / f"docs/api/{page}.md").read_text(encoding="utf-8") for page in API)
    without = re.findall(r"autofunction:: overwire\.(\w+)\n```\n(?!\n```pycon)", text)
    assert set(without) <= {"compress", "load_compressed", "prepare_sleep"}, without


def test_the_commands_run(tmp_path: Path) -> None:
    """The page of the command line, as pasted; what needs a GPU, measures for minutes or
    never ends is left out, and https://host is a server here."""
    prepare(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    overwire.convert(tmp_path / "model", tmp_path / "model.safetensors", compress=False)
    plain = (tmp_path / "model.safetensors").read_bytes()
    ran = set()
    serve = [sys.executable, "-m", "overwire", "serve", str(tmp_path)]
    with processes.started(serve, stdout=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().strip().rstrip("/")
        for words in commands("docs/command-line.md"):
            if words[1] in ("bench", "serve", "run") or "cuda" in words:
                continue
            words = [word.replace("https://host", url) for word in words]
            done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, (words, done.stderr)
            ran.add(words[1])
    assert ran >= {"compress", "decompress", "inspect", "verify", "doctor", "fetch"}
    for name in ("plain", "fetched"):
        assert (tmp_path / f"{name}.safetensors").read_bytes() == plain, name


def test_the_guide_to_stores_runs(tmp_path: Path) -> None:
    """The same, and its commands, with a bucket of a real server."""
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
            said = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, env=cleaned("AWS_") | env, capture_output=True, text=True)
            assert said.returncode == 0, (words, said.stderr)


def commands(page: str) -> list[list[str]]:
    """The overwire commands of a page, as the shell divides them."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("overwire ")]


@pytest.mark.parametrize("page, least", [("README", 2), ("docs/start", 5)])
def test_the_first_minute_runs(page: str, least: int, tmp_path: Path) -> None:
    """Its commands, one after the other, in an empty folder."""
    lines = commands(f"{page}.md")
    assert len(lines) >= least
    for words in lines:
        done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (words, done.stderr)


def test_files_for_production_name_what_is_there() -> None:
    """Settings, verbs and load formats of the Dockerfile and of the deployment exist, and the YAML is one."""
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

"""Tests `patch_safetensors` with transformers 5 and 4.57, diffusers 0.42 and 0.35, peft, torch's distributed
checkpoints and unchanged programs. test_patch_safetensors.py tests accelerate."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import safetensors
import safetensors.torch
import torch
import warm
from conftest import ROOT, cleaned, same

FIVE = Path(os.environ.get("OVERWIRE_TEST_TRANSFORMERS5") or Path(sys.prefix) / "transformers5")


def run(command: list[str], folder: Path, path: Path | None = None, *, fresh: bool = False, **env: str) -> str:
    """Runs Python with a folder first on its path, and returns the output. fresh: in a process that has not imported
    torch."""
    clean = cleaned() | env
    if path is not None:
        clean["PYTHONPATH"] = os.pathsep.join(filter(None, (str(path), clean.get("PYTHONPATH"))))
    done = (warm.fresh if fresh else warm.run)(command, cwd=folder, env=clean, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return done.stdout


def run_program(name: str, release: str, folder: Path, files: Path) -> str:
    """Runs a program of tests/engines with a release of transformers, or skips the test. Returns the output."""
    if release == "5" and not FIVE.is_dir():
        pytest.skip(f"no transformers 5 in {FIVE}: run make venv")
    pytest.importorskip("transformers")
    return run([str(ROOT / "tests" / "engines" / name), str(files)], folder, FIVE if release == "5" else None)


@pytest.mark.parametrize("release", [pytest.param("4.57", marks=pytest.mark.slow), "5"])
def test_every_parameter_equals_the_unpatched_load(release: str, tmp_path: Path) -> None:
    """Dense, tied, expert, fp8, odd and offloaded models, and adapters, have the same parameters as after the unpatched
    load. The cases are in transformers_program.py."""
    output = run_program("transformers_program.py", release, tmp_path, tmp_path / "models")
    assert output.splitlines()[-1].startswith(f"ok {release}"), output


@pytest.mark.parametrize("release", [pytest.param("4.57", marks=pytest.mark.slow), "5"])
def test_ranks_read_their_share(release: str, tmp_path: Path) -> None:
    """With a tensor-parallel plan, two ranks get the same shards as in the unpatched load, and read only their rows."""
    output = run_program("parallel_program.py", release, tmp_path, tmp_path / "a b")
    assert f"ok {release}" in output and f"done {release}" in output, output
    print(output)


@pytest.mark.parametrize("release", [pytest.param("0.35", marks=pytest.mark.slow), "0.42"])
def test_pipelines_of_diffusers(release: str, tmp_path: Path) -> None:
    """Pipelines of several models have the same parameters as after the unpatched load. A model is read while another
    one is built."""
    five = release == "0.42"
    if five and not (FIVE / "diffusers").is_dir():
        pytest.skip(f"no diffusers in {FIVE}: run make venv")
    pytest.importorskip("diffusers")
    program = str(ROOT / "tests" / "engines" / "diffusers_program.py")
    output = run([program, str(tmp_path / "a b")], tmp_path, FIVE if five else None)
    assert output.splitlines()[-1].startswith(f"ok {release}"), output


@pytest.mark.parametrize("page", ["transformers"])
def test_the_page_runs(page: str, tmp_path: Path) -> None:
    """The Python code blocks of docs/transformers.md run unchanged, in order."""
    pytest.importorskip("transformers")
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) >= 3
    (tmp_path / "page.py").write_text("\n".join(blocks))
    run(["page.py"], tmp_path)


def test_slices_are_loaded_to_the_device_of_the_patch(tmp_path: Path) -> None:
    """If a library passes no device, the `device` of the patch applies. The engine then also reads plain files."""
    tensors = {"a": torch.arange(60).view(6, 10), "b": torch.randn(7).bfloat16()}
    safetensors.torch.save_file(tensors, tmp_path / "plain.safetensors")
    ow.save_file(tensors, tmp_path / "packed.safetensors")
    for kind in ("plain", "packed"):
        with ow.patch_safetensors(device="cpu") as patch, safetensors.safe_open(tmp_path / f"{kind}.safetensors", "pt") as file:
            assert "device='cpu'" in repr(patch)
            held = file.get_slice("a")
            assert held.device("cpu") == held.device(None) == "cpu" and held.device("mps") is None
            assert (held.get_shape(), held.get_dtype()) == ([6, 10], "I64")
            same(held[2:4, ::3], tensors["a"][2:4, ::3])
            same(held.on("cpu")[...], tensors["a"])
            same(file.get_tensor("b"), tensors["b"])
    with ow.patch_safetensors(), safetensors.safe_open(tmp_path / "plain.safetensors", "pt") as file:
        held = file.get_slice("a")
        assert held.device("cpu") is None  # safetensors maps the file
        assert held.device("cuda:3") == "cuda:3" and held.device(1) == "cuda:1"
        same(held[...], tensors["a"])
        assert file.metadata() is None and sorted(file.keys()) == ["a", "b"]
    with pytest.raises(safetensors.SafetensorError, match="nowhere"):
        ow.patch_safetensors(device="nowhere")


def test_writing_compressed(tmp_path: Path) -> None:
    """Files are written compressed only while a patch with compress=True is active. Such a file is complete or absent,
    and can be read."""
    tensors = {"a": torch.randn(64, 64).bfloat16(), "n": torch.zeros(0, 3), "s": torch.tensor(2.5)}
    plain = ow.patch_safetensors()
    with ow.patch_safetensors(compress=True):
        safetensors.torch.save_file(tensors, tmp_path / "packed.safetensors", {"format": "pt"})
        safetensors.numpy.save_file({"x": torch.arange(5).numpy()}, tmp_path / "numpy.safetensors")
    safetensors.torch.save_file(tensors, tmp_path / "plain.safetensors", {"format": "pt"})
    plain.undo()
    formats = {path.stem: ow.inspect(path)["sources"][0]["format"] for path in tmp_path.glob("*.safetensors")}
    assert formats == {"packed": "overwire", "numpy": "overwire", "plain": "safetensors"}
    for name, tensor in ow.load_file(tmp_path / "packed.safetensors").items():
        same(tensor, tensors[name])
    with ow.safe_open(tmp_path / "packed.safetensors") as file:
        assert file.metadata() == {"format": "pt"}


def test_distributed_checkpoints(tmp_path: Path) -> None:
    """torch's reader of Hugging Face folders reads compressed files."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    want = {"a": torch.randn(33, 5), "b": torch.arange(7.0)}
    ow.save_file(want, tmp_path / "model.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    with ow.patch_safetensors():
        load(state, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for name, tensor in want.items():
        same(state[name], tensor)


WITHOUT_OVERWIRE = """
import sys, traceback, diffusers, transformers
assert transformers.__version__.startswith(sys.argv[1]), transformers.__version__
for load, folder, options in (
    (transformers.AutoModel.from_pretrained, "bert", {}),
    (transformers.AutoModel.from_pretrained, "bert", {"ignore_mismatched_sizes": True}),
    (transformers.AutoModel.from_pretrained, "bert", {"device_map": {"": "cpu"}}),
    (diffusers.AutoencoderKL.from_pretrained, "vae", {}),
    (diffusers.AutoencoderKL.from_pretrained, "vae", {"low_cpu_mem_usage": False}),
):
    try:
        load(folder, **options)
        said = "nothing"
    except Exception:
        said = traceback.format_exc()
    print(folder, options, "compressed by overwire (to read it: pip install -U overwire;" in said or said)
assert "overwire" not in sys.modules
"""


@pytest.mark.parametrize("release", [pytest.param("4.57", marks=pytest.mark.slow), "5"])
def test_compressed_folders_without_overwire(release: str, tmp_path: Path) -> None:
    """transformers and diffusers refuse a compressed folder. Their errors say that it needs overwire and how to install
    it. Even with an option to ignore sizes, no part of the folder is loaded."""
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    if release == "5" and not FIVE.is_dir():
        pytest.skip(f"no transformers 5 in {FIVE}: run make venv")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}
    for name, file, config in (
        ("bert", "model", {"model_type": "bert", "architectures": ["BertModel"], **small}),
        ("vae", "diffusion_pytorch_model", {"_class_name": "AutoencoderKL", "block_out_channels": [32]}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        ow.save_file({"w": torch.randn(64, 64)}, tmp_path / name / f"{file}.safetensors", {"format": "pt"})
    (tmp_path / "program.py").write_text(WITHOUT_OVERWIRE)
    output = run(["program.py", release], tmp_path, FIVE if release == "5" else None).splitlines()
    assert len(output) == 5 and all(line.endswith(" True") for line in output), output


PROGRAM = """
import sys, safetensors, safetensors.torch
from safetensors import safe_open
from safetensors.torch import load_file
assert "/overwire/compat/" not in safetensors.__file__, safetensors.__file__
print(sorted(load_file("packed.safetensors")), load_file("packed.safetensors")["a"].tolist())
"""


def test_unchanged_programs_are_patched(tmp_path: Path) -> None:
    """Programs are patched without a change by a folder on PYTHONPATH or, if they import overwire, by an environment
    variable."""
    ow.save_file({"a": torch.arange(4.0)}, tmp_path / "packed.safetensors")
    (tmp_path / "program.py").write_text(PROGRAM)
    folder = Path(run(["-m", "overwire.compat", "path", "safetensors"], tmp_path, fresh=True).strip())
    assert run(["program.py"], tmp_path, folder, fresh=True) == "['a'] [0.0, 1.0, 2.0, 3.0]\n"
    assert "['a']" in run(["-c", "import overwire\n" + PROGRAM], tmp_path, fresh=True, OVERWIRE_PATCH="1")
    ours = "import overwire, safetensors; print(safetensors.safe_open.__module__)"
    assert run(["-c", ours], tmp_path, fresh=True, OVERWIRE_PATCH="0") == "builtins\n"
    assert run(["-c", ours], tmp_path, fresh=True, OVERWIRE_PATCH="1") != "builtins\n"


def test_without_the_package_the_variable_warns(script: Any) -> None:
    script(
        "import sys, logging\nsys.modules['safetensors'] = None\nseen = []\n"
        "logging.getLogger('overwire').addHandler(type('H', (logging.Handler,), {'emit': lambda s, r: seen.append(r.getMessage())})())\n"
        "import overwire\nassert len(seen) == 1 and 'OVERWIRE_PATCH' in seen[0] and 'not installed' in seen[0], seen\n",
        OVERWIRE_PATCH="yes",
    )


def test_a_folder_of_one_file_stays_a_folder(tmp_path: Path) -> None:
    """The compressed copy of a folder with one file is a folder, also within a pipeline. Loading a pipeline's folder as
    one model is refused, and the error names the subfolders."""
    for part in ("unet", "vae"):
        (tmp_path / "pipe" / part).mkdir(parents=True)
        ow.save_file({"w": torch.randn(999).bfloat16()}, tmp_path / "pipe" / part / "model.safetensors", compress=False)
        (tmp_path / "pipe" / part / "config.json").write_text("{}")
    (tmp_path / "pipe" / "model_index.json").write_text(json.dumps({"unet": [], "vae": []}))
    report = ow.convert(tmp_path / "pipe", tmp_path / "packed")
    assert (report.tensors, report.left) == (2, ())
    files = sorted(str(path.relative_to(tmp_path / "packed")) for path in (tmp_path / "packed").rglob("*") if path.is_file())
    assert files == ["model_index.json", "unet/config.json", "unet/model.safetensors", "vae/config.json", "vae/model.safetensors"]
    assert [source["format"] for source in ow.inspect(tmp_path / "packed")["sources"]] == ["overwire"] * 2
    assert ow.verify(tmp_path / "packed")["ok"]
    same(ow.load_file(tmp_path / "packed" / "vae")["w"], ow.load_file(tmp_path / "pipe" / "vae")["w"])
    with pytest.raises(ow.NotFoundError, match=r"open one of its subfolders \(unet, vae\)"):
        ow.load_file(tmp_path / "packed")
    ow.convert(tmp_path / "pipe" / "unet", tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["config.json", "model.safetensors"]

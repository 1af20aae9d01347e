"""Tests a newcomer's tasks and mistakes, on the command line and in Python, on a machine without a GPU."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import overwire as ow
import processes
import pytest
import stores
from conftest import cleaned
from overwire import _engine

torch = pytest.importorskip("torch")

Run = Callable[..., str]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Returns a function that runs a command line in this process, checks its exit status, and returns its output."""

    def command(*words: str | Path, status: int = 0) -> str:
        capfd.readouterr()
        code = _engine.cli([str(word) for word in words])
        out, err = capfd.readouterr()
        assert code == status and "Traceback" not in err, (words, code, out, err)
        return out if status == 0 else err

    return command


def weights(seed: int, names: int = 3) -> dict[str, torch.Tensor]:
    """Returns tensors that compress like trained weights."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{n}.mlp.weight": torch.randn(256, 256, generator=generator).mul(0.02).bfloat16() for n in range(names)}


# Typical folders by name: their weight files and their auxiliary files.
FOLDERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a model of the Hub": (("model.safetensors",), ("config.json", "tokenizer.json", "generation_config.json")),
    "a LoRA": (("adapter_model.safetensors",), ("adapter_config.json",)),
    "a diffusers pipeline": (
        ("unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors"),
        ("model_index.json", "unet/config.json", "vae/config.json", "tokenizer/vocab.json"),
    ),
    "sentence-transformers": (
        ("model.safetensors", "2_Dense/model.safetensors"),
        ("modules.json", "config.json", "1_Pooling/config.json", "2_Dense/config.json"),
    ),
}


def make_folder(path: Path, files: tuple[str, ...], beside: tuple[str, ...]) -> None:
    for name in beside:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps({"name": name, "filling": "x" * 300_000}))
    for seed, name in enumerate(files):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        ow.save_file(weights(seed), path / name, {"format": "pt"}, compress=False)


@pytest.mark.parametrize("kind", FOLDERS)
def test_folders_are_compressed_and_decompressed(run: Run, tmp_path: Path, kind: str) -> None:
    """Every file of a folder has the same bytes after compressing and decompressing. The reported size is that of the
    weights."""
    files, beside = FOLDERS[kind]
    plain, small, back = (tmp_path / name for name in ("plain", "small", "back"))
    make_folder(plain, files, beside)
    report = json.loads(run("compress", plain, "-o", small, "--json"))
    assert report["bytes_in"] == len(files) * 3 * 256 * 256 * 2 and report["ratio"] < 0.8
    assert report["bytes_copied"] == sum((plain / name).stat().st_size for name in beside)
    run("verify", "--original", *(small / name for name in files))
    run("load", small)
    assert "identical to the original" in run("decompress", small, "-o", back)
    for name in (*files, *beside):
        assert (back / name).read_bytes() == (plain / name).read_bytes(), name
    assert "give --force to write into it" in run("compress", plain, "-o", small, status=2)


def test_shards(run: Run, tmp_path: Path) -> None:
    """A set of shards can be compressed, and converted to one file, without changing a tensor. --shard needs a size
    with a unit."""
    (tmp_path / "set").mkdir()
    ow.save_file(weights(0, 6), tmp_path / "set/model.safetensors", max_shard_size="300kB", compress=False)
    run("compress", tmp_path / "set", "-o", tmp_path / "small")
    run("convert", tmp_path / "small", "-o", tmp_path / "one.safetensors", "--to", "safetensors")
    loaded = ow.load_file(tmp_path / "one.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(0, 6).items())
    assert "add the unit: 5GB" in run("compress", tmp_path / "set", "-o", tmp_path / "x", "--shard", "5", status=2)


def test_functions_do_what_commands_do(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ow.compress and ow.decompress accept files, lists, folders and URIs, and write the same files as the commands.
    They replace a file only with overwrite=True. If the first argument of `compress` is an object, it is saved in
    nyacomp's layout."""
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "plain", *FOLDERS["a model of the Hub"])
    model = tmp_path / "plain/model.safetensors"
    run("compress", "plain", "-o", "by command")
    report = ow.compress("plain", "small")
    assert isinstance(report, ow.Report) and len(report.copied) == 3 and report.ratio < 0.8
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    for name in names:
        assert (tmp_path / "small" / name).read_bytes() == (tmp_path / "by command" / name).read_bytes()
    assert list(ow.decompress("small", "back").originals.values()) == list(report.originals.values())
    assert [(tmp_path / "back" / name).read_bytes() for name in names] == [
        (tmp_path / "plain" / name).read_bytes() for name in names
    ]
    assert ow.compress([model], tmp_path / "listed/").tensors == 3
    assert ow.compress(model.as_uri(), "one.safetensors", level="smaller", sha256=False).compressed == 3
    with processes.overwire_serve(tmp_path) as root:
        ow.decompress(f"{root.rstrip('/')}/one.safetensors", "fetched.safetensors")
    assert (tmp_path / "fetched.safetensors").read_bytes() == model.read_bytes()
    for verb in (ow.compress, ow.decompress):
        for path, why in (("one.safetensors", "the file exists"), ("small", "the folder is not empty")):
            with pytest.raises(ow.ArgumentError, match=f"{verb.__name__} .*{path}: {why}: pass overwrite=True"):
                verb(model, path)
        verb(model, "one.safetensors", overwrite=True)
    assert (tmp_path / "one.safetensors").read_bytes() == model.read_bytes()
    with pytest.raises(ow.ArgumentError, match="use overwire.convert"):
        ow.compress(model, "m.tensors")
    with pytest.raises(TypeError, match=r"compress\(\) got an unexpected keyword argument 'levl'"):
        ow.compress(model, "x.safetensors", levl="smaller")  # type: ignore[call-overload]
    assert isinstance(ow.save_bundle(weights(0), "x.pkl"), ow.Report)
    assert isinstance(ow.compress(weights(0), "y.pkl"), float) and "meta.csv" in os.listdir("nya")
    assert ow.load_bundle("y.pkl").keys() == ow.load_compressed("x.pkl").keys() == weights(0).keys()


def test_help() -> None:
    """help() shows one signature per public function, in short lines and with the types of the source, and explains
    every option. nyacomp's names can be imported but are not listed."""
    functions = [value for name in ow.__all__ if inspect.isfunction(value := getattr(ow, name))]
    assert len(functions) > 25 and ow.compress in functions and ow.decompress in functions
    for function in functions:
        text = pydoc.plain(pydoc.render_doc(function))
        head = text.partition(f"\n{function.__name__}(")[2].partition(" -> ")[0]
        assert head.strip() and max(map(len, head.splitlines())) <= 100 and ": '" not in head, head
    first = {"obj", "path", "module", "tensors", "source", "device", "framework", "filename"}
    for verb in (ow.load_file, ow.save_file, ow.load_model, ow.stream, ow.save_bundle, ow.load_bundle, ow.compress):
        explained = ", ".join(re.findall(r"^(\w+(?:, \w+)*): ", inspect.getdoc(verb) or "", re.M)).split(", ")
        assert inspect.signature(verb).parameters.keys() - {*explained} <= first, verb
    nyacomps = {"compress_pickle", "load_compressed", "load_compressed_pickle"}
    assert not nyacomps & {*ow.__all__, *dir(ow)} and all(callable(getattr(ow, name)) for name in nyacomps)
    assert "overwire.compat.nyacomp" in (ow.__doc__ or "") and "nyacomp" in (ow.compress.__doc__ or "")


def test_small_files_that_grow(run: Run, tmp_path: Path) -> None:
    """`overwire compress` explains in one line why a small file became larger. It prints no such line for a file that
    became smaller."""
    ow.save_file({"a": torch.ones(3)}, tmp_path / "small.safetensors", compress=False)
    ow.save_file(weights(0), tmp_path / "large.safetensors", compress=False)
    assert "\nthe result is larger than the source: " in run("compress", tmp_path / "small.safetensors")
    assert "is larger than the source" not in run("compress", tmp_path / "large.safetensors")


def test_a_model_that_does_not_match(tmp_path: Path) -> None:
    """The error of load_model lists eight names of each kind and counts the rest."""
    ow.save_file({f"t{number}": torch.ones(1) for number in range(1000)}, tmp_path / "m.safetensors")
    with pytest.raises(ow.ModelMismatchError, match=r"and 992 more") as raised:
        ow.load_model(torch.nn.Linear(2, 2), tmp_path / "m.safetensors")
    assert len(str(raised.value)) < 500


@pytest.mark.imports_torch
def test_torch_save_files(tmp_path: Path) -> None:
    """compress and convert read a .pt file, a .ckpt file, and a folder with pytorch_model.bin and auxiliary files."""
    state = weights(1)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/config.json").write_text("{}")
    torch.save(state, tmp_path / "hub/pytorch_model.bin")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "last.ckpt")
    for verb, source, target in (("compress", "hub", "small"), ("convert", "last.ckpt", "last.safetensors")):
        command = [sys.executable, "-m", "overwire", verb, str(tmp_path / source), "-o", str(tmp_path / target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "small/config.json").exists()
    assert all(torch.equal(ow.load_file(tmp_path / "small")[name], tensor) for name, tensor in state.items())
    assert all(torch.equal(ow.load_file(tmp_path / "last.safetensors")[f"state_dict.{name}"], t) for name, t in state.items())


def test_commands_that_inspect_models(run: Run, tmp_path: Path) -> None:
    """inspect, diff, load, doctor and completion work. inspect can also write HTML pages."""
    a, b, trace, page = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "t.json", "page.html"))
    ow.save_file(weights(0), a)
    ow.save_file(weights(0) | {"layers.1.mlp.weight": weights(7)["layers.1.mlp.weight"]}, b)
    run("compress", a)
    assert (tmp_path / "a.ow.safetensors").exists()
    assert run("inspect", a).count("BF16") == 4 and "layers.2" not in run("inspect", a, "--filter", "*.1.*")
    assert run("inspect", a, "--top", "1").count("mlp.weight") == 1
    assert "% less" in run("inspect", a, "--estimate")
    run("inspect", a, "--html", page)
    run("load", a, "--trace", trace)
    run("inspect", trace, "--html", page)
    assert "<html" in page.read_text()
    digests = dict(reversed(line.split("  ")) for line in run("inspect", a, "--digests").splitlines())
    assert digests == ow.digest(weights(0))
    assert "[256,256]" in run("diff", a, b) and "layers.1.mlp.weight" in run("diff", a, b)
    assert "differ" in run("diff", a, b, "--exit-code", status=1)
    run("diff", a, a, "--exit-code")
    assert json.loads(run("doctor", "--json"))["machine"]["cores"] >= 1
    assert "overwire" in run("completion", "bash")


def test_unrelated_models(run: Run, tmp_path: Path) -> None:
    """If two models have no common tensor, the last line of diff says so, and not "0 elements changed"."""
    ow.save_file(weights(0), tmp_path / "a.safetensors")
    ow.save_file({f"other.{name}": t for name, t in weights(0).items()}, tmp_path / "b.safetensors")
    said = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert said.splitlines()[-1] == "no tensor is in both models" and "0 of 0" not in said


def test_help_says_command(run: Run) -> None:
    """Help and completion say "command", not "verb"."""
    for name in ("compress", "inspect", "verify", "fetch", "cache", "bench", "completion"):
        assert not re.search(r"\bverbs?\b", run(name, "--help"))
    assert not re.search(r"\bverbs?\b", run("--help"))


def test_a_download(run: Run, tmp_path: Path) -> None:
    """`verify` compares the files that `hf download --local-dir` fetched with the SHA-256 that huggingface_hub
    recorded, and finds a changed bit."""
    folder = pytest.importorskip("huggingface_hub._local_folder")
    file = tmp_path / "model.safetensors"
    ow.save_file(weights(0), file, compress=False)
    assert "structure verified" in run("verify", tmp_path)
    good = file.read_bytes()
    folder.write_download_metadata(tmp_path, file.name, "0" * 40, hashlib.sha256(good).hexdigest())
    assert "identical to the Hub's file" in run("verify", tmp_path)
    assert ow.verify(file)["files"][0].get("sha256") == hashlib.sha256(good).hexdigest()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert "differs from the one on the Hub" in run("verify", tmp_path, status=1)


def test_a_comparison_with_safetensors(tmp_path: Path) -> None:
    """`verify --against` compares with the tensors that safetensors reads and lists those that differ. If any differs,
    it fails."""
    make_folder(tmp_path / "plain", *FOLDERS["a diffusers pipeline"])
    ow.convert(tmp_path / "plain", tmp_path / "small")

    def verify(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "overwire", "verify", "small", *words]
        done = subprocess.run(command, cwd=tmp_path, env=cleaned(), capture_output=True, text=True)
        return done.returncode, done.stdout

    assert verify("--against", "safetensors") == (0, "6 tensors compared with safetensors, 0 differences\n")
    changed = weights(1) | {"layers.1.mlp.weight": weights(7)["layers.1.mlp.weight"]}
    ow.save_file(changed, tmp_path / "small/vae/diffusion_pytorch_model.safetensors")
    status, said = verify("--against=plain", "--json")
    assert status == 1 and json.loads(said) == {
        "tensors": 6, "differences": ["small/vae/diffusion_pytorch_model.safetensors: layers.1.mlp.weight: differs"]
    }
    assert verify("--against", "none")[0] == 3


def test_a_server(run: Run, tmp_path: Path) -> None:
    """A file on a web server can be loaded, verified, compared and fetched."""
    ow.save_file(weights(0), tmp_path / "a.safetensors")
    with processes.overwire_serve(tmp_path) as root:
        url = root.rstrip("/")
        run("load", f"{url}/a.safetensors")
        run("verify", f"{url}/a.safetensors")
        run("diff", f"{url}/a.safetensors", tmp_path / "a.safetensors", "--exit-code")
        run("fetch", f"{url}/a.safetensors", "-o", tmp_path / "fetched.safetensors")
        assert "404" in run("fetch", f"{url}/none", "-o", tmp_path / "none", status=3)
    assert (tmp_path / "fetched.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_a_bucket(run: Run, tmp_path: Path) -> None:
    """A folder can be compressed to S3 and decompressed from there with its configuration files, with or without a
    trailing slash. Replacing the folder needs --force."""
    make_folder(tmp_path / "plain", *FOLDERS["a model of the Hub"])
    with stores.s3() as (options, _):
        storage = "--storage=" + json.dumps({key: value for key, value in options.items() if isinstance(value, str)})
        run("compress", tmp_path / "plain", "-o", "s3://models/day", storage)
        assert "--force" in run("compress", tmp_path / "plain", "-o", "s3://models/day/", storage, status=2)
        for number, uri in enumerate(("s3://models/day", "s3://models/day/")):
            run("load", uri, storage)
            run("fetch", uri, "-o", tmp_path / f"fetched{number}", storage)
            run("decompress", uri, "-o", tmp_path / f"back{number}", storage)
            for name in ("model.safetensors", "config.json"):
                assert (tmp_path / f"back{number}" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
            assert (tmp_path / f"fetched{number}/config.json").exists()
        url = run("fetch", "s3://models/day/model.safetensors", "--presign", "600", storage).strip()
        assert re.match("https?://.*Signature", url)


def test_keys(run: Run, tmp_path: Path) -> None:
    """A safetensors file can be converted to an encrypted .tensors file and back. A key option that names an unset
    variable causes an error."""
    plain, sealed, key = tmp_path / "a.safetensors", tmp_path / "a.tensors", tmp_path / "key"
    ow.save_file(weights(0), plain, compress=False)
    key.write_bytes(os.urandom(32))
    run("convert", plain, "-o", sealed, "--encrypt-key", f"file:{key}")
    run("diff", plain, sealed, "--decrypt-key", f"file:{key}", "--exit-code")
    run("decompress", sealed, "-o", tmp_path / "back.safetensors", "--decrypt-key", f"file:{key}")
    assert all(torch.equal(ow.load_file(tmp_path / "back.safetensors")[name], t) for name, t in weights(0).items())
    unset = run("load", sealed, "--decrypt-password", "env:WORDS", status=2)
    assert unset == "overwire: --decrypt-password: the variable WORDS is not set\n"


def test_a_delta(run: Run, tmp_path: Path) -> None:
    """Deltas are saved and applied in Python. The error of `overwire delta` names the Python function."""
    base, new = weights(0), weights(0) | {"layers.1.mlp.weight": weights(7)["layers.1.mlp.weight"]}
    ow.save_delta(new, base, tmp_path / "d.safetensors")
    ow.apply_delta(base, tmp_path / "d.safetensors")
    assert all(torch.equal(base[name], tensor) for name, tensor in new.items())
    assert "overwire.save_delta" in run("delta", status=2)


def test_errors_of_other_readers(tmp_path: Path) -> None:
    """safetensors refuses a compressed file, and its message says what to install. Programs that only list the header
    still work. The messages of transformers, diffusers and vLLM are tested in tests/engines."""
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load, load_file

    ow.save_file(weights(0) | {"bias": torch.zeros(3)}, tmp_path / "m.safetensors")
    for read in (load_file, lambda path: load(path.read_bytes())):
        with pytest.raises(safetensors.SafetensorError, match="compressed by overwire .*pip install -U overwire"):
            read(tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert {"bias", *weights(0)} < set(header) and header["bias"]["dtype"] == "F32"


# Command lines with a mistake, their exit status, and words in the answer. M is a file, F a folder with a
# pytorch_model.bin.
MISTAKES: tuple[tuple[str, int, str], ...] = (
    ("compres M -o x", 2, "did you mean compress?"),
    ("version", 2, "write overwire --version"),
    ("info M", 2, "write overwire inspect SRC"),
    ("ls M", 2, "write overwire inspect SRC"),
    ("download M", 2, "write overwire fetch URL -o OUT"),
    ("benchmark", 2, "write overwire bench"),
    ("compress nofile", 3, "open nofile: not found"),
    ("compress old.pt -o x.safetensors", 1, "a torch.save file from before torch 1.6"),
    ("cache lst", 2, "expected list or clear"),
    ("inspect --sumary M", 2, "did you mean --summary?"),
    ("convert M", 2, "needs -o OUT"),
    ("compress M -o x.tensors", 2, "write overwire convert"),
    ("convert M -o x.gguf", 2, "cannot write .gguf files"),
    ("convert M -o x.pt", 2, "cannot write .pt files"),
    ("compress M -o x --level 9", 2, 'level must be "default" or "smaller"'),
    ("compress M -o -", 2, "cannot write to standard output"),
    ("compress M --output=", 2, "--output is empty: write --output OUT, or omit it"),
    ("load M --device=", 2, "--device is empty"),
    ("compress M -o F", 2, "F is a folder with files in it"),
    ("inspect -", 2, "cannot read standard input"),
    ("load F", 3, "it has pytorch_model.bin"),
    ("load modle.safetensors", 3, "did you mean"),
    ("load M --device gpu:1", 5, 'write "cuda:1"'),
    ("load M --device tpu", 5, 'only "cpu" and "cuda" are supported'),
    ("verify notes.txt", 1, "not a safetensors file"),
    ("load M --decrypt-key 0123", 2, "a secret on the command line would show"),
)


@pytest.mark.parametrize(("words", "status", "says"), MISTAKES)
def test_mistakes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, status: int, says: str
) -> None:
    """The answer to a command with a mistake says what to write instead, and no file is written."""
    monkeypatch.chdir(tmp_path)
    ow.save_file(weights(0, 1), "model.safetensors")
    os.mkdir("folder")
    torch.save(weights(0, 1), "folder/pytorch_model.bin")
    torch.save(weights(0, 1), "old.pt", _use_new_zipfile_serialization=False)
    Path("notes.txt").write_text("What I did on my first day.")
    before = sorted(os.listdir())
    names = {"M": "model.safetensors", "F": "folder"}
    says = " ".join(names.get(word, word) for word in says.split(" "))
    assert says in run(*(names.get(word, word) for word in words.split()), status=status)
    assert sorted(os.listdir()) == before

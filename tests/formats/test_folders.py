"""Tests that every function reads those files of a folder that docs/folders.md names, and compares this with what
transformers reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import safetensors.numpy

_INDEX = "model.safetensors.index.json"


def _files(folder: Path, stem: str = "model", value: float = 1, count: int = 0) -> None:
    """Writes the tensors a, b and c, each filled with value, to one file or to count shards."""
    names = [f"{stem}-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)] or [f"{stem}.safetensors"]
    for k, name in enumerate(names):
        safetensors.numpy.save_file({t: np.full(3, value) for t in "abc"[k :: len(names)]}, folder / name)


def _index(folder: Path, stem: str = "model", name: str = _INDEX, count: int = 2) -> None:
    files = [f"{stem}-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": {t: files[k % count] for k, t in enumerate("abc")}}))


def _shards(folder: Path) -> None:
    _files(folder, count=2)
    _index(folder)


def _whole(folder: Path) -> None:
    _files(folder, count=2)


def _single(folder: Path) -> None:
    _files(folder)


def _stale_duplicate(folder: Path) -> None:
    _shards(folder)
    tensors = {"b": np.full(3, 1.0), "a": np.full(3, 2.0), "d": np.full(3, 2.0)}
    safetensors.numpy.save_file(tensors, folder / "model-00002-of-00002.safetensors")


def _here(folder: Path) -> None:
    _shards(folder)
    (folder / _INDEX).write_text((folder / _INDEX).read_text().replace('"model-', '"./model-'))


def _single_and_shards(folder: Path) -> None:
    _shards(folder)
    _files(folder, value=2)


def _single_and_stale_index(folder: Path) -> None:
    _single(folder)
    _index(folder)


def _variant_shards(folder: Path) -> None:
    _shards(folder)
    _files(folder, "model.fp16", 2, 2)
    _index(folder, "model.fp16", "model.safetensors.index.fp16.json")


def _mistral(folder: Path) -> None:
    _shards(folder)
    _files(folder, "consolidated", 2, 2)
    _index(folder, "consolidated", "consolidated.safetensors.index.json")


def _lacking(folder: Path) -> None:
    _files(folder, count=2)
    (folder / "model-00001-of-00002.safetensors").unlink()


def _lacking_with_index(folder: Path) -> None:
    _shards(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()


def _pipeline(folder: Path) -> None:
    (folder / "unet").mkdir()
    _files(folder / "unet", "diffusion_pytorch_model", 1)
    _files(folder / "unet", "diffusion_pytorch_model.fp16", 2)


# By kind of folder: the function that makes it, the value in its model or the error, and the value that transformers
# finds (None if it finds no model).
CASES: dict[str, tuple[Callable[[Path], object], Any, float | None]] = {
    "one file": (_single, 1, 1),
    "shards": (_shards, 1, 1),
    "a stale duplicate": (_stale_duplicate, 1, 1),
    "names that begin with ./": (_here, 1, 1),
    "one file beside shards": (_single_and_shards, 1, 2),
    "one file beside a stale index": (_single_and_stale_index, (ow.NotFoundError, _INDEX, "model.safetensors, a complete model"), 1),
    "a listed shard is missing": (_lacking_with_index, (ow.NotFoundError, _INDEX, "model-00001-of-00002.safetensors"), 1),
    "shards without an index": (_whole, 1, None),
    "shards that are not complete": (_lacking, (ow.FormatError, "shard 1 is missing"), None),
    "one file beside shards without an index": (lambda folder: (_files(folder), _files(folder, value=2, count=2)), 1, 1),
    "a variant": (lambda folder: (_files(folder), _files(folder, "model.fp16", 2)), 1, 1),
    "variants in shards": (_variant_shards, 1, 1),
    "a variant alone": (lambda folder: _files(folder, "model.fp16"), 1, None),
    "two variants": (
        lambda folder: (_files(folder, "model.fp16"), _files(folder, "model.bf16", 2)),
        (ow.ArgumentError, "model.bf16.safetensors"),
        None,
    ),
    "Mistral's": (_mistral, 1, 1),
    "Mistral's in one file": (lambda folder: (_files(folder), _files(folder, "consolidated", 2)), 1, 1),
    "consolidated alone": (lambda folder: _files(folder, "consolidated"), 1, None),
    "other names": (lambda folder: _files(folder, "weights"), 1, None),
    "a pipeline": (_pipeline, (ow.NotFoundError, "unet"), None),
}


def _of_transformers(folder: Path) -> float | None:
    """Returns the value in the first file that transformers reads, or None if it finds no file."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    try:
        files, _ = _get_resolved_checkpoint_files(
            pretrained_model_name_or_path=str(folder), subfolder="", variant=None, gguf_file=None, from_tf=False,
            from_flax=False,
            use_safetensors=True, cache_dir=None, force_download=False, proxies=None, local_files_only=True, token=None,
            user_agent={}, revision="main", commit_hash=None, is_remote_code=False,
        )  # fmt: skip
    except OSError:
        return None
    first = next(file for file in files or [] if Path(file).exists())
    tensors = safetensors.numpy.load_file(first)
    return float(tensors.get("a", tensors.get("b"))[0])


def _streamed(folder: Path) -> dict[str, Any]:
    return dict(ow.stream(folder, framework="np"))


def _opened(folder: Path) -> dict[str, Any]:
    with ow.safe_open(folder, "np") as file:
        return {name: file.get_tensor(name) for name in file}


def _converted(folder: Path, out: Path) -> dict[str, Any]:
    ow.convert(folder, out)
    return ow.load_file(out, framework="np")


@pytest.mark.parametrize("case", CASES)
def test_every_function_reads_the_same_files(tmp_path: Path, case: str) -> None:
    """Each function reads the files that docs/folders.md names, or raises the error given there. A converted folder has
    the same model."""
    make, want, _ = CASES[case]
    folder, out = tmp_path / "model", tmp_path / "out"
    folder.mkdir()
    make(folder)
    verbs: list[Callable[[], Any]] = [
        lambda: ow.load_file(folder, framework="np"),
        lambda: ow.load_file(folder, framework="np", filter=lambda name: True),
        lambda: ow.load_file(folder, framework="np", keys=["a", "b", "c"]),
        lambda: _streamed(folder),
        lambda: _opened(folder),
        lambda: _converted(folder, out),
    ]
    if isinstance(want, tuple):
        error, *words = want
        if case != "a pipeline":  # verify and inspect accept a pipeline and read all its models
            verbs += [lambda: ow.verify(folder), lambda: ow.inspect(folder)]
        for verb in verbs:
            with pytest.raises(error) as raised:
                verb()
            assert all(word in str(raised.value) for word in words), raised.value
        assert case == "a pipeline" or not out.exists()
        return
    for verb in verbs:
        tensors = verb()
        assert {name: float(tensor[0]) for name, tensor in tensors.items()} == dict.fromkeys("abc", float(want))
    assert {tensor["name"] for file in ow.inspect(folder)["sources"] for tensor in file["tensors"]} == set("abc")
    ow.verify(folder)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in folder.iterdir())


def test_a_save_replaces_a_set_of_shards(tmp_path: Path) -> None:
    """Saving shards over an earlier set uses new file names and then removes the old files. In an empty folder, the
    usual names are used."""
    names = []
    for value in (1.0, 2.0, 3.0):
        report = ow.save_file({t: np.full(300, value) for t in "abc"}, tmp_path / "model.safetensors", compress=False, max_shard_size=5000)
        names.append(sorted(Path(file).name for file in report.files))
        assert names[-1] == sorted(path.name for path in tmp_path.iterdir())
        assert {float(t[0]) for t in ow.load_file(tmp_path, framework="np").values()} == {value}
    assert names[0] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", _INDEX]
    assert len({name for found in names for name in found}) == 7


@pytest.mark.slow
def test_transformers_reads_the_files_that_the_table_names(tmp_path: Path) -> None:
    """transformers reads the files that the table names: from the original folder, from a converted folder, and from a
    folder that was converted in place and got its missing index."""
    pytest.importorskip("transformers")
    for number, (make, want, theirs) in enumerate(CASES.values()):
        folder, out = tmp_path / f"{number}", tmp_path / f"{number}-out"
        folder.mkdir()
        make(folder)
        assert _of_transformers(folder) == theirs
        if not isinstance(want, tuple):
            ow.convert(folder, out, compress=False, metadata={"made": "anew"})
            assert _of_transformers(out) == theirs
            ow.convert(folder, folder, compress=False, metadata={"made": "anew"})
            assert _of_transformers(folder) == (theirs or (want if make is _whole else None))


def test_a_target_with_a_slash_is_a_folder(tmp_path: Path) -> None:
    """Converting one file to FOLDER/ creates the folder, like the command."""
    ow.save_file({f"{i}": np.full(64, i, "float32") for i in range(8)}, tmp_path / "one.safetensors", compress=False)
    ow.convert(tmp_path / "one.safetensors", f"{tmp_path}/out/", compress=False, max_shard_size=512)
    assert (tmp_path / "out/model.safetensors.index.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.safetensors", "out"]
    assert ow.load_file(tmp_path / "out", framework="np")["7"][0] == 7


def test_an_index_that_does_not_match_its_files(tmp_path: Path) -> None:
    """If an index lists a tensor that its file lacks, load_file, verify and conversion to a folder refuse it."""
    (source := tmp_path / "m").mkdir()
    _shards(source)
    index = json.loads((source / _INDEX).read_text())
    index["weight_map"]["d"] = index["weight_map"]["a"]
    (source / _INDEX).write_text(json.dumps(index))
    for call in (ow.load_file, ow.verify, lambda path: ow.convert(path, tmp_path / "out/")):
        with pytest.raises(ow.FormatError, match='"d".*not in the file'):
            call(source)
    assert not (tmp_path / "out").exists()

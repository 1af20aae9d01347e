"""Tests training checkpoints that torch.distributed.checkpoint saves: they can be loaded, and are saved completely or
not at all."""

from __future__ import annotations

import collections
import errno
import fcntl
import gc
import io
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import stores
import warm
from conftest import ROOT, cleaned, open_files

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from overwire.checkpoints import (  # noqa: E402
    CheckpointReader,
    CheckpointStager,
    CheckpointWriter,
    buffers,
    places,
)
from overwire.checkpoints import manifest as manifests  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def ranks(folder: Path, count: int, *steps: str) -> None:
    """Runs the steps of checkpoint_worker on count ranks, and asserts that all succeed."""
    store = f"store-{count}-{'-'.join(steps)}"
    done = warm.run([ROOT / "tests" / "groups" / "checkpoint_worker.py", folder, store, *steps], env=cleaned() | {"WORLD_SIZE": str(count)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done ") == count * len(steps), done.stdout + done.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves two ranks' training state (FSDP2, AdamW) and DTensors with every kind of sharding."""
    folder = tmp_path_factory.mktemp("saved")
    ranks(folder, 2, "save")
    return folder


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_ranks_resumes(saved: Path, count: int) -> None:
    ranks(saved, count, "load")


def test_a_checkpoint_of_shards_is_a_model(saved: Path) -> None:
    """load_file on the folder returns whole tensors under the names that they have in the model."""
    want = torch.load(saved / "want.pt", weights_only=True)
    got = ow.load_file(saved / "training")
    assert len(list((saved / "training").glob("model-*"))) > 1
    assert set(got) == set(want["model"]) and all(torch.equal(got[name], tensor) for name, tensor in want["model"].items())
    assert ow.verify(saved / "training")["ok"] and ow.verify(saved / "training/training")["ok"]
    moments = ow.load_file(saved / "training/training")
    assert torch.equal(moments["optimizer.state.0.weight.exp_avg"], want["optimizer"]["state"]["0.weight"]["exp_avg"])


def test_ranks_save_in_the_background_and_through_faults(tmp_path: Path) -> None:
    """Ranks can save in the background, with cached plans, and after a full disk, a lack of memory or Ctrl-C on one
    rank. If a rank dies, the save ends on the others."""
    steps = ("background", "mapped", "cached", "short", "failing", "interrupted", "pressed", "dying")
    ranks(tmp_path, 2, *steps)


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    tied = torch.randn(300, 200)
    model = {"a": tied, "b": tied, "c": torch.randn(5, 4)[:, ::2], "empty": torch.empty(0, 3), "scalar": torch.tensor(float(seed))}
    return {"model": model, "optimizer": {"lr": 0.1 + seed, "betas": (0.9, 0.99), "moment": torch.randn(7).double()}, "step": seed}


def same(one: Any, two: Any) -> bool:
    if isinstance(two, dict):
        return set(one) == set(two) and all(same(one[key], two[key]) for key in two)
    return torch.equal(one, two) if isinstance(two, torch.Tensor) else bool(one == two)


def save(at: Any, seed: int = 0, **how: Any) -> None:
    dcp.save(state(seed), storage_writer=CheckpointWriter(at, **how))


def load(at: Any) -> dict[str, Any]:
    into = state(9)
    dcp.load(into, storage_reader=CheckpointReader(at))
    return into


def rewrite(at: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces the tensors of a checkpoint file and keeps its metadata."""
    with ow.safe_open(at, "pt") as file:
        metadata = file.metadata()
    ow.save_file(tensors, at, metadata)


def cause(caught: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    return caught.value.failures[0][0]


def test_one_process(tmp_path: Path) -> None:
    """Tied, strided, empty and zero-dimensional tensors and plain values can be saved and loaded in one process. A
    later save replaces the checkpoint."""
    at = tmp_path / "c"
    for seed, how in enumerate([{}, {"compress": False}, {"max_shard_size": 1000}]):
        save(at, seed, **how)
        assert same(load(at), state(seed)) and same(ow.load_file(at), state(seed)["model"])
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
    with pytest.raises(CheckpointException) as caught:
        save(at, overwrite=False)
    assert isinstance(cause(caught), ow.ArgumentError) and same(load(at), state(2))


def test_a_flat_state_keeps_its_names(tmp_path: Path) -> None:
    """In a state that is already flat, names that begin with "model." keep this prefix."""
    flat = {"model.w": torch.randn(3), "head": torch.randn(2), "step": 5}
    dcp.save(flat, storage_writer=CheckpointWriter(tmp_path / "c"))
    assert set(ow.load_file(tmp_path / "c")) == {"model.w", "head"}
    into = {"model.w": torch.zeros(3), "head": torch.zeros(2), "step": 0}
    dcp.load(into, storage_reader=CheckpointReader(tmp_path / "c"))
    assert same(into, flat)


def test_torch_rebuilds_the_nested_state(tmp_path: Path) -> None:
    """torch can rebuild the nested state from the checkpoint without knowing the state's keys."""
    save(tmp_path / "c", 3)
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    assert same(_load_state_dict_from_keys(storage_reader=CheckpointReader(tmp_path / "c")), state(3))


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    """A save does not replace a folder that contains other files."""
    at = tmp_path / "c"
    at.mkdir()
    (at / "mine").write_text("x")
    for path, text in ((at, "is not a checkpoint"), (at / "mine", "not a folder")):
        with pytest.raises(CheckpointException) as caught:
            save(path)
        assert isinstance(cause(caught), ow.ArgumentError) and text in str(cause(caught))
    assert [path.name for path in at.iterdir()] == ["mine"]
    (at / "mine").unlink()
    save(at, 1)
    (at / "config.json").write_text("{}")
    with pytest.raises(CheckpointException) as caught:
        save(at, 2)
    assert "config.json" in str(cause(caught)) and same(load(at), state(1))
    (at / "config.json").unlink()
    running = places.Place(at, None, True)
    running.begin()
    with pytest.raises(CheckpointException) as caught:
        save(at, 2)
    assert "another save" in str(cause(caught)) and same(load(at), state(1))
    running.drop()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_save_removes_the_leftovers_of_a_killed_save(tmp_path: Path) -> None:
    """A killed save leaves no checkpoint, and the next save removes what it has left."""
    for name in (".c.partial", ".c.partial-01234567"):
        (tmp_path / name / "training").mkdir(parents=True)
        (tmp_path / name / "training/model.safetensors").write_text("half")
    with pytest.raises(ow.NotFoundError):
        CheckpointReader(tmp_path / "c")
    save(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"] and same(load(tmp_path / "c"), state())


def test_a_save_is_refused_while_another_publishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a save publishes, another save to the path is refused, until the first has taken its name and removed the
    checkpoint that it replaced. Neither save loses files."""
    at = tmp_path / "c"
    save(at, 1)
    tries = []

    def meanwhile(original: Any) -> Any:
        def run(*args: Any, **how: Any) -> Any:
            with pytest.raises(ow.ArgumentError, match="another save"):
                places.Place(at, None, True).begin()
            tries.append(original)
            return original(*args, **how)

        return run

    one = places.Place(at, None, True)
    one.begin()
    ow.save_file({"w": torch.ones(3)}, one.make("model.safetensors"))
    one.write("checkpoint.json", GOOD.encode())
    monkeypatch.setattr(places, "_rename_folder", meanwhile(places._rename_folder))
    monkeypatch.setattr(places.shutil, "rmtree", meanwhile(places.shutil.rmtree))
    one.publish(["model.safetensors", "checkpoint.json"])
    monkeypatch.undo()
    assert len(tries) == 2 and set(ow.load_file(at)) == {"w"} and [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_link_that_is_named_like_leftovers(tmp_path: Path) -> None:
    """A link with the name of a killed save's leftovers is removed, but its target is not touched."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/mine").write_text("x")
    for name in (".c.partial", ".c.partial-01234567"):
        (tmp_path / name).symlink_to(tmp_path / "home")
    save(tmp_path / "c")
    assert (tmp_path / "home/mine").read_text() == "x" and same(load(tmp_path / "c"), state())


def test_a_dropped_save_keeps_no_lock(tmp_path: Path) -> None:
    """A save that is dropped releases its lock. torch drops a save without a call to the writer if another rank has
    failed."""
    left = places.Place(tmp_path / "c", None, True)
    left.begin()
    del left
    save(tmp_path / "c", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_disk_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If files cannot be locked, as on Lustre without its flock option, checkpoints are still saved and replaced, and a
    log line says so."""

    def refuse(number: int, kind: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for seed in (1, 2):
        save(tmp_path / "step", seed)
        assert same(load(tmp_path / "step"), state(seed))
    assert "files cannot be locked here (Function not implemented)" in caplog.text
    assert os.listdir(tmp_path) == ["step"]


def test_a_tensor_that_cannot_be_saved(tmp_path: Path) -> None:
    """A tensor that cannot be saved raises a typed error that names it, and the old checkpoint stays."""
    save(tmp_path / "c", 1)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(
            {"w": torch.zeros(3), "odd": torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)},
            storage_writer=CheckpointWriter(tmp_path / "c"),
        )
    error = cause(caught)
    assert isinstance(error, ow.NotSupportedError) and error.tensor == "odd", error
    assert same(load(tmp_path / "c"), state(1)) and len(list(tmp_path.iterdir())) == 1
    for wrong in ({"model": ""}, {"max_shard_size": 0}):
        with pytest.raises(ow.ArgumentError):
            CheckpointWriter(tmp_path / "c", **wrong)


def test_objects_are_unpickled_as_by_weights_only(tmp_path: Path) -> None:
    """An object that torch.load(weights_only=True) would refuse is not created. The error names its class and says how
    to allow it."""
    save(tmp_path / "c")
    at = tmp_path / "c/training/model.safetensors"
    content = ow.load_file(at)
    ran = tmp_path / "ran"

    class Harm:
        def __reduce__(self) -> Any:
            return (open, (str(ran), "w"))

    stored = io.BytesIO()
    torch.save(Harm(), stored)
    rewrite(at, content | {"step": torch.frombuffer(bytearray(stored.getvalue()), dtype=torch.uint8)})
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "c")
    assert isinstance(cause(caught), ow.UntrustedPickleError) and cause(caught).tensor == "step" and not ran.exists()
    assert re.search(r"refuses it: .*io\.open.*add_safe_globals", str(cause(caught))), cause(caught)
    rewrite(at, content | {"step": torch.arange(9, dtype=torch.uint8)})
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "c")
    assert isinstance(cause(caught), ow.UntrustedPickleError)


@pytest.mark.parametrize("name", ["__reduce_ex__", "__reduce__", "__getstate__", "items", "__class__"])
@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: {"a": [(one,)]}], ids=["alone", "inside"])
def test_an_attribute_that_hides_a_method_is_refused(tmp_path: Path, name: str, wrap: Any) -> None:
    """An OrderedDict with an attribute that hides a method is refused before anything calls the attribute."""
    save(tmp_path / "c")
    at = tmp_path / "c/training/model.safetensors"

    class Made:  # pickled as an OrderedDict with extra attributes
        def __reduce__(self) -> Any:
            return (collections.OrderedDict, (), {name: torch.Size, "_metadata": {}})

    stored = io.BytesIO()
    torch.save(wrap(Made()), stored)
    assert torch.load(io.BytesIO(stored.getvalue()), weights_only=True) is not None  # torch itself accepts this object
    rewrite(at, ow.load_file(at) | {"step": torch.frombuffer(bytearray(stored.getvalue()), dtype=torch.uint8)})
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "c")
    assert isinstance(cause(caught), ow.UntrustedPickleError) and cause(caught).tensor == "step"
    assert f"{name!r} hides a method of OrderedDict" in str(cause(caught))


GOOD = json.dumps(
    {"format": "overwire checkpoint", "version": 1, "parts": [{"prefix": "", "files": ["model.safetensors"]}], "bytes": [], "paths": None}
)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "null", "[" * 100_000, '{"a":1,"a":2}', "\udcff", "9" * 5000, GOOD[:-1], GOOD + "x", "NaN",
        *(GOOD.replace('"version": 1', f'"version": {other}') for other in ("2", "true", "1.0", '1, "more": 2', '1, "version": 1')),
        *(GOOD.replace('"bytes": []', f'"bytes": {other}') for other in ("[1]", '["\\ud800"]', "{}", "null")),
        *(GOOD.replace("null", other) for other in ('{"a": []}', '{"a": [null]}', '{"a": [true]}', "[]",
                                                    '{"a": ["b", 9999999]}', '{"a": [-1]}', '{"\\udfff": ["a"]}',
                                                    '{"a": [0' + ", 0" * 40_000 + "]}")),
        GOOD.replace('"prefix": ""', '"prefix": 3'),
        *(GOOD.replace('"version": 1', f'"version": 2, {more}') for more in ('"save": 3, "dtypes": {}', '"save": "x", "dtypes": {}',
                                                                             f'"save": "{"0" * 32}", "dtypes": []',
                                                                             f'"save": "{"0" * 32}", "dtypes": {{"a": "../x"}}')),
        *(GOOD.replace('["model.safetensors"]', other) for other in ("[]", "null", "[1]", '["model.safetensors", "model.safetensors"]',
                                                                    '["model.safetensors", "training/model.safetensors"]')),
        *(GOOD.replace("model.safetensors", name) for name in ("../model.safetensors", "/etc/passwd", "http://x/model.safetensors", "",
                                                              "training/../model.safetensors", "model.safetensors\\n", "other.safetensors",
                                                              "training//model.safetensors")),
    ],
)  # fmt: skip
def test_a_hostile_description(tmp_path: Path, text: str) -> None:
    """An invalid checkpoint.json raises FormatError with its path, before any other file is opened."""
    (tmp_path / "checkpoint.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ow.FormatError) as caught:
        CheckpointReader(tmp_path)
    assert caught.value.source == str(tmp_path / "checkpoint.json")


def test_a_description_that_does_not_match_the_files(tmp_path: Path) -> None:
    """A checkpoint.json that does not match its files raises a typed error: if it names tensors that they lack, if it
    takes a tensor for bytes, or if files are missing."""
    save(tmp_path / "c")
    at = tmp_path / "c/checkpoint.json"
    good = json.loads(at.read_text())

    def refused(error: type[Exception], **change: Any) -> None:
        at.write_text(json.dumps(good | change))
        with pytest.raises(error):
            CheckpointReader(tmp_path / "c")

    refused(ow.CorruptError, bytes=[*good["bytes"], "none"])
    refused(ow.FormatError, bytes=[*good["bytes"], "optimizer.moment"])
    refused(
        ow.CorruptError,
        parts=[{"prefix": "optimizer.", "files": ["model.safetensors"]}, {"prefix": "model.", "files": ["training/model.safetensors"]}],
    )
    refused(ow.NotFoundError, parts=[{"prefix": "", "files": ["model-00001-of-00002.safetensors"]}])
    at.write_text(json.dumps(good | {"bytes": []}))
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path / "c")
    assert caught.value.failures
    at.write_text(json.dumps(good))
    assert same(load(tmp_path / "c"), state())


def test_damage(tmp_path: Path, seed: int) -> None:
    """Whichever byte of a checkpoint is changed, loading raises a typed error or gives the right tensors."""
    save(tmp_path / "c")
    rng = random.Random(seed)
    for file in (tmp_path / "c").rglob("*.*"):
        content = file.read_bytes()
        for at in (rng.randrange(len(content)) for _ in range(15)):
            damaged = bytearray(content)
            damaged[at] ^= 1 << rng.randrange(8)
            file.write_bytes(damaged)
            try:
                got = load(tmp_path / "c")
            except CheckpointException as error:
                assert all(isinstance(one[0], (ow.OverwireError, RuntimeError)) for one in error.failures.values()), (
                    error.failures
                )
            except (ow.OverwireError, RuntimeError):
                pass
            else:
                assert same(got, state()), (file, at)
        file.write_bytes(content)


def test_the_description_is_written_as_it_is_read() -> None:
    """What `encode` writes to checkpoint.json, `decode` reads back. Planner data that cannot be stored is refused."""
    parts = (manifests.Part("m.", ("model.safetensors",)),)
    one = manifests.Manifest(parts, frozenset({"a\n\u00e9"}), {"m.w": ("m", 3)}, "0f" * 16, {"m.w": "complex128"})
    assert manifests.decode(manifests.encode(one), "x") == one
    for wrong in ([], {"a": "b"}, {"a": ()}, {"a": (1.5,)}, {1: ("a",)}, {"a": (1 << 40,)}):
        with pytest.raises(ow.NotSupportedError):
            manifests.paths_of(wrong)


def test_long_paths_use_little_memory() -> None:
    """Reading long paths takes little more memory than their text. Paths over the limit are refused."""
    import tracemalloc

    longest = {f"a{n}": (n, *[0] * 999) for n in range(20)}
    tracemalloc.start()
    try:
        assert manifests.paths_of(longest) == longest
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    with pytest.raises(ow.NotSupportedError):
        manifests.paths_of({"a": (0,) * 1001})


def objects(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_a_store() -> None:
    """A checkpoint in S3 can be loaded, also as a model. It exists once its checkpoint.json is written, and is never
    replaced."""
    with stores.s3() as (options, root):
        at = "s3://models/run/step-1"
        dcp.save(state(1), storage_writer=CheckpointWriter(at, max_shard_size=1000, storage_options=options))
        into = state(9)
        dcp.load(into, storage_reader=CheckpointReader(at, storage_options=options))
        assert same(into, state(1)) and same(ow.load_file(at + "/model.safetensors.index.json", storage_options=options), state(1)["model"])
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state(2), storage_writer=CheckpointWriter(at, storage_options=options))
        assert isinstance(cause(caught), ow.ArgumentError)
        (root / "run/step-1/checkpoint.json").unlink()  # as a killed save leaves it
        with pytest.raises(ow.NotFoundError):
            CheckpointReader(at, storage_options=options)
        dcp.save(state(2), storage_writer=CheckpointWriter(at, storage_options=options))
        dcp.load(into, storage_reader=CheckpointReader(at, storage_options=options))
        assert same(into, state(2)) and same(ow.load_file(at + "/", storage_options=options), state(2)["model"])
        (root / "other").mkdir()
        (root / "other/model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state(2), storage_writer=CheckpointWriter("s3://models/other", storage_options=options))
        assert isinstance(cause(caught), ow.ArgumentError) and objects(root / "other") == {"model.safetensors.index.json"}


def test_two_saves_to_one_path_of_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two simultaneous saves to one path in a store, one makes the checkpoint and keeps its indexes. The other fails
    with a typed error, and its files are removed."""
    with stores.s3() as (options, root):
        at = "s3://models/run/step-1"
        write, first = places.Place.write, [True]

        def other_first(place: places.Place, file: str, text: bytes) -> None:
            if file == "checkpoint.json" and first:
                first.clear()
                dcp.save(state(1), storage_writer=CheckpointWriter(at, storage_options=options))
            write(place, file, text)

        monkeypatch.setattr(places.Place, "write", other_first)
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state(2), storage_writer=CheckpointWriter(at, storage_options=options))
        assert isinstance(cause(caught), ow.ArgumentError) and "another save" in str(cause(caught))
        into = state(9)
        dcp.load(into, storage_reader=CheckpointReader(at, storage_options=options))
        assert same(into, state(1))
        assert len([name for name in objects(root) if name.endswith(".safetensors")]) == 2
        for index in root.rglob("*.index.json"):
            assert {index.parent / name for name in json.loads(index.read_text())["weight_map"].values()} <= {
                *index.parent.iterdir()
            }
        assert len(list(root.rglob("*.index.json"))) == 2


def test_only_rows_of_one_tensor_can_be_joined() -> None:
    """Only parts of a tensor that was cut along its first dimension can be joined. Other parts are refused before
    anything is written."""
    from overwire.frameworks.spec import JoinedTensor

    for parts in (
        [], [torch.tensor(1.0)], [torch.zeros(2, 3), torch.zeros(2, 6).half()], [torch.zeros(2, 3), torch.zeros(2, 4)],
    ):
        with pytest.raises(ow.ArgumentError, match="joined tensor"):
            JoinedTensor(parts).describe()


def test_a_host_without_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system refuses memfds, tensors are staged in memory that is private to the process."""
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "refused")

    monkeypatch.setattr(os, "memfd_create", refuse)
    memory = buffers.host_memory(1000, False)
    assert memory.nbytes == 1000 and not memory.any() and buffers.find_block(memory, buffers.offer_buffers()) is None


@pytest.mark.parametrize("refused", ["training/model-ow", "index.json", "checkpoint.json"])
def test_a_store_that_refuses_a_request(refused: str) -> None:
    """If the store refuses a request, the save raises a typed error and leaves nothing. The next save works."""
    with stores.s3() as (options, root), stores.front(str(options["endpoint_url"])) as (url, between):
        options["endpoint_url"] = url
        at = "s3://models/run/step-1"
        between.refuse = refused
        between.methods = ("PUT", "POST")
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state(1), storage_writer=CheckpointWriter(at, max_shard_size=1000, storage_options=options))
        assert isinstance(cause(caught), ow.AccessError) and objects(root) == set()
        between.refuse = ""
        dcp.save(state(2), storage_writer=CheckpointWriter(at, max_shard_size=1000, storage_options=options))
        into = state(9)
        dcp.load(into, storage_reader=CheckpointReader(at, storage_options=options))
        assert same(into, state(2))


def test_stager(tmp_path: Path) -> None:
    """Staged values do not change when the tensors do. Buffers are reused when they are no longer in use."""
    stager = CheckpointStager()
    tensors = state()
    want = state()
    first = stager.stage(tensors)
    for one in (tensors["model"]["a"], tensors["optimizer"]["moment"]):
        one.zero_()
    assert first["model"]["a"] is first["model"]["b"]
    second = stager.stage(tensors)
    assert same(first, want) and same(second, tensors)
    address = first["model"]["a"].data_ptr()
    del first
    third = stager.stage(tensors)
    assert third["model"]["a"].data_ptr() == address and same(third, tensors) and same(second, tensors)
    with pytest.raises(ow.NotSupportedError):
        stager.stage({"sparse": torch.zeros(3, 3).to_sparse()})
    more = stager.stage({**tensors, "more": torch.arange(100_000)})
    assert same(more, {**tensors, "more": torch.arange(100_000)}) and same(third, tensors)
    stager.close()
    assert len(buffers.offer_buffers().buffers) == 3
    del second, third, more
    gc.collect()
    assert not buffers.offer_buffers().buffers


def test_memory_that_other_ranks_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank maps only memory that was offered to it. If host memory runs out, the rank raises a typed error and leaves
    nothing."""
    memory = buffers.host_memory(5000, False)
    offer = buffers.offer_buffers()
    block = memory[256:300].view(torch.int32)
    block.copy_(torch.arange(11, dtype=torch.int32))
    place = buffers.find_block(block, offer)
    mapped = buffers.map_buffers(offer)
    assert place is not None and mapped is not None
    assert torch.equal(mapped[place.buffer][place.offset :][:44].view(torch.int32), block)
    assert mapped[place.buffer].data_ptr() != memory.data_ptr()
    assert buffers.find_block(memory[::2], offer) is None and buffers.find_block(torch.zeros(3), offer) is None
    (number, name, size), *_ = offer.buffers
    for other in (
        offer._replace(host="another"),
        offer._replace(host=""),
        offer._replace(process=1 << 22),
        offer._replace(buffers=((0, name, size),)),
        offer._replace(buffers=((number, "another", size),)),
    ):
        assert buffers.map_buffers(other) is None, other
    before = open_files()

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(buffers.os, "posix_fallocate", refuse)
    stager = CheckpointStager()
    with pytest.raises(ow.OutOfMemoryError):
        stager.stage({"a": torch.zeros(1 << 20)})
    left = [name for name in open_files() - before if name.startswith("/memfd:overwire")]
    assert not left and buffers.offer_buffers() == offer

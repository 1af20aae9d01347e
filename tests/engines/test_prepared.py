"""Tests prepared state without an engine: storing and restoring tensors, describing models, files and folders.

tests/engines/engines_prepared.py makes models from it in vLLM's real code.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import signal
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
from conftest import open_files
from overwire.integrations.kept_model import keep_files
from overwire.integrations.kept_model.describe_model import Describer
from overwire.integrations.kept_model.keep_files import Refused
from overwire.integrations.kept_model.move_tensors import Arriving, match_processed, put_tensors, take_tensors
from overwire.integrations.load_plan import copies


class Weight(torch.nn.Parameter):
    """A weight with attributes, as in an engine. One attribute is a method of its layer."""


class Guarded(torch.nn.Parameter):
    """A parameter with a property `loader`. Processing replaces it by a parameter with a plain attribute `loader`."""

    @property
    def loader(self) -> Any:
        return self._loader  # type: ignore[attr-defined]


class Manager:
    """An object of an engine that holds a tensor of a layer."""

    __module__ = "engine.managers"

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Weight(torch.arange(96, dtype=torch.float32).view(8, 12), requires_grad=False)
        self.weight.loader = self.load  # type: ignore[attr-defined]
        self.turned = torch.nn.Parameter(torch.arange(60, dtype=torch.bfloat16).view(5, 12).t(), requires_grad=False)
        self.gaps = torch.nn.Parameter(torch.arange(64, dtype=torch.int32).view(8, 8)[:, :5], requires_grad=False)
        self.scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.empty(0, 7), requires_grad=False)
        self.gone = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.bias = None
        self.guarded = Guarded(torch.arange(6.0), requires_grad=False)
        self.guarded._loader = self.load  # type: ignore[attr-defined]
        self.register_buffer("part", self.weight.detach()[2:4])
        self.register_buffer("passing", torch.arange(4).bool(), persistent=False)
        self.register_buffer("eights", torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn))
        self.table = torch.arange(6)
        self.register_buffer("map", torch.arange(5), persistent=False)
        self.manager = Manager(self.map)  # type: ignore[arg-type]
        self.ratio, self.names = 0.1, ["a", ("b", 1)]

    def load(self) -> None: ...


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Layer(), Layer()
        self.head = torch.nn.Linear(12, 8, bias=False)
        self.head.weight = self.one.weight
        self.register_parameter("absent", None)


def processed() -> Model:
    """Returns a model as it is after processing: in its layers, `gone` was removed, and `guarded` and `ratio` were
    replaced."""
    model = Model()
    for layer in (model.one, model.two):
        del layer.gone
        loader, layer.guarded = layer.guarded.loader, torch.nn.Parameter(torch.arange(7.0), requires_grad=False)
        layer.guarded.loader = loader
        layer.ratio = 0.25
    return model


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def kept(model: torch.nn.Module, folder: Path) -> tuple[str, Any]:
    tensors, rows, names = take_tensors(model)
    record = {"names": names, "tensors": rows}
    return keep_files.keep_file(str(folder), "a" * 40, tensors, record, ow.digest(tensors)), record


def made(path: str, record: Any, kind: Callable[[], torch.nn.Module] = Model) -> Any:
    with torch.device("meta"):
        model = kind()
    with contextlib.closing(Arriving(path, record["tensors"], torch.device("cpu"))) as arriving:
        tensors = put_tensors(model, arriving, record["names"], "engine")
        arriving.finish_loading()
    if kind is Model:
        model.one.table = model.one.scale.detach()  # as processing would leave them
    match_processed(model, record["names"], tensors)
    return model


def test_a_model_is_restored_completely(tmp_path: Path) -> None:
    """Bytes, classes, attributes, strides, ties, views and removed parameters are restored."""
    model = processed()
    path, record = kept(model, tmp_path)
    again = made(path, json.loads(json.dumps(record)))

    # The restored model has the same record and the same bytes.
    assert json.loads(json.dumps(take_tensors(again)[1:])) == json.loads(json.dumps(take_tensors(model)[1:]))
    for (name, want), (also, found) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == also
        assert bits(want).equal(bits(found)), name

    # Classes are restored, and attributes that are methods of the tensor's own layer.
    assert type(again.one.weight) is Weight
    assert again.one.weight.loader.__self__ is again.one
    assert again.one.guarded.loader.__self__ is again.one
    assert not hasattr(again.one.guarded, "_loader")

    # Strides.
    assert again.one.turned.stride() == (1, 12)
    assert again.one.gaps.stride() == (8, 1)

    # Ties and views are restored: a write to one tensor changes the other.
    assert again.head.weight is again.one.weight
    assert again.one.manager.table is again.one.map
    again.one.weight.data[2] = 7
    assert torch.equal(again.one.part[0], torch.full((12,), 7.0))

    # Buffers, and tensors that are neither parameters nor buffers, have their values.
    assert again.one.map.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(again.two.table, model.two.table)
    assert "passing" in again.one._non_persistent_buffers_set

    # Parameters that are absent or were removed stay absent.
    assert not hasattr(again.one, "gone")
    assert again.absent is None

    with ow.safe_open(path, framework="pt") as file:
        assert len(file.keys()) == 2 * 10, "tied tensors and views are stored once"


def test_unsupported_models_are_refused(tmp_path: Path) -> None:
    """A model is refused if its tensors overlap only partly or have no memory of their own. A record is refused if a
    tensor has another class, shape or attribute in it than in the new model."""
    model = Model()
    memory = torch.arange(12.0)
    model.one.table, model.two.table = memory[:8], memory[4:]
    with pytest.raises(Refused, match="overlaps only partly with one.table"):
        take_tensors(model)
    with torch.device("meta"), pytest.raises(Refused, match="does not have its own memory"):
        take_tensors(Model())
    model = processed()
    model.one.weight.layout_of = "kernel"  # type: ignore[attr-defined]
    path, record = kept(model, tmp_path)
    with pytest.raises(Refused, match="one.weight has no attribute layout_of"):
        made(path, record)
    record["tensors"]["one.weight"][0] = "engine.Other"
    with pytest.raises(Refused, match="was a engine.Other"):
        made(path, record)
    path, record = kept(processed(), tmp_path)
    record["tensors"]["one.weight"][2] = [8, 11]
    with pytest.raises(Refused, match="has the shape"):
        made(path, record)


def test_the_description_shows_every_change() -> None:
    """The description of a model changes with a flag, an entry of a list, a tensor in an object, a function, or a
    class."""

    class Kernel:
        def __init__(self, scale: torch.Tensor) -> None:
            self.scale, self.kind, self.more = scale, torch.float32, {"a": [1, 2]}

    Kernel.__module__ = "engine.kernels"

    def text(change: Callable[[Any], None]) -> dict[str, dict[str, str]]:
        model = processed()
        model.one.kernel = Kernel(model.one.scale)  # type: ignore[assignment]
        change(model)
        return Describer(model, take_tensors(model)[0], "engine", ("engine.config.",)).describe_modules()

    plain = text(lambda _: None)
    assert plain == text(lambda _: None)
    assert plain["one"]["ratio"] == "0.25"
    assert "of one.scale" in plain["one"]["kernel"]
    for change in (
        lambda m: setattr(m.one, "ratio", 0.5),
        lambda m: m.one.names.append("c"),
        lambda m: m.one.kernel.more["a"].append(3),
        lambda m: setattr(m.one.kernel, "scale", m.one.scale.clone()),
        lambda m: setattr(m.two.weight, "loader", m.one.load),
        lambda m: setattr(m.two, "load", print),
        lambda m: m.two.eval(),
        lambda m: setattr(m.two, "kernel", Kernel(m.two.scale)),
        lambda m: setattr(m.two, "__class__", torch.nn.Module),
    ):
        assert text(change) != plain

    def large(model: Any) -> None:
        model.one.kernel.beside = torch.zeros(1 << 19)

    with pytest.raises(Refused, match="not a parameter or buffer"):
        text(large)


@pytest.mark.parametrize(
    "text", ["{}", "[1]", '{"tensors": [], "names": {}, "modules": {}, "origins": ""}', "[" * 100_000, "nonsense"]
)
def test_a_malformed_record_counts_as_damage(tmp_path: Path, text: str) -> None:
    """A malformed record counts as damage, so its file is removed."""
    path = tmp_path / ("a" * 40 + ".safetensors")
    ow.save_file({}, path, {keep_files.KEY: text})
    path.chmod(0o600)
    with pytest.raises(keep_files.Damaged, match="is damaged"):
        keep_files.find_file(str(tmp_path), "a" * 40)
    assert not path.exists()


NAME, OTHER = "a" * 40, "b" * 40  # fingerprints


def keep_numbers(folder: str, name: str, record: Any) -> str:
    """Stores a tensor of a thousand numbers and returns the path of the file."""
    tensors = {"a": torch.arange(1000)}
    return keep_files.keep_file(folder, name, tensors, record, ow.digest(tensors))


def test_a_stored_file_is_private_and_found_by_its_name(tmp_path: Path) -> None:
    """Only the owner can read the folder and the file. The file and its record are found by the fingerprint."""
    folder = keep_files.ensure_folder(str(tmp_path / "new"))
    record = {"tensors": {}, "names": {}, "modules": {}, "origins": "x"}
    path = keep_numbers(folder, NAME, record)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    found = keep_files.find_file(folder, NAME)
    assert found is not None
    assert found.record == record
    assert keep_files.find_file(folder, OTHER) is None


def test_changed_weights_are_not_kept(tmp_path: Path) -> None:
    """If weights have changed since their digests were computed, no file is written, and earlier files stay."""
    folder, tensors = str(tmp_path), {"a": torch.arange(1000)}
    digests = ow.digest(tensors)
    keep_files.keep_file(folder, NAME, tensors, {}, digests)
    tensors["a"][0] = 1
    with pytest.raises(Refused, match="weights have changed"):
        keep_files.keep_file(folder, OTHER, tensors, {}, digests)
    assert os.listdir(folder) == [f"{NAME}.safetensors"]


def test_the_limit_removes_the_least_recently_used_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a new file exceeds the limit, the least recently used file is removed. A model that is larger than the limit
    is refused."""
    folder = str(tmp_path)
    path = keep_numbers(folder, NAME, {"x": 1})
    two_files = os.path.getsize(path) * 2
    monkeypatch.setattr(keep_files, "_GB", two_files // 200 + 1)
    os.utime(path, (1, 1))
    for name in "bc":
        keep_numbers(folder, name * 40, {"x": 1})
        keep_files.note_use(path)
    assert sorted(file[0] for file in os.listdir(folder)) == ["a", "c"], "b was the least recently used"
    with pytest.raises(Refused, match="OVERWIRE_PREPARED_GB"):
        keep_files.keep_file(folder, "d" * 40, {"a": torch.zeros(1 << 20)}, {}, {})


def test_refusals_damage_and_open_folders_are_reported(tmp_path: Path) -> None:
    """A recorded refusal is raised again. A damaged file is removed. A folder that others may write to is refused."""
    folder = keep_files.ensure_folder(str(tmp_path / "new"))
    keep_files.note_refusal(folder, OTHER, "a reason")
    with pytest.raises(Refused, match="a reason"):
        keep_files.find_file(folder, OTHER)

    path = keep_numbers(folder, NAME, {})
    Path(path).write_bytes(b"\0" * 100)
    with pytest.raises(Refused, match="is damaged"):
        keep_files.find_file(folder, NAME)
    assert not os.path.exists(path)

    os.chmod(folder, 0o777)
    with pytest.raises(Refused, match="other users may write"):
        keep_files.ensure_folder(folder)


def test_the_most_recently_used_file_is_found(tmp_path: Path) -> None:
    """The most recently used fingerprint with a given prefix is found. Files in other folders and unfinished files are
    ignored."""
    assert keep_files.newest_name(str(tmp_path), "a" * 8) is None
    for at, name in enumerate(("a" * 40, "a" * 8 + "b" * 32, "c" * 40)):
        keep_files.keep_file(str(tmp_path), name, {}, {}, {})
        os.utime(tmp_path / f"{name}.safetensors", (at, at))
    (tmp_path / (".begun-1-" + "a" * 40 + ".safetensors")).touch()
    assert keep_files.newest_name(str(tmp_path), "a" * 8) == "a" * 8 + "b" * 32
    keep_files.note_use(str(tmp_path / ("a" * 40 + ".safetensors")))
    assert keep_files.newest_name(str(tmp_path), "a" * 8) == "a" * 40


def test_a_stored_file_is_read_twice(tmp_path: Path) -> None:
    """A new file is read twice, so that the kernel counts its pages as frequently used."""

    def count_bytes() -> int:
        words = Path("/proc/self/io").read_text().split()
        return int(words[words.index("rchar:") + 1])

    tensors = {"a": torch.randint(256, (3_000_001,), dtype=torch.uint8)}
    digests, before = ow.digest(tensors), count_bytes()
    path = keep_files.keep_file(str(tmp_path), "a" * 40, tensors, {}, digests)
    assert count_bytes() - before >= 2 * os.path.getsize(path) > 6_000_000


def test_a_model_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    """Tensors are loaded while the model is made. If making the model fails, the load ends, and its file, thread and
    memory are released."""
    path, record = kept(processed(), tmp_path)
    begun = Arriving(path, record["tensors"], torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), contextlib.closing(begun) as arriving:
        tensors = [weakref.ref(tensor) for tensor in arriving.tensors.values()]
        assert len(tensors) == sum(row[5] is None for row in record["tensors"].values())
        raise ZeroDivisionError
    assert path not in open_files()
    assert all(tensor() is None for tensor in tensors)
    assert not [thread for thread in threading.enumerate() if thread.name == "overwire arriving"]


def test_a_failed_allocation_leaves_nothing(tmp_path: Path) -> None:
    """Memory is allocated while the file is opened. If the allocation fails, no thread and no open file remain."""
    path, record = kept(processed(), tmp_path)
    rows = json.loads(json.dumps(record["tensors"]))
    for at, value, words in ((1, "torch.nothing", "torch does not have the dtype"), (4, "cuda", "was on cuda")):
        changed = {**rows, "two.scale": [*rows["two.scale"][:at], value, *rows["two.scale"][at + 1 :]]}
        with pytest.raises(Refused, match=words):
            Arriving(path, changed, torch.device("cpu"))
        assert path not in open_files()
        assert not [thread for thread in threading.enumerate() if thread.name == "overwire arriving"]


def test_ctrl_c_while_the_file_is_opened_ends_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Ctrl-C interrupts the wait for a file that a thread opens, no thread and no open file remain."""
    path, record = kept(processed(), tmp_path)
    may_open, safe_open = threading.Event(), ow.safe_open
    monkeypatch.setattr(ow, "safe_open", lambda *args, **named: may_open.wait(30) and safe_open(*args, **named))
    join, waits = threading.Thread.join, iter([KeyboardInterrupt])

    def interrupted_join(thread: threading.Thread) -> None:
        for error in waits:
            raise error
        may_open.set()
        join(thread)

    monkeypatch.setattr(threading.Thread, "join", interrupted_join)
    with pytest.raises(KeyboardInterrupt):
        Arriving(path, record["tensors"], torch.device("cpu"))
    assert may_open.is_set()
    assert path not in open_files()
    assert not [thread for thread in threading.enumerate() if thread.name == "overwire arriving"]


def test_tensors_without_dimensions_are_loaded_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales without dimensions are loaded in one call with other tensors. Only tensors with gaps are loaded
    separately."""
    path, record = kept(processed(), tmp_path)
    beside: list[str] = []
    load_copies = copies.load_copies
    monkeypatch.setattr(
        copies, "load_copies", lambda rest, most: (beside.extend(copy.of.name for copy in rest), load_copies(rest, most))
    )
    again = made(path, record)
    assert again.one.scale.item() == 0.5
    assert sorted(beside) == ["one.gaps", "two.gaps"]


def test_a_value_fills_all_elements_of_an_expanded_target(tmp_path: Path) -> None:
    """A tensor without dimensions fills a target with one element, and all elements of an expanded target."""
    ow.save_file({"scale": torch.tensor(0.5)}, tmp_path / "a.safetensors")
    one, many = torch.zeros(1), torch.zeros(3, 2)
    with ow.safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        stored = copies.Stored(file, 0, "scale", "F32", ())
        whole = [copies.Copy(stored, 0, tuple(t.shape), (0,) * t.dim(), t.dtype, t) for t in (one, many)]
        assert [copies.request_of(copy, torch.device("cpu")) is None for copy in whole] == [False, True]
        copies.load_copies(whole, 1 << 20)
    assert one.tolist() == [0.5]
    assert many.tolist() == [[0.5, 0.5]] * 3


def test_a_model_gets_its_tensors_before_they_are_read(tmp_path: Path) -> None:
    """A model gets its tensors while they are read. Only `finish_loading` waits for them."""
    path, record = kept(processed(), tmp_path)
    with torch.device("meta"):
        model = Model()
    with contextlib.closing(Arriving(path, record["tensors"], torch.device("cpu"))) as arriving:
        put_tensors(model, arriving, record["names"], "engine")
        assert arriving._job is not None
        assert model.two.scale.device.type == "cpu"
        arriving.finish_loading()
        assert arriving._job is None
        assert path not in open_files()
    assert torch.equal(model.one.weight, Model().one.weight)


def test_a_tensor_that_the_file_lacks_is_refused(tmp_path: Path) -> None:
    """A record that has more tensors than its file is refused, because a model must not get uninitialised memory."""
    path, record = kept(processed(), tmp_path)
    record["tensors"]["more"] = record["tensors"]["one.weight"]
    with pytest.raises(Refused, match="lacks more"):
        Arriving(path, record["tensors"], torch.device("cpu"))


def test_a_file_that_another_process_removes_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file disappears during a search, it is skipped, and other files are still found."""
    for name in ("a" * 40, "a" * 8 + "b" * 32):
        keep_files.keep_file(str(tmp_path), name, {}, {}, {})
    scan = os.scandir

    @contextlib.contextmanager
    def scandir(folder: str) -> Any:
        with scan(folder) as entries:
            names = list(entries)
        os.unlink(tmp_path / ("a" * 40 + ".safetensors"))
        yield names

    monkeypatch.setattr(os, "scandir", scandir)
    assert keep_files.newest_name(str(tmp_path), "a" * 8) == "a" * 8 + "b" * 32


def test_a_tensor_that_the_record_lacks_is_refused(tmp_path: Path) -> None:
    """If a file has more tensors than its record, nothing is assigned."""
    path, record = kept(processed(), tmp_path)
    rows = dict(record["tensors"])
    rows.pop(next(name for name, row in rows.items() if row[5] is None))
    with pytest.raises(Refused, match="its record does not"):
        Arriving(path, rows, torch.device("cpu"))
    assert path not in open_files()


def test_a_file_that_does_not_load_leaves_nothing(tmp_path: Path) -> None:
    """A file that is missing or damaged, or has other shapes or dtypes, raises an error, and no file stays open."""
    path, record = kept(processed(), tmp_path)
    content = bytearray(Path(path).read_bytes())
    content[8 + int.from_bytes(content[:8], "little") + 300] ^= 1
    damaged, absent = tmp_path / "damaged.safetensors", tmp_path / "absent.safetensors"
    damaged.write_bytes(content)
    own = record["tensors"]
    shape, dtype = json.loads(json.dumps(own)), json.loads(json.dumps(own))
    shape["one.weight"][2:4] = [[12, 8], [8, 1]]
    dtype["one.weight"][1] = "torch.float16"
    for file, rows, error in (
        (damaged, own, ow.CorruptError), (absent, own, ow.NotFoundError), (path, shape, Refused), (path, dtype, Refused)
    ):  # fmt: skip
        with pytest.raises(error):
            Arriving(str(file), rows, torch.device("cpu")).finish_loading()
        assert str(file) not in open_files()


def test_a_load_that_is_dropped_keeps_its_memory(tmp_path: Path) -> None:
    """If an interrupt drops the tensors while the load still writes into them, their memory is freed only when the load
    has ended."""
    path, record = kept(processed(), tmp_path)
    arriving = Arriving(path, record["tensors"], torch.device("cpu"))
    tensors = [weakref.ref(tensor) for tensor in arriving.tensors.values() if tensor.data_ptr() and tensor.dim()]
    number = arriving._job.number
    dense = [tensor for tensor in tensors if tensor().is_contiguous()]  # type: ignore[union-attr]
    del arriving
    assert len(dense) > 4
    assert all(tensor() is not None for tensor in dense)
    del number
    assert all(tensor() is None for tensor in tensors)


def test_other_files_in_a_folder_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a folder is over its limit, only files with fingerprints as names are removed. Other files stay, in case the
    user has chosen a folder of models."""
    others = ["model-00001-of-00002.safetensors", "a" * 39 + ".safetensors", "A" * 40 + ".safetensors", ".begun-notes"]
    for name in others:
        (tmp_path / name).write_bytes(bytes(1000))
        os.utime(tmp_path / name, (1, 1))
    monkeypatch.setattr(keep_files, "_GB", 0)
    for name in "bc":
        keep_files.keep_file(str(tmp_path), name * 40, {}, {}, {})
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "c" * 40 + ".safetensors"])


def test_the_next_writer_removes_files_of_killed_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch_script: Callable[..., Any]
) -> None:
    """A process that is killed while it checks its new file leaves the complete file under a temporary name. The next
    writer removes it before it writes. It does not remove the file of a running writer, or a file so new that its
    writer may not have locked it yet."""
    program = f"""
import os, signal
import overwire as ow, torch
from overwire import stores
from overwire.integrations.kept_model import keep_files
def die(*args, **named): os.kill(os.getpid(), signal.SIGKILL)
STEP = die
tensors = {{"a": torch.arange(1000)}}
keep_files.keep_file({str(tmp_path)!r}, "a" * 40, tensors, {{}}, ow.digest(tensors))
"""
    for step in ("ow.verify", "keep_files._activate_pages", "stores.publish"):
        assert torch_script(program.replace("STEP", step), check=False).returncode == -signal.SIGKILL
    left = sorted(os.listdir(tmp_path))
    assert len(left) == 3
    assert all(name.startswith(".begun-") for name in left)
    for name in left[:2]:
        os.utime(tmp_path / name, (1, 1))
    save = ow.save_file

    def save_file(*args: Any, **named: Any) -> Any:
        assert sorted(os.listdir(tmp_path)) == left[1:], "unfinished files are removed before a new one is written"
        return save(*args, **named)

    monkeypatch.setattr(ow, "save_file", save_file)
    with open(tmp_path / left[1], "rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        path = keep_files.keep_file(str(tmp_path), "a" * 40, {}, {}, {})
    assert sorted(os.listdir(tmp_path)) == [*left[1:], os.path.basename(path)]


def test_two_writers_of_one_file_do_not_interfere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with equal process ids, as in two containers, can write the same file at the same time. Each writer
    checks its own file before the file appears."""
    tensors, others = {"a": torch.zeros(1000)}, {"a": torch.ones(1000)}
    verify, inner = ow.verify, iter([True])

    def verify_late(*args: Any, **named: Any) -> Any:
        result = verify(*args, **named)
        for _ in inner:
            keep_files.keep_file(str(tmp_path), "a" * 40, others, {}, ow.digest(others))
        return result

    monkeypatch.setattr(ow, "verify", verify_late)
    path = keep_files.keep_file(str(tmp_path), "a" * 40, tensors, {}, ow.digest(tensors))
    assert torch.equal(ow.load_file(path)["a"], tensors["a"])
    assert len(os.listdir(tmp_path)) == 1


def test_a_file_that_cannot_be_read_here_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be read because descriptors or memory are exhausted stays for later starts. A file that
    another process has just removed counts as missing."""
    path, _ = kept(processed(), tmp_path)
    for error in (ow.OutOfMemoryError("no memory"), ow.OverwireError("too many files are open"), OSError("no")):
        monkeypatch.setattr(ow, "safe_open", functools.partial(_raise, error))
        with pytest.raises(Refused, match="cannot be read") as caught:
            keep_files.find_file(str(tmp_path), "a" * 40)
        assert not isinstance(caught.value, keep_files.Damaged)
        assert os.path.exists(path)
    monkeypatch.setattr(ow, "safe_open", functools.partial(_raise, ow.NotFoundError("gone")))
    assert keep_files.find_file(str(tmp_path), "a" * 40) is None


def test_temporary_failures_are_not_recorded(tmp_path: Path) -> None:
    """A start that fails because threads, memory or descriptors are exhausted does not record the model as refused. A
    model that does not match is recorded."""
    path, record = kept(processed(), tmp_path)
    before = threading.stack_size(1 << 46)  # larger than the address space, so no thread can start
    try:
        with pytest.raises(RuntimeError, match="can't start new thread") as caught:
            Arriving(path, record["tensors"], torch.device("cpu"))
    finally:
        threading.stack_size(before)
    wrapped = ValueError("the model cannot be made")
    wrapped.__cause__ = caught.value
    for error in (caught.value, wrapped, ow.DeviceError("x"), torch.OutOfMemoryError("x"), OSError(24, "x")):
        assert keep_files.is_passing(error), error
    for error in (Refused("it is another one"), KeyError("w"), RuntimeError("size mismatch")):
        assert not keep_files.is_passing(error), error
    with contextlib.closing(Arriving(path, record["tensors"], torch.device("cpu"))) as arriving:
        arriving.finish_loading()


def _raise(error: Exception, *_: Any, **__: Any) -> Any:
    raise error

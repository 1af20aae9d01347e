"""Tests that errors about wrong arguments name the argument, its value and the expected values."""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
from overwire import _engine, codecs  # noqa: E402
from overwire.model import options, saveoptions  # noqa: E402

LINEAR = torch.nn.Linear(1, 1)
STATE = {"a": torch.arange(10.0), "b": torch.ones(3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Changes to a folder that has a file and a delta for it."""
    path = tmp_path_factory.mktemp("requests")
    before = os.getcwd()
    os.chdir(path)
    ow.save_file(STATE, "m.safetensors")
    ow.save_model(LINEAR, "l.safetensors")
    ow.save_bundle(STATE, "b.pkl")
    ow.save_delta({**STATE, "b": torch.zeros(3)}, STATE, "d.safetensors")
    yield path
    os.chdir(before)


# Valid arguments of each function.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "apply_delta": (ow.apply_delta, {"tensors": dict(STATE), "delta": "d.safetensors"}),
    "compress": (ow.compress, {"source": "m.safetensors", "path": "x.safetensors"}),
    "compress_pickle": (ow.compress_pickle, {"obj": STATE, "path": "x.pkl"}),
    "convert": (ow.convert, {"source": "m.safetensors", "path": "x.safetensors"}),
    "decompress": (ow.decompress, {"source": "m.safetensors", "path": "x.safetensors"}),
    "diff": (ow.diff, {"a": STATE, "b": "m.safetensors"}),
    "digest": (ow.digest, {"tensors": STATE}),
    "doctor": (ow.doctor, {}),
    "experts": (ow.experts, {"rank": 0, "world": 2}),
    "inspect": (ow.inspect, {"source": "m.safetensors"}),
    "load_bundle": (ow.load_bundle, {"path": "b.pkl"}),
    "load_compressed_pickle": (ow.load_compressed_pickle, {"path": "b.pkl"}),
    "load_file": (ow.load_file, {"source": "m.safetensors"}),
    "load_model": (ow.load_model, {"module": LINEAR, "source": "l.safetensors"}),
    "merge_deltas": (ow.merge_deltas, {"deltas": ["d.safetensors"], "path": "x"}),
    "offload": (ow.offload, {"model": LINEAR, "device": "cuda"}),
    "open_delta": (ow.open_delta, {"source": "d.safetensors"}),
    "patch_safetensors": (ow.patch_safetensors, {}),
    "pin": (ow.pin, {"source": "m.safetensors"}),
    "plan": (ow.plan, {"source": "m.safetensors"}),
    "prepare_sleep": (ow.prepare_sleep, {"tensors": 1000}),
    "preload": (ow.preload, {"source": "m.safetensors"}),
    "quiesce": (ow.quiesce, {}),
    "read_bytes": (ow.read_bytes, {"source": "m.safetensors"}),
    "safe_open": (ow.safe_open, {"source": "m.safetensors"}),
    "save_bundle": (ow.save_bundle, {"obj": STATE, "path": "x.pkl"}),
    "save_delta": (ow.save_delta, {"new": STATE, "base": "m.safetensors", "path": "x"}),
    "save_file": (ow.save_file, {"tensors": STATE, "path": "x.safetensors"}),
    "save_model": (ow.save_model, {"module": LINEAR, "path": "x.safetensors"}),
    "sleep": (ow.sleep, {"tensors": dict(STATE)}),
    "stream": (ow.stream, {"source": "m.safetensors"}),
    "verify": (ow.verify, {"source": "m.safetensors"}),
    "codecs.decode": (codecs.decode, {"source": codecs.encode(b"a" * 99)}),
    "codecs.encode": (codecs.encode, {"source": b"a" * 99}),
}

BOOLS = ("no", 3, [])
SWITCHES = "compress digests wait original measure trust strict in_order missing lenient mmap".split()
SIZES = (-1, "4 apples", [], True)
# Wrong values by argument name, and the words in which the message describes the expected values.
WRONG: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "level": ((9, "best", None, ["default"]), get_args(options.Level)),
    "placement": ((9, "best", None), get_args(options.Placement)),
    "read": ((9, "slow", b"auto"), get_args(options.ReadWay)),
    "framework": ((9, "jax", ["pt"]), ("pt", "np", "bytes")),
    "device": ((3.5, "gpu", "cuda:x", [], b"cpu"), ("cpu",)),
    "dtype": ((8, "fp99", "int8"), ("bfloat16",)),
    "bitstream": ((9, "zip", []), codecs.BITSTREAMS),
    "verify": ((9, "x", []), ("True", "False", "always")),
    "algorithm": ((9, []), ("str",)),
    "chunk_size": (("x", []), ("int",)),
    "storage_options": ((3, "token", [1]), ("mapping",)),
    "metadata": ((3, {"a": 1}, {1: "a"}), ("str", "dict", "mapping")),
    "progress": ((3, "yes"), ("True", "callable")),
    "timeout": (("x", -1, []), ("seconds",)),
    "keys": (("a", 3), ("several names",)),
    "filter": ((3, ["a"]), ("callable",)),
    "delta": ((3,), ("path",)),
    "deltas": ((3, "d.safetensors", {}), ("list",)),
    "limit": ((-1, "x", 1.5, True), ("bytes",)),
} | {
    name: (values, expected)
    for names, values, expected in (
        (("max_memory", "max_shard_size", "keep"), SIZES, ("5GB",)),
        (SWITCHES, BOOLS, ("True",)),
    )
    for name in names
}
# Arguments of single functions that mean something else, work only with another argument, or raise another library's
# errors.
OTHER = {
    ("sleep", "storage_options"),
    ("codecs.encode", "level"),
    ("codecs.encode", "dtype"),
    ("patch_safetensors", "device"),
}

TABLE = [
    (name, argument)
    for name, (function, _) in CALLS.items()
    for argument in inspect.signature(function).parameters
    if argument in WRONG and (name, argument) not in OTHER
]


# Engine functions that parse device names and settings. Even a call with a wrong argument may use them.
LOOKS = {"device", "knobs", "shown"}


class Recorder:
    """Replaces the engine's module and records the calls."""

    def __init__(self, module: Any) -> None:
        self.module, self.verbs = module, set[str]()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)
        if name not in ("call", "run", "start"):
            return function

        def note(verb: str, *rest: Any) -> Any:
            self.verbs.add(verb)
            return function(verb, *rest)

        return note


@pytest.mark.parametrize(("name", "argument"), TABLE)
def test_wrong_values(folder: Path, name: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong value of any argument is refused before the engine opens, starts or writes anything. The error names the
    argument and the expected values."""
    function, arguments = CALLS[name]
    values, expected = WRONG[argument]
    before = sorted(path.name for path in folder.iterdir())
    recorder = Recorder(_engine.core())
    monkeypatch.setattr(_engine, "_loaded", recorder)
    for value in values:
        beside = {"wait": False} if name.startswith(("save_", "compress")) and argument == "max_memory" else {}
        with pytest.raises((ow.ArgumentError, ow.NotSupportedError)) as raised:
            list(function(**{**arguments, **beside, argument: value}))
        text = str(raised.value)
        assert argument.removeprefix("max_") in text and "json" not in text and "Go " not in text, text
        assert any(word in text for word in expected), text
    assert sorted(path.name for path in folder.iterdir()) == before
    assert recorder.verbs <= LOOKS


def test_every_function_is_in_the_table() -> None:
    """Each public function that has an argument of WRONG is in CALLS."""
    for name in ow.__all__:
        value = getattr(ow, name)
        if inspect.isfunction(value) and WRONG.keys() & inspect.signature(value).parameters.keys():
            assert name in CALLS, name


@pytest.mark.parametrize("function", [ow.load_file, ow.stream, ow.plan, ow.safe_open, ow.load_model, ow.Pinned.load_file])
def test_signatures_have_the_options(function: Any) -> None:
    """inspect.signature, which the Tab key of a notebook uses, shows each option by name."""
    shown = inspect.signature(function).parameters
    assert "dtype" in shown or function is ow.load_model
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in shown.values())


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (ow.save_file, saveoptions.SaveOptions),
        (ow.save_model, saveoptions.SaveOptions),
        (ow.save_bundle, saveoptions.BundleOptions),
        (ow.compress_pickle, saveoptions.BundleOptions),
        (ow.load_bundle, saveoptions.UnpickleOptions),
        (ow.load_compressed, saveoptions.UnpickleOptions),
        (ow.load_compressed_pickle, saveoptions.UnpickleOptions),
    ],
)
def test_signatures_of_save_functions_have_the_options(function: Any, kind: Any) -> None:
    """Each option of a save function is shown by name with its default. An unknown option is refused."""
    shown = inspect.signature(function).parameters
    assert kind.__optional_keys__ <= shown.keys()
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in shown.values())
    assert {"compress": True, "level": "default", "trust": False}.items() >= {
        (name, one.default) for name, one in shown.items() if name in ("compress", "level", "trust")
    }
    with pytest.raises(TypeError, match="unexpected keyword argument 'compres'"):
        function(STATE, "x.pkl", compres=True) if kind is not saveoptions.UnpickleOptions else function("x.pkl", compres=1)


@pytest.mark.parametrize("timeout", ["x", float("nan"), [], True])
def test_waits_take_seconds(folder: Path, timeout: Any) -> None:
    saving = ow.save_file(STATE, "w.safetensors", wait=False)
    preload, memory = ow.preload("m.safetensors"), ow.prepare_sleep(dict(STATE))
    for wait in (saving.wait, preload.wait, preload.result, memory.wait):
        with pytest.raises(ow.ArgumentError, match="timeout .*: expected seconds"):
            wait(timeout)
    saving.wait()
    preload.cancel()
    os.remove("w.safetensors")


def test_hints_name_arguments_that_the_function_has() -> None:
    """An error never suggests an argument that the function does not have, or the argument that it refuses."""
    calls: list[Any] = [
        lambda: ow.save_file(STATE, "x", framework="pt"), lambda: ow.save_file(STATE, "x", devise="cpu"),
        lambda: ow.load_model(LINEAR, "x", framework="pt"), lambda: ow.load_model(LINEAR, "x", torch_dtype="F16"),
        *(lambda save=save, name=name: save(STATE, "x", **{name: 1})
          for save in (ow.save_file, ow.save_model, ow.save_bundle, ow.compress)
          for name in ("map_location", "device_map", "torch_dtype", "weights_only")),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(TypeError, match="unexpected keyword argument '[a-z_]+'$"):
            call()
    with pytest.raises(TypeError, match="did you mean 'device'"):
        ow.load_file("m.safetensors", devise="cpu")


def test_errors_say_what_to_write_instead(folder: Path) -> None:
    """If a call uses the name that another library gives an argument, the error says what to write instead."""
    for call, text in (
        (lambda: ow.load_file("m.safetensors", map_location="cpu"), "write device='cpu'"),
        (lambda: ow.safe_open("m.safetensors", map_location="cpu"), "write device='cpu'"),
        (lambda: ow.load_file("m.safetensors", torch_dtype="F16"), "write dtype="),
        (lambda: ow.load_file("m.safetensors", weights_only=True), "leave it out"),
        (lambda: ow.load_model(LINEAR, "m.safetensors", map_location="cpu"), "write device='cpu'"),
        (lambda: ow.load_bundle("m.pkl", map_location="cpu"), "write device='cpu'"),
        (lambda: ow.load_file("m.safetensors", treads=1), "did you mean 'read'"),
        (lambda: ow.load_model("m.safetensors"), "load_file('m.safetensors') returns its tensors"),
        (lambda: ow.save_model(STATE, "x"), "save_file saves a dict of tensors"),
        (lambda: ow.save_file(LINEAR, "x"), "save_model saves a module"),
        (lambda: ow.save_file("x", STATE), "the tensors come first"),
        (lambda: ow.digest("m.safetensors"), "load_file('m.safetensors') returns the tensors"),
        (lambda: ow.load_file("m.safetensors", "pt"), "write framework='pt'"),
        (lambda: ow.load_file(io.BytesIO(b"{}").getvalue() + bytes(1)), "not the file's content"),
    ):
        with pytest.raises((ow.ArgumentError, TypeError)) as raised:
            call()
        assert text in str(raised.value), raised.value

"""Tests that the import starts nothing, the public names, logging, and that errors and dtypes match the engine's."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import typing

import overwire
import pytest
from conftest import ROOT
from overwire import dtypes, errors


def test_import_starts_nothing(script) -> None:
    script(
        """
import sys, threading, os
before = set(sys.modules)
threads = os.listdir("/proc/self/task")  # an emulator may add a thread
import overwire
new = set(sys.modules) - before
assert new == {"overwire", "overwire._imports"}, new
assert threading.active_count() == 1 if "threading" in sys.modules else True
assert os.listdir("/proc/self/task") == threads
"""
    )


def test_submodules_import_neither_torch_nor_numpy(script) -> None:
    script(
        """
import sys, overwire
for name in overwire.__all__:
    getattr(overwire, name)
assert not {"torch", "numpy", "ml_dtypes", "overwire._core"} & set(sys.modules)
"""
    )


def test_a_load_prepares_its_gpu_before_it_imports_its_modules(script) -> None:
    """The GPU and the process then start at the same time."""
    script(
        """
import sys, overwire
from overwire.frameworks import choose
class Prepared(Exception): pass
def prepare(device, exchange):
    assert (device, exchange) == ("cuda:63", 0)
    assert not {"overwire.model.opened", "overwire.frameworks.torch", "torch"} & set(sys.modules)
    raise Prepared
choose._verbs.prepare = prepare
try:
    overwire.load_file("no such file", device="cuda:63")
except Prepared:
    sys.exit()
sys.exit("no GPU was prepared")
"""
    )


def test_all_names_resolve_and_are_documented() -> None:
    for name in overwire.__all__:
        if name != "__version__":
            assert getattr(overwire, name).__doc__, name
    assert dir(overwire) == sorted(overwire.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        overwire.no_such  # noqa: B018


def test_types_of_options_can_be_extended() -> None:
    """A program can add keys to the types of overwire's options, and libraries can examine these types."""

    class Settings(overwire.LoadOptions):
        retries: int

    assert Settings.__required_keys__ == {"retries"} and "mmap" in Settings.__optional_keys__
    assert typing.is_typeddict(overwire.LoadOptions)


def test_one_exception_for_each_class_of_the_engine() -> None:
    source = (ROOT / "gosrc/errs/errs.go").read_text()
    names = re.findall(r'\{Err\w+, "(\w+)", "', source)
    assert len(names) >= 14
    for name in names:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.OverwireError), name
        assert kind.__mro__[2] is not Exception, f"{name} has no built-in base class"


@pytest.mark.parametrize("name", [n for n in errors.__all__])
def test_errors_pickle_and_show_their_message(name: str) -> None:
    made = getattr(errors, name)("overwire: what: why", source="s", tensor="t", chunk=3, offset=4096)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made)
    assert str(again) == "overwire: what: why"
    assert (again.source, again.tensor, again.chunk, again.offset) == ("s", "t", 3, 4096)


def test_the_dtype_table_equals_the_engines() -> None:
    source = (ROOT / "gosrc/tensor/dtype.go").read_text()
    table = {name: int(bits) for name, bits in re.findall(r'\{"(\w+)", (\d+)\}', source)}
    assert table == dtypes.BITS


def test_log_level_comes_from_the_environment() -> None:
    code = "import logging, overwire as ow\now.doctor()\nprint(logging.getLogger('overwire').level)"
    # Many programs use the variables DEBUG and SILENT, so overwire reads them only with nyacomp's drop-in.
    drop_in = "import overwire.compat.nyacomp\n"
    for env, more, level in (
        ({}, "", "0"), ({"OVERWIRE_LOG": "error"}, "", "40"), ({"SILENT": "1", "NUM_THREADS": "x"}, "", "0"), ({"DEBUG": "1"}, "", "0"),
        ({"SILENT": "1"}, drop_in, "100"), ({"DEBUG": "1"}, drop_in, "10"), ({"DEBUG": "1", "OVERWIRE_LOG": "info"}, drop_in, "20"),
    ):  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", more + code], env={**os.environ, **env}, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == [level], (env, done.stderr)
        assert "NUM_THREADS" not in done.stderr
    late = subprocess.run([sys.executable, "-c", code + "\n" + drop_in], env={**os.environ, "DEBUG": "1"}, capture_output=True, text=True)
    assert late.returncode == 0 and "DEBUG: no effect" in late.stderr


def test_log_lines_are_printed_on_request(script) -> None:
    """OVERWIRE_LOG=info prints a line on stderr for each load and save, unless the program has configured logging."""
    source = """
import logging, sys
import numpy, overwire as ow
ow.save_file({"a": numpy.arange(1e5, dtype="float32"), "b": numpy.ones(3)}, "m")
ow.load_file("m", framework="np")
with ow.safe_open("m", "np") as file:
    file["b"]
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
ow.load_file("m", framework="np")
ow.load_file("m", framework="np", keys=["b"])
"""
    said = script(source, OVERWIRE_LOG="info")
    lines = said.stderr.splitlines()
    assert [" ".join(line.split()[:4]) for line in lines] == ["overwire: saved 2 tensors,", "overwire: loaded 2 tensors,"]
    assert " as " in lines[0] and " GB/s" in lines[1]
    assert [line.split()[:2] for line in said.stdout.splitlines()] == [["INFO", "loaded"]]
    for env in ({}, {"OVERWIRE_LOG": "warning"}, {"OVERWIRE_LOG": "silent"}):
        said = script(source, **env)
        assert said.stdout == said.stderr == "", env
    said = script(source, OVERWIRE_LOG="debug")
    assert "loaded 1 tensor, 24 B" in said.stderr and '"stages":' in said.stderr and "DEBUG load: {" in said.stdout


def test_a_report_in_a_line() -> None:
    """The log line of a load, save or fetch gives sizes, seconds and the rate, with units and in correct English."""
    from overwire.jobs import sentence

    stages = {"read_ns": 10, "answer_ns": 0, "permit_ns": 60, "check_ns": 5, "decode_ns": 20, "wait_ns": 5}
    load = {"tensors": 290, "bytes": 2_000_000_000, "mapped": 0, "seconds": 0.4, "stages": stages}
    assert sentence("load", load) == "loaded 290 tensors, 2 GB in 0.4 s, 5.00 GB/s, 70 % of the work reading"
    assert sentence("load", load | {"mapped": 2_000_000_000}) == "loaded 290 tensors, 2 GB (all of it mapped, not read) in 0.4 s"
    half = "loaded 290 tensors, 2 GB (1.5 GB of it mapped, not read) in 0.4 s, 1.25 GB/s, 70 % of the work reading"
    assert sentence("load", load | {"mapped": 1_500_000_000}) == half
    assert sentence("load", {"tensors": 1, "bytes": 0, "seconds": 0}) == "loaded 1 tensor, 0 B in less than 1 ms"
    joined = load | {"seconds": 2e-5, "stages": dict.fromkeys(stages, 0) | {"workers": 0}}
    assert sentence("load", joined) == "loaded 290 tensors, 2 GB in less than 1 ms, because they were preloaded"
    save = {"tensors": 1234, "bytes_in": 4_500, "bytes_out": 2_999_999, "seconds": 2.0}
    assert sentence("save", save) == "saved 1,234 tensors, 4.5 kB as 3 MB in 2 s, 0.00 GB/s"
    stages = {"plan_ns": 5, "read_ns": 5, "encode_ns": 20, "hash_ns": 10, "write_ns": 50, "publish_ns": 10}
    busy = sentence("save", save | {"stages": stages})
    assert busy == "saved 1,234 tensors, 4.5 kB as 3 MB in 2 s, 0.00 GB/s, 60 % of the work writing"
    assert sentence("fetch", {"bytes": 10**15, "seconds": 1e6}) == "fetched 1 PB in 1e+06 s, 1.00 GB/s"
    assert sentence("presign", {"url": ""}) == ""


@pytest.mark.parametrize("module", ["fastsafetensors", "nyacomp", "safetensors.torch"])
def test_drop_ins_import_the_functions_that_they_call(script, module: str) -> None:
    """Importing a drop-in also imports the modules that its first load needs."""
    verbs = {"fastsafetensors": ("stream",), "nyacomp": ("bundles.bundle", "bundles.loading"), "safetensors.torch": ("open",)}[module]
    script(
        f"""
import sys
import overwire.compat.{module}
for name in {verbs!r}:
    assert "overwire." + (name if "." in name else "verbs." + name) in sys.modules, name
assert "overwire._core" not in sys.modules
"""
    )

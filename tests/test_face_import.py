"""Importing overwire does no work, and its tables are those of the engine."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys

import overwire
import pytest
from conftest import ROOT
from overwire import dtypes, errors


def test_import_starts_nothing(script) -> None:
    script(
        """
import sys, threading, os
before = set(sys.modules)
import overwire
new = set(sys.modules) - before
assert new == {"overwire"}, new
assert threading.active_count() == 1 if "threading" in sys.modules else True
assert len(os.listdir("/proc/self/task")) == 1
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


def test_all_names_resolve_and_are_documented() -> None:
    for name in overwire.__all__:
        if name != "__version__":
            assert getattr(overwire, name).__doc__, name
    assert dir(overwire) == sorted(overwire.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        overwire.no_such  # noqa: B018


def test_one_exception_for_each_class_of_the_engine() -> None:
    source = (ROOT / "gosrc/fault/fault.go").read_text()
    names = re.findall(r'\{Err\w+, "(\w+)", "', source)
    assert len(names) >= 14
    for name in names:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.OverwireError), name
        assert kind.__mro__[2] is not Exception, f"{name} has no built-in beside it"


@pytest.mark.parametrize("name", [n for n in errors.__all__])
def test_errors_pickle_and_show_their_message(name: str) -> None:
    made = getattr(errors, name)("overwire: what: why", source="s", tensor="t", chunk=3, offset=4096)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made)
    assert str(again) == "overwire: what: why"
    assert (again.source, again.tensor, again.chunk, again.offset) == ("s", "t", 3, 4096)


def test_dtype_table_is_the_engines() -> None:
    source = (ROOT / "gosrc/tensor/dtype.go").read_text()
    table = {name: int(bits) for name, bits in re.findall(r'\{"(\w+)", (\d+)\}', source)}
    assert table == dtypes.BITS


def test_files_stay_small() -> None:
    for path in (ROOT / "python/overwire").rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 600, path


def test_log_level_comes_from_the_environment() -> None:
    code = (
        "import logging, overwire as ow\n"
        "ow.doctor()\n"
        "print(logging.getLogger('overwire').level)"
    )
    for env, level in (({}, "0"), ({"OVERWIRE_LOG": "error"}, "40"), ({"SILENT": "1"}, "100"), ({"DEBUG": "1"}, "10")):
        done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [level], (env, done.stderr)

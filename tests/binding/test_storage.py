"""Tests that all storage_options reach the engine, and that errors name wrong options."""

from __future__ import annotations

import re
from pathlib import Path

import overwire as ow
import pytest
from overwire import _environment
from overwire.model import storage

ROOT = Path(__file__).resolve().parents[2]


def test_environment_names_equal_the_engines() -> None:
    """Python passes exactly the variables that the engine lists, with proxies in upper and lower case."""
    text = (ROOT / "gosrc/source/options.go").read_text()
    listed = re.findall(r'"([A-Z_*]+)"', text[text.index("var EnvNames") : text.index("// Check refuses")])
    proxies = {name.lower() for name in listed if name.endswith("_PROXY")}
    assert {*listed, *proxies} == {*_environment._NAMES, *(name + "*" for name in _environment._PREFIXES)} and proxies


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment variables are read at each call."""
    monkeypatch.setenv("AWS_REGION", "one")
    monkeypatch.setenv("https_proxy", "http://p")
    monkeypatch.setenv("OTHER_SECRET", "x")
    found = _environment.environment()
    assert found["AWS_REGION"] == "one" and found["https_proxy"] == "http://p" and "OTHER_SECRET" not in found
    monkeypatch.setenv("AWS_REGION", "two")
    assert _environment.environment()["AWS_REGION"] == "two"


def test_values_become_text() -> None:
    """Booleans, numbers, paths and headers become strings. An option that is None is left out."""
    made = storage.storage({"anon": True, "timeout": 2.5, "cacert": Path("/x"), "key": None, "headers": {"A": 1}}, ["s3://b/k"])
    assert made["storage"] == {"anon": "true", "timeout": "2.5", "cacert": "/x", "header.A": "1"}
    assert storage.storage(None, ["/x", "file:///y"]) == {}


@pytest.mark.parametrize("options", [[("a", 1)], {"a": object()}, {1: "a"}, {"headers": "x"}])
def test_unknown_options(options: object) -> None:
    """An unknown option is refused before anything is opened."""
    with pytest.raises(ow.ArgumentError, match="storage_options"):
        ow.load_file("s3://bucket/key", storage_options=options)


def test_local_paths_accept_no_options(tmp_path: Path) -> None:
    """Options for a local path raise an error, unless they are empty."""
    path = tmp_path / "a.safetensors"
    numpy = pytest.importorskip("numpy")
    ow.save_file({"x": numpy.zeros(3)}, path, storage_options={})
    for call in (ow.load_file, ow.stream, ow.safe_open, ow.inspect, ow.verify, ow.preload, ow.plan):
        with pytest.raises(ow.ArgumentError, match="local path"):
            call(path, storage_options={"token": "x"})
    for none in (None, {"token": None}):  # an option that is None counts as unset
        assert list(ow.load_file(path, framework="np", storage_options=none)) == ["x"]


def test_insecure_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """Disabling the certificate check causes one warning per process."""
    storage._warn_once.cache_clear()
    for _ in range(3):
        storage.storage({"insecure": True}, ["https://h/x"])
    assert len([r for r in caplog.records if "insecure" in r.message]) == 1

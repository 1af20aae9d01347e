"""Tests that every function opens, writes and reports the bytes os.fsencode(name), whatever bytes these are."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote_from_bytes

import numpy as np
import overwire as ow
import pytest
from overwire import stores
from overwire.bundles.manifest import Manifest
from overwire.compat.nyacomp import manifests
from overwire.model import sources

# File names without their extensions. Bytes that are not UTF-8 must never become U+FFFD.
STEMS = {
    "latin-1": b"caf\xe9",
    "another": b"caf\xe8",
    "U+FFFD": "caf\ufffd".encode(),
    "cut off": b"\xe2\x82",
    "surrogate in UTF-8": b"\xed\xb3\xa9",
    "pair": "\U0001f600".encode(),
    "low half of a pair": "\U00010080".encode(),
    "escapes": b"%E9 \\udce9 ?#&+",
    "line break": b"a\nb\r\xe9",
    "spaces": b"  a  \xe9 ",
    "dash": b"-o\xe9",
    "dots": b"..\xe9..",
    "long": b"\xe9" * 219,
    "line separators": "a\x0b\x1c\x85\u2028b".encode() + b"\xe9",
}


def files(folder: Path) -> dict[bytes, bytes]:
    """Returns the contents of every file in a folder by the bytes of its name."""
    found = {}
    for here, _, names in os.walk(os.fsencode(folder)):
        for name in names:
            path = os.path.join(here, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, os.fsencode(folder))] = file.read()
    return found


class Bytes:
    """A path that returns bytes from __fspath__."""

    def __init__(self, path: bytes) -> None:
        self.path = path

    def __fspath__(self) -> bytes:
        return self.path


FORMS: list[Callable[[bytes], Any]] = [lambda path: path, os.fsdecode, lambda path: Path(os.fsdecode(path)), Bytes]


def test_every_function(tmp_path: Path) -> None:
    """Each Python function accepts names as bytes, strings and paths. 14 similar names stay 14 separate files."""
    folder = os.fsencode(tmp_path)
    for number, stem in enumerate(STEMS.values()):
        path = os.path.join(folder, stem + b".safetensors")
        form = FORMS[number % len(FORMS)]
        report = ow.save_file({"x": np.full(9, number, "f4")}, form(path), compress=number % 2 == 0)
        assert os.fsencode(report.files[0]) == path
    assert set(files(tmp_path)) == {stem + b".safetensors" for stem in STEMS.values()}
    for number, stem in enumerate(STEMS.values()):
        path = os.path.join(folder, stem + b".safetensors")
        for form in FORMS:
            assert ow.load_file(form(path), framework="np")["x"][0] == number, stem
        with ow.safe_open(path, "np") as file:
            assert file.get_slice("x")[3:4] == number
        assert next(iter(ow.stream(path, framework="np")))[1][0] == number
        assert os.fsencode(ow.inspect(path)["sources"][0]["uri"]) == path
        assert ow.verify(path)["ok"]
        job = ow.preload(path)
        assert [os.fsencode(uri) for uri in job.uris] == [path] and job.wait(60)
        assert ow.load_file([path], framework="np")["x"][0] == number
        assert ow.read_bytes(path) == files(tmp_path)[stem + b".safetensors"]
        with stores.ObjectReader(path) as reader:
            assert reader.read() == ow.read_bytes(path)
        uri = "file://" + quote_from_bytes(path)
        assert ow.read_bytes(uri) == ow.read_bytes(path)
        assert ow.load_file(uri, framework="np")["x"][0] == number
        other = os.path.join(folder, b"out", stem + b".safetensors")
        os.makedirs(os.path.dirname(other), exist_ok=True)
        assert os.fsencode(ow.convert(path, other, compress=False).files[0]) == other
        assert ow.load_file(uri.replace(quote_from_bytes(path), quote_from_bytes(other)), framework="np")["x"][0] == number
        ow.save_file({"x": np.full(9, number, "f4")}, uri)  # to the same file
    assert len(files(tmp_path)) == 2 * len(STEMS)
    folders = [os.path.join(folder, stem) for stem in STEMS.values()]
    for number, place in enumerate(folders):
        os.mkdir(place)
        tensors = {"x": np.full(999, number, "f4"), "y": np.arange(999, dtype="f4") + number}
        report = ow.save_file(tensors, os.path.join(place, b"model.safetensors"), max_shard_size=4000)
        assert len(report.files) == 3 and {os.path.dirname(os.fsencode(name)) for name in report.files} == {place}
    for number, place in enumerate(folders):
        for source in (place, os.path.join(place, b"model.safetensors.index.json")):
            assert ow.load_file(source, framework="np", keys=["y"])["y"][0] == number
    ow.convert(folders[0], folders[1] + b"x/")
    assert set(files(Path(os.fsdecode(folders[1] + b"x")))) == set(files(Path(os.fsdecode(folders[0]))))


def test_bundles(tmp_path: Path) -> None:
    """The pickle, its container and the entry in meta.csv have the exact name. Names that are too long, or that
    meta.csv cannot list, are refused before anything is written."""
    for number, (what, stem) in enumerate(STEMS.items()):
        place = tmp_path / str(number)
        place.mkdir()
        path = os.fsencode(place) + b"/" + stem + b".pkl"
        obj = {"n": number, "w": np.full(999, number, "f4")}
        if b"\n" in stem:
            with pytest.raises(ow.ArgumentError, match="line break"):
                ow.compress_pickle(obj, path)
            assert files(place) == {} and not (place / "nya").exists()
            continue
        ow.compress_pickle(obj, path)
        ow.compress_pickle(obj, path)
        assert set(files(place)) == {stem + b".pkl", b"nya/" + stem + b".safetensors", b"nya/meta.csv"}, what
        for source in (path, os.fsencode(place / "nya/meta.csv")):
            job = ow.preload(source)
            assert [os.fsencode(uri) for uri in job.uris] == [os.fsencode(place) + b"/nya/" + stem + b".safetensors"] and job.wait(60)
            assert os.fsencode(ow.inspect(source)["sources"][0]["uri"]) == os.fsencode(job.uris[0])
            assert ow.verify(source)["ok"]
            assert ow.load_compressed_pickle(path)["n"] == number
        (row,) = manifests.read_csv(place / "nya/meta.csv").rows
        assert os.path.samefile(row.filename, os.fsencode(job.uris[0]))
    deep = tmp_path / "a\nfolder" / os.fsdecode(b"\xe9")
    deep.mkdir(parents=True)
    ow.compress_pickle({"w": np.ones(99)}, deep / "x.pkl")
    assert Manifest.read_csv(str(deep / "nya/meta.csv")).list_containers() == [str(deep / "nya/x.safetensors")]
    for name in ("x" * 251 + ".pkl", "x" * 245 + ".pkl"):
        with pytest.raises(ow.ArgumentError):
            ow.compress_pickle({"w": np.ones(9)}, tmp_path / name)
    assert not (tmp_path / "nya").exists()
    for what in (1, 2):  # valid, but too long with ".old"
        ow.compress_pickle({"n": what, "w": np.ones(99)}, tmp_path / ("x" * 240 + ".pkl"))
        assert ow.load_compressed_pickle(tmp_path / ("x" * 240 + ".pkl"))["n"] == what


def test_the_command_line(tmp_path: Path) -> None:
    """Each command accepts any name as an argument and for -o, and reports it correctly in text and in JSON."""

    def run(*words: bytes, rc: int = 0) -> bytes:
        done = subprocess.run([os.fsencode(sys.executable), b"-m", b"overwire", *words], cwd=tmp_path, capture_output=True, timeout=120)
        assert done.returncode == rc, (words, done.stderr)
        return done.stdout if rc == 0 else done.stderr

    name, twin = b"caf\xe9.safetensors", "caf\ufffd.safetensors".encode()
    for number, path in enumerate((name, twin)):
        ow.save_file({"x": np.full(9, number, "f4")}, os.path.join(os.fsencode(tmp_path), path), compress=False)
    before = files(tmp_path)[twin]
    assert run(b"inspect", name).startswith(name)
    assert os.fsencode(json.loads(run(b"inspect", b"--json", name))["sources"][0]["uri"]) == name
    assert os.fsencode(json.loads(run(b"verify", b"--json", name))["files"][0]["uri"]) == name
    run(b"load", name)
    out = b"-out\xe9.ow.safetensors"
    assert os.fsencode(json.loads(run(b"compress", b"--json", b"--output=" + out, b"--", name))["files"][0]) == out
    run(b"decompress", b"-o", b"d\xe9.safetensors", b"--", out)
    run(b"convert", b"-o", b"c\xe9.safetensors", name)
    assert run(b"fetch", name) == files(tmp_path)[name]
    run(b"fetch", b"-o", b"f\xe9", name)
    assert set(files(tmp_path)) == {name, twin, out, b"d\xe9.safetensors", b"c\xe9.safetensors", b"f\xe9"}
    assert files(tmp_path)[twin] == before and files(tmp_path)[b"f\xe9"] == files(tmp_path)[name]
    for made in (out, b"d\xe9.safetensors", b"c\xe9.safetensors", b"f\xe9"):
        assert ow.load_file(os.path.join(os.fsencode(tmp_path), made), framework="np")["x"][0] == 0
    assert b"none\xe9" in run(b"inspect", b"none\xe9", rc=3)
    assert b"sure\xe9" in run(b"inspect", b"sure\xe9", rc=3)


def test_names_that_no_file_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that os.fsencode refuses, NUL bytes and malformed URIs raise ArgumentError in every function, and nothing
    is written."""
    monkeypatch.chdir(tmp_path)
    tensors = {"x": np.ones(3)}
    ow.save_file(tensors, "m.safetensors")
    before = files(tmp_path)
    paths = ["a\ud800", "\udc7f", "a\0b", b"a\0b", "", 7, None, object()]
    uris = ["http://127.0.0.1:1/\udce9", b"s3://b/\xff", "redis://h/\ud800", "file:///x%00y", "file:///x?y", "file:///x#y", "file://host/x"]
    for bad in [*paths, *uris]:
        verbs: list[Callable[[], object]] = [
            lambda: ow.load_file(bad, framework="np"),  # type: ignore[arg-type]  # noqa: B023
            lambda: ow.save_file(tensors, bad),  # type: ignore[arg-type]  # noqa: B023
            lambda: ow.safe_open(bad),  # type: ignore[arg-type]  # noqa: B023
            lambda: list(ow.stream(bad)),  # type: ignore[arg-type]  # noqa: B023
            lambda: ow.inspect(bad),  # type: ignore[arg-type]  # noqa: B023
            lambda: ow.verify(bad),  # type: ignore[arg-type]  # noqa: B023
            lambda: ow.convert("m.safetensors", bad),  # type: ignore[arg-type]  # noqa: B023
            lambda: ow.convert(bad, "out.safetensors"),  # type: ignore[arg-type]  # noqa: B023
            lambda: ow.compress_pickle(tensors, bad),  # type: ignore[arg-type]  # noqa: B023
            lambda: ow.load_compressed_pickle(bad),  # type: ignore[arg-type]  # noqa: B023
            lambda: ow.read_bytes(bad),  # type: ignore[arg-type]  # noqa: B023
            lambda: ow.preload(bad).wait(60),  # type: ignore[arg-type]  # noqa: B023
        ]
        for verb in verbs:
            with pytest.raises((ow.ArgumentError, ow.NotSupportedError)):
                verb()
            assert files(tmp_path) == before, bad


def test_errors_have_the_name_and_can_be_printed(tmp_path: Path) -> None:
    """The `source` of an error is the name as os.fsdecode returns it. The message can be printed to any stream."""
    path = os.path.join(os.fsencode(tmp_path), b"none\xe9")
    verbs: list[Callable[[bytes], object]] = [ow.load_file, ow.read_bytes, ow.load_compressed_pickle, ow.inspect]  # type: ignore[list-item]
    for verb in verbs:
        with pytest.raises(ow.NotFoundError) as raised:
            verb(path)
        assert raised.value.source is not None and os.fsencode(raised.value.source) == path
        assert "none\\udce9" in str(raised.value).encode("utf-8").decode()


def test_dots_after_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """".." is resolved as the kernel does: link/../x is next to the target of the link."""
    (tmp_path / "real/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real/deep")
    ow.save_file({"x": np.zeros(3)}, tmp_path / "x.safetensors")
    monkeypatch.chdir(tmp_path)
    name = "link/../x.safetensors"
    for number, path in enumerate((name, f"{tmp_path}/{name}", f"file://{tmp_path}/{name}"), start=1):
        ow.save_file({"x": np.full(3, number)}, path)
        assert ow.load_file(path, framework="np")["x"][0] == ow.load_file("real/x.safetensors", framework="np")["x"][0] == number
        assert ow.read_bytes(path) == (tmp_path / "real/x.safetensors").read_bytes()
    ow.compress_pickle({"n": 1, "w": np.ones(9)}, "link/../b.pkl")
    assert ow.load_compressed_pickle("real/b.pkl")["n"] == 1
    assert ow.load_file("x.safetensors", framework="np")["x"][0] == 0 and not (tmp_path / "b.pkl").exists()


def test_other_bytes_stay_data(tmp_path: Path) -> None:
    """Strings that are stored in files must be Unicode. Others are refused, and no byte is replaced."""
    path = tmp_path / "m.safetensors"
    for metadata in ({"k": "\udce9"}, {"\udce9": "v"}, {"k": "\ud800"}):
        with pytest.raises(ow.ArgumentError):
            ow.save_file({"x": np.ones(3)}, path, metadata)
    with pytest.raises(ow.ArgumentError, match="UTF-8"):
        ow.save_file({"x": np.ones(9), "y": np.ones(9)}, os.fsencode(tmp_path) + b"/caf\xe9.safetensors", max_shard_size=72)
    assert list(tmp_path.iterdir()) == []
    ow.save_file({"x": np.ones(3)}, path, {"k": "\U00010080\ufffd"})
    with ow.safe_open(path, "np") as file:
        assert file.metadata() == {"k": "\U00010080\ufffd"}
    with pytest.raises(ow.TensorNotFoundError):
        ow.load_file(path, framework="np", keys=["\udce9"])


def test_the_environment(tmp_path: Path, script) -> None:
    """OVERWIRE_PRELOAD and OVERWIRE_TRACE accept names with any bytes."""
    name = os.fsdecode(b"caf\xe9.safetensors")
    ow.save_file({"x": np.zeros(9, "f4")}, tmp_path / name)
    ow.save_file({"x": np.ones(9, "f4")}, tmp_path / "caf\ufffd.safetensors")
    trace = os.fsdecode(b"trace\xe9")
    done = script(
        "import logging; logging.basicConfig()\n"
        "import os, overwire as ow\np = os.fsdecode(b'caf\\xe9.safetensors')\nassert ow.load_file(p, framework='np')['x'][0] == 0",
        OVERWIRE_PRELOAD=name, OVERWIRE_TRACE=trace, OVERWIRE_LOG="debug", PYTHONPATH=os.environ.get("PYTHONPATH", ""),
    )  # fmt: skip
    assert "joins its preload" in done.stderr
    assert set(files(tmp_path)) == {b"caf\xe9.safetensors", "caf\ufffd.safetensors".encode(), b"trace\xe9"}


def test_names_in_a_latin_1_locale(tmp_path: Path, script, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Python's file names are not UTF-8, a name that is not ASCII is refused, and no other file is opened."""
    source = """if True:
        import os, overwire as ow, numpy as np
        assert os.fsencode(os.fsdecode(b"caf\\xe9")) == b"caf\\xe9"
        try: ow.save_file({"x": np.ones(3)}, os.fsdecode(b"caf\\xe9.safetensors"))
        except ow.ArgumentError as error: assert "-X utf8" in str(error)
    """
    world = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    for locale in ("C", "en_US.ISO-8859-1"):  # on a machine without the second locale, the first is used
        script(source, LC_ALL=locale, **world)
        assert set(files(tmp_path)) <= {b"caf\xe9.safetensors"}
    monkeypatch.setattr(os, "fsencode", lambda text: text.encode("latin-1", "surrogateescape"))
    assert sources.local("/plain") == "/plain"
    with pytest.raises(ow.ArgumentError, match="-X utf8"):
        sources.local("/caf\xe9")


def test_open_files(tmp_path: Path) -> None:
    """An open file in place of a name means what its `read` returns from the current position, or the whole file if it
    is at its end. If Python decompresses the file while it reads (gzip, bz2, lzma), its descriptor is not used."""
    import bz2
    import gzip
    import lzma
    import tempfile
    import zipfile

    path = tmp_path / "m.safetensors"
    ow.save_file({"x": np.arange(99.0)}, path)
    data = path.read_bytes()

    def loads(file: Any) -> None:
        assert (ow.load_file(file, framework="np")["x"] == np.arange(99.0)).all()

    for module in (bz2, lzma, gzip):
        with module.open(tmp_path / "packed", "wb") as file:
            file.write(data)
        with module.open(tmp_path / "packed", "rb") as file:
            loads(file)
            loads(file)  # now at its end
        with module.open(tmp_path / "packed", "rb") as file, io.BufferedReader(file) as around:  # type: ignore[arg-type]
            loads(around)
        with bz2.open(tmp_path / "packed", "wb") if module is bz2 else module.open(tmp_path / "packed", "wb") as file:
            file.write(b"front" + data)
        with module.open(tmp_path / "packed", "rb") as file:
            file.read(5)
            loads(file)
    with zipfile.ZipFile(tmp_path / "z", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m", data)
    with zipfile.ZipFile(tmp_path / "z") as archive, archive.open("m") as inner:
        loads(inner)
    (tmp_path / "later").write_bytes(b"front" + data)
    for buffering in (-1, 0):
        with open(tmp_path / "later", "rb", buffering=buffering) as disk:
            disk.seek(5)
            loads(disk)
            loads(open(path, "rb", buffering=buffering))  # noqa: SIM115
    with io.BytesIO(b"front" + data) as memory:
        memory.seek(5)
        loads(memory)
        memory.seek(0)
        with pytest.raises(ow.FormatError):
            loads(memory)
    for made in (tempfile.TemporaryFile(), tempfile.NamedTemporaryFile(), tempfile.SpooledTemporaryFile()):  # noqa: SIM115
        with made:
            made.write(data)
            loads(made)
    with open(path, encoding="latin-1") as text, pytest.raises(ow.ArgumentError, match="binary"):
        loads(text)
    assert sources.number_of(io.BytesIO()) is None


def test_compat_modules(tmp_path: Path) -> None:
    """The compat modules accept the same names as overwire."""
    torch = pytest.importorskip("torch")
    from overwire.compat import nyacomp
    from overwire.compat.fastsafetensors import fastsafe_open
    from overwire.compat.nyacomp import hf
    from overwire.compat.safetensors import safe_open
    from overwire.compat.safetensors.torch import load_file, save_file
    from overwire.compat.tensorizer import TensorDeserializer, TensorSerializer

    made: dict[str, bytes] = {}
    for number, stem in enumerate(("caf\ufffd".encode(), b"caf\xe9", b"caf\xe8")):
        base = os.path.join(os.fsencode(tmp_path), stem)
        tensors = {"x": torch.full((9,), float(number))}
        plain = os.fsdecode(base + b".safetensors")
        save_file(tensors, plain)
        assert load_file(plain)["x"][0] == number
        with safe_open(plain, "pt") as file:
            assert file.get_tensor("x")[0] == number
        with fastsafe_open(plain, nogds=True, device="cpu") as fast:
            assert fast.get_tensor("x")[0] == number
        packed = os.fsdecode(base + b".tensors")
        serializer = TensorSerializer(packed)
        serializer.write_state_dict(tensors)
        serializer.close()
        assert TensorDeserializer(packed, device="cpu")["x"][0] == number
        assert ow.load_file(packed)["x"][0] == number
        folder = Path(os.fsdecode(base))
        folder.mkdir()
        nyacomp.compress_pickle(tensors, folder / os.fsdecode(stem + b".pkl"))
        assert nyacomp.load_compressed_pickle(folder / os.fsdecode(stem + b".pkl"))["x"][0] == number
        broken = folder / "a\nb"
        broken.mkdir()
        nyacomp.compress_pickle(tensors, broken / "x.pkl")
        assert nyacomp.load_compressed_pickle(broken / "x.pkl")["x"][0] == number
        for meta in (broken / "meta.csv", broken / "nya/meta.csv"):
            assert nyacomp._nyacomp.decompress_from_meta(meta)[0][0] == number
        torch.save({"k": torch.full((9999,), float(number))}, str(folder / "c.bin"))
        hf.compress_state_dict(folder / "c.bin")
        assert hf.good_load(folder / "c.bin")["k"][0] == number
        made |= {os.path.join(stem, name): b"" for name in files(folder)} | {stem + end: b"" for end in (b".safetensors", b".tensors")}
    assert set(files(tmp_path)) == set(made)


def test_error_messages_escape_control_characters(tmp_path: Path) -> None:
    """In error messages, from the engine and from Python, control and bidirectional characters of names are escaped.
    `source` is the exact name."""
    path = tmp_path / "m\x1b]0;OWNED\x07\u202e\x9b\x7f"
    for verb in (ow.load_file, ow.inspect, ow.load_compressed_pickle):
        with pytest.raises(ow.NotFoundError) as raised:
            verb(path)
        assert raised.value.source == str(path)
        assert r"m\u001b]0;OWNED\u0007\u202e\u009b\u007f" in str(raised.value)
        assert str(raised.value).isprintable()
    assert str(ow.ArgumentError("a\x1b\u2066\n\tb")) == "a\\u001b\\u2066\n\tb"

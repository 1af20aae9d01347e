"""Tests that every function reports files that break the format or change while they are read.

Each vector of goldens/container/vectors.json raises its typed error with the name of the file. No descriptor stays
open.
"""

from __future__ import annotations

import base64
import errno
import inspect
import io
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
from conftest import open_files, soon  # noqa: E402
from overwire.model import forked  # noqa: E402

VECTORS = json.loads((Path(__file__).parents[1] / "goldens" / "container" / "vectors.json").read_text())


def _object(path: Path, **named: Any) -> Any:
    with open(path, "rb") as file:
        return ow.load_file(file, framework="bytes", **named)


def _index(path: Path, **named: Any) -> Any:
    index = path.parent / "model.safetensors.index.json"
    try:  # the index needs the names of the file's tensors
        names = list(ow.safe_open(path, "bytes", **named).offset_keys())
    except ow.OverwireError:
        names = ["a"]
    index.write_text(json.dumps({"metadata": {}, "weight_map": {name: path.name for name in names}}))
    try:
        return ow.load_file(index, framework="bytes", **named)
    finally:
        index.unlink()


def _model(path: Path, **named: Any) -> Any:
    return ow.load_model(torch.nn.Linear(1, 1), path, strict=False, **named)


def _preload(path: Path) -> Any:
    running = ow.preload(path)
    try:
        running.wait()
    finally:
        running.cancel()


def _joined(path: Path) -> Any:
    running = ow.preload(path)
    try:
        return ow.load_file(path, framework="bytes")
    finally:
        running.cancel()


def _convert(path: Path) -> Any:
    try:
        return ow.convert(path, path.parent / "out.safetensors")
    finally:
        (path.parent / "out.safetensors").unlink(missing_ok=True)


def _opened(path: Path, **named: Any) -> Any:
    with ow.safe_open(path, "bytes", **named) as file:
        return [file.get_tensor(name) for name in file.offset_keys()]


ENTRIES: dict[str, Callable[..., Any]] = {
    "load_file": lambda path, **named: ow.load_file(path, framework="bytes", **named),
    "load_file, read": lambda path, **named: ow.load_file(path, framework="bytes", mmap=False, **named),
    "load_file of a folder": lambda path, **named: ow.load_file(path.parent, framework="bytes", **named),
    "load_file of an index": _index,
    "load_file of an open file": _object,
    "stream": lambda path, **named: list(ow.stream(path, framework="bytes", **named)),
    "stream in windows": lambda path, **named: list(ow.stream(path, framework="bytes", max_memory=1000, **named)),
    "safe_open": _opened,
    "plan": lambda path, **named: ow.plan(path, framework="bytes", **named),
    "load_model": _model,
    "preload": _preload,
    "preload, joined": _joined,
    "pin": lambda path: ow.pin(path).release(),
    "verify": ow.verify,
    "inspect": ow.inspect,
    "convert": _convert,
}


# load_model or a lookup by name may raise one of these errors before or instead of the error for the file.
BESIDE = (ow.ModelMismatchError, ow.TensorNotFoundError)


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_function_refuses_every_broken_file(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    call = ENTRIES[entry]
    takes = any(
        kind is inspect.Parameter.VAR_KEYWORD for kind in (p.kind for p in inspect.signature(call).parameters.values())
    )
    for vector in VECTORS:
        path.write_bytes(base64.b64decode(vector["file"]))
        for lenient in (False, True) if takes and entry not in ("verify", "inspect") else (False,):
            reads = vector["lenient"] if lenient else vector["ours"] == ""
            if reads and entry == "load_file of an index":  # no writer makes an index without tensors
                reads = bool(ow.load_file(path, framework="bytes", lenient=lenient))
            named = {"lenient": True} if lenient else {}
            try:
                call(path, **named)
                error = None
            except BESIDE as other:
                error = None if reads else other
            except ow.OverwireError as refused:
                error = refused
            where = f"{vector['name']}, lenient {lenient}: {error!r}"
            assert (error is None) == reads, where
            if error is not None:
                assert type(error).__name__ in ((vector["ours"],) if vector["ours"] else ("FormatError", "CorruptError")), where
                assert "model.safetensors" in str(error) or entry == "load_file of an open file", where
    # a preload closes its file only after it has reported the result
    assert soon(lambda: not any(link.startswith(str(tmp_path)) for link in open_files())), "descriptors are still open"


def test_compat_modules_refuse_every_broken_file(tmp_path: Path) -> None:
    """The compat modules refuse the same files, with the error classes of the libraries that they replace."""
    import overwire.compat.fastsafetensors as fst
    import overwire.compat.safetensors as st
    import overwire.compat.safetensors.torch as st_torch

    real = pytest.importorskip("safetensors.torch")
    from safetensors import SafetensorError

    path = tmp_path / "model.safetensors"

    def fast(path: Path) -> Any:
        with fst.fastsafe_open(str(path), nogds=True) as file:
            return list(file.keys())

    entries: dict[str, tuple[Callable[[Path], Any], Any]] = {
        "safe_open": (lambda path: st.safe_open(path, "pt"), st.SafetensorError),
        "load_file": (st_torch.load_file, st.SafetensorError),
        "patched": (real.load_file, SafetensorError),
        "fastsafe_open": (fast, (ValueError, KeyError, TypeError, AttributeError, ow.OverwireError)),
    }
    with ow.patch_safetensors():
        for vector in VECTORS:
            path.write_bytes(base64.b64decode(vector["file"]))
            for entry, (call, kinds) in entries.items():
                if vector["ours"]:
                    with pytest.raises(kinds):
                        call(path)
                        pytest.fail(f"{entry} reads {vector['name']}")
                elif entry == "safe_open":
                    call(path)


# Files that change while they are open.


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    tensors = {"first": torch.randn(500_000).bfloat16(), "last": torch.randn(500_000).bfloat16()}
    path = tmp_path / "model.safetensors"
    ow.save_file(tensors, path, compress=False)
    return path, tensors


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("mmap", [None, False])
def test_an_open_file_that_is_truncated(plain: tuple[Path, dict[str, Any]], mmap: bool | None, compress: bool) -> None:
    """Reading an open file after it was truncated raises CorruptError with the file and offset. It never returns the
    zeros that memory past the end of a mapped file can contain."""
    path, tensors = plain

    def fresh() -> int:
        ow.save_file(tensors, path, compress=compress)
        return path.stat().st_size

    def gone(call: Callable[[], Any]) -> None:
        with pytest.raises(ow.CorruptError) as caught:
            call()
        assert caught.value.source == str(path) and caught.value.offset, caught.value

    size = fresh()
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, torch.zeros_like(tensor))
    with ow.safe_open(path, "pt", mmap=mmap) as file:
        order = file.offset_keys()
        os.truncate(path, size - 100_000)
        gone(lambda: file.get_tensor(order[-1]))
        gone(lambda: file.get_slice(order[-1])[-10:])
        gone(lambda: file.get_tensors())
    for call in (
        lambda: ow.load_file(path, mmap=mmap),
        lambda: list(ow.stream(path, mmap=mmap)),
        lambda: ow.load_model(module, path, mmap=mmap),
        lambda: ow.pin(path).release(),
        lambda: ow.verify(path),
    ):
        gone(call)
    # A stream returns the old bytes if it has already read them, or raises the error. This needs mmap=False, because
    # the process ends if mapped data is lost, as the documentation of load_file says.
    fresh()
    running = ow.stream(path, mmap=False, max_memory=2_100_000)
    name, tensor = next(running)
    os.truncate(path, 4096)
    try:
        for other, rest in running:
            assert torch.equal(rest, tensors[other])
    except ow.CorruptError as error:
        assert error.source == str(path)
    assert torch.equal(tensor, tensors[name])
    # A pinned model keeps its bytes.
    fresh()
    with ow.pin(path) as pinned:
        os.truncate(path, 4096)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in ow.load_file(pinned).items())


def test_an_open_file_that_is_replaced(plain: tuple[Path, dict[str, Any]]) -> None:
    """An open file keeps its contents when another file takes its path. The next load reads the new file, even if name,
    size and time are the same."""
    path, tensors = plain
    old = {name: tensor.clone() for name, tensor in tensors.items()}
    held = ow.load_file(path)
    with ow.safe_open(path, "pt") as file:
        stat = path.stat()
        other = path.with_name("other.safetensors")
        ow.save_file({"first": tensors["last"], "last": tensors["first"]}, other, compress=False)
        assert other.stat().st_size == stat.st_size
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        os.replace(other, path)
        assert all(torch.equal(file.get_tensor(name), old[name]) for name in old)
        assert torch.equal(ow.load_file(path)["first"], tensors["last"])
    assert all(torch.equal(held[name], old[name]) for name in old)
    # If the file is overwritten in place with the same size and time, a cached header would be wrong.
    small = {"a": torch.zeros(3, 4), "b": torch.ones(5)}
    swapped = {"a": torch.ones(5), "b": torch.zeros(3, 4)}
    ow.save_file(small, path, compress=False)
    long_ago = path.stat().st_mtime_ns - 3600 * 10**9
    os.utime(path, ns=(long_ago, long_ago))
    assert ow.load_file(path, mmap=False)["a"].shape == (3, 4)
    ow.save_file(swapped, other, compress=False)
    assert other.stat().st_size == path.stat().st_size
    with open(path, "r+b") as out:
        out.write(other.read_bytes())
    os.utime(path, ns=(long_ago, long_ago))
    got = ow.load_file(path, mmap=False)
    assert torch.equal(got["a"], swapped["a"]) and torch.equal(got["b"], swapped["b"])


def test_a_preload_of_a_truncated_file(plain: tuple[Path, dict[str, Any]]) -> None:
    """A preload of a truncated file and the load after it raise CorruptError with the file's name."""
    path, tensors = plain
    ow.save_file(tensors, path)
    os.truncate(path, path.stat().st_size - 50_000)
    running = ow.preload(path)
    with pytest.raises(ow.CorruptError):
        running.wait()
    with pytest.raises(ow.CorruptError) as caught:
        ow.load_file(path)
    assert caught.value.source == str(path)


def test_every_thread_gets_the_error_of_a_bad_file(plain: tuple[Path, dict[str, Any]]) -> None:
    path, _ = plain
    os.truncate(path, path.stat().st_size - 1)
    heard: list[BaseException] = []

    def load() -> None:
        try:
            ow.load_file(path)
        except BaseException as error:
            heard.append(error)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in heard] == [ow.CorruptError] * 8


def test_a_failing_disk(tmp_path: Path) -> None:
    """If the kernel reports a read error, every function raises a typed error with the file and offset."""
    bad = Path("/sys/class/net/lo/speed")  # reports a size of 4096 bytes, but every read fails
    try:
        bad.read_bytes()
        pytest.skip("this system has no file whose reads fail")
    except FileNotFoundError:
        pytest.skip("this system has no file whose reads fail")
    except OSError:
        pass
    link = tmp_path / "model.safetensors"
    link.symlink_to(bad)
    for entry, call in _entries_of_paths():
        with pytest.raises(ow.OverwireError) as caught:
            call(link)
        assert isinstance(caught.value, (ow.IOFailure, ow.ArgumentError)), entry
        assert str(link) in str(caught.value) or str(bad) in str(caught.value), entry


def _entries_of_paths() -> Iterator[tuple[str, Callable[..., Any]]]:
    for entry, call in ENTRIES.items():
        if entry not in ("load_file of an open file", "load_file of a folder", "load_file of an index"):
            yield entry, call


@pytest.mark.parametrize("shape", [[0, 1 << 62, 1 << 62], [5, 0, 1 << 31, 1 << 31], [1 << 62, 0, 1 << 62]])
@pytest.mark.parametrize("framework", ["pt", "np"])
def test_an_empty_tensor_with_a_shape_that_overflows(tmp_path: Path, shape: list[int], framework: str) -> None:
    """An empty tensor with a shape that overflows raises a typed error that names the tensor, not an error from torch
    or numpy."""
    path = tmp_path / "x.safetensors"
    header = json.dumps({"huge": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    calls: list[Callable[[], Any]] = [
        lambda: ow.load_file(path, framework=framework),
        lambda: list(ow.stream(path, framework=framework)),
        lambda: ow.safe_open(path, framework).get_tensor("huge"),
    ]
    for call in calls:
        with pytest.raises((ow.NotSupportedError, ow.FormatError), match="huge|shape") as caught:
            call()
        assert "overflow" in str(caught.value).lower()


def test_errors_show_wrong_values_in_python_notation(tmp_path: Path) -> None:
    """Errors show wrong values of options as Python writes them. A file name with the extension of another format is
    refused before anything is written."""
    weights = {"a": torch.arange(4.0)}
    with pytest.raises(ow.ArgumentError, match=r"level 9: expected 'default' or 'smaller'"):
        ow.save_file(weights, tmp_path / "m.safetensors", level=9)  # type: ignore[arg-type]
    with pytest.raises(ow.ArgumentError, match=r"x\.gguf: the name has the ending of another format"):
        ow.save_file(weights, tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer_config.JSON", "merges.txt"])
def test_auxiliary_files_are_not_replaced(tmp_path: Path, name: str) -> None:
    """Functions that write tensors refuse file names of configurations and other auxiliary files."""
    path = tmp_path / name
    path.write_text("kept")
    weights = {"a": torch.arange(4.0)}
    ow.save_file(weights, tmp_path / "m.safetensors")
    writes: list[Callable[[], object]] = [
        lambda: ow.save_file(weights, path),
        lambda: ow.save_bundle(weights, path),
        lambda: ow.save_delta(weights, weights, path),
        lambda: ow.sleep(dict(weights), to_file=path),
        lambda: ow.convert(tmp_path / "m.safetensors", path),
    ]
    for write in writes:
        with pytest.raises(ow.ArgumentError, match="ending of another format|cannot write"):
            write()
    assert path.read_text() == "kept" and len(list(tmp_path.iterdir())) == 2


def test_every_function_reports_damage_with_the_same_rule(tmp_path: Path) -> None:
    """Every function that reads a file with a wrong checksum raises the same error, which names the same rule of the
    format."""
    base = {"a": torch.arange(65536, dtype=torch.float32).sin()}
    ow.save_file(base, tmp_path / "m")
    ow.save_delta({"a": base["a"] + 1}, base, tmp_path / "d")
    for name, reads in {"m": (ow.load_file, ow.verify), "d": (ow.open_delta,)}.items():
        content = bytearray((tmp_path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (tmp_path / name).write_bytes(content)
        for read in reads:
            with pytest.raises(ow.CorruptError, match="checksum mismatch: [0-9a-f]{8} stored, ") as damage:
                read(tmp_path / name)
            assert (damage.value.rule, damage.value.tensor) == ("Checksum", "a")


def test_a_disk_error_does_not_turn_a_container_into_a_plain_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If reading the first bytes of a file fails, the disk error is raised, and a short read is continued. Otherwise a
    container could be taken for a plain file. For paths that do not exist or are not files, the result is None."""
    path = tmp_path / "m.safetensors"
    ow.save_file({"w": torch.zeros(9000)}, path)
    read, faults = os.pread, []

    def pread(number: int, size: int, at: int) -> bytes:
        if faults:
            raise OSError(faults.pop(), "the disk")
        return read(number, min(size, 5), at)

    monkeypatch.setattr(os, "pread", pread)
    with open(path, "rb") as file:
        for source in (path, str(path), file):
            for number in (errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ESTALE):
                faults.append(number)
                with pytest.raises(ow.OverwireError):
                    forked.is_compressed(source)
            assert forked.is_compressed(source)
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path, tmp_path / "none", tmp_path / "pipe", path / "below", io.BytesIO(b"abc"), "a\0b"):
        assert forked.is_compressed(source) is None

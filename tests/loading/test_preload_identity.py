"""Tests that a load joins a preload only if that has exactly the bytes that the load would read."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
from conftest import same

NEW = {"a": torch.ones(600, 40), "b": torch.arange(500)}
OLD = {"a": torch.zeros(600, 40), "b": torch.arange(500) + 7}

Log = pytest.LogCaptureFixture


def dropped(log: Log) -> list[str]:
    """Returns the log lines about dropped preloads and clears the log."""
    said = [record.getMessage() for record in log.records if "was dropped" in record.getMessage()]
    log.clear()
    return said


def joined(log: Log) -> bool:
    return any("joins its preload" in record.getMessage() for record in log.records)


@pytest.fixture(autouse=True)
def _level(caplog: Log) -> None:
    caplog.set_level("DEBUG", "overwire")


def _save(path: Path, tensors: dict[str, Any], compress: bool) -> None:
    ow.save_file(tensors, path, compress=compress)


def _rename(path: Path, tensors: dict[str, Any], compress: bool) -> None:
    other = path.with_suffix(".other")
    ow.save_file(tensors, other, compress=compress)
    other.replace(path)


def _in_place(path: Path, tensors: dict[str, Any], compress: bool) -> None:
    other = path.with_suffix(".other")
    ow.save_file(tensors, other, compress=compress)
    with open(path, "r+b") as file:  # keeps the inode
        file.truncate(10)
        file.seek(0)
        file.write(other.read_bytes())


def _convert(path: Path, tensors: dict[str, Any], compress: bool) -> None:
    other = path.with_suffix(".other")
    ow.save_file(tensors, other)
    ow.convert(other, path, compress=compress)


def _by_safetensors(path: Path, tensors: dict[str, Any], compress: bool) -> None:
    from overwire.compat.safetensors.torch import save_file

    save_file(tensors, path)


def _by_the_original(path: Path, tensors: dict[str, Any], compress: bool) -> None:
    import safetensors.torch

    safetensors.torch.save_file(tensors, path)


READS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "load_file": ow.load_file,
    "stream": lambda path: dict(ow.stream(path)),
    "stream, windows": lambda path: dict(ow.stream(path, max_memory="1MB")),
    "safe_open": lambda path: {name: ow.safe_open(path).get_tensor(name) for name in NEW},
    "safe_open, slices": lambda path: {name: ow.safe_open(path).get_slice(name)[:] for name in NEW},
    "parts": lambda path: {name: ow.load_file(path, keys=[name])[name] for name in NEW},
    "numpy": lambda path: {name: torch.from_numpy(value) for name, value in ow.load_file(path, framework="np").items()},
}


@pytest.mark.parametrize("compress", [True, False], ids=["compressed", "plain"])
@pytest.mark.parametrize(
    "change", [_save, _rename, _in_place, _convert, _by_safetensors, _by_the_original], ids=lambda made: made.__name__[1:]
)
def test_a_file_that_was_replaced(tmp_path: Path, caplog: Log, compress: bool, change: Callable[..., None]) -> None:
    """However the file was replaced, every reading function returns the current tensors and logs one line about the
    dropped preload."""
    path = tmp_path / "m.safetensors"
    for name, read in READS.items():
        ow.save_file(OLD, path, compress=compress)
        assert ow.preload(path).wait(60)
        change(path, NEW, compress)
        found = read(path)
        for key in NEW:
            same(found[key], NEW[key])
        assert len(dropped(caplog)) == 1, name


def test_a_file_that_was_cut_off(tmp_path: Path, caplog: Log) -> None:
    """If a plain file is truncated after its preload has mapped it, the load raises an error. The process is not killed
    by SIGBUS."""
    path = tmp_path / "m.safetensors"
    for size in (0, 5, 200, 4096):
        ow.save_file({"a": torch.zeros(100_000)}, path, compress=False)
        assert ow.preload(path).wait(60)
        os.truncate(path, size)
        with pytest.raises((ow.FormatError, ow.CorruptError)):
            ow.load_file(path)
        assert len(dropped(caplog)) == 1


@pytest.mark.parametrize("what", ["folder", "index"])
def test_a_shard_that_was_replaced(tmp_path: Path, caplog: Log, what: str) -> None:
    """If a shard or the index was replaced, the load returns the current tensors. Shards that have not changed still
    come from the preload."""
    folder = tmp_path / "a model"
    folder.mkdir()
    tensors = {f"t{i}": torch.full((1000,), float(i)) for i in range(8)}
    ow.save_file(tensors, folder / "model.safetensors", max_shard_size=9000)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    source = folder if what == "folder" else next(folder.glob("*.index.json"))
    assert ow.preload(source).wait(60)
    for shard in shards:  # transformers opens each shard like this
        with ow.safe_open(shard) as file:
            for name in file.offset_keys():
                same(file.get_tensor(name), tensors[name])
                same(file.get_tensor(name), tensors[name])  # the second call reads the file
        assert joined(caplog), shard
        caplog.clear()
    # A replaced shard.
    assert ow.preload(source).wait(60)
    with ow.safe_open(shards[1]) as file:
        changed = {name: file.get_tensor(name) + 100 for name in file.offset_keys()}
    ow.save_file(changed, shards[1])
    found = ow.load_file(source)
    for name, tensor in (tensors | changed).items():
        same(found[name], tensor)
    assert len(dropped(caplog)) == 1
    # An index that omits a shard.
    assert ow.preload(source).wait(60)
    index = next(folder.glob("*.index.json"))
    text = json.loads(index.read_text())
    text["weight_map"] = {name: shard for name, shard in text["weight_map"].items() if shard != shards[0].name}
    index.write_text(json.dumps(text))
    assert set(ow.load_file(source)) == set(text["weight_map"])


def test_bundles(tmp_path: Path, caplog: Log) -> None:
    """A bundle that was replaced by one with the same pickle but different tensors is read again. The load of an
    unchanged bundle joins its preload."""
    path = tmp_path / "x.pkl"
    for old, new in ((OLD, NEW), (NEW, OLD)):
        ow.compress_pickle(old, path)
        for what in (path, tmp_path / "nya/meta.csv"):
            assert ow.preload(what).wait(60)
            same(ow.load_compressed_pickle(path)["a"], old["a"])
            assert joined(caplog) and not dropped(caplog)
        assert ow.preload(path).wait(60)
        ow.compress_pickle(new, path)
        same(ow.load_compressed_pickle(path)["a"], new["a"])
        assert len(dropped(caplog)) == 1


def test_modules(tmp_path: Path, caplog: Log) -> None:
    """load_model joins a preload and fills the module's own memory. If the file was replaced, load_model reads it
    again."""
    for compress in (True, False):
        path = tmp_path / "m.safetensors"
        module = torch.nn.Linear(40, 30)
        tensors = {name: value.detach().clone() for name, value in module.state_dict().items()}
        ow.save_file(tensors, path, compress=compress)
        assert ow.preload(path).wait(60)
        ow.load_model(torch.nn.Linear(40, 30), path)
        assert joined(caplog) and not dropped(caplog)
        assert ow.preload(path).wait(60)
        ow.save_file({name: value + 1 for name, value in tensors.items()}, path, compress=compress)
        ow.load_model(module, path)
        for name, value in module.state_dict().items():
            same(value, tensors[name] + 1)
        assert len(dropped(caplog)) == 1


def test_a_tensors_file_that_was_replaced(tmp_path: Path, caplog: Log) -> None:
    """If TensorSerializer has overwritten a .tensors file, plain or encrypted, a load returns the new tensors."""
    from overwire.compat.tensorizer import DecryptionParams, EncryptionParams, TensorDeserializer, TensorSerializer

    path = tmp_path / "m.tensors"
    for key in (None, bytes(range(32))):
        for tensors in (OLD, NEW):
            if tensors is NEW:
                assert ow.preload(path, storage_options=key and {"decryption_key": key}).wait(60)
            sink = TensorSerializer(path, encryption=key and EncryptionParams(key=key))
            sink.write_state_dict(tensors)
            sink.close()
        found = TensorDeserializer(path, device="cpu", encryption=key and DecryptionParams.from_key(key))
        same(found["a"].detach(), NEW["a"])
        assert len(dropped(caplog)) == 1


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def let_go(path: Path) -> bool:
    """Returns whether the file is unmapped within a minute. A thread may still be populating the mapping."""
    until = time.monotonic() + 60
    while mapped(path) and time.monotonic() < until:
        time.sleep(0.002)
    return not mapped(path)


def test_load_settings_that_prevent_joining(tmp_path: Path, caplog: Log) -> None:
    """A load with mmap=False or another `read` setting does not use the preload. With `lenient`, `dtype`, `keys`,
    `filter` or mmap=None, it does."""
    path = tmp_path / "m.safetensors"
    ow.save_file(NEW, path, compress=False)
    for arguments in ({"mmap": False}, {"read": "direct"}):
        assert ow.preload(path).wait(60) and mapped(path)
        found = ow.load_file(path, **arguments)
        same(found["a"], NEW["a"])
        assert len(dropped(caplog)) == 1, arguments
        assert mapped(path) if "read" in arguments else let_go(path)
        del found
        assert let_go(path)
    for arguments in ({"lenient": True}, {"dtype": torch.float16}, {"keys": ["a"]}, {"filter": lambda name: name == "a"}, {"mmap": None}):
        assert ow.preload(path).wait(60)
        same(ow.load_file(path, **arguments)["a"], NEW["a"].to(arguments.get("dtype", torch.float32)))
        assert joined(caplog) and not dropped(caplog), arguments
    # Compressed tensors are never mapped, so mmap does not matter.
    ow.save_file(NEW, path)
    assert ow.preload(path).wait(60)
    same(ow.load_file(path, mmap=False)["a"], NEW["a"])
    assert joined(caplog) and not dropped(caplog)


def test_a_load_works_after_a_failed_preload(tmp_path: Path, caplog: Log) -> None:
    """After the preload of a missing, partial or invalid file, or of a pickle without its container, has failed, a load
    reads the current file."""
    path = tmp_path / "m.safetensors"
    whole = tmp_path / "whole.safetensors"
    ow.save_file(NEW, whole, compress=False)
    for state in (None, whole.read_bytes()[:-100], whole.read_bytes()[:50], b"nonsense" * 99, b""):
        if state is not None:
            path.write_bytes(state)
        running = ow.preload(path)
        with pytest.raises(ow.OverwireError):
            running.wait(60)
        shutil.copy(whole, path)
        same(ow.load_file(path)["a"], NEW["a"])
        path.unlink()


def test_metadata_and_slices_leave_the_preload(tmp_path: Path, caplog: Log) -> None:
    """`plan`, `inspect`, metadata and slices do not use up a preload, so the next load joins it."""
    path = tmp_path / "m.safetensors"
    ow.save_file(NEW, path)
    assert ow.preload(path).wait(60)
    ow.plan(path)
    ow.inspect(path)
    with ow.safe_open(path) as file:
        file.metadata()
        same(file.get_slice("a")[:3], NEW["a"][:3])
    caplog.clear()
    same(ow.load_file(path)["a"], NEW["a"])
    assert joined(caplog) and not dropped(caplog)


def test_a_pinned_model_keeps_its_bytes(tmp_path: Path) -> None:
    """A pinned model keeps its bytes even if its file is replaced and preloaded afterwards."""
    path = tmp_path / "m.safetensors"
    ow.save_file(OLD, path)
    with ow.pin(path) as model:
        ow.save_file(NEW, path)
        assert ow.preload(path).wait(60)
        same(ow.load_file(model)["a"], OLD["a"])
        same(ow.load_file(path)["a"], NEW["a"])
        same(ow.safe_open(model).get_tensor("b"), OLD["b"])


def test_drop_ins_join_a_preload(tmp_path: Path, caplog: Log) -> None:
    """The drop-ins for safetensors, fastsafetensors, tensorizer and nyacomp join a preload."""
    from overwire.compat import safetensors as compat
    from overwire.compat.fastsafetensors import fastsafe_open
    from overwire.compat.nyacomp import load_compressed_pickle
    from overwire.compat.safetensors.numpy import load_file as numpy_load
    from overwire.compat.safetensors.torch import load_file, load_model
    from overwire.compat.tensorizer import TensorDeserializer

    path, tensors, bundle = tmp_path / "m.safetensors", tmp_path / "m.tensors", tmp_path / "b.pkl"
    ow.save_file(NEW, path)
    ow.save_file(NEW, tensors)
    ow.compress_pickle(NEW, bundle)

    def fast() -> Any:
        with fastsafe_open([str(path)], device="cpu", nogds=True) as file:
            return file.get_tensor("a").clone()

    def patched() -> Any:
        import safetensors.torch

        with ow.patch_safetensors():
            return safetensors.torch.load_file(path)["a"]

    module = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(value.clone(), requires_grad=False) for name, value in OLD.items()}
    )
    reads: dict[str, tuple[Path, Callable[[], Any]]] = {
        "safe_open": (path, lambda: compat.safe_open(path, "pt").get_tensor("a")),
        "get_slice": (path, lambda: compat.safe_open(path, "pt").get_slice("a")[...]),
        "torch": (path, lambda: load_file(path)["a"]),
        "numpy": (path, lambda: torch.from_numpy(numpy_load(path)["a"])),
        "module": (path, lambda: (load_model(module, path), module["a"].detach())[1]),
        "patched": (path, patched),
        "fastsafetensors": (path, fast),
        "tensorizer": (tensors, lambda: TensorDeserializer(tensors, device="cpu")["a"].detach()),
        "nyacomp": (bundle, lambda: load_compressed_pickle(bundle)["a"]),
    }
    for name, (what, read) in reads.items():
        assert ow.preload(what).wait(60)
        caplog.clear()
        same(read(), NEW["a"])
        assert joined(caplog) and not dropped(caplog), name


def test_one_copy_in_memory(script, tmp_path: Path) -> None:
    """If a program opens each shard and tensor of a preloaded model separately, the model is in memory only once."""
    tensors = {f"t{i}": torch.randn(1 << 20) for i in range(24)}  # 96 MiB
    ow.save_file(tensors, tmp_path / "model.safetensors", max_shard_size="33MB")
    done = script(
        """
import overwire as ow, numpy as np, glob, os
from overwire.compat.safetensors import safe_open
ow.preload(os.getcwd()).wait()
def peak():
    return int(next(row for row in open("/proc/self/status") if row.startswith("VmHWM")).split()[1]) << 10
def now():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
before = now()
held = {}
for shard in sorted(glob.glob("*.safetensors")):
    with safe_open(shard, "np") as file:
        assert file.metadata() is None or True
    with safe_open(shard, "np") as file:
        for name in file.keys():
            held[name] = file.get_tensor(name)
assert len(held) == 24
size = 24 << 22
assert peak() - before < size // 4, (peak(), before)  # nothing was read again
held.clear()
assert now() < before - size // 2, (now(), before)  # and most of its memory is freed
""",
        OVERWIRE_PRELOAD=str(tmp_path),
    )
    assert done.stderr == ""


# -- OVERWIRE_PRELOAD


def test_a_path_that_appears_later(script, tmp_path: Path) -> None:
    """If OVERWIRE_PRELOAD names a missing file, a warning says so, and the file loads once it exists."""
    done = script(
        """
import numpy as np, overwire as ow
from overwire.verbs import save
ow.save_file({"w": np.ones(3)}, "later.safetensors")
assert ow.load_file("later.safetensors", framework="np")["w"].sum() == 3
""",
        OVERWIRE_PRELOAD="later.safetensors",
    )
    assert "nothing is preloaded" in done.stderr


def test_a_preload_of_a_partial_download(script, tmp_path: Path) -> None:
    """A preload of half a file fails with CorruptError, and the file loads once it is complete."""
    ow.save_file({"w": torch.ones(1000)}, tmp_path / "whole", compress=False)
    (tmp_path / "m.safetensors").write_bytes((tmp_path / "whole").read_bytes()[:2000])
    script(
        """
import os, numpy, overwire as ow
try:
    ow.preload("m.safetensors").wait()  # joins the preload that OVERWIRE_PRELOAD started
    raise AssertionError("half a file was loaded")
except ow.CorruptError:
    pass
with open("m.safetensors", "ab") as file:
    file.write(open("whole", "rb").read()[2000:])
assert ow.load_file("m.safetensors", framework="np")["w"].sum() == 1000
""",
        OVERWIRE_PRELOAD="m.safetensors",
    )


@pytest.mark.parametrize("what", ["fifo.safetensors", "fifo.pkl", "fifo.csv", "fifo"])
def test_a_fifo_does_not_block_the_import(script, tmp_path: Path, what: str) -> None:
    os.mkfifo(tmp_path / what)
    done = script("import overwire", OVERWIRE_PRELOAD=what)
    assert "not a regular file" in done.stderr


def test_children_do_not_preload(script, tmp_path: Path) -> None:
    """Only the main program starts a preload. multiprocessing workers, which also import the program and overwire, do
    not."""
    ow.save_file({"w": torch.ones(1000)}, tmp_path / "m.safetensors")
    (tmp_path / "program.py").write_text(
        """
import sys
import overwire as ow  # runs in children before multiprocessing marks them
LOADED = "overwire._core" in sys.modules

def look(_):
    return LOADED

def result(queue):
    queue.put(LOADED)

if __name__ == "__main__":
    import concurrent.futures, multiprocessing
    assert LOADED
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        with context.Pool(1) as pool:
            assert pool.map(look, [0]) == [False], method
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            assert list(pool.map(look, [0])) == [False], method
        queue = context.SimpleQueue()
        child = context.Process(target=result, args=(queue,))
        child.start()
        assert queue.get() is False
        child.join()
        assert child.exitcode == 0
    assert ow.load_file("m.safetensors", framework="np")["w"].sum() == 1000
    print("ok")
"""
    )
    done = script(
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, 'program.py', 'spawn', 'forkserver']).returncode)",
        OVERWIRE_PRELOAD="m.safetensors",
    )
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.parametrize(
    "env, device",
    [
        ({}, 0),
        ({"LOCAL_RANK": "3"}, 3),
        ({"SLURM_LOCALID": "2"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, 1),
        ({"MPI_LOCALRANKID": "4"}, 4),
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, 3),
        ({"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "5"}, 0),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "4,5"}, 1),
        ({"LOCAL_RANK": "no"}, 0),
    ],
)
def test_each_rank_preloads_to_its_gpu(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], device: int) -> None:
    """Before torch is imported, a rank preloads to the GPU that its launcher assigned."""
    import sys

    from overwire.verbs import preload as preloading

    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "torch")
    assert preloading._device_of("cuda") == f"cuda:{device}"
    assert preloading._device_of("cuda:6") == "cuda:6"


# -- remote sources


class Server:
    """An HTTP server of files in memory, with ETags, dates, or neither."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.pins: dict[str, dict[str, str]] = {}
        self.bodies = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                body = outer.files.get(self.path)
                if body is None:
                    self.send_response(404)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                first, last = 0, len(body) - 1
                if span := self.headers.get("Range"):
                    first, _, end = span.removeprefix("bytes=").partition("-")  # type: ignore[assignment]
                    first, last = int(first), min(int(end), last)
                self.send_response(206 if span else 200)
                if span:
                    self.send_header("Content-Range", f"bytes {first}-{last}/{len(body)}")
                for name, value in outer.pins.get(self.path, {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(last + 1 - first))
                self.end_headers()
                outer.bodies += last + 1 - first
                self.wfile.write(body[first : last + 1])

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_objects_over_http(server: Server, tmp_path: Path, caplog: Log) -> None:
    """An object is read again if its ETag or date has changed. An object without a strong ETag or a date is not
    preloaded. A load of an unchanged object joins the preload, and the object is read once."""
    big = {"a": torch.randn(200_000), "b": torch.arange(500)}
    other = {"a": torch.randn(200_000), "b": torch.arange(500)}
    contents = []
    for tensors in (big, other):
        ow.save_file(tensors, tmp_path / "m", compress=False)
        contents.append((tmp_path / "m").read_bytes())
    assert len(contents[0]) == len(contents[1])
    url = server.url + "/m.safetensors"
    long_ago = [{"Last-Modified": f"Mon, 03 Aug 2020 10:00:0{second} GMT"} for second in (0, 1)]
    for name, pins in {"ETag": [{"ETag": '"1"'}, {"ETag": '"2"'}], "date": long_ago}.items():
        server.files["/m.safetensors"], server.pins["/m.safetensors"] = contents[0], pins[0]
        assert ow.preload(url).wait(60)
        server.bodies = 0
        same(ow.load_file(url)["a"], big["a"])
        assert joined(caplog) and not dropped(caplog), name
        assert server.bodies < len(contents[0]) // 2, name
        assert ow.preload(url).wait(60)
        server.files["/m.safetensors"], server.pins["/m.safetensors"] = contents[1], pins[1]
        same(ow.load_file(url)["a"], other["a"])
        assert len(dropped(caplog)) == 1, name
    for pins in ({}, {"ETag": 'W/"1"'}):
        server.files["/m.safetensors"], server.pins["/m.safetensors"] = contents[0], pins
        with pytest.raises(ow.NotSupportedError, match="ETag"):
            ow.preload(url).wait(60)
        server.files["/m.safetensors"] = contents[1]
        same(ow.load_file(url)["a"], other["a"])
        assert not joined(caplog)

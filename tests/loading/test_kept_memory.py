"""Tests the memory that the engine holds between calls, without a GPU."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy
import overwire as ow
import pytest
import torch
from conftest import same
from overwire.frameworks import torch as frame_torch
from processes import overwire_serve


def test_empty_cache_starts_no_driver(script) -> None:
    script("""
import numpy
import overwire as ow
ow.empty_cache()
ow.empty_cache()
assert "libcuda" not in open("/proc/self/maps").read()
""")


QUIESCE = """
import os, socket, sys, threading, time
import numpy
import overwire as ow
ow.quiesce()  # the engine was not used
def things():
    out = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            out.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            pass  # the descriptor of the listing
    return out
def left(before):
    # Go's runtime keeps these.
    own = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "/sys/fs/cgroup/")
    maps = {line.split()[-1] for line in open("/proc/self/maps") if "safetensors" in line}
    return [thing for thing in things() - before if not thing[1].startswith(own)] + sorted(maps)
folder, url = os.environ["FOLDER"], os.environ["URL"]
before = things()
tensors = {name: numpy.arange(70_000, dtype="float32") + number for number, name in enumerate("abc")}
for name, compress in (("plain", False), ("packed", True)):
    ow.save_file(tensors, f"{folder}/{name}.safetensors", compress=compress)
def use():
    for name in ("plain", "packed"):
        for where in (folder, url):
            for framework in ("np", "bytes"):
                loaded = ow.load_file(f"{where}/{name}.safetensors", framework=framework)
                assert bytes(memoryview(loaded["b"]).cast("B")) == tensors["b"].tobytes()
    ow.save_file(tensors, f"{folder}/late.safetensors", wait=False)
    ow.preload(f"{folder}/plain.safetensors").result(60)
    ow.pin(f"{url}/packed.safetensors").release()
    ow.verify(f"{folder}/packed.safetensors")
for _ in range(2):
    use()
    assert left(before)
    ow.quiesce()
    assert not left(before), left(before)
    assert numpy.array_equal(ow.load_file(f"{folder}/late.safetensors", framework="np")["c"], tensors["c"])
use()
with ow.safe_open(f"{folder}/plain.safetensors", "np") as file, ow.safe_open(f"{url}/packed.safetensors", "np"):
    try:
        ow.quiesce()
        raise SystemExit("quiesce accepted open models")
    except ow.ArgumentError as error:
        assert f"{folder}/plain.safetensors" in str(error) and f"{url}/packed.safetensors" in str(error), error
    assert numpy.array_equal(file.get_tensor("a"), tensors["a"])
ow.quiesce()
assert not left(before), left(before)
silent = socket.create_server(("127.0.0.1", 0))
waits = threading.Thread(target=ow.load_file, args=(f"http://127.0.0.1:{silent.getsockname()[1]}/x.safetensors",), daemon=True)
waits.start()
connection, _ = silent.accept()
try:
    ow.quiesce(timeout=0.2)
    raise SystemExit("quiesce returned during a load")
except ow.DeadlineError as error:
    assert "open" in str(error), error
for wrong in (0, -1, True, "x"):
    try:
        ow.quiesce(timeout=wrong)
        raise SystemExit("no error")
    except ow.ArgumentError:
        pass
child = os.fork()
if not child:
    try:
        ow.quiesce()
    except ow.ForkedError:
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def test_quiesce_leaves_nothing_open(script, tmp_path: Path) -> None:
    """After loads, saves, preloads and pins of local and remote files, `quiesce` leaves no file open or mapped and no
    connection, and the next calls work. It raises an error while a model is open or a load runs."""
    with overwire_serve(tmp_path) as url:
        script(QUIESCE, FOLDER=str(tmp_path), URL=url.rstrip("/"))


def test_torch_out_of_memory_becomes_our_error_with_the_size() -> None:
    with pytest.raises(ow.OutOfMemoryError) as caught, frame_torch._errors_of("cuda:0", 123):
        raise torch.OutOfMemoryError("CUDA out of memory")
    error = caught.value
    assert isinstance(error, MemoryError) and error.asked == 123 and "123 bytes" in str(error)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is ow.OutOfMemoryError and twin.asked == 123 and str(twin) == str(error)


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {"a": torch.randn(700, 300).bfloat16(), "b": torch.arange(100_000), "e": torch.empty(0, 3), "s": torch.tensor(2.5)}


@pytest.mark.parametrize("compress", [True, False], ids=["compressed", "plain"])
def test_a_pinned_model_loads_without_its_file(tmp_path: Path, compress: bool) -> None:
    want = weights()
    path = tmp_path / "m.safetensors"
    ow.save_file(want, path, {"k": "v"}, compress=compress)
    seen = []
    pinned = ow.pin(path, progress=seen.append)
    assert pinned.nbytes == path.stat().st_size and seen[-1].bytes == seen[-1].total_bytes == pinned.nbytes
    assert str(path) in repr(pinned)
    path.unlink()
    for _ in range(3):
        got = pinned.load_file()
        assert list(got) == list(ow.load_file(pinned, keys=None)) and set(got) == set(want)
        for name, tensor in want.items():
            same(got[name], tensor)
        got["a"].zero_()  # the tensor belongs to the caller
    for name, tensor in pinned.stream(keys=["b", "a"]):
        same(tensor, want[name])
    same(pinned.load_file(dtype="float32", filter=lambda name: name == "a")["a"], want["a"].float())
    assert isinstance(pinned.load_file(framework="np", keys=["b"])["b"], numpy.ndarray)
    with ow.safe_open(pinned, "pt") as f:
        assert f.metadata() == {"k": "v"} and len(f) == 4
        same(f.get_slice("a")[10:20, 5:9], want["a"][10:20, 5:9].contiguous())
    module = torch.nn.Module()
    module.b = torch.nn.Buffer(torch.zeros(100_000, dtype=torch.int64))
    ow.load_model(module, pinned, strict=False)
    same(module.b, want["b"])
    kept = pinned.load_file()["a"]
    running = pinned.stream()
    with pinned:
        pass
    assert {name for name, _ in running} == set(want)  # a running stream continues after the release
    pinned.release()
    same(kept, want["a"])
    for verb in (pinned.load_file, pinned.stream, pinned.__enter__, lambda: ow.safe_open(pinned, "pt")):
        with pytest.raises(ow.ArgumentError, match="released"):
            verb()


def test_pin_refuses_missing_and_damaged_files_and_unknown_devices(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ow.pin(tmp_path / "no")
    path = tmp_path / "m"
    ow.save_file(weights(), path)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ow.CorruptError) as caught:
        ow.pin(path)
    assert caught.value.tensor and caught.value.chunk is not None and caught.value.source == str(path)
    with pytest.raises(ow.NotSupportedError):
        ow.pin(path, device="mps")
    if not torch.cuda.is_available():
        with pytest.raises(ow.DeviceError):
            ow.pin(path, device="cuda")


def test_pinned_memory_is_freed(tmp_path: Path, script) -> None:
    script("""
import overwire as ow, os, time, numpy as np
rng = np.random.default_rng(0)
ow.save_file({"a": rng.integers(0, 255, 20_000_000, dtype=np.uint8)}, "m")
def rss(): return int(open("/proc/self/statm").read().split()[1]) * 4096
def files(): return len(os.listdir("/proc/self/fd"))
def soon(ok):
    end = time.monotonic() + 60
    while not ok() and time.monotonic() < end: time.sleep(0.01)
    return ok()
for _ in range(20): ow.pin("m").release()  # Go's collector runs
before, open_files = rss(), files()
for _ in range(20):
    with ow.pin("m") as pinned:
        assert soon(lambda: files() == open_files)
    ow.pin("m")  # dropped
assert soon(lambda: rss() < before + 10_000_000), (before, rss())
assert soon(lambda: files() == open_files)
""")


def short(transposed: bool = False) -> torch.Tensor:
    """Returns a tensor that is longer than its storage."""
    tensor = torch.ones(64 * 64 + 9)[9:].view(64, 64)
    tensor = tensor.t() if transposed else tensor
    tensor.untyped_storage().resize_(64 * 64 * 4)
    return tensor


class Holder(torch.nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.x = torch.nn.Parameter(tensor, requires_grad=False)


def wake_shortened(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    storage.resize_(1 << 16)
    asleep = ow.sleep({"x": tensor})  # the storage stays, because the tensor is only a part of it
    storage.resize_(64 * 64 * 4)
    asleep.wake()


def serialize(tensor: torch.Tensor) -> None:
    from overwire.compat.tensorizer import TensorSerializer

    TensorSerializer("m.tensors").write_state_dict({"x": tensor})


def drop_in(tensor: torch.Tensor) -> None:
    from overwire.compat.safetensors import torch as ours

    ours.save_file({"x": tensor}, "d.safetensors")


SHORT = {
    "save_file": lambda tensor: ow.save_file({"x": tensor}, "a.safetensors"),
    "plain": lambda tensor: ow.save_file({"x": tensor}, "a.safetensors", compress=False),
    "save_model": lambda tensor: ow.save_model(Holder(tensor), "a.safetensors"),
    "bundle": lambda tensor: ow.save_bundle({"x": tensor}, "a.pkl"),
    "digest": lambda tensor: ow.digest(tensor),
    "delta": lambda tensor: ow.save_delta({"x": torch.ones(64, 64)}, {"x": tensor}, "a.safetensors"),
    "verify": lambda tensor: ow.verify("one", tensors={"x": tensor}),
    "sleep": lambda tensor: ow.sleep({"x": tensor}),
    "wake": wake_shortened,
    "offload": lambda tensor: ow.offload(torch.nn.ModuleDict({"b": torch.nn.ModuleList([Holder(tensor)])}), "cpu"),
    "load_model": lambda tensor: ow.load_model(Holder(tensor), "one"),
    "load_into": lambda tensor: ow.safe_open("one", "pt").load_into([("x", None, tensor)]),
    "TensorSerializer": serialize,
    "safetensors": drop_in,
}


@pytest.mark.parametrize("call", SHORT)
@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_is_read_or_written_past_the_end_of_a_storage(
    call: str, transposed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every function raises ArgumentError for a tensor that is longer than its storage, and leaves no file."""
    monkeypatch.chdir(tmp_path)
    ow.save_file({"x": torch.zeros(64, 64)}, "one")
    with pytest.raises(ValueError if (call, transposed) == ("safetensors", True) else ow.ArgumentError):
        SHORT[call](short(transposed))
    assert [path.name for path in tmp_path.iterdir() if path.name != "m.tensors"] == ["one"]

"""Tests on a real GPU that every kind of load gives the same bytes as a load to the CPU.

`go test -tags owfake ./gosrc/device/cuda` tests the same code without a GPU, on a fake driver that runs the kernels on
the CPU.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import overwire as ow
import pytest
from overwire._tables import FLOATS

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from overwire.frameworks.torch import SAVED  # noqa: E402

KINDS = ["llama-bf16", "fp16", "fp32", "fp32-bf16", "fp8-e4m3", "fp8-e5m2", "int8", "int4", "tied", "pruned", "uniform", "hostile"]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        if a[name].numel():
            assert torch.equal(bits(a[name]), bits(b[name])), name


def run(*argv: str) -> None:
    subprocess.run([sys.executable, "-m", "overwire", *argv], check=True, capture_output=True)


# One worker runs all tests of a kind of model, so the files of this kind are made only once.
@pytest.fixture(scope="module", params=[pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in KINDS])
def model(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    run("bench", "gen", request.param, "--size", "48MB", str(folder / "plain.safetensors"))
    run("compress", str(folder / "plain.safetensors"), "-o", str(folder / "packed.safetensors"))
    return folder


@pytest.mark.parametrize("file", ["plain.safetensors", "packed.safetensors"])
def test_same_bytes_as_on_the_cpu(model: Path, file: str) -> None:
    on_cpu = ow.load_file(model / file)
    equal(ow.load_file(model / file, device="cuda"), on_cpu)
    streamed = dict(ow.stream(model / file, device="cuda"))
    equal({name: streamed[name] for name in on_cpu}, on_cpu)
    with ow.safe_open(model / file, "pt", "cuda") as f:
        for name, tensor in on_cpu.items():
            packed = f.get_slice(name).get_dtype() in ("F4", "F6_E2M3", "F6_E3M2")
            if tensor.dim() >= 2 and min(tensor.shape[:2]) > 8 and not packed:
                for index in ((slice(1, 7),), (slice(None), slice(3, 8))):
                    assert torch.equal(bits(f.get_slice(name)[index]), bits(tensor[index])), (name, index)


@pytest.mark.parametrize("file", ["plain.safetensors", "packed.safetensors"])
def test_tensors_that_load_in_the_background(model: Path, file: str) -> None:
    """The drop-in's `prefetch` loads whole tensors and rows to a GPU from a file that was opened for the CPU."""
    import overwire.compat.safetensors as drop_in

    want = ow.load_file(model / file)
    with drop_in.safe_open(model / file, "pt") as opened:
        if any(opened.get_slice(name).get_dtype().startswith("F6") for name in want):
            with pytest.raises(drop_in.SafetensorError, match="torch has no matching dtype"):
                opened.prefetch(device="cuda")
            want = {name: tensor for name, tensor in want.items() if opened.get_slice(name).get_dtype()[:2] != "F6"}
        rows = {name: slice(1, 7) for name, tensor in list(want.items())[::2] if tensor.dim() >= 2 and len(tensor) > 8}
        loader = opened.prefetch(dict.fromkeys(want) | rows, device="cuda")
    last = next(reversed(want))
    with loader:
        found = {last: loader.take(last), **dict(loader)}
    assert all(tensor.is_cuda for tensor in found.values())
    equal({name: found[name] for name in want}, {name: tensor[rows.get(name, ...)] for name, tensor in want.items()})


def test_a_loop_that_changes_its_stream(model: Path) -> None:
    """If tensors were read ahead on one torch stream and the program switches to another, it still gets the right
    tensors."""
    want = ow.load_file(model / "packed.safetensors")
    side = torch.cuda.Stream()
    got = {}
    with ow.safe_open(model / "packed.safetensors", "pt", "cuda") as file:
        for n, name in enumerate(file.keys()):
            with torch.cuda.stream(side if n // 5 % 2 else torch.cuda.default_stream()):
                got[name] = file.get_tensor(name)
                got[name] = got[name].clone() if n % 3 else got[name]
        torch.cuda.synchronize()
    equal({name: got[name] for name in want}, want)


CASTS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", CASTS, ids=str)
def test_casts_during_a_load_equal_torchs(model: Path, dtype: torch.dtype) -> None:
    for file in ("plain.safetensors", "packed.safetensors"):
        stored = ow.load_file(model / file)
        cast = {name for name, tensor in stored.items() if SAVED.get(tensor.dtype) in FLOATS}
        slow = {name: tensor.to(dtype) if name in cast else tensor for name, tensor in stored.items()}
        fast = ow.load_file(model / file, device="cuda", dtype=dtype)
        streamed = dict(ow.stream(model / file, device="cuda", dtype=dtype))
        assert list(fast) == list(slow)
        for name, want in slow.items():
            for got in (fast[name], streamed[name]):
                assert got.is_cuda and got.dtype == want.dtype and got.shape == want.shape, name
                assert got.untyped_storage().nbytes() == want.untyped_storage().nbytes(), name
                if name in cast:
                    a, b = got.cpu().double(), want.double()
                    assert torch.equal(a.nan_to_num(7, 8, 9), b.nan_to_num(7, 8, 9)), name
                elif want.numel():
                    assert torch.equal(bits(got), bits(want)), name


def test_corrupt_chunk_leaves_the_context_alive(tmp_path: Path) -> None:
    torch.manual_seed(1)
    good = tmp_path / "m"
    ow.save_file({"a": torch.randn(1 << 20, dtype=torch.float32).bfloat16(), "b": torch.arange(5)}, good)
    data = bytearray(good.read_bytes())
    data[len(data) // 2] ^= 16
    (tmp_path / "bad").write_bytes(data)
    for _ in range(3):
        with pytest.raises(ow.CorruptError) as caught:
            ow.load_file(tmp_path / "bad", device="cuda")
        assert caught.value.tensor == "a"
        equal(ow.load_file(good, device="cuda"), ow.load_file(good))


@pytest.mark.imports_torch
def test_preload_before_torch(tmp_path: Path) -> None:
    """A preload to a GPU starts before torch is imported, and the load joins it."""
    ow.save_file({"a": torch.randn(1 << 20).bfloat16(), "b": torch.arange(5)}, tmp_path / "m")
    code = f"""
import os
os.environ["OVERWIRE_PRELOAD"] = {str(tmp_path / "m")!r}
os.environ["OVERWIRE_PRELOAD_DEVICE"] = "cuda"
import overwire as ow, sys
assert "torch" not in sys.modules
import torch
got = ow.load_file({str(tmp_path / "m")!r}, device="cuda")
assert got["a"].is_cuda and got["b"].tolist() == [0, 1, 2, 3, 4]
want = ow.load_file({str(tmp_path / "m")!r})
assert torch.equal(got["a"].cpu().view(torch.int16), want["a"].view(torch.int16))
del got
torch.cuda.synchronize()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_load_model_fills_the_memory_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(2)
    one, two = torch.nn.Linear(512, 512).cuda(), torch.nn.Linear(512, 512).cuda()
    ow.save_model(one, tmp_path / "m")
    place = two.weight.data_ptr()
    ow.load_model(two, tmp_path / "m", device="cuda")
    assert two.weight.data_ptr() == place and torch.equal(one.weight, two.weight) and torch.equal(one.bias, two.bias)


def comes_true(true: Callable[[], bool]) -> None:
    """Waits up to 30 seconds for true() to hold, because threads of the engine may finish later."""
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.whole_gpu
def test_a_thousand_loads_free_their_memory(tmp_path: Path) -> None:
    ow.save_file({"a": torch.randn(1 << 16).bfloat16(), "b": torch.arange(100)}, tmp_path / "m")

    def used() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    for _ in range(10):
        ow.load_file(tmp_path / "m", device="cuda")
    before = used()
    for _ in range(1000):
        ow.load_file(tmp_path / "m", device="cuda")
    comes_true(lambda: used() <= before + (8 << 20))
    # Load many small tensors: first fewer than the engine caches for the next load, then more.
    for name, count in (("few", 40), ("many", 300)):
        ow.save_file({f"s{i}": torch.zeros(900_000, dtype=torch.uint8) for i in range(count)}, tmp_path / name, compress=True)

    def both() -> None:
        for name in ("few", "many"):
            ow.load_file(tmp_path / name, device="cuda")

    both()
    ow.empty_cache()
    before = used()
    for _ in range(100):
        both()
    ow.empty_cache()
    comes_true(lambda: used() <= before + (8 << 20))


@pytest.mark.whole_gpu
def test_out_of_memory_errors_give_the_size_and_memory_is_freed(tmp_path: Path) -> None:
    big = {"big": torch.zeros(64 << 20, dtype=torch.uint8)}
    small = {f"s{i}": torch.zeros(900_000, dtype=torch.uint8) for i in range(80)}
    ow.save_file(big, tmp_path / "big")
    ow.save_file(small, tmp_path / "small")
    for name in ("big", "small"):  # creates the engine's lane and torch's context
        ow.load_file(tmp_path / name, device="cuda")
    ow.empty_cache()
    torch.cuda.empty_cache()
    # Leave less memory than either load needs. The first uses torch's memory, the second the engine's.
    hog = []
    for step in (1 << 30, 32 << 20, 4 << 20):
        while torch.cuda.mem_get_info()[0] > step + (24 << 20):
            hog.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
    left = torch.cuda.mem_get_info()[0]
    for name, asked in (("big", 64 << 20), ("small", 80 * 900_000)):
        for _ in range(3):
            with pytest.raises(ow.OutOfMemoryError) as caught:
                ow.load_file(tmp_path / name, device="cuda")
            error = caught.value
            assert isinstance(error, MemoryError)
            assert error.asked >= asked and error.free < error.asked and error.total == torch.cuda.mem_get_info()[1]
            del caught, error
        assert torch.cuda.mem_get_info()[0] >= left - (4 << 20)
    del hog
    for name in ("big", "small"):  # a load can use memory that torch's allocator has cached
        equal(ow.load_file(tmp_path / name, device="cuda"), ow.load_file(tmp_path / name))


@pytest.mark.whole_gpu
def test_empty_cache(tmp_path: Path) -> None:
    """empty_cache frees at least 64 MiB of GPU memory. Loaded tensors stay valid."""
    ow.save_file({"a": torch.arange(1000)}, tmp_path / "m")
    kept = ow.load_file(tmp_path / "m", device="cuda")
    before = torch.cuda.mem_get_info()[0]
    ow.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before + (64 << 20)
    assert kept["a"].tolist() == list(range(1000))
    equal(ow.load_file(tmp_path / "m", device="cuda"), ow.load_file(tmp_path / "m"))


def test_a_load_requests_memory_in_few_blocks(torch_script: Callable, tmp_path: Path) -> None:
    """The first load requests memory from the driver for a few groups of tensors, and later loads request almost none.
    Each tensor has its own storage. When all tensors are dropped, torch frees all memory. Memory that torch has cached
    is used."""
    sizes = [20, 34, 50, 8] * 10
    tensors = {f"t{i:02}": torch.full((n << 20,), i, dtype=torch.uint8) for i, n in enumerate(sizes)}
    ow.save_file(tensors, tmp_path / "m")
    torch_script(
        """
import torch
import overwire as ow
def count_segments():
    return sum(part["segment_type"] == "large" for part in torch.cuda.memory_snapshot())
def check(tensors):
    for number, tensor in enumerate(tensors.values()):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and bool((tensor.cpu() == number).all()), number
sizes = [tensor.nbytes for tensor in ow.load_file("m").values()]
others = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (*sizes, 400 << 20)]
reserved = torch.cuda.memory_reserved()
del others
check(tensors := ow.load_file("m", device="cuda"))
assert torch.cuda.memory_reserved() <= reserved + (64 << 20)
del tensors
torch.cuda.empty_cache()
assert not count_segments()
check(tensors := ow.load_file("m", device="cuda"))
assert count_segments() <= 10, count_segments()
reserved = torch.cuda.memory_reserved()
assert reserved <= sum(sizes) + (40 << 20)
del tensors
for _ in range(4):
    check(tensors := ow.load_file("m", device="cuda"))
    assert torch.cuda.memory_reserved() <= reserved + (40 << 20)
    del tensors
torch.cuda.empty_cache()
assert not count_segments()
"""
    )


def test_pinned(model: Path) -> None:
    """A model that is pinned on the CPU or on a GPU loads to both repeatedly, and streams to the GPU."""
    for file in ("plain.safetensors", "packed.safetensors"):
        on_cpu = ow.load_file(model / file)
        for device in (None, "cuda"):
            with ow.pin(model / file, device=device) as pinned:
                for _ in range(2):
                    equal(pinned.load_file(device="cuda"), on_cpu)
                equal(pinned.load_file(), on_cpu)
                streamed = dict(pinned.stream(device="cuda"))
                equal({name: streamed[name] for name in on_cpu}, on_cpu)
            equal(streamed, {name: on_cpu[name] for name in streamed})


def used_host() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_saving_from_the_gpu_writes_the_same_file_as_from_the_cpu(tmp_path: Path) -> None:
    torch.manual_seed(4)
    host = {"a": torch.randn(3000, 1000).bfloat16(), "b": torch.arange(7), "e": torch.empty(0, 2), "t": torch.randn(500, 30).t()}
    host["tied"] = host["a"]
    gpu = {name: tensor.cuda() for name, tensor in host.items() if name != "tied"}
    gpu["tied"] = gpu["a"]
    for compress in (True, False):
        ow.save_file(host, tmp_path / "host", compress=compress)
        gpu["a"].neg_().neg_()  # queued work
        report = ow.save_file(gpu, tmp_path / "gpu", compress=compress)
        assert (tmp_path / "host").read_bytes() == (tmp_path / "gpu").read_bytes()
        assert report.aliases == (1 if compress else 0)
    big = {f"w{i}": torch.randn(32 << 20, device="cuda", dtype=torch.bfloat16) for i in range(16)}  # 1 GiB
    before = used_host()
    ow.save_file(big, tmp_path / "big")
    assert used_host() < before + (400 << 20)
    equal(ow.load_file(tmp_path / "big", device="cuda"), {name: big[name] for name in sorted(big)})


def test_bundles_load_to_the_devices_they_were_saved_from(tmp_path: Path) -> None:
    torch.manual_seed(6)
    import numpy

    module = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.LayerNorm(900)).cuda()
    module[0].weight.data = module[0].weight.data.bfloat16()
    obj = {"m": module, "view": module[0].weight.data[3:5], "host": torch.arange(5), "n": numpy.arange(6)}
    obj["none"] = torch.empty(0, device="cuda")
    assert 0 < ow.compress_pickle(obj, tmp_path / "x.pkl") < 1
    assert module[0].weight.is_cuda

    def check(got, device: str) -> None:
        for a, b in zip(got["m"].parameters(), module.parameters(), strict=True):
            assert type(a) is torch.nn.Parameter and a.device.type == device and torch.equal(a.cpu(), b.cpu())
        assert got["view"].data_ptr() == got["m"][0].weight[3:5].data_ptr()
        assert got["n"].tolist() == list(range(6)) and got["host"].tolist() == list(range(5))

    for trust in (False, True):
        got = ow.load_compressed_pickle(tmp_path / "x.pkl", trust=trust)
        check(got, "cuda")
        assert got["host"].device.type == "cpu"
        check(ow.load_compressed_pickle(tmp_path / "x.pkl", trust=trust, device="cpu"), "cpu")
        got = ow.load_compressed_pickle(tmp_path / "x.pkl", trust=trust, device="cuda")
        check(got, "cuda")
        assert got["host"].is_cuda
    ow.preload(tmp_path / "x.pkl").wait()
    check(ow.load_compressed_pickle(tmp_path / "x.pkl"), "cuda")
    ow.compress(module.cpu(), tmp_path / "y.pth")
    assert next(ow.load_compressed(tmp_path / "y.pth", device="cuda").parameters()).is_cuda
    assert not next(ow.load_compressed(tmp_path / "y.pth").parameters()).is_cuda


def test_load_model_loads_to_the_device_of_each_tensor(tmp_path: Path) -> None:
    torch.manual_seed(8)
    one = torch.nn.Sequential(torch.nn.Linear(512, 600), torch.nn.Linear(600, 512))
    ow.save_model(one, tmp_path / "m")
    two = torch.nn.Sequential(torch.nn.Linear(512, 600).cuda(), torch.nn.Linear(600, 512))
    places = [p.data_ptr() for p in two.parameters()]
    ow.load_model(two, tmp_path / "m")
    assert [p.data_ptr() for p in two.parameters()] == places
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b.cpu())
    with torch.no_grad():
        for p in two.parameters():
            p.zero_()
    ow.load_model(two, tmp_path / "m", device="cuda")
    ow.preload(tmp_path / "m", device="cuda").wait()
    ow.load_model(two.cuda(), tmp_path / "m")
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b.cpu())


def test_a_preload_to_the_host_is_loaded_to_the_gpu(tmp_path: Path) -> None:
    ow.save_file({"a": torch.randn(1 << 20).bfloat16(), "b": torch.arange(5)}, tmp_path / "m")
    want = ow.load_file(tmp_path / "m")
    for verb in (ow.load_file, lambda path, device: dict(ow.stream(path, device=device))):
        assert ow.preload(tmp_path / "m", device="host").wait()
        got = verb(tmp_path / "m", device="cuda")
        assert all(tensor.is_cuda for tensor in got.values())
        equal({name: got[name] for name in want}, want)
    assert ow.preload(tmp_path / "m", device="host").wait()
    with ow.safe_open(tmp_path / "m", "pt", "cuda") as file:
        # Large blocks are loaded directly.
        for name, block in (("a", slice(5, 1 << 19)), ("a", slice(3, 9)), ("b", slice(1, 4))):
            found = file.get_slice(name)[block]
            assert found.is_cuda and torch.equal(found.cpu(), want[name][block])


def test_threads_load_to_every_gpu_at_once(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    ow.save_file({f"w{i}": torch.randn(1 << 20).bfloat16() for i in range(8)}, tmp_path / "m")
    want = ow.load_file(tmp_path / "m")
    with ThreadPoolExecutor(8) as pool:
        devices = [f"cuda:{i % torch.cuda.device_count()}" for i in range(8)]
        for device, got in zip(
            devices, pool.map(lambda device: ow.load_file(tmp_path / "m", device=device), devices), strict=True
        ):
            assert all(str(tensor.device) == device for tensor in got.values())
            equal(got, want)


def test_tensors_files(tmp_path: Path) -> None:
    """tensorizer's class and overwire's functions load the same tensors from .tensors files."""
    from overwire.compat import tensorizer

    torch.manual_seed(2)
    tensors = {"a": torch.randn(3 << 20), "b": torch.randn(5, 7).bfloat16(), "c": torch.arange(9)}
    key = tensorizer.EncryptionParams.random()
    for encryption in (None, key):
        path = tmp_path / "x.tensors"
        serializer = tensorizer.TensorSerializer(path, encryption=encryption)
        serializer.write_state_dict({name: tensor.cuda() for name, tensor in tensors.items()})
        serializer.close()
        options = None if encryption is None else {"decryption_key": key.key}
        equal(ow.load_file(path, device="cuda", storage_options=options), tensors)
        params = None if encryption is None else tensorizer.DecryptionParams.from_key(key.key)
        for verify in (False, True):
            with tensorizer.TensorDeserializer(path, device="cuda", encryption=params, verify_hash=verify) as de:
                assert all(
                    tensor.is_cuda and torch.equal(bits(tensor.detach()), bits(tensors[name]))
                    for name, tensor in de.items()
                )


def test_gds_reads_the_same_bytes_or_logs_a_reason(model: Path) -> None:
    """read="gds" gives the same bytes. If GPUDirect Storage does not work, the load reads through host memory, and one
    log line gives the reason."""
    code = f"""
import logging, sys
logging.basicConfig(format="%(name)s %(message)s", stream=sys.stderr)
import overwire as ow, torch
path = {str(model / "plain.safetensors")!r}
want = ow.load_file(path)
for dtype in (None, torch.float32, None):
    got = ow.load_file(path, device="cuda", read="gds", dtype=dtype)
    report = ow.last_report()
    slow = ow.load_file(path, device="cuda", dtype=dtype)
    for name in want:
        a, b = got[name], slow[name]
        assert a.dtype == b.dtype and a.shape == b.shape
        assert not a.numel() or torch.equal(a.cpu().reshape(-1).view(torch.uint8), b.cpu().reshape(-1).view(torch.uint8)), name
assert list(got) == list(want)
real = ow.doctor()["gpudirect_storage"]
assert report["gds"] >= report["bytes"] * real["usable"] or report["no_gds"], report
assert (report["gds"] > 0) != ("no_gds" in report), report
print(report["gds"], report.get("no_gds", ""))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "reading through host memory" in line]
    assert len(lines) == (0 if done.stdout.split()[0] != "0" else 1), done.stderr
    if not lines:
        return
    pytest.skip(f"no real GPUDirect Storage: {lines[0]}")


SMALL = {f"s{i}": torch.full((8192,), i, dtype=torch.int16) for i in range(300)}  # 16 KiB each
MIXED = SMALL | {f"l{i}": torch.full((5 << 20,), i, dtype=torch.uint8) for i in range(4)}


def captured(during: Callable[[int], None]) -> None:
    """Captures a graph of 100 steps in torch's default mode and calls `during` in each step. Compares the replay with
    the same work outside a graph."""
    a = torch.randn(256, 256, device="cuda")
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        want = a @ a
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in range(100):
            got = a @ a
            during(step)
            time.sleep(0.003)  # the engine frees memory within 5 to 100 ms
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("where", ["this thread", "another"])
def test_tensors_can_be_freed_while_a_graph_is_captured(tmp_path: Path, where: str) -> None:
    ow.save_file(SMALL, tmp_path / "m")
    want = ow.load_file(tmp_path / "m")
    ow.preload(tmp_path / "m", device="cuda").wait()
    held = [ow.load_file(tmp_path / "m", device="cuda") for _ in range(3)]  # the first load joins the preload

    def drop(step: int) -> None:
        if step in (5, 30, 60):
            if where == "another":
                thread = threading.Thread(target=held.pop)
                thread.start()
                thread.join()
            else:
                held.pop()

    captured(drop)
    assert not held
    captured(lambda step: None)  # another capture right after tensors were freed
    equal(ow.load_file(tmp_path / "m", device="cuda"), want)


def test_loads_run_while_another_thread_captures(tmp_path: Path) -> None:
    ow.save_file(MIXED, tmp_path / "m")
    want = ow.load_file(tmp_path / "m")
    ow.empty_cache()  # so lanes, pinned memory and torch's segments are created again
    got: list[dict[str, torch.Tensor]] = []
    failed: list[BaseException] = []

    def load() -> None:
        try:
            for _ in range(3):
                got.append(ow.load_file(tmp_path / "m", device="cuda"))
            ow.empty_cache()
            with ow.pin(tmp_path / "m", device="cuda") as pinned:
                got.append(pinned.load_file(device="cuda"))
            ow.save_file(got[0], tmp_path / "saved")
            got.append(ow.load_file(tmp_path / "saved", device="cuda"))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=load)

    def during(step: int) -> None:
        if step == 5:
            thread.start()
        if step == 95:
            thread.join(60)

    captured(during)
    thread.join()
    if failed:
        raise failed[0]
    assert len(got) == 5
    for loaded in got:
        equal({name: loaded[name] for name in want}, want)


def test_a_load_on_a_capturing_stream_is_refused(tmp_path: Path) -> None:
    ow.save_file(MIXED, tmp_path / "m")
    kept = ow.load_file(tmp_path / "m", device="cuda")

    def during(step: int) -> None:
        if step in (10, 50):
            for call in (
                lambda: ow.load_file(tmp_path / "m", device="cuda"),
                lambda: next(ow.stream(tmp_path / "m", device="cuda")),
                lambda: ow.save_file(kept, tmp_path / "n"),
            ):
                with pytest.raises(ow.NotSupportedError, match="captured"):
                    call()

    captured(during)
    equal(ow.load_file(tmp_path / "m", device="cuda"), kept)


@pytest.mark.parametrize("size", ["small", "mixed", "more than is kept"])
def test_a_load_does_not_wait_for_work_on_other_streams(tmp_path: Path, size: str) -> None:
    more = {f"s{i}": torch.full((900_000,), i % 256, dtype=torch.uint8) for i in range(300)}
    ow.save_file({"small": SMALL, "mixed": MIXED, "more than is kept": more}[size], tmp_path / "m")
    want = ow.load_file(tmp_path / "m")
    ow.load_file(tmp_path / "m", device="cuda")
    earlier = ow.load_file(tmp_path / "m", device="cuda")
    torch.cuda.synchronize()
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(8_000_000_000)  # about 4 s
        done.record(side)
    del earlier
    time.sleep(0.3)  # until the engine has freed memory
    got = ow.load_file(tmp_path / "m", device="cuda")
    assert done.query() is False, "the load waited for another stream"
    done.synchronize()
    equal(got, want)

"""What needs a real GPU: the same bytes as on the CPU, whatever is loaded how.

The logic is tested without one too, through the host twin of the kernels and a
driver that is not there (`go test -tags owfake ./gosrc/device/cuda`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import overwire as ow
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

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


@pytest.fixture(scope="module", params=KINDS)
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


def test_preload_before_torch(tmp_path: Path) -> None:
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


def test_load_model_lands_in_place(tmp_path: Path) -> None:
    torch.manual_seed(2)
    one, two = torch.nn.Linear(512, 512).cuda(), torch.nn.Linear(512, 512).cuda()
    ow.save_model(one, tmp_path / "m")
    place = two.weight.data_ptr()
    ow.load_model(two, tmp_path / "m", device="cuda")
    assert two.weight.data_ptr() == place and torch.equal(one.weight, two.weight) and torch.equal(one.bias, two.bias)


def test_thousand_loads_give_everything_back(tmp_path: Path) -> None:
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
    assert used() <= before + (8 << 20)


def test_out_of_memory_says_how_much_and_gives_everything_back(tmp_path: Path) -> None:
    big = {"big": torch.zeros(64 << 20, dtype=torch.uint8)}
    small = {f"s{i}": torch.zeros(900_000, dtype=torch.uint8) for i in range(80)}
    ow.save_file(big, tmp_path / "big")
    ow.save_file(small, tmp_path / "small")
    for name in ("big", "small"):  # the lane is there, and torch's context
        ow.load_file(tmp_path / name, device="cuda")
    ow.empty_cache()
    torch.cuda.empty_cache()
    # Leave less than either needs; the first lands in torch's memory, the second
    # in the engine's.
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
    for name in ("big", "small"):  # torch's allocator keeps the memory; a load gets it all the same
        equal(ow.load_file(tmp_path / name, device="cuda"), ow.load_file(tmp_path / name))


def test_empty_cache(tmp_path: Path) -> None:
    ow.save_file({"a": torch.arange(1000)}, tmp_path / "m")
    kept = ow.load_file(tmp_path / "m", device="cuda")
    before = torch.cuda.mem_get_info()[0]
    ow.empty_cache()
    assert torch.cuda.mem_get_info()[0] >= before + (100 << 20)
    assert kept["a"].tolist() == list(range(1000))
    equal(ow.load_file(tmp_path / "m", device="cuda"), ow.load_file(tmp_path / "m"))


def test_pinned(model: Path) -> None:
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


def test_tensors_files(tmp_path: Path) -> None:
    """tensorizer's files, as tensorizer's own class and as ours loads them."""
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
                assert all(tensor.is_cuda and torch.equal(bits(tensor.detach()), bits(tensors[name])) for name, tensor in de.items())

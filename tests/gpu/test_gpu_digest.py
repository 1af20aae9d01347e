"""Tests digests of tensors on a GPU, real or fake.

`make fakepy` runs this on the fake driver, which runs the kernels on the CPU. Tests that need torch on a GPU are
skipped there.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import overwire as ow
import pytest
from overwire import _verbs, gpu
from overwire._engine import buffer_of
from overwire.jobs import Job

if gpu.count() == 0:
    pytest.skip("no CUDA device", allow_module_level=True)

np: Any = pytest.importorskip("numpy")
torch: Any = pytest.importorskip("torch")
needs_torch = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU")


def asked(stream: int, contiguous: int, numbers: list[int]) -> list[str]:
    with Job(_verbs.digest(0, stream, 0, contiguous, struct.pack(f"={len(numbers)}q", *numbers)), "digest") as job:
        digits = job.result()[1].hex()
    return [digits[at : at + 32] for at in range(0, len(digits), 32)]


def test_memory_of_a_gpu(seed: int) -> None:
    """The engine's function gives the same digests as on the CPU, for any length and offset, on the caller's stream."""
    data = random.Random(seed).randbytes(300_000)
    address, size, keep = buffer_of(data)
    memory = gpu.alloc(size, 0)
    gpu.copy(memory.address, address, size, device=0)
    del keep
    parts = [(random.Random(seed + i).randrange(60), 3 * i) for i in range(100)] + [(0, size), (16, 4096), (1, 70_000)]
    some = 40  # contiguous; the others are passed as strided
    numbers = [memory.address + at for at, _ in parts[:some]] + [length for _, length in parts[:some]]
    numbers += [n for at, length in parts[some:] for n in (memory.address + at, 1, 1, length, 1)]
    stream = gpu.stream_new(0)
    for on in (1, stream):
        got = asked(on, some, numbers)
        assert got == [ow.digest(np.frombuffer(data, np.uint8)[at : at + length]) for at, length in parts]
    gpu.stream_free(stream, 0)
    for wrong in ([memory.address, 3, 0], [memory.address, 1, 2, 5, 5], [0, 1, 1, 5, 1], [memory.address, 1]):
        with pytest.raises(ow.ArgumentError):
            asked(1, 0, wrong)
    for wrong in ([memory.address, -1], [memory.address], [0, 5]):
        with pytest.raises(ow.ArgumentError):
            asked(1, 1, wrong)


@needs_torch
def test_tensors_of_torch(seed: int) -> None:
    """Tensors of every dtype and any strides have the same digest on each GPU as on the CPU."""
    from conftest import every_dtype

    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(0, 256, (50, 40, 32), dtype=torch.uint8, generator=generator)
    tensors = every_dtype() | {
        "none": torch.empty(0, 3), "big": torch.randint(-9, 9, (30_000_001,), dtype=torch.int8, generator=generator),
    }
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex64):
        whole = base.view(dtype)
        views = [
            whole.transpose(0, 2), whole.permute(1, 2, 0), whole[:, 3:9], whole[3::3, :, 1:],
            whole[:1].expand(7, 40, -1),
        ]
        tensors |= {f"{dtype} {i}": view for i, view in enumerate([*views, whole.flatten()[3:]])}
    want = ow.digest(tensors)
    for device in range(torch.cuda.device_count()):
        there = {
            name: tensor.to(device) if tensor.is_contiguous() else _alike(tensor, device)
            for name, tensor in tensors.items()
        }
        assert ow.digest(there) == want
        assert ow.digest({"here": tensors["big"], "there": there["big"]}) == {"here": want["big"], "there": want["big"]}


def _alike(tensor: Any, device: int) -> Any:
    """Copies the tensor's storage to a GPU, and returns the same view of the copy."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@needs_torch
def test_a_digest_waits_for_its_stream_and_refuses_a_capture() -> None:
    """A digest waits for work that is queued on the current stream. It refuses a stream that is being captured."""
    side, x = torch.cuda.Stream(), torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for value in range(1, 6):
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            x.fill_(value)
            assert ow.digest(x) == ow.digest(torch.full_like(x, value, device="cpu"))
    graph, y = torch.cuda.CUDAGraph(), torch.zeros(16, device="cuda")
    with torch.cuda.graph(graph):
        y += 1
        with pytest.raises(ow.NotSupportedError, match="captured"):
            ow.digest(x)
    graph.replay()
    assert y.sum().item() == 16
    assert ow.digest(x) == ow.digest(x.cpu())


@needs_torch
def test_a_model_on_a_gpu(tmp_path: Any) -> None:
    """verify compares a model on a GPU with its file and finds a changed bit."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 7)).bfloat16().cuda()
    ow.save_model(model, tmp_path / "m.safetensors")
    found = ow.verify(tmp_path / "m.safetensors", tensors=model)
    assert found["ok"] and found["on_gpu"] == found["bytes"] > 0
    with torch.no_grad():
        model[0].weight.view(torch.int16)[17, 3] ^= 1
    assert ow.verify(tmp_path / "m.safetensors", tensors=model)["differ"] == ["0.weight"]


def test_a_file_decoded_on_a_gpu(tmp_path: Any, seed: int) -> None:
    """Tensors that a GPU decodes from a file (compressed, plain, tied, empty, of one element) have the same digests as
    on the CPU. The GPU decodes only the requested tensors. Damage is detected."""
    made = torch.Generator().manual_seed(seed)
    tensors = {
        "big": torch.randn(900, 701, generator=made).bfloat16(),
        "f32": torch.randn(1000, 33, generator=made),
        "bytes": torch.randint(0, 256, (100_003,), dtype=torch.uint8, generator=made),
        "one": torch.tensor(3.5),
        "none": torch.empty(0, 4),
    }
    tensors["tied"] = tensors["big"]
    want = ow.digest(tensors)
    size = sum(tensor.nbytes for name, tensor in tensors.items() if name != "tied")
    for kind in ({}, {"compress": False}, {"level": "smaller"}, {"max_shard_size": "100KB"}, {"digests": True}):
        at = tmp_path / f"{len(list(tmp_path.iterdir()))} {kind}"
        at.mkdir()
        ow.save_file(tensors, at / "model.safetensors", **kind)
        for names in (list(tensors), ["f32", "none", "tied"], ["unknown"]):
            with Job(_verbs.digests({"uris": [str(at)], "on": dict.fromkeys(names, 0)}), "digests", None) as job:
                found = job.finish()
            assert {row["name"]: row["digest"] for row in found["tensors"]} == want
            if "digests" in kind:
                assert found["kept"] == len(tensors) and found["bytes"] == found["on_gpu"] == 0
            elif "big" in names:
                assert found["on_gpu"] == found["bytes"] == size or "compress" in kind
            else:
                assert (found["on_gpu"] > 0) == ("f32" in names) and found["on_gpu"] < found["bytes"]
    path = tmp_path / "m.safetensors"
    ow.save_file(tensors, path)
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 4
    asked = {"uris": [str(path)], "on": dict.fromkeys(tensors, 0)}
    with pytest.raises(ow.DeviceError, match="99"), Job(_verbs.digests(asked | {"on": {"f32": 99}}), "digests", None) as job:
        job.finish()
    path.write_bytes(raw)
    with pytest.raises(ow.CorruptError), Job(_verbs.digests(asked), "digests", None) as job:
        job.finish()


@pytest.mark.skipif(torch.cuda.is_available(), reason="uses all memory of the GPU")
def test_a_gpu_without_space(tmp_path: Any) -> None:
    """Tensors that do not fit on the GPU are decoded on the CPU."""
    made = torch.Generator().manual_seed(1)
    tensors = {"large": torch.randn(600, 1000, generator=made).bfloat16(), "small": torch.ones(9)}
    path = tmp_path / "m.safetensors"
    ow.save_file(tensors, path)
    asked = {"uris": [str(path)], "on": dict.fromkeys(tensors, 0)}
    want = ow.digest(tensors)

    def found() -> Any:
        with Job(_verbs.digests(asked), "digests", None) as job:
            made = job.finish()
        assert {row["name"]: row["digest"] for row in made["tensors"]} == want and made["bytes"] == 1_200_036
        return made["on_gpu"]

    assert found() == 1_200_036
    held, size = [], 1 << 40
    while size > 1000:
        try:
            held.append(gpu.alloc(size, 0))
        except ow.OutOfMemoryError:
            size //= 2
    assert found() == 0
    del held
    assert found() == 1_200_036

"""Tests deltas of tensors on a GPU, real or fake.

`make fakepy` runs this on the fake driver, which runs the kernels on the CPU. Tests that need torch on a GPU are
skipped there.
"""

from __future__ import annotations

import struct
from pathlib import Path
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


def uploaded(data: Any) -> gpu.Memory:
    address, size, keep = buffer_of(data)
    memory = gpu.alloc(size, 0)
    gpu.copy(memory.address, address, size, device=0)
    del keep
    return memory


def downloaded(memory: gpu.Memory) -> Any:
    out = np.empty(memory.nbytes, np.uint8)
    address, size, keep = buffer_of(out, True)
    gpu.copy(address, memory.address, size, device=0)
    del keep
    return out


def pair(seed: int, share: float) -> tuple[Any, Any]:
    """Returns a copy of random bytes in which a share was changed, and the original."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, 600_000, np.uint8)
    new = base.copy()
    some = rng.random(base.size) < share
    new[some] ^= rng.integers(1, 8, int(some.sum()), np.uint8)
    return new, base


def applied(places: list[gpu.Memory], delta: ow.Delta, request: Any) -> Any:
    count = len(places)
    rows = [list(delta).index(name) for name in request["names"]]
    numbers = [0] * count + rows + list(range(count)) + [1] * count + [place.address for place in places]
    asked: Any = {"files": [delta._number], "missing": False, "streams": [0, 1]}
    asked |= {"dtypes": request["dtypes"], "shapes": request["shapes"]}
    with Job(_verbs.delta_apply(asked, struct.pack(f"={len(numbers)}q", *numbers)), "apply", None) as job:
        return job.finish()


def test_memory_of_a_gpu(seed: int, tmp_path: Path) -> None:
    """The GPU writes the same delta as the CPU and applies it in place. A wrong base is refused and not changed."""
    for step, share in enumerate((0.005, 0.3)):
        new, base = pair(seed + step, share)
        dtypes = {"BF16": np.uint16, "F32": np.uint32, "I8": np.int8, "F64": np.uint64}
        there = {name: (uploaded(new), uploaded(base)) for name in dtypes}
        shapes = [[new.size // np.dtype(kind).itemsize] for kind in dtypes.values()]
        request: dict[str, Any] = {"names": [*dtypes], "dtypes": [*dtypes], "shapes": shapes}
        path = str(tmp_path / f"{step}.safetensors")
        numbers = [n for a, b in there.values() for n in (a.address, b.address, 1, 1)]
        with Job(_verbs.delta_save(request | {"path": path}, struct.pack(f"={len(numbers)}q", *numbers)), "save", None) as job:
            assert job.finish()["changed"] == len(dtypes)
        host = {name: (new.view(kind), base.view(kind)) for name, kind in dtypes.items()}
        ow.save_delta({n: a for n, (a, _) in host.items()}, {n: b for n, (_, b) in host.items()}, tmp_path / "cpu.safetensors")
        cpu, gpus = ow.open_delta(tmp_path / "cpu.safetensors"), ow.open_delta(path)
        assert [(gpus.stored(n), gpus.base(n), gpus.new(n)) for n in dtypes] == [
            (cpu.stored(n), cpu.base(n), cpu.new(n)) for n in dtypes
        ]

        wrong = [b for _, b in there.values()][:-1] + [there["F64"][0]]
        with pytest.raises(ow.DeltaBaseError, match="F64"):
            applied(wrong, gpus, request)
        assert all((downloaded(b) == base).all() for _, b in there.values())
        assert applied([b for _, b in there.values()], gpus, request)["changed"] == len(dtypes)
        assert all((downloaded(b) == new).all() for _, b in there.values())


@needs_torch
def test_tensors_of_torch(seed: int, tmp_path: Path) -> None:
    """Tensors of every dtype, even tied or strided, on one or several GPUs, give the same delta as on the CPU."""
    from conftest import every_dtype

    generator = torch.Generator().manual_seed(seed)
    base = {name: tensor.clone() for name, tensor in every_dtype().items()}
    base["big"] = torch.randint(-9, 9, (3_000_001,), dtype=torch.int8, generator=generator)
    base["w"] = torch.randn(700, 513, generator=generator).bfloat16()
    new = {name: tensor.clone() for name, tensor in base.items()}
    for tensor in new.values():
        flat = tensor.reshape(-1)
        if flat.numel() and flat.dtype not in (torch.bool,):
            raw = flat.view(torch.uint8)
            raw[torch.randint(raw.numel(), (max(1, raw.numel() // 50),), generator=generator)] ^= 1
    cpu = tmp_path / "cpu.safetensors"
    ow.save_delta(new, base, cpu)
    for device in range(torch.cuda.device_count()):
        there = {name: tensor.to(device) for name, tensor in base.items()}
        after = {name: tensor.to(device) for name, tensor in new.items()}
        ow.save_delta(after, there, tmp_path / "gpu.safetensors")
        assert (tmp_path / "gpu.safetensors").read_bytes() == cpu.read_bytes()
        places = {name: tensor.data_ptr() for name, tensor in there.items()}
        ow.apply_delta(there, cpu)
        assert places == {name: tensor.data_ptr() for name, tensor in there.items()}
        assert ow.digest(there) == ow.digest(new)
    spread = {name: tensor.to(at % torch.cuda.device_count()) for at, (name, tensor) in enumerate(base.items())}
    spread["w"] = spread["w"].t().contiguous().t()
    ow.apply_delta(spread, cpu)
    assert ow.digest(spread) == ow.digest(new)
    assert ow.digest(ow.load_file(cpu, "cuda", base=base)) == ow.digest(new)

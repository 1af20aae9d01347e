"""Makes random models, stores them in several forms, and compares loaded tensors with the saved ones."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import overwire as ow
import torch

from .outcomes import Failure

Tensors = dict[str, torch.Tensor]

# Forms in which `store` can store a model. The forms in RARE take longer.
FORMS = ("compressed", "compressed", "plain", "shards", "plain shards", "digests", "tensorizer")
RARE = ("smaller", "parts")
_DTYPES = (
    torch.bfloat16, torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.int64,
    torch.bool,
)  # fmt: skip


class Stored(NamedTuple):
    """A stored model: its path, contents and form."""

    path: Path
    tensors: Tensors
    form: str


def random_tensors(rng: random.Random, size: int = 1 << 20) -> Tensors:
    """Returns tensors of about `size` bytes in total, with usual dtypes and unusual shapes. Some are tied or have equal
    contents."""
    source = torch.Generator().manual_seed(rng.getrandbits(48))
    tensors: Tensors = {}
    count = rng.randint(2, 12)
    for number in range(count):
        elements = max(1, int(size / count / 2 * rng.uniform(0.1, 2)))
        dtype = rng.choice(_DTYPES if number else _DTYPES[:-1])  # versions of a model of bool tensors could be equal
        tensors[f"t{number}"] = _random_tensor(rng, source, dtype, elements)
    if rng.random() < 0.3:
        tensors["näme with spaces"] = torch.tensor(rng.random())
    if rng.random() < 0.3:
        tensors["empty"] = torch.empty(rng.choice(((0,), (3, 0), (0, 5))), dtype=torch.float16)
    if rng.random() < 0.3:
        tensors["tied"] = tensors["t0"]
    return tensors


def _random_tensor(rng: random.Random, source: torch.Generator, dtype: torch.dtype, elements: int) -> torch.Tensor:
    columns = rng.choice((1, 7, 64, 256, 513))
    shape = rng.choice(((elements,), (-(-elements // columns), columns), (2, -(-elements // columns // 2), columns)))
    if rng.random() < 0.1:
        return torch.full(shape, rng.choice((0, 1)), dtype=dtype)
    if dtype in (torch.uint8, torch.int64, torch.bool):
        return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=source).to(dtype)
    return (torch.randn(shape, generator=source) * rng.choice((0.02, 1.0))).to(dtype)


def version(tensors: Tensors, number: int) -> Tensors:
    """Returns tensors with the same names, dtypes, shapes and ties. Every non-empty tensor has other values, except
    that bool tensors of two even or two odd versions are equal."""
    source = torch.Generator().manual_seed(number)
    changed: Tensors = {}
    ties: dict[int, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) in ties:
            changed[name] = ties[id(tensor)]
            continue
        whole = tensor.clone()
        flat = as_bytes(whole)
        if tensor.dtype == torch.bool:
            whole.logical_not_() if number % 2 else None
        elif flat.numel():
            where = torch.randint(0, flat.numel(), (max(1, flat.numel() // 50),), generator=source)
            flat[where] = torch.randint(1, 100, (len(where),), generator=source).to(torch.uint8)
            flat[:1] = number  # another value in each version
        changed[name] = ties[id(tensor)] = whole
    return changed


def store(rng: random.Random, folder: Path, tensors: Tensors, form: str | None = None) -> Stored:
    """Saves a model below folder, in the given form or in a random form."""
    form = form or (rng.choice(RARE) if rng.random() < 0.15 else rng.choice(FORMS))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("model.tensors" if form == "tensorizer" else "model.safetensors")
    if "shards" in form:
        ow.save_file(tensors, path, compress=form == "shards", max_shard_size=max(1, bytes_of(tensors) // rng.randint(2, 5)))
        return Stored(folder, tensors, form)
    if form == "parts":
        ow.save_file(tensors, folder / "whole", compress=False)
        words = ["compress", str(folder / "whole"), "-o", str(path), "--force", "--parts", str(rng.choice((2, 4, 8)))]
        subprocess.run([sys.executable, "-m", "overwire", *words], check=True, stdout=subprocess.DEVNULL)
        (folder / "whole").unlink()
        return Stored(path, tensors, form)
    level = "smaller" if form == "smaller" else "default"
    ow.save_file(tensors, path, compress=form not in ("plain", "tensorizer"), level=level, digests=form == "digests")
    return Stored(path, tensors, form)


def bytes_of(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a contiguous tensor's bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def compare(name: str, loaded: Any, want: torch.Tensor) -> None:
    """Raises Failure unless a loaded tensor, array or bytes object has the dtype, shape and bytes of `want`."""
    if isinstance(loaded, torch.Tensor):
        if loaded.dtype != want.dtype or loaded.shape != want.shape:
            raise Failure("wrong bytes", f"{name}: {loaded.dtype} {tuple(loaded.shape)}, saved as {want.dtype} {tuple(want.shape)}")
        flat = as_bytes(loaded.cpu().contiguous())
    else:
        if not isinstance(loaded, memoryview) and tuple(loaded.shape) != tuple(want.shape):
            raise Failure("wrong bytes", f"{name}: shape {tuple(loaded.shape)}, saved as {tuple(want.shape)}")
        text = bytearray(loaded.tobytes())
        flat = torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
    saved = as_bytes(want.contiguous())
    if not torch.equal(flat, saved):
        where = f"{len(flat)} bytes of {len(saved)}"
        if len(flat) == len(saved):
            differing = (flat != saved).nonzero().reshape(-1)
            where = f"{len(differing)} of {len(saved)} bytes, from {int(differing[0])} to {int(differing[-1])}"
        raise Failure("wrong bytes", f"{name}: {where}")


def compare_all(loaded: Mapping[str, Any], want: Tensors, names: Iterable[str] | None = None) -> None:
    """Compares the tensors of a whole model, or only the named tensors, with `compare`."""
    expected = list(want) if names is None else list(names)
    if sorted(loaded) != sorted(expected):
        raise Failure("wrong bytes", f"the tensors are {sorted(loaded)}, saved were {sorted(expected)}")
    for name in expected:
        compare(name, loaded[name], want[name])


def which(loaded: Mapping[str, Any], versions: Mapping[Any, Tensors]) -> Any:
    """Returns which version a loaded model is. Raises Failure if it is not one complete version."""
    reasons = []
    for number, tensors in versions.items():
        try:
            compare_all(loaded, tensors)
            return number
        except Failure as failure:
            reasons.append(f"  not version {number}: {failure}")
    raise Failure("wrong bytes", "\n".join(["the loaded tensors are not one complete version", *reasons]))


def clones(tensors: Tensors, device: str = "cpu") -> Tensors:
    """Returns copies of tensors. Tied tensors stay tied."""
    copies: dict[int, torch.Tensor] = {}
    return {name: copies.setdefault(id(tensor), tensor.to(device, copy=True)) for name, tensor in tensors.items()}

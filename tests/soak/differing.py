"""Loops that change files and read each with two readers. If both accept a file, their results must be the same."""

from __future__ import annotations

import datetime
import random
import struct
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import overwire as ow
import torch
from checksums import with_checksums
from overwire.portable import read

from .outcomes import Failure, Round

_SHAPES = (0, 1, 2, 3, 7, 64, 129, 300, 1000)
_DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32,
    torch.uint64, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip
# Readers may differ at these numbers.
_EDGES = (
    0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 63, 64, 127, 128, 255, 256, 257, 4095, 4096, 8192, 65535, 65536, 0xFFFFFFFF,
    0x80000000, 0x7FFFFFFF,
)  # fmt: skip
# This many changes are tried on each file.
_EACH = 25


def _random_bytes(rng: random.Random, count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(rng.randbytes(max(1, count))), dtype=torch.uint8)[:count]


def _random_tensor(rng: random.Random, shape: list[int], is_coded: bool) -> torch.Tensor:
    """Returns a tensor of any dtype, with random bytes or with values that compress like a model's."""
    dtype = rng.choice(_DTYPES)
    count = torch.Size(shape).numel()
    if is_coded and dtype.is_floating_point and dtype.itemsize > 1:
        source = torch.Generator().manual_seed(rng.getrandbits(40))
        values = torch.randn(shape, generator=source) * rng.choice((1, 0.02, 1e-30, 1e10))
        return torch.full(shape, rng.random()).to(dtype) if rng.random() < 0.1 else values.to(dtype)
    if is_coded and dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64):
        source = torch.Generator().manual_seed(rng.getrandbits(40))
        return torch.randint(0, rng.choice((3, 100)), shape, generator=source).to(dtype)
    raw = _random_bytes(rng, count * dtype.itemsize)
    raw = raw & 1 if dtype is torch.bool else raw
    if dtype is torch.float4_e2m1fn_x2 and not shape:
        shape = [1]
    return raw.view(dtype).reshape(shape)


# -- containers


def containers(round_: Round) -> None:
    """Fields or stored bytes of a container are changed, and its checksums are made to match. The engine and the
    portable reader then give the same names, dtypes, shapes and bytes, or both refuse the file. load_file accepts the
    same files as safe_open."""
    rng, path = round_.rng, round_.folder / "m.safetensors"
    while round_.lasts():
        round_.doing = "saving"
        whole = _save_container(rng, path)
        for _ in range(_EACH):
            data = bytearray(whole)
            round_.doing = _change_container(rng, data)
            path.write_bytes(with_checksums(data))
            round_.count("changed containers")
            _compare_readers(round_, path)
            if not round_.lasts():
                return


def _save_container(rng: random.Random, path: Path) -> bytes:
    tensors = {}
    for number in range(rng.randint(1, 6)):
        shape = [rng.choice(_SHAPES) for _ in range(rng.randint(0, 2))]
        tensors[rng.choice(("a", "b", "é", "layer.", "x/y", "z")) + str(number)] = _random_tensor(rng, shape, True)
    if rng.random() < 0.4:
        name = rng.choice(sorted(tensors))
        one = tensors[name]
        tensors["tied"] = one.view(torch.uint8).clone().view(one.dtype) if one.dim() else one.clone()
        if one.dim() > 1:
            tensors["flat"] = one.reshape(-1)
    ow.save_file(tensors, path, rng.choice((None, {}, {"k": "v"})), level=rng.choice(("default", "smaller")))
    return path.read_bytes()


def _change_container(rng: random.Random, data: bytearray) -> str:
    """Changes one to three bytes or numbers, and returns their positions."""
    base = 8 + int.from_bytes(data[:8], "little")
    tensors, chunks, dims = struct.unpack_from("<3I", data, base + 16)
    parts = [(base, 64), (base + 64, 8 * dims), (base + 64 + 8 * dims, 64 * tensors)]
    table = base + 64 + 8 * dims + 64 * tensors
    parts.append((table, 32 * chunks))
    for chunk in range(chunks):
        offset, stored = struct.unpack_from("<QI", data, table + 32 * chunk)
        parts += [(offset, min(stored, 160)), (offset, stored)]
    parts = [part for part in parts if part[1]]
    places = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        start, size = rng.choice(parts[:4]) if rng.random() < 0.5 else rng.choice(parts)
        at, how = start + rng.randrange(size), rng.random()
        if how < 0.4:
            data[at] ^= 1 << rng.randrange(8)
        elif how < 0.7:
            data[at] = rng.randrange(256)
        elif how < 0.85 and at + 4 <= len(data):
            struct.pack_into("<I", data, at, rng.choice(_EDGES))
        else:
            data[at] = data[at] + rng.choice((1, 255)) & 255
        places.append(at - base)
    return f"changed at {places} from the index on"


def _by_engine(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ow.safe_open(path, framework="bytes") as file:
        for name in file:
            part = file.get_slice(name)
            found[name] = part.get_dtype(), tuple(part.get_shape()), _bytes_or_class(file, name)
        found[""] = file.metadata() or None
    return found


def _by_portable(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with read.safe_open(path, "bytes") as file:
        for name, entry in file.entries().items():
            found[name] = entry.dtype, tuple(entry.shape), _bytes_or_class(file, name)
        found[""] = file.metadata() or None
    return found


def _bytes_or_class(file: Any, name: str) -> bytes | type:
    try:
        return bytes(file.get_tensor(name))
    except ow.OverwireError as error:
        return _OfFrame if "Zstandard frame" in str(error) else ow.OverwireError


class _OfFrame:
    """The result for a Zstandard frame that the engine refuses, although the portable reader's libzstd may accept
    it."""


def _compare_readers(round_: Round, path: Path) -> None:
    fates: list[dict[str, Any] | type] = []
    for reader in (_by_engine, _by_portable):
        try:
            fates.append(reader(path))
        except ow.OverwireError:
            fates.append(ow.OverwireError)
    engine, portable = fates
    if isinstance(engine, type) or isinstance(portable, type):
        if engine != portable:
            raise Failure("wrong bytes", f"one reader refuses a file that the other accepts: {[type(fate) for fate in fates]}")
        round_.count("refusals")
        return
    for name in engine.keys() | portable.keys():
        one, other = engine.get(name), portable.get(name)
        if name and one is not None and other is not None and one[2] is _OfFrame and one[:2] == other[:2]:
            round_.count("frames that the engine refuses")
            continue
        if one != other:
            raise Failure("wrong bytes", f"{name!r}: {_spell(one)} by the engine, {_spell(other)} by the other reader")
    parts = {name: fate[2] for name, fate in engine.items() if name}
    round_.count("taken" if all(isinstance(data, bytes) for data in parts.values()) else "taken in part")
    try:
        loaded: Any = {name: bytes(data) for name, data in ow.load_file(path, framework="bytes").items()}
    except ow.OverwireError:
        loaded = None
    if loaded != (parts if all(isinstance(data, bytes) for data in parts.values()) else None):
        raise Failure("wrong bytes", "load_file and safe_open give different tensors")


def _spell(fate: Any) -> Any:
    if isinstance(fate, tuple):
        return (*fate[:2], "bytes" if isinstance(fate[2], bytes) else fate[2])
    return fate


# -- .tensors files


def tensors_files(round_: Round) -> None:
    """If a .tensors file that was changed or cut loads with other tensors, `verify` finds the damage."""
    rng, path = round_.rng, round_.folder / "m.tensors"
    while round_.lasts():
        round_.doing = "saving"
        tensors = {
            f"t{number}": _random_tensor(rng, [rng.choice((1, 3, 50)), rng.choice((1, 4, 9))], True)
            for number in range(rng.randint(1, 3))
        }
        ow.save_file(tensors, path)
        whole, want = path.read_bytes(), _load_tensors(path)
        for _ in range(2 * _EACH):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 1, 2))):
                at = rng.randrange(len(data))
                data[at] = data[at] ^ 1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(256)
                round_.doing = f"changed at {at}"
            if rng.random() < 0.05:
                del data[rng.randrange(len(data)) :]
            path.write_bytes(data)
            round_.count("changed .tensors files")
            _compare_with_verify(round_, path, want)
            if not round_.lasts():
                return


def _load_tensors(path: Path) -> dict[str, Any]:
    loaded = ow.load_file(path, framework="pt")
    return {name: (t.dtype, tuple(t.shape), _bytes_of(t)) for name, t in loaded.items()}


def _compare_with_verify(round_: Round, path: Path, want: dict[str, Any]) -> None:
    got: dict[str, Any] | None = None
    try:
        got = _load_tensors(path)
    except ow.OverwireError:
        round_.count("refusals")
    try:
        is_sound = ow.verify(path)["ok"]
    except ow.OverwireError:
        is_sound = False
    if got is not None and got != want and is_sound:
        raise Failure("wrong bytes", "different tensors are loaded, and verify finds no damage")
    if got is not None:
        round_.count("as before" if got == want else "found by verify")


# -- torch.save files


def torch_files(round_: Round) -> None:
    """`convert` gives the same names, dtypes, shapes and bytes as torch.load, or raises an overwire error, for
    torch.save files with and without changes to the pickle. It converts every unchanged file."""
    warnings.simplefilter("ignore")
    rng, path = round_.rng, round_.folder / "m.pt"
    while round_.lasts():
        round_.doing = "saving"
        kept = _random_object(rng, 0) | {"always": _random_view(rng)}  # a file without tensors is refused
        torch.save(kept, path, pickle_protocol=rng.choice((2, 2, 3, 4, 5)))
        round_.count("torch.save files")
        _compare_with_torch(round_, path, kept)
        whole = path.read_bytes()
        for _ in range(5):
            path.write_bytes(whole)
            round_.doing = f"the pickle is changed at {_change_pickle(rng, path)}"
            round_.count("changed pickles")
            _compare_with_torch(round_, path, None)
            if not round_.lasts():
                return


def _random_object(rng: random.Random, depth: int) -> dict[Any, Any]:
    kinds = dict, OrderedDict, lambda: defaultdict(list), lambda: defaultdict(_random_object)
    made: dict[Any, Any] = rng.choice(kinds)()
    pool: list[torch.Tensor] = []
    for _ in range(rng.randint(1, 5)):
        key: Any = rng.choice(("w", "b", "a.b", "é", "0", "layer")) + str(rng.randrange(3))
        if rng.random() < 0.1:
            key = rng.randrange(5)
        what = rng.random()
        if what < 0.6:
            pool.append(_random_view(rng))
            made[key] = pool[-1]
        elif what < 0.75 and pool:
            one = rng.choice(pool)
            made[key] = one.view(-1) if one.is_contiguous() and one.dim() and rng.random() < 0.5 else one
        elif what < 0.85 and depth < 2:
            made[key] = _random_object(rng, depth + 1)
        elif what < 0.9:
            made[key] = [_random_view(rng), rng.randrange(10), "s"]
        else:
            day = datetime.date(2024, 1, rng.randint(1, 28))
            made[key] = rng.choice((1, 2.5, None, "x", True, (1, 2), [1, 2], b"\x00\xff", day, {day: 1}, {1, 2}, 1 + 2j))
    return made


def _random_view(rng: random.Random) -> torch.Tensor:
    tensor = _random_tensor(rng, [rng.choice((0, 1, 2, 3, 5, 17)) for _ in range(rng.randint(0, 3))], False)
    how = rng.random()
    if how < 0.15 and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    elif how < 0.25 and tensor.dim() and tensor.shape[0] > 2:
        tensor = tensor[1::2]
    elif how < 0.3:
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    elif how < 0.35 and tensor.dim():
        tensor = tensor[:1]
    if rng.random() < 0.15 and tensor.dtype in _DTYPES[:4]:
        return torch.nn.Parameter(tensor)
    return tensor


def _change_pickle(rng: random.Random, path: Path) -> list[int]:
    """Changes some bytes of the pickle in an archive, and returns their positions."""
    with zipfile.ZipFile(path) as old:
        entries = {name: bytearray(old.read(name)) for name in old.namelist()}
    data = next(data for name, data in entries.items() if name.endswith("/data.pkl"))
    places = [rng.randrange(len(data)) for _ in range(rng.choice((1, 1, 2, 3)))]
    for at in places:
        how, at = rng.random(), min(at, len(data) - 1)
        if how < 0.5:
            data[at] = rng.randrange(256)
        elif how < 0.75:
            data[at] ^= 1 << rng.randrange(8)
        elif how < 0.85:
            del data[at]
        else:
            data.insert(at, rng.randrange(256))
    method = zipfile.ZIP_DEFLATED if rng.random() < 0.1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as new:
        for name, data in entries.items():
            new.writestr(name, bytes(data))
    return places


def _tensors_in(value: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield ".".join(at), value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors_in(part, (*at, str(key)))
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _tensors_in(part, (*at, str(number)))


def _bytes_of(tensor: torch.Tensor) -> bytes:
    whole = tensor.detach().resolve_conj().resolve_neg() if tensor.is_complex() else tensor.detach()
    whole = whole.view(torch.uint8) if whole.dtype is torch.float4_e2m1fn_x2 else whole  # torch cannot copy it
    flat = whole.clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _compare_with_torch(round_: Round, path: Path, kept: dict[Any, Any] | None) -> None:
    """Compares `convert` with torch.load. kept: the saved object. If it is None and torch.load accepts the file, the
    comparison is with torch.load's result."""
    want: list[tuple[str, torch.Tensor]] | None
    try:
        want = list(_tensors_in(kept if kept is not None else torch.load(path, weights_only=True)))
    except Exception:  # a broken pickle may raise any error
        want = None
    target = path.with_suffix(".safetensors")
    names = [name for name, _ in want or ()]
    try:
        ow.convert(path, target, compress=round_.rng.random() < 0.5)
        with ow.safe_open(target, framework="pt") as file:
            got = {name: file.get_tensor(name) for name in file}
    except ow.OverwireError as error:
        if kept is not None and len(set(names)) == len(names):
            raise Failure("unexpected error", f"a torch.save file is refused: {error}") from error
        round_.count("refusals")
        return
    if want is None:
        round_.count("taken, and not by torch")
        return
    if len(set(names)) != len(names):
        raise Failure("wrong bytes", f"two tensors with the same name are accepted: {sorted(names)}")
    if sorted(names) != sorted(got):
        raise Failure("wrong bytes", f"names differ: {sorted(set(names) ^ set(got))}")
    for name, tensor in want:
        here = got[name]
        if (here.dtype, here.shape) != (tensor.dtype, tensor.shape) or _bytes_of(here) != _bytes_of(tensor):
            raise Failure("wrong bytes", f"{name!r}: {tensor.dtype} {tuple(tensor.shape)} is {here.dtype} {tuple(here.shape)}")
    round_.count("as torch reads them")

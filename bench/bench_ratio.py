"""Compares sizes of real weights at both levels with other compressors, and measures decoding speeds.

    python bench/bench_ratio.py [--folder DIR] [--device cuda] [FILE ...]

The inputs are the files, or MiniLM (downloaded by examples/demo.py): the original, cast, and quantised to int8 by rows
and to 4 bits as packed by GPTQ. Every file is loaded back and compared. The sizes are printed next to zstandard at
level 3 on the whole file, ZipNN if it is installed, and two order-0 entropies by chunks of 1 MiB. One is of the
exponents with the other bits raw, as X16 codes them, the other of every byte of the elements. These entropies are not
limits for other coders or chunk sizes. Loads are from the page cache. Each figure is the median of five, alternating
between both levels and the plain file, which is read without mmap.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import torch
import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import demo

CHUNK = 1 << 20
Tensors = dict[str, torch.Tensor]


def floats(cast: Any) -> Any:
    return lambda t: cast(t) if t.dtype == torch.float32 else t


def int8(t: torch.Tensor) -> torch.Tensor:
    return (t / (t.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127)).round().to(torch.int8) if t.dim() == 2 else t


def gptq(name: str, weight: torch.Tensor) -> Tensors:
    """Quantises to 4 bits in groups of 128 inputs, and packs eight numbers into each I32."""
    inputs, outputs = weight.shape[1], weight.shape[0]
    group = weight.t().reshape(inputs // 128, 128, outputs)
    low, high = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
    scale = (high - low).clamp(min=1e-9) / 15
    zero = (-low / scale).round()
    bits = (group / scale + zero).round().clamp(0, 15).reshape(inputs, outputs).to(torch.int64)
    packed = sum(bits[k::8] << 4 * k for k in range(8))
    assert isinstance(packed, torch.Tensor)
    signed = torch.from_numpy(packed.numpy().astype(np.uint32).view(np.int32).copy())
    return {name + ".qweight": signed, name + ".scales": scale.reshape(-1, outputs).half()}


def files(real: Tensors) -> dict[str, Tensors]:
    casts = {
        "fp32": lambda t: t,
        "bf16": lambda t: t.bfloat16(),
        "fp16": lambda t: t.half(),
        "fp32 that holds bf16": lambda t: t.bfloat16().float(),
        "fp8 e4m3": lambda t: t.to(torch.float8_e4m3fn),
        "fp8 e5m2": lambda t: t.to(torch.float8_e5m2),
        "int8 by rows": int8,
    }
    out = {name: {k: floats(cast)(t).contiguous() for k, t in real.items()} for name, cast in casts.items()}
    out["4 bits, packed in I32"] = {}
    for k, t in real.items():
        if t.dim() == 2 and "encoder" in k:
            out["4 bits, packed in I32"] |= gptq(k, t)
    return out


def raw(t: torch.Tensor) -> np.ndarray:
    return t.reshape(-1).view(torch.uint8).numpy()


def entropy(values: np.ndarray) -> float:
    """Returns the bytes needed to code the values by their own frequencies."""
    counts = np.bincount(values)
    counts = counts[counts > 0]
    return float((counts * (np.log2(counts.sum()) - np.log2(counts))).sum()) / 8


# The lowest bit of an exponent, and its number of bits.
EXPONENT = {
    torch.float32: (23, 8), torch.bfloat16: (7, 8), torch.float16: (10, 5), torch.float8_e4m3fn: (3, 4),
    torch.float8_e5m2: (2, 5),
}


def entropies(tensors: Tensors) -> tuple[float, float]:
    """Returns the share that remains when exponents are coded, and when every byte is coded."""
    total = field = every = 0.0
    for t in tensors.values():
        data, width = raw(t), t.element_size()
        for at in range(0, len(data), CHUNK):
            words = data[at : at + CHUNK].view(f"u{width}")
            total += words.nbytes
            if t.dtype in EXPONENT:
                shift, bits = EXPONENT[t.dtype]
                mask = np.array(2**bits - 1, words.dtype)
                field += entropy(words >> np.array(shift, words.dtype) & mask) + len(words) * (8 * width - bits) / 8
                words = words << np.array(1, words.dtype) | words >> np.array(8 * width - 1, words.dtype)
            else:
                field += entropy(words.view(np.uint8) >> 4) + entropy(words.view(np.uint8) & 15)
            every += sum(entropy(plane) for plane in words.view(np.uint8).reshape(-1, width).T)
    return field / total, every / total


def zipnn(data: bytes, dtype: torch.dtype) -> str:
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    try:
        import zipnn as package
    except ImportError:
        return "-"
    if dtype not in names:
        return "-"
    return f"{len(package.ZipNN(bytearray_dtype=names[dtype], input_format='byte').compress(data)) / len(data):.4f}"


def load(path: str, device: str) -> Tensors:
    tensors: Tensors = ow.load_file(path, device=device)
    if device != "cpu":
        torch.cuda.synchronize()
    return tensors


def same(path: str, tensors: Tensors, device: str) -> None:
    back = load(path, device)
    assert back.keys() == tensors.keys()
    for name, t in tensors.items():
        assert back[name].dtype == t.dtype and np.array_equal(raw(back[name].cpu()), raw(t)), name


def seconds(path: str, device: str) -> float:
    start = time.perf_counter()
    load(path, device)
    return time.perf_counter() - start


def measure(name: str, tensors: Tensors, folder: str, device: str) -> None:
    paths = {level: os.path.join(folder, level + ".safetensors") for level in ("plain", "default", "smaller")}
    ow.save_file(tensors, paths["plain"], compress=False)
    encode = []
    for level in ("default", "smaller"):
        encode.append(ow.save_file(tensors, paths[level], level=level).seconds)
        same(paths[level], tensors, device)
    data = Path(paths["plain"]).read_bytes()
    size = {level: os.path.getsize(path) / len(data) for level, path in paths.items()}
    took: dict[str, list[float]] = {level: [] for level in paths}
    for _ in range(5):
        for level, list_of in took.items():
            list_of.append(seconds(paths[level], device))
    speed = [len(data) / 1e9 / statistics.median(t) for t in took.values()]
    field, every = entropies(tensors)
    zstd = len(zstandard.ZstdCompressor(level=3).compress(data)) / len(data)
    peer = zipnn(data, max(tensors.values(), key=lambda t: t.nbytes).dtype)
    saved = [len(data) / 1e9 / t for t in encode]
    row = [f"{name}, {len(data) / 1e6:.0f} MB", f"{size['default']:.4f}", f"{size['smaller']:.4f}", f"{zstd:.4f}", peer]
    row += [f"{field:.4f} / {every:.4f}", " / ".join(f"{s:.2f}" for s in speed), f"{saved[0]:.2f} / {saved[1]:.2f}"]
    print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="*", help="safetensors files; default: MiniLM and files made from it")
    parser.add_argument("--folder", help="where files are written; default: a temporary folder")
    parser.add_argument("--device", default="cpu", help="where files are loaded to")
    args = parser.parse_args()
    from safetensors.torch import load_file

    os.environ["OVERWIRE_MMAP"] = "off"

    measured = {Path(file).stem: load_file(file) for file in args.file} or files(load_file(demo.real_weights()))
    head = [
        "weights",
        "default",
        "smaller",
        "zstd -3",
        "ZipNN",
        "exponents / bytes alone",
        "load, GB/s: plain / default / smaller",
        "save, GB/s: default / smaller",
    ]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name, tensors in measured.items():
            measure(name, tensors, folder, args.device)


if __name__ == "__main__":
    main()

"""What the default would save by coding more bits of each element: calculated, nothing is written so.

    python tests/bench_wider.py

X16 codes one field of an element by 16 symbols, whose frequencies have 8 bits. Here the sizes
of files are calculated as if it coded one more bit, or whole bytes (fp8: the byte; fp16:
the high one; fp32: exponent and low byte; integers: both nibbles), with more symbols and
frequencies of 8 to 12 bits. Frequencies are fitted to each chunk of 1 MiB; states of
segments, escapes, and tables of two bytes a symbol are counted; all else is the
file's as it is. Weights are those of bench_ratio.py, and MiniLM in fp8 with a scale for
each tensor or row, as published models have them.
`go test ./gosrc/codec/x16 -run none -bench Wider` has the other side: what that would cost the
vector decoders at least.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import bench_ratio
import numpy as np
import overwire as ow
import torch
import zstandard
from bench_ratio import CHUNK, Tensors

BITS = (8, 10, 11, 12)
ESCAPE = 24  # bits
Field = Callable[[np.ndarray], np.ndarray]
Fields = tuple[list[Field], int]  # what is coded, and how many bits stay raw


def words(counts: np.ndarray, bits: int) -> float:
    """Bits of values with these counts, by frequencies of at least 1 that sum to 2^bits."""
    if len(counts) == 1:
        return 0.0
    freq = np.maximum(1, np.floor(counts * 2**bits / counts.sum()))
    while (left := int(2**bits - freq.sum())) > 0:
        freq[(counts * np.log2(1 + 1 / freq)).argmax()] += 1
    while left < 0:
        loss = np.where(freq > 1, -counts * np.log2(1 - 1 / np.maximum(freq, 2)), np.inf)
        freq[loss.argmin()] -= 1
        left += 1
    return float((counts * (bits - np.log2(freq))).sum())


def stream(values: np.ndarray, bits: int, most: int) -> float:
    """Bytes of one coded stream: states, words and escapes, and a table."""
    counts = np.bincount(values)
    counts = np.sort(counts[counts > 0])[::-1].astype(np.float64)
    tiles = len(values) // 256
    segments = -(-tiles // 256)
    segments = min(segments + 3 & ~3, max(segments, tiles // 32, 1))
    sizes = [words(counts, bits)] if len(counts) <= most else []
    for kept in range(max(1, min(most, len(counts)) - 8), min(most, len(counts))):
        rare = counts[kept:].sum()
        sizes.append(words(np.append(counts[:kept], rare), bits) + rare * ESCAPE)
    table = 96 if most == 16 else 96 + 2 * min(most, len(counts))
    return min(sizes) / 8 + segments * 144 + 16 + table


def coded(tensors: Tensors, dtype: torch.dtype, fields: Fields, bits: int, most: int) -> float:
    """Bytes of the tensors of a dtype; those under 16 KiB are left out."""
    total = 0.0
    for t in tensors.values():
        if t.dtype != dtype or t.nbytes < 1 << 14:
            continue
        data, width = bench_ratio.raw(t), 1 if dtype == torch.int32 else t.element_size()
        for at in range(0, len(data), CHUNK):
            x = data[at : at + CHUNK].view(f"u{width}").astype(np.uint32)
            total += len(x) * fields[1] / 8
            total += sum(stream(f(x), bits, most) for f in fields[0])
    return total


def pick(shift: int, bits: int) -> Field:
    return lambda x: x >> shift & (1 << bits) - 1


def nibbles(x: np.ndarray) -> np.ndarray:
    return np.stack([x & 15, x >> 4]).reshape(-1)


# The dtype, what is coded today, with one more bit, and as whole bytes.
KINDS: dict[str, tuple[torch.dtype, Fields, Fields | None, Fields | None]] = {
    "fp32": (torch.float32, ([pick(23, 8)], 24), ([pick(22, 9)], 23), ([pick(23, 8), pick(0, 8)], 16)),
    "bf16": (torch.bfloat16, ([pick(7, 8)], 8), ([pick(6, 9)], 7), None),
    "fp16": (torch.float16, ([pick(10, 5)], 11), ([pick(9, 6)], 10), ([pick(8, 8)], 8)),
    "fp8 e4m3": (torch.float8_e4m3fn, ([pick(3, 4)], 4), ([pick(2, 5)], 3), ([pick(0, 8)], 0)),
    "fp8 e5m2": (torch.float8_e5m2, ([pick(2, 5)], 3), ([pick(1, 6)], 2), ([pick(0, 8)], 0)),
    "4 bits": (torch.int32, ([nibbles], 0), None, ([pick(0, 8)], 0)),
}


def scaled(real: Tensors, by: int | None) -> Tensors:
    """e4m3 by a scale for each row, or for each tensor."""
    out = {}
    for name, t in real.items():
        if t.dtype == torch.float32 and t.dim() == 2:
            top = t.abs().amax() if by is None else t.abs().amax(by, keepdim=True)
            out[name] = (t * (448 / top.clamp(min=1e-12))).to(torch.float8_e4m3fn)
    return out


def measure(name: str, tensors: Tensors) -> None:
    dtype, today, more, whole = next(kind for prefix, kind in KINDS.items() if name.startswith(prefix))
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = os.path.join(folder, "plain"), os.path.join(folder, "packed")
        ow.save_file(tensors, plain, compress=False)
        ow.save_file(tensors, packed)
        data, size = Path(plain).read_bytes(), os.path.getsize(packed)
    base = coded(tensors, dtype, today, 8, 16)

    def ratio(fields: Fields | None, bits: int, most: int = 256) -> str:
        return "-" if fields is None else f"{(size - base + coded(tensors, dtype, fields, bits, most)) / len(data):.4f}"

    zstd = len(zstandard.ZstdCompressor(level=3).compress(data)) / len(data)
    row = [name, f"{size / len(data):.4f}", f"{zstd:.4f}", ratio(more, 8, 16)]
    for fields, most in ((more, 32), (whole, 256)):
        row.append(" / ".join(ratio(fields, bits, most) for bits in BITS) if fields else "-")
    print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    from safetensors.torch import load_file

    bits = " / ".join(map(str, BITS))
    head = ["weights", "default", "zstd -3", "one more bit, 16 symbols"]
    head += [f"one more bit, 32 symbols of {bits} bits", f"whole bytes, of {bits} bits"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    real = load_file(bench_ratio.demo.real_weights())
    weights = bench_ratio.files(real)
    weights["fp8 e4m3, scaled by tensor"] = scaled(real, None)
    weights["fp8 e4m3, scaled by row"] = scaled(real, 1)
    for name, tensors in weights.items():
        if "int8" not in name and "holds" not in name:
            measure(name, tensors)


if __name__ == "__main__":
    main()

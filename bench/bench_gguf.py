"""Computes the sizes of GGUF's blocks with an ideal coder of single values, for the table in docs/folders.md.

    python bench/bench_gguf.py

Prints stored / original for each type and three kinds of values. The stored size is the order-0 entropy of each field
of the blocks (values, and scales by byte), because X16 codes exponents in this way. Q4_K and Q6_K are quantised to the
nearest value, without llama.cpp's search. The package gguf quantises all other types.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from numpy.typing import NDArray
from overwire._engine import cli

Array = NDArray[Any]
VALUES = 1 << 24


def entropy(field: Array) -> float:
    """Returns the bits per value of a field."""
    counts = np.unique(field, return_counts=True)[1] / field.size
    return float(-(counts * np.log2(counts)).sum())


def of_halves(scales: Array) -> float:
    """Returns the bits per float16 if each byte is coded separately."""
    return sum(entropy(byte) for byte in np.ascontiguousarray(scales).view(np.uint8).reshape(-1, 2).T)


def nibbles(data: Array) -> Array:
    return np.concatenate([data & 15, data >> 4], 1)


def of_blocks(kind: Type, blocks: Array) -> float:
    """Returns the bits per value of the blocks that the package gguf makes."""
    if kind == Type.F16:
        return entropy(blocks.view(np.uint16) >> 10 & 31) + 11
    if kind == Type.BF16:
        return entropy(blocks.view(np.uint16) >> 7 & 255) + 8
    size = {Type.Q4_0: 18, Type.Q5_0: 22, Type.Q8_0: 34}[kind]
    rows = blocks.reshape(-1, size)
    scale, rest = of_halves(rows[:, :2]) / 32, rows[:, 2:]
    if kind == Type.Q5_0:
        high = np.unpackbits(np.ascontiguousarray(rest[:, :4]), axis=1, bitorder="little")
        return entropy(nibbles(rest[:, 4:]) | high << 4) + scale
    return entropy(rest if kind == Type.Q8_0 else nibbles(rest)) + scale


def of_q4_k(values: Array) -> float:
    """Returns the bits per value of Q4_K: 8 blocks of 32, each with a scale and a minimum of 6 bits."""
    blocks = values.reshape(-1, 8, 32)
    low = -np.minimum(blocks.min(2), 0)
    step = (blocks.max(2) + low) / 15
    units = [(part.max(1) / 63).astype("f2") for part in (step, low)]
    pairs = zip((step, low), units, strict=True)
    fields = [np.rint(part / np.maximum(unit.astype("f4"), 1e-12)[:, None]) for part, unit in pairs]
    scale, least = (unit.astype("f4")[:, None] * field for unit, field in zip(units, fields, strict=True))
    quants = np.clip(np.rint((blocks + least[..., None]) / np.maximum(scale, 1e-12)[..., None]), 0, 15)
    return entropy(quants) + sum(map(entropy, fields)) / 32 + sum(map(of_halves, units)) / 256


def of_q6_k(values: Array) -> float:
    """Returns the bits per value of Q6_K: 16 blocks of 16, each with a scale of 8 bits."""
    blocks = values.reshape(-1, 16, 16)
    step = -np.take_along_axis(blocks, np.abs(blocks).argmax(2)[..., None], 2)[..., 0] / 32
    unit = (np.abs(step).max(1) / 127).astype("f2")
    field = np.clip(np.rint(step / np.maximum(unit.astype("f4"), 1e-12)[:, None]), -128, 127)
    scale = unit.astype("f4")[:, None] * field
    quants = np.clip(np.rint(blocks / np.where(scale == 0, 1, scale)[..., None]), -32, 31)
    return entropy(quants) + entropy(field) / 16 + of_halves(unit) / 256


def kinds() -> dict[str, Array]:
    """Returns values by kind."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llama.safetensors"
        assert cli(["bench", "gen", "llama-bf16", str(path), "--size", "100MB"]) == 0
        tensors = ow.load_file(path, framework="np").values()
        weights = [tensor.astype("f4").ravel() for tensor in tensors if tensor.ndim == 2]
    return {
        "weights like Llama's": np.concatenate(weights)[:VALUES],
        "normal": rng.normal(0, 0.02, VALUES).astype("f4"),
        "Student's t, 5 degrees": (rng.standard_t(5, VALUES) * 0.02).astype("f4"),
    }


def main() -> None:
    for name, values in kinds().items():
        print(f"{name}, {values.size:,} values")
        rows = {"Q4_K": (of_q4_k(values), 4.5), "Q6_K": (of_q6_k(values), 6.5625)}
        for kind in (Type.Q4_0, Type.Q5_0, Type.Q8_0, Type.F16, Type.BF16):
            blocks = np.ascontiguousarray(quantize(values.reshape(-1, 4096), kind)).view(np.uint8)
            rows[kind.name] = (of_blocks(kind, blocks), 8 * blocks.size / values.size)
        for kind_name, (bits, stored) in sorted(rows.items()):
            print(f"  {kind_name:5} {bits:7.4f} of {stored:7.4f} bits: {bits / stored:.3f}")


if __name__ == "__main__":
    main()

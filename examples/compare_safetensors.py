"""Compares overwire's tensors of a model with those of the safetensors library.

    python compare_safetensors.py MODEL [PLAIN]

MODEL is a file or a folder. PLAIN has the plain files; without it, a compressed MODEL is first decompressed to a
temporary folder. The bytes, dtype and shape of each tensor must be equal. The exit status is 1 if a tensor differs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import overwire as ow
import torch
from safetensors import safe_open


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares dtype, shape and bits. Comparing bits also works for NaNs."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def plain_files(plain: Path) -> list[Path]:
    return [plain] if plain.is_file() else sorted(plain.rglob("*.safetensors"))


def compare(model: Path, plain: Path) -> list[str]:
    """Returns a line for each difference. Only one pair of tensors is in memory at a time."""
    faults, count = [], 0
    for file in plain_files(plain):
        packed = model if model.is_file() else model / file.relative_to(plain)
        if not packed.exists():
            faults.append(f"{packed}: missing")
            continue
        with safe_open(file, "pt") as theirs, ow.safe_open(packed, "pt") as ours:
            both = set(theirs.keys()) & set(ours.keys())
            faults += [f"{packed}: {name}: only one reader has it" for name in sorted(set(theirs.keys()) ^ set(ours.keys()))]
            for name in sorted(both):
                if not same(ours.get_tensor(name), theirs.get_tensor(name)):
                    faults.append(f"{packed}: {name}: differs")
            count += len(both)
    surplus = set() if model.is_file() else {p.relative_to(model) for p in plain_files(model)}
    faults += [f"{model / name}: no plain file" for name in sorted(surplus - {p.relative_to(plain) for p in plain_files(plain)})]
    print(f"{count} tensors compared with safetensors, {len(faults)} differences")
    return faults if count else [*faults, f"{plain}: no tensors"]


def main(model: Path, plain: Path | None) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        if plain is None:
            plain = Path(temporary) / ("plain" if model.is_dir() else "plain.safetensors")
            subprocess.run([sys.executable, "-m", "overwire", "decompress", "-q", model, "-o", plain], check=True)
        faults = compare(model, plain)
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if len(sys.argv) > 1:
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))

# Without arguments: compare a small model.
state = {"w": torch.randn(400, 300).bfloat16(), "nan": torch.full((3,), float("nan")), "none": torch.zeros(0, 4)}
ow.save_file(state, "model.safetensors")
assert main(Path("model.safetensors"), None) == 0

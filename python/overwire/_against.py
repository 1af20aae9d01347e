"""Implements `overwire verify MODEL --against safetensors`: compares every tensor with what safetensors reads.

It uses torch and the safetensors library, but none of the engine's own verification.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ._children import module_command
from .errors import OverwireError

_DOC = """Compares the dtype, shape and bytes of every tensor with what the safetensors library reads from the
plain files. With --against safetensors, the command first makes the plain files: it decompresses MODEL into a temporary
folder. The exit status is 1 if something differs."""


def _list_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*.safetensors"))


def _is_same(a: Any, b: Any) -> bool:
    # Compares bits, so that NaNs with equal bits are equal.
    import torch

    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def compare_with_safetensors(model: Path, plain: Path) -> tuple[int, list[str]]:
    """Compares two files or folders. Returns how many tensors were compared, and a line for each difference. Only one
    tensor of each model is in memory at a time."""
    from safetensors import safe_open

    import overwire as ow

    faults, count = [], 0
    for file in _list_files(plain):
        model_file = model if model.is_file() else model / file.relative_to(plain)
        if not model_file.exists():
            faults.append(f"{model_file}: missing")
            continue
        with safe_open(file, "pt") as plain_reader, ow.safe_open(model_file, "pt") as model_reader:
            both = set(plain_reader.keys()) & set(model_reader.keys())
            surplus = set(plain_reader.keys()) ^ set(model_reader.keys())
            faults += [f"{model_file}: {name}: only one of the files has it" for name in sorted(surplus)]
            for name in sorted(both):
                if not _is_same(model_reader.get_tensor(name), plain_reader.get_tensor(name)):
                    faults.append(f"{model_file}: {name}: differs")
            count += len(both)
    if model.is_dir():
        plain_names = {file.relative_to(plain) for file in _list_files(plain)}
        faults += [f"{p}: missing in PLAIN" for p in _list_files(model) if p.relative_to(model) not in plain_names]
    return count, faults if count else [*faults, f"{plain}: no tensors"]


def main(words: list[str]) -> int:
    """Runs the command with the arguments after `verify`. Returns the exit status."""
    parser = argparse.ArgumentParser("overwire verify", description=_DOC, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="a safetensors file, or a folder with such files")
    words_for_plain = 'plain files to compare with, or "safetensors"'
    parser.add_argument("--against", required=True, metavar="PLAIN", help=words_for_plain)
    parser.add_argument("--json", action="store_true", help="print one JSON document for machines")
    args = parser.parse_args(words)
    model = Path(args.model)
    with tempfile.TemporaryDirectory(prefix="overwire-verify-") as temporary:
        plain = Path(args.against)
        if args.against == "safetensors":
            plain = Path(temporary) / ("plain" if model.is_dir() else "plain.safetensors")
            command = module_command("overwire", "decompress", "-q", str(model), "-o", str(plain))
            if status := subprocess.run(command).returncode:
                return status
        for path in (model, plain):
            if not path.exists():
                sys.stderr.write(f"overwire: verify: {path}: not found\n")
                return 3
        try:
            from safetensors import SafetensorError

            count, faults = compare_with_safetensors(model, plain)
        except ImportError as error:
            sys.stderr.write(f"overwire: verify: --against needs {error.name}: pip install {error.name}\n")
            return 5
        except OverwireError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        except SafetensorError as error:
            sys.stderr.write(f"overwire: verify: {plain}: safetensors cannot read it: {error}\n")
            return 1
    if args.json:
        text = json.dumps({"tensors": count, "differences": faults})
    else:
        text = "\n".join([f"{count} tensors compared with safetensors, {len(faults)} differences", *faults])
    sys.stdout.write(text + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

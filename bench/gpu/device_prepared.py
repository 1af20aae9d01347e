"""Tests prepared state on a GPU without an engine: a model with vLLM's shapes is stored in a file and created from it.

    python bench/gpu/device_prepared.py             the fused tensors of Llama 8B, 16 GB, in /dev/shm
    python bench/gpu/device_prepared.py --experts 48 layers with 128 experts each, 15 GB
    python bench/gpu/device_prepared.py --device cpu --layers 1      without a GPU

The first process makes the weights and stores them. Fresh processes make the model on the meta device and load the file
into it. Every tensor's digest is compared. The time is printed next to those of `load_file` on the same file and of
copying as many stored bytes from pinned memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch


class Layer(torch.nn.Module):
    """A decoder layer in the form engines use: fused, with one weight transposed as for fp8 kernels."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        wide, inner = (2048, 192) if experts else (4096, 14336)
        shapes: dict[str, tuple[int, ...]] = {"qkv": (6144 if not experts else 5120, wide), "o": (wide, 4096), "norm": (wide,)}
        if experts:
            shapes.update(w13=(128, 2 * inner, wide), w2=(128, wide, inner), gate=(128, wide))
        else:
            shapes.update(gate_up=(2 * inner, wide), down=(wide, inner))
        for name, shape in shapes.items():
            weight = torch.empty(shape[::-1] if name == "o" else shape, dtype=torch.bfloat16)
            self.register_parameter(name, torch.nn.Parameter(weight.t() if name == "o" else weight, requires_grad=False))
        self.register_buffer("scale", torch.empty(()))
        self.on_host = torch.ones(3, device="cpu")


class Model(torch.nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        wide, vocabulary = (2048, 151936) if args.experts else (4096, 128256)
        self.layers = torch.nn.ModuleList(
            Layer(args.experts) for _ in range(args.layers or (48 if args.experts else 32))
        )
        self.embed, self.head = (
            torch.nn.Parameter(torch.empty(vocabulary, wide, dtype=torch.bfloat16), False) for _ in range(2)
        )


def ready(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def keep(args: argparse.Namespace, device: torch.device) -> None:
    import overwire
    from overwire.integrations.kept_model import keep_files
    from overwire.integrations.kept_model.move_tensors import take_tensors

    torch.manual_seed(1)
    with torch.device(device):
        model = Model(args)
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.normal_(std=0.02)
    tensors, rows, names = take_tensors(model)
    ready(device)
    began = time.perf_counter()
    digests = overwire.digest(tensors)
    digested = time.perf_counter()
    record = {"names": names, "tensors": rows, "modules": {}, "origins": "", "digests": digests}
    path = keep_files.keep_file(args.dir, "0" * 40, tensors, record, digests)
    size = sum(tensor.nbytes for tensor in tensors.values())
    kept = time.perf_counter() - digested
    print(f"kept: {len(tensors)} tensors, {size / 1e9:.2f} GB, stored {os.path.getsize(path) / size:.3f}, in {kept:.1f} s; ", end="")
    print(f"digests {digested - began:.3f} s", flush=True)


def make(args: argparse.Namespace, device: torch.device) -> None:
    import overwire
    from overwire.integrations.kept_model import keep_files
    from overwire.integrations.kept_model.move_tensors import Arriving, match_processed, put_tensors, take_tensors

    torch.zeros(1, device=device)
    ready(device)
    began = time.perf_counter()
    with torch.device("meta"):
        model = Model(args)
    made = time.perf_counter()
    kept = keep_files.find_file(args.dir, "0" * 40)
    assert kept is not None
    arriving = Arriving(kept.path, kept.record["tensors"], device)
    tensors = put_tensors(model, arriving, kept.record["names"], "vllm")
    arriving.finish_loading()
    match_processed(model, kept.record["names"], tensors)
    ready(device)
    took = time.perf_counter() - made
    own, rows, names = take_tensors(model)
    same = json.loads(json.dumps([rows, names])) == [kept.record["tensors"], kept.record["names"]]
    if not same or overwire.digest(own) != kept.record["digests"]:
        raise SystemExit("the loaded state differs from the kept state")
    size = sum(tensor.nbytes for tensor in own.values())
    del model, tensors, own
    if device.type == "cuda":
        torch.cuda.empty_cache()
    again = time.perf_counter()
    overwire.load_file(kept.path, str(device))
    ready(device)
    loaded = time.perf_counter() - again
    words = f"model on meta {made - began:.3f} s, prepared state {took:.3f} s, {size / took / 1e9:.1f} GB/s; load_file {loaded:.3f} s"
    print(words + floor(os.path.getsize(kept.path), device), flush=True)


def floor(stored: int, device: torch.device) -> str:
    """Returns the time of copying the same number of bytes from pinned memory."""
    if device.type != "cuda":
        return ""
    host, there = (
        torch.empty(1 << 30, dtype=torch.uint8).pin_memory(), torch.empty(1 << 30, dtype=torch.uint8, device=device),
    )
    there.copy_(host)
    ready(device)
    began = time.perf_counter()
    for _ in range(4):
        there.copy_(host, non_blocking=True)
    ready(device)
    return f"; floor: the stored bytes over the link {stored * (time.perf_counter() - began) / (4 << 30):.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--layers", type=int, default=0, help="number of layers, to test with fewer")
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--dir", default="", help=argparse.SUPPRESS)
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
        return {"keep": keep, "make": make}[args.job](args, device)
    base = Path(tempfile.mkdtemp(prefix="overwire-prepared-", dir="/dev/shm" if args.device == "cuda" else None))
    try:
        command = [sys.executable, __file__, *sys.argv[1:], "--dir", str(base)]
        for job in ["keep"] + ["make"] * args.repeat:
            subprocess.run([*command, "--job", job], check=True)
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()

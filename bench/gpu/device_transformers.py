"""Measures from_pretrained on a GPU unpatched and under `overwire.patch_safetensors`, with plain and with compressed
files, against a baseline.

    python bench/gpu/device_transformers.py                 one GPU, 7.5 GB, about 200 s
    python bench/gpu/device_transformers.py --layers 2 --hidden 512 --device cpu   without a GPU

It makes a model of Llama's shape in four shards, plain and compressed, in memory (--dir). Then fresh processes
alternately time `from_pretrained`. The baseline is the same call with a `safe_open` that returns `torch.empty` on the
device and reads nothing. Every parameter is compared with the unpatched load's byte for byte, and one run of each kind
is profiled. Needs overwire, torch, transformers and accelerate. The exit status is 1 if a parameter differs. Times are
only printed.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from children import run_child

KINDS = ("unpatched", "plain", "packed", "floor")
SHARDS = 4


def make(args: argparse.Namespace, folder: Path) -> None:
    """Writes two folders with the model's weights, plain and compressed."""
    import overwire as ow
    import safetensors.torch
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 128,
        num_key_value_heads=max(1, args.hidden // 512),
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in transformers.LlamaForCausalLM(config).state_dict().items()}
    names = list(shapes)
    sizes = [torch.Size(shapes[name]).numel() * 2 for name in names]
    total, at, shards = sum(sizes), 0, [[] for _ in range(SHARDS)]  # type: ignore[var-annotated]
    for name, size in zip(names, sizes, strict=True):
        shards[min(SHARDS - 1, at * SHARDS // total)].append(name)
        at += size
    torch.manual_seed(1)
    for kind in ("plain", "packed"):
        (folder / kind).mkdir()
    index: dict[str, str] = {}
    for number, held in enumerate(shards, 1):
        file = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        tensors = {name: (torch.randn(shapes[name], device=args.device) * 0.02).bfloat16().cpu() for name in held}
        safetensors.torch.save_file(tensors, folder / "plain" / file, metadata={"format": "pt"})
        ow.convert(folder / "plain" / file, folder / "packed" / file)
        index.update(dict.fromkeys(held, file))
    for kind in ("plain", "packed"):
        config.architectures = ["LlamaForCausalLM"]
        config.dtype = "bfloat16"
        config.save_pretrained(folder / kind)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
        (folder / kind / "model.safetensors.index.json").write_text(text)
    stored = sum(path.stat().st_size for path in (folder / "packed").glob("*.safetensors"))
    print(f"model: {total / 1e9:.2f} GB, {len(names)} tensors, {SHARDS} shards; compressed {stored / total:.3f}", flush=True)


class Nothing:
    """A safe_open that reads only headers and returns empty tensors."""

    device: Any = "cpu"

    def __init__(self, path: Any, *args: Any, **kwargs: Any) -> None:
        with open(path, "rb") as file:
            self._header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        self._metadata = self._header.pop("__metadata__", None)

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def keys(self) -> list[str]:
        return sorted(self._header)

    def metadata(self) -> Any:
        return self._metadata

    def get_slice(self, name: str) -> Any:
        import torch

        entry, device = self._header[name], self.device

        class Slice:
            def get_shape(self) -> Any:
                return entry["shape"]

            def get_dtype(self) -> Any:
                return entry["dtype"]

            def __getitem__(self, index: Any) -> Any:
                return torch.empty(entry["shape"], dtype=torch.bfloat16, device=device)

        return Slice()


def load(kind: str, folder: Path, device: str) -> Any:
    """Loads the model in one of the four modes."""
    import transformers

    path = str(folder / ("packed" if kind == "packed" else "plain"))

    def call() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(path, device_map=device, dtype="bfloat16")

    if kind == "unpatched":
        return call()
    if kind == "floor":
        import transformers.modeling_utils as module

        Nothing.device = device
        module.safe_open = Nothing  # type: ignore[assignment]
        return call()
    import overwire as ow

    with ow.patch_safetensors(device="cpu" if device == "cpu" else None):
        return call()


def anon() -> float:
    """Returns this process's anonymous memory in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1e3
    return 0.0


def child(args: argparse.Namespace) -> None:
    """Runs in a fresh process: loads the model and prints the times as JSON."""
    import torch
    import transformers

    # The imports at the first use of transformers take seconds and do not count as part of the load.
    assert transformers.AutoModelForCausalLM and transformers.LlamaForCausalLM
    import accelerate  # noqa: F401

    gpu = args.device != "cpu"
    folder, kind = Path(args.dir), args.child
    began = time.perf_counter()
    if gpu:
        torch.zeros(1, device=args.device)
        torch.cuda.synchronize()
    result: dict[str, Any] = {"context": time.perf_counter() - began}
    if kind.startswith("check-"):
        check(kind[6:], folder, args.device)
        return
    profile = cProfile.Profile()
    kind, _, profiled = kind.partition("-")
    free = torch.cuda.mem_get_info()[0] if gpu else 0
    for turn in ("first", "again"):
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        host, began = anon(), time.perf_counter()
        if profiled:
            profile.enable()
        model = load(kind, folder, args.device)
        if gpu:
            torch.cuda.synchronize()
        profile.disable()
        result[turn] = time.perf_counter() - began
        result[f"{turn} host MB"] = anon() - host
        if gpu:
            result["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
            result["reserved GB"] = torch.cuda.max_memory_reserved() / 1e9
            result["device GB"] = (free - torch.cuda.mem_get_info()[0]) / 1e9
        assert next(model.parameters()).device.type == torch.device(args.device).type
        del model
        if profiled:
            break
    if kind in ("plain", "packed"):
        import overwire as ow

        report = ow.last_report()
        result["engine"] = (
            {key: report[key] for key in report if isinstance(report[key], (int, float, str))} if report else None
        )
    if profiled:
        text = io.StringIO()
        stats = pstats.Stats(profile, stream=text).strip_dirs()
        stats.sort_stats("cumulative").print_stats(45)
        stats.sort_stats("tottime").print_stats(25)
        print(f"== profile of {kind} ==\n{text.getvalue()}", file=sys.stderr)
    print("RESULT " + json.dumps(result))


def check(kind: str, folder: Path, device: str) -> None:
    """Compares every parameter with the unpatched load's, and with load_file."""
    import overwire as ow
    import torch

    want, got = load("unpatched", folder, device).state_dict(), load(kind, folder, device).state_dict()
    assert want.keys() == got.keys()
    wrong = [
        name
        for name in want
        if want[name].dtype != got[name].dtype
        or want[name].device != got[name].device
        or not torch.equal(want[name].contiguous().view(torch.uint8), got[name].contiguous().view(torch.uint8))
    ]
    print(f"check {kind}: {len(want)} tensors, {len(wrong)} differ {wrong[:5]}")
    del want, got
    began = time.perf_counter()
    ow.load_file(folder / kind, device=device)
    print(f"check {kind}: load_file alone took {time.perf_counter() - began:.3f} s")
    sys.exit(1 if wrong else 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="/dev/shm", help="folder for the model")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=160, help="start no round after this time")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return 0
    began, failed = time.perf_counter(), False
    folder = Path(tempfile.mkdtemp(prefix="overwire-transformers-", dir=args.dir))
    try:
        make(args, folder)
        rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}

        def run(kind: str) -> dict[str, Any] | None:
            nonlocal failed
            result, is_well = run_child(__file__, folder, args.device, kind, loud="profile" in kind)
            failed = failed or not is_well
            return result

        for kind in ("check-plain", "check-packed"):
            run(kind)
        for number in range(args.rounds):
            if number and time.perf_counter() - began > args.seconds:
                break
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                result = run(kind)
                if result is not None:
                    rows[kind].append(result)
                    print(
                        f"{kind:10}",
                        json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items()}),
                        flush=True,
                    )
        for kind in ("packed-profile", "floor-profile"):
            run(kind)
        for kind in KINDS:
            if rows[kind]:
                first, again = ([row[turn] for row in rows[kind]] for turn in ("first", "again"))
                seconds = " ".join(f"{s:.2f}" for s in first)
                print(f"{kind:10} first {statistics.median(first):.3f} s ({seconds}), again {statistics.median(again):.3f} s")
        print(f"total {time.perf_counter() - began:.0f} s; {'FAILED' if failed else 'all equal'}")
        return 1 if failed else 0
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())

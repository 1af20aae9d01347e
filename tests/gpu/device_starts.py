"""The parts of a start of vLLM on a GPU, by each load format.

    python tests/gpu/device_starts.py                     Llama's 8B shape, 16 GB, in /dev/shm
    python tests/gpu/device_starts.py --shape moe         18,867 tensors
    python tests/gpu/device_starts.py --shape tiny --device cpu    here

One process imports vLLM and then makes the model by each format in turn, as often as --repeat says: vLLM's
import, the making of the modules, the loading of the weights, of which the recording of the model's own loader
takes a part, and the processing. The digest of every parameter must be that of vLLM's own safetensors path. vLLM's
kernels are not needed: where they cannot be imported, an empty module takes their place, and nothing is generated.
A format whose package is absent is left out, with a line that says so; what is printed last are medians. The kind
prepared is overwire with prepared state: a first start, which keeps it, and later ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import device_vllm as base

KINDS = "safetensors,overwire:packed,prepared:packed,instanttensor,overwire:plain,fastsafetensors,runai_streamer"
RECORDED = re.compile(r"loaded into their places in ([0-9.]+) s and ([0-9.]+) s after it")
PARTS = ("whole", "made", "weights", "recorded", "processed")


class Lines:
    """What overwire's loader says."""

    def __init__(self) -> None:
        from overwire.integrations.vllm import loader, prepared

        self.lines: list[str] = []
        loader.log = prepared.log = self

    def info(self, words: str, *more: Any) -> None:
        """One line."""
        self.lines.append(words % more)

    warning = warning_once = info


def without_kernels() -> None:
    """An empty module in the place of vLLM's compiled one, where that is not there."""
    if importlib.util.find_spec("vllm._C_stable_libtorch") is None:
        sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
        print("vLLM's kernels are not there: nothing is computed", flush=True)


def watch(seconds: dict[str, float]) -> None:
    """Has the parts of loads added to `seconds`, by name. Nothing is replaced, as prepared state is kept of vLLM's
    own code only: Python says when the functions begin and end, from 3.12 on."""
    from overwire.integrations.shared.parts import put
    from overwire.integrations.vllm.loader import OverwireModelLoader
    from vllm.model_executor.model_loader import default_loader, runai_streamer_loader, utils

    if sys.version_info < (3, 12):
        print("the parts need Python 3.12", flush=True)
        return
    streamer = runai_streamer_loader.RunaiModelStreamerLoader
    calls = {
        utils.initialize_model: "made",
        utils.process_weights_after_loading: "processed",
        put: "weights",
        OverwireModelLoader.load_weights: "weights",
        default_loader.DefaultModelLoader.load_weights: "own weights",
        streamer.load_weights: "own weights",
    }
    parts = {inspect.unwrap(call).__code__: part for call, part in calls.items()}
    began: dict[Any, float] = {}

    def begins(code: Any, _: int) -> None:
        began[code] = time.perf_counter()

    def ends(code: Any, *_: Any) -> None:
        ready()
        seconds[parts[code]] += time.perf_counter() - began.pop(code)

    watched, events = sys.monitoring, sys.monitoring.events
    watched.use_tool_id(watched.PROFILER_ID, "starts")
    watched.register_callback(watched.PROFILER_ID, events.PY_START, begins)
    watched.register_callback(watched.PROFILER_ID, events.PY_RETURN, ends)
    for code in parts:
        watched.set_local_events(watched.PROFILER_ID, code, events.PY_START | events.PY_RETURN)


def ready() -> None:
    """Waits for the GPU."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def start(
    args: argparse.Namespace, kind: str, seconds: dict[str, float], lines: Lines, theirs: dict[str, str]
) -> str | None:
    """One start; compares its parameters with `theirs`, which the first one fills. Returns its name, None where the
    format could not be loaded."""
    import gc

    import overwire
    import torch

    seconds.clear()
    lines.lines.clear()
    began = time.perf_counter()
    try:
        model, _ = base.load(args, kind)
    except Exception as error:
        print(f"{kind:20} left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None
    ready()
    seconds["whole"] = time.perf_counter() - began
    seconds.setdefault("weights", seconds.get("own weights", seconds["whole"]))
    if found := RECORDED.search(" ".join(lines.lines)):
        seconds["recorded"] = float(found[1])
    later = any("made of prepared state" in line for line in lines.lines)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    digests = overwire.digest({name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()})
    if not theirs:
        theirs.update(digests)
    if digests != theirs:
        wrong = sorted(name for name in digests.keys() | theirs.keys() if digests.get(name) != theirs.get(name))
        raise SystemExit(f"{kind}: not as vLLM's own: {wrong[:10]}")
    if kind.startswith("prepared"):
        from overwire.integrations.vllm import prepared

        prepared.begin()
        prepared.finish()
    size = sum(tensor.nbytes for tensor in model.parameters())
    words = ", ".join(f"{part} {seconds[part]:.3f}" for part in PARTS if part in seconds)
    name = f"{kind}, later" if later else kind
    rate = size / seconds["weights"] / 1e9
    print(f"{name:24} {words}; {rate:.1f} GB/s, {len(digests)} tensors as vLLM's own", flush=True)
    if kind.startswith(("overwire", "prepared")) and not later:
        print(*(f"    {line}" for line in lines.lines), sep="\n", flush=True)
    del model, tensors
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return name


def starts(args: argparse.Namespace) -> None:
    """All formats in turn."""
    import torch

    began = time.perf_counter()
    without_kernels()
    import vllm
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401
    from vllm.model_executor.model_loader import get_model  # noqa: F401
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    took = time.perf_counter() - began
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}: imported in {took:.1f} s", flush=True)
    base.engines.without_kernels()
    lines = Lines()
    seconds: dict[str, float] = defaultdict(float)
    watch(seconds)
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    theirs: dict[str, str] = {}
    absent: set[str] = set()
    with torch.no_grad():
        base.load(args, "dummy")  # what only the first model of a process imports and makes ready
        for turn in range(args.repeat):
            again = 0 if turn else 1  # prepared state is kept by the first
            for kind in (one for one in args.kinds.split(",") for _ in range(1 + again * one.startswith("prepared"))):
                name = None if kind in absent else start(args, kind, seconds, lines, theirs)
                if name is None:
                    absent.add(kind)
                for part in PARTS if name is not None else ():
                    if part in seconds:
                        times[str(name)][part].append(seconds[part])
    for name, parts in times.items():
        words = ", ".join(f"{part} {statistics.median(each):.3f}" for part, each in parts.items())
        print(f"median of {len(parts['whole'])}: {name:24} {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=base.SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", default=KINDS, help="FORMAT[:FOLDER], ...; compared with the first")
    parser.add_argument("--layers", type=int, default=0, help="fewer of them")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dir", default="", help=argparse.SUPPRESS)
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.ranks, args.rank, args.extra, args.port = 1, 0, "{}", base.engines.free_port()
    base.SHAPES[args.shape].update({"num_hidden_layers": args.layers} if args.layers else {})
    if args.job:
        return {"make": base.make, "starts": starts}[args.job](args)
    gpu = args.device != "cpu"
    folder = Path(tempfile.mkdtemp(prefix="overwire-starts-", dir="/dev/shm" if gpu else None))
    try:
        paths = [str(base.engines.plug_in(folder)), str(base.engines.ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_NO_USAGE_STATS": "1"}
        env = env if gpu else base.engines.environment(folder, Path(paths[0]))
        env.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="INFO", VLLM_USE_FLASHINFER_SAMPLER="0")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        for job in ("make", "starts"):
            command = [sys.executable, __file__, "--shape", args.shape, "--device", args.device, "--kinds", args.kinds]
            command += ["--repeat", str(args.repeat), "--layers", str(args.layers), "--dir", str(folder), "--job", job]
            subprocess.run(command, env=env, check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

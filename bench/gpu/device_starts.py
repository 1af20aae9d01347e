"""Measures the parts of a vLLM start on a GPU with each load format.

    python bench/gpu/device_starts.py                     Llama 8B's shape, 16 GB, in /dev/shm
    python bench/gpu/device_starts.py --shape moe,fp8     18,867 tensors, and Llama's in fp8
    python bench/gpu/device_starts.py --ranks 2           two GPUs, tensor-parallel
    python bench/gpu/device_starts.py --shape tiny --device cpu    without a GPU

One process per rank imports vLLM while others make the files, and then starts each model with each format in turn,
--repeat times. The parts are vLLM's import, creating the modules, loading the weights (including recording the model's
own loader), processing, the checks of prepared state before and after, and Python's garbage collections (vLLM runs two
per start). Ranks begin a start together, and each part is that of the slowest rank. The digest of every parameter on
each rank must equal that of vLLM's own safetensors format.

vLLM's kernels are not needed. If they cannot be imported, an empty module replaces them and nothing is generated. A
format with a missing package is left out with a message. Medians are printed last. The kind `prepared` is overwire with
prepared state: a first start, which writes it, and later ones.
"""

from __future__ import annotations

import argparse
import gc
import importlib
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
RECORDED = re.compile(r"in ([0-9.]+) s while the model's loader ran and ([0-9.]+) s after it")
QUESTIONS = [f"cutlass_scaled_mm_supports_{kind}" for kind in ("fp4", "fp8", "block_fp8")]
QUESTIONS += ["cutlass_group_gemm_supported", "mxfp4_experts_quant_supported"]
Start = tuple[str, dict[str, float]]  # its name, and seconds by part
PARTS = ("whole", "checked", "made", "weights", "recorded", "processed", "collected")


class Lines:
    """Collects log messages of overwire's loader."""

    def __init__(self) -> None:
        from overwire.integrations.vllm import loader, prepared

        self.lines: list[str] = []
        loader.log = prepared.log = self

    def info(self, words: str, *more: Any) -> None:
        """Adds a message."""
        self.lines.append(words % more)

    warning = warning_once = info


def without_kernels() -> bool:
    """Replaces missing compiled modules of vLLM, so that its Python code can be imported and can create models. Calls
    into them fail. Returns whether any are missing."""
    if is_whole := importlib.util.find_spec("vllm._C_stable_libtorch") is not None:
        print("vLLM's kernels are installed", flush=True)
    else:
        print("vLLM's kernels are not installed: nothing is computed", flush=True)
        sys.modules["vllm._C_stable_libtorch"] = stand_in_for_operations()
        # These kernels repack weights with compiled code. vLLM uses a Triton kernel instead.
        os.environ["VLLM_DISABLED_KERNELS"] = "MarlinFP8ScaledMMLinearKernel,HummingFP8ScaledMMLinearKernel"
    # This package cannot be imported without its compiled modules, but the modules in it can.
    name = "vllm.vllm_flash_attn"
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    has_attention = any(Path(spec.origin).parent.glob("*.so"))
    if not has_attention:
        sys.modules[name] = package = importlib.util.module_from_spec(spec)
        interface = importlib.import_module(f"{name}.flash_attn_interface")
        vars(package).update((key, value) for key, value in vars(interface).items() if not key.startswith("_"))
    if not is_whole:
        base.engines.without_kernels()
    return not (is_whole and has_attention)


def stand_in_for_operations() -> types.ModuleType:
    """Returns a module with the operations of layers, and with functions that report no kernel capability."""
    import torch

    library = torch.library.Library("_C", "FRAGMENT")
    library.define("silu_and_mul(Tensor! out, Tensor input) -> ()")
    for question in QUESTIONS:
        library.define(f"{question}(int capability) -> bool")
        library.impl(question, lambda capability: False, "CompositeImplicitAutograd")
    module = types.ModuleType("vllm._C_stable_libtorch")
    vars(module)["library"] = library  # keeps the operations alive
    return module


def watch_parts(seconds: dict[str, float]) -> None:
    """Adds the seconds of the parts of loads to `seconds` by name. It uses sys.monitoring, from Python 3.12 on, and
    replaces no function, because prepared state is only stored for vLLM's unmodified code."""
    from overwire.integrations.kept_model.keep_files import find_file
    from overwire.integrations.kept_model.move_tensors import Arriving, put_tensors
    from overwire.integrations.vllm import identity, prepared
    from overwire.integrations.vllm.loader import OverwireModelLoader
    from vllm.model_executor.model_loader import default_loader, runai_streamer_loader, utils

    began: dict[Any, float] = {}

    def collects(phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2 and phase == "start":
            began["collected"] = time.perf_counter()
        elif info["generation"] == 2:
            seconds["collected"] += time.perf_counter() - began.pop("collected")

    gc.callbacks.append(collects)
    if sys.version_info < (3, 12):
        print("only totals are measured, because parts need Python 3.12", flush=True)
        return
    streamer = runai_streamer_loader.RunaiModelStreamerLoader
    calls = {
        utils.initialize_model: "made",
        utils.process_weights_after_loading: "processed",
        identity.fingerprint_of_load: "checked",
        find_file: "checked",
        prepared._compare_model: "checked",
        put_tensors: "weights",
        Arriving.finish_loading: "weights",
        OverwireModelLoader.load_weights: "weights",
        default_loader.DefaultModelLoader.load_weights: "own weights",
        streamer.load_weights: "own weights",
    }
    parts = {inspect.unwrap(call).__code__: part for call, part in calls.items()}

    def begins(code: Any, _: int) -> None:
        began[code] = time.perf_counter()

    def ends(code: Any, *_: Any) -> None:
        await_gpu()
        seconds[parts[code]] += time.perf_counter() - began.pop(code)

    watched, events = sys.monitoring, sys.monitoring.events
    watched.use_tool_id(watched.PROFILER_ID, "starts")
    watched.register_callback(watched.PROFILER_ID, events.PY_START, begins)
    watched.register_callback(watched.PROFILER_ID, events.PY_RETURN, ends)
    for code in parts:
        watched.set_local_events(watched.PROFILER_ID, code, events.PY_START | events.PY_RETURN)


def measure_link(rank: int) -> None:
    """Measures the link of a rank's GPU with copies from pinned memory, while the other ranks do the same."""
    import torch

    host = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    device = torch.empty_like(host, device="cuda")
    rates = []
    for _ in range(4):
        await_gpu()
        began = time.perf_counter()
        for _ in range(4):
            device.copy_(host, non_blocking=True)
        await_gpu()
        rates.append(4 * host.nbytes / (time.perf_counter() - began))
    print(f"rank {rank}: floor: pinned memory to the GPU {statistics.median(rates) / 1e9:.1f} GB/s", flush=True)


def await_gpu() -> None:
    """Waits for the GPU."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def await_ranks(args: argparse.Namespace) -> None:
    """Waits for the other ranks."""
    if args.ranks > 1:
        from vllm.distributed.parallel_state import get_world_group

        get_world_group().barrier()


def take_slowest(args: argparse.Namespace, start: Start | None) -> Start | None:
    """Returns this rank's start with the slowest rank's time for each part, or None if a rank could not start."""
    if args.ranks == 1:
        return start
    import torch
    from vllm.distributed.parallel_state import get_world_group

    starts: list[Any] = [None] * args.ranks
    torch.distributed.all_gather_object(starts, start, group=get_world_group().cpu_group)
    if None in starts:
        return None
    if len(names := {name for name, _ in starts}) > 1:
        raise SystemExit(f"the ranks did not start in the same way: {sorted(names)}")
    return starts[0][0], {part: max(each.get(part, 0.0) for _, each in starts) for part in starts[0][1]}


def parts_of(seconds: dict[str, float]) -> dict[str, float]:
    """Returns the measured parts of a start, or only the whole below Python 3.12. vLLM's own loader counts as loading
    the weights if no other loader was called."""
    known = {"weights": seconds["own weights"], **seconds} if "own weights" in seconds else seconds
    return {part: known[part] for part in PARTS if part in known}


def start_once(
    args: argparse.Namespace,
    kind: str,
    seconds: dict[str, float],
    lines: Lines,
    theirs: dict[str, str],
) -> Start | None:
    """Starts once and compares the parameters with `theirs`, which the first start fills. Returns its name and parts,
    or None if the format could not be loaded."""
    import overwire
    import torch

    seconds.clear()
    lines.lines.clear()
    await_ranks(args)
    began = time.perf_counter()
    try:
        model, _ = base.load(args, kind)
    except Exception as error:
        print(f"rank {args.rank}: {kind:20} left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None
    await_gpu()
    seconds["whole"] = time.perf_counter() - began
    if found := RECORDED.search(" ".join(lines.lines)):
        seconds["recorded"] = float(found[1])
    parts = parts_of(seconds)
    later = any("restored prepared state" in line for line in lines.lines)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    digests = overwire.digest({name: tensor.detach() for name, tensor in tensors.items() if tensor.numel()})
    if not theirs:
        theirs.update(digests)
    if digests != theirs:
        wrong = sorted(name for name in digests.keys() | theirs.keys() if digests.get(name) != theirs.get(name))
        raise SystemExit(f"rank {args.rank}, {kind}: differs from vLLM's own: {wrong[:10]}")
    if kind.startswith("prepared"):
        from overwire.integrations.vllm import prepared

        prepared.begin_writing()
        prepared.finish_writing()
    size = sum(tensor.nbytes for tensor in model.parameters())
    words = ", ".join(f"{part} {each:.3f}" for part, each in parts.items())
    name = f"{kind}, later" if later else kind
    timed = "weights" if "weights" in parts else "whole"
    rate = f"{timed} at {size / parts[timed] / 1e9:.1f} GB/s"
    print(f"rank {args.rank}: {name:24} {words}; {rate}, {len(digests)} tensors equal vLLM's own load", flush=True)
    if kind.startswith(("overwire", "prepared")):
        print(*(f"    {line}" for line in lines.lines), sep="\n", flush=True)
    del model, tensors
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return name, parts


def start_all(args: argparse.Namespace) -> None:
    """Runs all formats of all shapes in turn. Closing standard input signals that the files are ready."""
    import torch

    began = time.perf_counter()
    lacks_kernels = without_kernels()
    import vllm
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs  # noqa: F401
    from vllm.model_executor.model_loader import get_model  # noqa: F401
    from vllm.model_executor.models import registry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    if lacks_kernels:
        registry._run_in_subprocess = lambda inspect: inspect()  # a subprocess would lack the replaced modules
    took = time.perf_counter() - began
    print(f"vLLM {vllm.__version__}, torch {torch.__version__}: imported in {took:.1f} s", flush=True)
    lines = Lines()
    seconds: dict[str, float] = defaultdict(float)
    watch_parts(seconds)
    sys.stdin.read()
    if args.device != "cpu":
        torch.cuda.set_device(args.rank)
        measure_link(args.rank)
    with torch.no_grad():
        for shape in args.shape.split(","):
            destroy_model_parallel()  # an expert group exists only if the model has experts
            one = argparse.Namespace(**{**vars(args), "shape": shape, "dir": str(Path(args.dir) / shape)})
            print(f"{shape}:", flush=True)
            compare_formats(one, lines, seconds)


def compare_formats(args: argparse.Namespace, lines: Lines, seconds: dict[str, float]) -> None:
    """Runs all formats of one shape in turn."""
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    theirs: dict[str, str] = {}
    absent: set[str] = set()
    base.load(args, "dummy")  # a process's first model also pays for imports and preparations
    for turn in range(args.repeat):
        # The first turn also writes prepared state.
        kinds = args.kinds.split(",") if turn else base.starts_of(args.kinds)
        for kind in [*kinds, *(filter(None, args.once.split(",")) if turn == args.repeat - 1 else ())]:
            if kind in absent:
                continue
            start = take_slowest(args, start_once(args, kind, seconds, lines, theirs))
            if start is None:
                absent.add(kind)
                continue
            for part, each in start[1].items():
                times[start[0]][part].append(each)
    for name, parts in times.items() if args.rank == 0 else ():
        words = ", ".join(f"{part} {statistics.median(each):.3f}" for part, each in parts.items())
        print(f"median of {len(parts['whole'])}: {name:24} {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help=f"one or several of {', '.join(base.SHAPES)}, separated by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", default=KINDS, help="FORMAT[:FOLDER], ...; the first is the reference")
    parser.add_argument("--once", default="", help="further kinds, only in the last round")
    parser.add_argument("--layers", type=int, default=0, help="number of layers, to test with fewer")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel, one GPU each")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=base.engines.free_port(), help=argparse.SUPPRESS)
    parser.add_argument("--dir", default="", help=argparse.SUPPRESS)
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.extra = "{}"
    for shape in args.shape.split(",") if args.layers else ():
        base.SHAPES[shape]["num_hidden_layers"] = args.layers
    if args.job:
        return {"make": base.make, "starts": start_all}[args.job](args)
    gpu = args.device != "cpu"
    folder = Path(tempfile.mkdtemp(prefix="overwire-starts-", dir="/dev/shm" if gpu else None))
    try:
        paths = [str(base.engines.plug_in(folder)), str(base.engines.ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_NO_USAGE_STATS": "1"}
        env = env if gpu else base.engines.environment(folder, Path(paths[0]))
        env.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="INFO", VLLM_USE_FLASHINFER_SAMPLER="0")
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, __file__, "--device", args.device, "--layers", str(args.layers)]
        command += ["--kinds", args.kinds, "--once", args.once, "--repeat", str(args.repeat)]
        command += ["--ranks", str(args.ranks), "--port", str(args.port)]

        def job(name: str, shape: str, where: Path, rank: int = 0) -> subprocess.Popen[bytes]:
            words = [*command, "--job", name, "--shape", shape, "--dir", str(where), "--rank", str(rank)]
            return subprocess.Popen(words, env=env, stdin=subprocess.PIPE)

        starts = [job("starts", args.shape, folder, rank) for rank in range(args.ranks)]
        makers = []
        for shape in args.shape.split(","):
            (folder / shape).mkdir()
            makers.append(job("make", shape, folder / shape))
        for run in makers:
            run.communicate()
        for run in starts:
            run.stdin.close()  # starts all ranks
        while any(run.poll() is None for run in starts) and not any(run.poll() for run in (*makers, *starts)):
            time.sleep(0.1)
        for run in starts:
            run.kill()  # still running only if another process failed
        if failed := [run.wait() for run in (*makers, *starts) if run.wait()]:
            raise SystemExit(f"exit status {failed[0]}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

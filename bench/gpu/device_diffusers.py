"""Measures a diffusers pipeline on a GPU unpatched and under `overwire.patch_safetensors`, with plain and with
compressed files, against a baseline.

    python bench/gpu/device_diffusers.py                        one GPU, 5.5 GB, about 100 s
    python bench/gpu/device_diffusers.py --small --device cpu   without a GPU

It makes a pipeline of Stable Diffusion XL's UNet, CLIP's text encoder and an autoencoder, plain and compressed, in
memory (--dir), and compares every parameter with the unpatched load's byte for byte. Then fresh processes alternately
time `DiffusionPipeline.from_pretrained(device_map=...)`. The baseline is the same call with a `load_file` that returns
`torch.empty` on the device. At the end, one more process of each kind prints the time of the main thread in a second
load by component and phase (`phases.py`): wall milliseconds, CPU milliseconds, and calls. Needs overwire, torch,
transformers, diffusers and accelerate. The exit status is 1 if a parameter differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from children import run_child
from phases import Phases, table

KINDS = ("unpatched", "plain", "packed", "floor")
MODELS = ("unet", "text_encoder", "vae")


def make(folder: Path, device: str, small: bool) -> None:
    """Writes two folders with the pipeline's weights, plain and compressed."""
    import overwire as ow
    import torch
    import transformers
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    size = 8 if small else 1  # smaller, with the same number of tensors
    text = transformers.CLIPTextConfig(hidden_size=1280 // size, intermediate_size=5120 // size, num_hidden_layers=24)
    with torch.device("meta"):
        models: dict[str, Any] = {
            "unet": UNet2DConditionModel(
                block_out_channels=(320 // size, 640 // size, 1280 // size),
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                transformer_layers_per_block=[1, 2, 10], attention_head_dim=[5, 10, 20],
                norm_num_groups=16 // min(size, 2),
                cross_attention_dim=2048 // size, use_linear_projection=True,
            ),
            "text_encoder": transformers.CLIPTextModel(text),
            "vae": AutoencoderKL(block_out_channels=(128 // size, 256 // size, 512 // size),
                                 norm_num_groups=32 // min(size, 4),
                                 down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
                                 layers_per_block=2),
        }  # fmt: skip
    torch.manual_seed(1)
    total = 0
    for model in models.values():
        model.to(torch.bfloat16).to_empty(device=device)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.normal_(0, 0.02)
            else:
                tensor.data.copy_(torch.arange(tensor.numel()).view(tensor.shape))
            total += tensor.numel() * tensor.element_size()
        model.to("cpu")
    rest = {"tokenizer": None, "safety_checker": None, "feature_extractor": None}
    pipeline = StableDiffusionPipeline(**models, **rest, scheduler=DDIMScheduler(), requires_safety_checker=False)
    pipeline.save_pretrained(folder / "plain")
    ow.convert(folder / "plain", folder / "packed")
    stored = sum(path.stat().st_size for path in (folder / "packed").rglob("*.safetensors"))
    print(f"pipeline: {total / 1e9:.2f} GB, {len(MODELS)} models; compressed {stored / total:.3f}", flush=True)


def load(kind: str, folder: Path, device: str) -> Any:
    """Loads the pipeline in one of the four modes."""
    import torch
    from diffusers import DiffusionPipeline

    def call() -> Any:
        rest: dict[str, Any] = {"tokenizer": None, "safety_checker": None, "feature_extractor": None}
        path = folder / ("packed" if kind == "packed" else "plain")
        return DiffusionPipeline.from_pretrained(path, torch_dtype=torch.bfloat16, device_map=device, **rest)

    if kind == "unpatched":
        return call()
    if kind == "floor":
        import safetensors.torch
        import transformers.modeling_utils
        from device_transformers import Nothing

        Nothing.device = device
        transformers.modeling_utils.safe_open = Nothing  # type: ignore[assignment]

        def load_file(path: Any, device: Any = "cpu") -> Any:
            file = Nothing(path)
            return {name: file.get_slice(name)[...] for name in file.keys()}  # noqa: SIM118

        safetensors.torch.load_file = load_file
        return call()
    import overwire as ow

    with ow.patch_safetensors(device="cpu" if device == "cpu" else None):
        return call()


def named(phases: Phases) -> None:
    """Names the phases of a load in the libraries and in the patch."""
    import diffusers.configuration_utils as config
    import diffusers.models.modeling_utils as modeling
    import diffusers.pipelines.pipeline_loading_utils as loading
    import diffusers.pipelines.pipeline_utils as pipelines
    import transformers
    import transformers.modeling_utils as modeling5
    from overwire import jobs
    from overwire.compat.safetensors import _lazy, patching
    from overwire.frameworks import torch as frame
    from overwire.integrations import diffusers as ours
    from overwire.model import kept, opened

    core = sys.modules.get("transformers.core_model_loading")
    time = phases.time
    phases.collector()
    time(pipelines.DiffusionPipeline, "from_pretrained", "diffusers: pipeline", lambda *_: "pipeline")
    time(pipelines, "load_sub_model", "library: the rest of a model", lambda _, kwargs: str(kwargs["name"]))
    time(config.ConfigMixin, "from_config", "library: modules are built")
    time(transformers.CLIPTextModel, "__init__", "library: modules are built")
    for module in (modeling, modeling5):
        time(module, "_caching_allocator_warmup", "library: memory for torch")
        time(module, "caching_allocator_warmup", "library: memory for torch")
        time(module, "dispatch_model", "library: dispatch")
        time(module, "_load_shard_file", "library: tensors into modules")
        time(module, "empty_device_cache", "library: torch's cache is emptied")
    time(loading, "dispatch_model", "library: dispatch")
    if core is not None:
        time(core, "convert_and_load_state_dict_in_model", "library: tensors into modules", beside=modeling5)
        time(core, "set_param_for_module", "library: tensors into modules")
    time(patching.SafetensorsPatch, "__init__", "patch: begins")
    time(patching.SafetensorsPatch, "undo", "patch: ends")
    time(ours, "_look_ahead", "patch: plans what to read ahead")
    time(ours, "_note_component", "patch: notes tensors read ahead")
    time(ours, "_note_targets", "patch: notes tensors")
    time(ours, "_fill_state", "patch: gives tensors")
    time(ours._Model, "slices_of", "patch: slices of a file")
    time(kept, "keep", "patch: opens files")
    time(opened.Model, "__init__", "patch: opens files")
    time(opened.Model, "start", "patch: the engine begins")
    time(opened.Model, "_begin", "patch: a load is begun")
    time(frame.TorchFrame, "_make_batch", "patch: torch's memory")
    time(_lazy._Pass, "give", "patch: gives tensors")
    time(_lazy.Ahead, "close", "patch: a load is closed")
    time(_lazy.Ahead, "want", "patch: notes tensors")
    time(jobs.Job, "next", "patch: waits for the engine")
    time(jobs.Job, "done", "patch: a load is closed")


def state(pipeline: Any) -> dict[str, Any]:
    """Returns every parameter and buffer."""
    return {f"{model}.{name}": t for model in MODELS for name, t in getattr(pipeline, model).state_dict().items()}


def child(args: argparse.Namespace) -> int:
    """Runs in a fresh process. Compares the loads, or loads once and prints its times as JSON."""
    import accelerate  # noqa: F401
    import torch
    import transformers
    from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel

    # Imports on first use do not count as part of the load.
    assert transformers.CLIPTextModel and AutoencoderKL and StableDiffusionPipeline and UNet2DConditionModel
    folder, gpu = Path(args.dir), args.device != "cpu"
    if args.child == "check":
        wrong = 0
        for kind in ("plain", "packed"):
            want, got = state(load("unpatched", folder, args.device)), state(load(kind, folder, args.device))
            differ = [
                name
                for name, t in want.items()
                if t.device != got[name].device or t.dtype != got[name].dtype or not torch.equal(t, got[name])
            ]
            print(f"check {kind}: {len(want)} tensors, {len(differ) + len(want.keys() ^ got.keys())} differ {differ[:5]}")
            wrong += len(differ) + len(want.keys() ^ got.keys())
        return 1 if wrong else 0
    if gpu:
        torch.zeros(1, device=args.device)
        torch.cuda.synchronize()
    if args.child.startswith("phases-"):
        for turn in ("first", "again"):
            phases = Phases()
            if turn == "again":
                named(phases)
            with phases.phase("the rest"):
                pipeline = load(args.child[7:], folder, args.device)
            with phases.phase("the device is waited for"):
                if gpu:
                    torch.cuda.synchronize()
            phases.close()
            del pipeline
        print("RESULT " + json.dumps(phases.rows()))
        return 0
    free = torch.cuda.mem_get_info()[0] if gpu else 0
    result: dict[str, Any] = {}
    for turn in ("first", "again"):
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        pipeline = load(args.child, folder, args.device)
        if gpu:
            torch.cuda.synchronize()
            result["peak GB"] = torch.cuda.max_memory_allocated() / 1e9
            result["reserved GB"] = torch.cuda.max_memory_reserved() / 1e9
            result["device GB"] = (free - torch.cuda.mem_get_info()[0]) / 1e9
        result[turn] = time.perf_counter() - began
        del pipeline
    print("RESULT " + json.dumps(result))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="/dev/shm", help="folder for the pipeline")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="use 0.1 GB of weights")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=75, help="start no round after this time")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    began, failed = time.perf_counter(), False
    folder = Path(tempfile.mkdtemp(prefix="overwire-diffusers-", dir=args.dir))
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    try:
        make(folder, args.device, args.small)
        profiles: dict[str, Any] = {}
        for number in range(-1, args.rounds + 1):
            if 0 < number < args.rounds and time.perf_counter() - began > args.seconds:
                continue
            kinds = KINDS[:: 1 if number % 2 == 0 else -1]
            if number == args.rounds:
                kinds = ("phases-floor", "phases-plain", "phases-packed")
            for kind in ("check",) if number < 0 else kinds:
                result, is_well = run_child(__file__, folder, args.device, kind)
                failed = failed or not is_well
                if result is not None and kind.startswith("phases-"):
                    profiles[kind[7:]] = result
                elif result is not None and is_well:
                    rows[kind].append(result)
                    print(f"{kind:10}", json.dumps({name: round(value, 3) for name, value in result.items()}), flush=True)
        if profiles:
            print(table(profiles))
        for kind in KINDS:
            if rows[kind]:
                first, again = (statistics.median(row[turn] for row in rows[kind]) for turn in ("first", "again"))
                print(f"{kind:10} first {first:.3f} s, again {again:.3f} s, of {len(rows[kind])} processes")
        print(f"total {time.perf_counter() - began:.0f} s; {'FAILED' if failed else 'all equal'}")
        return 1 if failed else 0
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())

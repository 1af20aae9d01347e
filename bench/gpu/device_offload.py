"""Tests offload on a GPU: compares outputs with the resident model's, then times passes of overwire and of other
libraries in one run.

    PYTHONPATH=python python bench/gpu/device_offload.py [--models llama,...] [--layers 5] [--repeat 5] [--ways keep,..]

The models are llama (2.43 GB of bf16 in 5 layers, a forward of 8 tokens, limited by the link), compute (the same with a
forward of 16 x 4096 tokens, which hides the copies), unet (Stable Diffusion XL's with random weights, one step at 64
x 64 latents) and flux (FLUX.1's block shapes with random weights: a double and two single blocks for each of --layers,
one step at 4096 + 512 tokens). The modes are resident, overwire, device (compressed weights on the GPU), auto (half of
them there), keep (half of the blocks stay), source (from a compressed file), ready (like device, from a compressed file
to a model on the meta device: the time until it can run), accelerate, streamed (accelerate under
patch_safetensors(offload=True)), diffusers (group offload by blocks, with streams), flextensor, and those of
offload_peers.py: entropack and entropack-ans (its two lossless codecs), dfloat11, and vllm (its prefetching offloader).

Each model runs in a separate process, which tries the modes in order on copies of one model. For each it prints the
median of the passes, the rate of weights, the peak memory on the device, the resident set on the host, and the time
until the model can run. Then it prints the goals and whether they are met. The exit status is 1 if an output of
overwire differs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import importlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import offload_peers
import torch
from phases import Phases

ON_DEVICE = ("entropack", "entropack-ans", "dfloat11")
WAYS = {
    "llama": (
        "resident", "overwire", "device", "auto", "keep", "source", "ready", "streamed", *ON_DEVICE, "vllm",
        "accelerate", "flextensor", "diffusers",
    ),
    "compute": ("resident", "overwire", "device", "auto", "keep", *ON_DEVICE, "vllm"),
    "unet": ("resident", "overwire", "device", "keep", "diffusers", "flextensor"),
    "flux": ("resident", "overwire", "device", "keep", *ON_DEVICE),
}  # fmt: skip
OURS = ("overwire", "device", "auto", "keep", "source", "ready", "streamed")
PEERS = ("accelerate", "flextensor", "diffusers", "vllm")


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 7 * width // 2
        for name in ("q", "k", "v", "o"):
            setattr(self, name, torch.nn.Linear(width, width, bias=False))
        self.gate, self.up = torch.nn.Linear(width, inner, bias=False), torch.nn.Linear(width, inner, bias=False)
        self.down = torch.nn.Linear(inner, width, bias=False)
        self.norm1, self.norm2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).view(*x.shape[:2], -1, 128).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(torch.nn.Module):
    def __init__(self, layers: int = 16, width: int = 4096) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stream(torch.nn.Module):
    """One of the two streams of a FLUX double block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation, self.qkv = torch.nn.Linear(width, 6 * width), torch.nn.Linear(width, 3 * width)
        self.proj = torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def heads(self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        y = torch.nn.functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        return list(self.qkv(y).unflatten(-1, (3, -1, 128)).permute(2, 0, 3, 1, 4))

    def end(self, x: torch.Tensor, attended: torch.Tensor, parts: Any) -> torch.Tensor:
        gate, shift, scale, second = parts
        x = x + gate * self.proj(attended)
        y = torch.nn.functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        return x + second * self.down(torch.nn.functional.gelu(self.up(y), approximate="tanh"))


class Double(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.image, self.text = Stream(width), Stream(width)

    def forward(self, x: torch.Tensor, text: torch.Tensor, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [one.modulation(vector)[:, None].chunk(6, -1) for one in (self.text, self.image)]
        pairs = [one.heads(y, *p[:2]) for one, y, p in zip((self.text, self.image), (text, x), parts, strict=True)]
        q, k, v = (torch.cat(both, 2) for both in zip(*pairs, strict=True))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        count = text.shape[1]
        return self.image.end(x, y[:, count:], parts[1][2:]), self.text.end(text, y[:, :count], parts[0][2:])


class Single(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = torch.nn.Linear(width, 3 * width)
        self.first, self.second = torch.nn.Linear(width, 7 * width), torch.nn.Linear(5 * width, width)

    def forward(self, x: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        shift, scale, gate = self.modulation(vector)[:, None].chunk(3, -1)
        y = self.first(torch.nn.functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)
        qkv, inner = y.split([3 * x.shape[-1], 4 * x.shape[-1]], -1)
        q, k, v = qkv.unflatten(-1, (3, -1, 128)).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + gate * self.second(torch.cat([y, torch.nn.functional.gelu(inner, approximate="tanh")], -1))


class Flux(torch.nn.Module):
    def __init__(self, layers: int, width: int = 3072) -> None:
        super().__init__()
        self.doubles = torch.nn.ModuleList(Double(width) for _ in range(layers))
        self.singles = torch.nn.ModuleList(Single(width) for _ in range(2 * layers))

    def forward(self, x: torch.Tensor, text: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        for double in self.doubles:
            x, text = double(x, text, vector)
        x = torch.cat([text, x], 1)
        for single in self.singles:
            x = single(x, vector)
        return x


def build(kind: str, layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Builds the model on the CPU with seeded values, and its arguments on the GPU."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):  # random numbers come from the GPU, in a fixed order
        if kind == "unet":
            from diffusers import UNet2DConditionModel

            model: torch.nn.Module = UNet2DConditionModel(
                sample_size=128,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                block_out_channels=(320, 640, 1280),
                transformer_layers_per_block=(1, 2, 10),
                attention_head_dim=(5, 10, 20),
                cross_attention_dim=2048,
                addition_embed_type="text_time",
                addition_time_embed_dim=256,
                projection_class_embeddings_input_dim=2816,
                use_linear_projection=True,
            )
            arguments: dict[str, Any] = {
                "sample": torch.randn(2, 4, 64, 64),
                "timestep": torch.tensor(7.0),
                "encoder_hidden_states": torch.randn(2, 77, 2048),
                "added_cond_kwargs": {"text_embeds": torch.randn(2, 1280), "time_ids": torch.randn(2, 6)},
            }
        elif kind == "flux":
            model = Flux(layers)
            arguments = {"x": torch.randn(1, 4096, 3072), "text": torch.randn(1, 512, 3072)}
            arguments["vector"] = torch.randn(1, 3072)
        else:
            model = Llama(layers)
            arguments = {"x": torch.randn(16 if kind == "compute" else 1, 4096 if kind == "compute" else 8, 4096)}
    torch.set_default_dtype(torch.float32)
    model.requires_grad_(False)
    if kind in ("llama", "compute"):
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    return model.cpu().eval(), arguments


class Row(NamedTuple):
    """The measurements of one mode of a model."""

    seconds: float
    device: int
    host: int
    equal: bool
    offloaded: Any
    start: float


def prepare(way: str, model: torch.nn.Module, kind: str, folder: Path) -> Any:
    """Prepares the model to run on the GPU. Returns an object to keep and to close, if there is one."""
    gpu = torch.device("cuda", 0)
    if way == "resident":
        model.to(gpu)
    elif way in ("overwire", "device", "auto", "keep", "source", "ready"):
        import overwire as ow

        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        source = folder / "model.safetensors" if way in ("source", "ready") else None
        where: Any = {"device": "device", "ready": "device", "auto": "auto"}.get(way, "host")
        room = nbytes // 3 if way == "auto" else None
        keep = nbytes // 2 if way == "keep" else None
        return ow.offload(model, "cuda", keep=keep, where=where, room=room, source=source)
    elif way.startswith("entropack"):
        offload_peers.compress_with_entropack(model, gpu, "TileANS" if way == "entropack-ans" else "DFloat11")
    elif way == "dfloat11":
        offload_peers.compress_with_dfloat11(model, gpu)
    elif way == "vllm":
        offload_peers.prefetch_with_vllm(model, gpu)
    elif way == "accelerate":
        import accelerate

        accelerate.cpu_offload(model, gpu)
    elif way == "streamed":
        import accelerate
        import overwire as ow

        with ow.patch_safetensors(offload=True):
            accelerate.cpu_offload(model, gpu)
    elif way == "diffusers":
        from diffusers.hooks import apply_group_offloading

        apply_group_offloading(
            model,
            onload_device=gpu,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=True,
        )
    else:
        import flextensor

        patterns = {
            "unet": ["down_blocks.*", "mid_block*", "up_blocks.*"], "flux": ["doubles.*", "singles.*"],
        }.get(kind, ["layers.*"])  # fmt: skip
        return flextensor.offload(model, config=flextensor.OffloadConfig(include_patterns=patterns))
    return None


def time_parts() -> Phases:
    """Measures the parts of the next offload, each without the parts inside it. Waiting is the part of reading and
    copying that nothing hides."""
    from overwire.offloading import offload, ring, source, stored, tiers

    phases = Phases()
    parts: list[tuple[Any, str, str, Any]] = [
        (source.Source, "__init__", "open", None),
        (source.Source, "give_memory", "allocate on the host", None),
        (offload.Offloaded, "_move_rest", "move the rest", None),
        (source.Source, "load_tensors", "load the rest", None),
        (source.Source, "read_block", "read values", None),
        (stored.DeviceMemory, "__init__", "allocate", None),
        (source.Source, "load_streams", "start", None),
        (source.Source, "_await_load", "wait", None),
        (stored, "check_streams", "check", tiers),
        (stored, "digest_rows", "digest", None),
        (offload.Offloaded, "_send_away", "bind", None),
        (ring.Ring, "__init__", "ring", None),
    ]
    for owner, name, phase, also in parts:
        phases.time(owner, name, phase, beside=also)
    return phases


def resident_set() -> int:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) << 10


def free_all() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


def run_way(
    way: str, kind: str, original: torch.nn.Module, arguments: dict[str, Any], folder: Path, repeat: int, wanted: Any
) -> tuple[Row, Any]:
    """Times passes of a copy of the model. wanted is the resident model's output, or None to compute it."""
    nbytes = sum(parameter.nbytes for parameter in original.parameters())
    free_all()
    host, device = resident_set(), torch.cuda.memory_allocated()
    known: dict[int, Any] = {}
    if way == "ready":
        on_meta = [torch.nn.Parameter(torch.empty_like(one, device="meta"), False) for one in original.parameters()]
        known = {id(one): other for one, other in zip(original.parameters(), on_meta, strict=True)}
    model = copy.deepcopy(original, known)
    phases = time_parts() if way == "ready" else None
    began = time.perf_counter()
    with phases.phase("rest") if phases else contextlib.nullcontext():
        offloaded = prepare(way, model, kind, folder)
        torch.cuda.synchronize()
    start = time.perf_counter() - began
    if phases:
        import overwire as ow

        phases.close()
        print("the last load:", (ow.last_report() or {}).get("stages"))
        print(", ".join(f"{phase} {1e3 * wall:.1f} ms ({calls})" for _, phase, wall, _, calls in phases.rows()))
    runs = offloaded if way == "flextensor" and offloaded is not None else model
    seconds: list[float] = []
    equal = True
    with torch.inference_mode():
        for number in range(2 + repeat):
            if number == 2:
                torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            began = time.perf_counter()
            output = runs(**arguments)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            output = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
            equal = equal and (wanted is None or torch.equal(output, wanted))
    if wanted is None:
        wanted = output.clone()
    del output
    device = torch.cuda.max_memory_allocated() - device
    ours = offloaded if way in OURS else None
    row = Row(statistics.median(seconds[2:]), device, resident_set() - host, equal, ours, start)
    more = f" ring {ours.ring / 1e9:.2f} kept {ours.kept / 1e9:.2f} stored {ours.stored / 1e9:.2f}" if ours else ""
    more += f" on the device {ours.stored_on_device / 1e9:.2f}" if ours and ours.stored_on_device else ""
    print(
        f"{kind:8}{way:11}{row.seconds:8.4f} s{nbytes / row.seconds / 1e9:7.1f} GB/s  device{row.device / 1e9:6.2f}"
        f"  host{row.host / 1e9:6.2f}  start{start:6.2f} s  {'equal' if equal else 'OUTPUTS DIFFER'}{more}",
        flush=True,
    )
    return row, wanted


def run_model(kind: str, layers: int, repeat: int, ways: list[str]) -> bool:
    """Runs all modes of a model in order and prints the goals. Returns whether overwire's outputs are right."""
    for name in ("overwire", "accelerate", "flextensor", "diffusers.hooks", "diffusers.models"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.stdin.readline()  # waits for the previous models
    original, arguments = build(kind, layers)
    nbytes = sum(parameter.nbytes for parameter in original.parameters())
    card = torch.cuda.get_device_name()
    print(f"{kind}: {nbytes / 1e9:.2f} GB of weights, {card}, pinned copies {link():.1f} GB/s", flush=True)
    rows: dict[str, Row] = {}
    wanted: Any = None
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        if not {"source", "ready"}.isdisjoint(ways):
            import overwire as ow

            ow.save_model(original, Path(folder) / "model.safetensors")
        for way in ways:
            try:
                rows[way], wanted = run_way(way, kind, original, arguments, Path(folder), repeat, wanted)
            except Exception as error:
                print(f"{kind:8}{way:11}failed: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if way in OURS or way == "resident":
                    raise
            if way in rows and rows[way].offloaded is not None:
                print_aims(kind, way, rows, nbytes)
                rows[way].offloaded.close()
                rows[way] = rows[way]._replace(offloaded=None)
    for way in ON_DEVICE:
        if way in rows and "device" in rows:
            ratio = rows[way].seconds / rows["device"].seconds
            print(f"{kind}: device is {ratio:.2f} x as fast as {way} (aim 1.5 with llama)", flush=True)
    best = min((rows[way].seconds for way in PEERS if way in rows and rows[way].equal), default=None)
    if best and "overwire" in rows:
        aim = " (aim 3)" if kind == "llama" else ""
        print(f"{kind}: {best / rows['overwire'].seconds:.2f} x the best peer with equal outputs{aim}", flush=True)
    return all(rows[way].equal for way in rows if way in OURS)


def print_aims(kind: str, way: str, rows: dict[str, Row], nbytes: int) -> None:
    """Prints the goals of one mode."""
    row, offloaded, resident = rows[way], rows[way].offloaded, rows.get("resident")
    texts = []
    if kind == "llama" and way == "overwire":
        texts.append(f"{nbytes / row.seconds / 1e9:.1f} GB/s (aim 70)")
    if resident and (kind == "compute" or way == "device"):
        aim = 2.2 if kind == "llama" else 1.03 if kind == "compute" else 1.05
        texts.append(f"{row.seconds / resident.seconds:.3f} of the resident pass (aim {aim})")
    if resident and way == "device":
        weights = (row.device - resident.device) / nbytes + 1
        texts.append(f"device {weights:.3f} of the weights (aim 0.68 and two blocks)")
    if way == "ready":
        limit = link() * nbytes / (offloaded.stored_on_device + nbytes - offloaded.nbytes)
        texts.append(f"ready at {nbytes / row.start / 1e9:.1f} GB/s, the link allows {limit:.1f} (aim 0.9 of that)")
    if way in ("overwire", "source") and offloaded.nbytes:
        texts.append(f"host {offloaded.stored / offloaded.nbytes:.3f} of the weights streamed (aim 0.68)")
    if resident:
        # A pass needs the resident peak without the weights.
        rest = nbytes - offloaded.nbytes - offloaded.kept
        device = row.device - (resident.device - nbytes)
        share = device / (offloaded.kept + offloaded.stored_on_device + offloaded.ring + rest)
        texts.append(f"device {share:.3f} of keep, tier, ring and rest (aim 1.05)")
    print(f"{'':8}{'':11}{'; '.join(texts)}", flush=True)


def link() -> float:
    source, target = (
        torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True),
        torch.empty(1 << 29, dtype=torch.uint8, device="cuda"),
    )
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(4):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return 4 * target.nbytes / (time.perf_counter() - began) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(WAYS))
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ways")
    parser.add_argument("--one")
    options = parser.parse_args()
    if options.one:
        ways = options.ways.split(",") if options.ways else list(WAYS[options.one])
        return int(not run_model(options.one, options.layers, options.repeat, ways))
    wrong, runs = 0, []
    for kind in options.models.split(","):  # processes start together, because imports take longer than the measurements
        command = [sys.executable, __file__, "--one", kind, "--layers", str(options.layers)]
        command += ["--repeat", str(options.repeat)] + (["--ways", options.ways] if options.ways else [])
        runs.append(subprocess.Popen(command, stdin=subprocess.PIPE))
    for run in runs:
        run.communicate(b"\n", timeout=240)
        wrong |= run.returncode
    print("overwire's outputs are those of the resident models" if not wrong else "FAILED")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

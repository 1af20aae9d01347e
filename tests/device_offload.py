"""Offload on a GPU: outputs compared with the resident model's, then passes timed beside peers.

    PYTHONPATH=python python tests/device_offload.py [--model llama|unet|compute] [--layers 16] [--repeat 5] [--ways overwire,keep,...]

llama: 7.78 GB of bf16 in 16 layers, a forward of 8 tokens: bound by the link. compute: the
same with a forward of 16 x 4096 tokens, whose work hides the copies. unet: Stable Diffusion
XL's, of random weights, one step at 64 x 64 of latents. Ways: resident, overwire, keep (half
of the blocks stay), accelerate, streamed (accelerate's under patch_safetensors(offload=True)),
diffusers (group offload by blocks, with streams), flextensor. Each is a process of its own,
which prints a line of JSON; the link's own rate stands beside. Exits with 1 if an output
differs.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

WAYS = ("resident", "overwire", "keep", "accelerate", "streamed", "diffusers", "flextensor")


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


def build(kind: str, layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model on the host, with values of a seed, and its arguments on the GPU."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):  # random numbers are made there, in the same order each time
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
        else:
            model = Llama(layers)
            arguments = {"x": torch.randn(16 if kind == "compute" else 1, 4096 if kind == "compute" else 8, 4096)}
    torch.set_default_dtype(torch.float32)
    model.requires_grad_(False)
    if kind != "unet":
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    return model.cpu().eval(), arguments


def prepare(way: str, model: torch.nn.Module, kind: str) -> torch.nn.Module:
    """Lets the model run on the GPU."""
    gpu = torch.device("cuda", 0)
    if way == "resident":
        return model.to(gpu)
    if way in ("overwire", "keep"):
        import overwire as ow

        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        began = time.perf_counter()
        offloaded = ow.offload(model, "cuda", keep=nbytes // 2 if way == "keep" else None)
        seconds = time.perf_counter() - began
        print(f"{offloaded}, kept {offloaded.kept}, ring {offloaded.ring}, {seconds:.2f} s", file=sys.stderr)
        model._offloaded = offloaded
        return model
    if way in ("accelerate", "streamed"):
        import accelerate

        if way == "accelerate":
            return accelerate.cpu_offload(model, gpu)
        import logging

        import overwire as ow

        logging.basicConfig(level=logging.INFO, format="Offloaded: %(message)s")
        with ow.patch_safetensors(offload=True):
            return accelerate.cpu_offload(model, gpu)
    if way == "diffusers":
        from diffusers.hooks import apply_group_offloading

        apply_group_offloading(
            model,
            onload_device=gpu,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=True,
        )
        return model
    import flextensor

    patterns = ["layers.*"] if kind != "unet" else ["down_blocks.*", "mid_block*", "up_blocks.*"]
    return flextensor.offload(model, config=flextensor.OffloadConfig(include_patterns=patterns))


def run_way(way: str, kind: str, layers: int, repeat: int) -> None:
    model, arguments = build(kind, layers)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    torch.cuda.empty_cache()
    model = prepare(way, model, kind)
    seconds = []
    with torch.inference_mode():
        for _ in range(3):
            output = model(**arguments)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(repeat):
            began = time.perf_counter()
            output = model(**arguments)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    output = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
    digest = int(output.float().cpu().view(torch.int32).to(torch.int64).sum())
    row = {
        "way": way,
        "s": round(statistics.median(seconds), 4),
        "GB/s": round(nbytes / statistics.median(seconds) / 1e9, 1),
        "device": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "host": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "digest": digest,
        "weights": round(nbytes / 1e9, 2),
        "finite": bool(output.isfinite().all()),
    }
    with open("/proc/self/status") as status:
        row["rss"] = round(int(next(line for line in status if line.startswith("VmRSS")).split()[1]) / 1e6, 2)
    print(json.dumps(row), flush=True)


def link() -> float:
    source, target = (
        torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True),
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda"),
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
    parser.add_argument("--model", default="llama", choices=("llama", "compute", "unet"))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--one")
    options = parser.parse_args()
    if options.one:
        run_way(options.one, options.model, options.layers, options.repeat)
        return 0
    print(f"{torch.cuda.get_device_name()}: pinned copies {link():.1f} GB/s", flush=True)
    digests = {}
    for way in options.ways.split(","):
        command = [sys.executable, __file__, "--one", way, "--model", options.model]
        command += ["--layers", str(options.layers), "--repeat", str(options.repeat)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        print(done.stdout.strip() if done.returncode == 0 else f"{way}: failed: {done.stderr[-600:]}", flush=True)
        if done.returncode == 0:
            print("   ", *[line for line in done.stderr.splitlines() if line.startswith("Offloaded")])
            digests[way] = json.loads(done.stdout.strip().splitlines()[-1])["digest"]
    ours = [
        way
        for way in digests
        if way in ("overwire", "keep", "streamed") and digests[way] != digests.get("resident", digests[way])
    ]
    print("outputs equal" if not ours else f"OUTPUTS DIFFER: {ours}")
    return bool(ours)


if __name__ == "__main__":
    sys.exit(main())

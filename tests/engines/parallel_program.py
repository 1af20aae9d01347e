"""Loads a model with transformers' tensor-parallel plan in two ranks, unpatched and under `patch_safetensors`. Compares
each rank's shards byte for byte, and prints how many bytes each rank has read. `test_transformers.py` runs this program
with each release. The argument is an empty folder. The last line of output is "ok" and the release."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
warnings.filterwarnings("ignore")

import overwire as ow  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402

# Both ranks use these modules, which are imported before the fork. They start no threads.
CLASSES = {"dense": transformers.LlamaForCausalLM, "experts": transformers.MixtralForCausalLM}
RANK = 1 if os.fork() else 0  # rank 1 is the parent, which waits for rank 0
os.environ |= {"RANK": str(RANK), "LOCAL_RANK": str(RANK)}


def shards(model: Any) -> dict[str, torch.Tensor]:
    """Returns this rank's part of each parameter and buffer."""
    return {name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in model.state_dict().items()}


def reads() -> int:
    """Returns how many bytes this process has read from files by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def check(folder: Path, kind: str) -> None:
    """Asserts that a model's shards are the same as after the unpatched load, and that only part of a compressed file
    is read."""
    five = int(transformers.__version__.split(".")[0]) >= 5
    if not five:  # torch 2.11 refuses the Shard(-1) of its plans, and all weights here have two dimensions
        import transformers.integrations.tensor_parallel as plans

        plans.Shard = lambda dim: torch.distributed.tensor.Shard(dim % 2)
    how: dict[str, Any] = {"tp_plan": "auto", "dtype": "auto"} | ({"tp_size": 2} if five else {})
    auto = transformers.AutoModelForCausalLM.from_pretrained
    want = shards(auto(folder / "plain", **how))
    for packed, device in ((True, None), (False, "cpu")):
        home = folder / ("packed" if packed else "plain")
        stored = sum(path.stat().st_size for path in home.glob("*.safetensors"))
        with ow.patch_safetensors(device=device):
            before = reads()
            model = auto(home, **how)
            took = reads() - before
        got = shards(model)
        assert want.keys() == got.keys()
        for name, tensor in want.items():
            other = got[name]
            assert (tensor.dtype, tensor.device, tensor.shape) == (other.dtype, other.device, other.shape), (
                kind,
                name,
                tensor.shape,
                other.shape,
                tensor.dtype,
                other.dtype,
            )
            assert torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), (
                kind, name,
            )
        if packed:
            print(f"{kind}: rank {RANK} read {took} of {stored} stored bytes, {took / stored:.2f}", flush=True)
            assert kind != "dense" or took < 0.9 * stored, (took, stored)
    whole, mine = (sum(t.numel() for t in state.values()) for state in (auto(folder / "plain", dtype="auto").state_dict(), want))
    assert mine < 0.75 * whole, (kind, mine, whole)


def main() -> None:
    root = Path(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{root}.store", rank=RANK, world_size=2)
    sizes: dict[str, Any] = {"vocab_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    dense = transformers.LlamaConfig(**sizes, hidden_size=512, intermediate_size=16384)
    experts = transformers.MixtralConfig(
        **sizes, hidden_size=64, intermediate_size=96, num_key_value_heads=2, num_local_experts=4
    )
    models = {"dense": dense, "experts": experts}
    if not int(transformers.__version__.split(".")[0]) >= 5:
        del models["experts"]  # the plan of 4.57 has no experts
    for kind, config in models.items():
        if RANK == 0:
            torch.manual_seed(5)
            model = CLASSES[kind](config).bfloat16()
            model.save_pretrained(root / kind / "plain")
            with ow.patch_safetensors(compress=True):
                model.save_pretrained(root / kind / "packed")
        dist.barrier()
        check(root / kind, kind)
        dist.barrier()
    dist.destroy_process_group()
    # The line is written at once, so that the other rank's output cannot be in the middle of it.
    print(f"{'ok' if RANK else 'done'} {transformers.__version__}\n", end="", flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    status = os.waitstatus_to_exitcode(os.wait()[1]) if RANK else 0
    os._exit(status)

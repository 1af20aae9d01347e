"""Loads tiny models in vLLM's real code with overwire, and compares them with vLLM's own loads.

    python tests/engines/engines_vllm.py        needs vLLM's Python tree on PYTHONPATH (`make engines`)

It runs on the CPU without vLLM's compiled parts. Its configuration, models, layers and loaders are the released ones.
Each model is loaded by vLLM's own safetensors loader, then by overwire from a plain and a compressed folder, in one
process and in two ranks over gloo. Every parameter and buffer must equal that of vLLM's loader. It is a script because
importing vLLM takes half a minute.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from processes import overwire_serve  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, LAYERS, VOCAB = 64, 2, 320

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "padded": {**LLAMA, "vocab_size": VOCAB - 20},  # vLLM adds zero rows
    "mixtral": MIXTRAL,
    "experts": MIXTRAL,  # each rank has whole experts
}


def weights(config: dict[str, Any]) -> dict[str, Any]:
    """Returns tensors by their Hugging Face names."""
    import torch

    torch.manual_seed(7)
    vocab = config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, HIDDEN)
    wide = config["intermediate_size"]
    for n in range(LAYERS):
        at = f"model.layers.{n}."
        for name, rows in (("q", 64), ("k", 32), ("v", 32)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        shapes[f"{at}self_attn.o_proj.weight"] = (HIDDEN, 64)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (HIDDEN,)
        if "num_local_experts" in config:
            shapes[f"{at}block_sparse_moe.gate.weight"] = (config["num_local_experts"], HIDDEN)
            for e in range(config["num_local_experts"]):
                for name, shape in (("w1", (wide, HIDDEN)), ("w2", (HIDDEN, wide)), ("w3", (wide, HIDDEN))):
                    shapes[f"{at}block_sparse_moe.experts.{e}.{name}.weight"] = shape
        else:
            for name, shape in (("gate", (wide, HIDDEN)), ("up", (wide, HIDDEN)), ("down", (HIDDEN, wide))):
                shapes[f"{at}mlp.{name}_proj.weight"] = shape
    return {
        name: torch.randn(shape, dtype=torch.float32).mul_(0.02).to(torch.bfloat16) for name, shape in shapes.items()
    }


def quantised(tensors: dict[str, Any], rows: int, columns: int) -> dict[str, Any]:
    """Returns a checkpoint in fp8 with a scale for each block of rows and columns."""
    import torch

    out = {}
    for name, tensor in tensors.items():
        if "_proj." not in name:
            out[name] = tensor
            continue
        high, wide = tensor.shape
        blocks = tensor.float().view(high // rows, rows, wide // columns, columns)
        scale = blocks.abs().amax((1, 3)) / 448
        out[name] = (blocks / scale[:, None, :, None]).view(high, wide).to(torch.float8_e4m3fn)
        out[f"{name}_scale_inv"] = scale
    return out


def folder(path: Path, config: dict[str, Any], tensors: dict[str, Any], compress: bool) -> Path:
    """Writes a model in two shards with an index.json, plain or compressed."""
    import overwire
    import safetensors.torch

    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in shards.items():
        part = {name: tensors[name] for name in held}
        if compress:
            overwire.save_file(part, path / file)
        else:
            safetensors.torch.save_file(part, path / file, metadata={"format": "pt"})
    index = {name: file for file, held in shards.items() for name in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return path


def plug_in(base: Path) -> Path:
    """Makes a folder for the import path with the wheel's entry points, as pip would install them."""
    sys.path.insert(0, str(ROOT))
    import setup

    info = base / "site" / f"{setup.name_version()}.dist-info"
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text(setup.entry_points())
    (info / "METADATA").write_text(setup.metadata())
    return info.parent


def load(
    model: Path, world: int, rank: int, port: int, load_format: str, extra: dict[str, Any] | None = None, **more: Any
) -> Any:
    """Loads a model with vLLM's get_model and returns (model, configuration). more: other arguments of the engine."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    arguments = {
        "model": str(model),
        "load_format": load_format,
        "model_loader_extra_config": extra or {},
        "tensor_parallel_size": world,
        "distributed_executor_backend": "mp" if world > 1 else None,
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_expert_parallel": model.parent.name == "experts" and world > 1,
        "max_model_len": 64,
        "use_tqdm_on_load": False,
    }
    config = EngineArgs(**{**arguments, **more}).create_engine_config()
    parallel = config.parallel_config
    with set_current_vllm_config(config):
        init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        destroy_model_parallel()  # the next model may need other groups, such as one for experts
        initialize_model_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        return get_model(vllm_config=config), config


def state(model: Any) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    import torch

    out = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        if (
            a.dtype != b.dtype
            or a.shape != b.shape
            or not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        ):
            out.append(name)
    return out


def fails(what: str, words: tuple[str, ...], call: Any) -> None:
    try:
        call()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        missing = [word for word in words if word not in said]
        if missing:
            raise SystemExit(f"{what}: {missing} is not in {said!r}") from error
        print(f"  {what}: {said[:200]}")
        return
    raise SystemExit(f"{what}: nothing was raised")


def without_kernels() -> None:
    """Replaces vLLM's compiled function that repacks weights with a function that does nothing."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    utils.check_cpu_sgl_kernel = lambda *_: False  # it is True on processors with AMX
    UnquantizedFusedMoEMethod.process_weights_after_loading = QuantizeMethodBase.process_weights_after_loading


def planned() -> list[int]:
    """Returns a list to which each executed plan appends its number of slices."""
    from overwire.integrations.load_plan import copies

    out: list[int] = []
    fill = copies.load_copies

    def noted(every: list[Any], most: int) -> None:
        fill(every, most)
        out.append(len(every))

    copies.load_copies = noted
    return out


def reads() -> list[int]:
    """Returns a list to which each shared load appends the number of bytes that this rank has read."""
    from overwire.integrations.load_plan import run_plan

    read: list[int] = []
    share = run_plan.land_together

    def shared(together: Any, *arguments: Any) -> bool:
        if landed := share(together, *arguments):
            read.append(together.read)
        return landed

    run_plan.land_together = shared
    return read


def rank_main(base: Path, world: int, rank: int, port: int, urls: list[str]) -> None:
    """Loads all models from the folder or, if there is a URL, one model from the store."""
    if urls:
        from_store(base, rank, port, urls[0])
        return
    import vllm
    from overwire.integrations.load_plan import record_copies, run_plan

    normal = run_plan.APART, record_copies.EARLY
    without_kernels()
    print(f"vLLM {vllm.__version__}, rank {rank} of {world}", flush=True)
    plans = planned()
    read = reads()
    for name in MODELS:
        at = base / name
        theirs = state(load(at / "plain", world, rank, port, "safetensors")[0])
        for kind in ("plain", "compressed"):
            if kind == "compressed":  # the loader still runs while tensors are read
                run_plan.APART = record_copies.EARLY = 1
            for plan in (True, False):
                plans.clear()
                read.clear()
                model, config = load(at / kind, world, rank, port, "overwire", {"max_memory": "64KiB", "plan": plan})
                wrong = differences(state(model), theirs)
                if wrong or (bool(plans) != plan and not (plan and read)):
                    raise SystemExit(
                        f"{name}, {kind}, rank {rank} of {world}: differs from vLLM's own load: {wrong}, or not planned: {plans}"
                    )
                print(
                    f"  {name}, {kind}: {len(theirs)} tensors equal vLLM's own load, {sum(plans)} slices planned",
                    flush=True,
                )
                if plan and world > 1 and kind == "plain":  # compressed tensors are small, so their parts share chunks
                    shared(at / kind, read)
            run_plan.APART, record_copies.EARLY = normal
            reload(model, config, theirs)
    if world == 1:
        fails(
            "vLLM's own loader",
            ("compressed by overwire", "pip install"),
            lambda: load(base / "llama/compressed", 1, rank, port, "auto"),
        )
        bad(base, port)
        joins(base / "llama/compressed", port)
        with host_store(os.environ):
            theirs = state(load(base / "llama/plain", 1, 0, port, "safetensors")[0])
            check_host_store(lambda: differences(state(load_hosted(base / "llama/compressed", port)), theirs))


def from_store(base: Path, rank: int, port: int, url: str) -> None:
    """By default, two ranks share the reads from a store."""
    without_kernels()
    read = reads()
    at = base / "llama"
    theirs = state(load(at / "plain", 2, rank, port, "safetensors")[0])
    extra = {"source": f"{url}llama/compressed/model.safetensors.index.json"}
    wrong = differences(state(load(at / "plain", 2, rank, port, "overwire", extra)[0]), theirs)
    if wrong:
        raise SystemExit(f"{url}, rank {rank}: differs from vLLM's own load: {wrong}")
    print(f"  {url}: {len(theirs)} tensors equal vLLM's own load", flush=True)
    shared(at / "compressed", read)


def shared(path: Path, read: list[int]) -> None:
    """Checks that the ranks together read each file about once."""
    import torch

    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, read[0] if len(read) == 1 else None)
    stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    most = 1.5 if path.parent.name == "experts" else 1.05  # ranks also read the small gaps between their experts
    if None in every or sum(every) > most * stored:
        raise SystemExit(f"{path}: the ranks have read {every} bytes of {stored}")
    print(f"    the ranks read {every} bytes, {sum(every) / stored:.3f} of the files", flush=True)


def reload(model: Any, config: Any, theirs: dict[str, Any]) -> None:
    """vLLM's reload_weights restores zeroed parameters."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    with torch.no_grad(), set_current_vllm_config(config):
        for parameter in model.parameters():
            parameter.zero_()
        reload_weights(config, model, None, None, True)
    wrong = differences(state(model), theirs)
    if wrong:
        raise SystemExit(f"reload_weights: differs from vLLM's own load: {wrong}")


def bytes_read() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def joins(path: Path, port: int) -> None:
    """A load uses the data of a preload in the same process."""
    import overwire

    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    read = []
    for preloads in (False, True):
        if preloads:
            overwire.preload(path).result(60)
        before = bytes_read()
        load(path, 1, 0, port, "overwire")
        read.append(bytes_read() - before)
    print(f"  bytes read without and with a preload: {read}, of {size} in the files")
    if read[0] - read[1] < size * 0.8:
        raise SystemExit("the load did not join the preload")


def load_hosted(path: Path, port: int) -> Any:
    return load(path, 1, 0, port, "overwire", {"host": True})[0]


def check_host_store(differ: Callable[[], Any]) -> None:
    """Loads a model that the host store does not have, and then loads it again from the store. differ: loads the model
    and returns what differs."""
    import overwire

    for source in ("files", "host store"):
        before = overwire.metrics().host
        if wrong := differ():
            raise SystemExit(f"the host store: {wrong}")
        now = overwire.metrics().host
        hits, misses = now.hits - before.hits, now.misses - before.misses
        if (hits > 0, misses > 0) != (source == "host store", source == "files"):
            raise SystemExit(f"the host store: {hits} hits and {misses} misses instead of the {source}")
        overwire.quiesce(timeout=60)  # waits until the files are in the store
    print(f"  host store: {hits} files from memory", flush=True)


def bad(base: Path, port: int) -> None:
    """Missing, unexpected and damaged tensors are reported."""
    plain = weights(LLAMA)

    def without(*names: str) -> Path:
        path = Path(tempfile.mkdtemp(dir=base)) / "m"
        return folder(path, LLAMA, {name: tensor for name, tensor in plain.items() if name not in names}, True)

    attn = "model.layers.1.self_attn"
    for name, words in (
        ("model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight"),
        (f"{attn}.k_proj.weight", f"{attn}.qkv_proj.weight[k]"),
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_up_proj.weight[1]"),
        ("model.norm.weight", "model.norm.weight"),
    ):
        said = ("ValueError", "not initialized from checkpoint", words)
        fails(f"without {name}", said, functools.partial(load, without(name), 1, 0, port, "overwire"))
    mixtral = weights(MIXTRAL)
    gone = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    path = folder(base / "expert", MIXTRAL, {name: tensor for name, tensor in mixtral.items() if name != gone}, False)
    fails(f"without {gone}", ("ValueError", "w3 of expert 2"), lambda: load(path, 1, 0, port, "overwire"))
    path = folder(base / "surplus", LLAMA, {**plain, "model.layers.0.extra.weight": plain["model.norm.weight"]}, True)
    fails("a weight too many", ("extra",), lambda: load(path, 1, 0, port, "overwire"))
    path = without()
    file = next(path.glob("*1-of*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)
    fails("a damaged file", ("CorruptError", file.name, "chunk"), lambda: load(path, 1, 0, port, "overwire"))
    fails(
        "an unknown key",
        ("unknown key 'speed'",),
        lambda: load(base / "llama/plain", 1, 0, port, "overwire", {"speed": 9}),
    )


def environment(base: Path, site: Path) -> dict[str, str]:
    """Returns a rank's environment."""
    path = os.pathsep.join([str(site), str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {
        **os.environ,
        "PYTHONPATH": path,
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
    }
    env.update(
        XDG_RUNTIME_DIR=str(base),  # for the host store's socket
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        VLLM_CACHE_ROOT=str(base / "cache"),
        VLLM_CPU_KVCACHE_SPACE="1",
    )
    return env


def free_port() -> int:
    """Returns a port on which no program listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


HOST_STORE = [sys.executable, "-m", "overwire", "host"]


@contextlib.contextmanager
def host_store(env: Mapping[str, str]) -> Iterator[None]:
    """Runs the host store with an environment."""
    command = [*HOST_STORE, "--budget", "1GB"]
    store = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert store.stdout is not None and store.stdout.readline()
        yield
    finally:
        store.kill()
        store.wait()


def host_entries() -> list[dict[str, Any]]:
    """Returns the entries of the host store."""
    entries: list[dict[str, Any]] = json.loads(subprocess.check_output([*HOST_STORE, "list", "--json"]))["entries"]
    return entries


@contextlib.contextmanager
def plugged_folder(prefix: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """Makes a temporary folder in which overwire is installed as a plug-in. Yields it and the environment of a rank."""
    root = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield root, environment(root, plug_in(root))
    finally:
        shutil.rmtree(root)


def run_ranks(script: str, root: Path, world: int, names: Iterable[str], env: dict[str, str]) -> None:
    """Runs a script, which calls `run_as_rank`, once for each rank. Raises SystemExit unless all ranks succeed."""
    command, port = [sys.executable, script, "--rank", str(root), str(world)], str(free_port())
    runs = [subprocess.Popen([*command, str(rank), port, *names], env=env) for rank in range(world)]
    try:
        codes = [run.wait(1200) for run in runs]
    finally:
        for run in runs:
            run.kill()  # has no effect on a process that has ended
    if any(codes):
        raise SystemExit(f"{world} ranks: exit codes {codes}")


def run_as_rank(rank_main: Callable[[Path, int, int, int, list[str]], None]) -> bool:
    """If `run_ranks` has started this process, calls rank_main with the folder, the number of ranks, this rank, the
    port to connect to, and the names. Returns whether it has."""
    if sys.argv[1:2] != ["--rank"]:
        return False
    root, world, rank, port, *names = sys.argv[2:]
    rank_main(Path(root), int(world), int(rank), int(port), names)
    return True


def main() -> None:
    if run_as_rank(rank_main):
        return
    with plugged_folder("overwire-vllm-") as (root, env):
        for name, config in MODELS.items():
            tensors = weights(config)
            folder(root / name / "plain", config, tensors, False)
            folder(root / name / "compressed", config, tensors, True)
        with overwire_serve(root) as url:
            # With the transport "mapped", two ranks share the reads.
            for world, how, urls in ((1, "mapped", []), (2, "mapped", []), (2, "auto", [url])):
                run_ranks(__file__, root, world, urls, env | {"OVERWIRE_EXCHANGE": how})
        print("all loads equal vLLM's own")


if __name__ == "__main__":
    main()

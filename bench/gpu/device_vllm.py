"""Compares vLLM's own load formats with overwire's in vLLM's real loaders on a GPU.

    python bench/gpu/device_vllm.py                       one GPU, Llama 8B's shape, 16 GB, about 300 s
    python bench/gpu/device_vllm.py --shape moe           18,867 tensors
    python bench/gpu/device_vllm.py --ranks 2             two GPUs, tensor-parallel
    python bench/gpu/device_vllm.py --shape tiny --device cpu    without a GPU

It makes a model of the given shape in four shards, plain and compressed, in memory (--dir). One process per rank then
loads it with vLLM's `safetensors`, with overwire plain and compressed, and with sleep mode's memory pool. It compares
every parameter byte for byte, and again after sleep and wake (vLLM's and overwire's), after `reload_weights`, and
after a trainer's pushes of all weights and of deltas. Then fresh processes alternately load it with each format.

The output is vLLM's own line "Loading weights took", overwire's line about slices, and the bytes that overwire's ranks
together read and copied from each other. The kind prepared:FOLDER is overwire with prepared state: a first start, which
writes it, and a later one. A kind overwire:FOLDER:ipc sets OVERWIRE_EXCHANGE. --shape names has 18,867 tiny tensors, so
that only the cost per tensor matters.

Needs overwire, torch and vLLM's Python code. vLLM's kernels are only used with --generate, which compares the tokens of
each format. The exit status is 1 if a parameter differs. Times are only printed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "engines"))
import engines_vllm as engines

SHARDS = 4
LLAMA = {**engines.LLAMA, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {**engines.LLAMA, "head_dim": 64},
    "8b": {
        **LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    # Qwen3-30B-A3B's tensors at a quarter of the width, 15 GB.
    "moe": {
        **LLAMA,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 192,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 151936,
    },
}
# The same names in tiny tensors, so that only the cost per tensor matters.
SHAPES["names"] = {**SHAPES["moe"], "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
SHAPES["fp8"] = {**SHAPES["8b"], "quantization_config": FP8}
# Few layers, so that a whole engine starts quickly.
SHAPES["short"], SHAPES["short-fp8"] = ({**SHAPES[shape], "num_hidden_layers": 4} for shape in ("8b", "fp8"))
SHAPES["names"].update(moe_intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024)
TOOK = re.compile(r"(?:Loading weights took|restored prepared state: \d+ tensors in) ([0-9.]+) s")
# Messages of overwire's loader: what it loaded or stored, or why it did not.
SAID = re.compile(
    r"overwire: (?:loaded \d+ slices|each rank reads|the ranks share|restored|stored|loads |cannot store|no prepared).*"
)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns a checkpoint's names and shapes in the order of Hugging Face's files."""
    wide, head, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, wide)}
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}."
        out[f"{at}input_layernorm.weight"] = out[f"{at}post_attention_layernorm.weight"] = (wide,)
        q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            out[f"{at}self_attn.{name}_proj.weight"] = (rows, wide)
        out[f"{at}self_attn.o_proj.weight"] = (wide, q)
        if "num_experts" in config:
            out[f"{at}self_attn.q_norm.weight"] = out[f"{at}self_attn.k_norm.weight"] = (head,)
            out[f"{at}mlp.gate.weight"] = (config["num_experts"], wide)
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        for expert in range(config.get("num_experts", 1)):
            of = f"{at}mlp.experts.{expert}." if "num_experts" in config else f"{at}mlp."
            for name, shape in (("gate", (inner, wide)), ("up", (inner, wide)), ("down", (wide, inner))):
                out[f"{of}{name}_proj.weight"] = shape
    out["model.norm.weight"] = (wide,)
    out["lm_head.weight"] = (vocab, wide)
    return out


def make(args: argparse.Namespace) -> None:
    """Writes two folders with the model's weights, plain and compressed."""
    import overwire
    import safetensors.torch
    import torch

    config, base = SHAPES[args.shape], Path(args.dir)
    for kind in ("plain", "packed"):
        (base / kind).mkdir()
        (base / kind / "config.json").write_text(json.dumps(config))
    every = shapes(config)
    total = 2 * sum(torch.Size(shape).numel() for shape in every.values())
    at, shards = 0, [{} for _ in range(SHARDS)]  # type: ignore[var-annotated]
    torch.manual_seed(1)
    index, size = {}, 0
    for name, shape in every.items():
        shards[min(SHARDS - 1, at * SHARDS // total)][name] = shape
        at += 2 * torch.Size(shape).numel()
    for number, held in enumerate(shards, 1):
        file = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        tensors = {name: (torch.randn(shape, device=args.device) * 0.02).bfloat16() for name, shape in held.items()}
        if "quantization_config" in config:
            tensors = engines.quantised(tensors, *config["quantization_config"]["weight_block_size"])
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        safetensors.torch.save_file(tensors, base / "plain" / file, metadata={"format": "pt"})
        overwire.convert(base / "plain" / file, base / "packed" / file)
        index.update(dict.fromkeys(tensors, file))
        size += sum(tensor.nbytes for tensor in tensors.values())
    for kind in ("plain", "packed"):
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": index})
        (base / kind / "model.safetensors.index.json").write_text(text)
    stored = sum(path.stat().st_size for path in (base / "packed").glob("*.safetensors"))
    print(f"model: {args.shape}, {size / 1e9:.2f} GB, {len(index)} tensors, compressed {stored / size:.3f}", flush=True)


def parts(kind: str) -> tuple[str, str, str]:
    """Splits FORMAT[:FOLDER[:EXCHANGE]] into format, folder and OVERWIRE_EXCHANGE. "" leaves the setting unchanged."""
    form, folder, exchange = (kind.split(":") + ["", ""])[:3]
    return form, folder or "plain", exchange


def extra_of(args: argparse.Namespace, form: str) -> dict[str, Any]:
    """Returns a format's extra configuration. For `prepared` it is overwire's with a folder for prepared state."""
    if form == "prepared":
        return {**json.loads(args.extra), "prepared": str(Path(args.dir) / "prepared")}
    return json.loads(args.extra) if form == "overwire" else {}


def load(args: argparse.Namespace, kind: str, extra: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """Returns (model, configuration) from vLLM's get_model. kind has the form that `parts` splits."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    form, folder, _ = parts(kind)
    gpu = args.device != "cpu"
    arguments = EngineArgs(
        model=str(Path(args.dir) / folder),
        load_format="overwire" if form == "prepared" else form,
        model_loader_extra_config=extra_of(args, form) if extra is None else extra,
        tensor_parallel_size=args.ranks,
        distributed_executor_backend="mp" if args.ranks > 1 else None,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        use_tqdm_on_load=False,
        **backend_of(args),
    )
    config = arguments.create_engine_config()
    if gpu:
        torch.cuda.set_device(args.rank)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            at = f"tcp://127.0.0.1:{args.port}"
            init_distributed_environment(args.ranks, args.rank, at, args.rank, backend="nccl" if gpu else "gloo")
        if not model_parallel_is_initialized():
            initialize_model_parallel(args.ranks)
        return get_model(vllm_config=config), config


def same(what: str, model: Any, theirs: dict[str, Any]) -> None:
    """Compares every parameter and buffer with those from vLLM's own loader."""
    import torch

    ours = dict([*model.named_parameters(), *model.named_buffers()])
    wrong = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        a, b = ours[name].detach(), theirs[name]
        if (
            a.dtype != b.dtype
            or a.shape != b.shape
            or not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        ):
            wrong.append(name)
    if wrong:
        raise SystemExit(f"{what}: differs from vLLM's own: {wrong[:10]}")
    print(f"  {what}: {len(theirs)} tensors equal vLLM's own load", flush=True)


def check(args: argparse.Namespace) -> None:
    """Compares every format with vLLM's own, in one process per rank."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    engines.without_kernels()
    with torch.no_grad():
        theirs = engines.state(load(args, "safetensors")[0])
        for kind in ("overwire:plain", "overwire:packed"):
            model, config = load(args, kind)
            same(f"rank {args.rank}, {kind}", model, theirs)
            for parameter in model.parameters():
                parameter.zero_()
            with set_current_vllm_config(config):
                reload_weights(config, model, None, None, True)
            same(f"rank {args.rank}, {kind}, reload_weights", model, theirs)
            if kind == "overwire:packed" and args.ranks == 1:
                pushes(args, model, config)
            del model
        if args.device == "cpu":
            return
        from vllm.device_allocator.cumem import CuMemAllocator

        torch.cuda.empty_cache()
        allocator = CuMemAllocator.get_instance()
        with allocator.use_memory_pool(tag="weights"):
            model, config = load(args, "overwire:packed")
        same(f"rank {args.rank}, in sleep mode's pool", model, theirs)
        began = time.perf_counter()
        allocator.sleep(offload_tags=("weights",))
        slept = time.perf_counter() - began
        allocator.wake_up()
        print(f"  slept in {slept:.2f} s, woke in {time.perf_counter() - began - slept:.2f} s", flush=True)
        same(f"rank {args.rank}, after sleep and wake", model, theirs)
        sleeps(args, model, theirs)
        if os.environ.get("OVERWIRE_SLEEP_IMAGES"):
            sleeps_deeply(args, model, config, theirs)


def sleeps_deeply(args: argparse.Namespace, model: Any, config: Any, theirs: dict[str, Any]) -> None:
    """Tests and times level 2 with overwire's file in OVERWIRE_SLEEP_IMAGES, which must be set."""
    import torch
    from overwire.integrations.vllm.sleeping import SleepBackend

    backend = SleepBackend()
    backend.note_files(config, False)
    backend.store_weights(model)
    backend.finish_storing()
    for cycle in range(5):
        times = [time.perf_counter()]
        for step in (lambda: backend.suspend(2), backend.resume, lambda: backend.has_loaded_weights(config)):
            needless = step()
            torch.cuda.synchronize()
            times.append(time.perf_counter())
        slept, woke, same_weights = (end - start for start, end in zip(times, times[1:], strict=False))
        print(f"  level 2, cycle {cycle}: {slept:.3f} s, woke in {woke:.3f} s, reload {needless} in {same_weights:.3f} s")
        same(f"rank {args.rank}, after level 2", model, theirs)


def sleeps(args: argparse.Namespace, model: Any, theirs: dict[str, Any]) -> None:
    """Tests overwire's sleep back end and times it next to pinned copies of the same size."""
    import torch
    from overwire.integrations.vllm.sleeping import SleepBackend

    backend = SleepBackend()
    size = sum(tensor.nbytes for tensor in theirs.values())
    for cycle in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        backend.suspend(1)
        slept = time.perf_counter()
        stored = backend._asleep.stored
        backend.resume()
        torch.cuda.synchronize()
        woke = time.perf_counter()
        print(f"  overwire, cycle {cycle}: slept in {slept - began:.3f} s, woke in {woke - slept:.3f} s, {stored / size:.3f} of the model")
        same(f"rank {args.rank}, after overwire's sleep and wake", model, theirs)
    device, host = (
        torch.empty(1 << 30, dtype=torch.uint8, device=f"cuda:{args.rank}"),
        torch.empty(1 << 30, dtype=torch.uint8).pin_memory(),
    )
    for what, to, of in (("down", host, device), ("up", device, host)):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(8):
            to.copy_(of, non_blocking=True)
        torch.cuda.synchronize()
        rate = 8 * host.nbytes / (time.perf_counter() - began)
        print(f"  floor: pinned memory {what} {rate / 1e9:.1f} GB/s: the stored bytes {stored / rate:.3f} s, the model {size / rate:.3f} s")


class Client:
    """Replaces vLLM's control plane for one worker in this process."""

    def __init__(self, engine: Any, config: Any) -> None:
        self.engine, self.config, self.seconds = engine, config, 0.0

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, info: dict[str, Any]) -> None:
        from vllm.config import set_current_vllm_config

        began = time.perf_counter()
        with set_current_vllm_config(self.config):
            self.engine.update_weights(info)
        self.seconds, self.info = time.perf_counter() - began, info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()


class Source(dict):  # type: ignore[type-arg]
    """A WeightSource that holds tensors by name."""

    def __iter__(self) -> Any:
        return iter(self.items())


def pushes(args: argparse.Namespace, model: Any, config: Any) -> None:
    """Pushes all weights from a trainer on the same device, then deltas of 1 % of the elements."""
    import overwire
    import torch
    from overwire.integrations.vllm import transfer
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    device = torch.device("cpu" if args.device == "cpu" else f"cuda:{args.rank}")
    engine = WeightTransferEngineFactory.create_engine(WeightTransferConfig(backend="overwire"), config, device, model)
    client = Client(engine, config)
    source = Source(overwire.load_file(Path(args.dir) / "plain", str(device)))
    size = sum(tensor.nbytes for tensor in source.values())
    info = transfer.TrainerInit(rank=0, where=str(Path(args.dir) / "pushes"), deltas=True)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    for step in range(6):
        for tensor in source.values():
            tensor.view(-1)[step % 100 :: 100] *= 1.01
        began = time.perf_counter()
        trainer.send_weights(whole=step < 2)
        seconds = time.perf_counter() - began
        words = f"{client.info['kind']}: {seconds:.3f} s, {client.seconds:.3f} s of it in the worker"
        print(f"  push {step}, {words}; {client.info['size'] / size:.4f} of {size / 1e9:.1f} GB", flush=True)
        pushed = engines.state(model)
        for parameter in model.parameters():
            parameter.zero_()
        model.load_weights(source.items())
        same(f"push {step}", model, pushed)
        del pushed
    trainer.shutdown()
    shutil.rmtree(Path(args.dir) / "pushes")


def counted() -> dict[str, int]:
    """Counts the bytes that overwire's jobs read and copy from other ranks from now on."""
    from overwire.jobs import Job

    done, out = Job.done, {"read": 0, "copied": 0}

    def noted(job: Any) -> None:
        report = job.report() or {}
        out["read"] += report.get("stages", {}).get("read_bytes", 0)
        out["copied"] += report.get("pulled", 0)
        done(job)

    Job.done = noted  # type: ignore[method-assign]
    return out


def spans() -> dict[str, float]:
    """Records the times at which overwire's loader begins and ends to load weights."""
    import torch
    from overwire.integrations.vllm.loader import OverwireModelLoader

    load, out = OverwireModelLoader.load_weights, {}

    def noted(*args: Any) -> None:
        out["began"] = time.monotonic()
        load(*args)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        out["ended"] = time.monotonic()

    OverwireModelLoader.load_weights = noted  # type: ignore[method-assign]
    return out


def stages() -> dict[str, float]:
    """Records the seconds in which vLLM creates models and processes their weights from now on."""
    from vllm.model_executor.model_loader import base_loader, utils

    out = {"making": 0.0, "processing": 0.0}

    def watch(name: str, stage: str) -> None:
        call = getattr(utils, name)

        def watched(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                out[stage] += time.perf_counter() - began

        for module in (base_loader, utils):
            setattr(module, name, watched)

    watch("initialize_model", "making")
    watch("process_weights_after_loading", "processing")
    return out


def timed(args: argparse.Namespace, kind: str) -> None:
    """Runs in a fresh process: loads once and prints times by stage, reads and memory as JSON."""
    import torch

    began = time.perf_counter()
    engines.without_kernels()
    took = stages()
    imported = time.perf_counter() - began
    span = spans() if kind.startswith("overwire") else {}
    reads = counted() if kind.startswith("overwire") else {}
    gpu = args.device != "cpu"
    if gpu:
        torch.zeros(1, device=f"cuda:{args.rank}")
        free = torch.cuda.mem_get_info(args.rank)[0]
    host = anonymous()
    began, processor = time.perf_counter(), time.process_time()
    model, _ = load(args, kind)
    if gpu:
        torch.cuda.synchronize()
    whole, processor = time.perf_counter() - began, time.process_time() - processor
    rest = {"reading and the rest": whole - sum(took.values())}  # includes recording
    out = {"kind": kind, "import": imported, "get_model": whole, "processor": processor, **took, **rest, "host MB": anonymous() - host}
    if kind.startswith("prepared"):
        from overwire.integrations.vllm import prepared

        prepared.begin_writing()
        prepared.finish_writing()
    out.update(reads, **span)
    size = sum(t.numel() * t.element_size() for t in model.parameters())
    if gpu:
        out["peak over model MB"] = (torch.cuda.max_memory_allocated() - size) / 1e6
        out["device over model MB"] = (free - torch.cuda.mem_get_info(args.rank)[0] - size) / 1e6
    print(json.dumps(out), flush=True)


def generate(args: argparse.Namespace) -> None:
    """Asserts that each format's start gives the same tokens."""
    from device_tokens import compare_tokens

    compare_tokens(args)


def backend_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the argument for vLLM's attention. On a GPU it is Triton, which needs no compiled library of vLLM."""
    return {} if args.device == "cpu" else {"attention_backend": "TRITON_ATTN"}


def starts_of(kinds: str) -> list[str]:
    """Returns the kinds in order. Prepared state is started twice: first to write it, then from it."""
    return [one for one in kinds.split(",") for _ in range(2 if one.startswith("prepared") else 1)]


def forget(folder: Path) -> None:
    """Drops a folder's files from the page cache and prints the disk's read rate for the first file."""
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open(files[0], "rb", buffering=0) as opened, ThreadPoolExecutor(16) as pool:
        size, step = os.fstat(opened.fileno()).st_size, 4 << 20
        began = time.perf_counter()
        list(pool.map(lambda at: os.pread(opened.fileno(), step, at), range(0, size, step)))
        print(f"  the disk reads {size / (time.perf_counter() - began) / 1e9:.2f} GB/s", flush=True)
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def anonymous() -> float:
    """Returns this process's anonymous memory in MB."""
    text = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+)", text)
    return int(found[1]) / 1e3 if found else 0.0


def processes(args: argparse.Namespace, job: str) -> list[str]:
    """Runs one process per rank and returns each one's output."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, __file__, "--shape", args.shape, "--device", args.device, "--ranks", str(args.ranks), "--extra", args.extra]
    command += ["--kinds", args.kinds, "--dir", args.dir, "--port", str(port), "--job", job]
    env = {**os.environ, **({"OVERWIRE_EXCHANGE": parts(job)[2]} if parts(job)[2] else {})}
    ranks = []
    for rank in range(args.ranks):
        log = open(Path(args.dir) / f"log{rank}", "w+")  # noqa: SIM115
        ranks.append((subprocess.Popen([*command, "--rank", str(rank)], stdout=log, stderr=subprocess.STDOUT, env=env), log))
    out, failed = [], False
    for process, log in ranks:
        try:
            failed |= process.wait(args.limit) != 0
        except subprocess.TimeoutExpired:
            process.kill()
            failed = True
        log.seek(0)
        out.append(log.read())
        log.close()
    if failed:
        print(f"{job} failed:", *(text[-6000:] for text in out), sep="\n", flush=True)
        if job == "check":
            raise SystemExit(1)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--kinds", default="safetensors,overwire:plain,overwire:packed", help="FORMAT[:FOLDER[:EXCHANGE]], ...")
    parser.add_argument("--extra", default="{}", help="model_loader_extra_config of overwire")
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not compare parameters")
    parser.add_argument("--generate", action="store_true", help="also run vLLM's engine; needs its kernels")
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before each start; with --dir on a disk")
    parser.add_argument("--limit", type=float, default=150, help="time limit of a process in seconds")
    parser.add_argument("--dir", default="")
    parser.add_argument("--job", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        jobs = {"make": make, "check": check, "generate": generate}
        return jobs[args.job](args) if args.job in jobs else timed(args, args.job)
    base = Path(tempfile.mkdtemp(prefix="overwire-vllm-", dir=args.dir or ("/dev/shm" if args.device != "cpu" else None)))
    try:
        site = engines.plug_in(base)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(site), str(engines.ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])
        os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_CACHE_ROOT=str(base / "cache"), VLLM_LOGGING_LEVEL="INFO")
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        if args.device == "cpu":
            os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_CPU_KVCACHE_SPACE="1")
        args.dir = str(base)
        alone = argparse.Namespace(**{**vars(args), "ranks": 1})
        print(processes(alone, "make")[0].strip().splitlines()[-1], flush=True)
        for text in processes(args, "check") if args.check else ():
            print(*[line for line in text.splitlines() if line.startswith("  ")], sep="\n", flush=True)
        if args.generate:
            took = [line for line in processes(alone, "generate")[0].splitlines() if line.startswith("  ") or TOOK.search(line)]
            print(*took, sep="\n", flush=True)
        times: dict[str, list[float]] = {}
        ended: dict[str, list[float]] = {}
        for _ in range(args.repeat):
            shutil.rmtree(base / "prepared", ignore_errors=True)
            for kind in starts_of(args.kinds):
                if args.cold:
                    forget(base / parts(kind)[1])
                texts = processes(args, kind)
                name = f"{kind}, later" if any("restored prepared state" in text for text in texts) else kind
                took = [float(found) for text in texts for found in TOOK.findall(text)]
                rows = [line for text in texts for line in text.splitlines() if line.startswith("{")]
                if len(took) == args.ranks:
                    times.setdefault(name, []).append(max(took))
                print(name, took, *rows, *(f"\n  {found}" for text in texts for found in SAID.findall(text)), flush=True)
                if kind.startswith("overwire") and len(rows) == args.ranks:
                    together = {what: sum(json.loads(row)[what] for row in rows) for what in ("read", "copied")}
                    stored = sum(file.stat().st_size for file in (base / parts(kind)[1]).glob("*.safetensors"))
                    read, copied = together["read"] / stored, together["copied"] / stored
                    print(f"  all ranks read {read:.3f} of {stored} stored bytes, copied {copied:.3f}", flush=True)
                    each = [json.loads(row) for row in rows]
                    done = max(row["ended"] for row in each) - max(row["began"] for row in each)
                    ended.setdefault(name, []).append(done)
                    print(f"  all ranks done {done:.3f} s after the last began", flush=True)
        for kind, each in times.items():
            print(f"{kind:24} Loading weights took {statistics.median(each):.2f} s (median of {len(each)})", flush=True)
        for kind, each in ended.items():
            print(f"{kind:24} all ranks done {statistics.median(each):.3f} s after the last began (median of {len(each)})", flush=True)
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()

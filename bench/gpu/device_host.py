"""Measures loads from the host store, in new processes, against files in /dev/shm and InstantTensor.

    PYTHONPATH=python python bench/gpu/device_host.py [--size 8] [--rounds 3] [--device cuda] [--folder /dev/shm]

--size is the GB of generated bf16 weights. Each load runs in a separate process, which has imported torch and used the
device before the clock starts. The kinds alternate, and all loads of one format must have the same digests. The
exit status is 1 if they differ, if a load from the store missed it, or if another load used it. InstantTensor is
measured if it is installed. "attach" is the time from the call of safe_open to the bytes of the smallest tensor, on
the host. "sleep" runs a process with the weights on the device, and prints the time of the first put and the medians
of sleep and wake, with and without the store. A second process with the same weights must not need more memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHILD = """
import json, sys, time
import torch, overwire as ow
kind, path, device = sys.argv[1:4]
torch.ones(1, device=device)
host = kind == "store"
if kind == "attach":
    times = []
    for host in (True, False) * 21:
        begun = time.perf_counter()
        with ow.safe_open(path, framework="np", host=host) as file:
            name = min(file.keys(), key=lambda n: file.get_slice(n).get_shape())
            file.get_tensor(name)
        times.append((time.perf_counter() - begun) * 1e3)
    store, direct = sorted(times[2::2]), sorted(times[3::2])
    print(json.dumps({"first": times[0], "store": store[len(store) // 2], "file": direct[len(direct) // 2]}))
    sys.exit()
if kind == "sleep":
    tensors = ow.load_file(path, device=device)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    digests = ow.digest(tensors)
    times = {"put": [], "sleep": [], "wake": [], "sleep without": [], "wake without": []}
    def timed(name, call):
        begun = time.perf_counter()
        result = call()
        if device != "cpu":
            torch.cuda.synchronize()
        times[name].append(time.perf_counter() - begun)
        return result
    timed("put", lambda: ow.prepare_sleep(tensors, host=True).wait())
    for host, end in ((True, ""), (False, " without")) * 4:
        asleep = timed("sleep" + end, lambda: ow.sleep(tensors, host=host))
        stored, shared = (asleep.stored, asleep.shared) if host else (stored, shared)
        timed("wake" + end, asleep.wake)
        assert ow.digest(tensors) == digests
    result = {name: sorted(all_of[-3:])[-2 if len(all_of) > 1 else 0] for name, all_of in times.items()}
    print(json.dumps({**result, "stored": stored, "shared": shared}))
    sys.exit()
if kind == "instanttensor":
    import instanttensor
    begun = time.perf_counter()
    with instanttensor.safe_open(path, framework="pt", device=torch.cuda.current_device()) as file:
        tensors = dict(file.tensors())
else:
    begun = time.perf_counter()
    tensors = ow.load_file(path, device=device, host=host)
if device != "cpu":
    torch.cuda.synchronize()
took = time.perf_counter() - begun
private = sum(int(l.split()[1]) for l in open("/proc/self/smaps_rollup") if l.startswith("Private")) << 10
result = {"seconds": took, "bytes": sum(t.nbytes for t in tensors.values()), "private": private,
          "hits": ow.metrics().host.hits, "digest": str(sorted(ow.digest(tensors).items()))}
print(json.dumps(result))
"""


def run(*words: str, env: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)[-300:]}: {done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", default="/dev/shm")
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        plain, packed, socket = (str(Path(folder) / name) for name in ("p.safetensors", "c.safetensors", "socket"))
        env = {**os.environ, "OVERWIRE_HOST": socket}
        run("-m", "overwire", "bench", "gen", "llama-bf16", plain, "--size", f"{args.size}GB", env=os.environ.copy())
        run("-m", "overwire", "compress", plain, "-o", packed, "-q", env=os.environ.copy())
        time.sleep(3.1)  # the store takes plain files that have been unchanged for three seconds
        store = subprocess.Popen([sys.executable, "-m", "overwire", "host", "--budget", "1TB"], env=env,
                                 stdout=subprocess.PIPE, text=True)  # fmt: skip
        try:
            assert store.stdout is not None
            store.stdout.readline()
            for path in (packed, plain):
                begun = time.perf_counter()
                run("-m", "overwire", "host", "put", path, env=env)
                took, size = time.perf_counter() - begun, os.path.getsize(path)
                print(f"put {Path(path).name}: {size / 1e9:.2f} GB in {took:.2f} s, {size / took / 1e9:.1f} GB/s")
            attach = json.loads(run("-c", CHILD, "attach", packed, "cpu", env=env))
            print("attach, ms: " + ", ".join(f"{name} {value:.2f}" for name, value in attach.items()))
            for device in dict.fromkeys(("cpu", args.device)):
                for path in (packed, plain):
                    wrong += measure(path, device, args.rounds, env)
            wrong += measure_sleep(packed, args.device, env)
        finally:
            store.terminate()
            store.wait()
    sys.exit(bool(wrong))


def measure_sleep(path: str, device: str, env: dict[str, str]) -> int:
    """Prints times of sleep in two processes, and returns 1 if the second one needs more memory."""
    used = []
    for engine in ("first", "second"):
        result = json.loads(run("-c", CHILD, "sleep", path, device, env=env))
        used.append(json.loads(run("-m", "overwire", "host", "list", "--json", env=env))["used"])
        times = ", ".join(f"{name} {value:.3f} s" for name, value in result.items() if name not in ("stored", "shared"))
        sizes = f"{result['stored'] / 1e9:.2f} GB own memory, {result['shared'] / 1e9:.2f} GB of the store"
        print(f"sleep, {engine} process on {device}: {times}; {sizes}", flush=True)
    if used[0] != used[1] or result["stored"]:
        print(f"WRONG: the second process needs memory: {used}, {result['stored']}")
        return 1
    return 0


def measure(path: str, device: str, rounds: int, env: dict[str, str]) -> int:
    """Prints the medians of one format on one device, and returns the number of wrong loads."""
    kinds = ["store", "file"]
    instant = [sys.executable, "-c", "import instanttensor"]
    if path.endswith("p.safetensors") and device != "cpu" and not subprocess.run(instant, capture_output=True).returncode:
        kinds.append("instanttensor")
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind in kinds:
            results[kind].append(json.loads(run("-c", CHILD, kind, path, device, env=env)))
    digests = {one["digest"] for all_of in results.values() for one in all_of}
    wrong = len(digests) - 1 + sum(one["hits"] != (kind == "store") for kind in kinds for one in results[kind])
    for kind, all_of in results.items():
        seconds = statistics.median(one["seconds"] for one in all_of)
        rate = all_of[0]["bytes"] / seconds / 1e9
        private = statistics.median(one["private"] for one in all_of) / 1e9
        print(f"{Path(path).name} to {device} from {kind}: {seconds:.3f} s, {rate:.1f} GB/s of tensors, "
              f"{private:.2f} GB private", flush=True)  # fmt: skip
    if wrong:
        print(f"WRONG: {wrong} loads of {path} differ, missed the store, or used it by mistake")
    return wrong


if __name__ == "__main__":
    main()

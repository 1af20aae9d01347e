"""Compares a second replica on a node, which gets the model's pieces from Ray's object store, with loads from /dev/shm.

    python bench/gpu/device_ray.py --size 8GB
    python bench/gpu/device_ray.py --size 64MB --piece 8 --device cpu --repeat 3    no GPU

One raylet and one HTTP server (`overwire serve`) run on this host. A first replica loads the model from the server and
keeps its pieces. The other replicas are fresh processes. Each has imported torch, created the CUDA context and called
Ray once, and loads the model twice from one source: the server through Ray, or the file in /dev/shm. The two kinds
alternate, and digests of the tensors are compared after each load. "read" is the number of bytes that passed over the
loopback interface during a load through Ray, divided by the size of the file. It includes Ray's own messages. Needs
Ray, and memory for the file, Ray's copy of it, and the tensors.
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


def replica(device: str) -> None:
    """Reads load options from standard input, a JSON object per line. Prints the seconds and digests of each load."""
    import overwire as ow
    import ray
    import torch

    ray.init(address="auto", log_to_driver=False, configure_logging=False)
    ray.put(0)  # a process's first call imports modules
    torch.empty(1, device=device)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        options, received = json.loads(line), count_received()
        begin = time.perf_counter()
        tensors = ow.load_file(device=device, **options)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds, received = time.perf_counter() - begin, count_received() - received
        answer = {"seconds": seconds, "received": received, "bytes": sum(each.nbytes for each in tensors.values())}
        answer["digest"] = dict(sorted(ow.digest(tensors).items()))
        del tensors
        print(json.dumps(answer), flush=True)


def count_received() -> int:
    return int(Path("/sys/class/net/lo/statistics/rx_bytes").read_text())


class Replica:
    """A process that loads."""

    def __init__(self, device: str) -> None:
        self._process = subprocess.Popen([sys.executable, __file__, "--replica", "--device", device], text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def read_answer(self) -> Any:
        """Waits for the next line: an empty dict when the process is ready, then one answer for each load."""
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a replica has failed: see above")
        return json.loads(line)

    def load(self, **options: Any) -> Any:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(options) + "\n")
        self._process.stdin.flush()
        return self.read_answer()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def measure(file: Path, uri: str, args: argparse.Namespace) -> None:
    """Measures one file."""
    first = Replica(args.device)
    waiting = [Replica(args.device) for _ in range(2 * args.repeat)]  # they import torch at the same time
    for each in [first, *waiting]:
        each.read_answer()
    loaded = first.load(source=uri, ray=True)
    sources: dict[str, dict[str, Any]] = {
        "through Ray": {"source": uri, "ray": True}, "from /dev/shm": {"source": str(file), "mmap": False}
    }  # fmt: skip
    rows: dict[str, list[list[Any]]] = {name: [] for name in sources}
    for _ in range(args.repeat):
        for name, options in sources.items():
            second = waiting.pop()
            rows[name].append([second.load(**options) for _ in range(2)])
            second.close()
            if any(load["digest"] != loaded["digest"] for load in rows[name][-1]):
                sys.exit(f"{file.name} {name}: WRONG bytes")
    first.close()
    rates: dict[str, list[float]] = {}
    for name, pairs in rows.items():
        text = f"{file.name:12} {name:14}"
        for at, which in enumerate(("first", "second")):
            values = [pair[at]["bytes"] / pair[at]["seconds"] / 1e9 for pair in pairs]
            rates.setdefault(name, []).append(statistics.median(values))
            text += f" {which} {rates[name][-1]:6.2f} ({min(values):.2f} to {max(values):.2f})"
        read = statistics.median(load["received"] for pair in pairs for load in pair) / file.stat().st_size
        print(f"{text} GB/s" + (f"  read {read:.4f}" if "Ray" in name else ""), flush=True)
    shares = [ray / shm for ray, shm in zip(*rates.values(), strict=True)]
    print(f"{file.name:12} through Ray / from /dev/shm: first {shares[0]:.2f}, second {shares[1]:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--size", default="8GB", help="tensor bytes (default 8GB)")
    parser.add_argument("--piece", default="64", help="MiB of a piece (default 64)")
    parser.add_argument("--repeat", type=int, default=5, help="processes for each row (default 5)")
    parser.add_argument("--object-store", type=int, default=0, help="MiB for Ray (default: four times the plain file)")
    args = parser.parse_args()
    if args.replica:
        replica(args.device)
        return
    import ray

    os.environ["OVERWIRE_RAY_PIECE_MB"] = args.piece
    with tempfile.TemporaryDirectory(prefix="overwire-ray-", dir="/dev/shm") as name:
        folder = Path(name)
        for words in (["bench", "gen", "llama-bf16", "--size", args.size, str(folder / "plain")],
                      ["compress", str(folder / "plain"), "-o", str(folder / "compressed")]):  # fmt: skip
            subprocess.run([sys.executable, "-m", "overwire", *words], check=True, stdout=subprocess.DEVNULL)
        store = args.object_store << 20 or 4 * (folder / "plain").stat().st_size
        ray.init(include_dashboard=False, num_cpus=4, object_store_memory=store, log_to_driver=False)
        words = [sys.executable, "-m", "overwire", "serve", name, "--port", "0"]
        server = subprocess.Popen(words, text=True, stdout=subprocess.PIPE)
        try:
            assert server.stdout
            address = next(word for word in server.stdout.readline().split() if word.startswith("http://"))
            for kind in ("plain", "compressed"):
                measure(folder / kind, f"{address.rstrip('/')}/{kind}", args)
        finally:
            server.kill()
            server.wait()
            ray.shutdown()


if __name__ == "__main__":
    main()

"""Measures loads through Ray on several nodes: network namespaces of this machine, with links of limited speed.

    sudo python bench/bench_ray.py [--nodes 4] [--size 512MB] [--rate 300mbit] [--piece 8] [--repeat 3]

Each node is a network, mount and process namespace with a raylet of its own; the S3 server (versitygw) has one too. A
link has the same rate in both directions, also the store's. The bytes that the store sent are those of its network
interface, divided by those that one node's load without Ray takes there. The second replica on a node and the load
from /dev/shm are fresh processes, five of each. They have called Ray before, as every actor has. A row is the median of
all rounds.
Each round has an object and processes of its own, and compares checksums of the tensors after each load. Needs root,
`ip`, `tc`, `nsenter`, Ray and ml_dtypes, and memory for the tensors and shared pieces of all nodes.
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
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STORE = 100  # the host number of the store in the network
NET, BRIDGE, PORT = "10.77.0", "owbridge", 7070
KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench-secret"}
OPTIONS = {"endpoint_url": f"http://{NET}.{STORE}:{PORT}"}


def replica() -> None:
    """Loads models on its node, one for each line of the standard input."""
    import overwire as ow
    import ray

    ray.init(address="auto", log_to_driver=False, configure_logging=False)
    ray.put(0)  # a process's first call imports modules
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        todo = json.loads(line)
        time.sleep(max(0, todo.pop("begin") - time.monotonic()))
        begin = time.monotonic()
        tensors = ow.load_file(**todo, framework="np")
        end, sums = time.monotonic(), 0
        for name in sorted(tensors):
            sums = zlib.crc32(tensors[name].reshape(-1).view("u1"), sums)
        del tensors
        print(json.dumps({"seconds": end - begin, "end": end, "sums": sums}), flush=True)


def run(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


class Place:
    """Namespaces with a shaped link to the bridge."""

    def __init__(self, number: int, stack: ExitStack) -> None:
        self.number, self.address, self.link = number, f"{NET}.{number}", f"owlink{number}"
        name = f"ow{number}"
        run("ip", "netns", "add", name)
        stack.callback(run, "ip", "netns", "del", name)
        run("ip", "link", "add", self.link, "type", "veth", "peer", "name", "eth0", "netns", name)
        stack.callback(run, "ip", "link", "del", self.link)
        run("ip", "link", "set", self.link, "master", BRIDGE, "up")
        for words in ("link set lo up", "link set eth0 up", f"addr add {self.address}/24 dev eth0"):
            run("ip", "-n", name, *words.split())
        own = "mount -t proc proc /proc; mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray"
        own += "; mount -t tmpfs -o size=90% tmpfs /dev/shm; echo; exec sleep infinity"
        first = subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--pid", "--mount", "--fork", "--kill-child", "sh", "-c", own],
            stdout=subprocess.PIPE,
        )  # fmt: skip
        stack.callback(first.wait)
        stack.callback(first.kill)
        assert first.stdout
        first.stdout.readline()
        self.enter = ["nsenter", "-t", Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()[0],
                      "-n", "-m", "-p"]  # fmt: skip

    def shape(self, rate: str) -> None:
        limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
        run("tc", "qdisc", "replace", "dev", self.link, *limit)
        run("ip", "netns", "exec", f"ow{self.number}", "tc", "qdisc", "replace", "dev", "eth0", *limit)

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(self.enter + list(words), env={**os.environ, **KEYS, **env}, text=True,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip

    def count_bytes(self, way: str) -> int:
        """Returns the bytes that this place has sent ("rx": the bridge received them) or received ("tx")."""
        return int(Path(f"/sys/class/net/{self.link}/statistics/{way}_bytes").read_text())


class Replica:
    """A process on a node."""

    def __init__(self, place: Place) -> None:
        self.process = place.start(sys.executable, __file__, "--replica")
        self.answer()

    def ask(self, uri: str, begin: float = 0, **options: Any) -> None:
        assert self.process.stdin
        if uri.startswith("s3:"):
            options["storage_options"] = OPTIONS
        self.process.stdin.write(json.dumps({"source": uri, "begin": begin, **options}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            sys.exit("a replica has failed: see above")
        return json.loads(line)

    def load(self, uri: str, **options: Any) -> Any:
        self.ask(uri, **options)
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


class Fleet:
    """The nodes, the store, and what was measured."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args, self.made = args, 0
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        stack.callback(run, "ip", "link", "del", BRIDGE)
        run("ip", "addr", "add", f"{NET}.254/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="overwire-ray-", dir=args.dir)))
        (self.folder / "s3/models").mkdir(parents=True)
        (self.folder / "iam").mkdir()
        self.store = Place(STORE, stack)
        self.store.start(str(ROOT / "build/bin/versitygw"), "--port", f"{NET}.{STORE}:{PORT}", "--keep-alive",
                         "--quiet", "--iam-dir", str(self.folder / "iam"), "posix", str(self.folder / "s3"),
                         ROOT_ACCESS_KEY=KEYS["AWS_ACCESS_KEY_ID"], ROOT_SECRET_KEY=KEYS["AWS_SECRET_ACCESS_KEY"],
                         )  # fmt: skip
        self.nodes = [Place(number + 1, stack) for number in range(args.nodes + 1)]
        ray = str(Path(sys.executable).with_name("ray"))
        for node in self.nodes:
            role = ["--head", "--port=6379", "--include-dashboard=false"]
            if node is not self.nodes[0]:
                role = [f"--address={self.nodes[0].address}:6379"]
            size = args.object_store << 20
            log = (self.folder / f"ray{node.number}.log").open("w")
            words = [ray, "start", *role, f"--node-ip-address={node.address}", f"--object-store-memory={size}"]
            words += ["--num-cpus=2", "--disable-usage-stats"]
            subprocess.run(node.enter + words, check=True, stdout=log, env=self.env())
        for place in [self.store, *self.nodes]:
            place.shape(args.rate)
        self.files = {kind: str(self.folder / f"{kind}.safetensors") for kind in ("plain", "compressed")}
        for words in (["bench", "gen", "llama-bf16", "--size", args.size, self.files["plain"]],
                      ["compress", self.files["plain"], "-o", self.files["compressed"]]):  # fmt: skip
            subprocess.run([sys.executable, "-m", "overwire", *words], check=True, stdout=2)
        self.sums: int | None = None

    def env(self) -> dict[str, str]:
        return {**os.environ, **KEYS, "RAY_raylet_start_wait_time_s": "120"}

    def object(self, kind: str) -> str:
        """Stores a model under a name of its own, at the speed of this machine."""
        import overwire as ow

        self.made += 1
        uri = f"s3://models/m{self.made}.safetensors"
        run("tc", "qdisc", "del", "dev", self.store.link, "root")
        options = {**OPTIONS, "key": KEYS["AWS_ACCESS_KEY_ID"], "secret": KEYS["AWS_SECRET_ACCESS_KEY"]}
        tensors = ow.load_file(self.files["plain"], framework="np")
        if kind == "small":
            sizes = {name: tensor.nbytes for name, tensor in tensors.items() if tensor.nbytes > 1 << 20}
            smallest = min(sizes, key=lambda name: sizes[name])
            tensors = {smallest: tensors[smallest]}
        ow.save_file(tensors, uri, compress=kind == "compressed", storage_options=options)
        self.store.shape(self.args.rate)
        return uri

    def start_directory(self, replica: Replica) -> None:
        """Starts the cluster's directory, which takes some seconds once."""
        replica.load(self.object("small"), ray=True)

    def count_received(self) -> int:
        return sum(node.count_bytes("tx") for node in self.nodes)

    def at_once(self, replicas: list[Replica], uri: str, **options: Any) -> tuple[float, int]:
        """Loads on several nodes at the same time. Returns the seconds until the last is done, and the bytes that the
        store sent."""
        before, begin = self.store.count_bytes("rx"), time.monotonic() + 0.2
        for one in replicas:
            one.ask(uri, begin=begin, **options)
        done = [one.answer() for one in replicas]
        for one in done:
            self.sums = one["sums"] if self.sums is None else self.sums
            if one["sums"] != self.sums:
                sys.exit("a load gave other bytes")
        return max(one["end"] for one in done) - begin, self.store.count_bytes("rx") - before


def measure(fleet: Fleet, kind: str, rows: set[str], add: Callable[..., None]) -> None:
    """One round of all rows."""
    replicas = [Replica(node) for node in fleet.nodes]
    fleet.start_directory(replicas[-1])
    uri = fleet.object(kind)
    one, sent = fleet.at_once(replicas[:1], uri, ray=False)
    add(kind, "one node: seconds", one)
    if "one" in rows:
        seconds, count = fleet.at_once(replicas[:1], fleet.object(kind), ray=True)
        add(kind, "one node with Ray: time / one", seconds / one)
        add(kind, "one node with Ray: bytes / one", count / sent)
    for way in ("without", "with"):
        if way in rows:
            before = fleet.count_received()
            seconds, count = fleet.at_once(replicas[:-1], uri, ray=way == "with")
            add(kind, f"{len(replicas) - 1} at once {way} Ray: time / one", seconds / one)
            add(kind, f"{len(replicas) - 1} at once {way} Ray: bytes / one", count / sent)
            needed = (len(replicas) - 1) * sent
            name = f"{len(replicas) - 1} at once {way} Ray: bytes received by all nodes / needed"
            add(kind, name, (fleet.count_received() - before) / needed)
    if "with" not in rows:
        fleet.at_once(replicas[:1], uri, ray=True)
    if "late" in rows:
        seconds, count = fleet.at_once(replicas[-1:], uri, ray=True)
        add(kind, "late node: time / one", seconds / one)
        add(kind, "late node: bytes / one", count / sent)
    if "second" in rows:
        local = "/dev/shm/model.safetensors"
        run(*fleet.nodes[0].enter, "cp", fleet.files[kind], local)
        seconds: dict[str, list[float]] = {uri: [], local: []}
        for path in 5 * [uri, local]:
            second = Replica(fleet.nodes[0])
            options = {"ray": True} if path is uri else {"mmap": False}
            took, count = fleet.at_once([second], path, **options)
            seconds[path].append(took)
            if path is uri:
                add(kind, "second replica: bytes / one", count / sent)
            second.close()
        shared, base = (statistics.median(each) for each in seconds.values())
        add(kind, "second replica: seconds", shared)
        add(kind, "load from /dev/shm: seconds", base)
        add(kind, "second replica: rate / rate from /dev/shm", base / shared)
    for each in replicas:
        each.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--nodes", type=int, default=4, help="nodes that load at once (default 4)")
    parser.add_argument("--size", default="512MB", help="tensor bytes (default 512MB)")
    parser.add_argument("--rate", default="300mbit", help="of each link, as for tc (default 300mbit)")
    parser.add_argument("--piece", default="8", help="MiB of a piece (default 8)")
    parser.add_argument("--object-store", type=int, default=2048, help="MiB of a node's object store (default 2048)")
    parser.add_argument("--kinds", default="plain,compressed", help="kinds of files (default plain,compressed)")
    parser.add_argument("--rows", default="one,without,with,late,second", help="what to measure (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--dir", help="folder for temporary files, on a file system with extended attributes")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    os.environ["OVERWIRE_RAY_PIECE_MB"] = args.piece
    values: dict[tuple[str, str], list[float]] = {}

    def add(kind: str, name: str, value: float) -> None:
        values.setdefault((kind, name), []).append(value)
        print(f"{kind:12} {name:45} {value:8.3f}", file=sys.stderr, flush=True)

    with ExitStack() as stack:
        fleet = Fleet(args, stack)
        for _ in range(args.repeat):
            for kind in args.kinds.split(","):
                measure(fleet, kind, set(args.rows.split(",")), add)
    rows = [{"kind": kind, "name": name, "value": statistics.median(each), "all": each}
            for (kind, name), each in values.items()]  # fmt: skip
    for row in rows:
        print(f"{row['kind']:12} {row['name']:45} {row['value']:8.3f}", file=sys.stderr)
    if args.json:
        print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--replica"]:
        replica()
    else:
        sys.exit(main())

"""Measures loads over HTTP from `overwire serve` on this machine, and compares them with the link or with bare TCP.

    python bench/bench_net.py [--device cpu] [--size 1GB] [--repeat 5] [--dir /dev/shm] [--json]

Loads generated bf16 weights, plain and compressed, over links of limited speed to the CPU, and over the bare loopback
to any device. Every byte is compared before anything is timed. A figure is the median of several loads, timed until the
whole model is loaded. Server and client share the cores. The baseline of the bare loopback is the best of several
numbers of connections with sendfile, into fresh memory or, with a GPU, through pinned slots to the device.

If build/bin or PATH has versitygw (`make build/bin/versitygw`), the files are also loaded from S3, by overwire and, if
it is installed, by Run:ai's model streamer.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import overwire as ow

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import stores  # noqa: E402
from processes import overwire_serve  # noqa: E402

# Total rate and rate per connection in GB/s, as arguments of `overwire serve`.
LINKS = (("0.3", ""), ("1.25", ""), ("5", ""), ("1.25", "0.04"))
FILES = {"compressed": "net.safetensors", "plain": "plain.safetensors"}
SLOT = 8 << 20  # the size of a slot in a load's ring


def overwire(*words: str) -> list[str]:
    return [sys.executable, "-m", "overwire", *words]


def median_of(repeat: int, work: Callable[[], object]) -> float:
    """Returns the median seconds of work."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def load_whole(uri: str, device: str, **options: Any) -> dict[str, Any]:
    """Loads a model and returns it when all of it is on the device."""
    import torch

    tensors = ow.load_file(uri, device=device, **options)
    if device != "cpu":
        torch.cuda.synchronize()
    return tensors


def stream_whole(uri: str, device: str) -> dict[str, Any]:
    """Loads a plain file with Run:ai's model streamer."""
    import torch
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(uri)
        tensors = {name: tensor.to(device, copy=True) for name, tensor in streamer.get_tensors()}
    if device != "cpu":
        torch.cuda.synchronize()
    return tensors


def compare(tensors: dict[str, Any], uri: str, load: Callable[[], dict[str, Any]]) -> None:
    """Ends the program unless a load returns the same names and bytes as these tensors on the host."""
    import torch

    loaded = load()
    for name in tensors.keys() | loaded.keys():
        pair = [side[name].cpu().reshape(-1).view(torch.uint8) for side in (tensors, loaded) if name in side]
        if len(pair) < 2 or not torch.equal(*pair):
            sys.exit(f"{uri}: tensor {name!r} did not come back bit for bit")


def send_file(listener: socket.socket, path: Path) -> None:
    """Sends a file to one connection repeatedly, until the receiver closes it."""
    try:
        connection = listener.accept()[0]
        with connection, path.open("rb") as file:
            while True:
                connection.sendfile(file, 0)
    except OSError:
        return


def receive_file(port: int, view: memoryview, device: str) -> None:
    """Reads bytes of one connection into fresh memory, or alternately through two pinned slots to the device."""
    import torch

    with socket.create_connection(("127.0.0.1", port)) as connection:
        if device == "cpu":
            while view:
                view = view[connection.recv_into(view, min(len(view), 4 << 20)) :]
            return
        target = torch.empty(SLOT, dtype=torch.uint8, device=device)
        slots = [torch.empty(SLOT, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        streams = [torch.cuda.Stream(device) for _ in slots]
        for number in range(len(view) // SLOT):
            slot, stream = slots[number % 2], streams[number % 2]
            stream.synchronize()
            connection.recv_into(slot.numpy(), SLOT, socket.MSG_WAITALL)
            with torch.cuda.stream(stream):
                target.copy_(slot, non_blocking=True)
        torch.cuda.synchronize(device)


def receive_all(path: Path, connections: int, device: str) -> None:
    """Sends a file's bytes over the loopback once, in equal shares over several connections."""
    size = path.stat().st_size
    share = -(-size // connections)
    with socket.create_server(("127.0.0.1", 0), backlog=connections) as listener, mmap.mmap(-1, size) as memory:
        port = listener.getsockname()[1]
        feeders = [threading.Thread(target=send_file, args=(listener, path)) for _ in range(connections)]
        with memoryview(memory) as whole:
            views = [whole[at : at + share] for at in range(0, size, share)]
            receivers = [threading.Thread(target=receive_file, args=(port, view, device)) for view in views]
            for thread in feeders + receivers:
                thread.start()
            for thread in receivers:
                thread.join()
            for view in views:
                view.release()
        listener.shutdown(socket.SHUT_RDWR)  # wakes threads that wait for a connection
        for thread in feeders:
            thread.join()


def load_one(uri: str, name: str) -> None:
    """Opens a model and loads one tensor."""
    with ow.safe_open(uri, framework="pt") as file:
        file.get_tensor(name)


def measure_links(args: argparse.Namespace, folder: Path, tensors: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measures one row at a time."""
    size = sum(tensor.nbytes for tensor in tensors.values())

    def load_row(
        kind: str, url: str, link: str, floor: float, floor_name: str, load: Callable[..., Any] = load_whole,
    ) -> dict[str, Any]:  # fmt: skip
        uri = url + FILES[kind]
        load_uri = partial(load, uri, args.device)
        compare(tensors, uri, load_uri)
        value = size / median_of(args.repeat, load_uri) / 1e9
        return {"name": f"{kind}, {link}", "value": value, "unit": "GB/s", "floor": floor, "floor_name": floor_name}

    for rate, each in LINKS if args.device == "cpu" else ():
        options = ["--rate", rate + "GB"] + (["--each", each + "GB"] if each else [])
        link = f"link of {rate} GB/s" + (f", {each} a connection" if each else "")
        with overwire_serve(folder, *options) as url:
            for kind in FILES:
                yield load_row(kind, url, link, float(rate), "the link")
    plain = folder / FILES["plain"]
    floor = 0.0
    for connections in (1, 2, 4, 8) if args.device == "cpu" else (8, 16, 32):
        seconds = median_of(args.repeat, lambda n=connections: receive_all(plain, n, args.device))
        floor = max(floor, plain.stat().st_size / seconds / 1e9)
    ratio = (folder / FILES["compressed"]).stat().st_size / plain.stat().st_size
    with overwire_serve(folder) as url:
        yield load_row("plain", url, "bare loopback", floor, "raw TCP")
        yield load_row("compressed", url, "bare loopback", floor / ratio, f"raw TCP / {ratio:.3f}")
    with stores.s3() if stores.found("versitygw") else nullcontext(({}, folder)) as (options, bucket):
        for kind in FILES if options else ():
            shutil.copyfile(folder / FILES[kind], bucket / FILES[kind])
            os.setxattr(bucket / FILES[kind], "user.etag", kind.encode())  # versitygw sends it as the ETag
            limit, name = (floor, "raw TCP") if kind == "plain" else (floor / ratio, f"raw TCP / {ratio:.3f}")
            yield load_row(kind, "s3://models/", "S3", limit, name, partial(load_whole, storage_options=options))
        if options and importlib.util.find_spec("runai_model_streamer_s3"):
            os.environ |= {
                "AWS_ENDPOINT_URL": str(options["endpoint_url"]), "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": str(options["key"]), "AWS_SECRET_ACCESS_KEY": str(options["secret"]),
                "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
            }
            yield load_row("plain", "s3://models/", "S3, Run:ai model streamer", floor, "raw TCP", stream_whole)
    if args.device == "cpu":
        with overwire_serve(folder, "--latency", "20") as url:
            smallest = min(tensors, key=lambda name: tensors[name].nbytes)
            seconds = median_of(args.repeat, lambda: load_one(url + FILES["compressed"], smallest))
        yield {"name": "open and one small tensor, 20 ms an answer", "value": seconds * 1e3, "unit": "ms",
               "floor": 40.0, "floor_name": "two answers"}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu", help="device of the loads (default cpu)")
    parser.add_argument("--size", default="1GB", help="tensor bytes (default 1GB)")
    parser.add_argument("--repeat", type=int, default=5, help="loads of each figure (default 5)")
    parser.add_argument("--dir", help="folder for temporary files")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overwire-net-", dir=args.dir) as name:
        folder = Path(name)
        plain, packed = (str(folder / FILES[kind]) for kind in ("plain", "compressed"))
        subprocess.run(overwire("bench", "gen", "llama-bf16", "--size", args.size, plain), check=True, stdout=2)
        subprocess.run(overwire("compress", plain, "-o", packed), check=True, stdout=2)
        tensors = {name: tensor.clone() for name, tensor in ow.load_file(plain).items()}
        rows = []
        for row in measure_links(args, folder, tensors):
            rows.append(row)
            share = f"{row['value'] / row['floor']:.2f} x {row['floor_name']} ({row['floor']:.3g})"
            print(f"{row['name']:46} {row['value']:8.3g} {row['unit']:4} {share}", file=sys.stderr, flush=True)
    if args.json:
        print(json.dumps({"rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

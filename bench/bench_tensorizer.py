"""Compares `overwire.compat.tensorizer` with tensorizer itself, in fresh processes that alternate.

    python bench/bench_tensorizer.py [--size 500MB] [--repeat 2] [--dir /dev/shm]
    python bench/bench_tensorizer.py --device cuda [--kind moe-bf16] ...

Both sides are called in the same way, write files of generated weights, and read each other's files. Every byte is
compared before anything is timed. A process loads twice. On the CPU every byte is read after a load, and writes are
also measured. If PATH has versitygw (`make build/bin/versitygw`), so are loads from S3. Needs torch and tensorizer, and
libsodium for encrypted files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

KEY = bytes.fromhex("5a" * 32)  # its hex digits are the password, and the server's key and secret
SIDES = ("ours", "theirs")
URI = "s3://models/theirs.tensors"


def module_of(side: str) -> Any:
    return import_module("overwire.compat.tensorizer" if side == "ours" else "tensorizer")


def write(module: Any, tensors: dict[str, Any], path: str, how: str) -> float:
    """Writes tensors to a new file, and returns the seconds."""
    Path(path).unlink(missing_ok=True)
    params = module.EncryptionParams(key=KEY) if how == "key" else None
    if how == "password":
        params = module.EncryptionParams.from_string(KEY.hex())
    start = time.perf_counter()
    serializer = module.TensorSerializer(path, encryption=params)
    serializer.write_state_dict(tensors)
    serializer.close()
    return time.perf_counter() - start


def open_file(module: Any, path: Any, how: str, device: str) -> Any:
    """Opens a file as a user would."""
    params = module.DecryptionParams.from_key(KEY) if how == "key" else None
    if how == "password":
        params = module.DecryptionParams.from_string(KEY.hex())
    verify = "crc32" if how == "crc32" else how == "hash"
    return module.TensorDeserializer(path, device=device, verify_hash=verify, encryption=params)


def compare(tensors: dict[str, Any], loaded: dict[str, Any], what: str) -> None:
    """Ends the program unless the tensors have the same names and bytes."""
    import torch

    for name in tensors.keys() | loaded.keys():
        pair = [side[name].detach().cpu().reshape(-1).view(torch.uint8) for side in (tensors, loaded) if name in side]
        if len(pair) < 2 or not torch.equal(*pair):
            sys.exit(f"{what}: tensor {name!r} did not come back bit for bit")


def write_all(plain: str, folder: Path, device: str) -> None:
    """Writes the files of both sides, and compares what each side reads from the other's files."""
    import overwire as ow

    tensors = ow.load_file(plain, framework="pt")
    for side in SIDES:
        write(module_of(side), tensors, str(folder / side), "")
    for name, how in (("sealed", "key"), ("words", "password")):
        write(module_of("ours"), tensors, str(folder / name), how)
    pairs = [("ours", "theirs", "hash"), ("ours", "theirs", "crc32"), ("theirs", "ours", "plain")]
    pairs += [(side, name, how) for side in SIDES for name, how in (("sealed", "key"), ("words", "password"))]
    for side, name, how in pairs:
        loaded = dict(open_file(module_of(side), str(folder / name), how, device).items())
        compare(tensors, loaded, f"{side}, {name}")


def read_every_byte(tensors: dict[str, Any]) -> None:
    import numpy
    import torch

    for tensor in tensors.values():
        data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        numpy.bitwise_xor.reduce(data[: data.size // 8 * 8].view(numpy.uint64), initial=0)


def measure_one(what: str, side: str, path: str, how: str, device: str, other: str) -> list[float]:
    """Returns the seconds of the first and the second load, or save, in this process."""
    import overwire as ow
    import torch

    module = module_of(side)
    tensors = ow.load_file(other, framework="pt", mmap=False) if what == "write" else {}
    if device != "cpu":
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
    seconds = []
    for _ in range(2):
        if what == "write":
            seconds.append(write(module, tensors, path, how))
            continue
        start = time.perf_counter()
        source: Any = path
        if what == "s3":
            source = module.stream_io.open_stream(URI, "rb", KEY.hex(), KEY.hex(), other, force_http=True)
        loaded = dict(open_file(module, source, how, device).items())
        if device == "cpu":
            read_every_byte(loaded)
        else:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
        del loaded
    return seconds


@contextmanager
def serve_s3(folder: Path) -> Iterator[str]:
    """Yields the address of a server with a bucket "models", or "" if PATH has no server."""
    program = shutil.which("versitygw")
    if program is None:
        yield ""
        return
    for name in ("iam", "data/models"):
        (folder / name).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [program, "--port", f"127.0.0.1:{port}", "--keep-alive", "--quiet", "--iam-dir", str(folder / "iam")]
    environ = {**os.environ, "ROOT_ACCESS_KEY": KEY.hex(), "ROOT_SECRET_KEY": KEY.hex()}
    with subprocess.Popen([*command, "posix", str(folder / "data")], env=environ) as server:
        try:
            for _ in range(300):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def run_rows(args: argparse.Namespace, folder: Path, nbytes: int) -> None:
    """Times both sides of each row, alternating, and prints medians."""
    plain, theirs = str(folder / "plain"), str(folder / "theirs")
    rows = [("read", theirs, "plain"), ("read", theirs, "hash"), ("read", str(folder / "sealed"), "key")]
    rows += [("read", theirs, "crc32")] if args.device != "cpu" else [("read", str(folder / "words"), "password")]
    if args.device == "cpu":
        rows += [("write", str(folder / "written"), how) for how in ("plain", "key")]
    with serve_s3(folder / "server") as address:
        if address:
            module_of("ours").stream_io.s3_upload(theirs, URI, KEY.hex(), KEY.hex(), address)
            rows += [("s3", theirs, "plain")]
        for what, path, how in rows:
            runs: dict[str, list[list[float]]] = {side: [] for side in SIDES if (side, how) != ("theirs", "crc32")}
            for _ in range(args.repeat):
                for side in runs:
                    words = [what, side, path, how, args.device, address if what == "s3" else plain]
                    command = [sys.executable, __file__, "--one", *words]
                    result = subprocess.run(command, capture_output=True, text=True, check=False)
                    if result.returncode:
                        sys.exit(f"{what} {how} by {side}: {result.stderr.strip()[-800:]}")
                    runs[side].append(json.loads(result.stdout.splitlines()[-1]))
            text = ""
            for side, pairs in runs.items():
                first, second = (nbytes / statistics.median(column) / 1e9 for column in zip(*pairs, strict=True))
                text += f"   {side} {first:6.2f} / {second:.2f} GB/s"
            print(f"{what:<6}{how:<9}{text}", flush=True)


def main(words: list[str]) -> None:
    if words[:1] == ["--one"]:
        print(json.dumps(measure_one(*words[1:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="500MB", help="bytes of the tensors")
    parser.add_argument("--repeat", type=int, default=2, help="processes of each side of a row")
    parser.add_argument("--dir", help="folder for temporary files; a folder in memory avoids waits for the disk")
    parser.add_argument("--device", default="cpu", help="where tensors are loaded to")
    parser.add_argument("--kind", default="llama-bf16", help="kind of weights, as for overwire bench gen")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        folder = Path(name)
        make = [sys.executable, "-m", "overwire", "bench", "gen", args.kind, "--size", args.size, str(folder / "plain")]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        nbytes = (folder / "plain").stat().st_size  # files with their headers
        write_all(str(folder / "plain"), folder, args.device)
        print(f"{nbytes / 1e9:.2f} GB of {args.kind} to {args.device}, first / second of a process, all bytes compared")
        run_rows(args, folder, nbytes)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Compares nvCOMP with overwire on a machine with a GPU: each decodes what the other encodes, at sizes close to the
size of a chunk.

    python bench/gpu/device_nvcomp.py [--wheels FOLDER] [--only LZ4,Zstd] [--json]

Each side reads the other's raw streams of standard algorithms. overwire.compat.nvcomp reads nvCOMP's native and sized
streams, its checksums and its Cascaded through nvCOMP, and also ANS and Bitcomp.

nvCOMP belongs to NVIDIA and may not be redistributed. It is used if its wheels (nvidia-nvcomp-cu13 and
nvidia-libnvcomp-cu13, or -cu12, of one version) are installed or can be unpacked from FOLDER. It decodes and encodes on
the GPU, overwire on the CPU.

The result of a case is "ok", "-" if nvCOMP cannot decode its own stream or refuses to encode, or a description of the
error. Each algorithm runs in a separate process. A case that ends the process, breaks the device's context, or hangs
for 20 seconds counts as failed, and the other cases continue. The exit status is 1 if a case failed, and 0 with a
message if nvCOMP or a GPU is missing. It takes about a minute.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

OPEN = ("LZ4", "Snappy", "Zstd", "Deflate", "Gzip", "GDeflate")
ALGORITHMS = (*OPEN, "Cascaded")
DELEGATED = ("ANS", "Bitcomp")
SIZES = (0, 1, 7, 65535, 65536, 65537, 10_000_000)
KINDS = {"native": "NVCOMP_NATIVE", "raw": "RAW", "with_size": "WITH_UNCOMPRESSED_SIZE"}
LIMIT = 20.0  # seconds per case
BROKEN = 3  # exit status if the device no longer answers


def content(size: int) -> bytes:
    """Returns random words mixed with runs and noise."""
    r = random.Random(7)
    words = [r.randbytes(r.randrange(3, 40)) for _ in range(300)] + [bytes(200)]
    out = bytearray()
    while len(out) < min(size, 300_000):
        out += r.choice(words)
    while len(out) < size:
        out += out[: size - len(out)]
    return bytes(out[:size])


class Theirs:
    """Wraps nvCOMP with functions from bytes to bytes."""

    def __init__(self, module: str):
        self.nvcomp = import_module(module)

    def codec(self, algorithm: str, kind: str, **options: Any) -> Any:
        kinds = self.nvcomp.BitstreamKind
        return self.nvcomp.Codec(algorithm=algorithm, bitstream_kind=getattr(kinds, KINDS[kind]), **options)

    def array(self, data: bytes) -> Any:
        array = self.nvcomp.as_array(data)
        return array.cuda() or array

    def encode(self, algorithm: str, kind: str, plain: bytes, **options: Any) -> bytes:
        return bytes(self.codec(algorithm, kind, **options).encode(self.array(plain)).cpu())

    def decode(self, algorithm: str, kind: str, stored: bytes, **options: Any) -> bytes:
        return bytes(self.codec(algorithm, kind, **options).decode(self.array(stored)).cpu())


Case = tuple[str, Callable[[], str]]


def said(why: str) -> None:
    """Prints the result that counts if the running case ends the process. "" cancels it."""
    print(json.dumps([None, why]), flush=True)


def same(got: Any, want: bytes) -> str:
    return "ok" if bytes(got) == want else f"{len(got)} bytes that differ"


def cases(theirs: Theirs, algorithm: str, sizes: list[int]) -> Iterator[Case]:
    """Yields the cases of one algorithm as a name and a function that returns the result."""
    from overwire import codecs

    ours = Theirs("overwire.compat.nvcomp")
    if algorithm in DELEGATED:
        for kind in ("native", "raw"):
            plain = content(65536)
            stored = ours.encode(algorithm, kind, plain)
            yield f"{kind} by the compat module", lambda k=kind, p=plain, s=stored: same(ours.decode(algorithm, k, s), p)  # type: ignore[misc]
            yield f"{kind} by nvCOMP", lambda k=kind, p=plain, s=stored: same(theirs.decode(algorithm, k, s), p)  # type: ignore[misc]
        return

    def cannot(kind: str, plain: bytes, options: dict[str, Any]) -> str:
        """Returns an error of nvCOMP on its own streams, or ""."""
        said("- its own encoder ended the process")
        try:
            stored = theirs.encode(algorithm, kind, plain, **options)
            if bytes(theirs.decode(algorithm, kind, stored, **options)) != plain:
                return "- also wrong on its own streams"
        except Exception as error:
            return f"- {error}"
        said("")
        return ""

    def to_us(kind: str, plain: bytes, **options: Any) -> str:
        said("- its own encoder ended the process")
        try:
            stored = theirs.encode(algorithm, kind, plain, **options)
        except Exception as error:
            return f"- {error}"
        said("")
        try:
            # nvCOMP's caller must give the element type of Cascaded.
            given = {name: value for name, value in options.items() if name == "data_type"}
            got = same(ours.decode(algorithm, kind, stored, **given), plain)
            if got == "ok" and kind == "raw" and algorithm in OPEN:  # also on the CPU, without nvCOMP
                got = same(codecs.decode(stored, algorithm, bitstream=kind), plain)
        except Exception as error:
            got = f"ours: {error}"
        return got if got == "ok" else cannot(kind, plain, options) or got

    def to_them(plain: bytes, level: int = 1) -> str:
        stored = bytes(codecs.encode(plain, algorithm, bitstream="raw", level=level))
        try:
            got = same(theirs.decode(algorithm, "raw", stored), plain)
        except Exception as error:
            got = f"theirs: {error}"
        return got if got == "ok" else cannot("raw", plain, {}) or got

    for size in sizes:
        plain = content(size)
        for kind in KINDS:
            yield f"{kind} {size} to us", lambda k=kind, p=plain: to_us(k, p)  # type: ignore[misc]
        if algorithm in OPEN:
            yield f"raw {size} to them", lambda p=plain: to_them(p)  # type: ignore[misc]
    plain = content(65536)
    if algorithm in ("Deflate", "Gzip", "GDeflate"):
        for level in range(6):
            yield f"raw level {level} to us", lambda n=level: to_us("raw", plain, algorithm_type=n)  # type: ignore[misc]
            yield f"raw level {level} to them", lambda n=level: to_them(plain, n)  # type: ignore[misc]
    if algorithm == "Cascaded":
        ramp = b"".join((i // 5 * 3).to_bytes(8, "little") for i in range(3000))
        for text in ("|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8"):
            for kind in ("raw", "native"):
                yield f"{kind} {text} to us", lambda k=kind, y=text: to_us(k, ramp, data_type=y)  # type: ignore[misc]
    for size in (4, 200, 65540, 3_000_000):  # whole elements, because Cascaded drops the rest
        yield f"checksums of {size}", lambda n=size: checksums(theirs, ours, algorithm, n)  # type: ignore[misc]


def checksums(theirs: Theirs, ours: Theirs, algorithm: str, size: int) -> str:
    """Returns the result for streams with nvCOMP's checksums, with and without a changed byte."""
    plain = content(size)
    made = theirs.encode(algorithm, "native", plain, checksum_policy=theirs.nvcomp.ChecksumPolicy.COMPUTE_AND_NO_VERIFY)
    verify = {"checksum_policy": ours.nvcomp.ChecksumPolicy.COMPUTE_AND_VERIFY}
    got = same(ours.decode(algorithm, "native", made, **verify), plain)
    if got != "ok":
        return got
    if size < 1_000_000:
        return got
    damaged, middle = bytearray(made), len(made) // 2
    for at in range(middle, middle + 16):  # more than the gap between chunks
        damaged[at] ^= 1
    try:
        ours.decode(algorithm, "native", bytes(damaged), **verify)
    except Exception:
        return "ok"
    return "a changed byte was not detected"


def child(args: argparse.Namespace) -> int:
    """Runs one algorithm and prints a line before and after each case."""
    theirs = Theirs(args.module)
    for name, work in cases(theirs, args.child, args.sizes):
        if name in args.skip:
            continue
        print(json.dumps([name]), flush=True)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        try:
            result = work()
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        print(json.dumps([name, result]), flush=True)
        if result != "ok":
            try:
                theirs.array(b"still there?")
            except Exception:
                return BROKEN
    faulthandler.cancel_dump_traceback_later()
    return 0


def run(algorithm: str, args: argparse.Namespace) -> dict[str, str]:
    """Returns the results of one algorithm, restarting its process after a case that ended it."""
    results: dict[str, str] = {}
    while True:
        command = [sys.executable, __file__, "--child", algorithm, "--module", args.module, "--sizes", ",".join(map(str, args.sizes))]
        command += ["--path", args.path] if args.path else []
        command += [word for name in results for word in ("--skip", name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        why = f"the process ended with {done.returncode}: {done.stderr[-300:]}"
        before, current, last = len(results), "", ""
        for line in done.stdout.splitlines():
            if line.startswith("["):
                name, *result = json.loads(line)
                if name is None:
                    last = result[0]
                    continue
                current, last = name, ""
                if result:
                    results[current] = result[0]
        if done.returncode == 0:
            return results
        if current and current not in results:
            results[current] = last or why
        elif done.returncode != BROKEN or len(results) == before:  # outside a case
            results["the process"] = why
            return results


def unpack(wheels: str, folder: str) -> None:
    for wheel in Path(wheels).glob("nvidia_*nvcomp*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--wheels", help="folder with nvCOMP's wheels, if they are not installed")
    parser.add_argument("--only", default=",".join(ALGORITHMS + DELEGATED), help="algorithms, separated by commas")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="sizes in bytes, separated by commas")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--module", default="nvidia.nvcomp", help="a module with nvCOMP's API to test")
    for hidden in ("--child", "--path"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--skip", action="append", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.sizes = [int(n) for n in args.sizes.split(",")]
    if args.path:
        sys.path.insert(0, args.path)
    if args.child:
        return child(args)
    with tempfile.TemporaryDirectory() as folder:
        if args.wheels:
            unpack(args.wheels, folder)
            args.path = folder
        look = f"import sys; sys.path.insert(0, {folder!r}); import {args.module} as n; n.as_array(b'a'); print(n.__version__)"
        found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
        if found.returncode:
            why = found.stderr.strip().split("\n")[-1]
            print(json.dumps({"missing": why}) if args.json else f"nvCOMP does not work here: {why}")
            return 0
        version = found.stdout.strip()
        results = {name: run(name, args) for name in args.only.split(",")}
    wrong = sum(not r.startswith(("ok", "-")) for rows in results.values() for r in rows.values())
    if args.json:
        print(json.dumps({"version": version, "results": results, "wrong": wrong}))
        return int(wrong > 0)
    for name, rows in results.items():
        count = {mark: sum(r.startswith(mark) for r in rows.values()) for mark in ("ok", "-")}
        print(f"{name:9} {count['ok']:3} ok {count['-']:3} not supported by nvCOMP {len(rows) - sum(count.values()):3} wrong")
        for case, result in rows.items():
            if result != "ok":
                print(f"    {case}: {result}")
    print(f"nvCOMP {version}: {wrong} of {sum(map(len, results.values()))} cases are wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

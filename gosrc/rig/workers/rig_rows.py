"""The rows of the rig that need Python, one measurement a process.

    python rig_rows.py verify FILE SUMS.json
    python rig_rows.py load FILE
    python rig_rows.py consume FILE
    python rig_rows.py peer FILE
    python rig_rows.py cold FILE HOW     (consume a file that is not in the page cache)
    python rig_rows.py coldpeer FILE
    python rig_rows.py json FILE         (the header of a plain file, by json alone)
    python rig_rows.py tensors ...       (see rig_tensors.py)

Each prints one line of JSON: {"seconds": s, "note": what was measured} or
{"missing": why not}. Imports and the start of the engine are not timed.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import zlib
from typing import Any


def framework() -> Any:
    """The framework that both sides load into: torch if there, else numpy."""
    try:
        import torch  # noqa: F401
    except ImportError:
        import numpy  # noqa: F401

        return "np"
    return "pt"


def raw(tensor: Any) -> Any:
    """The bytes of a tensor as a flat numpy array of uint8, without a copy."""
    if hasattr(tensor, "detach"):
        import torch

        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    import numpy

    return numpy.ascontiguousarray(tensor).reshape(-1).view(numpy.uint8)


def consume(tensors: dict[str, Any]) -> int:
    """Reads every byte, near the speed of memory."""
    import numpy

    total = 0
    for tensor in tensors.values():
        data = raw(tensor) if tensor.shape else raw(tensor.reshape(1))
        whole = data.size // 8 * 8
        total ^= int(numpy.bitwise_xor.reduce(data[:whole].view(numpy.uint64), initial=0))
        total ^= int(data[whole:].sum())
    return total


def warm(fw: Any) -> None:
    """Starts the engine and loads the framework's parts, on a tiny file."""
    import os
    import tempfile

    import overwire

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "tiny.safetensors")
        if fw == "pt":
            import torch

            overwire.save_file({"x": torch.zeros(4)}, path)
        else:
            import numpy

            overwire.save_file({"x": numpy.zeros(4, dtype="float32")}, path)
        overwire.load_file(path, framework=fw)


def evict(path: str) -> None:
    """Drops a file from the page cache."""
    import os

    fd = os.open(path, os.O_RDONLY)
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def verify(path: str, sums: str) -> dict[str, Any]:
    import overwire

    with open(sums, encoding="utf-8") as f:
        want = json.load(f)
    tensors = overwire.load_file(path, framework=framework())
    if tensors.keys() != want.keys():
        raise SystemExit(f"{path}: other tensors came back than were saved")
    for name, tensor in tensors.items():
        data = raw(tensor if tensor.shape else tensor.reshape(1))
        if zlib.crc32(data) != want[name]:
            raise SystemExit(f"{path}: tensor {name!r} did not come back bit for bit")
    return {"seconds": 0, "note": f"{len(tensors)} tensors"}


def timed(load: Any, use: Any) -> float:
    start = time.perf_counter()
    tensors = load()
    use(tensors)
    return time.perf_counter() - start


def main(argv: list[str]) -> dict[str, Any]:
    if argv[0] == "tensors":
        from rig_tensors import measure

        return measure(argv[1:])
    what, path = argv[0], argv[1]
    if what == "json":
        with open(path, "rb") as f:
            text = f.read(int.from_bytes(f.read(8), "little"))
        return {"seconds": sorted(timed(lambda: json.loads(text), len) for _ in range(3))[1], "note": "json"}
    try:
        fw = framework()
        import numpy  # noqa: F401
    except ImportError:
        return {"missing": "numpy is not installed"}
    name = "torch" if fw == "pt" else "numpy"
    if fw == "np":
        try:
            import ml_dtypes  # noqa: F401
        except ImportError:
            return {"missing": "neither torch nor ml_dtypes is installed"}
    if what == "coldpeer":
        evict(path)
    if what.endswith("peer"):
        try:
            import safetensors

            theirs = importlib.import_module(f"safetensors.{name}").load_file
        except ImportError:
            return {"missing": "safetensors is not installed"}
        note = f"safetensors {safetensors.__version__}, {name}"
        return {"seconds": timed(lambda: theirs(path), consume), "note": note}
    import overwire

    if what == "verify":
        return verify(path, argv[2])
    warm(fw)
    if what == "cold":
        evict(path)
        how: Any = argv[2]
        return {"seconds": timed(lambda: overwire.load_file(path, framework=fw, read=how), consume), "note": name}
    use = consume if what == "consume" else len
    return {"seconds": timed(lambda: overwire.load_file(path, framework=fw), use), "note": name}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))

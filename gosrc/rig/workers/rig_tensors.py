"""tensorizer's files in the rows of the rig, beside tensorizer itself.

    python rig_rows.py tensors check SAFETENSORS OURS THEIRS SEALED WORDS KEY
    python rig_rows.py tensors read ours|theirs FILE plain|hash|key|password KEY
    python rig_rows.py tensors write ours|theirs SAFETENSORS OUT plain|key KEY
    python rig_rows.py tensors upload FILE URI ENDPOINT KEY
    python rig_rows.py tensors s3 ours|theirs URI ENDPOINT KEY
    python rig_rows.py tensors sodium

Both sides are called in the same way. KEY: 64 hex digits; for the file WORDS
"password" as a text; for S3 the server's key and secret. Files stay in the page cache,
so that no measurement waits for the disk.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import time
from importlib import import_module
from typing import Any


def side(name: str) -> Any:
    """The module of one side; ImportError where it is not there."""
    return import_module("overwire.compat.tensorizer" if name == "ours" else "tensorizer")


def written(module: Any, tensors: dict[str, Any], path: str, key: bytes | None, password: bool = False) -> float:
    """Seconds of writing tensors to a new file."""
    if os.path.exists(path):
        os.remove(path)
    params = (
        None
        if key is None
        else module.EncryptionParams.from_string(key.hex())
        if password
        else module.EncryptionParams(key=key)
    )
    start = time.perf_counter()
    serializer = module.TensorSerializer(path, encryption=params)
    serializer.write_state_dict(tensors)
    serializer.close()
    return time.perf_counter() - start


def opened(module: Any, path: Any, how: str, key: bytes, device: str = "cpu") -> Any:
    """A file loaded as a user would."""
    params = None
    if how in ("key", "password"):
        params = (
            module.DecryptionParams.from_key(key) if how == "key" else module.DecryptionParams.from_string(key.hex())
        )
    verify = "crc32" if how == "crc32" else how == "hash"
    return module.TensorDeserializer(path, device=device, verify_hash=verify, encryption=params)


def of_s3(module: Any, uri: str, endpoint: str, key: bytes) -> Any:
    """A stream of an object in S3."""
    return module.stream_io.open_stream(uri, "rb", key.hex(), key.hex(), endpoint, force_http=True)


def check(plain: str, ours: str, theirs: str, sealed: str, words: str, key: bytes) -> dict[str, Any]:
    """Writes the files, and compares every byte of what either reads of the other's."""
    import overwire
    import torch

    tensors = overwire.load_file(plain, framework="pt")
    written(side("ours"), tensors, ours, None)
    written(side("theirs"), tensors, theirs, None)
    written(side("ours"), tensors, sealed, key)
    written(side("ours"), tensors, words, key, password=True)
    pairs = [("ours", theirs, "hash"), ("theirs", ours, "plain")]
    pairs += [(who, path, how) for who in ("ours", "theirs") for path, how in ((sealed, "key"), (words, "password"))]
    for reader, path, how in pairs:
        found = opened(side(reader), path, how, key)
        if found.keys() != tensors.keys():
            raise SystemExit(f"{path}: other tensors came back than were saved")
        for name, tensor in tensors.items():
            a, b = (t.detach().reshape(-1).view(torch.uint8) for t in (tensor, found[name]))
            if not torch.equal(a, b):
                raise SystemExit(f"{path}: tensor {name!r} did not come back bit for bit")
        del found
    return {"seconds": 0}


def sodium() -> dict[str, Any]:
    """Seconds of opening 64 boxes of 2 MiB in place, by libsodium on one core."""
    name = ctypes.util.find_library("sodium")
    if not name:
        return {"missing": "libsodium is not installed"}
    library = ctypes.CDLL(name)
    library.sodium_init()
    box, mac, nonce, key = (ctypes.create_string_buffer(n) for n in (2 << 20, 16, 24, 32))
    size = ctypes.c_ulonglong(2 << 20)
    best = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(64):
            library.crypto_secretbox_detached(box, mac, box, size, nonce, key)
        best.append(time.perf_counter() - start)
    library.sodium_version_string.restype = ctypes.c_char_p
    return {"seconds": sorted(best)[2], "note": f"libsodium {library.sodium_version_string().decode()}"}


def measure(argv: list[str]) -> dict[str, Any]:
    """What `rig_rows.main` returns."""
    if argv[0] == "sodium":
        return sodium()
    try:
        import torch  # noqa: F401

        theirs = side("theirs")
    except ImportError as error:
        return {"missing": f"needs torch and tensorizer: {error}"}
    key = bytes.fromhex(argv[-1])
    if argv[0] == "check":
        return check(argv[1], argv[2], argv[3], argv[4], argv[5], key)
    if argv[0] == "upload":
        side("ours").stream_io.s3_upload(argv[1], argv[2], key.hex(), key.hex(), argv[3])
        return {"seconds": 0}
    module = side(argv[1])
    note = f"tensorizer {theirs.__version__}" if argv[1] == "theirs" else "overwire"
    from rig_rows import consume, warm

    warm("pt")
    if argv[0] == "write":
        import overwire

        tensors = overwire.load_file(argv[2], framework="pt", mmap=False)
        return {"seconds": written(module, tensors, argv[3], key if argv[4] == "key" else None), "note": note}
    start = time.perf_counter()
    found = (
        opened(module, of_s3(module, argv[2], argv[3], key), "plain", key)
        if argv[0] == "s3"
        else opened(module, argv[2], argv[3], key)
    )
    consume({name: tensor.detach() for name, tensor in found.items()})
    return {"seconds": time.perf_counter() - start, "note": note}

"""Makes the golden files of one version of tensorizer: python make.py FOLDER, with that version installed.

Encrypted files get new nonces in each run, so keep the existing ones. Files are compressed with gzip, because their
index of 256 KiB is mostly empty.
"""

import gzip
import sys
import tempfile
from pathlib import Path

import tensorizer
import torch
from tensorizer.serialization import TensorType

A = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.float32)
TEXT = {"opslimit": 1, "memlimit": 8192, "salt": bytes(16)}


def big(n: int) -> torch.Tensor:
    """Returns reproducible numbers that gzip compresses well."""
    return torch.arange(n, dtype=torch.int32)


def wide(s: tensorizer.TensorSerializer) -> None:
    s.write_tensor(0, "x.a", TensorType.PARAM, A)
    s.write_tensor(0, "x.l", TensorType.PARAM, torch.empty(2**32 + 5, dtype=torch.int8, device="meta"))


def secret(s: tensorizer.TensorSerializer) -> None:
    s.write_tensor(7, "x.a", TensorType.PARAM, A)
    s.write_tensor(8, "x.big", TensorType.BUFFER, big(100))
    s.write_tensor(9, "x.m", TensorType.PARAM, torch.empty(4, 5, device="meta"))


def main(folder: Path) -> None:
    files = {
        "v5": (wide, None),
        "password": (secret, tensorizer.EncryptionParams.from_string("test", **TEXT)),
        "key": (secret, tensorizer.EncryptionParams(bytes(range(32)))),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, (fill, encryption) in files.items():
        with tempfile.TemporaryDirectory() as d:
            path = Path(d) / "x.tensors"
            s = tensorizer.TensorSerializer(path, encryption=encryption)
            fill(s)
            s.close()
            (folder / f"{name}.tensors.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

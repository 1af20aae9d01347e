"""Writes safetensors-<version>/ with the installed safetensors: small plain files from another writer, which every
release of overwire must read.

    python make_safetensors.py

A new version of safetensors gets its own folder. Old folders stay.
"""

import pathlib

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save_file

out = pathlib.Path(__file__).parent / f"safetensors-{safetensors.__version__}"
out.mkdir(exist_ok=True)

rng = np.random.default_rng(0)
dtypes = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    "complex64", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]
save_file(
    {f"läyer.{np.dtype(d).name}": rng.integers(0, 2, (3, 5)).astype(d) for d in dtypes},
    out / "dtypes.safetensors",
    {"format": "np", "quote": 'a "b" \\ \n'},
)
save_file(
    {"scalar": np.full((), 3, "float32"), "nothing": np.zeros((0, 7), "float16"), "deep": np.ones((1,) * 12, "int8")},
    out / "shapes.safetensors",
)
save_file({}, out / "empty.safetensors")

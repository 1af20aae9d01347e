"""Saves, loads, slices, streams and verifies. Run it in a writable folder.

Works with torch or numpy; this file uses numpy.
"""

from __future__ import annotations

import numpy as np
import overwire as ow

weights = {
    "embed": np.random.default_rng(0).normal(0, 0.02, (4096, 512)).astype("float32"),
    "bias": np.zeros(512, "float32"),
}

# Save compressed. The file is either complete or absent, also after a crash.
report = ow.save_file(weights, "model.safetensors", metadata={"made": "here"})
print(f"{report.bytes_in} -> {report.bytes_out} bytes, {report.ratio:.3f} of it")

# Load a dict of tensors that are yours. Plain safetensors files load the same way.
tensors = ow.load_file("model.safetensors", framework="np")

# Open without loading, and read only what is asked for.
with ow.safe_open("model.safetensors", framework="np") as f:
    first_rows = f.get_slice("embed")[:16]

# Get tensors as they arrive, each complete when it is yielded.
for name, tensor in ow.stream("model.safetensors", framework="np"):
    print(name, tensor.dtype, tensor.shape)

ow.verify("model.safetensors")  # every checksum, every decode, every hash

assert all(np.array_equal(tensors[n], weights[n]) for n in weights)
assert np.array_equal(first_rows, weights["embed"][:16])

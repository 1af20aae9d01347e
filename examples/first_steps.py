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

# Save compressed. The save is atomic, even if the program crashes.
report = ow.save_file(weights, "model.safetensors", metadata={"made": "here"})
print(f"{report.bytes_in} -> {report.bytes_out} bytes, ratio {report.ratio:.3f}")

# Load a dict of tensors, which you own. Plain safetensors files load the same way.
tensors = ow.load_file("model.safetensors", framework="np")

# Open a file, and only read a slice.
with ow.safe_open("model.safetensors", framework="np") as f:
    first_rows = f.get_slice("embed")[:16]

# Get each tensor as soon as it is complete.
for name, tensor in ow.stream("model.safetensors", framework="np"):
    print(name, tensor.dtype, tensor.shape)

ow.verify("model.safetensors")  # checks all checksums and hashes, and decodes all tensors

assert all(np.array_equal(tensors[n], weights[n]) for n in weights)
assert np.array_equal(first_rows, weights["embed"][:16])

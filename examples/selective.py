"""Loads part of a model: by names, for one rank of an expert-parallel group, or within a memory budget.

Works with torch or numpy; this file uses numpy.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import overwire as ow

rng = np.random.default_rng(0)
weights = {f"layers.0.experts.{i}.up_proj.weight": rng.normal(size=(256, 256)).astype("float32") for i in range(8)}
weights["layers.0.gate.weight"] = rng.normal(size=(8, 256)).astype("float32")
Path("model").mkdir(exist_ok=True)
ow.save_file(weights, "model/model.safetensors", max_shard_size="1MB")  # several shards and an index.json

# Plan the load. This only reads headers.
plan = ow.plan("model", framework="np")
print(f"{len(plan.tensors)} tensors, {plan.nbytes} bytes from {len(plan.files)} files")

# Only the shards with these names are opened.
gate = ow.load_file("model", keys=["layers.0.gate.weight"], framework="np")

# Rank 1 of 4 gets its two experts, and the tensors that all ranks need.
mine = ow.load_file("model", filter=ow.experts(1, 4), framework="np")
print(sorted(mine))

# A load above the memory budget is refused before anything is allocated.
try:
    ow.load_file("model", max_memory="1MB", framework="np")
except ow.OutOfMemoryError as error:
    print(error)

assert list(gate) == ["layers.0.gate.weight"]
assert len(mine) == 3

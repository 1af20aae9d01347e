#!/usr/bin/env bash
# Expected: DLPack exports torch.int4 and torch.uint4 with 4 bits per element, which its type can state, or torch
# refuses the export.
# Actual: torch.int1 to int7 and uint1 to uint7 are exported as 8-bit integers, without a warning.
# Versions: torch 2.15.0, numpy 2.4.6.
# Cause: torch stores each element of these dtypes in a byte, and its DLPack export states the number of stored bits.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 tensorizer==2.12.1 transformers==4.57.1
python -W ignore - <<'P'
import numpy, torch
seen = {}
for name in ("int1", "int4", "uint4", "uint7"):
    tensor = torch.tensor([1, 2], dtype=torch.uint8).view(getattr(torch, name))
    seen[name] = str(numpy.from_dlpack(tensor).dtype)
print(torch.__version__, seen)
assert seen == {"int1": "int8", "int4": "int8", "uint4": "uint8", "uint7": "uint8"}, seen
P

#!/usr/bin/env bash
# One would guess: DLPack, which has the bits of an element in its type, carries torch.int4 and torch.uint4 as 4 bits, or
# the export is refused.
# What happens: tensors of torch.int1 to int7 and uint1 to uint7 come out as 8-bit integers, without a word.
# Versions: torch 2.15.0, numpy 2.4.6. Cause: torch stores an element of these dtypes in a byte, and its DLPack export
# gives the bits of the storage.
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

#!/usr/bin/env bash
# Expected: a slice of safe_open(...).get_slice(name) has the same elements for the frameworks "np" and "pt".
# Actual: "pt" counts a negative start from the end, but "np" raises OverflowError. If the start is beyond the end, "pt"
# returns an empty tensor, but "np" raises SafetensorError. A single negative index works with both.
# Versions: safetensors 0.8.0, numpy 2.4.6, torch 2.15.0.
# Cause: "np" slices with safetensors' own unsigned ranges, and "pt" with torch's indexing.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 tensorizer==2.12.1 transformers==4.57.1
python -W ignore - <<'P'
import numpy, safetensors, safetensors.numpy
safetensors.numpy.save_file({"x": numpy.arange(10.0)}, "x.safetensors")
seen = {}
for framework in ("np", "pt"):
    with safetensors.safe_open("x.safetensors", framework) as file:
        part = file.get_slice("x")
        for text, index in (("[-3:]", slice(-3, None)), ("[20:]", slice(20, None)), ("[-1]", -1)):
            try:
                got = part[index]
                seen[framework, text] = [float(one) for one in got] if got.shape else float(got)
            except Exception as error:
                seen[framework, text] = type(error).__name__
print(safetensors.__version__, seen)
assert seen == {
    ("np", "[-3:]"): "OverflowError", ("pt", "[-3:]"): [7.0, 8.0, 9.0], ("np", "[20:]"): "SafetensorError",
    ("pt", "[20:]"): [], ("np", "[-1]"): 9.0, ("pt", "[-1]"): 9.0,
}, seen
P

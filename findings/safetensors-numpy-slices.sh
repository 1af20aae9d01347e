#!/usr/bin/env bash
# One would guess: a slice of safe_open(...).get_slice(name) gives the same elements for framework "np" and "pt".
# What happens: a negative start, which "pt" counts from the end, is an OverflowError for "np"; a start beyond the end is
# empty for "pt" and a SafetensorError for "np". A negative index alone works in both.
# Versions: safetensors 0.8.0, numpy 2.4.6, torch 2.15.0. Cause: "np" slices by safetensors' own unsigned ranges, "pt" by
# torch's indexing.
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

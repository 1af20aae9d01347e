#!/usr/bin/env bash
# Expected: safetensors.flax.load_file returns the integers that the file has, or raises an error.
# Actual: of a 64-bit integer only the lower 32 bits are returned: 2**33 + 5 becomes 5. There is no warning.
# Versions: safetensors 0.8.0, jax 0.10.2, numpy 2.4.6.
# Cause: safetensors passes the array to jax.numpy.array without its dtype. Without x64, which is off by default, jax
# then narrows 64-bit arrays and keeps quiet. It only warns if the dtype is named.
source "$(dirname "$0")/with.sh"
need flax==0.12.8 jax==0.10.2 numpy==2.4.6 safetensors==0.8.0
python -W error::UserWarning - <<'P'
import jax, numpy, safetensors, safetensors.flax, safetensors.numpy

safetensors.numpy.save_file({"seed": numpy.array([2**33 + 5])}, "x.safetensors")
stored = safetensors.numpy.load_file("x.safetensors")["seed"].tolist()
seen = []
for wide in (False, True):
    jax.config.update("jax_enable_x64", wide)
    array = safetensors.flax.load_file("x.safetensors")["seed"]
    print("safetensors", safetensors.__version__, "the file has", stored, "x64:", wide, array.dtype, array.tolist())
    seen.append(array.tolist())
assert seen == [[5], [2**33 + 5]] and stored == seen[1], seen
P

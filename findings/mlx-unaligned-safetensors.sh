#!/usr/bin/env bash
# One would guess: the data of a safetensors file begin at a multiple of 8, since safetensors' own writers pad the header
# with spaces, and float32 can be mapped.
# What happens: mlx pads nothing: the data begin at any byte, an odd one for every other length of the names.
# Versions: mlx 0.32.4 (CPU). Cause: the format does not ask for alignment, and mlx writes the JSON as it is.
source "$(dirname "$0")/with.sh"
need "mlx[cpu]==0.32.4" numpy==2.4.6
python -W ignore - <<'P'
import mlx.core as mx
starts = []
for letters in range(1, 9):
    mx.save_safetensors("m.safetensors", {"w" * letters: mx.zeros((3,))})
    starts.append(8 + int.from_bytes(open("m.safetensors", "rb").read(8), "little"))
print(mx.__version__, "the data begin at", starts)
assert sorted(start % 8 for start in starts) == list(range(8)), starts
P

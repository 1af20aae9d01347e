#!/usr/bin/env bash
# Expected: the data of a safetensors file begins at a multiple of 8, so that float32 can be mapped. The writers of the
# safetensors library pad the header with spaces for this.
# Actual: mlx does not pad the header, so the data can begin at any byte. It begins at an odd byte for every second
# length of the names.
# Versions: mlx 0.32.4 (CPU).
# Cause: the format does not require alignment, and mlx writes the JSON without padding.
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

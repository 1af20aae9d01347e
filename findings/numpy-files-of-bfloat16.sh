#!/usr/bin/env bash
# Expected: numpy.load returns the dtype of the array that numpy.save wrote, or one of the two refuses the dtype.
# Actual: ml_dtypes' bfloat16 is loaded as |V2 (bytes without a meaning), and float8_e4m3fn and int4 are both loaded as
# |V1. float8_e5m2 is saved as <f1, which numpy.load refuses. mlx writes |V2 deliberately, and reads it as bfloat16.
# Versions: numpy 2.4.6, ml_dtypes 0.6.0, mlx 0.32.4 (CPU).
# Cause: the .npy header can only have array-interface type strings, which numpy builds from the kind and size that a
# foreign dtype states.
source "$(dirname "$0")/with.sh"
need "mlx[cpu]==0.32.4" numpy==2.4.6 ml_dtypes==0.6.0
python -W ignore - <<'P'
import ml_dtypes, mlx.core as mx, numpy
seen = {}
for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"):
    numpy.save("x.npy", numpy.ones(2, getattr(ml_dtypes, name)))
    try:
        seen[name] = numpy.load("x.npy").dtype.str
    except ValueError as error:
        seen[name] = str(error)
mx.savez("m.npz", w=mx.ones((2,), mx.bfloat16))
seen["mlx"] = numpy.load("m.npz")["w"].dtype.str, str(mx.load("m.npz")["w"].dtype)
print(numpy.__version__, seen)
assert seen == {"bfloat16": "|V2", "float8_e4m3fn": "|V1", "int4": "|V1",
                "float8_e5m2": "descr is not a valid dtype descriptor: '<f1'",
                "mlx": ("|V2", "mlx.core.bfloat16")}, seen
P

#!/usr/bin/env bash
# Expected: flax.serialization.msgpack_restore(to_bytes(tree)) returns an equal tree, because msgpack has lists.
# Actual: lists and tuples become dicts with the keys "0", "1" and so on. The names of a layer's tensors, "layers.0",
# stay the same, but the structure is lost. msgpack_serialize of the same tree keeps the list and refuses the tuple.
# Versions: flax 0.12.8, jax 0.10.2.
# Cause: to_bytes first converts the tree with to_state_dict, which only has dicts.
source "$(dirname "$0")/with.sh"
need flax==0.12.8 jax==0.10.2 numpy==2.4.6
python -W ignore - <<'P'
import flax, numpy
from flax import serialization as s
seen = s.msgpack_restore(s.to_bytes({"layers": [1, 2], "pair": (3, 4)}))
print(flax.__version__, seen)
assert seen == {"layers": {"0": 1, "1": 2}, "pair": {"0": 3, "1": 4}}, seen
assert s.msgpack_restore(s.msgpack_serialize({"layers": [1, 2]})) == {"layers": [1, 2]}
try:
    s.msgpack_serialize({"pair": (3, 4)})
except TypeError as error:
    print("msgpack_serialize:", error)
else:
    raise SystemExit("it takes tuples now")
P

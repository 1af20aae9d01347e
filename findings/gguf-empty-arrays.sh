#!/usr/bin/env bash
# Expected: GGUFWriter.add_array(key, []) writes an array without elements, which the format allows.
# Actual: the key is omitted without a warning. A reader therefore cannot distinguish an empty list (a tokenizer without
# merges) from a missing one.
# Versions: gguf 0.19.0, numpy 2.4.6.
# Cause: add_array returns early, because it cannot guess the element type.
source "$(dirname "$0")/with.sh"
need gguf==0.19.0 numpy==2.4.6
python -W ignore - <<'P'
import gguf, numpy
from importlib.metadata import version
writer = gguf.GGUFWriter("m.gguf", "llama")
writer.add_array("tokenizer.ggml.merges", [])
writer.add_array("tokenizer.ggml.tokens", ["a"])
writer.add_tensor("t", numpy.ones(4, numpy.float32))
writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
keys = [key for key in gguf.GGUFReader("m.gguf").fields if key.startswith("tokenizer")]
print(version("gguf"), keys)
assert keys == ["tokenizer.ggml.tokens"], keys
P

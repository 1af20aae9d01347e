#!/usr/bin/env bash
# Expected: after a model is saved as one file and then saved again in shards, its folder loads the last save.
# Actual: save_pretrained writes the shards and their index, and keeps the old model.safetensors. from_pretrained then
# loads the old file, without a warning.
# Versions: transformers 5.24.0, torch 2.15.0.
# Cause: save_pretrained removes only old files that are named like shards, and from_pretrained looks for
# model.safetensors before it looks for the index.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 transformers==5.24.0
python -W ignore - 2>/dev/null <<'P'
import os, torch, transformers

config = transformers.BertConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100
)
model = transformers.BertModel(config)


def save(value, **options):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    model.save_pretrained("m", **options)
    loaded = transformers.BertModel.from_pretrained("m")
    return loaded.embeddings.word_embeddings.weight[0, 1].item()


first, second = save(1.0), save(2.0, max_shard_size="20KB")
print(transformers.__version__, "saved 1.0, loaded", first, "- saved 2.0 in shards, loaded", second)
print(sorted(os.listdir("m")))
assert (first, second) == (1.0, 1.0), (first, second)
P

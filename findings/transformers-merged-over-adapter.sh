#!/usr/bin/env bash
# Expected: after an adapter is merged into its model, and the merged model is saved into the adapter's folder, the
# folder loads as the merged model.
# Actual: from_pretrained loads the merged weights, finds the old adapter next to them, and applies it again. The model
# has the adapter's change twice. There is no warning. In a folder of its own, the merged model loads correctly.
# Versions: transformers 5.24.0, peft 0.21.2, torch 2.15.0.
# Cause: from_pretrained attaches every adapter that is in a folder with adapter_config.json, even if the folder has a
# whole model. save_pretrained does not remove the adapter.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 transformers==5.24.0 accelerate==1.15.0 peft==0.21.2
python -W ignore - 2>warnings <<'P'
import os, peft, torch, transformers

load = transformers.AutoModelForCausalLM.from_pretrained
torch.manual_seed(0)
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
)
transformers.LlamaForCausalLM(config).save_pretrained("base")
lora = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
model = peft.get_peft_model(load("base"), lora)
model.save_pretrained("tuned")
merged = model.merge_and_unload()
merged.save_pretrained("tuned")
merged.save_pretrained("other")


def weight(folder):
    layer = load(folder).model.layers[0].self_attn.q_proj
    if not hasattr(layer, "lora_A"):
        return layer.weight
    return layer.get_base_layer().weight + layer.get_delta_weight("default")


once = weight("other") - weight("base")
print(transformers.__version__, sorted(os.listdir("tuned")))
for folder in ("other", "tuned"):
    change = weight(folder) - weight("base")
    times = ((change * once).sum() / (once * once).sum()).item()
    print(folder, f"has the adapter's change {times:.3f} times")
    assert torch.allclose(change, once * {"other": 1, "tuned": 2}[folder], atol=1e-5)
P
! grep -i adapter warnings

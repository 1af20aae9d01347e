#!/usr/bin/env bash
# Expected: load_into_module fills the module's parameters, so weights that share memory still share it afterwards.
# Actual: each name gets a parameter of its own. The values are right, but the tie is lost: the model needs more memory,
# and a step of an optimizer changes only one of the two weights. There is no warning.
# Versions: tensorizer 2.12.1, torch 2.15.0.
# Cause: load_into_module replaces the parameters of the module by new ones, name by name.
source "$(dirname "$0")/with.sh"
need torch==2.15.0 numpy==2.4.6 safetensors==0.8.0 tensorizer==2.12.1 transformers==4.57.1
python -W ignore - <<'P'
import tensorizer, torch


def tied():
    model = torch.nn.Sequential(torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    return model


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model[1](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return torch.equal(model[0].weight, model[1].weight)


model, loaded, by_torch = tied(), tied(), tied()
serializer = tensorizer.TensorSerializer("m.tensors")
serializer.write_module(model)
serializer.close()
tensorizer.TensorDeserializer("m.tensors", device="cpu").load_into_module(loaded)
by_torch.load_state_dict(model.state_dict())
for name, one in (("load_state_dict", by_torch), ("load_into_module", loaded)):
    assert torch.equal(one[0].weight, model[0].weight) and torch.equal(one[1].weight, model[1].weight)
    shared, equal = one[0].weight is one[1].weight, step(one)
    print(tensorizer.__version__, name, "tied:", shared, "equal after a step:", equal)
    assert shared == equal == (name == "load_state_dict")
P

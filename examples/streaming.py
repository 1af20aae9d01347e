"""Uses each tensor as soon as it is loaded, and loads tensors directly into a module."""

import overwire as ow
import torch

source = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
ow.save_model(source, "model.safetensors")

for name, tensor in ow.stream("model.safetensors"):  # in order of arrival
    print(name, tuple(tensor.shape))

module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
missing, unexpected = ow.load_model(module, "model.safetensors")  # directly into its parameters
assert not missing and not unexpected and torch.equal(module.state_dict()["1.weight"], source.state_dict()["1.weight"])

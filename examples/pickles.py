"""Saves any Python object with tensors: a small pickle, and a compressed file with the tensors."""

import overwire as ow
import torch

words, head = torch.nn.Embedding(500, 64), torch.nn.Linear(64, 500, bias=False)
head.weight = words.weight  # tied: stored once, and tied again when loaded
model = torch.nn.Sequential(words, head)

report = ow.save_bundle(model, "model.pkl")
again = ow.load_bundle("model.pkl")
assert again[0].weight is again[1].weight and torch.equal(again[0].weight, words.weight)

bundle = {"model": model, "step": 7, "rows": words.weight.detach()[:10]}
ow.save_bundle(bundle, "bundle.pkl")
assert ow.load_bundle("bundle.pkl")["step"] == 7

ow.save_bundle({"check": print}, "odd.pkl")
try:
    ow.load_bundle("odd.pkl")  # only allows tensors, containers, numpy and torch.nn
except ow.UntrustedPickleError as error:
    print(error)
assert ow.load_bundle("odd.pkl", trust=True) == {"check": print}

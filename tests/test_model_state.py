"""A model's state: what a loader changes beside the weights is seen, and nothing else is."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from overwire.integrations.state import State


class Method:
    """An object of a model's own package."""

    __slots__ = ("__dict__", "scheme")

    def __init__(self) -> None:
        self.scheme: Any = [1]
        self.flags = {"a", "b"}

    def load(self) -> None: ...


class Layer(torch.nn.Module):
    """Holds one of everything that a state looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("scale", torch.ones(2))
        self.method = Method()
        self.names, self.sizes, self.last = ["q", "k"], {"q": 100000, "k": 2.5}, deque([1])
        self.pairs = (["q"], 1)
        self.nothing: OrderedDict[str, int] = OrderedDict()
        count = 0
        held: list[int] = []

        def loader(more: int = 0) -> None:
            nonlocal count
            count += more
            held.extend(range(more))

        self.loader = loader
        self.partly = functools.partial(loader, 0)
        self.bound = self.method.load
        self.weight.weight_loader = self.partly


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "an attribute": lambda layer: setattr(layer, "more", 1),
    "an attribute's value": lambda layer: setattr(layer, "training", False),
    "a list": lambda layer: layer.names.append("v"),
    "a dict": lambda layer: layer.sizes.update(v=3),
    "a dict's value": lambda layer: layer.sizes.update(q=100001),
    "a deque": lambda layer: layer.last.append(2),
    "a list in a tuple": lambda layer: layer.pairs[0].append("k"),
    "an empty dict": lambda layer: layer.nothing.update(a=1),
    "a set": lambda layer: layer.method.flags.add("c"),
    "a slot": lambda layer: setattr(layer.method, "scheme", [1]),
    "a list in a slot": lambda layer: layer.method.scheme.append(2),
    "a closure": lambda layer: layer.loader(1),
    "an attribute of a parameter": lambda layer: setattr(layer.weight, "loaded", True),
    "a parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.zeros(4, 4))),
    "a parameter's memory": lambda layer: setattr(layer.weight, "data", torch.zeros(4, 4)),
    "a parameter's strides": lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),
    "a buffer": lambda layer: layer.register_buffer("zero", torch.zeros(1)),
    "a module": lambda layer: layer.add_module("inner", torch.nn.Identity()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what: str) -> None:
    model = torch.nn.Sequential(Layer(), Layer())
    state = State(model)
    assert state.unchanged()
    CHANGES[what](model[1])
    assert not state.unchanged()


def test_what_is_the_same_again_is_no_change() -> None:
    model = torch.nn.Sequential(Layer())
    model[0].myself = model  # a circle
    state = State(model)
    layer = model[0]
    with torch.no_grad():
        layer.weight.copy_(torch.ones(4, 4))  # data is what loaders are for
    layer.sizes["q"] = int("100000")  # another object, the same number
    layer.names.append("v")
    layer.names.pop()
    layer.loader(0)
    assert state.unchanged()

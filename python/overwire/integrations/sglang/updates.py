"""Loads new weights into SGLang: `--custom-weight-loader overwire.integrations.sglang.updates.load`.

    engine.update_weights_from_tensor(message(push.info), load_format=LOADER)

This call loads a push of a `Publisher` into the model. The push is loaded directly into the parameters if the model can
be loaded by slices. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import iter_weights
from ..devices import device_or_host, tensor_parallel_group
from ..load_plan.update_weights import Places, reason_against

log = logging.getLogger("sglang.overwire")

#: The name of `load`, for SGLang's arguments.
LOADER = "overwire.integrations.sglang.updates.load"

_NAME = "overwire.push"
_MOST = 1 << 30


def message(
    info: Mapping[str, Any], storage_options: Mapping[str, Any] | None = None
) -> list[tuple[str, torch.Tensor]]:
    """Converts a push's info to a tensor for `update_weights_from_tensor`.

    info: the info of a push with a path. storage_options: how the engine reaches the path.
    """
    if not info.get("path"):
        raise ValueError("overwire: message: SGLang loads pushes from a folder or a store, not from a group")
    text = json.dumps({**info, "storage_options": None if storage_options is None else dict(storage_options)}).encode()
    return [(_NAME, torch.frombuffer(bytearray(text), dtype=torch.uint8))]


@torch.no_grad()
def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Loads the push of a `message`. SGLang calls this function.

    Raises ValueError if the push has other tensors than the model, and DeltaBaseError if a delta was made from other
    weights. These two errors leave the model unchanged. Also raises the errors of loading.
    """
    pairs = list(named_tensors)
    if len(pairs) != 1 or pairs[0][0] != _NAME:
        raise ValueError(f"overwire: {LOADER}: expected the result of message(), got {[name for name, _ in pairs][:3]}")
    info = json.loads(bytes(pairs[0][1].cpu().numpy()))
    if reason := reason_against(info["kind"], info["path"]):
        raise ValueError(f"overwire: the push's {reason}")
    device = device_or_host(next(model.parameters()).device)
    places = _places_of(model, device)
    if info["kind"] == "delta":
        places.apply_delta(info["path"], info["storage_options"])
    elif not places.load_whole(info["path"], info["storage_options"], log):
        options = {"storage_options": info["storage_options"], "max_memory": _MOST}
        model.load_weights(iter_weights(info["path"], device, options))  # type: ignore[operator]


def _places_of(model: torch.nn.Module, device: str) -> Places:
    # The model refers to this object, and this object to the model, so they are freed together.
    from sglang.srt.distributed import parallel_state

    places = vars(model).get("_overwire_places")
    if not isinstance(places, Places):
        ranks = tensor_parallel_group(parallel_state, "device_group")
        places = Places(model, model.load_weights, device, _MOST, ranks)  # type: ignore[arg-type]
        vars(model)["_overwire_places"] = places
    return places

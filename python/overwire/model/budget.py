"""Gets the engine's estimate of the memory that a load takes, and compares it with the budget."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import _verbs
from ..frameworks.frame import Frame
from .opened import WHOLE, Model
from .options import parse_size

if TYPE_CHECKING:
    from .._requests import LoadEstimate, LoadProspect


def estimate(
    model: Model,
    frame: Frame,
    wanted: Any,
    parts: Iterable[tuple[int, int]] | None = None,
    max_memory: int | str | None = None,
    stream: bool = False,
    keep: int | None = None,
) -> LoadEstimate:
    """Returns the engine's estimate of the memory that a load takes. parts: the parts of the model to load, each as a
    tensor's position and a number of elements (-1 for all); None means the tensors in `model.chosen`. keep: the bytes
    of blocks that an offload keeps on the device; if given, the estimate includes an offload. stream: whether tensors
    are loaded one at a time. Raises OutOfMemoryError if the load takes more than max_memory.
    """
    numbers = array("q")
    if parts is None and model.chosen is not None:
        parts = ((at, WHOLE) for at in model.chosen)
    if parts is not None:
        numbers.extend(number for part in parts for number in part)
        if not numbers:
            nothing: LoadEstimate = {"bytes": [], "peak": 0, "staging": 0, "pinned": 0, "windows": []}
            if keep is not None:
                sizes = dict.fromkeys(("rest", "kept", "streamed", "stored", "ring", "slots"), 0)
                nothing["offload"] = {**sizes, "blocks": []}  # type: ignore[typeddict-item]
            return nothing
    load: LoadProspect = {"device": model.device, "max_memory": parse_size(max_memory, "max_memory"), "stream": stream}
    load["unpack"] = frame.name == "numpy"
    if keep is not None:
        load["keep"] = keep
    if wanted is not None:
        load["dtype"], load["item"], load["late"] = frame.name_of(wanted), wanted.itemsize, model.joined
    return _verbs.outlook(load, model.handle, numbers.tobytes())


def fit(
    model: Model, frame: Frame, wanted: Any, most: int | str | None, parts: Iterable[tuple[int, int]] | None = None
) -> None:
    """Raises OutOfMemoryError if a load would take more than the budget; see `estimate`."""
    if most is not None:
        estimate(model, frame, wanted, parts, most)

"""The states of a model that deltas lie between: tensors in memory, or files, of which
only some tensors are in memory at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import ArgumentError, NotSupportedError, name_tensor
from ..frameworks.choose import frame_for, frame_of
from ..frameworks.frame import Bytes
from ..model.opened import Model
from ..model.options import StorageOptions

#: Bytes of the tensors of each side that files give at once, unless one is larger.
BATCH = 1 << 30


class State:
    """One side of a comparison. A path or URI is opened, and closed at the end of the `with`."""

    def __init__(self, model: Any, what: str, options: StorageOptions | None) -> None:
        self._opened: Model | None = None
        self._tensors: dict[str, Any] = {}
        #: Bytes of each tensor that is loaded when it is asked for; 0 of one in memory.
        self.sizes: dict[str, int]
        if isinstance(model, (str, os.PathLike)):
            self._opened = Model(model, storage_options=options)
            self.sizes = {row[0]: row[3] for row in self._opened.table}
        else:
            self._tensors = tensors_of(model, what)
            self.sizes = dict.fromkeys(self._tensors, 0)

    def __enter__(self) -> State:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._opened is not None:
            self._opened.close()

    def take(self, names: list[str]) -> dict[str, Any]:
        """Tensors of these names."""
        if self._opened is None:
            return {name: self._tensors[name] for name in names}
        return self._opened.load([self._opened.places[name] for name in names], frame_for(None), None, None)


def batches(a: State, b: State) -> Iterator[list[str]]:
    """The names that both have, sorted, in lists that fit in memory; one at least."""
    batch: list[str] = []
    size = 0
    for name in sorted(a.sizes.keys() & b.sizes.keys()):
        more = max(a.sizes[name], b.sizes[name])
        if size and size + more > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += more
    yield batch


def tensors_of(model: Any, what: str) -> dict[str, Any]:
    """Tensors by name, of a dict or a module."""
    if not isinstance(model, Mapping):
        if not hasattr(model, "state_dict"):
            raise ArgumentError(
                f"overwire: {what}: expected a dict of tensors, a module or a path, got {type(model).__name__}"
            )
        model = {
            name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if hasattr(tensor, "data_ptr")
        }
    for name in model:
        if not isinstance(name, str):
            raise ArgumentError(f"overwire: {what}: the name {name!r} is not a str")
    return dict(model)


def described(name: str, tensor: Any) -> Bytes:
    """Where a tensor's bytes are; an error names it."""
    try:
        return frame_of(tensor).describe(tensor)
    except (ArgumentError, NotSupportedError) as error:
        name_tensor(error, name)
        raise


def hosted(name: str, tensor: Any) -> Bytes:
    """A tensor's bytes on the host; an error names it."""
    if frame_of(tensor).name == "torch" and tensor.device.type != "cpu":
        from ..frameworks.memory import check_memory

        check_memory(tensor, f"overwire: {name!r}", name)
        tensor = tensor.detach().cpu()
    return described(name, tensor)


def same_names(now: State, base: State) -> None:
    """Raises ArgumentError where one has a name that the other lacks."""
    for what, names in (
        ("base lacks", now.sizes.keys() - base.sizes.keys()), ("new lacks", base.sizes.keys() - now.sizes.keys())
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ArgumentError(f"overwire: save_delta: {what} {', '.join(map(repr, sorted(names)[:3]))}{more}")


def pair(name: str, new: Any, base: Any) -> tuple[Bytes, Bytes]:
    """Both states of a tensor, in the same memory: on the host or on one GPU."""
    now, before = described(name, new), described(name, base)
    if (now.dtype, now.shape) != (before.dtype, before.shape):
        raise ArgumentError(
            f"overwire: save_delta: {name!r} is {now.dtype} {list(now.shape)} in new, {before.dtype} "
            f"{list(before.shape)} in base",
            tensor=name,
        )
    if now.cuda != before.cuda:  # the base goes where the new tensor is
        before = described(name, base.detach().to(new.device) if now.cuda and hasattr(base, "detach") else base)
        if now.cuda != before.cuda:
            now, before = hosted(name, new), hosted(name, base)
    return now, before

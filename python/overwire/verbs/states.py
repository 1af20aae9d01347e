"""Reads the two models that a delta compares, and finds the memory in which a delta changes tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import ArgumentError, DeviceError, NotSupportedError
from ..frameworks.choose import frame_for, frame_of
from ..frameworks.frame import overlaps_itself
from ..frameworks.views import Bytes
from ..jobs import shown
from ..model.opened import Model
from ..model.storageoptions import StorageOptions
from ..paths import is_remote, local
from ..portable.folders import parse_name
from .save import describe_named

#: The last part of the name of a module's extra state in a state dict.
EXTRA = "_extra_state"

#: The most tensor bytes that are loaded from each model at a time. A larger tensor is loaded by itself.
BATCH = 1 << 30


class ModelSide:
    """One of the two models: tensors in memory, or a file or folder, which is closed at the end of the `with` block."""

    def __init__(self, model: Any, what: str, options: StorageOptions | None) -> None:
        self._opened: Model | None = None
        self._path = ""
        self._tensors: dict[str, Any] = {}
        self.sizes: dict[str, int]  # bytes of memory that `take` allocates for each tensor
        if isinstance(model, (str, os.PathLike)):
            self._opened = Model(model, storage_options=options)
            self._path = local(model)
            self.sizes = {row[0]: row[3] for row in self._opened.table}
        else:
            self._tensors = tensors_of(model, what)
            self.sizes = dict.fromkeys(self._tensors, 0)

    def __enter__(self) -> ModelSide:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._opened is not None:
            self._opened.close()

    def refuse_target(self, path: str) -> None:
        """Raises ArgumentError if files that are written at a path would replace this model."""
        if self._opened is None:
            return
        files = [self._path, *(part["uri"] for part in self._opened.info())]
        if any(_is_of_one_model(path, one) for one in files):
            text = "it is the base, without which the delta is useless: choose another path"
            raise ArgumentError(f"overwire: save_delta {shown(path)}: {text}", source=path)

    def take(self, names: list[str]) -> dict[str, Any]:
        """Returns tensors by name. Loads them if they are in a file."""
        if self._opened is None:
            return {name: self._tensors[name] for name in names}
        return self._opened.load([self._opened.places[name] for name in names], frame_for(None), None, None)


def _is_of_one_model(path: str, other: str) -> bool:
    # Returns whether two paths lead to the same file, or to files of the same model, according to folder and names.
    if is_remote(path) != is_remote(other):
        return False
    names = [parse_name(os.path.basename(one)) for one in (path, other)]
    folders = [os.path.dirname(one) for one in (path, other)]
    if not is_remote(path):
        folders = [os.path.realpath(one) for one in folders]
        with contextlib.suppress(OSError):
            if os.path.samefile(path, other) and not os.path.isdir(path):
                return True
    stems = [(one.stem, one.variant) if one else None for one in names]
    return folders[0] == folders[1] and stems[0] == stems[1] is not None


def batches(a: ModelSide, b: ModelSide) -> Iterator[list[str]]:
    """Yields the names that both models have, sorted, in lists that fit in memory. Yields at least one list."""
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
    """Returns the tensors of a dict or a module by name."""
    if not isinstance(model, Mapping):
        if not hasattr(model, "state_dict"):
            why = f"expected a dict of tensors, a module or a path, got {type(model).__name__}"
            raise ArgumentError(f"overwire: {what}: {why}")
        return tensors_of_module(model, what)[0]
    for name in model:
        if not isinstance(name, str):
            raise ArgumentError(f"overwire: {what}: the name {name!r} is not a str")
    return dict(model)


def tensors_of_module(module: Any, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the tensors of a module's state dict, and its extra states that are not tensors. Raises
    NotSupportedError for any other entry, because it may contain weights, as in torch's quantised modules."""
    tensors: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if hasattr(value, "data_ptr"):
            tensors[name] = value
        elif str(name).endswith(EXTRA):
            extra[name] = value
        else:
            place = f"{name!r} in the state dict of {type(module).__name__} is a {type(value).__name__}"
            text = f"{place} instead of a tensor: save_bundle and load_bundle keep whole modules"
            raise NotSupportedError(f"overwire: {what}: {text}", tensor=str(name))
    return tensors, extra


def hosted(name: str, tensor: Any) -> Bytes:
    """Describes a tensor's bytes on the host, after a copy from a GPU. Errors name the tensor."""
    if frame_of(tensor).name == "torch" and tensor.device.type != "cpu":
        from ..frameworks.memory import check_memory

        check_memory(tensor, f"overwire: {name!r}", name)
        tensor = tensor.detach().cpu()
    return describe_named(name, tensor)


def same_names(now: ModelSide, base: ModelSide) -> None:
    """Raises ArgumentError if one model has a name that the other lacks."""
    for what, names in (
        ("base lacks", now.sizes.keys() - base.sizes.keys()),
        ("new lacks", base.sizes.keys() - now.sizes.keys()),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ArgumentError(f"overwire: save_delta: {what} {', '.join(map(repr, sorted(names)[:3]))}{more}")


def pair(name: str, new: Any, base: Any) -> tuple[Bytes, Bytes]:
    """Describes a tensor of both models, on the same device."""
    now, before = describe_named(name, new), describe_named(name, base)
    if (now.dtype, now.shape) != (before.dtype, before.shape):
        kinds = f"{now.dtype} {list(now.shape)} in new, {before.dtype} {list(before.shape)} in base"
        raise ArgumentError(f"overwire: save_delta: {name!r} is {kinds}", tensor=name)
    if now.cuda != before.cuda:
        before = describe_named(name, base.detach().to(new.device) if now.cuda and hasattr(base, "detach") else base)
        if now.cuda != before.cuda:
            now, before = hosted(name, new), hosted(name, base)
    return now, before


def settle_devices(devices: Iterable[int]) -> None:
    """Waits for the work that is queued on the current stream of each GPU. GPUs are numbered from 1, and 0 is the host.
    """
    for cuda in set(devices) - {0}:
        from ..frameworks.torch import await_stream

        await_stream(f"cuda:{cuda - 1}")


def place_tensor(name: str, tensor: Any) -> tuple[Bytes, bool]:
    """Returns the memory in which a tensor is changed, and whether it is a copy. Raises an error if this is not
    possible."""
    at = describe_named(name, tensor)
    frame = frame_of(tensor).name
    if frame == "numpy":
        if not tensor.flags.writeable:
            raise ArgumentError(f"overwire: apply_delta: the array {name!r} is read-only", tensor=name)
        if at.dtype == "F4":
            text = f"overwire: apply_delta: {name!r}: numpy unpacks F4: apply the delta to torch tensors"
            raise NotSupportedError(text, tensor=name)
        here = tensor.__array_interface__["data"][0]
    elif frame == "torch":
        here = tensor.data_ptr() if tensor.layout is not None and at.nbytes else 0
        if tensor.is_conj() or tensor.is_neg():
            here = -1
    else:
        text = f"overwire: apply_delta: {name!r}: a {type(tensor).__name__} cannot be changed in place"
        raise NotSupportedError(text, tensor=name)
    is_copy = at.nbytes > 0 and at.pointer != here
    if is_copy:
        _try_write(name, tensor, at.keep)
    return at, is_copy


def _try_write(name: str, tensor: Any, copy: Any) -> None:
    """Raises ArgumentError if a copy could not be written back to the tensor."""
    strides = tensor.stride() if hasattr(tensor, "stride") else [step // tensor.itemsize for step in tensor.strides]
    if overlaps_itself(tensor.shape, strides):
        text = f"overwire: apply_delta: {name!r}: its elements share memory, as after `expand`"
        raise ArgumentError(text, tensor=name)
    first = (..., *(slice(0, 1) for _ in tensor.shape))
    try:
        _write_copy(tensor[first], copy[first])
    except (RuntimeError, ValueError) as error:
        raise ArgumentError(f"overwire: apply_delta: {name!r} cannot be written to: {error}", tensor=name) from error


def _write_copy(tensor: Any, copy: Any) -> None:
    if hasattr(tensor, "copy_"):
        from ..frameworks.memory import write

        write(tensor, copy)
    else:
        tensor[...] = copy


def write_back(copies: list[tuple[str, Any, Any]]) -> None:
    """Copies all copies back to their tensors. copies: triples (name, tensor, copy). Ctrl-C is raised at the end."""
    interrupt: KeyboardInterrupt | None = None
    devices: set[int] = set()
    for at, (name, tensor, copy) in enumerate(copies):
        while True:
            try:
                _write_copy(tensor, copy)
                if getattr(tensor, "is_cuda", False):
                    devices.add(tensor.get_device() + 1)
                break
            except KeyboardInterrupt as error:
                interrupt = error
            except Exception as error:
                old = ", ".join(repr(other) for other, _, _ in copies[at:])
                text = f"{name!r}: {error}. These have old or mixed values: {old}. All others have new values"
                raise DeviceError(f"overwire: apply_delta: {text}") from error
    settle_devices(devices)
    if interrupt is not None:
        raise interrupt

"""load_model and save_model: a torch module's tensors, in place."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, ModelMismatchError
from ..frameworks.choose import check_device, frame_for
from ..model.opened import Model, opening
from ..model.options import DeviceLike, ModuleOptions, StorageOptions, check_options, parse_size
from ..model.plan import fit
from ..model.sources import SourceLike, named
from ..progress import ProgressLike, watch
from .into import ALL, Target, fill, in_place, single
from .save import Report, save_file

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

__all__ = ["load_model", "save_model"]


def load_model(
    module: torch.nn.Module,
    source: SourceLike | None = None,
    strict: bool = True,
    device: DeviceLike | None = None,
    *,
    filename: SourceLike | None = None,
    **options: Unpack[ModuleOptions],
) -> tuple[list[str], list[str]]:
    """Loads a file into the parameters and buffers of a torch module.

    A tensor of the module that is dense and has the file's dtype is filled in place,
    on the host or on a GPU: there is no second copy of the model. Other tensors are
    loaded separately and copied (cast) one by one; tensors on the meta device are
    replaced. Tied tensors are loaded once.

    device: the device to load to; None: the device of each tensor, and the host for
        tensors of the meta device. Tensors on another device are copied to it.

    strict: raise if tensors are missing in the file, or unexpected in it.
    options: those of `ModuleOptions`: progress, mmap, storage_options, lenient, group,
        shard, as for `load_file`, and max_memory. With shard, a tensor of the module has
        the shape of this rank's block.
    max_memory: the most bytes, on all devices together, for tensors that are not
        filled in place: copies, and tensors that replace those of the meta device. With
        group, where the ranks do not map each other's memory (`OVERWIRE_EXCHANGE`), that
        is all tensors, which are copied window by window.

    Returns (missing, unexpected) names, as safetensors.torch.load_model. Names
    tied to a loaded one are neither.

    Raises ModelMismatchError, also for other shapes, and OutOfMemoryError for
    max_memory, both before it changes or allocates anything; and what `load_file`
    raises. If the load itself fails, the module has old values and new ones.

    `load_state_dict` hooks of the module do not run.
    """
    check_options("load_model", options, ModuleOptions)
    source = named("load_model", source, filename)
    frame = frame_for("torch")
    fixed = None if device is None else check_device(device, frame)
    import torch

    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"overwire: module: expected a torch.nn.Module, got {type(module).__name__}")
    targets: dict[str, Any] = module.state_dict(keep_vars=True)
    if options.get("group") is not None or options.get("shard") is not None:
        return _together(module, source, strict, fixed or single(list(targets.values())), targets, dict(options))
    with Model(source, device=fixed or single(list(targets.values())), **opening(options)) as model:
        missing, unexpected, wanted = _match(module, targets, model, strict)
        into = []
        for name, at in wanted.items():
            target = targets[name]
            into.append(Target(at, ALL, model.table[at][2], target, functools.partial(_put, module, target)))
        fill(model, frame, into, fixed, options.get("max_memory"), watch(options.get("progress"), "load"))
    return missing, unexpected


def _together(
    module: Any, source: SourceLike, strict: bool, device: str, targets: Mapping[str, Any], options: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """`load_model` over a group."""
    from ..distributed.loading import GroupLoad, begun

    frame = frame_for("torch")
    into: dict[int, Target] = {}
    places: dict[int, Any] = {}
    names: list[list[str]] = []
    group, max_memory = options.pop("group", None), options.pop("max_memory", None)

    def choose(loading: GroupLoad) -> list[int]:
        missing, unexpected, wanted = _match(module, targets, loading.model, strict, loading.part_shape)
        names.extend((missing, unexpected))
        for name, at in wanted.items():
            into[at] = Target(at, ALL, loading.part_shape(at), targets[name], functools.partial(_put, module, targets[name]))
        places.update(in_place(loading.model, list(into.values()), device))
        fit(loading.model, frame, None, max_memory, [loading.part(at) for at in into if at not in places])
        return list(into)

    beside = parse_size(max_memory, "max_memory")
    with (
        begun(source, group, options.pop("shard", None), device=device, budget=0, beside=beside, choose=choose, **options) as loading,
        contextlib.closing(loading.arrive(places)) as arriving,
    ):
        for at, tensor in arriving:
            if tensor is not places.get(at):
                _put(module, into[at].tensor, tensor)
    return names[0], names[1]


def _match(
    module: Any,
    targets: Mapping[str, Any],
    model: Model,
    strict: bool,
    shape_of: Callable[[int], tuple[int, ...]] | None = None,
) -> tuple[list[str], list[str], dict[str, int]]:
    """Missing and unexpected names, and the place of each tensor to load. shape_of: what
    is loaded of it, as torch has it; None: all."""
    wanted = {name: model.places[name] for name in targets if name in model.places}
    loaded = {_identity(targets[name]) for name in wanted}
    missing = [name for name, target in targets.items() if name not in wanted and _identity(target) not in loaded]
    unexpected = [row[0] for row in model.table if row[0] not in targets]
    problems = []
    if strict and missing:
        problems.append("missing in the file: " + ", ".join(map(repr, sorted(missing))))
    if strict and unexpected:
        problems.append("unexpected in the file: " + ", ".join(map(repr, sorted(unexpected))))
    for name, at in wanted.items():
        target, (_, dtype, shape, *_rest) = targets[name], model.table[at]
        if not hasattr(target, "shape"):
            problems.append(f"{name!r} is not a tensor in the module")
            continue
        here = tuple(target.shape)
        if shape_of is not None:
            shape = shape_of(at)
        elif dtype == "F4" and shape:
            shape = (*shape[:-1], shape[-1] // 2)
        if here != shape:
            problems.append(f"{name!r} has shape {here} in the module, {shape} in the file")
    if problems:
        raise ModelMismatchError(
            f"overwire: load {model.uris[0]} into {type(module).__name__}: " + "; ".join(problems),
            source=model.uris[0],
        )
    return missing, unexpected, wanted


def _identity(target: Any) -> Any:
    if not hasattr(target, "data_ptr") or target.device.type == "meta" or not target.numel():
        return id(target)
    return (target.data_ptr(), tuple(target.shape), target.stride(), target.dtype)


def _put(module: Any, target: Any, loaded: Any) -> None:
    import torch

    if target.device.type != "meta":
        with torch.no_grad():
            target.copy_(loaded)
        return
    # A module made on the meta device: the loaded tensor takes the place,
    # under every name that the placeholder has.
    if isinstance(target, torch.nn.Parameter):
        loaded = torch.nn.Parameter(loaded.to(target.dtype), requires_grad=target.requires_grad)
    else:
        loaded = loaded.to(target.dtype)
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for key, value in table.items():
                if value is target:
                    table[key] = loaded


def save_model(
    module: Any,
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    compress: bool = True,
    level: str = "default",
    digests: bool = False,
    max_shard_size: int | str | None = None,
    progress: ProgressLike = None,
    storage_options: StorageOptions | None = None,
) -> Report:
    """Saves a torch module's parameters and persistent buffers by name.

    Tied tensors are stored once. A compressed file has all their names. A plain file
    (compress=False) has the first name only, and {dropped name: kept name} in its
    metadata, as safetensors.torch.save_model writes it.

    Other arguments, the report and errors are those of `save_file`.
    """
    frame_for("torch")
    import torch

    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"overwire: module: expected a torch.nn.Module, got {type(module).__name__}")
    tensors = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    notes = dict(metadata or {})
    notes.setdefault("format", "pt")
    if not compress:
        kept: dict[Any, str] = {}
        for name in sorted(tensors):
            first = kept.setdefault(_identity(tensors[name]), name)
            if first != name:
                notes.setdefault(name, first)
                del tensors[name]
    return save_file(
        tensors,
        path,
        notes,
        compress=compress,
        level=level,
        digests=digests,
        max_shard_size=max_shard_size,
        progress=progress,
        storage_options=storage_options,
    )

"""Implements load_model, which loads a file into a torch module, and save_model, which saves a module's tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from .._imports import imported, many_objects
from ..errors import ArgumentError, ModelMismatchError, NotSupportedError
from ..frameworks.choose import frame_for
from ..model.opened import Model
from ..model.options import DeviceLike, ModuleOptions, check_options, check_values, spell_out
from ..model.saveoptions import SaveOptions
from ..model.sourcelike import SourceLike
from ..model.starting import check_source, start_engine
from .into import ALL, Destination, common_device, local_destination
from .starting import open_loader
from .states import EXTRA, tensors_of_module

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from .saving import Report, Saving

# The most names in each list of an error message.
_MOST_NAMES = 8


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

    A tensor of the module that is dense and has the file's dtype is filled in place, on the host or on a GPU, so there
    is no second copy of the model. Other tensors are loaded separately and copied (cast) one by one; tensors on the
    meta device are replaced. Tied tensors are loaded once. If tensors that are not tied overlap, the last one in the
    state dict wins. Each rank loads its own part of a DTensor (FSDP2, tensor parallelism). A module's extra state is
    passed to its `set_extra_state` if it is a tensor. Otherwise it stays unchanged, because files store only tensors.
    Other entries of the state dict that are not tensors raise NotSupportedError, even with strict=False.

    device: the device to load to, by default the device of each tensor, and the host for meta tensors. Tensors of the
        module that are on another device are filled by a copy.
    strict: whether to raise an error if tensors are missing in the file, or unexpected there.
    options: the options of `ModuleOptions`: progress, mmap, storage_options, lenient, group, shard, as for `load_file`,
        and max_memory. With shard, a tensor of the module has the shape of this rank's block.
    max_memory: the most bytes, on all devices together, for tensors that are not filled in place: copies, and tensors
        that replace meta tensors. With group, if the ranks do not map each other's memory (`OVERWIRE_EXCHANGE`), the
        limit applies to all tensors, because all of them are loaded in parts and copied.

    Returns (missing, unexpected) names, like safetensors.torch.load_model. A name that is tied to a loaded name is in
    neither list.

    Raises, before it changes or allocates anything: ModelMismatchError for different names or shapes; NotSupportedError
    for tensors without memory of their own (sparse, nested, FakeTensors, wrappers of other tensors), and if the state
    dict has copies instead of the module's own tensors; ArgumentError for memory that was freed (`sleep`); and
    OutOfMemoryError for max_memory. Also raises the errors of `load_file`. If the load itself fails, the module has a
    mixture of old and new values.

    `load_state_dict` hooks of the module do not run.
    """
    targets: dict[str, Any] = {}
    names: tuple[list[str], list[str]] = [], []

    def check_module(source: Any) -> str:
        check_values(strict=strict)
        framework = imported("torch")
        if framework is not None and isinstance(module, framework.nn.Module):
            check_source(source)
            start_engine()
        frame_for("torch")
        import torch

        if not isinstance(module, torch.nn.Module):
            path = isinstance(module, (str, os.PathLike))
            _refuse_other(module, f"; load_file({os.fsdecode(module)!r}) returns its tensors" if path else "")
        tensors, extra = tensors_of_module(module, "load_model")
        targets.update(tensors | extra)
        return common_device(list(targets.values()))

    def choose_destinations(model: Model, shape_of: Callable[[int], tuple[int, ...]]) -> list[Destination]:
        setters = _extra_states(module)
        names[0][:], names[1][:], positions = _match_names(module, targets, setters, model, strict, shape_of)
        return _destinations_of(module, targets, setters, model, positions, shape_of)

    # `many_objects` comes first, so that the model's table, which has an object for each tensor, is freed before the
    # cycle collector runs again.
    with (
        many_objects(),
        open_loader("load_model", ModuleOptions, options, source, device, "pt", filename, check_module) as loader,
    ):
        loader.load_into(choose_destinations, device is not None, options.get("max_memory"), options.get("progress"))
    return names


spell_out(load_model, ModuleOptions)


def _refuse_other(module: Any, advice: str) -> NoReturn:
    """Raises the error for an argument that is not a module, with advice."""
    raise ArgumentError(f"overwire: module: expected a torch.nn.Module, got {type(module).__name__}{advice}")


def _destinations_of(
    module: Any,
    tensors: Mapping[str, Any],
    setters: Mapping[str, Callable[[Any], None]],
    model: Model,
    wanted: Mapping[str, int],
    shape_of: Callable[[int], tuple[int, ...]],
) -> list[Destination]:
    """Returns the destinations of the tensors. Leaves out tensors that have no part on this rank."""
    import torch

    from ..frameworks.memory import is_distributed, is_ready, storage_of

    own = {id(one) for part in module.modules() for one in (*part._parameters.values(), *part._buffers.values())}
    memory: set[int] = set()
    into: list[Destination] = []
    for name, at in wanted.items():
        tensor, shape = tensors[name], shape_of(at)
        if name not in setters and id(tensor) in own and is_ready(tensor):
            into.append(Destination(at, ALL, shape, tensor))
            continue
        where = f"overwire: load {model.uris[0]} into {type(module).__name__}: {name!r}"
        if name in setters:
            into.append(Destination(at, ALL, shape, torch.empty(0, device="meta"), setters[name]))
            continue
        if id(tensor) not in own:
            memory = memory or {storage_of(one) for one in chain(module.parameters(), module.buffers())}
            if storage_of(tensor) not in memory - {0}:
                text = "the state dict has a copy of it instead of the module's own tensor: use load_state_dict"
                raise NotSupportedError(f"{where}: {text}", tensor=name)
        if tensor.device.type == "meta" and not is_distributed(tensor):
            into.append(Destination(at, ALL, shape, tensor, partial(_replace_meta, module, tensor)))
        elif here := local_destination(Destination(at, ALL, shape, tensor), model.row(at), where):
            into.append(here)
    return into


def _extra_states(module: Any) -> dict[str, Callable[[Any], None]]:
    """Returns the `set_extra_state` method of each submodule that defines one, by the extra state's name in the state
    dict."""
    import torch

    base = torch.nn.Module.set_extra_state
    return {
        f"{name}.{EXTRA}" if name else EXTRA: part.set_extra_state
        for name, part in module.named_modules()
        if type(part).set_extra_state is not base
    }


def _match_names(
    module: Any,
    targets: Mapping[str, Any],
    setters: Mapping[str, Any],
    model: Model,
    strict: bool,
    shape_of: Callable[[int], tuple[int, ...]],
) -> tuple[list[str], list[str], dict[str, int]]:
    """Returns missing and unexpected names, and the position of each tensor to load. shape_of returns the torch
    shape of the loaded part of a tensor."""
    import torch

    from ..frameworks.memory import check_shape, identity_of, is_ready

    positions = {name: model.places[name] for name in targets if name in model.places}
    tensors = {name: target for name, target in targets.items() if isinstance(target, torch.Tensor)}
    missing = [name for name in tensors if name not in positions]
    if missing:
        identities = {identity_of(tensors[name]) for name in positions if name in tensors}
        missing = [name for name in missing if identity_of(tensors[name]) not in identities]
    surplus = [row[0] for row in model.table if row[0] not in targets]
    problems = []
    for what, names in (("missing", missing), ("unexpected", surplus)) if strict else ():
        if names:
            problems.append(f"{what} in the file: " + _list_few(list(map(repr, sorted(names))), ", "))
    misfits = []
    for name, at in positions.items():
        target = targets[name]
        if name in setters:
            continue  # an extra state may have any shape
        if name not in tensors:
            misfits.append(f"{name!r} is not a tensor in the module")
            continue
        if not is_ready(target):
            check_shape(target, f"overwire: load {model.uris[0]} into {type(module).__name__}: {name!r}", name)
        here, shape = tuple(target.shape), shape_of(at)
        if here != shape:
            misfits.append(f"{name!r} has shape {here} in the module, {shape} in the file")
    if misfits:
        problems.append(_list_few(misfits, "; "))
    if problems:
        text = f"overwire: load {model.uris[0]} into {type(module).__name__}: " + "; ".join(problems)
        raise ModelMismatchError(text, source=model.uris[0])
    return missing, surplus, positions


def _list_few(parts: list[str], between: str) -> str:
    """Returns the parts that fit into a message, and the number of the others, as text."""
    more = f" and {len(parts) - _MOST_NAMES:,} more" if len(parts) > _MOST_NAMES else ""
    return between.join(parts[:_MOST_NAMES]) + more


def _replace_meta(module: Any, target: Any, loaded: Any) -> None:
    # Replaces a tensor on the meta device under all its names.
    import torch

    from ..frameworks.memory import cast_tensor

    loaded = cast_tensor(loaded, target.dtype)
    if isinstance(target, torch.nn.Parameter):
        loaded = torch.nn.Parameter(loaded, requires_grad=target.requires_grad)
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for key, value in table.items():
                if value is target:
                    table[key] = loaded


@overload
def save_model(
    module: Any, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None, *, wait: Literal[True] = True,
    **options: Unpack[SaveOptions],
) -> Report: ...  # fmt: skip


@overload
def save_model(
    module: Any, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None, *, wait: Literal[False],
    **options: Unpack[SaveOptions],
) -> Saving: ...  # fmt: skip


def save_model(
    module: Any,
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    wait: bool = True,
    **options: Any,
) -> Report | Saving:
    """Saves a torch module's parameters and persistent buffers by name. Extra states (names that end in `_extra_state`)
    are saved if they are tensors. Other extra states are left out, and `Report.left` lists them. Any other entry of the
    state dict that is not a tensor raises NotSupportedError, because it may contain weights, as in torch's quantised
    modules.

    Tied tensors are stored once. A compressed file has all their names. A plain file (compress=False) has only the
    first name, and {dropped name: kept name} in its metadata, like safetensors.torch.save_model.

    Other arguments, the report and errors are those of `save_file`.
    """
    from .save import notes_of, save_file
    from .saving import Report

    check_options("save_model", options, SaveOptions)
    frame_for("torch")
    import torch

    if not isinstance(module, torch.nn.Module):
        _refuse_other(module, "; save_file saves a dict of tensors" if isinstance(module, Mapping) else "")
    tensors, extra = tensors_of_module(module, "save_model")
    compress = options.get("compress", True)
    check_values(wait=wait)
    notes = notes_of(metadata or {})
    notes.setdefault("format", "pt")
    if not compress:
        from ..frameworks.memory import identity_of

        names: dict[Any, str] = {}
        for name in sorted(tensors):
            first = names.setdefault(identity_of(tensors[name]), name)
            if first != name:
                notes.setdefault(name, first)
                del tensors[name]
    report: Report | Saving = save_file(tensors, path, notes, **{"wait": wait, **options})
    if isinstance(report, Report):
        return replace(report, left=tuple(extra))
    report._left = tuple(extra)
    return report


spell_out(save_model, SaveOptions)

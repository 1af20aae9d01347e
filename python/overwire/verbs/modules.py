"""load_model and save_model: load and save the tensors of a torch module, in place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from .._engine import forked
from .._imports import imported
from ..dtypes import torch_shape
from ..errors import ArgumentError, ModelMismatchError, NotSupportedError
from ..frameworks.choose import check_device, frame_for
from ..model.budget import fit
from ..model.loads import many_objects
from ..model.opened import Model, opening, start_engine
from ..model.options import DeviceLike, ModuleOptions, SaveOptions, check_options, check_values, parse_size, spell_out
from ..model.sources import SourceLike, named
from ..progress import watch
from .grouped import group_context
from .into import ALL, Target, fill, in_place, place_target, put, single
from .states import EXTRA, tensors_of_module

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from .saving import Report, Saving

# The most names in each list of an error.
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
    meta device are replaced. Tied tensors are loaded once. If other tensors overlap, the last one in the state dict
    wins. Each rank loads its own part of a DTensor (FSDP2, tensor parallelism). A module's extra state is passed to
    its `set_extra_state` if it is a tensor; otherwise no file has it and it stays unchanged. Other entries of the
    state dict that are not tensors raise NotSupportedError, even with strict=False.

    device: the device to load to; None: the device of each tensor, and the host for
        meta tensors. Tensors on another device are copied to it.

    strict: raise if tensors are missing in the file, or unexpected in it.
    options: those of `ModuleOptions`: progress, mmap, storage_options, lenient, group, shard, as for `load_file`,
        and max_memory. With shard, a tensor of the module has the shape of this rank's block.
    max_memory: the most bytes, on all devices together, for tensors that are not filled in place: copies, and
        tensors that replace meta tensors. With group, if the ranks do not map each other's memory
        (`OVERWIRE_EXCHANGE`), that is all tensors, which are copied window by window.

    Returns (missing, unexpected) names, like safetensors.torch.load_model. Names tied to a loaded one are in neither.

    Raises, before it changes or allocates anything: ModelMismatchError, also for other shapes; NotSupportedError for
    tensors without memory of their own (sparse, nested, FakeTensors, wrappers of other tensors), and if the state dict
    has copies instead of the module's own tensors; ArgumentError for memory that was freed (`sleep`); and
    OutOfMemoryError for max_memory. Also raises the errors of `load_file`. If the load itself fails, the module has a
    mixture of old and new values.

    `load_state_dict` hooks of the module do not run.
    """
    with group_context(options, device):
        check_options("load_model", options, ModuleOptions)
        check_values(strict=strict)
        source = named("load_model", source, filename)
        framework = imported("torch")
        if framework is not None and isinstance(module, framework.nn.Module):
            start_engine(source)
        frame = frame_for("torch")
        place = None if device is None else check_device(device, frame)
        import torch

        if not isinstance(module, torch.nn.Module):
            path = isinstance(module, (str, os.PathLike))
            _refuse_other(module, f"; load_file({os.fsdecode(module)!r}) returns its tensors" if path else "")
        tensors, extra = tensors_of_module(module, "load_model")
        targets = tensors | extra
        unmapped_budget = parse_size(options.get("max_memory"), "max_memory")
        if options.get("group") is not None or options.get("shard") is not None:
            return _load_together(
                module, source, strict, place or single(list(targets.values())), targets, dict(options), unmapped_budget
            )
    device = place or single(list(targets.values()))
    if forked():
        from ..model.forked import ForkedModel

        file_model: Model = ForkedModel(source, device, storage_options=options.get("storage_options"))
    else:
        file_model = Model(source, device=device, **opening(options))
    with many_objects(), file_model as model:
        setters = _extra_states(module)
        missing, surplus, positions = _match_names(module, targets, setters, model, strict)
        into = _targets_of(module, targets, setters, model, positions, lambda at: model.table[at][2])
        fill(
            model, frame, list(into.values()), place, options.get("max_memory"), watch(options.get("progress"), "load")
        )
    return missing, surplus


spell_out(load_model, ModuleOptions)


def _refuse_other(module: Any, advice: str) -> NoReturn:
    """Raises the error that a module was expected, with advice."""
    raise ArgumentError(f"overwire: module: expected a torch.nn.Module, got {type(module).__name__}{advice}")


def _load_together(
    module: Any,
    source: SourceLike,
    strict: bool,
    device: str,
    targets: Mapping[str, Any],
    options: dict[str, Any],
    unmapped_budget: int,
) -> tuple[list[str], list[str]]:
    """`load_model` with a group."""
    from ..distributed.tensors import TensorLoad, open_load

    frame = frame_for("torch")
    into: dict[int, Target] = {}
    places: dict[int, Any] = {}
    late: list[int] = []
    names: tuple[list[str], list[str]] = [], []
    group, max_memory = options.pop("group", None), options.pop("max_memory", None)

    def choose_tensors(load: TensorLoad) -> list[int]:
        setters = _extra_states(module)
        missing, surplus, positions = _match_names(module, targets, setters, load.model, strict, load.slice_shape)
        names[0][:], names[1][:] = missing, surplus
        into.clear()
        into.update(_targets_of(module, targets, setters, load.model, positions, load.slice_shape))
        here, late[:] = in_place(load.model, list(into.values()), device)
        places.clear()
        places.update(here)
        fit(load.model, frame, None, max_memory, [load.slice_size(at) for at in positions.values() if at not in places])
        return list(positions.values())

    tensors: dict[int, Any] = {}
    with (
        many_objects(),
        open_load(
            source,
            group,
            options.pop("shard", None),
            device=device,
            budget=0,
            unmapped_budget=unmapped_budget,
            choose=choose_tensors,
            **options,
        ) as load,
        contextlib.closing(load.iter_tensors(places)) as arriving,
    ):
        for at, tensor in arriving:
            if at in late:
                tensors[at] = tensor
            elif at in into and tensor is not places.get(at):
                put(into[at], tensor)
    for at in late:
        put(into[at], tensors.pop(at))
    return names


def _targets_of(
    module: Any,
    tensors: Mapping[str, Any],
    setters: Mapping[str, Callable[[Any], None]],
    model: Model,
    wanted: Mapping[str, int],
    shape_of: Callable[[int], tuple[int, ...]],
) -> dict[int, Target]:
    """Returns the target of each tensor, by position. Tensors of which this rank has no part are left out."""
    import torch

    from ..frameworks.memory import is_distributed, is_ready, storage_of

    own = {
        id(tensor)
        for part in module.modules()
        for table in (part._parameters, part._buffers)
        for tensor in table.values()
    }
    memory: set[int] = set()
    into: dict[int, Target] = {}
    for name, at in wanted.items():
        tensor, shape = tensors[name], shape_of(at)
        if name not in setters and id(tensor) in own and is_ready(tensor):
            into[at] = Target(at, ALL, shape, tensor)
            continue
        where = f"overwire: load {model.uris[0]} into {type(module).__name__}: {name!r}"
        if name in setters:
            into[at] = Target(at, ALL, shape, torch.empty(0, device="meta"), setters[name])
            continue
        if id(tensor) not in own:
            memory = memory or {storage_of(one) for one in chain(module.parameters(), module.buffers())}
            if storage_of(tensor) not in memory - {0}:
                text = "the state dict has a copy of it instead of the module's own tensor: use load_state_dict"
                raise NotSupportedError(f"{where}: {text}", tensor=name)
        if tensor.device.type == "meta" and not is_distributed(tensor):
            into[at] = Target(at, ALL, shape, tensor, partial(_replace_meta, module, tensor))
        elif target := place_target(Target(at, ALL, shape, tensor), model.row(at), where):
            into[at] = target
    return into


def _extra_states(module: Any) -> dict[str, Callable[[Any], None]]:
    """Returns the function that sets the extra state of each submodule that has one, by name in the state dict."""
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
    shape_of: Callable[[int], tuple[int, ...]] | None = None,
) -> tuple[list[str], list[str], dict[str, int]]:
    """Returns missing and unexpected names, and the position of each tensor to load. shape_of: returns torch's shape
    of the part that is loaded; None: everything."""
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
    if strict and missing:
        problems.append("missing in the file: " + _list_few(list(map(repr, sorted(missing))), ", "))
    if strict and surplus:
        problems.append("unexpected in the file: " + _list_few(list(map(repr, sorted(surplus))), ", "))
    misfits = []
    for name, at in positions.items():
        target, (_, dtype, shape, *_rest) = targets[name], model.table[at]
        if name in setters:
            continue  # of any shape
        if name not in tensors:
            misfits.append(f"{name!r} is not a tensor in the module")
            continue
        if not is_ready(target):
            check_shape(target, f"overwire: load {model.uris[0]} into {type(module).__name__}: {name!r}", name)
        here = tuple(target.shape)
        shape = torch_shape(dtype, shape) if shape_of is None else shape_of(at)
        if here != shape:
            misfits.append(f"{name!r} has shape {here} in the module, {shape} in the file")
    if misfits:
        problems.append(_list_few(misfits, "; "))
    if problems:
        raise ModelMismatchError(
            f"overwire: load {model.uris[0]} into {type(module).__name__}: " + "; ".join(problems),
            source=model.uris[0],
        )
    return missing, surplus, positions


def _list_few(parts: list[str], between: str) -> str:
    """Returns as many parts as fit into a message, and how many more there are."""
    more = f" and {len(parts) - _MOST_NAMES:,} more" if len(parts) > _MOST_NAMES else ""
    return between.join(parts[:_MOST_NAMES]) + more


def _replace_meta(module: Any, target: Any, loaded: Any) -> None:
    # The module was made on the meta device: the loaded tensor replaces the placeholder under
    # all its names.
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
    module: Any,
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    wait: Literal[True] = True,
    **options: Unpack[SaveOptions],
) -> Report: ...


@overload
def save_model(
    module: Any,
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    wait: Literal[False],
    **options: Unpack[SaveOptions],
) -> Saving: ...


def save_model(
    module: Any,
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    wait: bool = True,
    **options: Any,
) -> Report | Saving:
    """Saves a torch module's parameters and persistent buffers by name. Extra states (names that end in
    `_extra_state`) are saved if they are tensors; `Report.left` names the others, which are left out. Any other entry
    of the state dict that is not a tensor raises NotSupportedError, because it may contain weights, as in torch's
    quantised modules.

    Tied tensors are stored once. A compressed file has all their names. A plain file
    (compress=False) has the first name only, and {dropped name: kept name} in its
    metadata, as safetensors.torch.save_model writes it.

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

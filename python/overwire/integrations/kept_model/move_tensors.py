"""Extracts the tensors of a model for a file, and puts the tensors of a file into a model on the meta device.

A model's tensor is a parameter, a buffer or an attribute of a module. It may have several names, and may share the
memory of another tensor. Its class, attributes, strides and shared memory are restored.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..._compat_api import start_thread
from ..._undo import after_error, keep_error
from ..load_plan import copies
from ..load_plan.copies import Copy, Stored, spanned_elements
from .describe_model import Memory
from .keep_files import Refused

# The most extra memory for loading tensors with gaps, in bytes.
_MOST = 1 << 28

#: Maps each name of a tensor to its kind, and to the first name of the tensor, or None if the model's value is None.
Names = dict[str, list[Any]]

#: Maps the first name of each tensor to its class, dtype, shape, stride, device type, position in another tensor, and
#: the names of its attributes. The position is the name of the tensor that owns the memory and the byte offset there,
#: or None if the tensor owns its memory.
Rows = dict[str, list[Any]]


def _parts_of_modules(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, str, str, Any]]:
    # Yields module, name in the module, full name, kind and value of every parameter, buffer and tensor attribute.
    for path, module in model.named_modules():
        at = f"{path}." if path else ""
        for leaf, param in module._parameters.items():
            yield module, leaf, at + leaf, "parameter", param
        for leaf, buffer in module._buffers.items():
            yield module, leaf, at + leaf, "passing" if leaf in module._non_persistent_buffers_set else "buffer", buffer
        for leaf, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield module, leaf, at + leaf, "attribute", value


def take_tensors(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], Rows, Names]:
    """Returns the tensors that own their memory by name, the rows of all tensors, and all names. The returned tensors
    are views, with the dimensions in memory order. Raises Refused if a tensor could not be restored."""
    names: Names = {}
    every: dict[str, torch.Tensor] = {}
    first: dict[int, str] = {}
    for _, _, name, kind, tensor in _parts_of_modules(model):
        names[name] = [kind, None if tensor is None else first.setdefault(id(tensor), name)]
        if tensor is not None:
            every.setdefault(first[id(tensor)], tensor)
    memory = Memory({})
    own: dict[str, torch.Tensor] = {}
    rows: Rows = {}
    with torch._C.DisableTorchFunctionSubclass():  # without this, the engines' parameter classes are slow
        for name in sorted(every, key=lambda name: every[name].nbytes, reverse=True):  # large ones may hold others
            tensor = every[name]
            if (
                tensor.device.type == "meta"
                or tensor.layout is not torch.strided
                or getattr(tensor, "_vllm_is_uva_offloaded", False)
            ):
                raise Refused(f"{name} does not have its own memory on {tensor.device.type}")
            at = memory.find_holder(tensor)
            if at is None:
                memory.add(name, tensor)
                own[name] = _dense_order(tensor.detach())
            rows[name] = [
                f"{type(tensor).__module__}.{type(tensor).__qualname__}", str(tensor.dtype), list(tensor.shape),
                list(tensor.stride()), tensor.device.type, at and list(at), sorted(vars(tensor)),
            ]  # fmt: skip
    return {name: own[name] for name in every if name in own}, rows, names


def _dense_order(tensor: torch.Tensor) -> torch.Tensor:
    # Returns a view with the dimensions in memory order.
    if tensor.is_contiguous():
        return tensor
    steps: list[int] = list(tensor.stride())
    return tensor.permute(sorted(range(tensor.dim()), key=lambda n: -steps[n]))


class Arriving:
    """Loads the tensors that own their memory while an engine builds its model.

    The constructor allocates the memory on the calling thread, so that it comes from the engine's memory pool. Another
    thread opens the file at the same time.
    """

    def __init__(self, path: str, rows: Mapping[str, list[Any]], device: torch.device) -> None:
        """Starts to load. rows: the rows from `take_tensors`. device: the device for tensors that are not on the host.
        Raises Refused if the file contains other tensors, or if a row has an unknown device or dtype. Also raises
        errors of torch and of opening the file. After an error all memory is freed."""
        self._path, self._device = path, device
        self.rows = rows
        #: The tensors by name. They are loaded into this memory.
        self.tensors: dict[str, torch.Tensor] = {}
        self._file: Any = None
        self._job: Any = None
        self._rest: list[Copy] = []
        self._failure = keep_error()  # an error of the opening thread
        self._opening = threading.Thread(target=self._open_file, name="overwire arriving", daemon=True)
        with after_error(self.close):
            start_thread(self._opening.start)
            self.tensors = {name: _empty_tensor(row, device) for name, row in rows.items() if row[5] is None}
            self._opening.join()
            if self._failure.error is not None:
                raise self._failure.error
            # The load begins on this thread, because another thread would often wait for the GIL while the model is
            # built.
            self._begin_loading()

    def _open_file(self) -> None:
        import overwire

        with self._failure:
            self._file = overwire.safe_open(self._path, framework="pt", device=str(self._device))
            names = {name for name, row in self.rows.items() if row[5] is None}
            if absent := names.difference(self._file.offset_keys()):
                raise Refused(f"{self._path} lacks {min(absent)}")

    def _begin_loading(self) -> None:
        from ..._compat_api import table_of

        every = [self._copy_of_row(at, *row) for at, row in enumerate(table_of(self._file))]
        self._job, _, self._rest = copies.begin_landing([one for one in every if one.target.numel()], self._device)

    def _copy_of_row(self, at: int, name: str, dtype: str, shape: tuple[int, ...]) -> Copy:
        from ..._compat_api import torch_dtype

        tensor = self.tensors.get(name)
        if tensor is None:
            raise Refused(f"{self._path} contains {name}, but its record does not")
        target = _dense_order(tensor)
        if tuple(target.shape) != shape:
            raise Refused(f"{name} has the shape {shape} in {self._path}, but a different one in its record")
        if dtype not in copies.PACKED and torch_dtype(dtype) is not tensor.dtype:
            raise Refused(f"{name} is {dtype} in {self._path}, but has a different dtype in its record")
        return copies.whole_copy(Stored(self._file, at, name, dtype, shape), target)

    def finish_loading(self) -> None:
        """Waits until all tensors are loaded. Raises the errors of loading, after freeing all memory."""
        try:
            job, self._job = self._job, None
            if job is not None:
                with job:
                    job.take()
            copies.load_copies(self._rest, _MOST)
        finally:
            self.close()

    def close(self) -> None:
        """Ends the load, closes the file and drops the tensors."""
        if self._opening.ident is not None:  # the thread was started
            self._opening.join()
        job, self._job = self._job, None
        if job is not None:
            job.abandon()
        self.tensors, self._rest, self._failure = {}, [], keep_error()
        file, self._file = self._file, None
        if file is not None:
            file.close()


def put_tensors(
    model: torch.nn.Module, arriving: Arriving, names: Mapping[str, list[Any]], engine: str
) -> dict[str, torch.Tensor]:
    """Puts the tensors of a file, which may still be loading, into a model on the meta device. Returns them under all
    their names. engine: the name of the engine's package. References to the tensors in objects of the engine's classes
    are also replaced.

    Raises Refused if the model has no matching module or attribute.
    """
    rows, tensors = arriving.rows, dict(arriving.tensors)
    modules = dict(model.named_modules())
    for name, row in rows.items():
        if row[5] is not None:
            tensors[name] = _view_of(tensors[row[5][0]], row)
    parts: dict[str, torch.Tensor] = {}
    swaps: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keeps old tensors alive, so ids stay unique
    for name, (kind, first) in names.items():
        module = modules.get(name.rpartition(".")[0])
        if module is None:
            raise Refused(f"the new model has no module for {name}")
        leaf = name.rpartition(".")[2]
        if first is not None and first not in parts:
            homes = (module._parameters, module._buffers, vars(module))
            old = next((home[leaf] for home in homes if home.get(leaf) is not None), None)
            parts[first] = _restore_type(first, tensors[first], rows[first], old)
            if isinstance(old, torch.Tensor):
                swaps[id(old)] = old, parts[first]
        _put_in_module(module, leaf, kind, None if first is None else parts[first])
    for module in modules.values():
        _swap_in_objects(module, swaps, engine + ".", set())
    return {name: parts[first] for name, (_, first) in names.items() if first is not None}


def _swap_in_objects(
    holder: Any, swaps: Mapping[int, tuple[torch.Tensor, torch.Tensor]], engine: str, seen: set[int]
) -> None:
    # Replaces the old tensors in the engine's objects that a module refers to.
    seen.add(id(holder))
    for name, value in list(vars(holder).items()):
        if isinstance(value, torch.Tensor):
            if id(value) in swaps and not isinstance(holder, torch.nn.Module):
                vars(holder)[name] = swaps[id(value)][1]
        elif isinstance(value, torch.nn.Module) or id(value) in seen:
            continue
        elif type(value).__module__.startswith(engine) and isinstance(getattr(value, "__dict__", None), dict):
            _swap_in_objects(value, swaps, engine, seen)


def _dtype_of(row: list[Any]) -> torch.dtype:
    dtype = getattr(torch, str(row[1]).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise Refused(f"torch does not have the dtype {row[1]}")
    return dtype


def _empty_tensor(row: list[Any], device: torch.device) -> torch.Tensor:
    on = torch.device("cpu") if row[4] == "cpu" else device
    if on.type != row[4]:
        raise Refused(f"a tensor was on {row[4]}, but this model loads to {on.type}")
    return torch.empty_strided(row[2], row[3], dtype=_dtype_of(row), device=on)


def _view_of(base: torch.Tensor, row: list[Any]) -> torch.Tensor:
    # Returns a tensor in the memory of another tensor.
    dtype, (name, at) = _dtype_of(row), row[5]
    if at % dtype.itemsize or at + spanned_elements(row[2], row[3]) * dtype.itemsize > base.untyped_storage().nbytes():
        raise Refused(f"a tensor does not fit into {name}")
    out = torch.empty(0, dtype=dtype, device=base.device)
    return out.set_(base.untyped_storage(), at // dtype.itemsize, row[2], row[3])


def _restore_type(name: str, tensor: torch.Tensor, row: list[Any], old: Any) -> torch.Tensor:
    # Restores the class and attributes of a tensor. The values of the attributes come from the model's old tensor of
    # that name.
    kinds = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in (torch.Tensor, torch.nn.Parameter, type(old))}
    kind = kinds.get(row[0])
    if kind is None or not issubclass(kind, torch.Tensor):
        raise Refused(f"{name} is a {type(old).__qualname__} in the new model, but was a {row[0]}")
    # An attribute of the processed tensor may be a property in the class of the new model's tensor.
    attributes = {attribute: getattr(old, attribute) for attribute in row[6] if hasattr(old, attribute)}
    if absent := [attribute for attribute in row[6] if attribute not in attributes]:
        raise Refused(f"{name} has no attribute {absent[0]} in the new model")
    if kind is not torch.Tensor:
        tensor = torch.Tensor._make_subclass(kind, tensor, False)
    vars(tensor).update(attributes)
    return tensor


def _put_in_module(module: torch.nn.Module, leaf: str, kind: str, tensor: torch.Tensor | None) -> None:
    # Puts a tensor into a module as a parameter, buffer or attribute.
    homes = {"parameter": module._parameters, "attribute": vars(module)}
    home: Any = homes.get(kind, module._buffers)
    for other in (module._parameters, module._buffers, vars(module)):
        if other is not home:
            other.pop(leaf, None)
    home[leaf] = tensor
    module._non_persistent_buffers_set.discard(leaf)
    if kind == "passing":
        module._non_persistent_buffers_set.add(leaf)


def match_processed(
    model: torch.nn.Module, names: Mapping[str, list[Any]], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Makes a model equal to the stored model after the engine has processed it again. Removes meta tensors with other
    names, which the first processing had also removed, and restores attributes that the second processing has created
    again.
    tensors: the result of `put_tensors`."""
    modules = dict(model.named_modules())
    for name, (kind, _) in names.items():
        if kind == "attribute":
            path, _, leaf = name.rpartition(".")
            _put_in_module(modules[path], leaf, kind, tensors[name])
    for module, leaf, name, kind, tensor in list(_parts_of_modules(model)):
        if name not in names and kind != "attribute" and (tensor is None or tensor.device.type == "meta"):
            del (module._parameters if kind == "parameter" else module._buffers)[leaf]
            module._non_persistent_buffers_set.discard(leaf)

"""From what was recorded of a model's loader to a plan that can be kept, and back.

A plan is kept if the loader did nothing but copy: no other operation on tensors, no
tensor whose data it was given, and a model that is afterwards as it was before, down to
its lists, sets and attributes. What a loader changes outside the model is not seen.
It is used again for the same key, and only if every place that it loads into is there, as
it was, and every block is inside its tensor and its place.
"""

from __future__ import annotations

import enum
import hashlib
import json
import sys
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from .copies import PACKED, Copy, Stored, block_of, elements, fill
from .plans import WIDTH, Place, Plan, View

__all__ = ["Unfit", "carry_out", "key_of", "plan_of", "state_of"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)


class Unfit(Exception):
    """Why a plan cannot be kept, or used."""


def key_of(model: torch.nn.Module, files: Sequence[tuple[str, Any, Sequence[str]]], facts: Mapping[str, Any]) -> str:
    """The digest of all that a plan depends on.

    files: of each source the prefix of its names, the open file, and the names that the
    model is given. facts: what the engine adds, as JSON has it or as text.
    """
    import overwire

    from ..plumbing import table_of

    said = hashlib.sha256()

    def say(*what: Any) -> None:
        text = json.dumps(what, default=str, sort_keys=True).encode()
        said.update(len(text).to_bytes(8, "little") + text)

    say(1, overwire.__version__, torch.__version__, sys.version, facts)
    for prefix, file, names in files:
        say(prefix, table_of(file), names)
    classes: set[type] = set()
    modules = {__name__, block_of.__module__, "overwire.integrations.plans", "overwire.integrations.recording"}
    for path, module in model.named_modules():
        say(path, type(module).__module__, type(module).__qualname__)
        classes.update(type(module).__mro__)
    for name, tensor in _named(model):
        say(name, str(tensor.dtype), tensor.shape, tensor.stride(), str(tensor.device), type(tensor).__qualname__)
        classes.update(type(tensor).__mro__)
        loader = getattr(tensor, "weight_loader", None)
        while isinstance(loader, partial):
            loader = loader.func
        modules.add(getattr(loader, "__module__", None) or "")
    modules.update(one.__module__ for one in classes)
    for one in sorted(modules | set(facts.get("modules", ()))):
        if one.partition(".")[0] not in ("", "torch", "builtins", "typing"):  # torch has its version
            say(one, _source(one))
    # What another module has put in a class, as plug-ins do.
    for kind in sorted(classes, key=lambda one: (one.__module__, one.__qualname__)):
        if kind.__module__.partition(".")[0] in ("torch", "builtins", "typing"):
            continue
        path = getattr(sys.modules.get(kind.__module__), "__file__", None)
        for name, held in sorted(vars(kind).items()):
            code = getattr(getattr(held, "__func__", held), "__code__", None)
            if code is not None and code.co_filename != path:
                say(kind.__qualname__, name, _code(getattr(held, "__func__", held)))
    return said.hexdigest()


def _code(function: Any) -> str:
    """The digest of a function's code, and of functions that it closes over."""
    said = hashlib.sha256()
    left: list[Any] = [function]
    seen: set[int] = set()
    while left:
        one = left.pop()
        code = one if isinstance(one, CodeType) else getattr(one, "__code__", None)
        if code is None or id(one) in seen:
            continue
        seen.add(id(one))
        said.update(code.co_code + repr((code.co_names, [const for const in code.co_consts if not isinstance(const, CodeType)])).encode())
        left += [const for const in code.co_consts if isinstance(const, CodeType)]
        for cell in getattr(one, "__closure__", None) or ():
            try:
                left.append(cell.cell_contents)
            except ValueError:
                continue
    return said.hexdigest()


def _source(name: str) -> str | None:
    path = getattr(sys.modules.get(name), "__file__", None)
    try:
        with open(path or "", "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return path


def _named(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


class _State:
    # What `state_of` compares. Objects are kept, so that none gets another one's number.

    def __init__(self, facts: list[Any], alive: list[Any]) -> None:
        self._facts, self._alive = facts, alive

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and self._facts == other._facts

    __hash__ = None  # type: ignore[assignment]


def state_of(model: torch.nn.Module) -> _State:
    """Everything that hangs on a model, but the tensors' data: attributes of its modules,
    parameters and of objects of the same packages, and what containers hold."""
    roots = {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch", "transformers", "builtins"}
    roots |= {"vllm", "sglang"}
    facts: list[Any] = []
    alive: list[Any] = []
    seen: set[int] = set()
    left: list[Any] = [model]
    while left:
        value = left.pop()
        if isinstance(value, _PLAIN):
            facts.append(value)
            continue
        facts.append(id(value))
        if id(value) in seen:
            continue
        seen.add(id(value))
        alive.append(value)
        if isinstance(value, torch.Tensor):
            facts += [value.shape, value.stride(), value.dtype, value.device, value.storage_offset()]
            facts.append(value.untyped_storage().data_ptr() if value.device.type != "meta" else 0)
            left.append(vars(value))
        elif isinstance(value, dict):
            facts.append(len(value))
            left += value.keys()
            left += value.values()
        elif isinstance(value, (list, tuple, deque)):
            facts.append(len(value))
            left += value
        elif isinstance(value, (set, frozenset)):
            facts.append(len(value))
            left += sorted(value, key=lambda one: (hash(one), id(one)))
        elif isinstance(value, partial):
            left += [value.func, value.args, value.keywords]
        elif isinstance(value, MethodType):
            left += [value.__self__, value.__func__]
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                try:
                    left.append(cell.cell_contents)
                except ValueError:
                    facts.append("empty")
        elif isinstance(value, torch.nn.Module) or (not isinstance(value, type) and type(value).__module__.partition(".")[0] in roots):
            for slot in getattr(type(value), "__slots__", ()):
                left.append(getattr(value, slot, None) if isinstance(slot, str) and slot != "__dict__" else None)
            left.append(getattr(value, "__dict__", None))
    return _State(facts, alive)


def plan_of(model: torch.nn.Module, files: Sequence[Any], copies: Iterable[Copy], loaded: Iterable[str] | None) -> Plan:
    """A plan of copies out of open files. Raises Unfit if one of them goes elsewhere than
    into a named parameter or buffer of the model."""
    named: dict[int, list[tuple[int, int, int]]] = {}  # by memory: [low, high) in bytes, number
    every = _named(model)
    for number, (_, tensor) in enumerate(every):
        if tensor.device.type == "meta" or not tensor.numel() or not tensor.is_contiguous():
            continue
        low = tensor.storage_offset() * tensor.element_size()
        spans = named.setdefault(tensor.untyped_storage().data_ptr(), [])
        spans.append((int(low), int(low) + tensor.numel() * tensor.element_size(), number))
    for spans in named.values():
        spans.sort()
    at = {id(file): number for number, file in enumerate(files)}
    rows: list[tuple[int, ...]] = []
    views: list[View] = []
    filled: dict[int, int] = {}
    for copy in copies:
        target, size = copy.target, copy.target.element_size()
        low = target.storage_offset() * size
        spans = named.get(target.untyped_storage().data_ptr(), [])
        found = bisect_right(spans, (low, sys.maxsize, 0)) - 1
        last = sum((count - 1) * step for count, step in zip(target.shape, target.stride(), strict=True))
        if found < 0 or low + (last + 1) * size > spans[found][1] or every[spans[found][2]][1].dtype != target.dtype:
            raise Unfit(f"{copy.of.name} goes to no parameter")
        number, begin = spans[found][2], (low - spans[found][0]) // size
        count = elements(target.shape)
        filled[number] = filled.get(number, 0) + count
        if count and copy.of.dtype in PACKED:
            raise Unfit(f"{copy.of.name} has several elements a byte")
        file, where = at[id(copy.of.file)], copy.of.at
        ranges = block_of(copy) if target.is_contiguous() and copy.dtype == target.dtype else None
        if ranges is None:
            views.append(View(file, where, copy.offset, copy.shape, copy.stride, number, begin, tuple(target.stride())))
        else:
            rows.append((number, begin, file, where, *ranges[0], *(ranges[1] if len(ranges) > 1 else (0, -1))))
    # In the order of places, so that it shows at once whether two overlap.
    rows.sort()
    numbers = {number: n for n, number in enumerate(sorted(filled))}
    landings = array("q")
    for number, begin, file, where, *block in rows:
        landings.extend((file, where, *block, numbers[number], begin))
    kept = []
    for number in sorted(filled):
        name, tensor = every[number]
        kept.append(
            Place(
                name, str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()),
                tensor.untyped_storage().nbytes(), filled[number],
            )
        )  # fmt: skip
    return Plan(kept, None if loaded is None else sorted(loaded), landings, [view._replace(place=numbers[view.place]) for view in views])


def carry_out(plan: Plan, model: torch.nn.Module, files: Sequence[Any], device: str, most: int, began: Any) -> int:
    """Loads a model by a plan; returns the number of copies.

    files: those of `key_of`, on the device. most: as for `fill`. began: called when all is checked,
    before anything is loaded.

    Raises Unfit, with nothing changed, if the plan does not fit the model or the files;
    and what loading raises.
    """
    from ..plumbing import land

    tensors = _places(plan, model, device)
    requests, spans = _landings(plan, tensors, files)
    copies = _views(plan, tensors, files, spans)
    _whole(plan, tensors, spans)
    began()
    for file, asked in zip(files, requests, strict=True):
        if asked and not land(file, device, [request for request, _ in asked]):
            fill([_copy(file, request, tensor) for request, tensor in asked], most)
    fill(copies, most)
    return sum(map(len, requests)) + len(copies)


def _places(plan: Plan, model: torch.nn.Module, device: str) -> list[torch.Tensor]:
    # The tensors that are loaded into, each as the plan knows it.
    named = dict(_named(model))
    out = []
    reach = []
    for place in plan.places:
        tensor = named.get(place.name)
        if tensor is None or str(tensor.device) != device or not tensor.is_contiguous():
            raise Unfit(f"{place.name} is not there, or elsewhere")
        now = (str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.untyped_storage().nbytes())
        if now != tuple(place[1:6]):
            raise Unfit(f"{place.name} is not as it was")
        if tensor.is_conj() or tensor.is_neg() or tensor.numel() < 1:
            raise Unfit(f"{place.name} cannot be loaded into")
        reach.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()))
        out.append(tensor)
    reach.sort()
    if any(one[1] > two[0] for one, two in zip(reach, reach[1:], strict=False)):
        raise Unfit("two parameters share memory")
    return out


#: Of each place: first element, end.
_Spans = list[list[tuple[int, int]]]


def _landings(plan: Plan, tensors: list[torch.Tensor], files: Sequence[Any]) -> tuple[list[list[Any]], _Spans]:
    from ..plumbing import table_of, torch_dtype

    facts = [(tensor.data_ptr(), tensor.element_size(), tensor.dtype, tensor) for tensor in tensors]
    tables = [table_of(file) for file in files]
    dtypes = {dtype: torch_dtype(dtype) for table in tables for dtype in {row[1] for row in table}}
    requests: list[list[Any]] = [[] for _ in files]
    spans: _Spans = [[] for _ in tensors]
    columns = [plan.landings[n::WIDTH] for n in range(WIDTH)]
    for number, at, lo0, hi0, lo1, hi1, place, begin in zip(*columns, strict=True):
        if not (0 <= number < len(files) and 0 <= place < len(tensors) and 0 <= at < len(tables[number])):
            raise Unfit("a block of no tensor")
        name, dtype, shape = tables[number][at]
        base, size, wanted, tensor = facts[place]
        if not shape or dtype in PACKED or dtypes[dtype] is not wanted or not 0 <= lo0 < hi0 <= shape[0] or begin < 0:
            raise Unfit(f"{name} does not fit")
        count = hi0 - lo0
        if hi1 == -1 and lo1 == 0:
            for n in shape[1:]:
                count *= n
            whole = count and hi0 - lo0 == shape[0]
            request = (at, base + begin * size, 0 if whole else lo0, -1 if whole else hi0, 0, -1)
        elif len(shape) > 1 and 0 <= lo1 < hi1 <= shape[1]:
            count *= hi1 - lo1
            for n in shape[2:]:
                count *= n
            request = (at, base + begin * size, lo0, hi0, lo1, hi1)
        else:
            raise Unfit(f"columns of {name} do not fit")
        if not count:
            raise Unfit(f"{name} is empty")
        spans[place].append((begin, begin + count))
        requests[number].append((request, (tensor, begin, count)))
    return requests, spans


def _views(plan: Plan, tensors: list[torch.Tensor], files: Sequence[Any], spans: _Spans) -> list[Copy]:
    from ..plumbing import table_of, torch_dtype

    copies = []
    tables = [table_of(file) for file in files]
    for view in plan.views:
        if view.file >= len(files) or view.at >= len(tables[view.file]) or view.place >= len(tensors):
            raise Unfit("a view of no tensor")
        name, dtype, shape = tables[view.file][view.at]
        wanted, tensor = torch_dtype(dtype), tensors[view.place]
        if wanted is None or dtype in PACKED or not len(view.shape) == len(view.stride) == len(view.steps) or not elements(view.shape):
            raise Unfit(f"{name} does not fit")
        last = sum((n - 1) * step for n, step in zip(view.shape, view.stride, strict=True))
        end = view.start + 1 + sum((n - 1) * step for n, step in zip(view.shape, view.steps, strict=True))
        if view.offset + last >= elements(shape) or end > tensor.numel():
            raise Unfit(f"{name} is smaller than its view")
        target = tensor.as_strided(view.shape, view.steps, tensor.storage_offset() + view.start)
        spans[view.place].append((view.start, end))
        of = Stored(files[view.file], view.at, name, dtype, shape)
        copies.append(Copy(of, view.offset, view.shape, view.stride, wanted, target))
    return copies


def _whole(plan: Plan, tensors: list[torch.Tensor], spans: _Spans) -> None:
    # Whether no two copies meet, none leaves its place, and all that was loaded is again.
    loads = [sum(high - low for low, high in ranges) for ranges in spans]
    for view in plan.views:
        reach = 1 + sum((n - 1) * step for n, step in zip(view.shape, view.steps, strict=True))
        loads[view.place] -= reach - elements(view.shape)
    for place, tensor, ranges, count in zip(plan.places, tensors, spans, loads, strict=True):
        ranges.sort()
        if count != place.elements or any(one[1] > two[0] for one, two in zip(ranges, ranges[1:], strict=False)):
            raise Unfit(f"{place.name} is not loaded as it was")
        if not ranges or ranges[-1][1] > tensor.numel():
            raise Unfit(f"{place.name} is smaller than what it gets")


def _copy(file: Any, request: Sequence[int], where: tuple[torch.Tensor, int, int]) -> Copy:
    # A landing as a copy, for files of which a preload is there.
    from ..plumbing import table_of, torch_dtype

    at, _, lo0, hi0, lo1, hi1 = request
    name, dtype, shape = table_of(file)[at]
    rows = (shape[0] if hi0 == -1 else hi0) - lo0
    whole = elements(shape[1:])
    cell = elements(shape[2:])
    sizes = (rows, *shape[1:]) if hi1 == -1 else (rows, hi1 - lo1, *shape[2:])
    stride = [1] * len(shape)
    for n in range(len(shape) - 1, 0, -1):
        stride[n - 1] = stride[n] * shape[n]
    tensor, begin, count = where
    target = tensor.view(-1)[begin : begin + count].view(sizes)
    made = torch_dtype(dtype)
    assert made is not None
    return Copy(Stored(file, at, name, dtype, shape), lo0 * whole + lo1 * cell, tuple(sizes), tuple(stride), made, target)

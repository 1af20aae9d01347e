"""From what was recorded of a model's loader to a plan that can be kept, and back.

A plan is kept if the loader did nothing but copy, set to zero and look up integers of the
model: no other operation on tensors, no tensor whose data it was given, and a model that
is afterwards as it was before, down to its lists, sets and attributes; and if all of its
code is the engine's own (see `origins`). What a loader changes outside the model is not seen.
It is used again for the same key, and only if every place that it loads into is there, as
it was, the integers are the same, and every block is inside its tensor and its place.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from .copies import PACKED, Copy, Stored, block_of, elements, extent, fill, reach
from .origins import Foreign, origins_of
from .plans import WIDTH, Place, Plan, Read, View, Zero
from .recording import Recorder, digest_of
from .sheets import Sheet, code_of

if TYPE_CHECKING:
    from ..plumbing import Blocks, Together

__all__ = ["Ready", "Unfit", "carry_out", "key_of", "plan_of", "ready"]


class Unfit(Exception):
    """Why a plan cannot be kept, or used."""


def key_of(model: torch.nn.Module, files: Sequence[tuple[str, Sheet, list[int] | None]], facts: Mapping[str, Any]) -> str:
    """The digest of all that a plan depends on.

    files: of each source the prefix of its names, the open file, and the positions of the
    tensors that the model is given, None for all. facts: what the engine adds, as JSON has
    it or as text; `engine` is the name of its package, `modules` those of its modules that move
    weights. Raises Unfit where any code of the loader is not the engine's own.
    """
    import overwire

    said = hashlib.sha256()

    def say(*what: Any) -> None:
        text = json.dumps(what, default=str, sort_keys=True).encode()
        said.update(len(text).to_bytes(8, "little") + text)

    say(4, overwire.__version__, torch.__version__, sys.version, facts)
    for prefix, sheet, at in files:
        say(prefix, sheet.digest, at)
    say([(path, type(module).__module__, type(module).__qualname__) for path, module in model.named_modules()])
    say([(name, str(one.dtype), one.shape, one.stride(), str(one.device), type(one).__qualname__) for name, one in _named(model)])
    try:
        say(origins_of(model, facts["engine"], facts["modules"]))
    except Foreign as error:
        raise Unfit(f"its loader has code that is not {facts['engine']}'s own: {error}") from None
    return said.hexdigest()


def _named(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


class _Where:
    # Finds the named parameter or buffer that a view lies in.

    def __init__(self, model: torch.nn.Module) -> None:
        self.every = _named(model)
        self._spans: dict[int, list[tuple[int, int, int]]] = {}  # by memory: [low, high) in bytes, number
        for number, (_, tensor) in enumerate(self.every):
            if tensor.device.type == "meta" or not tensor.numel() or not tensor.is_contiguous():
                continue
            low = int(tensor.storage_offset()) * tensor.element_size()
            spans = self._spans.setdefault(tensor.untyped_storage().data_ptr(), [])
            spans.append((low, low + tensor.numel() * tensor.element_size(), number))
        for spans in self._spans.values():
            spans.sort()

    def __call__(self, target: torch.Tensor, name: str) -> tuple[int, int]:
        # Its number, and the element at which the view begins.
        memory, low, high = reach(target)
        spans = self._spans.get(memory, [])
        found = bisect_right(spans, (low, sys.maxsize, 0)) - 1
        if found < 0 or high > spans[found][1] or self.every[spans[found][2]][1].dtype != target.dtype:
            raise Unfit(f"{name} goes to no parameter")
        return spans[found][2], (low - spans[found][0]) // target.element_size()


def plan_of(model: torch.nn.Module, files: Sequence[Any], copies: Iterable[Copy], loaded: Iterable[str] | None, did: Recorder) -> Plan:
    """A plan of copies out of open files, and of what else a recorder has seen. Raises
    Unfit if one of them goes elsewhere than into a named parameter or buffer of the model."""
    where = _Where(model)
    at = {id(file): number for number, file in enumerate(files)}
    rows: list[tuple[int, ...]] = []
    views: list[View] = []
    filled: dict[int, int] = {}
    for copy in copies:
        target = copy.target
        number, begin = where(target, copy.of.name)
        count = elements(target.shape)
        filled[number] = filled.get(number, 0) + count
        if count and copy.of.dtype in PACKED:
            raise Unfit(f"{copy.of.name} has several elements a byte")
        file = at[id(copy.of.file)]
        ranges = block_of(copy) if target.is_contiguous() and copy.dtype == target.dtype else None
        if ranges is None:
            views.append(View(file, copy.of.at, copy.offset, copy.shape, copy.stride, number, begin, tuple(target.stride())))
        else:
            rows.append((number, begin, file, copy.of.at, *ranges[0], *(ranges[1] if len(ranges) > 1 else (0, -1))))
    zeros = [Zero(*where(zero, "zero"), tuple(zero.shape), tuple(zero.stride())) for zero in did.zeros]
    for zero in zeros:
        filled.setdefault(zero.place, 0)
    # In the order of places, so that it shows at once whether two overlap.
    rows.sort()
    numbers = {number: n for n, number in enumerate(sorted(filled))}
    landings = array("q")
    for number, begin, file, place, *block in rows:
        landings.extend((file, place, *block, numbers[number], begin))
    kept = []
    for number in sorted(filled):
        name, tensor = where.every[number]
        kept.append(
            Place(
                name, str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()),
                tensor.untyped_storage().nbytes(), filled[number],
            )
        )  # fmt: skip
    return Plan(
        kept,
        None if loaded is None else sorted(loaded),
        landings,
        [view._replace(place=numbers[view.place]) for view in views],
        [zero._replace(place=numbers[zero.place]) for zero in zeros],
        _reads(model, did.reads) if did.reads else [],
    )


def _reads(model: torch.nn.Module, reads: Mapping[int, str]) -> list[Read]:
    # The tensors of some memories, by where they hang on the model.
    found: dict[int, Read] = {}
    for path, module in model.named_modules():
        for name, value in _held(module).items():
            inner = {"": value} if isinstance(value, torch.Tensor) else _held(value)
            for last, tensor in inner.items():
                if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                    memory = tensor.untyped_storage().data_ptr()
                    if memory in reads:
                        found[memory] = Read(path, name, last, reads[memory])
    if len(found) < len(reads):
        raise Unfit("its loader reads a tensor that is not the model's")
    return list(found.values())


def _held(value: Any) -> dict[str, Any]:
    # What an object has of its own: no property is asked.
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or isinstance(value, type):
        return {}
    if not isinstance(value, torch.nn.Module):
        return held
    return {**held, **value._parameters, **value._buffers}


class Ready(NamedTuple):
    """A plan that fits a model and open files, with nothing loaded yet."""

    files: Sequence[Sheet]
    device: str
    tensors: list[torch.Tensor]
    blocks: list[_Blocks]
    copies: list[Copy]
    zeros: list[torch.Tensor]

    def offer(self) -> Blocks:
        """For `overwire.plumbing.meet`."""
        from ..plumbing import Blocks

        requests = [block.requests.tobytes() for block in self.blocks]
        return Blocks(self.device, [sheet.file for sheet in self.files], requests, [sheet.digest for sheet in self.files])


def ready(plan: Plan, model: torch.nn.Module, files: Sequence[Sheet], device: str) -> Ready:
    """A plan, checked. files: those of `key_of`.

    Raises Unfit if the plan does not fit the model or the files.
    """
    tensors = _places(plan, model, device)
    blocks, spans = _landings(plan, tensors, files)
    copies, others = _views(plan, tensors, files)
    _whole(plan, tensors, numpy.concatenate([spans, others]), copies)
    zeros = _zeros(plan, tensors)
    for read in plan.reads:
        if _content(model, read) != read.digest:
            raise Unfit(f"{read.module}.{read.name} is not what it was")
    return Ready(files, device, tensors, blocks, copies, zeros)


def carry_out(made: Ready, most: int, together: Together | None, log: Any) -> int:
    """Loads a model by a plan; returns the number of copies.

    most: as for `fill`. together: of the ranks that share the reading; None: this rank reads
    all that it needs. Raises what loading raises.
    """
    from ..plumbing import land

    def beside() -> None:
        with torch.no_grad():
            for zero in made.zeros:
                zero.zero_()
        fill(made.copies, most)

    if together is None or not shared(together, beside, log):
        for sheet, block in zip(made.files, made.blocks, strict=True):
            if len(block.requests) and not land(sheet.file, made.device, block.requests.tobytes()):
                fill(block.copies(sheet, made.tensors), most)
        if together is None:
            beside()
    return sum(len(block.requests) for block in made.blocks) + len(made.copies)


def shared(together: Together, beside: Callable[[], None], log: Any) -> bool:
    """Collective: whether the ranks have landed their blocks together. beside: as for `land`
    of Together. One line of the log says what was read, or why each rank has to by itself."""
    reason = together.land(beside)
    if reason:
        log.info("overwire: each rank reads by itself: %s", reason)
        return False
    log.info("overwire: the ranks share the reading: %d bytes read here, %d copied from others", together.read, together.copied)
    return True


def _places(plan: Plan, model: torch.nn.Module, device: str) -> list[torch.Tensor]:
    # The tensors that are loaded into, each as the plan knows it.
    named = dict(_named(model))
    out = []
    held = []
    for place in plan.places:
        tensor = named.get(place.name)
        if tensor is None or str(tensor.device) != device or not tensor.is_contiguous():
            raise Unfit(f"{place.name} is not there, or elsewhere")
        now = (str(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.untyped_storage().nbytes())
        if now != tuple(place[1:6]):
            raise Unfit(f"{place.name} is not as it was")
        if tensor.is_conj() or tensor.is_neg() or tensor.numel() < 1:
            raise Unfit(f"{place.name} cannot be loaded into")
        held.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()))
        out.append(tensor)
    held.sort()
    if any(one[1] > two[0] for one, two in zip(held, held[1:], strict=False)):
        raise Unfit("two parameters share memory")
    return out


class _Blocks(NamedTuple):
    # Of one file: what `land` is asked for, six integers a row, and of each where it goes:
    # place, first element, elements.
    requests: Any
    spans: Any

    def copies(self, sheet: Sheet, tensors: list[torch.Tensor]) -> list[Copy]:
        # For files of which a preload is there.
        rows = zip(self.requests.tolist(), self.spans.tolist(), strict=True)
        return [_copy(sheet, request, (tensors[place], begin, count)) for request, (place, begin, count) in rows]


def _among(numbers: Any, count: Any) -> Any:
    return (numbers >= 0) & (numbers < count)


def _landings(plan: Plan, tensors: list[torch.Tensor], files: Sequence[Sheet]) -> tuple[list[_Blocks], Any]:
    # By columns: a plan has blocks by the ten thousand. What overflows does not fit.
    number, at, lo0, hi0, lo1, hi1, place, begin = numpy.frombuffer(plan.landings, numpy.int64).reshape(-1, WIDTH).T
    counts = numpy.array([len(sheet.rows) for sheet in files], numpy.int64)
    if not (_among(number, len(files)) & _among(place, len(tensors))).all() or not _among(at, counts[number]).all():
        raise Unfit("a block of no tensor")
    facts = numpy.concatenate([sheet.columns for sheet in files])[(counts.cumsum() - counts)[number] + at]
    kind, dims, rows, cols, cells = facts.T
    of = [(code_of(one.dtype), one.numel(), one.data_ptr(), one.element_size()) for one in tensors]
    wanted, elements_of, base, size = numpy.array(of, numpy.int64).reshape(-1, 4)[place].T
    full = (hi1 == -1) & (lo1 == 0)
    fits = (kind == wanted) & (lo0 >= 0) & (lo0 < hi0) & (hi0 <= rows) & (begin >= 0) & (begin < elements_of)
    fits &= full | ((dims > 1) & (lo1 >= 0) & (lo1 < hi1) & (hi1 <= cols))
    count = (hi0 - lo0) * numpy.where(full, cols, hi1 - lo1) * cells
    fits &= (count > 0) & (count <= elements_of) & (base != 0)
    if not fits.all():
        bad = int((~fits).argmax())
        raise Unfit(f"{files[number[bad]].rows[at[bad]][0]} does not fit")
    whole = full & (hi0 - lo0 == rows)
    requests = numpy.stack([at, base + begin * size, lo0, numpy.where(whole, -1, hi0), lo1, hi1], 1)
    spans = numpy.stack([place, begin, count], 1)
    return [_Blocks(requests[number == n], spans[number == n]) for n in range(len(files))], spans


def _views(plan: Plan, tensors: list[torch.Tensor], files: Sequence[Sheet]) -> tuple[list[Copy], Any]:
    # The copies, and as those of blocks where each goes.
    from ..plumbing import torch_dtype

    copies: list[Copy] = []
    spans: list[tuple[int, int, int]] = []
    for view in plan.views:
        if view.file >= len(files) or view.at >= len(files[view.file].rows) or view.place >= len(tensors):
            raise Unfit("a view of no tensor")
        name, dtype, shape = files[view.file].rows[view.at]
        wanted, tensor = torch_dtype(dtype), tensors[view.place]
        if wanted is None or dtype in PACKED or len(view.shape) != len(view.stride):
            raise Unfit(f"{name} does not fit")
        target = _part(tensor, view, name)
        if view.offset + extent(view.shape, view.stride) > elements(shape):
            raise Unfit(f"{name} is smaller than its view")
        spans.append((view.place, view.start, extent(view.shape, view.steps)))
        of = Stored(files[view.file].file, view.at, name, dtype, shape)
        copies.append(Copy(of, view.offset, view.shape, view.stride, wanted, target))
    return copies, numpy.array(spans, numpy.int64).reshape(-1, 3)


def _zeros(plan: Plan, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    if any(zero.place >= len(tensors) for zero in plan.zeros):
        raise Unfit("a zero of no tensor")
    return [_part(tensors[zero.place], zero, "a zero") for zero in plan.zeros]


def _part(tensor: torch.Tensor, of: View | Zero, name: str) -> torch.Tensor:
    # What a plan says of a place.
    if len(of.shape) != len(of.steps) or not elements(of.shape) or of.start + extent(of.shape, of.steps) > tensor.numel():
        raise Unfit(f"{name} does not fit into its place")
    return tensor.as_strided(of.shape, of.steps, tensor.storage_offset() + of.start)


def _content(model: torch.nn.Module, read: Read) -> str | None:
    modules = dict(model.named_modules())
    found: Any = _held(modules.get(read.module)).get(read.name)
    if read.inner:
        found = _held(found).get(read.inner)
    return digest_of(found) if isinstance(found, torch.Tensor) else None


def _whole(plan: Plan, tensors: list[torch.Tensor], spans: Any, copies: Sequence[Copy]) -> None:
    # Whether no two copies meet, none leaves its place, and all that was loaded is again.
    # The last spans are those of views, which may leave elements out.
    loads = numpy.zeros(len(tensors), numpy.int64)
    sizes = spans[:, 2].copy()
    sizes[len(sizes) - len(copies) :] = [elements(copy.shape) for copy in copies]
    numpy.add.at(loads, spans[:, 0], sizes)
    place, begin, count = spans[numpy.lexsort((spans[:, 1], spans[:, 0]))].T
    wrong = loads != numpy.array([one.elements for one in plan.places], numpy.int64)
    wrong[place[1:][(place[1:] == place[:-1]) & (begin[:-1] + count[:-1] > begin[1:])]] = True
    wrong[place[begin + count > numpy.array([one.numel() for one in tensors], numpy.int64)[place]]] = True
    if wrong.any():
        raise Unfit(f"{plan.places[int(wrong.argmax())].name} is not loaded as it was")


def _copy(sheet: Sheet, request: Sequence[int], where: tuple[torch.Tensor, int, int]) -> Copy:
    # A landing as a copy.
    from ..plumbing import torch_dtype

    at, _, lo0, hi0, lo1, hi1 = request
    name, dtype, shape = sheet.rows[at]
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
    return Copy(Stored(sheet.file, at, name, dtype, shape), lo0 * whole + lo1 * cell, tuple(sizes), tuple(stride), made, target)

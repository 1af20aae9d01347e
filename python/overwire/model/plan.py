"""Provides `plan`, which computes the memory that a load takes, without loading anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..progress import spell_count
from .budget import estimate
from .opened import Model, check_target, opening
from .options import DeviceLike, FrameworkName, PlanOptions, check_options, parse_size, spell_out
from .sourcelike import SourceLike
from .starting import check_source, start_engine

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor that would be loaded.

    dtype, shape: as in the file.
    nbytes: bytes in memory, after a cast.
    stored: bytes in the file.
    file: the file that contains the tensor.
    """

    __module__ = "overwire"

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stored: int
    file: str


@dataclass(frozen=True)
class PlannedFile:
    """One file that would be read.

    tensors: the number of its selected tensors. nbytes: their bytes in memory. stored: their bytes in the file.
    size: the size of the whole file.
    """

    __module__ = "overwire"

    file: str
    tensors: int
    nbytes: int
    stored: int
    size: int


@dataclass(frozen=True)
class PlannedTier:
    """One place for a model's weights.

    where: "resident" for weights that are not compressed, or the argument `where` of `offload`.
    device, host: bytes of device and host memory that the weights need.
    cost: the cost of a pass through the model, in words.
    group: what `offload(group=)` changes if several GPUs of a host run the model, in words: each of N ranks needs 1/N
        of `host`. Empty if a group cannot share the weights.
    """

    __module__ = "overwire"

    where: str
    device: int
    host: int
    cost: str
    group: str = ""


@dataclass(frozen=True)
class PlannedOffload:
    """The memory that `offload` would use for a model, in bytes.

    rest: weights outside the blocks. They stay on the device.
    kept: blocks that stay on the device.
    streamed: blocks that are streamed. stored: the most memory that they take, on the host, or on the device with
        where="device".
    ring: device memory for streaming from the host, with two slots.
    blocks: names of the streamed blocks, in the order of the file.
    """

    __module__ = "overwire"

    rest: int
    kept: int
    streamed: int
    stored: int
    ring: int
    blocks: tuple[str, ...]

    @property
    def device(self) -> int:
        """Bytes of device memory for the weights, including the ring."""
        return self.rest + self.kept + self.ring


@dataclass(frozen=True)
class LoadPlan:
    """The result of `plan`: bytes by tensor and by file.

    nbytes: bytes of all tensors after loading.
    peak: the most bytes that tensors take at any time; more than nbytes if `dtype=` casts.
    stored: bytes that are read or mapped.
    staging: bytes of device memory for stored bytes while the tensors load, in addition to the tensors. A GPU with a
        coherent link (see `doctor`) needs none, but `plan` does not check that.
    pinned: bytes of pinned host memory for a load to a GPU.
    offload: a `PlannedOffload` if keep= was passed, otherwise None.
    tiers: a `PlannedTier` for each place where the weights can be, the fastest first. If the tensor names do not show
        the model's blocks, there is only "resident".

    Files without selected tensors are not listed.
    """

    __module__ = "overwire"

    tensors: tuple[PlannedTensor, ...]
    files: tuple[PlannedFile, ...]
    nbytes: int
    peak: int
    stored: int
    staging: int = 0
    pinned: int = 0
    offload: PlannedOffload | None = None
    tiers: tuple[PlannedTier, ...] = ()

    def tier_for(self, room: int | str) -> PlannedTier | None:
        """Returns the fastest tier that needs at most `room` bytes of device memory ("24GB", int), or None. Leave
        memory for activations and caches."""
        size = parse_size(room, "room")
        return next((tier for tier in self.tiers if tier.device <= size), None)

    def __repr__(self) -> str:
        text = f"LoadPlan({spell_count(len(self.tensors), 'tensor')} of {spell_count(len(self.files), 'file')}"
        text += "".join(f", {name}={getattr(self, name)}" for name in ("nbytes", "peak", "stored", "staging", "pinned"))
        if (one := self.offload) is not None:
            text += f"; offload: {spell_count(len(one.blocks), 'block')} of {one.streamed} bytes streamed, "
            text += f"{one.device} bytes on the device"
        text += "".join(f"; {one.where}: {one.device} + {one.host} bytes" for one in self.tiers[1:])
        return text + ")"

    def _repr_html_(self) -> str:
        from .. import _notebook as html

        head = ("file", "tensors", "in memory", "read or mapped", "size of the file")
        lines = ((f.file, f"{f.tensors:,}", *map(html.size, (f.nbytes, f.stored, f.size))) for f in self.files)
        files = html.table("Files", head, lines, len(self.files))
        rows = ((t.name, t.dtype, t.shape, t.nbytes, t.stored) for t in html.largest(self.tensors, lambda t: t.nbytes))
        tensors = html.tensors("the largest first", rows, len(self.tensors), folded=True)
        sizes = {"in memory": self.nbytes, "peak": self.peak, "read or mapped": self.stored}
        sizes |= {name: size for name, size in (("slots", self.staging), ("pinned", self.pinned)) if size}
        return html.block("LoadPlan", [(name, html.size(size)) for name, size in sizes.items()], files, tensors)


def plan(
    source: SourceLike,
    device: DeviceLike = "cpu",
    *,
    framework: FrameworkName | None = None,
    keep: int | str | None = None,
    **options: Unpack[PlanOptions],
) -> LoadPlan:
    """Describes the load that `load_file` with the same arguments would run. Reads only headers.

    keep: device memory for blocks, as for `offload` ("8GB", int; 0 for none). The plan then includes the blocks that
        `offload` would keep and stream, if the tensor names show the model's blocks.

    Returns a `LoadPlan`. Allocates nothing, reads no tensor bytes, and does not use a GPU. Raises
    the errors of opening a model, as `load_file` does.
    """
    check_options("plan", options, PlanOptions)
    size = None if keep is None else parse_size(None if keep == 0 else keep, "keep")
    check_source(source)
    start_engine(framework)
    target = check_target(framework, device, options)
    with Model(source, device=target.device, **opening(options)) as model:
        rows = [model.row(at) for at in (range(len(model.table)) if model.chosen is None else model.chosen)]
        load = estimate(model, target.frame, target.dtype, keep=size or 0)
        info = model.info()
    tensors = []
    count, nbytes, stored_sizes = [[0] * len(info) for _ in range(3)]
    for row, size in zip(rows, load["bytes"], strict=True):
        uri = info[row.source]["uri"]
        tensors.append(PlannedTensor(row.name, row.dtype, row.shape, size, row.stored, uri))
        count[row.source] += 1
        nbytes[row.source] += size
        stored_sizes[row.source] += row.stored
    sizes = zip(count, nbytes, stored_sizes, strict=True)
    files = tuple(PlannedFile(part["uri"], *own, part["size"]) for part, own in zip(info, sizes, strict=True) if own[0])
    offload = None
    if keep is not None and (plans := load.get("offload")):
        offload = PlannedOffload(
            plans["rest"], plans["kept"], plans["streamed"], plans["stored"], plans["ring"], tuple(plans["blocks"])
        )
    tiers = tuple(PlannedTier(**tier) for tier in load.get("tiers", ()))
    sums = sum(load["bytes"]), load["peak"], sum(stored_sizes), load["staging"], load["pinned"]
    return LoadPlan(tuple(tensors), files, *sums, offload, tiers)


spell_out(plan, PlanOptions)

"""plan: what a load would take, before it takes anything; memory budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..dtypes import BITS, FLOATS
from ..errors import OutOfMemoryError
from ..frameworks.choose import check_device, check_dtype, frame_for
from ..frameworks.frame import Frame
from .opened import Model, Row, opening
from .options import DeviceLike, FrameworkName, PlanOptions, check_options, parse_size
from .sources import SourceLike

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LoadPlan", "PlannedFile", "PlannedTensor", "fit", "held", "plan"]


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor that would be loaded.

    dtype and shape are the file's; nbytes: bytes in memory, after a cast;
    stored: bytes in the file; file: where it is.
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
    """One file that would be read: its wanted tensors, their bytes in memory
    and in the file, and the size of the file."""

    __module__ = "overwire"

    file: str
    tensors: int
    nbytes: int
    stored: int
    size: int


@dataclass(frozen=True)
class LoadPlan:
    """What `plan` returns: bytes by tensor and by file.

    nbytes: of all tensors once they are loaded. peak: the most that tensors
    hold at any moment, which is more where `dtype=` casts. stored: bytes that
    are read or mapped. Files without a wanted tensor are not listed.
    """

    __module__ = "overwire"

    tensors: tuple[PlannedTensor, ...]
    files: tuple[PlannedFile, ...]
    nbytes: int
    peak: int
    stored: int

    def __repr__(self) -> str:
        return (
            f"LoadPlan({len(self.tensors)} tensors of {len(self.files)} files, "
            f"nbytes={self.nbytes}, peak={self.peak}, stored={self.stored})"
        )


def _sizes(rows: list[Row], frame: Frame, wanted: Any) -> tuple[list[int], int]:
    """Bytes of each tensor when all is done, and the peak on the way there."""
    final = []
    peak = running = sum(row.nbytes for row in rows)
    for row in rows:
        cast = row.nbytes
        if row.dtype == "F4" and frame.name == "numpy":
            cast = row.nbytes * 2  # it unpacks them
        elif wanted is not None and row.dtype in FLOATS:
            cast = row.nbytes * 8 // BITS[row.dtype] * wanted.itemsize
        if cast != row.nbytes:  # one at a time, the old one goes after it
            peak = max(peak, running + cast)
            running += cast - row.nbytes
        final.append(cast)
    return final, peak


def held(model: Model, chosen: list[int], frame: Frame, wanted: Any) -> list[int]:
    """The most bytes that each of these takes until it is returned: a cast on the host
    has both dtypes for a moment."""
    landing, _ = model.casting([model.table[at] for at in chosen], wanted)
    return [_sizes([Row(*row)], frame, wanted)[1] for row in landing]


def _rows(model: Model) -> list[Row]:
    return [model.row(at) for at in (range(len(model.table)) if model.chosen is None else model.chosen)]


def fit(model: Model, frame: Frame, wanted: Any, max_memory: int | str | None, rows: list[Row] | None = None) -> None:
    """Raises OutOfMemoryError where a load would take more than the budget.
    rows: what is loaded of the model, None for what it has chosen."""
    if max_memory is None:
        return
    budget = parse_size(max_memory, "max_memory")
    rows = _rows(model) if rows is None else rows
    if not rows:
        return
    final, peak = _sizes(rows, frame, wanted)
    if peak <= budget:
        return
    largest = max(range(len(rows)), key=lambda at: final[at])
    raise OutOfMemoryError(
        f"overwire: load {model.uris[0]}: {len(rows)} tensors take {peak} bytes on {model.device}, {peak - budget} over "
        f"max_memory of {budget}; the largest is {rows[largest].name!r} with {final[largest]}. "
        "Ask for less with keys= or filter=, or use stream(max_memory=)",
        source=model.uris[0],
        tensor=rows[largest].name,
    )


def plan(
    source: SourceLike, device: DeviceLike = "cpu", *, framework: FrameworkName | None = None, **options: Unpack[PlanOptions]
) -> LoadPlan:
    """What `load_file` with the same arguments would load, by headers alone.

    Returns a `LoadPlan`. Allocates nothing and reads no tensor byte; a GPU is
    not touched. Raises what the opening of `load_file` raises.
    """
    check_options("plan", options, PlanOptions)
    frame = frame_for(framework)
    where = check_device(device, frame)
    wanted = check_dtype(frame, options.get("dtype"))
    with Model(source, device=where, **opening(options)) as model:
        rows = _rows(model)
        final, peak = _sizes(rows, frame, wanted)
        info = model.info()
    uris = [part["uri"] for part in info]
    tensors = tuple(
        PlannedTensor(row.name, row.dtype, row.shape, size, row.stored, uris[row.source]) for row, size in zip(rows, final, strict=True)
    )
    count, nbytes, stored = [[0] * len(info) for _ in range(3)]
    for row, size in zip(rows, final, strict=True):
        count[row.source] += 1
        nbytes[row.source] += size
        stored[row.source] += row.stored
    files = tuple(
        PlannedFile(uris[at], count[at], nbytes[at], stored[at], part["size"]) for at, part in enumerate(info) if count[at]
    )
    return LoadPlan(tensors, files, sum(final), peak, sum(stored))

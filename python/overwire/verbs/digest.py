"""Computes 128-bit digests of tensors on their devices, and compares models with files by these digests."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, overload

from .. import _verbs
from .._imports import imported
from ..errors import ArgumentError, NotSupportedError, name_tensor
from ..frameworks.choose import columns_of, frame_of
from ..frameworks.frame import ODD
from ..frameworks.spec import TensorSpec
from ..frameworks.views import View
from ..gpu import current_stream
from ..jobs import Job, time_limit
from ..progress import Watcher
from .states import tensors_of

if TYPE_CHECKING:
    import torch

    from .._requests import DigestsRequest, FilesRequest


@overload
def digest(tensors: Mapping[str, Any] | torch.nn.Module, *, timeout: float | None = None) -> dict[str, str]: ...
@overload
def digest(tensors: Any, *, timeout: float | None = None) -> str: ...
def digest(tensors: Any, *, timeout: float | None = None) -> str | dict[str, str]:
    """Computes the digests of tensors in memory. A digest is 128 bits, computed from a tensor's bytes, as 32 hex
    digits.

    tensors: a torch tensor, numpy array or `TensorSpec`; a dict of them; or a torch module, for its parameters and
        persistent buffers by name. Tensors may be on the host and on GPUs. A strided tensor has the digest of the
        contiguous tensor, and is not copied. Tied tensors are read once.
    timeout: seconds after which DeadlineError is raised, or None for no limit.

    Equal bytes have equal digests, on the CPU and on every GPU, whatever the dtype and shape. For a file, `overwire
    inspect --digests FILE` prints the digests. The chance of missing an accidental change is about 2^-128, but the
    digest is not cryptographic, so it does not detect deliberate changes (docs/format.md defines it).

    Each GPU reads its tensors at the speed of its memory, after the work queued on torch's current stream there.
    The call waits for the result. Do not change the tensors before it returns.

    Returns the digest, or {name: digest}. Raises ArgumentError, DeviceError, and NotSupportedError for tensors that are
    more than their bytes (sparse, quantised), for tensors on other devices, and while the current stream is being
    captured into a CUDA graph.
    """
    end = time_limit(timeout)
    tensors_by_name = _tensors_of_names(tensors)
    if tensors_by_name is None:
        return _digests_of([tensors], end=end)[0]
    return dict(zip(tensors_by_name, _digests_of(list(tensors_by_name.values()), tensors_by_name, end), strict=True))


class Comparison(TypedDict):
    """The result of `verify` for a file and tensors in memory.

    differ: names of tensors that differ from the file in bytes, dtype or shape.
    missing: names in the file that the model lacks.
    surplus: names in the model that the file lacks, except names that are tied to a name in the file.
    tensors: the number of compared tensors. kept: the number of tensors that were compared by a digest in the file.
    bytes: the bytes that were decoded to compare the other tensors. on_gpu: the part of these bytes that GPUs decoded.
    """

    ok: bool
    differ: list[str]
    missing: list[str]
    surplus: list[str]
    tensors: int
    kept: int
    bytes: int
    on_gpu: int
    seconds: float


Comparison.__module__ = "overwire"  # where users find it


def compare(tensors: Any, request: FilesRequest, watcher: Watcher | None) -> Comparison:
    """Compares a model in memory with files by digests. Returns the result of `verify(tensors=)`."""
    start = time.monotonic()
    tensors_by_name = _tensors_of_names(tensors)
    if tensors_by_name is None:
        text = f"overwire: verify: tensors: expected a dict of tensors or a torch module, got {type(tensors).__name__}"
        raise ArgumentError(text)
    views = {name: _view_of(tensor, name) for name, tensor in tensors_by_name.items()}
    here = dict(zip(tensors_by_name, _digests_of(list(tensors_by_name.values()), tensors_by_name), strict=True))
    on = {name: view.cuda - 1 for name, view in views.items() if view.cuda}
    digests_request: DigestsRequest = {**request, "on": on}
    with Job(_verbs.digests(digests_request), "digests", watcher) as job:
        report = job.finish()
    file = {row["name"]: row for row in report["tensors"]}
    there = {_identity_of(views[name]) for name in views if name in file}
    differ = [name for name, row in file.items() if name in views and not _is_same(views[name], here[name], row)]
    missing = [name for name in file if name not in views]
    others = {name: view for name, view in views.items() if name not in file}
    surplus = [name for name, view in others.items() if not view.pointer or _identity_of(view) not in there]
    return {
        "ok": not (differ or missing or surplus),
        "differ": differ,
        "missing": missing,
        "surplus": surplus,
        "tensors": len(file) - len(missing),
        "kept": report["kept"],
        "bytes": report["bytes"],
        "on_gpu": report["on_gpu"],
        "seconds": time.monotonic() - start,
    }


def _is_same(view: View, digest: str, row: Mapping[str, Any]) -> bool:
    shape = tuple(row["shape"])
    return digest == row["digest"] and view.shape == shape and view.dtype in ("", row["dtype"])


def _tensors_of_names(tensors: Any) -> dict[str, Any] | None:
    """Returns tensors by name, or None for a single tensor."""
    torch = imported("torch")
    if isinstance(tensors, Mapping) or (torch is not None and isinstance(tensors, torch.nn.Module)):
        return tensors_of(tensors, "tensors")
    return None


def _view_of(tensor: Any, name: str | None = None) -> View:
    try:
        if isinstance(tensor, TensorSpec):
            spec = tensor.describe()
            return View(spec.dtype, spec.shape, spec.pointer, 1, (spec.nbytes,), (1,), spec.keep)
        return frame_of(tensor).view(tensor)
    except (ArgumentError, NotSupportedError) as error:
        if name is not None:
            name_tensor(error, name)
        raise


def _identity_of(view: View) -> tuple[int, tuple[int, ...], tuple[int, ...], int, int]:
    return view.item, view.dims, view.strides, view.pointer, view.cuda


class _OfDevice:
    # The positions of the tensors of one device, contiguous tensors first.
    def __init__(self) -> None:
        self.dense: list[int] = []
        self.pointers: list[int] = []
        self.sizes: list[int] = []
        self.others: dict[Any, list[int]] = {}  # by identity


def _digests_of(
    tensors: Sequence[Any], names: Iterable[str] | None = None, end: float | None = None, *, keyed: bool = False
) -> list[str]:
    """Returns the digest of each tensor, with one call per device. Identical tensors are read once. keyed: digests with
    a secret key of this process."""
    columns = columns_of(tensors)
    devices: dict[int, _OfDevice] = {}
    keep = []  # temporary tensors, which must stay alive
    if ODD in columns.kinds or len(set(columns.cuda)) > 1:
        labels: list[str | None] = [*names] if names is not None else [None] * len(tensors)
        rows = zip(columns.kinds, columns.pointers, columns.sizes, columns.cuda, strict=True)
        for at, (kind, pointer, size, cuda) in enumerate(rows):
            if kind == ODD:
                view = _view_of(tensors[at], labels[at])
                keep.append(view)
                devices.setdefault(view.cuda, _OfDevice()).others.setdefault(_identity_of(view), []).append(at)
                continue
            group = devices.setdefault(cuda, _OfDevice())
            group.dense.append(at)
            group.pointers.append(pointer)
            group.sizes.append(size)
    elif tensors:
        one = devices[columns.cuda[0]] = _OfDevice()
        one.dense, one.pointers, one.sizes = list(range(len(tensors))), columns.pointers, columns.sizes
    digests = [""] * len(tensors)
    for cuda, group in devices.items():
        numbers = array("q", group.pointers)
        numbers.extend(group.sizes)
        for item, dims, strides, pointer, _ in group.others:
            numbers.extend((pointer, item, len(dims), *dims, *strides))
        stream = current_stream(cuda - 1) if cuda else 0
        job = _verbs.digest(cuda - 1, stream, keyed, len(group.dense), numbers.tobytes())
        with Job(job, "digest", None, end) as running:
            digits = running.result()[1].hex()
        for row, ats in enumerate([*([at] for at in group.dense), *group.others.values()]):
            for at in ats:
                digests[at] = digits[32 * row : 32 * row + 32]
    return digests

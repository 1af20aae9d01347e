"""Loads new weights directly into the parameters of a running model, by slices.

One run on stand-ins shows where a model's own loader copies tensors. The recorded copies are kept for later updates.
They are valid only while the parameters contain exactly the bytes that the loader copied. The caller must use this
module only for such models.

A delta is checked by digests of whole tensors. If a rank has only a slice of a tensor, it gathers the slices of all
ranks in an extra tensor, checks and changes the extra tensor, and copies its slice back. Each rank thus checks the
whole tensor.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..._compat_api import apply_part
from ..._undo import after_error, keep_error
from . import copies
from .copies import Copy, Stored, block_of, view_in_shape
from .record_copies import Opened, Recorder, iter_stand_ins, open_source


class Incomplete(ValueError):
    """Raised if a push lacks weights of the model. Nothing was changed."""


def reason_against(kind: object, path: object) -> str:
    """Returns the reasons why the info of a push is invalid, or "" if it is valid."""
    reasons = []
    if kind not in ("whole", "delta"):
        reasons.append(f"kind must be 'whole' or 'delta', got {str(kind)[:80]!r}")
    if path is not None and not isinstance(path, str):  # a number would mean a file descriptor of this process
        reasons.append(f"path must be text, got {str(path)[:80]!r}")
    return "; ".join(reasons)


class _SliceView(NamedTuple):
    # A slice of a tensor, as a view. Offset and stride count elements.
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Ready(NamedTuple):
    # A delta and its targets. into: the targets of tensors that are whole on this rank. again: further targets, each
    # with the name of its tensor in `into`. slices: this rank's slices of divided tensors.
    delta: Any
    into: dict[str, torch.Tensor]
    again: list[tuple[torch.Tensor, str]]
    slices: dict[str, list[Copy]]


class Places:
    """Loads pushes into the parameters to which a model's loader copies their tensors.

    load: the model's own loader. It may raise `Incomplete` at the end. device: the device of the parameters.
    most: as for `load_copies`. group: the process group of the ranks that divide tensors, or None for one rank.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
        device: str,
        most: int,
        group: Any = None,
    ) -> None:
        self._model, self._load, self._device, self._most, self._group = model, load, device, most, group
        self._key: Any = None
        self._copies: list[Copy] = []

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of the model gets None, and creates its own object later

    def load_whole(self, where: Any, storage_options: Mapping[str, Any] | None, log: Any) -> bool:
        """Loads all tensors of a file that the model uses.

        If the model cannot be loaded by slices, logs the reason and returns False. In this case only small parameters
        may have changed. Raises `Incomplete` and the errors of loading. After an error, the parameters may have a mix
        of old and new values.
        """
        with contextlib.ExitStack() as files:
            source = open_source(files, where, self._device, {"storage_options": storage_options})
            try:
                all_copies = self._record_copies(source)
            except Incomplete:
                raise
            except Exception as error:
                log.info("overwire: updates tensor by tensor, because the model cannot be loaded by slices: %s", error)
                return False
            copies.load_copies(all_copies, self._most)
        return True

    def apply_delta(self, where: Any, storage_options: Any) -> None:
        """Applies a delta to the parameters on all ranks of the group, or on none.

        These errors are raised on all ranks, and leave all weights unchanged: DeltaBaseError if the parameters are not
        the delta's base, ValueError if the model cannot be loaded by slices, `Incomplete`, and the errors of
        `overwire.open_delta`. If an error of `overwire.apply_delta` occurs later, each whole tensor is either old or
        new, and the same on all ranks.
        """
        ready: list[_Ready] = []

        def describe_slices() -> dict[str, list[_SliceView]]:
            ready.append(self._prepare_delta(where, storage_options))
            apply_part(ready[0].into, [ready[0].delta], "check")
            return {
                name: [_SliceView(one.offset, one.shape, one.stride) for one in views]
                for name, views in ready[0].slices.items()
            }

        with self._ranks_of_group() as members:
            everyone = members.gather_results(describe_slices)
            if any(views.keys() != everyone[0].keys() for views in everyone):
                text = "overwire: cannot apply the delta: the ranks do not divide the same tensors: push all weights"
                members.raise_alike(ValueError(text))
            one = ready[0]
            batches, whole = self._batch_names(one), {}
            for names in batches:
                whole = self._gather_tensors(members, one, names, everyone)
                _do_on_all_ranks(members, functools.partial(apply_part, whole, [one.delta], "check"))
            self._change_tensors(members, one)
            for names in batches:
                if len(batches) > 1:
                    whole = self._gather_tensors(members, one, names, everyone)
                _do_on_all_ranks(members, functools.partial(apply_part, whole, [one.delta], "change"))
                for name, tensor in whole.items():
                    for copy in one.slices[name]:
                        copy.target.copy_(tensor.as_strided(copy.shape, copy.stride, copy.offset))

    def _prepare_delta(self, where: Any, storage_options: Any) -> _Ready:
        import overwire

        from ..._compat_api import torch_shape

        delta = overwire.open_delta(where, storage_options=storage_options)
        rows = [(name, delta.dtype(name), torch_shape(delta.dtype(name), delta.shape(name))) for name in delta.names]
        entries = [Stored(None, at, *row) for at, row in enumerate(rows)]
        try:
            copies = self._record_copies(Opened(None, torch.device(self._device), entries))
        except Incomplete:
            raise
        except Exception as error:
            raise ValueError(f"overwire: cannot apply the delta to this model: {error}: push all weights") from error
        into: dict[str, torch.Tensor] = {}
        again: list[tuple[torch.Tensor, str]] = []
        slices: dict[str, list[Copy]] = {}
        for copy in copies:
            whole = _whole_target(copy)
            if whole is None or copy.of.name in slices:
                slices.setdefault(copy.of.name, []).append(copy)
            elif copy.of.name in into:
                again.append((whole, copy.of.name))
            else:
                into[copy.of.name] = whole
        if both := slices.keys() & into.keys():
            text = f"overwire: cannot apply the delta: {min(both)} is both whole and divided: push all weights"
            raise ValueError(text)
        return _Ready(delta, into, again, slices)

    def _change_tensors(self, members: Any, ready: _Ready) -> None:
        # Changes the tensors that are whole on this rank. Collective: all ranks succeed, or none changes anything.
        names: list[str] = []

        def change_part(part: str) -> None:
            apply_part(ready.into, [ready.delta], part)
            names.append(part)
            for target, name in ready.again:
                target.copy_(ready.into[name])

        with after_error(lambda: change_part("undo") if names else None):
            _do_on_all_ranks(members, lambda: change_part("change"))

    def _batch_names(self, ready: _Ready) -> list[list[str]]:
        # Returns the names of the divided tensors that the delta changes, in batches that are the same on all ranks.
        batches: list[list[str]] = []
        size = 0
        for name in (name for name in sorted(ready.slices) if ready.delta.base(name) != ready.delta.new(name)):
            if not batches or size >= self._most:
                batches.append([])
                size = 0
            batches[-1].append(name)
            size += math.prod(ready.delta.shape(name)) * ready.slices[name][0].target.element_size()
        return batches

    def _gather_tensors(
        self, members: Any, ready: _Ready, names: list[str], everyone: list[dict[str, list[_SliceView]]]
    ) -> dict[str, torch.Tensor]:
        # Assembles whole tensors from the slices of all ranks. Collective.
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            slices = ready.slices[name]
            target = slices[0].target
            whole = tensors[name] = torch.empty(slices[0].of.shape, dtype=target.dtype, device=target.device)
            for rank, views in enumerate(everyone):
                for at, view in enumerate(views[name]):
                    if rank == members.rank:
                        part = slices[at].target.contiguous()
                    else:
                        part = torch.empty(view.shape, dtype=target.dtype, device=target.device)
                    members.broadcast(part, rank)
                    whole.as_strided(view.shape, view.stride, view.offset).copy_(part)
        return tensors

    def _ranks_of_group(self) -> Any:
        if self._group is None:
            return contextlib.nullcontext(_Alone())
        from ..._compat_api import group_verb

        return group_verb(self._group, self._device)

    def _record_copies(self, source: Opened) -> list[Copy]:
        params = [(name, param.data_ptr(), param.dtype, param.shape) for name, param in self._model.named_parameters()]
        key = ([one[1:] for one in source.tensors], params)
        if key == self._key:
            return [copy._replace(of=copy.of._replace(file=source.file)) for copy in self._copies]
        self._key = None
        copies: list[Copy] = []
        recorder = Recorder(copies.extend)
        with recorder:
            self._load(iter_stand_ins(recorder, source))
            recorder.load_rest()
        if recorder.impure is None:  # the loader only copied, so it need not run for every update
            self._key, self._copies = key, [copy._replace(of=copy.of._replace(file=None)) for copy in copies]
        return copies


class _Alone:
    # The group of a single rank, for `Places.apply_delta`.
    rank = 0

    def gather_results(self, work: Callable[[], Any]) -> list[Any]:
        return [work()]

    def agree(self, error: BaseException | None) -> None:
        if error is not None:
            raise error

    def raise_alike(self, error: BaseException) -> None:
        raise error

    def broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        """Does nothing, because there is no other rank."""


def _do_on_all_ranks(members: Any, work: Callable[[], Any]) -> None:
    # Runs the work. An exception on one rank is raised on all ranks. Collective.
    with keep_error() as failure:
        work()
    members.agree(failure.error)


def _whole_target(copy: Copy) -> torch.Tensor | None:
    # Returns the target of a copy in the shape of the stored tensor, or None if the copy is not of the whole tensor.
    shape = copy.of.shape
    if block_of(copy) != [(0, size) for size in shape[:1]] or copy.dtype != copy.target.dtype:
        return None
    return view_in_shape(copy.target, shape)

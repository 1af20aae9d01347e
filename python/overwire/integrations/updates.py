"""New weights into a model that runs: straight into its parameters, by a slice plan.

Where a model's own loader puts tensors is found out once, on stand-ins, and kept for
the updates that follow. It is right only for parameters that hold what the loader has put
there: the engine that uses this says which models are so.

A delta is checked by digests of whole tensors. A rank that holds only a share of one
gathers the shares of all ranks in a tensor beside, which is compared and changed, and
takes its own share back: so each rank checks what all of them hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from . import copies
from .copies import Copy, Stored, block_of, shaped
from .recording import Opened, Recorder, opened, stand_ins

__all__ = ["Incomplete", "Places"]


class Incomplete(ValueError):
    """A push lacks weights of the model. Nothing was changed."""


class _Piece(NamedTuple):
    # A share of a tensor, as a view of it in elements.
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Places:
    """Where a model's loader puts the tensors of a push.

    load: the model's own loader; it may raise `Incomplete` when it has run. device: where
    the parameters are. most: as for `fill`. group: the process group of the ranks that
    divide tensors among them, None for one rank.
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

    def whole(self, where: Any, storage_options: Mapping[str, Any] | None, log: Any) -> bool:
        """Loads all that the model takes of a file.

        False if that cannot be planned, with one line in the log; no parameter has changed
        then, but those of one element. Raises `Incomplete`, and what loading raises: the
        parameters then have old values and new ones.
        """
        with contextlib.ExitStack() as files:
            source = opened(files, where, self._device, {"storage_options": storage_options})
            try:
                noted = self._copies_of(source)
            except Incomplete:
                raise
            except Exception as error:
                log.info("overwire: updates tensor by tensor, since slices cannot be planned: %s", error)
                return False
            copies.fill(noted, self._most)
        return True

    def delta(self, where: Any, storage_options: Any) -> None:
        """Applies a delta to the parameters.

        Raises DeltaBaseError if they are not its base; ValueError where the loader cannot be
        planned; `Incomplete`; and what `overwire.open_delta` and `overwire.apply_delta`
        raise. Tensors of which this rank holds a share are changed in batches, the others
        before them: an error in between leaves whole tensors old or new, the same on all
        ranks.
        """
        import overwire

        delta = overwire.open_delta(where, storage_options=storage_options)
        stored = [Stored(None, at, name, delta.dtype(name), delta.shape(name)) for at, name in enumerate(delta.names)]
        try:
            noted = self._copies_of(Opened(None, torch.device(self._device), stored))
        except Incomplete:
            raise
        except Exception as error:
            raise ValueError(f"overwire: a delta cannot be applied to this model: {error}: push all of its weights") from error
        into: dict[str, torch.Tensor] = {}
        again: list[tuple[torch.Tensor, str]] = []
        shares: dict[str, list[Copy]] = {}
        for copy in noted:
            whole = _whole(copy)
            if whole is None or copy.of.name in shares:
                shares.setdefault(copy.of.name, []).append(copy)
            elif copy.of.name in into:
                again.append((whole, copy.of.name))
            else:
                into[copy.of.name] = whole
        if mixed := shares.keys() & into.keys():
            raise ValueError(f"overwire: a delta cannot be applied: {min(mixed)} is there whole and in part: push all weights")
        mine = {name: [_Piece(one.offset, one.shape, one.stride) for one in held] for name, held in shares.items()}
        failed: Exception | None = None
        try:
            overwire.apply_delta(into, delta, missing=True)
            for target, name in again:
                target.copy_(into[name])
        except Exception as error:
            failed = error  # the other ranks wait in what follows
        everyone = _everyone((mine, failed and str(failed)), self._group)
        if failed is not None:
            raise failed
        for rank, (pieces, words) in enumerate(everyone):
            if words is not None:
                raise RuntimeError(f"overwire: rank {rank} of the group could not apply the delta: {words}")
            if pieces.keys() != mine.keys():
                raise ValueError("overwire: a delta cannot be applied: ranks divide other tensors than one another: push all weights")
        self._apply_shares(delta, shares, [pieces for pieces, _ in everyone])

    def _apply_shares(self, delta: Any, shares: dict[str, list[Copy]], everyone: list[dict[str, list[_Piece]]]) -> None:
        import overwire

        left = [name for name in sorted(shares) if delta.base(name) != delta.new(name)]
        while left:
            batch: dict[str, torch.Tensor] = {}
            size = 0
            while left and (not batch or size < self._most):
                held = shares[left[0]]
                batch[left[0]] = self._gathered(held, [pieces[left[0]] for pieces in everyone])
                size += batch[left[0]].nbytes
                del left[0]
            overwire.apply_delta(batch, delta, missing=True)
            for name, tensor in batch.items():
                for copy in shares[name]:
                    copy.target.copy_(tensor.as_strided(copy.shape, copy.stride, copy.offset))

    def _gathered(self, held: list[Copy], everyone: list[list[_Piece]]) -> torch.Tensor:
        # A whole tensor of the shares that all ranks have.
        target = held[0].target
        whole = torch.empty(held[0].of.shape, dtype=target.dtype, device=target.device)
        for rank, pieces in enumerate(everyone):
            own = self._group is None or rank == torch.distributed.get_rank(self._group)
            for at, piece in enumerate(pieces):
                share = held[at].target.contiguous() if own else torch.empty(piece.shape, dtype=target.dtype, device=target.device)
                if self._group is not None:
                    torch.distributed.broadcast(share, torch.distributed.get_global_rank(self._group, rank), self._group)
                whole.as_strided(piece.shape, piece.stride, piece.offset).copy_(share)
        return whole

    def _copies_of(self, source: Opened) -> list[Copy]:
        params = [(name, param.data_ptr(), param.dtype, param.shape) for name, param in self._model.named_parameters()]
        key = ([one[1:] for one in source.tensors], params)
        if key == self._key:
            return [copy._replace(of=copy.of._replace(file=source.file)) for copy in self._copies]
        self._key = None
        noted: list[Copy] = []
        recorder = Recorder(noted.extend)
        with recorder:
            self._load(stand_ins(recorder, source))
            recorder.finish()
        if recorder.impure is None:  # else the loader has to run each time
            self._key, self._copies = key, [copy._replace(of=copy.of._replace(file=None)) for copy in noted]
        return noted


def _everyone(mine: Any, group: Any) -> list[Any]:
    if group is None:
        return [mine]
    out: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(out, mine, group)
    return out


def _whole(copy: Copy) -> torch.Tensor | None:
    # Where a whole tensor lies, in its own shape.
    shape = copy.of.shape
    if block_of(copy) != [(0, size) for size in shape[:1]] or copy.dtype != copy.target.dtype:
        return None
    return shaped(copy.target, shape)

"""New weights into a model that runs: straight into its parameters, by a slice plan.

Where a model's own loader puts tensors is found out once, on stand-ins, and kept for
the updates that follow. It is right only for parameters that hold what the loader has put
there: the engine that uses this says which models are so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from . import copies
from .copies import Copy
from .recording import Opened, Recorder, opened, stand_ins

__all__ = ["Incomplete", "Places"]


class Incomplete(ValueError):
    """A push lacks weights of the model. Nothing was changed."""


class Places:
    """Where a model's loader puts the tensors of a push.

    load: the model's own loader; it may raise `Incomplete` when it has run. device: where
    the parameters are. most: as for `fill`.
    """

    def __init__(self, model: torch.nn.Module, load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any], device: str, most: int) -> None:
        self._model, self._load, self._device, self._most = model, load, device, most
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

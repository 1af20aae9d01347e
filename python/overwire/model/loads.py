"""Creates tensors from the bytes that a running load delivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._imports import many_objects
from ..frameworks.frame import Frame
from ..jobs import Job

# If the engine's memory has at least _CROWD tensors, tensors are created while the load runs instead of afterwards.
# _PAUSE is the time between two checks for new tensors, in seconds.
_CROWD = 2000
_PAUSE = 0.004


class Load:
    """The tensors of a running load, in the order of its requests. Call `tensors` once for all tensors, or `next`
    repeatedly.

    job: the running job. `tensors` ends the job, but a caller of `next` must end it. rows: the table row of each
    request, with the dtype and shape in which it lands. raw: whether the engine exports tensors as plain integers.
    places: the tensors that the engine writes to directly, by request. device: the device for the tensors. moved:
    whether tensors land on another device first, for example in a preload on the host. wanted: the framework's dtype to
    cast to.
    """

    def __init__(
        self,
        job: Job,
        rows: Sequence[Any],
        frame: Frame,
        raw: bool,
        places: dict[int, Any],
        device: str,
        moved: bool,
        wanted: Any,
    ) -> None:
        self.job, self.rows, self.places = job, rows, places
        self._frame, self._raw, self._device, self._moved, self._wanted = frame, raw, device, moved, wanted

    def next(self) -> list[tuple[int, Any, int]]:
        """Waits for the next tensors. Returns the arguments of `tensor` for each of them: request, capsule and address.
        At the end of the load, returns an empty list or raises the load's error."""
        news = self.job.next(None, self._raw)
        if news is None or not news.capsules:
            self.job.wait()
            return []
        return list(zip(news.positions, news.capsules, news.addresses, strict=True))

    def tensor(self, at: int, capsule: Any, address: int) -> Any:
        """Returns the tensor of a request that has landed."""
        row = self.rows[at]
        tensor = self.places.pop(at, None)
        if tensor is None:
            tensor = self._frame.adopt(capsule, address, row[1], row[2], self._device)
            if self._moved:
                tensor = tensor.to(self._device)
        return tensor if self._wanted is None else self._frame.cast(tensor, row[1], self._wanted)

    @property
    def crowded(self) -> bool:
        """Whether `tensors` creates tensors while the load runs."""
        return self._device != "cpu" and len(self.rows) - len(self.places) >= _CROWD

    def tensors(self) -> list[Any]:
        """Waits for the end of the load and ends the job. Returns the tensors in the order of the requests."""
        rows, frame, places = self.rows, self._frame, self.places
        with self.job, many_objects():
            if frame.make is not None and not self._raw:
                tensors = self._make_tensors(frame.make, self.crowded)
            else:
                adopt, device = frame.adopt, self._device
                tensors = [  # no name refers to the capsules, which own the memory
                    places[at] if at in places else adopt(capsule, address, row[1], row[2], device)
                    for at, ((capsule, address), row) in enumerate(
                        zip(self.job.take(self._raw).pairs(), rows, strict=True)
                    )
                ]
        # Moves one tensor at a time, so that only one tensor is in memory twice.
        if self._moved:
            for at, tensor in enumerate(tensors):
                tensors[at] = tensor.to(self._device)
        if self._wanted is not None:
            for at, row in enumerate(rows):
                tensors[at] = frame.cast(tensors[at], row[1], self._wanted)
        return tensors

    def _make_tensors(self, make: Callable[[Any], Any], early: bool) -> list[Any]:
        # Creates the tensors of capsules that need only `make`. early: whether to start while the job still runs.
        tensors: list[Any] = [None] * len(self.rows)
        for at, tensor in self.places.items():
            tensors[at] = tensor
        has_ended = not early
        while not has_ended:
            has_ended = self.job.ended(_PAUSE)
            while (news := self.job.next(0)) is not None and news.capsules:
                for at, capsule in news.usable():
                    tensors[at] = make(capsule)
        if not early:
            news = self.job.take()
            if not news.missing:
                return list(map(make, news.capsules))
            for at, capsule in news.usable():
                tensors[at] = make(capsule)
        for at, tensor in enumerate(tensors):
            if tensor is None:
                tensors[at] = self._frame.empty(self.rows[at][1], self.rows[at][2], self._device)
        return tensors

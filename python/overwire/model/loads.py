"""Makes tensors of the bytes that a running load delivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._imports import pause_collector, resume_collector
from ..frameworks.frame import Frame
from ..jobs import Job

# With this many tensors in the engine's memory, they are made while the rest arrives
# instead of afterwards; and the pause to wait for more, in seconds.
_CROWD = 2000
_PAUSE = 0.004


class many_objects:
    """A context manager that pauses the cycle collector while thousands of objects are made.

    None of them is garbage, but their number would start full collections, which cost more
    than the objects.
    """

    __slots__ = ("_pauses",)

    def __enter__(self) -> None:
        self._pauses = pause_collector()

    def __exit__(self, *exc: object) -> None:
        if self._pauses:
            resume_collector()


class Load:
    """The tensors of a load, by request. Take all of them, or each as it arrives.

    job: the running job; `tensors` ends it, otherwise the caller does. rows: for each request, as it lands. raw:
    whether the engine exports plain integers. places: by request, tensors that the engine writes to. device: the
    device for the tensors. moved: they land elsewhere first, for example in a preload on the host. wanted: the
    framework's dtype to cast to; None: unchanged.
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
        """Waits for the next tensors, for `tensor`. Returns request, capsule and address of each; nothing at the
        end, when it raises the load's error if there is one."""
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
        """Whether `tensors` makes the tensors while the rest arrives."""
        return self._device != "cpu" and len(self.rows) - len(self.places) >= _CROWD

    def tensors(self) -> list[Any]:
        """Waits for the end. Returns the tensors in the order of the requests, and ends the job."""
        rows, frame, places = self.rows, self._frame, self.places
        with self.job, many_objects():
            if frame.make is not None and not self._raw:
                tensors = self._make_tensors(frame.make, self.crowded)
            else:
                adopt, device = frame.adopt, self._device
                tensors = [
                    places[at] if at in places else adopt(capsule, address, row[1], row[2], device)
                    for at, ((capsule, address), row) in enumerate(
                        zip(self.job.take(self._raw).pairs(), rows, strict=True)
                    )
                ]
        # One at a time, so that only one tensor is in memory twice.
        if self._moved:
            for at, tensor in enumerate(tensors):
                tensors[at] = tensor.to(self._device)
        if self._wanted is not None:
            for at, row in enumerate(rows):
                tensors[at] = frame.cast(tensors[at], row[1], self._wanted)
        return tensors

    def _make_tensors(self, make: Callable[[Any], Any], early: bool) -> list[Any]:
        # For capsules that need only `make`. early: while the job runs, so that tens of thousands of tensors are made
        # while bytes still arrive.
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

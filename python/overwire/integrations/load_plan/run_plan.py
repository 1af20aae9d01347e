"""Loads a model by slices: records the copies of the model's own loader, then loads the copied bytes.

Ranks that share the reading wait for each other after they have recorded their copies.
"""

from __future__ import annotations

import contextlib
import functools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from . import copies, record_copies
from .copies import Copy
from .record_copies import Opened, Recorder, Unplannable

#: Ranks that share the reading load a range of a tensor's rows by themselves if it has at least this many bytes. Other
#: ranks may then read the first and the last chunk again, which takes little time.
APART = 32 << 20


class SliceLoad:
    """The state of a load by slices, for an engine's loader.

    Inside `replace_loader`, the model's `load_weights` is replaced. The replacement first opens the files that the
    engine would read, then runs the original `load_weights` on stand-ins.
    """

    def __init__(self, recorder: Recorder, files: contextlib.ExitStack, log: Any) -> None:
        self._recorder, self._files, self._log = recorder, files, log
        self._is_listing = False
        self._quiet = contextlib.ExitStack()  # pauses garbage collections while the loader runs
        self._sources: list[Opened] = []
        self._left: list[Opened] = []
        self._group: Any = None  # the group, if its ranks will load together, otherwise None
        self._postponed: list[Copy] = []  # copies for the load of the group

    @property
    def device(self) -> torch.device:
        """The device for the tensors."""
        return self._sources[0].device

    def open_source(
        self, where: Any, device: str, chosen: Mapping[str, Any], **asked: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Opens a source for `next_stand_ins`, and returns an empty iterator. The arguments are those of
        `iter_weights`."""
        self._sources.append(record_copies.open_source(self._files, where, device, chosen, **asked))
        return iter(())

    def next_stand_ins(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """Returns the stand-ins of the next opened source, or None while sources are being opened."""
        return None if self._is_listing else record_copies.iter_stand_ins(self._recorder, self._left.pop(0))

    def load_recorded(self) -> None:
        """Loads the recorded copies. Call it after the last tensor of the last source."""
        if not self._is_listing:
            self._quiet.close()
            self._recorder.load_noted()

    @contextlib.contextmanager
    def replace_loader(
        self, model: Any, look: Callable[[], Iterable[Any]], group: Any = None, pays: bool = False
    ) -> Iterator[None]:
        """Returns a context in which `model.load_weights` loads by slices.

        look: yields the weights that the engine's loader would pass to the model. group: a process group of ranks that
        all load by slices and can share the reading. pays: see `should_share_reading`.
        """
        own_loader = vars(model).get("load_weights")
        original = model.load_weights
        model.load_weights = functools.partial(self._load_slices, original, look, group, pays)
        try:
            yield
        finally:
            if own_loader is None:
                del model.load_weights
            else:
                model.load_weights = own_loader

    def _load_slices(self, original: Any, look: Any, group: Any, pays: bool, weights: Any) -> Any:
        from ..._compat_api import many_objects

        # Tens of thousands of stand-ins would trigger full garbage collections, which visit all objects that an engine
        # has created.
        with self._recorder.pause(), many_objects():
            self._open_with_ranks(functools.partial(self._open_sources, look), group, pays)
        try:
            with self._quiet:
                self._quiet.enter_context(many_objects())
                return original(weights)
        finally:
            with self._recorder.pause():
                self._meet_ranks()  # the other ranks wait for this rank, even if it has failed or has nothing to load

    def _open_with_ranks(self, opens: Callable[[], None], group: Any, pays: bool) -> None:
        # Opens the sources, and decides together with the other ranks whether they share the reading.
        if group is None:  # a single rank does not need the group code, whose import takes 20 ms
            opens()
            return
        from ..._compat_api import should_share_reading

        if should_share_reading(group, pays, opens):
            self._group = group

    def _open_sources(self, look: Any) -> None:
        # Opens all sources, by iterating over the engine's weights once.
        self._is_listing = True
        for _ in look():
            pass
        self._is_listing = False
        self._left = list(self._sources)

    @property
    def is_shared(self) -> bool:
        """Whether the ranks will share the reading."""
        return self._group is not None

    def postpone_shared(self, noted: list[Copy]) -> list[Copy]:
        """Returns the copies that this rank can load immediately. If the ranks share the reading, these are large
        ranges of a tensor's rows, which other ranks probably do not need. The other copies are postponed for
        `read_together`."""
        if not self.is_shared:
            return noted
        own_copies: list[Copy] = []
        for copy in noted:
            large = copy.target.numel() * copy.target.element_size() >= APART
            request = copies.request_of(copy, self.device) if large else None
            rows = request is not None and request[3] >= 0 and request[5] < 0
            (own_copies if rows else self._postponed).append(copy)
        return own_copies

    def take_postponed(self) -> list[Copy]:
        """Returns the copies that `postpone_shared` has postponed."""
        copies, self._postponed = self._postponed, []
        return copies

    def _meet_ranks(self, wanted: Callable[[], Any] = lambda: None) -> Any:
        # Collective, unless the ranks have agreed to load by themselves; see `meet_to_load`.
        group, self._group = self._group, None
        if group is None:
            return None
        from ..._compat_api import meet_to_load

        together, why = meet_to_load(group, wanted)
        if together is None:
            self._log.info("overwire: each rank reads by itself: %s", why)
        return together

    def read_together(self, noted: list[Copy], most: int) -> list[Copy]:
        """Loads the copies together with the other ranks. Returns the copies that this rank must load by itself.
        Collective if `is_shared`."""
        if not self.is_shared:
            return noted
        rows = {id(source.file): array("q") for source in self._sources}
        blocks: list[Copy] = []
        indirect: list[Copy] = []

        def request_blocks() -> Any:
            for copy in noted:
                request = copies.request_of(copy, self.device)
                (indirect if request is None else blocks).append(copy)
                rows[id(copy.of.file)].extend(request or ())
            sheets = [source.sheet for source in self._sources]
            requests = [row.tobytes() for row in rows.values()]
            return str(self.device), [sheet.file for sheet in sheets], requests, [sheet.digest for sheet in sheets]

        together = self._meet_ranks(request_blocks)
        if together is None:
            return noted
        return [] if land_together(together, lambda: copies.load_copies(indirect, most), self._log) else blocks


def land_together(together: Any, meanwhile: Callable[[], None], log: Any) -> bool:
    """Loads the ranks' blocks together. Returns whether that succeeded. Collective. meanwhile: as for
    `BlockLoad.try_land`. Logs how many bytes were read, or why each rank must read by itself."""
    reason = together.try_land(meanwhile)
    if reason:
        log.info("overwire: each rank reads by itself: %s", reason)
        return False
    text = "overwire: the ranks share the reading: %d bytes read here, %d copied from others"
    log.info(text, together.read, together.copied)
    return True


def load_by_slices(load: Callable[[SliceLoad], None], most: int, log: Any) -> bool:
    """Loads a model by slices. Returns whether that was possible.

    load: runs the engine's loader. It gets a SliceLoad and must enter its `replace_loader`. most: as for
    `load_copies`.

    If the model cannot be loaded by slices, logs the reason. The caller must then load the whole model in another way,
    which also raises the loader's own errors. Raises the errors of loading the slices.
    """

    began = time.perf_counter()

    def carry_out(noted: list[Copy]) -> None:
        first = time.perf_counter()
        noted = attempt.take_postponed() + noted
        every = early.copies + noted
        early.end()
        copies.load_copies(attempt.read_together(noted, most), most)
        now = time.perf_counter()
        size = sum(copy.target.numel() * copy.target.element_size() for copy in every)
        text = (
            "overwire: loaded %d slices, %.2f GB, in %.2f s while the model's loader ran and %.2f s after it; "
            "%d slices were loaded while it ran"
        )
        log.info(text, len(every), size / 1e9, first - began, now - first, len(early.copies))

    def begin_reading(noted: list[Copy]) -> list[Copy]:
        copies = attempt.postpone_shared(noted)
        return early.begin(copies) if copies else []

    early = copies.Early(lambda: attempt.device)
    recorder = Recorder(carry_out, begin_reading)
    with contextlib.ExitStack() as files:
        attempt = SliceLoad(recorder, files, log)
        try:
            with recorder:
                load(attempt)
                recorder.load_rest()
        except Exception as error:
            # Errors of the files or the device are raised unchanged.
            if recorder.failed is not None:
                raise recorder.failed from None
            if recorder.began and not isinstance(error, Unplannable):
                raise
            log.info("overwire: loads tensor by tensor, because the model cannot be loaded by slices: %s", error)
            return False
        finally:
            early.cancel()
        return True

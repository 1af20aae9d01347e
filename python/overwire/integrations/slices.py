"""One load of a model by slices: by a plan that an earlier start kept, or by recording.

Ranks of a group that share the reading meet before it, each with its plan; where none has
one, they record what they want, and meet then.
"""

from __future__ import annotations

import contextlib
import functools
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from . import copies, keeping, plans, recording
from .copies import Copy
from .recording import Opened, Recorder, Unplannable
from .state import State

__all__ = ["Attempt", "by_slices"]

#: The bytes of a part of a tensor's rows from which ranks that share the reading read it
#: apart: a chunk at either end, which others may read too, counts for little then.
APART = 32 << 20


class Attempt:
    """What an engine's loader asks while a load by slices runs.

    The model's own `load_weights` is replaced while `around` is entered. It first looks
    what the engine would read, which gives the key of a kept plan. With such a plan it
    loads, and the model's own is not called; else that runs on stand-ins.
    """

    def __init__(self, recorder: Recorder, files: contextlib.ExitStack, most: int, log: Any) -> None:
        self._recorder, self._files, self._most, self._log = recorder, files, most, log
        self._looks = False
        self._quiet = contextlib.ExitStack()  # while the loader runs on stand-ins
        self._sources: list[tuple[str, Opened]] = []
        self._left: list[Opened] = []
        self._keeps: Callable[[], None] | None = None
        self._key: str | None = None  # of the plan
        self._ready: keeping.Ready | None = None  # a kept plan that fits
        self._group: Any = None  # of ranks that have not met again yet, and will once
        self._later: list[Copy] = []  # until then
        self._loaded: set[str] | None = None  # what the model then says it has loaded
        self.copies: list[Copy] = []
        #: Whether a kept plan was used.
        self.replayed = False

    @property
    def device(self) -> torch.device:
        """Where tensors land."""
        return self._sources[0][1].device

    def source(self, prefix: str, where: Any, device: str, chosen: Mapping[str, Any], **asked: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Opens a source, for `next`, and yields nothing; the arguments are those of `weights`."""
        self._sources.append((prefix, recording.opened(self._files, where, device, chosen, **asked)))
        return iter(())

    def next(self) -> Iterator[tuple[str, torch.Tensor]] | None:
        """The stand-ins of the next source that was opened; None while `source` opens them."""
        return None if self._looks else recording.stand_ins(self._recorder, self._left.pop(0))

    def ended(self) -> None:
        """To be called after the last tensor of the last source: loads what was recorded."""
        if not self._looks:
            self._quiet.close()
            self._recorder.load()

    @contextlib.contextmanager
    def around(
        self,
        model: Any,
        look: Callable[[], Iterable[Any]],
        facts: Callable[[], Mapping[str, Any] | None],
        group: Any = None,
        pays: bool = False,
    ) -> Iterator[None]:
        """While it lasts, `model.load_weights` loads by slices.

        look: yields what the engine's loader would give the model. facts: for the key of
        the plan, when all is open; None where no plan is kept. group: a process group of ranks
        that all do this, and can share the reading. pays: see `shares`.
        """
        mine = vars(model).get("load_weights")
        own = model.load_weights
        model.load_weights = functools.partial(self._load, model, own, look, facts, group, pays)
        try:
            yield
        finally:
            if mine is None:
                del model.load_weights
            else:
                model.load_weights = mine

    def _load(self, model: Any, own: Any, look: Any, facts: Any, group: Any, pays: bool, weights: Any) -> Any:
        from ..plumbing import many_objects

        # Stand-ins by the ten thousand are no garbage, and would start full collections of
        # all that an engine has imported.
        with self._recorder.paused(), many_objects():
            together, why = self._prepared(functools.partial(self._prepare, model, look, facts), group, pays)
            if self._ready is not None:
                if why:
                    self._log.info("overwire: each rank reads by itself: %s", why)
                self._by(self._ready, together)
                return self._loaded
        try:
            with self._recorder.paused(), many_objects():
                path, key = plans.folder(), self._key
                before = State(model) if key is not None else None
            with self._quiet:
                self._quiet.enter_context(many_objects())
                loaded = own(weights)
        finally:
            with self._recorder.paused():
                self._meet()  # the other ranks wait for one that has failed, or has nothing to load
        if path is None or key is None or before is None:
            return loaded
        with self._recorder.paused():
            reason = self._recorder.impure
            if reason is None and not before.unchanged():
                reason = "it changes the model beside the weights"
            if reason is not None:
                self._log.debug("overwire: keeps no plan of this model's loader: %s", reason)
            else:
                names = None if loaded is None else list(loaded)
                self._keeps = functools.partial(self._keep, path, key, model, names)
        return loaded

    def _prepared(self, prepare: Callable[[], None], group: Any, pays: bool) -> tuple[Any, str]:
        # With the other ranks, where they share the reading: what `meet` returns.
        if group is not None:  # one rank alone needs no code of groups, whose import takes 20 ms
            from ..plumbing import meet, unplanned

            def offer() -> Any:
                prepare()
                return None if self._ready is None else self._ready.offer()

            together, why = meet(group, offer, pays)
            if unplanned(why):
                self._group = group
            return together, why
        prepare()
        return None, ""

    @property
    def waits(self) -> bool:
        """Whether the ranks are to share the reading of what they record."""
        return self._group is not None

    def apart(self, noted: list[Copy]) -> list[Copy]:
        """The copies that can be read at once: where the ranks are to meet, parts of a tensor's
        rows, which most likely no other rank needs. The others are kept for `share`."""
        if not self.waits:
            return noted
        mine: list[Copy] = []
        for copy in noted:
            large = copy.target.numel() * copy.target.element_size() >= APART
            request = copies.request_of(copy, self.device) if large else None
            rows = request is not None and request[3] >= 0 and request[5] < 0
            (mine if rows else self._later).append(copy)
        return mine

    def later(self) -> list[Copy]:
        """What `apart` has kept."""
        kept, self._later = self._later, []
        return kept

    def _meet(self, wanted: Callable[[], Any] = lambda: None) -> Any:
        # Collective, but where the ranks do not wait: see `meet`.
        group, self._group = self._group, None
        if group is None:
            return None
        from ..plumbing import meet

        together, why = meet(group, wanted)
        if together is None:
            self._log.info("overwire: each rank reads by itself: %s", why)
        return together

    def share(self, noted: list[Copy], most: int) -> list[Copy]:
        """Collective, where the ranks wait: loads the copies together with theirs; returns those
        that this rank has to load by itself."""
        if not self.waits:
            return noted
        rows = {id(source.file): array("q") for _, source in self._sources}
        blocks: list[Copy] = []
        beside: list[Copy] = []

        def wanted() -> Any:
            from ..plumbing import Blocks

            for copy in noted:
                request = copies.request_of(copy, self.device)
                (beside if request is None else blocks).append(copy)
                rows[id(copy.of.file)].extend(request or ())
            sheets = [source.sheet for _, source in self._sources]
            requests = [row.tobytes() for row in rows.values()]
            return Blocks(str(self.device), [sheet.file for sheet in sheets], requests, [sheet.digest for sheet in sheets])

        together = self._meet(wanted)
        if together is None:
            return noted
        return [] if keeping.shared(together, lambda: copies.fill(beside, most), self._log) else blocks

    def _prepare(self, model: Any, look: Any, facts: Any) -> None:
        # Opens what is to be read, and finds the plan of it.
        self._looks = True
        for _ in look():
            pass
        self._looks = False
        self._left = [source for _, source in self._sources]
        path = plans.folder()
        said = facts() if path is not None and self._left else None
        if path is None or said is None:
            return
        try:
            self._key = keeping.key_of(model, [(prefix, source.sheet, source.at) for prefix, source in self._sources], said)
        except keeping.Unfit as error:
            self._log.debug("overwire: keeps no plan of this model's loader: %s", error)
            return
        kept = plans.read(path, self._key, self._log)
        if kept is None:
            return
        try:
            self._ready = keeping.ready(kept, model, [source.sheet for source in self._left], str(self._left[0].device))
        except keeping.Unfit as error:
            self._log.info("overwire: ignores a kept plan: %s", error)
            return
        self._loaded = None if kept.loaded is None else set(kept.loaded)

    def _by(self, ready: keeping.Ready, together: Any) -> None:
        began = time.perf_counter()
        self._recorder.began = True
        count = keeping.carry_out(ready, self._most, together, self._log)
        self.replayed = True
        self._log.info("overwire: %d slices loaded by a kept plan in %.2f s", count, time.perf_counter() - began)

    def _keep(self, path: str, key: str, model: Any, names: list[str] | None) -> None:
        files = [source.file for _, source in self._sources]
        try:
            plans.keep(path, key, keeping.plan_of(model, files, self.copies, names, self._recorder))
        except (keeping.Unfit, OSError, ValueError) as error:
            self._log.info("overwire: keeps no plan: %s", error)

    def keep(self) -> None:
        """Keeps what was recorded, if it can be used again. To be called when the load
        has succeeded."""
        if self._keeps is not None:
            self._keeps()


def by_slices(load: Callable[[Attempt], None], most: int, log: Any) -> bool:
    """Whether a model was loaded by slices.

    load: runs the engine's loader, which enters `around` of the attempt that it gets. most: as for
    `fill`.

    False if that cannot be planned, with one line in the log: the whole model must
    then be loaded in another way, which raises what its loader finds wrong. Raises what
    loading by the plan raises.
    """

    began = time.perf_counter()

    def carry_out(noted: list[Copy]) -> None:
        first = time.perf_counter()
        noted = attempt.later() + noted
        attempt.copies += early.copies
        attempt.copies += noted
        early.end()
        copies.fill(attempt.share(noted, most), most)
        now = time.perf_counter()
        size = sum(copy.target.numel() * copy.target.element_size() for copy in attempt.copies)
        words = "overwire: %d slices, %.2f GB, %d of them while the loader ran, loaded into their places in %.2f s and %.2f s after it"
        log.info(words, len(attempt.copies), size / 1e9, len(early.copies), first - began, now - first)

    def begin(noted: list[Copy]) -> list[Copy]:
        mine = attempt.apart(noted)
        return early.begin(mine) if mine else []

    early = copies.Early(lambda: attempt.device)
    recorder = Recorder(carry_out, begin)
    with contextlib.ExitStack() as files:
        attempt = Attempt(recorder, files, most, log)
        try:
            with recorder:
                load(attempt)
                recorder.finish()
        except Exception as error:
            # What the files or the device lack is an error as it is.
            if recorder.failed is not None:
                raise recorder.failed from None
            if recorder.began and not isinstance(error, Unplannable):
                raise
            log.info("overwire: loads tensor by tensor, since slices cannot be planned: %s", error)
            return False
        finally:
            early.cancel()
        attempt.keep()
        return True

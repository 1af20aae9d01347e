"""Reports the counters of this process's loads, saves and other calls, for monitoring. `counting` counts the calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from . import _verbs
from ._engine import forked, is_loaded
from .counting import add_up

if TYPE_CHECKING:
    from ._requests import PipelineStages

    class WorkStages(PipelineStages, total=False):
        """The stages of loads and saves."""

        plan_ns: int
        encode_ns: int
        hash_ns: int
        write_ns: int
        publish_ns: int

@dataclass
class VerbMetrics:
    """The counters of one function, such as "load", in this process.

    runs: calls that succeeded. errors: failed calls, by error class.
    tensors, bytes: tensors that the calls returned or wrote, and their bytes. mapped, direct: bytes that were mapped,
        and bytes that were read by direct I/O. written: bytes of written files.
    seconds: total duration of the calls.
    stages: seconds summed over workers, by activity: "read" (reading), "answer" (waiting for
        the first byte of a response), "permit" (waiting for a connection), "check" (verifying),
        "decode" (decoding), "wait" (waiting for the device). For saves see `Report.stages`.
    """

    __module__ = "overwire"

    runs: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    mapped: int = 0
    direct: int = 0
    written: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)


@dataclass
class CacheMetrics:
    """The counters of the caches of remote objects (OVERWIRE_CACHE, or the option "cache") in this process.

    hits, hit_bytes: objects that were in the cache, and their bytes. fetches, fetch_bytes:
        objects that were read from their store, and their bytes. away: hits while the store
        could not be reached. evictions: objects that were removed because of the size limit.
    """

    __module__ = "overwire"

    hits: int = 0
    hit_bytes: int = 0
    fetches: int = 0
    fetch_bytes: int = 0
    away: int = 0
    evictions: int = 0


@dataclass
class HostMetrics:
    """This process's counters of the host store (`overwire host`).

    hits, hit_bytes: files that came from the store, and their bytes. misses: files that the store did not have. puts,
        put_bytes: files that this process has put into the store. lost: models that were read from their files because
        the store could not be reached or failed. distrusted: files that were dropped because their bytes were wrong.
    """

    __module__ = "overwire"

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    puts: int = 0
    put_bytes: int = 0
    lost: int = 0
    distrusted: int = 0


class Metrics(dict[str, VerbMetrics]):
    """The result of `metrics`. Maps the name of each function that has run to its `VerbMetrics`. cache: a
    `CacheMetrics`. host: a `HostMetrics`."""

    __module__ = "overwire"

    def __init__(self, verbs: Mapping[str, VerbMetrics], cache: CacheMetrics, host: HostMetrics) -> None:
        super().__init__(verbs)
        self.cache, self.host = cache, host

    def _repr_html_(self) -> str:
        from . import _notebook as html

        rows = (
            (verb, one.runs, sum(one.errors.values()), one.tensors, html.size(one.bytes), f"{one.seconds:.3g}")
            for verb, one in self.items()
        )
        head = ("function", "runs", "errors", "tensors", "bytes", "seconds")
        return html.block("Metrics", (), html.table("Calls of this process", head, rows))

    def prometheus(self) -> str:
        """Returns the counters in Prometheus' text format, version 0.0.4."""
        lines: list[str] = []
        for name, kind, text in (
            ("runs", int, "Calls that succeeded."),
            ("tensors", int, "Tensors that were loaded or written."),
            ("bytes", int, "Bytes of loaded or written tensors."),
            ("mapped", int, "Bytes of tensors that were mapped instead of read."),
            ("direct", int, "Bytes of tensors that were read by direct I/O."),
            ("written", int, "Bytes of files that were written."),
            ("seconds", float, "Total duration of the calls in seconds."),
        ):
            values = [({"verb": verb}, kind(getattr(one, name))) for verb, one in self.items()]
            lines += _counter_lines(name, text, values)
        for name, key, text, field_name in (
            ("errors", "error", "Calls that failed.", "errors"),
            ("stage_seconds", "stage", "Seconds summed over workers, by activity.", "stages"),
        ):
            counts = [(verb, label, n) for verb, one in self.items() for label, n in getattr(one, field_name).items()]
            lines += _counter_lines(name, text, [({"verb": verb, key: label}, n) for verb, label, n in counts])
        one, host = self.cache, self.host
        files = {"hit": host.hits, "miss": host.misses, "put": host.puts}
        for name, text, rows in (
            ("cache_objects", "Remote objects, by origin.", _rows_by_origin(one.hits, one.fetches)),
            ("cache_bytes", "Bytes of remote objects, by origin.", _rows_by_origin(one.hit_bytes, one.fetch_bytes)),
            ("cache_away", "Cached objects used while their store could not be reached.", [({}, one.away)]),
            ("cache_evictions", "Objects removed from the cache because of its size limit.", [({}, one.evictions)]),
            ("host_files", "Host store requests, by result.", [({"result": result}, n) for result, n in files.items()]),
            ("host_hit_bytes", "Bytes of files that came from the host store.", [({}, host.hit_bytes)]),
            ("host_put_bytes", "Bytes of files that were put into the host store.", [({}, host.put_bytes)]),
            ("host_lost", "Models that were read from files because the host store failed.", [({}, host.lost)]),
            ("host_distrusted", "Files dropped from the host store for wrong bytes.", [({}, host.distrusted)]),
        ):
            lines += _counter_lines(name, text, rows)
        return "\n".join(lines) + "\n"


class LastReport(TypedDict, total=False):
    """Counters of the last load, save or other call. Each function sets some of them.

    bytes: bytes of tensors.
    mapped, direct, gds: the parts of `bytes` that were mapped, read by direct I/O, and read by GPUDirect Storage.
    bytes_in, bytes_out: bytes of tensors, and of the files written with them.
    bytes_copied: bytes of a folder's other files, which were copied.
    stored: bytes of the files that were verified.
    on_gpu: bytes of tensors that a save encoded on their GPU.
    staged: for a background save, seconds until the caller could change the tensors.
    stages: time spent in each stage of a load or save, in nanoseconds summed over its threads.
    """

    seconds: float
    tensors: int
    bytes: int
    mapped: int
    direct: int
    gds: int
    stages: WorkStages
    bytes_in: int
    bytes_out: int
    bytes_copied: int
    ratio: float
    compressed: int
    aliases: int
    on_gpu: int
    staged: float
    stored: int
    files: list[Any]


def metrics() -> Metrics:
    """Returns the counters of this process's loads, saves and other calls since it began. Raises nothing.

        nbytes = overwire.metrics()["load"].bytes
        text = overwire.metrics().prometheus()
    """
    verbs = {verb: VerbMetrics(**counts) for verb, counts in add_up().items()}
    if not is_loaded() or forked():  # the other counters need the engine
        return Metrics(verbs, CacheMetrics(), HostMetrics())
    return Metrics(verbs, CacheMetrics(**_verbs.cache_counts()), HostMetrics(**_verbs.host_counts()))


def _rows_by_origin(cache: int, store: int) -> list[tuple[dict[str, str], float]]:
    return [({"origin": "cache"}, cache), ({"origin": "store"}, store)]


def _counter_lines(name: str, text: str, rows: Sequence[tuple[dict[str, str], float]]) -> list[str]:
    lines = [f"# HELP overwire_{name}_total {text}", f"# TYPE overwire_{name}_total counter"] if rows else []
    for labels, value in rows:
        inside = ",".join(f'{key}="{_escape_label(label)}"' for key, label in labels.items())
        lines.append(f"overwire_{name}_total{f'{{{inside}}}' if labels else ''} {value!r}")
    return lines


def _escape_label(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

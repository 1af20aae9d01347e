"""Calls the engine for the process tests: directly, with JSON text and packed numbers, or through `overwire._verbs`
where the tests do not vary the arguments."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from overwire import _verbs
from overwire._engine import (
    FREE_NOW,
    TAKE_ALL,
    TAKE_NEXT,
    TAKE_RAW,
    JobNumber,
    ModelNumber,
    cli,
    core,
    forked,
    handle,
    main,
    program,
)

if TYPE_CHECKING:
    from overwire.jobs import Landed

__all__ = ["cli", "forked", "main"]

_opened: dict[int, tuple[str, list[Any]]] = {}


def run(verb: str, request: str) -> Any:
    return json.loads(core().run(verb, request, b"")[0])


def open_model(request: str) -> ModelNumber:
    text, _, _, rows, model = core().run("open", request, b"")
    _opened[int(model)] = text, rows
    assert isinstance(model, ModelNumber)
    return model


def close_model(model: int) -> None:
    core().free(model, FREE_NOW)


def model_table(model: int) -> list[Any]:
    return _opened[model][1]


def model_info(model: int) -> Any:
    return json.loads(_opened[model][0])


def _start(verb: str, request: str, numbers: bytes = b"") -> JobNumber:
    job = core().start(verb, request, numbers)
    assert isinstance(job, JobNumber)
    return job


def load_start(model: int, requests: bytes | None, options: str) -> JobNumber:
    return _start("load", options, struct.pack("=2q", handle(model), requests is None) + (b"" if requests is None else requests))


def save_start(spec: str, tensors: list[Any]) -> JobNumber:
    """Starts a save of tensors, each given as (name, dtype, shape, address, bytes)."""
    names, dtypes, shapes, *_ = (list(column) for column in zip(*tensors, strict=True)) if tensors else ([], [], [])
    request = {**json.loads(spec), "names": names, "dtypes": dtypes, "shapes": shapes}
    return _start("save", json.dumps(request), b"".join(struct.pack("=3q", t[3], t[4], 0) for t in tensors))


def convert_start(request: str) -> JobNumber:
    return _start("convert", request)


def verify_start(request: str) -> JobNumber:
    return _start("verify", request)


def fetch_start(request: str) -> JobNumber:
    return _start("fetch", request)


def preload_start(request: str) -> JobNumber:
    return _start("preload", request)


def preload_join(model: int, request: str) -> Any:
    return json.loads(core().run("join", request, struct.pack("=1q", handle(model)))[0])


def job_wait(job: int, timeout: Any) -> bool:
    ended: bool = core().wait(job, timeout)
    return ended


def columns(job: int, timeout: float | None = None, raw: bool = False) -> Landed | None:
    """Returns the tensors that have been loaded since the last call."""
    from overwire.jobs import Landed

    made = core().take(job, timeout, TAKE_NEXT | (TAKE_RAW if raw else 0))
    return None if made is None else Landed(made[1], made[2], True)


def job_next(job: int, timeout: float | None, raw: bool = False) -> list[tuple[int, Any, int]]:
    landed = columns(job, timeout, raw)
    return [] if landed is None else list(zip(landed.positions, landed.capsules, landed.addresses, strict=True))


def job_columns(job: int, raw: bool = False) -> Landed:
    """Returns all results of a finished job."""
    from overwire.jobs import Landed

    made = core().take(job, 0, TAKE_ALL | (TAKE_RAW if raw else 0))
    assert made is not None
    return Landed(made[1], made[2], False)


def job_take(job: int, raw: bool = False) -> list[tuple[Any, int]]:
    return job_columns(job, raw).pairs()


def job_progress(job: int) -> tuple[int, ...]:
    return tuple(memoryview(_verbs.progress(job)[1]).cast("q"))


def job_report(job: int) -> str:
    return _verbs.report(job)[0]


def job_cancel(job: int) -> None:
    _verbs.cancel(job)


def job_free(job: int) -> None:
    core().free(job, FREE_NOW)


def knobs() -> Any:
    return _verbs.knobs()


def doctor() -> Any:
    return _verbs.doctor(program([]))

"""Decides whether a call reads objects through Ray, and starts this process's supplier."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._engine import forked
from .._locks import new_lock
from ..errors import MissingPackageError, NotSupportedError
from ..jobs import log
from ..model.options import check_switches, setting

if TYPE_CHECKING:
    from .feeder import Feeder

_lock = new_lock()
_feeder: Feeder | None = None
_session: object = None  # the job and node in Ray that the supplier belongs to

# A node shares no pieces if its object store has room for fewer than these.
_FEWEST = 4


def feeds(ray: object) -> bool:
    """Returns whether objects are read through Ray, and connects to it. ray: the option of that name. None means the
    setting OVERWIRE_RAY.

    Raises ArgumentError for an invalid option. If Ray is required, raises MissingPackageError if it is not installed,
    and NotSupportedError if there is no cluster."""
    if ray is not None:
        check_switches(ray=ray)
    way = str(setting("OVERWIRE_RAY")) if ray is None else "on" if ray else "off"
    if way == "off" or forked():
        return False
    module = _connect() if way == "on" else sys.modules.get("ray")
    try:
        return (way == "on" or _is_fleet(module)) and _start_feeder(module)
    except Exception as error:  # no load fails because of Ray
        log.warning("overwire: ray is not used (%s): reading from the store instead", type(error).__name__)
        return False


def _is_fleet(ray: Any) -> bool:
    """Returns whether the process is connected to a cluster of several nodes. ray: the module or None."""
    return ray is not None and ray.is_initialized() and sum(1 for one in ray.nodes() if one["Alive"]) > 1


def _connect() -> Any:
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise MissingPackageError("overwire: ray=True needs the package ray: pip install ray") from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, configure_logging=False)
        except ConnectionError:
            text = "this process is not in a Ray cluster: start one with `ray start --head`, or set RAY_ADDRESS"
            raise NotSupportedError(f"overwire: ray=True: {text}") from None
    return ray


def _start_feeder(ray: Any) -> bool:
    global _feeder, _session
    from .feeder import Feeder

    with _lock:
        session = ray.get_runtime_context().get_job_id(), ray.get_runtime_context().get_node_id()
        if _session == session:
            return _feeder is not None  # after a failure, Ray is not tried again
        _session = session
        if _feeder is not None:  # the process has left a cluster and joined another one
            _feeder.stop()
            _feeder = None
        piece = int(setting("OVERWIRE_RAY_PIECE_MB")) << 20
        sizes = (one["Resources"].get("object_store_memory", 0) for one in ray.nodes() if one["NodeID"] == session[1])
        store = next(sizes, 0)
        room = int(store * int(setting("OVERWIRE_RAY_PERCENT")) / 100)
        if room < _FEWEST * piece:
            log.warning(
                "overwire: ray is not used: %d%% of this node's object store holds fewer than %d pieces of %d MiB: "
                "raise OVERWIRE_RAY_PERCENT or the node's object_store_memory",
                setting("OVERWIRE_RAY_PERCENT"), _FEWEST, piece >> 20,
            )  # fmt: skip
            return False
        _feeder = Feeder(ray, piece, room)
    return True

"""Reads models in stores once for all nodes of a Ray cluster, before the replicas start.

Loads share what they read without this module: pass `ray=True`, or set OVERWIRE_RAY.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, MissingPackageError

if TYPE_CHECKING:
    from overwire import StorageOptions

__all__ = ["prefetch", "release"]

_NAMESPACE = "overwire"

# The storage options that are no secrets. Ray shows arguments of its actors to everyone in the cluster.
_OPEN_OPTIONS = frozenset(
    "anon aws_endpoint_url aws_region cacert capath connections db endpoint endpoint_url insecure path_style profile "
    "profile_name region region_name retries timeout".split()
)


class _Keeper:
    """An actor that reads objects and shares their pieces until it ends."""

    def keep(self, uri: Any, options: Any) -> int:
        import overwire

        size = 0
        for _, tensor in overwire.stream(uri, framework="np", max_memory="2GB", storage_options=options, ray=True):
            size += tensor.nbytes
        return size


def _connected() -> Any:
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise MissingPackageError("overwire: prefetch needs the package ray: pip install ray") from None
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    return ray


def _alive(ray: Any, nodes: Iterable[str] | None) -> list[str]:
    alive = [one["NodeID"] for one in ray.nodes() if one["Alive"]]
    chosen = alive if nodes is None else list(nodes)
    for node in chosen:
        if node not in alive:
            raise ArgumentError(f"overwire: nodes: {node!r} is not the ID of a node that is alive")
    return chosen


def prefetch(
    uri: Any, nodes: Iterable[str] | None = None, *, storage_options: StorageOptions | None = None
) -> dict[str, int]:
    """Brings a model into the object stores of nodes, so that later loads there read nothing from its store. Returns
    the bytes of tensors that each node has read, by node ID, when all nodes have the model.

    An actor on each node owns the pieces that the node read from the store. It stays until `release`, and uses no CPU.

    uri: as for `overwire.load_file`. nodes: IDs of nodes, as in `ray.nodes()`; None: all nodes that are alive.
    storage_options: how to reach the store. Each node uses its own credentials; options with secrets are refused,
    because Ray shows arguments to everyone in the cluster.

    Raises ArgumentError for a node that is not alive or an option with a secret, MissingPackageError without Ray,
    ConnectionError without a cluster, and the errors of `overwire.stream`, each in a Ray task's error.
    """
    options: Mapping[str, Any] = storage_options or {}
    secret = [name for name, value in options.items() if value is not None and name not in _OPEN_OPTIONS]
    if secret:
        raise ArgumentError(
            f"overwire: prefetch: storage_options: {', '.join(map(str, secret))}: Ray would show this option to "
            "everyone in the cluster: each node needs its own credentials"
        )
    ray = _connected()
    near = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    works = {}
    for node in _alive(ray, nodes):
        keeper = ray.remote(_Keeper).options(
            name=f"keeper-{node}", namespace=_NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
            scheduling_strategy=near(node, soft=False),
        ).remote()  # fmt: skip
        works[node] = keeper.keep.remote(uri, dict(options))
    return dict(zip(works, ray.get(list(works.values())), strict=True))


def release(nodes: Iterable[str] | None = None) -> None:
    """Ends the actors of `prefetch`, which frees the pieces that they own. nodes: as for `prefetch`.

    Raises the errors of `prefetch` for nodes."""
    ray = _connected()
    for node in _alive(ray, nodes):
        try:
            ray.kill(ray.get_actor(f"keeper-{node}", namespace=_NAMESPACE))
        except ValueError:
            pass  # the node has none

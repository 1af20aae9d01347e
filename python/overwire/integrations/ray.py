"""Reads a model from its store once for all nodes of a Ray cluster, before the replicas start.

Loads can also share the bytes that they read without this module: pass `ray=True`, or set OVERWIRE_RAY.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, MissingPackageError
from ..stores import shown

if TYPE_CHECKING:
    from overwire import StorageOptions

__all__ = ["prefetch", "release"]

_NAMESPACE = "overwire"

# Storage options that are not secret. No others are passed, because Ray shows the arguments of actors to everyone in
# the cluster.
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


def _is_secret(text: str) -> bool:
    """Returns whether a URI, or the text of an option, contains a part that messages hide."""
    return shown(text) != text


def prefetch(
    uri: Any, nodes: Iterable[str] | None = None, *, storage_options: StorageOptions | None = None
) -> dict[str, int]:
    """Brings a model into the nodes' object stores, so that later loads there read only the start of each file from the
    model's store. Waits until all nodes have the model. Returns how many bytes of tensors each node has read, by node
    ID.

    An actor on each node owns the pieces that the node read from the store. The actor stays until `release`, and uses
    no CPU.

    uri: as for `overwire.load_file`, without a user, a password or a query. nodes: IDs of nodes, as in `ray.nodes()`.
    None means all nodes that are alive. storage_options: how to reach the store. Each node uses its own credentials.
    Secrets are refused, because Ray shows arguments to everyone in the cluster.

    Raises ArgumentError for a node that is not alive, and for a URI or an option that may contain a secret. Raises
    MissingPackageError without Ray, ConnectionError without a cluster, and the errors of `overwire.stream`, wrapped in
    the error of a Ray task.
    """
    options: Mapping[str, Any] = storage_options or {}
    uris = [os.fsdecode(one) for one in ([uri] if isinstance(uri, (str, bytes, os.PathLike)) else uri)]
    secret = [str(name) for name, value in options.items()
              if value is not None and (name not in _OPEN_OPTIONS or _is_secret(str(value)))]  # fmt: skip
    if any(map(_is_secret, uris)):
        raise ArgumentError(
            "overwire: prefetch: uri: Ray would show a user, password or query in the URI to everyone in the cluster: "
            "pass a URI without them, and give each node its own credentials"
        )
    if secret:
        raise ArgumentError(
            f"overwire: prefetch: storage_options: {', '.join(secret)}: Ray would show this option to everyone in the "
            "cluster: give each node its own credentials"
        )
    ray = _connected()
    near = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    works = {}
    for node in _alive(ray, nodes):
        keeper = ray.remote(_Keeper).options(
            name=f"keeper-{node}", namespace=_NAMESPACE, lifetime="detached", get_if_exists=True, num_cpus=0,
            scheduling_strategy=near(node, soft=False),
        ).remote()  # fmt: skip
        works[node] = keeper.keep.remote(uris, dict(options))
    return dict(zip(works, ray.get(list(works.values())), strict=True))


def release(nodes: Iterable[str] | None = None) -> None:
    """Ends the actors of `prefetch`, which frees the pieces that they own. nodes: as for `prefetch`.

    Raises the same errors as `prefetch` for an invalid `nodes`, and without Ray or a cluster."""
    ray = _connected()
    for node in _alive(ray, nodes):
        try:
            ray.kill(ray.get_actor(f"keeper-{node}", namespace=_NAMESPACE))
        except ValueError:
            pass  # the node has no such actor

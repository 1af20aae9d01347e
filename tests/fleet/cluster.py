"""Starts a real Ray cluster of several nodes on one machine, and a real S3 server behind a proxy that counts bytes."""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import pytest
import stores
from overwire.fleet.feeder import DIRECTORY, NAMESPACE

ray: Any = pytest.importorskip("ray", reason="needs Ray: `make ray` installs it")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import this module

MIB = 1 << 20
NODES = 3
# The nodes have these credentials in their environments, and `prefetch` uses them.
ENV = {"OVERWIRE_RAY_PIECE_MB": "1", "AWS_ACCESS_KEY_ID": stores.S3_KEY, "AWS_SECRET_ACCESS_KEY": stores.S3_SECRET}
# Ray declares nodes dead that do not answer in time. A busy machine needs more time than Ray's defaults allow.
PATIENCE = {"RAY_raylet_start_wait_time_s": "120", "RAY_health_check_timeout_ms": "30000",
            "RAY_health_check_failure_threshold": "10"}  # fmt: skip


class Replica:
    """Loads models on its node, like a replica of a deployment."""

    def __init__(self) -> None:
        import logging

        self.lines: list[str] = []
        self.reads_store = False
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("overwire").addHandler(handler)

    def load(self, uri: str, options: dict[str, Any], ray: bool = True) -> tuple[dict[str, int], list[str]]:
        import overwire

        self.lines.clear()
        try:
            tensors = overwire.load_file(uri, framework="np", storage_options=options, ray=ray)
        finally:
            self.reads_store = self.reads_store or any("from the store" in line for line in self.lines)
        return {name: zlib.crc32(tensor.tobytes()) for name, tensor in tensors.items()}, self.lines

    def has_read_store(self) -> bool:
        """Returns whether a load has logged that it reads pieces from the store itself."""
        return self.reads_store

    def load_in_group(self, uri: str, options: dict[str, Any], rank: int, ranks: int, path: str) -> dict[str, int]:
        import overwire
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
        tensors = overwire.load_file(uri, storage_options=options, group=dist.group.WORLD, ray=True)
        dist.destroy_process_group()
        return {name: zlib.crc32(tensor.numpy().tobytes()) for name, tensor in tensors.items()}

    def load_checkpoint(self, uri: str, options: dict[str, Any]) -> dict[str, int]:
        import torch
        import torch.distributed.checkpoint as dcp
        from overwire.checkpoints import CheckpointReader

        state = {f"t{at}": torch.zeros(600_000 + at) for at in range(6)}
        dcp.load(state, storage_reader=CheckpointReader(uri, storage_options={**options, "ray": True}))
        return {name: zlib.crc32(tensor.numpy().tobytes()) for name, tensor in state.items()}

    def fill(self, size: int, in_use: bool = False) -> None:
        """Fills part of the node's object store. Ray cannot spill objects that are in use."""
        import ray

        refs = [ray.put(bytes(size >> 5)) for _ in range(32)]
        self.pinned = [ray.get(ref) if in_use else ref for ref in refs]

    def free(self) -> None:
        self.pinned: list[Any] = []


class Setup:
    def __init__(self, cluster: Any, options: dict[str, Any], folder: Path, proxy: Any) -> None:
        self.cluster, self.options, self.folder, self.proxy = cluster, options, folder, proxy
        self.made = 0

    def model(self, compress: bool, tensors: int = 12, seed: int = 1, uri: str = "") -> tuple[str, dict[str, int], int]:
        """Writes a model to the store. Returns its URI, the checksums of its tensors, and its stored size."""
        self.made += 1
        rng = np.random.default_rng(seed)
        uri = uri or f"s3://models/m{self.made}.safetensors"
        made = {f"t{at}": (rng.standard_normal(600_000 + at) * 0.02).astype(np.float16) for at in range(tensors)}
        ow.save_file(made, uri, compress=compress, storage_options=self.options)
        size = (self.folder / uri.rpartition("/")[2]).stat().st_size
        return uri, {name: zlib.crc32(one.tobytes()) for name, one in made.items()}, size

    def replica(self, node: int) -> Any:
        return ray.remote(Replica).options(num_cpus=0, resources={f"n{node}": 0.001}).remote()

    def sent(self) -> int:
        """Returns how many bytes the store has sent since the last call. The first bytes of files do not count, because
        every load reads them to learn the version of the object."""
        beginning = 256 << 10
        count = sum(size for method, _, headers, _, size in self.proxy.asked
                    if method == "GET" and not str(headers.get("Range")).endswith(f"-{beginning - 1}"))  # fmt: skip
        self.proxy.asked.clear()
        return count


def wait_until_gone() -> None:
    """Waits until no directory of pieces exists."""
    for _ in range(300):
        try:
            ray.get_actor(DIRECTORY, namespace=NAMESPACE)
        except ValueError:
            return
        time.sleep(0.1)


PORTS = ("metrics_agent_port", "runtime_env_agent_port", "dashboard_agent_listen_port", "metrics_export_port")


def free_ports(count: int) -> list[int]:
    """Returns ports that no program uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [one.getsockname()[1] for one in sockets]


def add_node(cluster: Any, number: int) -> Any:
    """Adds a node with its own resource. Ray waits 30 s for a node, and 15 s for ports that it chooses itself. A busy
    machine may need longer, so the ports are given, and a node that does not start is started again."""
    for left in (3, 2, 1, 0):
        try:
            ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
            return cluster.add_node(
                num_cpus=2, object_store_memory=300 * MIB, resources={f"n{number}": 1}, include_dashboard=False, **ports
            )
        except Exception:
            if not left:
                raise
    raise AssertionError


@pytest.fixture(scope="session")
def setup() -> Iterator[Setup]:
    os.environ.update(ENV | PATIENCE)
    with stores.s3() as (options, folder), stores.front(str(options["endpoint_url"])) as (url, proxy):
        cluster = importlib.import_module("ray.cluster_utils").Cluster()
        try:
            for node in range(NODES):
                add_node(cluster, node)
            ray.init(address=cluster.address, log_to_driver=False)
            yield Setup(cluster, {**options, "endpoint_url": url}, folder, proxy)
        finally:
            ray.shutdown()
            cluster.shutdown()

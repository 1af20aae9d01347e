"""Two Ray Serve deployments that load one model. The nodes read it from the store once.

Usage: python ray_serve.py s3://bucket/model.safetensors
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Model:
    def __init__(self, uri: str, options: dict[str, Any] | None) -> None:
        import overwire as ow

        # The credentials come from the environment of the node: Ray shows arguments to everyone in the cluster.
        self.tensors: dict[str, Any] = ow.load_file(uri, framework="np", ray=True, storage_options=options)

    def __call__(self, _request: Any = None) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def main(uri: str, options: dict[str, Any] | None = None) -> None:
    ray.init(address="auto", ignore_reinit_error=True)
    for name in ("first", "second"):
        handle = serve.run(Model.options(name=name).bind(uri, options), name=name, route_prefix=f"/{name}")
        print(name, "holds", handle.remote().result(), "bytes")
    serve.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])

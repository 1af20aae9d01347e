#!/usr/bin/env bash
# Expected: ray.wait(refs, timeout=0) only reports which objects are ready, and changes nothing, as a poll does.
# Actual: it starts to transfer all objects to this node, and the transfers go on after it has returned. ray.get with a
# timeout cancels its transfers when the time is over.
# Versions: ray 2.60.0.
# Cause: fetch_local=True is the default of ray.wait. The raylet keeps pulling the objects of a call that has returned.
source "$(dirname "$0")/with.sh"
need ray==2.60.0 click==8.5.1 filelock==4.3.1 jsonschema==4.26.0 msgpack==1.2.4 packaging==26.4 protobuf==7.36.2 \
    pyyaml==6.0.4 requests==2.34.2
RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 python - 2>/dev/null <<'P'
import time

import ray
from ray.cluster_utils import Cluster

COUNT = 10
cluster = Cluster()
for number in range(2):
    cluster.add_node(num_cpus=1, resources={f"node{number}": 1}, object_store_memory=512 << 20)
ray.init(cluster.address, log_to_driver=False)
cluster.wait_for_nodes()


@ray.remote(num_cpus=0)
class Owner:
    def make(self):
        self.refs = [ray.put(bytes(16 << 20)) for _ in range(COUNT)]
        return self.refs


@ray.remote(num_cpus=0)
class Reader:
    def count_local(self, refs):
        places = ray.experimental.get_object_locations(refs)
        return sum(ray.get_runtime_context().get_node_id() in places[ref]["node_ids"] for ref in refs)

    def wait(self, refs):
        return len(ray.wait(refs, num_returns=len(refs), timeout=0)[0])

    def get(self, refs):
        try:
            return len(ray.get(refs, timeout=0.01))
        except ray.exceptions.GetTimeoutError:
            return 0


owner, reader = (kind.options(resources={f"node{number}": 0.1}).remote() for number, kind in enumerate((Owner, Reader)))
got = {}
for call in ("get", "wait"):
    refs = ray.get(owner.make.remote())
    ready = ray.get(getattr(reader, call).remote(refs))
    time.sleep(5)
    got[call] = ready, ray.get(reader.count_local.remote(refs))
    print(f"ray {ray.__version__}: {call} returned {ready} of {COUNT} objects; 5 s later {got[call][1]} are on the node")
ray.shutdown()
cluster.shutdown()
assert got == {"get": (0, 0), "wait": (0, COUNT)}, got
P

"""Runs ranks on several simulated hosts on this machine. Each host has its own namespaces for network, host name and
IPC, and a rate-limited link. The ranks load from a store that counts the bytes that it sends.

    python tests/groups/group_hosts.py FOLDER RANKS [RANKS ...]

makes a host for each number of ranks. Each rank checks the tensors that it loads. It prints a line of JSON for each
load with the bytes that the ranks have read, and at the end a line with the bytes that the store has sent. The exit
status is 77 if this machine does not allow namespaces.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import group_worker
import overwire as ow
import torch
import torch.distributed as dist
from group_counts import counted, reads

# CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER and CLONE_NEWNET.
UTS, IPC, USER, NET = 0x04000000, 0x08000000, 0x10000000, 0x40000000
REFUSED = 77
STORE = "10.9.0.254"
FILES = ("plain.safetensors", "compressed.safetensors")


def leave_namespaces(flags: int) -> None:
    """Moves this process to new namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        refuse(os.strerror(ctypes.get_errno()))


def refuse(why: str) -> None:
    print(why, file=sys.stderr, flush=True)
    os._exit(REFUSED)


def configure(*commands: str) -> None:
    for command in commands:
        try:
            ended = subprocess.run(command.split(), capture_output=True, text=True)
        except OSError as error:
            refuse(str(error))
        if ended.returncode:
            refuse(f"{command}: {ended.stderr}")


def shape_link(name: str) -> str:
    return f"tc qdisc add dev {name} root tbf rate 800mbit burst 256kb latency 400ms"


def fork_process(work: Callable[[], Any]) -> int:
    if pid := os.fork():
        return pid
    try:
        work()
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)
    os._exit(0)


def await_processes(pids: list[int]) -> None:
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(statuses):
        os._exit(max(map(abs, statuses)))


def run_host(host: int, ranks: range, size: int, folder: Path, ready: int, go: int) -> None:
    leave_namespaces(NET | UTS | IPC)
    socket.sethostname(f"host{host}")
    os.write(ready, b"1")
    urls = json.loads(os.read(go, 4096))
    address = f"ip addr add 10.9.0.{host + 1}/24 dev eth0"
    configure("ip link set lo up", address, "ip link set eth0 up", shape_link("eth0"))
    await_processes([fork_process(partial(run_rank, rank, size, folder, urls)) for rank in ranks])


def run_rank(rank: int, size: int, folder: Path, urls: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"hosts-{size}-{os.path.basename(urls[-1])}"), size)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60), store=store)
    world = dist.group.WORLD
    since = reads(world)
    for name, url in zip(FILES, urls, strict=False):
        for shard in ({}, group_worker.SHARD):
            tensors = ow.load_file(url, group=world, shard=shard)
            group_worker.same(tensors, group_worker.expected(folder / name, shard, rank, size))
            every = since()
            if rank == 0:
                print(json.dumps({"file": name, "read": every}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, counts: list[int]) -> None:
    user = os.getuid()
    leave_namespaces(USER | NET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    pipes = [(os.pipe(), os.pipe()) for _ in counts]
    hosts = []
    for host, ((_, ready), (go, _)) in enumerate(pipes):
        ranks = range(sum(counts[:host]), sum(counts[: host + 1]))
        hosts.append(fork_process(partial(run_host, host, ranks, sum(counts), folder, ready, go)))
        os.close(ready)
    configure("ip link add br0 type bridge", f"ip addr add {STORE}/24 dev br0", "ip link set br0 up")
    for host, pid in enumerate(hosts):
        if not os.read(pipes[host][0][0], 1):
            await_processes(hosts)
        pair = f"ip link add v{host} type veth peer name eth0 netns {pid}"
        configure(pair, f"ip link set v{host} master br0 up", shape_link(f"v{host}"))
    with ExitStack() as stack:
        sent: list[list[int]] = [[] for _ in FILES]
        servers = [counted(folder / name, answers, STORE) for name, answers in zip(FILES, sent, strict=True)]
        urls = [stack.enter_context(server) for server in servers]
        for _, (_, go) in pipes:
            os.write(go, json.dumps([*urls, f"/{os.getpid()}"]).encode())
        await_processes(hosts)
        print(json.dumps({"sent": [sum(answers) for answers in sent]}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]])

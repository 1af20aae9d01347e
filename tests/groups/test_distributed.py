"""Tests that loads in a process group give each rank the same tensors as loading and slicing on one rank."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import warm
from conftest import ROOT, cleaned

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
from overwire import distributed  # noqa: E402
from overwire.distributed import load as relays  # noqa: E402

BLOCKS = ("blocks", "block_shards", "recorded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes files with tensors that are hard to cut: uneven, short, with many dimensions, empty and packed."""
    at = tmp_path_factory.mktemp("group")
    torch.manual_seed(3)
    tensors = {
        "whole": torch.randn(1024, 1024).bfloat16(),
        "whole.b": torch.randn(1024, 1024),
        "rows": torch.randn(1024, 512).bfloat16(),
        "uneven": torch.randn(1021, 257).bfloat16(),
        "columns": torch.randn(300, 1001),
        "deep": torch.randn(4, 33, 50, 7),
        "few": torch.randn(3, 5),  # fewer rows than ranks
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "bytes8": torch.randint(0, 255, (64, 100), dtype=torch.uint8).view(torch.float8_e4m3fn),
        "flags": torch.arange(1001) % 3 == 0,
        "pairs": torch.randint(0, 255, (6, 22), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "odd": torch.randn(1 << 20)[: (1 << 20) - 3].half(),
        **{f"small.{i}": torch.randn(7, 11) for i in range(40)},
    }
    ow.save_file(tensors, at / "plain.safetensors", compress=False)
    ow.save_file(tensors, at / "compressed.safetensors")
    ow.save_file({"other": torch.zeros(3)}, at / "other.safetensors")
    good = (at / "compressed.safetensors").read_bytes()
    for number, part in enumerate((0.2, 0.8)):
        damaged = bytearray(good)
        damaged[int(part * len(good))] ^= 0x40
        (at / f"damaged{number}.safetensors").write_bytes(damaged)
    damaged = bytearray(good)
    damaged[-len(damaged) // 3] ^= 0x40
    (at / "damaged.safetensors").write_bytes(damaged)
    with pytest.raises(ow.CorruptError):
        ow.verify(at / "damaged.safetensors")
    return at


def ranks(
    folder: Path, count: int, *steps: str, backend: str = "gloo", devices: tuple[str, ...] = (), exchange: str = "collective"
) -> None:
    """Runs the steps of group_worker on count ranks, and asserts that all succeed."""
    store = f"store-{count}-{backend}-{exchange}-{'-'.join(steps)}"
    env = {"WORLD_SIZE": str(count), "GROUP_BACKEND": backend, "OVERWIRE_EXCHANGE": exchange}
    if devices:
        env["GROUP_DEVICES"] = ",".join(devices)
    done = warm.run([ROOT / "tests" / "groups" / "group_worker.py", folder, store, *steps], env=cleaned() | env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done ") == count * len(steps), done.stdout + done.stderr


def test_eight_ranks(folder: Path) -> None:
    """Eight ranks load whole tensors, rows and columns through mapped memory and collectives, from compressed and plain
    files."""
    ranks(folder, 8, "tiny")


def test_two_ranks(folder: Path) -> None:
    """Two ranks load through collectives and each by itself, also with their own keys. They report failures, bad files
    and a dead rank."""
    ranks(folder, 2, "every_way", "wanted", "failing", "hurt", "dying")


def test_four_ranks_map_each_others_memory(folder: Path) -> None:
    ranks(folder, 4, "mapped", "streamed", "gone", exchange="mapped")


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_that_request_blocks_read_each_byte_once(folder: Path, count: int) -> None:
    ranks(folder, count, *BLOCKS, *["block_hosts"] * (count == 3), "block_gone", exchange="mapped")


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (4, 8))])
def test_every_function_loads_every_source(folder: Path, count: int) -> None:
    """load_file, stream (with and without max_memory) and load_model work with each transport: on plain and compressed
    files, from disk, from a store and pinned, for whole tensors and slices."""
    ranks(folder, count, "cells")


def test_a_failure_on_one_rank_ends_the_load_on_all(folder: Path) -> None:
    ranks(folder, 2, "refused", "closed", "interrupted", "stopped", "faults", exchange="mapped")


def test_a_forked_child_is_refused_by_the_group(folder: Path) -> None:
    """A forked child cannot use a group's stream, and the ranks continue."""
    ranks(folder, 2, "forked_streams", exchange="mapped")


def test_ranks_open_the_same_file_and_groups_are_freed(folder: Path) -> None:
    ranks(folder, 2, "replaced", "freed", exchange="mapped")


def test_ranks_share_the_reads_from_a_store(folder: Path) -> None:
    ranks(folder, 2, "block_stores", exchange="")


def test_two_ranks_choose_the_transport(folder: Path) -> None:
    """On the CPU, loads, streams and modules work with the default transport and with collectives."""
    ranks(folder, 2, "streamed", "chosen", exchange="")
    ranks(folder, 2, "streamed")


def test_ranks_that_map_memory_need_three_collectives_per_load(folder: Path) -> None:
    ranks(folder, 2, "meetings")


def test_ranks_of_several_hosts_share_the_reading(folder: Path) -> None:
    ranks(folder, 4, "spread", "hosts")
    ranks(folder, 3, "afar", exchange="")


@pytest.mark.parametrize("hosts", [(1, 1, 1), (2, 2)])
def test_hosts_with_separate_networks_read_a_store_once(folder: Path, hosts: tuple[int, ...]) -> None:
    """Hosts with separate namespaces and rate-limited links together fetch each stored byte once from the store. They
    send the bytes to each other over gloo."""
    done = warm.run([ROOT / "tests" / "groups" / "group_hosts.py", folder, *hosts], env=cleaned() | {"OVERWIRE_EXCHANGE": "auto"})
    if done.returncode == 77:
        pytest.skip(f"no namespaces: {done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    *loads, end = map(json.loads, done.stdout.splitlines())
    assert len(loads) == 4
    for load in loads:
        stored = (folder / load["file"]).stat().st_size
        assert 0.9 * stored < sum(load["read"]) <= 1.02 * stored, (load, stored)
    for name, sent in zip(("plain.safetensors", "compressed.safetensors"), end["sent"], strict=True):
        stored = (folder / name).stat().st_size
        # There are two loads, and each rank also reads the header.
        assert 1.8 * stored < sent <= 2 * (1.02 * stored + sum(hosts) * (256 << 10)), (name, sent, stored)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("count", "steps", "exchange"), [(2, BLOCKS, "mapped"), (4, BLOCKS, "mapped"), (2, (), ""), (4, (), "auto")])
def test_ranks_of_one_gpu_map_each_others_memory(
    folder: Path, count: int, steps: tuple[str, ...], exchange: str
) -> None:
    ranks(folder, count, "mapped", "streamed", *steps, "gone", devices=("cuda:0",) * count, exchange=exchange)


@pytest.mark.slow
def test_four_ranks_and_a_subgroup(folder: Path) -> None:
    """Four ranks load through collectives and each by itself, and so do two of them in their own group."""
    ranks(folder, 4, "every_way", "subgroup")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_ranks_of_one_gpu_send_through_the_host(folder: Path) -> None:
    ranks(folder, 2, "every_way", devices=("cuda:0", "cuda:0"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_two_gpus(folder: Path, backend: str) -> None:
    """Two ranks with a GPU each load through collectives over NCCL, and each by itself."""
    ranks(folder, 2, "every_way", backend=backend, devices=("cuda:0", "cuda:1"))


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return warm.fresh(["-m", "overwire", "bench", *words], env=cleaned())


@pytest.mark.imports_torch
@pytest.mark.parametrize("count", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3))])
def test_bench_of_ranks(tmp_path: Path, count: int) -> None:
    """`overwire bench --ranks` compares the bytes, and prints the baselines and a row for each coding, mode and
    transport. It includes other libraries or says why not. It leaves no file and runs no Python file from the working
    folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    words = ["bench", "--ranks", str(count), "--size", "8MB", "--repeat", "1", "--device", "cpu", "--json", "--dir", str(there)]
    environment = cleaned() | {"PYTHONPATH": str(Path(ow.__file__).parents[1])}
    command = [*processes.plant_modules(here), *words]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(here.glob("ran-*"))
    report = json.loads(done.stdout)
    assert report["ranks"] == count and report["bytes"] == 8_000_000
    rows = {row["row"]: row for row in report["rows"]}
    assert len(rows) == len(report["rows"])
    for coding in ("compressed", "plain"):
        for who in ("each rank reads its part", "rank 0 reads all"):
            floor = rows.pop(f"floor: {coding}, {who}")
            assert floor["all"] > 0 and floor["stored"] > 0 and floor["cpu"] > 0
        for mode in ("whole", "tensor-parallel"):
            for carrier in ("mapped", "collective", "none"):
                row = rows.pop(f"{coding}, {mode}, {carrier}")
                assert row["verified"] and row["rank"] > 0 and row["first"] > 0 and row["floor"] > 0 and row["cpu"] > 0
                assert row["all"] <= count * row["rank"] * 1.001
    for library in ("instanttensor", "fastsafetensors"):
        assert "GPU per rank" in rows.pop(f"{library}, plain, whole")["left_out"]
    assert not rows and list(there.iterdir()) == []


@pytest.mark.imports_torch
def test_bench_refuses_wrong_bytes(tmp_path: Path) -> None:
    """If a rank's tensors differ from the plain file's, the benchmark ends. Wrong arguments are refused."""
    ow.save_file({"a": torch.ones(64, 64)}, tmp_path / "plain.safetensors", compress=False)
    ow.save_file({"a": torch.ones(64, 64) * 2}, tmp_path / "packed.safetensors")
    task = {"folder": str(tmp_path), "ranks": 1, "rank": 0, "way": "mapped", "device": "cpu", "repeat": 1, "first": True, "floors": {}}
    done = warm.fresh(["-m", "overwire._bench_rank", json.dumps(task)], env=cleaned())
    assert done.returncode == 1 and "compressed, whole, mapped: the tensors differ from the plain file: rank 0, a" in done.stderr, done.stderr
    for words in (("--ranks", "0"), ("--ranks=many",), ("--ranks", "2", "--size", "much"), ("--ranks", "2", "--repeat", "0")):
        assert bench(*words).returncode == 2, words


NOW = relays.Situation(4, 1, 4, gpu=True, remote=False, sends=True, unreachable=False)


@pytest.mark.parametrize(
    ("setting", "now", "carrier"),
    [
        ("auto", NOW, "mapped"),
        ("auto", NOW._replace(ranks=2, local=2), "mapped"),
        ("auto", NOW._replace(sends=False), "mapped"),
        ("auto", NOW._replace(hosts=2, local=2), "mapped"),
        ("auto", NOW._replace(hosts=2, local=2, remote=True), "collective"),
        ("auto", NOW._replace(hosts=4, local=1), "none"),
        ("auto", NOW._replace(gpu=False), "none"),
        ("auto", NOW._replace(gpu=False, remote=True), "mapped"),
        ("auto", NOW._replace(unreachable=True), "collective"),
        ("auto", NOW._replace(unreachable=True, sends=False), "none"),
        ("auto", NOW._replace(ranks=1, local=1), "none"),
        ("mapped", NOW, "mapped"),
        ("collective", NOW, "collective"),
        ("none", NOW, "none"),
    ],
)
def test_the_chosen_transport(setting: str, now: relays.Situation, carrier: str) -> None:
    """The setting and the situation of the ranks determine the transport."""
    assert relays.choose_carrier(setting, now) == carrier


def test_blocks_cover_a_dimension_once() -> None:
    for size in range(40):
        for count in range(1, 9):
            blocks = [distributed.shard_range(size, count, rank) for rank in range(count)]
            assert [at for lo, hi in blocks for at in range(lo, hi)] == list(range(size))
            want = [len(part) for part in torch.arange(size).chunk(count)] if size else []
            assert [hi - lo for lo, hi in blocks if hi > lo] == want


def test_buffers_have_bounded_sizes_for_any_number_of_ranks(tmp_path: Path) -> None:
    """A rank's share is a multiple of 256 bytes, and 32 MiB for up to 63 ranks. For up to 2,047 ranks, a chunk of the
    default size fits into it. If ranks map each other's memory, a rank's own buffers have at most 128 MiB plus 16 MiB
    per other rank, and at most 256 MiB. Staging one rank's shares takes at most 48 MiB, and staging all of them less
    than 4 GiB."""
    for count in [*range(1, 5000), 1 << 20]:
        share = relays.share_of_rank(count, relays.SHARE)
        assert share * count < 2 << 30 and share % 256 == 0 and (share == relays.SHARE) == (count < 64), count
        mapped = relays.mapped_share(count, 1 << 20)
        own, staging = mapped * relays.count_own_buffers(count), mapped * relays.STAGES
        assert mapped % 256 == 0 and own <= min(128 + 16 * (count - 1), 256) << 20 and staging <= 48 << 20, count
        assert mapped * relays.STAGES * count < 4 << 30 and (mapped == 16 << 20) == (count <= 85), count
    ow.save_file({"a": torch.randn(2048, 1024)}, tmp_path / "compressed")
    ow.save_file({"a": torch.randn(2048, 1024)}, tmp_path / "plain", compress=False)
    for path, chunk in (("compressed", 1 << 20), ("plain", (1 << 20) - 8192)):
        with ow.safe_open(tmp_path / path) as file:
            room = file._live_model().room()
        assert room == chunk + 288
        assert relays.do_chunks_fit(2047, room, mapped=False) and not relays.do_chunks_fit(2100, room, mapped=False)


def test_every_chunk_fits_into_the_chosen_transport() -> None:
    """For any number of ranks on a host, every chunk fits into the shares of the chosen transport."""
    room = (16 << 20) + 288  # a chunk of 16 MiB with its head
    chosen = set()
    for count in range(2, 400):
        members = SimpleNamespace(size=count, hosts=1, most_local=count, unreachable="", sending_device=lambda _: "cpu")
        load = relays.GroupLoad(members, [SimpleNamespace(device="cpu")])
        load.choose_carrier("auto", [{"remote": True, "room": room}] * count)
        if load.carrier != "none":
            mapped = load.carrier == "mapped"
            share = relays.mapped_share(count, room) if mapped else relays.share_of_rank(count, relays.SHARE)
            assert share >= room, count
        chosen.add((load.carrier, 85 < count < 128, count >= 128))
    assert chosen == {("mapped", False, False), ("collective", True, False), ("none", False, True)}


def test_sharding_needs_a_process_group(folder: Path) -> None:
    path = folder / "plain.safetensors"
    with pytest.raises(ow.ArgumentError, match="group"):
        ow.load_file(path, shard={"rows": 0})
    with pytest.raises(ow.ArgumentError, match="process group"):
        ow.load_file(path, group=3)

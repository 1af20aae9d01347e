"""Tests that tensors are merged, and distributed over threads, at least as evenly as in nyacomp."""

from __future__ import annotations

import random

import overwire as ow
import pytest
import torch
from conftest import same
from overwire.compat import nyacomp
from overwire.compat.nyacomp import partition


def _tensors(rng: random.Random, count: int) -> list[torch.Tensor]:
    shapes = [(), (1,), (0, 3), (7,), (4, 5), (5, 4), (2, 1, 3)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
    made = []
    for _ in range(count):
        shape, dtype = rng.choice(shapes), rng.choice(dtypes)
        data = torch.tensor(list(rng.randbytes(torch.empty(shape).numel() * dtype.itemsize)), dtype=torch.uint8)
        made.append((data % 2 if dtype == torch.bool else data).view(dtype).reshape(shape))
    return made


def test_tensors_are_merged_and_split(seed: int) -> None:
    rng = random.Random(seed)
    for count in (0, 1, 2, 30, 200):
        tensors = _tensors(rng, count)
        for merge in (
            nyacomp.merge_tensors, nyacomp.iterative_merge_tensors,
            lambda t: nyacomp.merge_tensors(t, rng.randrange(1, 400)),
        ):
            merged, info = merge(tensors)
            lines = [list(map(int, line.split(","))) for line in info.splitlines()]
            assert sorted(at for line in lines for at in line) == list(range(count)) and len(lines) == len(merged)
            for line, stack in zip(lines, merged, strict=True):
                assert {(tensors[at].shape, tensors[at].dtype) for at in line} == {(stack.shape[1:], stack.dtype)}
            got = nyacomp.split_tensors(merged, info)
            assert len(got) == count
            for a, b in zip(got, tensors, strict=True):
                same(a, b)


def test_splitting_works_as_in_nyacomp() -> None:
    assert nyacomp.split_into_bins(list(range(7)), 3) == [[0, 1, 2], [3, 4], [5, 6]]
    assert nyacomp.split_into_bins([1, 2], 4) == [[1], [2], [], []]
    tensors = [torch.zeros(10) for _ in range(7)]  # 40 bytes each
    _, info = nyacomp.merge_tensors(tensors, 100)  # 280 / 100 gives 3 stacks
    assert info == "0,1,2\n3,4\n5,6"
    _, info = nyacomp.merge_tensors(tensors, 1)  # a stack has at least one tensor
    assert info == "\n".join(map(str, range(7)))
    assert nyacomp.merge_tensors(tensors)[1] == "0,1,2,3,4,5,6"
    parts = nyacomp.split_tensors([torch.arange(6).reshape(3, 2)], "2,0,1")
    assert [p.tolist() for p in parts] == [[2, 3], [4, 5], [0, 1]]
    assert len({p.untyped_storage().data_ptr() for p in parts}) == 3 and parts[0].untyped_storage().nbytes() == 16
    for stack, info in (
        ([torch.zeros(3, 2)], "0,1"),
        ([], "0"),
        ([torch.zeros(2)], "0,0"),
        ([torch.tensor(1)], "0"),
        ([torch.zeros(1)], "x"),
    ):
        with pytest.raises(ow.FormatError):
            nyacomp.split_tensors(stack, info)


# -- partitioning


def _multifit(sizes: list[int], bins: int, k: int = 20) -> int:
    """Returns the largest load of a thread (makespan) that nyacomp's MULTIFIT gives."""

    def first_fit(capacity: float) -> list[int]:
        loads: list[int] = []
        for size in sorted(sizes, reverse=True):
            for at, load in enumerate(loads):
                if load + size <= capacity:
                    loads[at] += size
                    break
            else:
                loads.append(size)
        return loads

    mean, most = sum(sizes) / bins, max(sizes)
    low, high = int(max(mean, most)), max(2 * mean, most)
    for _ in range(k):
        middle = round((low + high) / 2)
        if len(first_fit(middle)) <= bins:
            high = middle
        else:
            low = middle
        if high - low < 1:
            break
    return max(first_fit(high))


def test_the_makespan_is_at_most_multifits(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        count, bins = rng.randrange(1, 120), rng.randrange(1, 40)
        draw = rng.choice(
            [
                lambda: rng.randrange(1, 1000), lambda: int(rng.lognormvariate(15, 2)),
                lambda: rng.choice([5, 7, 11]) * 1000,
            ]
        )
        sizes = [draw() for _ in range(count)]
        found = partition.multifit_partition(sizes, bins)
        assert len(found) == bins and sorted(s for part in found for s in part) == sorted(sizes)
        ours, theirs = max(map(sum, found)), _multifit(sizes, bins)
        assert max(max(sizes), sum(sizes) / bins) <= ours <= theirs, (sizes, bins)
        places = partition.massage(tuple(sizes), bins)
        assert len(places) == bins and sorted(at for part in places for at in part) == list(range(count))
        assert max(sum(sizes[at] for at in part) for part in places) <= theirs
        assert all(sizes[part[0]] == max(sizes[at] for at in part) for part in places if part)
        assert not any(len(part) > 1 for part in places) or all(places)


def _llama(layers: int, hidden: int, ffn: int, kv: int, vocab: int) -> list[tuple[int, ...]]:
    block = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(ffn, hidden)] * 2 + [(hidden, ffn)] + [(hidden,)] * 2
    return [(vocab, hidden)] * 2 + block * layers + [(hidden,)]


def _unet() -> list[tuple[int, ...]]:
    # The large shapes of Stable Diffusion's UNet. Few of them are the same, unlike in a Llama.
    shapes: list[tuple[int, ...]] = [(320, 4, 3, 3), (1280, 320), (1280, 1280), (4, 320, 3, 3)]
    for out, into in (
        (320, 320), (640, 320), (1280, 640), (1280, 2560), (1280, 1920), (640, 1920), (640, 1280), (640, 960),
        (320, 960),
    ):
        shapes += [
            (out, into, 3, 3), (out, out, 3, 3), (out, 1280), (out, out), (8 * out, out), (out, 4 * out), (out, 768),
            (out,), (out,),
        ]
    return shapes * 2


REAL_LISTS = {
    "llama 3 8B": _llama(32, 4096, 14336, 1024, 128256),
    "llama 2 70B": _llama(80, 8192, 28672, 1024, 32000),
    "MiniLM": [(30522, 384), (512, 384)] + ([(384, 384)] * 4 + [(1536, 384), (384, 1536)] + [(384,)] * 9 + [(1536,)]) * 6,
    "GPT-2": [(50257, 768), (1024, 768)] + [(768, 2304), (2304,), (768, 768), (768, 3072), (3072,), (3072, 768), (768,)] * 12,
    "Stable Diffusion": _unet(),
}


@pytest.mark.parametrize("name", REAL_LISTS)
def test_the_makespan_of_real_models(name: str, monkeypatch) -> None:
    """For the tensors of real models, the busiest thread gets at most as many bytes as with nyacomp's merge and
    MULTIFIT, even for thread counts at which nyacomp fails. The tensors have no memory."""
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in REAL_LISTS[name]]
    sizes = [tensor.nbytes for tensor in tensors]
    for threads in (8, 32):
        monkeypatch.setenv("NUM_THREADS", str(threads))
        # nyacomp merges tensors of the same shape up to 500 MiB or a thread's share
        merged, _ = nyacomp.merge_tensors(tensors)
        theirs = _multifit([tensor.nbytes for tensor in merged], threads)
        searched, info = nyacomp.iterative_merge_tensors(tensors)
        assert sorted(int(at) for line in info.splitlines() for at in line.split(",")) == list(range(len(tensors)))
        ours = nyacomp.calculate_makespan(searched)
        assert max(max(sizes), sum(sizes) / threads) <= ours <= theirs
        assert nyacomp.calculate_makespan(tensors) <= _multifit(sizes, threads)


def test_partitions_at_which_nyacomp_fails() -> None:
    """Partitions with fewer tensors than threads, and of empty tensors, work."""
    for count in (0, 1, 3, 8, 9, 10):
        sizes = [100 + at for at in range(count)]
        assert sum(map(len, partition.massage(sizes, 8))) == count
    assert partition.multifit_partition([], 3) == [[], [], []] and partition.massage([0, 0, 0], 2) != [[], [0, 1, 2]]
    assert partition.to_idx([5, 7, 5], [[5], [7, 5]]) == [[0], [1, 2]]
    assert partition.ffd_binpack([9, 5, 5, 1], 10) == [[9, 1], [5, 5]] and partition.ffd_binpack([20], 10) == [[20]]
    with pytest.raises(KeyError):
        partition.to_idx([5], [[6]])
    with pytest.raises(ValueError):
        partition.multifit_partition([1], 0)


def test_the_search_for_a_limit_is_at_least_as_good(seed: int, monkeypatch) -> None:
    """With a searched merge limit, the busiest thread gets at most as many bytes as with the default limit."""
    rng = random.Random(seed)
    for threads in ("2", "8"):
        monkeypatch.setenv("NUM_THREADS", threads)
        tensors = [torch.empty(rng.choice([10, 100, 1000]), rng.choice([4, 40])) for _ in range(60)]
        searched, _ = nyacomp.iterative_merge_tensors(tensors)
        plain, _ = nyacomp.merge_tensors(tensors)
        assert (
            nyacomp.calculate_makespan(searched)
            <= nyacomp.calculate_makespan(plain)
            == _multifit([nyacomp.tensor_size(t) for t in plain], int(threads))
        )

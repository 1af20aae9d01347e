"""Tests that overwire.sleep frees the memory of tensors and restores them bit for bit."""

from __future__ import annotations

import gc
import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
from conftest import every_dtype, raw, soon, ugly
from overwire.model.opened import Model


def kept(tensors: dict[str, Any]) -> dict[str, bytes]:
    # These are clones, because torch does not free memory that numpy has seen.
    return {name: raw(tensor.detach().clone()) for name, tensor in tensors.items()}


def hold(tensors: dict[str, Any], want: dict[str, bytes]) -> None:
    assert kept(tensors) == want


def model(seed: int = 5) -> torch.nn.Module:
    torch.manual_seed(seed)
    made = torch.nn.Sequential(
        torch.nn.Linear(300, 700), torch.nn.LayerNorm(700), torch.nn.Linear(700, 300, bias=False)
    ).bfloat16()
    made.register_buffer("steps", torch.arange(7), persistent=False)
    made.twin = torch.nn.Linear(300, 700)
    made.twin.weight = made[0].weight  # tied to the first layer
    return made


def parts(module: torch.nn.Module) -> dict[str, Any]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def test_a_module_sleeps_and_wakes() -> None:
    module = model()
    want = kept(parts(module))
    seen: list[ow.Progress] = []
    asleep = ow.sleep(module, progress=seen.append)
    whole = sum({p.data_ptr(): p.nbytes for p in model().parameters()}.values()) + 56
    assert asleep.nbytes == asleep.released == whole and 0 < asleep.stored < 0.75 * whole
    assert seen[-1].bytes == seen[-1].total_bytes == whole
    assert all(p.untyped_storage().nbytes() == 0 for p in parts(module).values())
    assert "released" in repr(asleep) and ow.last_report()["stored"] == asleep.stored
    asleep.wake()
    hold(parts(module), want)
    assert module.twin.weight is module[0].weight and "awake" in repr(asleep) and asleep.stored == 0
    asleep.wake()
    asleep.close()
    assert module[0](torch.ones(1, 300, dtype=torch.bfloat16)).isfinite().all()


def test_a_thousand_cycles_change_no_bytes_and_leak_no_memory() -> None:
    torch.manual_seed(3)
    tensors = {"a": torch.randn(40, 300).bfloat16(), "b": torch.arange(50), "c": torch.randn(5000)}
    want = kept(tensors)

    def mapped() -> int:
        return sum(1 for line in open("/proc/self/maps", encoding="utf-8") if "rw-p" in line)

    descriptors, mappings = 0, 0
    for cycle in range(1000):
        with ow.sleep(tensors):
            assert not tensors["a"].untyped_storage().nbytes()
        if cycle == 100:
            descriptors, mappings = len(os.listdir("/proc/self/fd")), mapped()
        if cycle % 97 == 0:
            hold(tensors, want)
    hold(tensors, want)
    assert soon(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)  # earlier tests may close late
    assert soon(lambda: mapped() <= mappings + 64)  # the number of the allocator's mappings varies


def test_tensors_of_every_dtype_and_shape() -> None:
    tensors = {**every_dtype(), **ugly()}
    del tensors["conj"], tensors[""]
    want = kept(tensors)
    asleep = ow.sleep(tensors)
    asleep.wake()
    hold(tensors, want)


def test_views_share_their_memory() -> None:
    whole = torch.arange(60_000, dtype=torch.float32)
    rows, columns = whole.view(200, 300)[:50], whole.view(200, 300).t()
    before = whole.clone()
    asleep = ow.sleep({"rows": rows, "columns": columns, "whole": whole})
    assert asleep.released == asleep.nbytes == 240_000 and whole.untyped_storage().nbytes() == 0
    asleep.wake()
    assert (
        torch.equal(whole, before)
        and torch.equal(rows, before.view(200, 300)[:50])
        and torch.equal(columns, before.view(200, 300).t())
    )
    assert rows.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_memory_that_the_tensors_do_not_cover_is_not_freed() -> None:
    whole = torch.arange(1000)
    part, foreign = whole[:10], torch.frombuffer(bytearray(8000), dtype=torch.uint8)
    asleep = ow.sleep({"part": part, "foreign": foreign})
    assert asleep.released == 0 and asleep.nbytes == 8080
    whole[500] = -1
    part.zero_()
    asleep.wake()
    assert part.tolist() == list(range(10)) and whole[500] == -1


def test_dense_tensors_in_another_order() -> None:
    """A channels_last tensor frees its memory and keeps its order. A strided view wakes with its values."""
    image = torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last)
    stripes = torch.randn(100, 100)[:, ::2]
    want = kept({"image": image, "stripes": stripes})
    asleep = ow.sleep({"image": image, "stripes": stripes})
    assert asleep.released == image.numel() * 4 and image.untyped_storage().nbytes() == 0
    stripes.zero_()
    asleep.wake()
    hold({"image": image, "stripes": stripes}, want)
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_without_release_the_memory_stays() -> None:
    """With release=False, the memory stays where it is, and waking restores its bytes."""
    module = model()
    want = kept(parts(module))
    places = {name: tensor.data_ptr() for name, tensor in parts(module).items()}
    asleep = ow.sleep(module, release=False)
    with torch.no_grad():
        for tensor in parts(module).values():
            tensor.zero_()
    asleep.wake()
    hold(parts(module), want)
    assert places == {name: tensor.data_ptr() for name, tensor in parts(module).items()} and asleep.released == 0


def test_the_file_of_a_sleep_is_an_ordinary_file(tmp_path: Path) -> None:
    module = model()
    want = kept(parts(module))
    path = tmp_path / "asleep.safetensors"
    asleep = ow.sleep(module, to_file=path)
    assert path.stat().st_size == asleep.stored
    assert ow.verify(path)["ok"]
    hold(ow.load_file(path), want)
    asleep.close()
    fresh = model(6)
    ow.load_model(fresh, path, strict=False)
    del want["steps"]
    hold({name: tensor for name, tensor in parts(fresh).items() if name != "steps"}, want)
    for wrong in ("http://127.0.0.1:1/x.safetensors", tmp_path / "none" / "x.safetensors"):
        held = {"a": torch.ones(3)}
        with pytest.raises((ow.NotSupportedError, ow.NotFoundError, ow.IOFailure)):
            ow.sleep(held, to_file=wrong)
        assert held["a"].tolist() == [1, 1, 1]


def test_a_full_disk(tmp_path: Path) -> None:
    """The file of to_file= is written like any other. After an error, the old file and the tensors are unchanged, and
    no temporary file is left."""
    path, tensors = tmp_path / "m.safetensors", {"w": torch.randn(500, 999)}
    want = kept(tensors)
    ow.save_file({"old": torch.ones(3)}, path)
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))  # Python ignores the signal
    try:
        with pytest.raises(ow.IOFailure) as caught:
            ow.sleep(tensors, to_file=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert str(path) in str(caught.value) and path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["m.safetensors"]
    hold(tensors, want)
    ow.sleep(tensors, to_file=path).wake()
    hold(ow.load_file(path), want)


def test_a_sleep_over_max_memory_is_refused_in_advance() -> None:
    module = model()
    want = kept(parts(module))
    with pytest.raises(ow.OutOfMemoryError, match="max_memory") as caught:
        ow.sleep(module, max_memory=100_000)
    assert caught.value.asked > 200_000 and caught.value.free == 100_000
    hold(parts(module), want)
    with ow.sleep(module, max_memory="1MB") as asleep:
        assert asleep.stored <= 1_000_000
    hold(parts(module), want)


def test_tensors_that_cannot_sleep_are_named() -> None:
    for wrong, error in (
        ([torch.ones(3)], ow.ArgumentError),
        ({"a": 3}, ow.ArgumentError),
        ({1: torch.ones(3)}, ow.ArgumentError),
        ({"a": torch.ones(3, device="meta")}, ow.ArgumentError),
        ({"a": torch.ones(3, dtype=torch.complex128)}, ow.NotSupportedError),
        ({"a": torch.eye(3).to_sparse()}, ow.NotSupportedError),
        ({"a": torch.ones(3, dtype=torch.complex64).conj()}, ow.NotSupportedError),
    ):
        with pytest.raises(error, match="sleep"):
            ow.sleep(wrong)


def test_close_without_waking() -> None:
    """Tensors stay empty after `close`. Dropping a handle while its tensors sleep causes a warning."""
    tensors = {"a": torch.ones(1000)}
    asleep = ow.sleep(tensors)
    asleep.close()
    assert asleep.stored == 0 and "closed" in repr(asleep)
    with pytest.raises(ow.ArgumentError, match="close"):
        asleep.wake()
    assert tensors["a"].untyped_storage().nbytes() == 0
    again = ow.sleep({"a": torch.ones(1000)})
    with pytest.warns(ResourceWarning, match="stay empty"):
        del again
        gc.collect()


def test_an_interrupted_release_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    from overwire.verbs import sleeping

    module = model()
    want = kept(parts(module))
    real, calls = sleeping._resize_storage, []

    def resize(storage: Any, size: int) -> None:
        calls.append(size)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(storage, size)

    monkeypatch.setattr(sleeping, "_resize_storage", resize)
    with pytest.raises(KeyboardInterrupt):
        ow.sleep(module)
    hold(parts(module), want)


def test_waking_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from overwire.verbs import sleeping

    module = model()
    want = kept(parts(module))
    asleep = ow.sleep(module)
    real, calls = sleeping._resize_storage, []

    def resize(storage: Any, size: int) -> None:
        calls.append(size)
        if len(calls) == 3:
            raise ow.OutOfMemoryError("overwire: none")
        real(storage, size)

    monkeypatch.setattr(sleeping, "_resize_storage", resize)
    with pytest.raises(ow.OutOfMemoryError):
        asleep.wake()
    assert all(p.untyped_storage().nbytes() == 0 for p in module.parameters())
    start = sleeping.Model.start
    monkeypatch.setattr(sleeping.Model, "start", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        asleep.wake()
    monkeypatch.setattr(sleeping.Model, "start", start)
    asleep.wake()
    hold(parts(module), want)


def test_threads_sleep_and_wake_at_once() -> None:
    """Threads can put separate modules to sleep and wake them at the same time."""
    failures: list[BaseException] = []

    def cycle(seed: int) -> None:
        try:
            module = model(seed)
            want = kept(parts(module))
            for _ in range(5):
                asleep = ow.sleep(module)
                time.sleep(0.001)
                asleep.wake()
                hold(parts(module), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=cycle, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("other", ["wake", "close"])
def test_one_thread_wakes_and_others_wait(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    """While one thread wakes the tensors, `wake` and `close` on other threads wait. Nothing is loaded twice or lost. A
    signal handler that interrupts `wake` and calls one of them gets a clear error."""
    tensors = {"a": torch.randn(300, 300), "b": torch.randn(50).bfloat16()}
    want = kept(tensors)
    asleep = ow.sleep(tensors)
    started: list[str] = []
    inside, again, go = threading.Event(), threading.Event(), threading.Event()
    start = Model.start

    def slowly(self: Model, *rest: Any, **named: Any) -> Any:
        started.append(threading.current_thread().name)
        (again if inside.is_set() else inside).set()
        with pytest.raises(ow.ArgumentError, match="signal handler"):
            getattr(asleep, other)()
        assert go.wait(60)
        return start(self, *rest, **named)

    monkeypatch.setattr(Model, "start", slowly)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(asleep.wake)
        assert inside.wait(60)
        with pytest.raises(ow.DeadlineError, match="another thread"):
            asleep.wake(timeout=1e-6)
        second = pool.submit(getattr(asleep, other))
        again.wait(0.1)
        go.set()
        first.result(60)
        tensors["b"].fill_(7)  # the program changes a tensor after waking
        second.result(60)
    assert len(started) == 1 and "awake" in repr(asleep) and bool((tensors["b"] == 7).all())
    hold({"a": tensors["a"]}, {"a": want["a"]})


def test_a_forked_child_is_refused(torch_script: Any) -> None:
    """A forked child cannot wake its parent's tensors. The parent still can."""
    torch_script("""
import os, torch
import overwire as ow
tensors = {"a": torch.arange(1000)}
asleep = ow.sleep(tensors)
child = os.fork()
if child == 0:
    code = 1
    try:
        asleep.wake()
    except ow.ForkedError:
        code = 0
    os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
asleep.wake()
assert tensors["a"].tolist() == list(range(1000))
""")


def test_sleep_on_the_cpu_needs_no_preparation() -> None:
    """CPU tensors sleep in ordinary memory, so there is nothing to prepare. Tensors that cannot sleep are refused."""
    module = model()
    want = kept(parts(module))
    with ow.prepare_sleep(module) as ready:
        assert ready.wait() and ready.wait(0) and ready.nbytes == 0
    assert ready.wait() and "closed" in repr(ready)
    ready.close()
    assert ow.prepare_sleep({}).wait() and ow.prepare_sleep("1GB", device="cpu").wait()
    hold(parts(module), want)
    for wrong in ([torch.ones(3)], {"a": 3}, {1: torch.ones(3)}, "much", 0, -1, True):
        with pytest.raises(ow.ArgumentError):
            ow.prepare_sleep(wrong)
    with pytest.raises(ow.ArgumentError, match="device"):
        ow.prepare_sleep(module, device="cuda")


def test_tensors_that_share_memory_sleep_once() -> None:
    """Memory that several tensors share is stored once: views with two dtypes, overlapping parts, a scalar in another
    tensor's memory, an empty view, and a tensor with two names."""
    words = torch.arange(5000, dtype=torch.int32)
    tensors: dict[str, Any] = {
        "words": words,
        "bytes": words.view(torch.uint8),
        "halves": words.view(torch.float16)[100:9000],
        "left": words[:3000],
        "right": words[2000:],
        "scalar": words[77],
        "none": words[5:5],
        "tied": words,
        "rows": words.view(50, 100)[3],
    }
    want = kept(tensors)
    asleep = ow.sleep(tensors)
    assert asleep.nbytes == asleep.released == 20_000 and words.untyped_storage().nbytes() == 0
    asleep.wake()
    hold(tensors, want)
    assert all(tensor.untyped_storage().data_ptr() == words.untyped_storage().data_ptr() for tensor in tensors.values())
    module = model()
    whole = kept(parts(module))
    part = {name: p for name, p in module.named_parameters(remove_duplicate=False) if "weight" in name}
    with ow.sleep(part) as asleep:
        assert module[0].bias.untyped_storage().nbytes() and not module.twin.weight.untyped_storage().nbytes()
        assert asleep.released == asleep.nbytes == 2 * (300 * 700 + 700 + 700 * 300)
    hold(parts(module), whole)


def test_a_timeout_leaves_tensors_as_they_were(tmp_path: Path) -> None:
    """Every function on tensors in memory raises DeadlineError after its timeout, and leaves the tensors as they were.
    `wake` can be tried again. A call that ends in time is not affected."""
    tensors = {str(n): torch.randn(1 << 20).bfloat16() for n in range(24)}
    want = kept(tensors)
    for wrong in (0, -1.0, True, "1", float("nan")):
        with pytest.raises(ow.ArgumentError, match="timeout"):
            ow.digest(tensors, timeout=wrong)  # type: ignore[call-overload]

    def late(call: Callable[[], Any], undo: Callable[[Any], None]) -> None:
        # A call may end before it first checks its deadline, so it is repeated.
        for _ in range(200):
            try:
                made = call()
            except ow.DeadlineError as error:
                assert "timeout" in str(error)
                return
            undo(made)
        raise AssertionError("no call was late")

    late(lambda: ow.sleep(tensors, timeout=1e-6), lambda asleep: asleep.wake())
    late(lambda: ow.digest(tensors, timeout=1e-6), lambda _: None)
    hold(tensors, want)
    asleep = [ow.sleep(tensors, timeout=600)]
    late(lambda: asleep[0].wake(timeout=1e-6), lambda _: asleep.append(asleep.pop() and ow.sleep(tensors)))
    assert asleep[0].stored
    asleep[0].wake(timeout=600, progress=lambda seen: None)
    hold(tensors, want)
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    new["3"][7] += 1
    there, back = tmp_path / "there.safetensors", tmp_path / "back.safetensors"
    ow.save_delta(new, tensors, there)
    ow.save_delta(tensors, new, back)
    late(lambda: ow.apply_delta(tensors, there, timeout=1e-6), lambda _: ow.apply_delta(tensors, back) and None)
    hold(tensors, want)
    ow.apply_delta(tensors, there, timeout=600)
    assert ow.digest(tensors, timeout=600) == ow.digest(new)


def test_a_wrong_argument_of_wake_takes_no_memory() -> None:
    """After a call of `wake` with a wrong argument, the tensors still sleep without using memory, and can be woken."""
    tensor = torch.arange(1 << 18, dtype=torch.float32).bfloat16()
    want = tensor.clone()
    asleep = ow.sleep({"a": tensor})
    for wrong in ({"progress": 3}, {"timeout": -1}):
        with pytest.raises(ow.ArgumentError, match=next(iter(wrong))):
            asleep.wake(**wrong)  # type: ignore[arg-type]
        assert tensor.untyped_storage().nbytes() == 0
    asleep.wake()
    assert torch.equal(tensor, want)

"""Tests that safe_open reads ahead if a program requests tensors in order, and only then."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import overwire as ow
import processes
import pytest
import torch
from conftest import every_dtype, same, soon, ugly
from overwire.compat import safetensors as dropin
from overwire.model.opened import Model
from overwire.verbs import ahead

LAYERS = 12
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def layers(seed: int = 0, hidden: int = 64) -> dict[str, torch.Tensor]:
    """Returns a model with numbered layers. Sorting by name and by number gives different orders."""
    make = torch.Generator().manual_seed(seed)
    made = {"embed.weight": torch.randn(200, hidden, generator=make)}
    for n in range(LAYERS):
        for part, shape in {"down": (hidden, 4 * hidden), "norm": (hidden,), "up": (4 * hidden, hidden)}.items():
            made[f"layers.{n}.{part}.weight"] = (torch.randn(shape, generator=make) / 50).bfloat16()
    return made


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records how many tensors each load requests."""
    counts: list[int] = []
    begin, begin_blocks = Model.begin, Model.begin_blocks

    def spied(self: Model, chosen: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(self.table) if chosen is None else len(chosen))
        return begin(self, chosen, *args, **kwargs)

    def spied_blocks(self: Model, blocks: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(blocks))
        return begin_blocks(self, blocks, *args, **kwargs)

    monkeypatch.setattr(Model, "begin", spied)
    monkeypatch.setattr(Model, "begin_blocks", spied_blocks)
    return counts


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Returns the CPU, and a GPU if there is one."""
    return str(request.param)


def limit_windows(monkeypatch: pytest.MonkeyPatch, first: int, most: int) -> None:
    """Limits read-ahead windows to a few bytes, on the CPU and on a GPU."""
    for name, size in (("_FIRST", first), ("_MOST", most)):
        monkeypatch.setattr(ahead, name, size)
        monkeypatch.setattr(ahead, f"{name}_GPU", size)


@pytest.fixture(params=["compressed", "plain"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    ow.save_file(layers(), tmp_path / "m.safetensors", compress=request.param == "compressed")
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("framework", ["pt", "np", "bytes"])
@pytest.mark.parametrize("keys", ["keys", "offset_keys"])
def test_a_loop_needs_few_loads(path: Path, loads: list[int], framework: Any, keys: str) -> None:
    """A loop in the order of names or offsets gets the same tensors as load_file, and needs few loads."""
    want = ow.load_file(path, framework=framework)
    loads.clear()
    with ow.safe_open(path, framework) as file:
        got = {name: file.get_tensor(name) for name in getattr(file, keys)()}
        assert sum(loads) == len(want) and len(loads) <= 6, loads
        again = {name: file[name] for name in getattr(file, keys)()}
    for name in want:
        for tensor in (got[name], again[name]):
            if framework == "bytes":
                assert tensor == want[name]
            else:
                same(tensor, want[name])


def test_unusual_tensors_in_a_loop(tmp_path: Path, device: str) -> None:
    """A loop gets empty tensors, scalars, aliases and every dtype as load_file does, and no two share memory."""
    tensors = ugly() | {f"d.{k}": v for k, v in every_dtype().items()} | {f"z{n}": torch.full((50,), n) for n in range(9)}
    tied = torch.randn(300, 7)
    tensors |= {"tied.a": tied, "tied.b": tied.clone(), "zz": tied + 1}
    for compress in (True, False):
        ow.save_file(tensors, tmp_path / "m", compress=compress)
        want = ow.load_file(tmp_path / "m")
        for mmap in (None, False):
            with ow.safe_open(tmp_path / "m", "pt", device, mmap=mmap) as file:
                got = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            for name in want:
                same(got[name].cpu(), want[name])
                if device == "cpu":  # torch cannot zero four-bit tensors on a GPU
                    got[name].zero_()
            assert len({t.untyped_storage().data_ptr() for t in got.values() if t.numel()}) == sum(
                t.numel() > 0 for t in got.values()
            )


def test_a_program_that_jumps_loads_only_its_tensors(path: Path, loads: list[int], seed: int, device: str) -> None:
    """If a program goes backwards, skips tensors or takes random pairs, only the requested tensors are loaded."""
    with ow.safe_open(path, "pt", device) as file:
        names = file.keys()
        pairs = [names[n : n + 2] for n in range(0, len(names) - 1, 2)]
        random.Random(seed).shuffle(pairs)
        apart = [
            pair for n, pair in enumerate(pairs) if not n or names.index(pair[0]) != names.index(pairs[n - 1][1]) + 1
        ]
        asked = [*names[::-1], *names[::2], *(name for pair in apart for name in pair[::-1])]
        for name in asked:
            file.get_tensor(name)
    assert loads == [1] * len(asked)


def test_short_loops_cause_few_extra_loads(path: Path, loads: list[int], device: str) -> None:
    """If a program repeatedly takes a few tensors in order and then jumps, few tensors are loaded in vain."""
    want = ow.load_file(path)
    asked = 0
    with ow.safe_open(path, "pt", device) as file:
        names = file.keys()
        loads.clear()
        for round in range(40):
            for name in names[round % 7 : round % 7 + 4]:
                same(file.get_tensor(name).cpu(), want[name])
                asked += 1
    assert sum(loads) - asked < 4 * len(want)


def test_a_tensor_read_twice_is_read_twice(path: Path, loads: list[int], device: str) -> None:
    """Each read of a tensor returns separate memory. The second read does not stop the read-ahead."""
    with ow.safe_open(path, "pt", device) as file:
        for name in file.keys():  # noqa: SIM118
            first, second = file.get_tensor(name), file.get_tensor(name)
            same(first.cpu(), second.cpu())
            assert first.data_ptr() != second.data_ptr()
    assert sum(loads) == 2 * len(layers()) and len(loads) <= len(layers()) + 6


def test_no_more_than_two_windows_are_ahead(path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """At most two windows of tensors are loaded in advance, however long the program works on one tensor."""
    most = 150_000
    limit_windows(monkeypatch, most, most)
    begun = taken = 0
    begin = Model.begin

    def spied(self: Model, chosen: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal begun
        begun += sum(self.table[at][3] for at in chosen)
        return begin(self, chosen, *args, **kwargs)

    monkeypatch.setattr(Model, "begin", spied)
    ahead_by = []
    with ow.safe_open(path, "pt", device) as file:
        for name in file.keys():  # noqa: SIM118
            taken += file.get_tensor(name).nbytes
            ahead_by.append(begun - taken)
    assert begun == taken and 0 < max(ahead_by) <= 2 * most


@pytest.mark.parametrize("keys", ["keys", "offset_keys"])
def test_a_loop_from_the_beginning_is_read_ahead_at_once(path: Path, loads: list[int], keys: str) -> None:
    """Read-ahead begins with the second tensor, so only the first tensor is loaded separately."""
    with ow.safe_open(path, "pt") as file:
        for name in getattr(file, keys)():
            file.get_tensor(name)
    assert loads[0] == 1 and min(loads[1:-1], default=2) > 1 and loads[1] > 1, loads


def test_tensors_larger_than_a_window_are_read_ahead(
    path: Path,
    loads: list[int],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
) -> None:
    """If each tensor fills a window of the largest size, one tensor is read while the program works on the previous
    one. Larger tensors are not read ahead."""
    large = layers()["layers.0.up.weight"].nbytes
    names = [f"layers.{n}.{part}.weight" for n in range(LAYERS) for part in ("down", "up")]
    for most in (large, large - 1):
        limit_windows(monkeypatch, 1, most)
        ow.save_file({f"{n:02}": layers()[name] for n, name in enumerate(names)}, path.parent / "large")
        loads.clear()
        with ow.safe_open(path.parent / "large", "pt", device) as file:
            got = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for n, name in enumerate(names):
            same(got[f"{n:02}"].cpu(), layers()[name])
        assert sum(loads) == len(names) and (max(loads) > 1) == (most == large), loads


def test_window_sizes_are_computed_once_per_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a window is computed once per window, not per tensor."""
    ow.save_file({f"{n:04}": torch.full((3,), n) for n in range(1000)}, tmp_path / "m")
    computed = []
    window_sizes = ahead._window_sizes
    monkeypatch.setattr(ahead, "_window_sizes", lambda model: computed.append(0) or window_sizes(model))
    with ow.safe_open(tmp_path / "m", "pt") as file:
        for n, name in enumerate(file.keys()):  # noqa: SIM118
            assert file.get_tensor(name).tolist() == [n] * 3
    assert 0 < len(computed) <= 4


def test_max_memory_frees_tensors_that_were_read_ahead(path: Path, device: str) -> None:
    """If tensors that were read ahead do not fit into load_into's max_memory, they are freed, and the loop
    continues."""
    want = ow.load_file(path)
    with ow.safe_open(path, "pt", device) as file:
        names = file.keys()
        for name in names[:6]:
            file.get_tensor(name)
        assert file._ahead._windows
        target = torch.zeros_like(want["embed.weight"])
        file.load_into([("embed.weight", None, target)], max_memory=0)
        assert not file._ahead._windows and target.equal(want["embed.weight"])
        for name in names[6:]:
            same(file.get_tensor(name).cpu(), want[name])


@pytest.mark.parametrize("compress", [True, False])
def test_a_damaged_tensor_that_was_read_ahead(tmp_path: Path, compress: bool) -> None:
    """A damaged tensor that was read ahead raises an error only when the program requests it. The error names the
    tensor. Other tensors load."""
    want = layers()
    ow.save_file(want, tmp_path / "m", compress=compress)
    with ow.safe_open(tmp_path / "m", "pt", mmap=False) as file:
        order = file.offset_keys()
    bad = order[len(order) // 2]
    if compress:
        data = bytearray((tmp_path / "m").read_bytes())
        at = ow.inspect(tmp_path / "m")["sources"][0]["header"]
        before = {t["name"]: t["stored"] for t in ow.inspect(tmp_path / "m")["sources"][0]["tensors"]}
        at += sum(before[name] for name in order[: order.index(bad)]) + before[bad] // 2
        data[at] ^= 0xFF
        (tmp_path / "m").write_bytes(data)
    failed = []
    with ow.safe_open(tmp_path / "m", "pt", mmap=False) as file:
        for name in order:
            try:
                same(file.get_tensor(name), want[name])
            except ow.CorruptError as error:
                failed.append(error.tensor)
    assert len(failed) == int(compress) and (not compress or failed[0] in order[order.index(bad) - 1 :][:3])


def test_a_file_that_is_closed_during_read_ahead(path: Path, device: str) -> None:
    """Closing or dropping a file during read-ahead ends its loads. Tensors that were returned stay valid."""
    want = ow.load_file(path)
    before = ow.doctor()["goroutines"]
    allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
    kept = []
    for end in ("close", "drop", "error"):
        file = ow.safe_open(path, "pt", device)
        names = file.keys()
        kept += [(name, file.get_tensor(name)) for name in names[: len(names) // 3]]
        if end == "close":
            file.close()
            with pytest.raises(ow.ArgumentError, match="closed"):
                file.get_tensor(names[-1])
        elif end == "error":
            with pytest.raises(ow.TensorNotFoundError):
                file.get_tensor("layers.0.none")
        del file
        gc.collect()
    for name, tensor in kept:
        same(tensor.cpu(), want[name])
    del tensor
    kept.clear()
    assert soon(lambda: ow.doctor()["goroutines"] <= before), ow.doctor()["goroutines"]
    assert device == "cpu" or torch.cuda.memory_allocated() == allocated


def test_threads_share_a_file(path: Path, device: str) -> None:
    """Eight threads that loop over one file at different speeds get the right tensors."""
    want = ow.load_file(path)
    with ow.safe_open(path, "pt", device) as file:
        names = file.keys()

        def loop(start: int) -> dict[str, torch.Tensor]:
            return {name: file.get_tensor(name) for name in names[start:] + names[:start]}

        with ThreadPoolExecutor(8) as pool:
            for got in pool.map(loop, [0, 0, 0, 0, 3, 9, 20, 30]):
                for name in want:
                    same(got[name].cpu(), want[name])


def test_a_forked_child_continues_a_loop(torch_script: Callable[..., Any], tmp_path: Path) -> None:
    """A program forks in a loop over a plain file. Child and parent both continue, even if another thread of the parent
    holds the lock."""
    ow.save_file(layers(), tmp_path / "m", compress=False)
    torch_script(
        """
import os, threading
import overwire as ow
want = ow.load_file("m", mmap=False)
file = ow.safe_open("m", "pt", mmap=False)
names = file.keys()
def right(part):
    return all(file.get_tensor(n).equal(want[n]) for n in part)
assert right(names[:10])
locked, done = threading.Event(), threading.Event()
def hold():
    with file._ahead._lock:
        locked.set(); done.wait()
threading.Thread(target=hold).start()
locked.wait()
child = os.fork()
if not child:
    ok = right(names[10:])
    file.close()
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
done.set()
assert right(names[10:])
"""
    )


@pytest.mark.parametrize("face", ["own", "drop-in"])
def test_slices_of_a_rank_are_read_ahead(path: Path, loads: list[int], face: str, device: str) -> None:
    """Equal cuts of each layer, as a tensor-parallel rank makes them, are read ahead as blocks in few loads. A
    different cut is loaded separately."""
    want = ow.load_file(path)
    loads.clear()
    opened: Any = ow.safe_open if face == "own" else dropin.safe_open
    with opened(path, "pt", device) as file:
        names = [name for name in file.offset_keys() if name.startswith("layers.")]
        for name in names:
            part = file.get_slice(name)
            rows, *columns = part.get_shape()
            if name == "layers.9.up.weight":
                same(part[3:7].cpu(), want[name][3:7].clone())
            elif "up" in name:
                same(part[rows // 2 :].cpu(), want[name][rows // 2 :].clone())
            elif "down" in name:
                same(part[:, : columns[0] // 2].cpu(), want[name][:, : columns[0] // 2].clone())
            else:
                same(part[:].cpu(), want[name])
    assert len(loads) <= 16 < len(names), loads


def test_casts_of_tensors_that_were_read_ahead(path: Path, loads: list[int], device: str) -> None:
    """get_tensor and slices cast tensors that were read ahead. The results are the same as with load_file."""
    want = ow.load_file(path, dtype="float32")
    loads.clear()
    with ow.safe_open(path, "pt", device, dtype="float32") as file:
        for name in file.keys():  # noqa: SIM118
            same(file.get_tensor(name).cpu(), want[name])
        assert len(loads) <= 6
        for name in file.keys():  # noqa: SIM118
            same(file.get_slice(name)[...].cpu(), want[name])


def test_a_loop_over_http_needs_few_loads(path: Path, loads: list[int], device: str) -> None:
    """A loop over HTTP needs one load per window."""
    want = ow.load_file(path)
    loads.clear()
    with processes.overwire_serve(path.parent) as url, ow.safe_open(f"{url}{path.name}", "pt", device) as file:
        got = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in want:
        same(got[name].cpu(), want[name])
    assert len(loads) <= 6 and os.path.getsize(path) > 0


# The remaining tests run the loops of real programs with the drop-in.


def test_comfyui_loads_a_checkpoint(path: Path, loads: list[int], device: str) -> None:
    """ComfyUI's loop works: it takes each key of a file with its tensor, and then the metadata."""
    want = ow.load_file(path)
    loads.clear()
    state = {}
    with dropin.safe_open(path, framework="pt", device=device) as f:
        for k in f.keys():  # noqa: SIM118
            state[k] = f.get_tensor(k)
        assert f.metadata() is None or isinstance(f.metadata(), dict)
    for name in want:
        same(state[name].cpu(), want[name])
    assert sum(loads) == len(want) and len(loads) <= 6


def test_one_tensor_of_many_is_kept(path: Path, loads: list[int], device: str) -> None:
    """A loop that looks at each tensor but keeps only one needs few loads. Only the memory of this tensor stays in
    use."""
    want = ow.load_file(path)
    loads.clear()
    kept = None
    with ow.safe_open(path, "pt", device) as file:
        for name in file:
            tensor = file.get_tensor(name)
            if name == "layers.7.norm.weight":
                kept = tensor
    assert kept is not None and kept.untyped_storage().nbytes() == kept.nbytes
    same(kept.cpu(), want["layers.7.norm.weight"])
    assert len(loads) <= 6


def test_accelerates_loop_over_a_shard(path: Path, loads: list[int], device: str) -> None:
    """The loop of accelerate and transformers works: it takes a slice object for every name, then the shapes, then each
    whole tensor in order."""
    want = ow.load_file(path)
    loads.clear()
    with dropin.safe_open(path, framework="pt", device=device) as file:
        state = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert [tuple(part.get_shape()) for part in state.values()] == [tuple(want[name].shape) for name in state]
        for name, part in state.items():
            same(part[...].cpu(), want[name])
    assert len(loads) <= 6


def test_accelerate_and_transformers(torch_script: Callable[..., Any], tmp_path: Path) -> None:
    """The shard readers of accelerate and transformers read a compressed file in a few loads."""
    ow.save_file(layers(), tmp_path / "m.safetensors", {"format": "pt"})
    torch_script(
        """
import overwire as ow
from overwire.model.opened import Model
want, begin, count = ow.load_file("m.safetensors"), Model.begin, []
def spied(self, chosen, *args, **kwargs):
    count.append(chosen)
    return begin(self, chosen, *args, **kwargs)
Model.begin = spied
with ow.patch_safetensors():
    from accelerate.utils.modeling import load_state_dict
    map = {"embed": "cpu", "layers.3": "disk", **{f"layers.{n}": "cpu" for n in range(12) if n != 3}}
    for got in (load_state_dict("m.safetensors", map),):
        assert len(got) == len(want) and all(got[name].equal(want[name]) for name in want)
        assert len(count) < 20, len(count)
    from transformers.modeling_utils import load_state_dict
    count.clear()
    got = load_state_dict("m.safetensors")
    assert all(got[name].equal(want[name]) for name in want) and len(count) <= 6, len(count)
"""
    )


@pytest.mark.slow
def test_accelerate_dispatches_and_diffusers_reads(torch_script: Callable[..., Any], tmp_path: Path) -> None:
    """accelerate loads a compressed file into a model on several devices, and diffusers reads one as a single file.
    Both need few loads and get the right bytes."""
    pytest.importorskip("diffusers")
    ow.save_file(layers(), tmp_path / "m.safetensors", {"format": "pt"})
    torch_script(
        """
import torch
import overwire as ow
from overwire.model.opened import Model
want, begin, count = ow.load_file("m.safetensors"), Model.begin, []
def spied(self, chosen, *args, **kwargs):
    count.append(chosen)
    return begin(self, chosen, *args, **kwargs)
Model.begin = spied
class Part(torch.nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros_like(tensor))
model = torch.nn.Module()
for name, tensor in want.items():
    at = model
    *path, last, _ = name.split(".")
    for part in path:
        if not hasattr(at, part):
            at.add_module(part, torch.nn.Module())
        at = getattr(at, part)
    at.add_module(last, Part(tensor))
with ow.patch_safetensors():
    from accelerate import load_checkpoint_in_model
    places = {"embed": "cpu", "layers.3": "disk", **{f"layers.{n}": "cpu" for n in range(12) if n != 3}}
    load_checkpoint_in_model(model, "m.safetensors", device_map=places, offload_folder="away")
    assert len(count) < 20, len(count)
    for name, tensor in model.state_dict().items():
        assert name.startswith("layers.3.") or tensor.equal(want[name]), name
    from diffusers.loaders.single_file_utils import load_single_file_checkpoint
    count.clear()
    got = load_single_file_checkpoint("m.safetensors")
    assert got.keys() == want.keys() and all(got[name].equal(want[name]) for name in want)
    assert len(count) == 1, len(count)
"""
    )

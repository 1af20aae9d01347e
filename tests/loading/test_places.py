"""Tests loads into tensors that do not own one block of memory. For a DTensor, a rank loads its own part. Other such
tensors are refused."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


class Wrapper(torch.Tensor):
    """A tensor that wraps another tensor, as quantisation libraries make them."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*[one.inner if isinstance(one, Wrapper) else one for one in args], **(kwargs or {}))
        return Wrapper(out) if func is torch.ops.aten.detach.default else out

    __torch_function__: Any = torch._C._disabled_torch_function_impl


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def odd() -> dict[str, Any]:
    """Returns tensors that do not own one block of memory, by kind."""
    with FakeTensorMode():
        fake = torch.zeros(4, 4)
    seen: list[torch.Tensor] = []
    torch.vmap(lambda rows: seen.append(rows) or rows)(torch.zeros(2, 4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "wrapper": Wrapper(torch.zeros(4, 4)),
            "fake": fake,
            "transformed": seen[0],
            "emptied": emptied(torch.zeros(4, 4)),
            "emptied, strided": emptied(torch.zeros(4, 4).t()),
            "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            "jagged": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
            "csr": torch.eye(4).to_sparse_csr(),
            "coo": torch.eye(4).to_sparse(),
            "mkldnn": torch.zeros(4, 4).to_mkldnn(),
            "parameter": torch.nn.parameter.UninitializedParameter(),
            "buffer": torch.nn.parameter.UninitializedBuffer(),
        }


def module(good: torch.Tensor, x: Any) -> torch.nn.Module:
    made = torch.nn.Module()
    made.register_buffer("a", good)
    if isinstance(x, torch.nn.Parameter):
        made.x = x
    else:
        made.register_buffer("x", x)
    return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("places")
    ow.save_file({"a": torch.ones(4, 4), "x": torch.ones(4, 4)}, at / "m.safetensors")
    both = {name: torch.full((4, 4), value) for name, value in (("a", 1.0), ("x", 1.0))}
    ow.save_delta(both, {name: torch.zeros(4, 4) for name in both}, at / "d.delta")
    return at


def into(file: Path, targets: list[Any]) -> None:
    with ow.safe_open(file, "pt") as opened:
        opened.load_into(targets)


VERBS: dict[str, Callable[[Path, torch.Tensor, Any], Any]] = {
    "load_into": lambda at, good, x: into(at / "m.safetensors", [("a", None, good), ("x", None, x)]),
    "load_model": lambda at, good, x: ow.load_model(module(good, x), at / "m.safetensors"),
    "load_model to a device": lambda at, good, x: ow.load_model(module(good, x), at / "m.safetensors", device="cpu"),
    "save_file": lambda at, good, x: ow.save_file({"a": good, "x": x}, at / "other"),
    "save_model": lambda at, good, x: ow.save_model(module(good, x), at / "other"),
    "save_model, plain": lambda at, good, x: ow.save_model(module(good, x), at / "other", compress=False),
    "digest": lambda at, good, x: ow.digest({"a": good, "x": x}),
    "verify": lambda at, good, x: ow.verify(at / "m.safetensors", tensors={"a": good, "x": x}),
    "apply_delta": lambda at, good, x: ow.apply_delta({"a": good, "x": x}, at / "d.delta"),
    "load_file(base=)": lambda at, good, x: ow.load_file(at / "d.delta", base={"a": good, "x": x}),
    "save_delta": lambda at, good, x: ow.save_delta({"x": x}, {"x": x}, at / "other"),
    "diff": lambda at, good, x: ow.diff({"x": x}, {"x": x}),
    "sleep": lambda at, good, x: ow.sleep({"a": good, "x": x}),
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("verb", VERBS)
def test_tensors_without_own_memory_are_refused_by_name(files: Path, verb: str) -> None:
    """Every function refuses each tensor without its own memory by name, and changes nothing."""
    for kind, tensor in odd().items():
        good = torch.zeros(4, 4)
        with pytest.raises((ow.ArgumentError, ow.NotSupportedError, ow.ModelMismatchError), match=r"['\"]x['\"]"):
            print(kind, VERBS[verb](files, good, tensor))
        assert good.shape == (4, 4) and not good.any(), kind
        assert not (files / "other").exists(), kind


def test_bundles_of_tensors_without_own_memory(tmp_path: Path) -> None:
    """A bundle restores a nested tensor and a lazy module's parameter. It refuses sleeping tensors, because they have
    no bytes to save."""
    path, tensors = tmp_path / "x.pkl", odd()
    ow.compress_pickle({name: tensors[name] for name in ("nested", "parameter")}, path)
    back = ow.load_compressed_pickle(path, trust=True)
    assert torch.equal(back["nested"].to_padded_tensor(7.0), tensors["nested"].to_padded_tensor(7.0))
    assert type(back["parameter"]) is torch.nn.parameter.UninitializedParameter
    for kind, text in (("emptied", "sleeps"), ("mkldnn", "to_dense")):
        with pytest.raises((ow.ArgumentError, ow.NotSupportedError), match=text):
            ow.compress_pickle([tensors[kind]], tmp_path / "y.pkl")


def test_sleeping_tensors_are_not_loaded(tmp_path: Path) -> None:
    """Loading into a sleeping module is refused, and waking restores its values."""
    model = torch.nn.Linear(64, 64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ow.save_model(torch.nn.Linear(64, 64), tmp_path / "m")
    with ow.sleep(model), pytest.raises(ow.ArgumentError, match="weight.*sleeps"):
        ow.load_model(model, tmp_path / "m")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_missing_tensor_does_not_count_as_tied(files: Path) -> None:
    """strict=True reports a missing tensor even if it has no address. Two names of one tensor count as tied."""
    wrapped = torch.nn.Module()
    wrapped.a, wrapped.other = (torch.nn.Parameter(Wrapper(torch.zeros(4, 4)), requires_grad=False) for _ in range(2))
    with pytest.raises(ow.ModelMismatchError, match="missing.*'other'"):
        ow.load_model(wrapped, files / "m.safetensors")
    tied = torch.nn.Module()
    tied.a = torch.nn.Parameter(torch.zeros(4, 4))
    tied.again, tied.x = tied.a, torch.nn.Parameter(torch.zeros(4, 4))
    assert ow.load_model(tied, files / "m.safetensors") == ([], [])
    assert bool((tied.again == 1).all())


def test_copies_of_a_state_dict_are_refused(files: Path) -> None:
    """A module is refused if its state dict has copies of its tensors, as with FSDP1, because values loaded into the
    copies would be lost."""
    model = module(torch.zeros(4, 4), torch.zeros(4, 4))
    model._register_state_dict_hook(
        lambda part, state, prefix, _: state.update({name: one.clone() for name, one in state.items()})
    )
    with pytest.raises(ow.NotSupportedError, match="'a'.*a copy"):
        ow.load_model(model, files / "m.safetensors")
    views = module(torch.zeros(4, 4), torch.zeros(4, 4))
    views._register_state_dict_hook(
        lambda part, state, prefix, _: state.update({name: one.t().t() for name, one in state.items()})
    )
    ow.load_model(views, files / "m.safetensors")
    assert bool((views.a == 1).all()) and bool((views.x == 1).all())


def test_extra_state_is_kept(tmp_path: Path) -> None:
    """strict=True accepts a module with extra state. A tensor in the extra state is passed to `set_extra_state`."""

    class Counted(torch.nn.Linear):
        extra: Any = None

        def get_extra_state(self) -> Any:
            return self.extra

        def set_extra_state(self, state: Any) -> None:
            self.extra = state

    for extra in ({"steps": 7}, torch.arange(5)):
        model, other = (torch.nn.Sequential(Counted(3, 2)) for _ in range(2))
        model[0].extra, other[0].extra = extra, torch.zeros(2)
        if isinstance(extra, dict):
            other[0].extra = {"steps": 1}
        left = ("0._extra_state",) if isinstance(extra, dict) else ()
        for compress in (True, False):
            assert ow.save_model(model, tmp_path / "m", compress=compress).left == left
            saving = ow.save_model(model, tmp_path / "m", compress=compress, wait=False)
            assert saving.wait().left == left
            assert ow.load_model(other, tmp_path / "m") == ([], [])
        assert torch.equal(other[0].weight, model[0].weight)
        assert other[0].extra == {"steps": 1} if isinstance(extra, dict) else torch.equal(other[0].extra, extra)


class _Packed(torch.nn.Module):
    """A module with a state dict entry that contains its weights but is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))
        self._register_state_dict_hook(lambda part, state, prefix, _: state.update({prefix + "packed": (part, 1)}))


def _quantised() -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.LSTM(4, 4)), dtype=torch.qint8)


@pytest.mark.parametrize("make", [lambda: torch.nn.Sequential(_Packed()), _quantised], ids=["tuple", "quantised"])
def test_entries_that_are_not_tensors_are_refused_by_name(tmp_path: Path, make: Callable[[], torch.nn.Module]) -> None:
    """A state dict entry that is not a tensor is refused by name, because it may contain weights that would be lost or
    not compared. Nothing is written or changed."""
    model, file, delta = make(), tmp_path / "m.safetensors", tmp_path / "d.safetensors"
    ow.save_file({"0.scale": torch.zeros(2)}, file)
    ow.save_delta({"0.scale": torch.ones(2)}, {"0.scale": torch.zeros(2)}, delta)
    kept = file.read_bytes()
    for call in (
        lambda: ow.save_model(model, file), lambda: ow.save_model(model, file, compress=False),
        lambda: ow.save_model(model, file, wait=False), lambda: ow.load_model(model, file),
        lambda: ow.load_model(model, file, strict=False), lambda: ow.digest(model),
        lambda: ow.verify(file, tensors=model), lambda: ow.save_delta(model, file, tmp_path / "new.safetensors"),
        lambda: ow.save_delta(file, model, tmp_path / "new.safetensors"), lambda: ow.apply_delta(model, delta),
        lambda: ow.load_file(delta, base=model), lambda: ow.offload(model, source=file, device="cpu"),
    ):  # fmt: skip
        with pytest.raises(ow.NotSupportedError, match="is a (tuple|ScriptObject) instead of a tensor") as caught:
            call()
        assert caught.value.tensor in ("0.packed", "0._all_weight_values.0.param")
    assert file.read_bytes() == kept and sorted(os.listdir(tmp_path)) == ["d.safetensors", "m.safetensors"]
    if isinstance(model[0], _Packed):
        assert torch.equal(model[0].scale, torch.ones(2))


BLOCKS = """
import itertools
import overwire as ow, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

tensors = {"a": torch.randn(7, 5, 3), "c": torch.randn(1)}
for compress in (True, False):
    ow.save_file(tensors, f"{compress}.safetensors", compress=compress)
count = refused = 0
for sizes in ((3,), (2, 2)):
    for rank in range(sizes[0] * sizes[-1] if len(sizes) > 1 else sizes[0]):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3 if len(sizes) == 1 else 4)
        mesh = init_device_mesh("cpu", sizes)
        kinds = [Replicate(), Shard(0), Shard(1), Shard(2), _StridedShard(0, split_factor=2)]
        want, targets = [], []
        for placed in itertools.product(kinds, repeat=len(sizes)):
            for name, tensor in tensors.items():
                if any(getattr(one, "dim", -1) >= tensor.dim() for one in placed):
                    continue
                made = distribute_tensor(torch.zeros_like(tensor), mesh, placed, src_data_rank=None)
                with ow.safe_open("True.safetensors") as file:
                    try:
                        file.load_into([(name, None, made)])
                    except ow.NotSupportedError as error:
                        assert repr(name) in str(error) and "_StridedShard" in str(placed), error
                        refused += 1
                        continue
                want.append(distribute_tensor(tensor, mesh, placed, src_data_rank=None).to_local())
                targets.append((name, None, distribute_tensor(torch.zeros_like(tensor), mesh, placed, src_data_rank=None)))
        for compress in (True, False):
            with ow.safe_open(f"{compress}.safetensors") as file:
                file.load_into(targets)
            for (name, _, made), local in zip(targets, want):
                assert torch.equal(made.to_local(), local), (name, made.placements, rank)
                made.to_local().zero_()
                count += 1
        half = distribute_tensor(torch.zeros(4, 5, 3), mesh, [Shard(0)] * len(sizes), src_data_rank=None)
        with ow.safe_open("True.safetensors") as file:
            file.load_into([("a", [(2, 6)], half)])
            assert torch.equal(half.to_local(), distribute_tensor(tensors["a"][2:6], mesh, half.placements, src_data_rank=None).to_local())
            for bad in (DTensor.from_local(torch.zeros(7, 5, 3), mesh, [Partial()] * len(sizes)),
                        distribute_tensor(torch.zeros(7, 5, 3, device="meta"), mesh, [Shard(0)] * len(sizes), src_data_rank=None)):
                try:
                    file.load_into([("a", None, bad)])
                except (ow.NotSupportedError, ow.ArgumentError) as error:
                    assert "'a'" in str(error)
                else:
                    raise AssertionError(bad)
        dist.destroy_process_group()
print(count > 100 and refused > 0)
"""


def test_a_rank_gets_its_part_of_a_dtensor(torch_script: Callable[..., Any]) -> None:
    """In two meshes, each rank loads the part that torch itself would give it, for every placement, including uneven
    and empty shards. Partial sums and unknown orders are refused."""
    assert torch_script(BLOCKS).stdout.split() == ["True"]


RANKS = """
import os, sys
import overwire as ow, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

torch.manual_seed(1)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(33, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1)

like = Net()
os.environ["OVERWIRE_EXCHANGE"] = "mapped"
children = []
for rank in range(2):
    if not (pid := os.fork()):
        break
    children.append(pid)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    sys.exit(f"{codes}" if any(codes) else 0)
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore("store", 2))
mesh = init_device_mesh("cpu", (2,))
if rank == 0:
    ow.save_model(like, "net.safetensors")
dist.barrier()
for group in (None, dist.group.WORLD):
    net = Net()
    fully_shard(net, mesh=mesh)
    replicated = Net()
    for name, placed in (("up", [Replicate()]), ("down", [Shard(1)])):
        part = getattr(replicated, name)
        part.weight = torch.nn.Parameter(distribute_tensor(torch.zeros_like(part.weight), mesh, placed))
    for model in (net, replicated):
        before = {name: one.to_local().data_ptr() for name, one in model.named_parameters() if hasattr(one, "to_local")}
        assert ow.load_model(model, "net.safetensors", group=group) == ([], [])
        for name, one in model.named_parameters():
            whole = one.full_tensor() if hasattr(one, "full_tensor") else one
            assert torch.equal(whole, like.get_parameter(name)), (name, group)
        after = {name: one.to_local().data_ptr() for name, one in model.named_parameters() if hasattr(one, "to_local")}
        assert before == after and len(before) >= 2
dist.barrier()
os.write(1, b"loaded\\n")  # one write, because the ranks share the output
dist.destroy_process_group()
os._exit(0)
"""


def test_ranks_load_into_sharded_modules(torch_script: Callable[..., Any]) -> None:
    """FSDP2 and tensor-parallel modules on two ranks get the file's values, whether the ranks load separately or as a
    group."""
    assert torch_script(RANKS).stdout.split() == ["loaded"] * 2


def test_functions_refuse_to_run_under_a_fake_tensor_mode(tmp_path: Path) -> None:
    """Under FakeTensorMode, every function on torch tensors raises a clear error. After the mode has ended, the
    functions work again. In this mode torch only computes shapes, even for real tensors, so copies would silently be
    skipped."""
    tensors = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.empty(0)}
    path, strided = tmp_path / "m", torch.zeros(4, 3).t()
    ow.save_file(tensors, path)
    ow.save_delta({"a": tensors["a"] + 1}, {"a": tensors["a"]}, tmp_path / "d")
    sleeper, targets = tensors["a"].clone().t(), {"a": torch.zeros(4, 3).t()}
    targets["a"].copy_(tensors["a"])
    asleep = ow.sleep({"a": sleeper})
    with ow.safe_open(path, "pt") as file:
        verbs = [
            lambda: ow.load_file(path),
            lambda: ow.stream(path),
            lambda: ow.safe_open(path, "pt"),
            lambda: file.load_into([("a", None, strided)]),
            lambda: ow.save_file(tensors, tmp_path / "n"),
            lambda: ow.apply_delta(targets, tmp_path / "d"),
            lambda: ow.digest(tensors),
            lambda: ow.sleep({"a": torch.zeros(3)}),
            asleep.wake,
            lambda: ow.offload(torch.nn.Linear(2, 2), "cpu"),
        ]
        for takes_real in (False, True):
            with FakeTensorMode(allow_non_fake_inputs=takes_real):
                for verb in verbs:
                    with pytest.raises(ow.NotSupportedError, match="FakeTensorMode is active"):
                        verb()
        file.load_into([("a", None, strided)])
    asleep.wake()
    ow.apply_delta(targets, tmp_path / "d")
    assert torch.equal(sleeper, tensors["a"].t()) and torch.equal(strided, tensors["a"])
    assert torch.equal(targets["a"], tensors["a"] + 1) and not (tmp_path / "n").exists()

"""Tests patch_safetensors with transformers, diffusers and accelerate, which load compressed files through their own
functions."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import overwire as ow
import overwire.compat.safetensors as compat
import overwire.compat.safetensors.torch as compat_torch
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from conftest import same, soon
from overwire.compat.safetensors import patching
from overwire.integrations import accelerate
from overwire.model import opened as opened_models


def compress(folder: Path) -> int:
    """Compresses every safetensors file below a folder, in place."""
    files = list(folder.rglob("*.safetensors"))
    for path in files:
        ow.convert(path, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
        with pytest.raises(safetensors.SafetensorError):
            safetensors.safe_open(path, "pt").get_tensor("x")
        assert ow.inspect(path)["sources"][0]["format"] == "overwire"
    return len(files)


def equal(a: torch.nn.Module, b: torch.nn.Module) -> None:
    states = a.state_dict(), b.state_dict()
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        same(states[0][name], states[1][name])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> tuple[Any, Path, Path]:
    """Makes a small random model, compressed in one file and in shards."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    one, many = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("many")
    model.save_pretrained(one)
    model.save_pretrained(many, max_shard_size="100KB")
    assert compress(one) == 1
    assert compress(many) > 1 and (many / "model.safetensors.index.json").exists()
    return model, one, many


def test_transformers(llama: Any) -> None:
    """Under the patch, transformers loads compressed models, tied and in shards. The tensors outlive the patch."""
    import transformers

    model, one, many = llama
    for folder in (one, many):
        with ow.patch_safetensors():
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        equal(model, loaded)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert loaded.dtype == torch.bfloat16
    # Tensors stay valid after the patch has ended and the files are closed, and can be modified.
    loaded.model.embed_tokens.weight.data.zero_()
    with pytest.raises(Exception) as caught:
        transformers.AutoModelForCausalLM.from_pretrained(one)
    assert caught.value is not None  # without the patch, loading fails


def test_transformers_saves_plain_files(llama: Any, tmp_path: Path) -> None:
    """Under the patch, saving still writes plain files."""
    import transformers

    model, one, _ = llama
    with ow.patch_safetensors():
        model.save_pretrained(tmp_path)
        equal(model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"))
    assert safetensors.safe_open(tmp_path / "model.safetensors", "pt").metadata() == {"format": "pt"}


def test_damage_raises_safetensors_error(llama: Any, tmp_path: Path) -> None:
    """A flipped bit raises safetensors' own error class. The cause of the error names the tensor."""
    _, one, _ = llama
    data = bytearray((one / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with ow.patch_safetensors(), pytest.raises(safetensors.SafetensorError, match=r"model\.safetensors") as caught:
        safetensors.torch.load_file(path)
    assert isinstance(caught.value.__cause__, ow.CorruptError) and caught.value.__cause__.tensor


def test_diffusers(tmp_path: Path) -> None:
    """Under the patch, diffusers loads a compressed pipeline and a single model, with and without memory mapping."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(6)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 8),
        norm_num_groups=2,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=4)).save_pretrained(tmp_path)
    assert compress(tmp_path) == 1
    with ow.patch_safetensors():
        pipe = diffusers.DDPMPipeline.from_pretrained(tmp_path, low_cpu_mem_usage=False)
        again = diffusers.UNet2DModel.from_pretrained(tmp_path / "unet", low_cpu_mem_usage=True)
        mapped = diffusers.UNet2DModel.from_pretrained(tmp_path / "unet", disable_mmap=True)
    for loaded in (pipe.unet, again, mapped):
        equal(unet, loaded)


def test_accelerate(llama: Any, tmp_path: Path) -> None:
    """Under the patch, accelerate loads compressed models, and reads weights that it offloads to disk."""
    accelerate = pytest.importorskip("accelerate")
    import transformers

    model, one, many = llama
    for folder in (one / "model.safetensors", many):
        with accelerate.init_empty_weights():
            empty = transformers.LlamaForCausalLM(model.config)
        empty.tie_weights()
        with ow.patch_safetensors():
            empty = accelerate.load_checkpoint_and_dispatch(empty, str(folder), device_map={"": "cpu"}, dtype=torch.bfloat16)
        equal(model, empty)
    # The weights are offloaded to disk, and read from the file when they are used.
    tokens, plain = torch.arange(6)[None], tmp_path / "plain"
    model.save_pretrained(plain, max_shard_size="100KB")
    where = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    logits = []
    for folder, patch in ((plain, contextlib.nullcontext), (many, ow.patch_safetensors)):
        with accelerate.init_empty_weights():
            empty = transformers.LlamaForCausalLM(model.config)
        empty.tie_weights()
        with patch(), torch.no_grad():
            empty = accelerate.load_checkpoint_and_dispatch(
                empty, str(folder), device_map=where, offload_folder=tmp_path / "o", dtype=torch.bfloat16
            )
            logits.append(empty(tokens).logits)
    same(*logits)


@pytest.mark.slow
@pytest.mark.imports_torch
def test_libraries_that_are_imported_after_the_patch(llama: Any, script: Any) -> None:
    """The patch also works on libraries that are imported after it began. undo() restores them."""
    _, one, _ = llama
    script(f"""
import overwire as ow
patch = ow.patch_safetensors()
from transformers import AutoModelForCausalLM
import safetensors, safetensors.torch, sys
model = AutoModelForCausalLM.from_pretrained({str(one)!r}, dtype="auto")
assert model.dtype.itemsize == 2
patch.undo()
left = [(m.__name__, k) for m in list(sys.modules.values()) for k, v in list(getattr(m, "__dict__", {{}}).items())
        if k in ("safe_open", "safe_load_file", "load_file") and not m.__name__.startswith("overwire")
        and getattr(v, "__module__", "").startswith("overwire")]
assert not left, left
assert safetensors.torch.safe_open is safetensors.safe_open is sys.modules["transformers.modeling_utils"].safe_open
assert safetensors.safe_open.__module__ == "builtins"
""")


@pytest.mark.slow
@pytest.mark.imports_torch
def test_models_are_hooked_when_they_are_imported(script: Any) -> None:
    """The first model of a process is loaded in one pass. After undo(), diffusers is unchanged."""
    pytest.importorskip("diffusers")
    script("""
import overwire as ow
passes, stream = [], ow.stream
ow.stream = lambda *args, **kwargs: (passes.append(len(kwargs["keys"])), stream(*args, **kwargs))[1]
patch = ow.patch_safetensors(compress=True)
from diffusers import AutoencoderKL
AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).save_pretrained("vae")
model = AutoencoderKL.from_pretrained("vae")
assert passes == [len(model.state_dict())], passes
patch.undo()
import sys
import diffusers.models.modeling_utils as changed
from diffusers.loaders import lora_base
assert not hasattr(changed.load_state_dict, "__wrapped__") and lora_base.load_state_dict is changed.load_state_dict
assert "overwire" not in changed.ModelMixin.__dict__["from_pretrained"].__func__.__code__.co_filename
assert not [finder for finder in sys.meta_path if "overwire" in type(finder).__module__]
""")


# Tests of the patch itself.


def module(name: str) -> types.ModuleType:
    """Makes a module that imports the reading functions under its own names, as libraries do."""
    made = types.ModuleType(name)
    source = "import safetensors\nfrom safetensors import safe_open\nfrom safetensors.torch import load_file as read, save_file\n"
    sys.modules[name] = made
    exec(source, made.__dict__)
    return made


def bound(m: types.ModuleType) -> bool:
    """Returns whether a module reads through overwire."""
    mine = issubclass(m.safe_open, compat.safe_open)
    assert mine == hasattr(m.read, "__wrapped__")
    assert m.save_file is safetensors.torch.save_file
    return mine


def test_names_that_were_bound_before_and_during_the_patch(tmp_path: Path) -> None:
    """Names that a module imported from safetensors before or during the patch are patched, and restored afterwards."""
    tensors = {"a": torch.randn(999).bfloat16()}
    ow.save_file(tensors, tmp_path / "a.safetensors")
    early = module("bound_early")
    ours = types.ModuleType("bound_to_ours")
    sys.modules["bound_to_ours"] = ours
    ours.load_file, ours.safe_open = compat_torch.load_file, compat.safe_open  # type: ignore[attr-defined]
    try:
        with ow.patch_safetensors() as patch:
            late = module("bound_late")
            for m in (early, late):
                assert bound(m)
                same(m.read(tmp_path / "a.safetensors")["a"], tensors["a"])
                with m.safe_open(tmp_path / "a.safetensors", framework="pt") as f:
                    same(f.get_tensor("a"), tensors["a"])
            data = (tmp_path / "a.safetensors").read_bytes()
            same(safetensors.torch.load(data)["a"], tensors["a"])
            assert [name for name, _ in safetensors.deserialize(data)] == ["a"]
        assert not bound(early) and not bound(late)
        # A program that has imported overwire's functions keeps them.
        assert ours.load_file is compat_torch.load_file and ours.safe_open is compat.safe_open
        patch.undo()  # the second call does nothing
        assert not bound(early)
    finally:
        for name in ("bound_early", "bound_late", "bound_to_ours"):
            sys.modules.pop(name, None)


def test_nested_and_overlapping() -> None:
    """Names stay patched until the last of several nested or overlapping patches ends, even after an error."""
    m = module("bound_nested")
    try:
        a = ow.patch_safetensors()
        first = m.safe_open
        with ow.patch_safetensors():
            assert m.safe_open is first
            b = ow.patch_safetensors()
            a.undo()
            a.undo()
            assert bound(m)
        assert bound(m)
        b.undo()
        assert not bound(m)
        with pytest.raises(KeyError), ow.patch_safetensors():
            assert bound(m)
            raise KeyError
        assert not bound(m)
    finally:
        sys.modules.pop("bound_nested")


class Library:
    """Replaces a class of a library that hooks change."""

    @classmethod
    def make(cls) -> str:
        return f"{cls.__name__} by itself"


def hooked(cls: type[Library]) -> str:
    return f"{cls.__name__} by overwire"


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the hooks for one library, and makes its modules look imported."""
    monkeypatch.setitem(sys.modules, accelerate.MODULES[0], types.ModuleType("offload"))
    return lambda make: monkeypatch.setattr(accelerate, "pair_replacements", lambda found, lazy: make())


def test_a_library_that_cannot_be_hooked(
    hooks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If the hooks of a library fail, they are removed with a warning. Everything else is patched, and restored at the
    end."""
    ow.save_file({"a": torch.arange(999)}, tmp_path / "a.safetensors")
    before = (safetensors.torch.load_file, vars(Library)["make"], list(sys.meta_path))

    def fail() -> Any:
        yield (Library, "make"), classmethod(hooked)
        raise AttributeError("'function' object has no attribute '__func__'")

    hooks(fail)
    for _ in range(2):
        caplog.clear()
        with ow.patch_safetensors():
            assert Library.make() == "Library by itself"
            same(safetensors.torch.load_file(tmp_path / "a.safetensors")["a"], torch.arange(999))
        assert "accelerate" in caplog.text and "__func__" in caplog.text
        assert (safetensors.torch.load_file, vars(Library)["make"], list(sys.meta_path)) == before


def test_a_patch_that_fails_leaves_nothing(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing remains of a patch that fails halfway, and the next patch is complete."""
    hooks(lambda: [((Library, "make"), classmethod(hooked))])
    before = (safetensors.torch.load_file, safetensors.safe_open, vars(Library)["make"], list(sys.meta_path))
    put = patching._put

    def fail(swap: Any, names: Any, chosen: Any) -> None:
        put(swap, names, chosen)
        if names is vars(safetensors):
            broken.undo()  # fails only once
            raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(patching, "_put", fail)
        with pytest.raises(KeyboardInterrupt):
            ow.patch_safetensors()
    assert (safetensors.torch.load_file, safetensors.safe_open, vars(Library)["make"], list(sys.meta_path)) == before
    hooks(lambda: [((Library, "make"), classmethod(hooked))])
    with ow.patch_safetensors():
        assert Library.make() == "Library by overwire" and safetensors.safe_open is not before[1]
    assert Library.make() == "Library by itself" and safetensors.safe_open is before[1]


def test_another_tools_wrapper_stays(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tools' wrappers stay at the end of a patch, and then wrap the library's own function."""
    hooks(lambda: [((Library, "make"), classmethod(hooked))])
    monkeypatch.setattr(Library, "make", vars(Library)["make"])  # restored after the test
    with ow.patch_safetensors():
        inner = vars(Library)["make"]
        wrapper = classmethod(lambda cls: f"<{inner.__get__(None, cls)()}>")
        Library.make = wrapper  # type: ignore[method-assign]
        assert Library.make() == "<Library by overwire>"
    assert vars(Library)["make"] is wrapper and Library.make() == "<Library by itself>"
    with ow.patch_safetensors():
        assert Library.make() == "Library by overwire"
    assert vars(Library)["make"] is wrapper and Library.make() == "<Library by itself>"


def test_conjugate_and_negative_views_are_saved_by_value(tmp_path: Path) -> None:
    """With compress=True, a lazy view (conjugate, negative) is saved with its own values, not with those in its
    memory."""
    number = torch.randn(999, dtype=torch.complex64)
    tensors = {"conj": number.conj(), "neg": torch._neg_view(torch.randn(999)), "plain": torch.randn(999)}
    assert tensors["conj"].is_conj() and tensors["neg"].is_neg()
    with ow.patch_safetensors(compress=True):
        safetensors.torch.save_file(tensors, tmp_path / "a.safetensors")
        with pytest.raises(ValueError, match="non contiguous"):
            safetensors.torch.save_file({"a": number.conj()[::2]}, tmp_path / "b.safetensors")
        plain = safetensors.torch.save(tensors=tensors)  # save() returns a plain file, as docs/transformers.md says
    for loaded in (ow.load_file(tmp_path / "a.safetensors"), safetensors.torch.load(plain)):
        assert sorted(loaded) == sorted(tensors)
        for name, tensor in loaded.items():
            same(tensor, tensors[name])
    assert ow.inspect(tmp_path / "a.safetensors")["sources"][0]["format"] == "overwire"


_BASE = np.arange(2 * 3 * 40, dtype=np.float32).reshape(2, 3, 40)
_ORDERS = {
    "fortran": np.asfortranarray(_BASE), "turned": _BASE.transpose(2, 0, 1), "reversed": _BASE[:, ::-1],
    "strided": _BASE[..., ::7], "broadcast": np.broadcast_to(_BASE[:1], (5, 3, 40)), "big": _BASE.astype(">f4"),
    "big fortran": np.asfortranarray(_BASE.astype(">f4")), "scalar": np.array(3.5), "empty": np.zeros((3, 0))[::2],
    "words": np.asfortranarray(_BASE.astype(np.uint16)), "plain": _BASE, "bools": (_BASE > 9).T,
}  # fmt: skip


def _check_orders(loaded: dict[str, Any]) -> None:
    assert sorted(loaded) == sorted(_ORDERS)
    for name, array in _ORDERS.items():
        assert loaded[name].shape == array.shape and np.array_equal(loaded[name], array), name


def test_arrays_in_any_memory_order_are_saved(tmp_path: Path) -> None:
    """With compress=True, numpy arrays in any memory order are saved correctly, to files and to bytes."""
    orders = dict(_ORDERS)
    with ow.patch_safetensors(compress=True):
        safetensors.numpy.save_file(orders, tmp_path / "a.safetensors")
        safetensors.numpy.save_file(tensor_dict=orders, filename=tmp_path / "b.safetensors", metadata={"k": "v"})
        data = safetensors.numpy.save(orders)
        _check_orders(safetensors.numpy.load_file(tmp_path / "a.safetensors"))
    assert all(orders[name] is array for name, array in _ORDERS.items())
    for name in ("a", "b"):
        assert ow.inspect(tmp_path / f"{name}.safetensors")["sources"][0]["format"] == "overwire"
        _check_orders(ow.load_file(tmp_path / f"{name}.safetensors", framework="np"))
    _check_orders(safetensors.numpy.load(data))


def test_frameworks_that_write_through_numpy(tmp_path: Path) -> None:
    """flax, like mlx and tensorflow, saves through numpy arrays. Its arrays load unchanged."""
    jax = pytest.importorskip("jax")
    with ow.patch_safetensors(compress=True):
        import safetensors.flax

        arrays = {"turned": jax.numpy.asarray(_BASE).transpose(2, 0, 1), "plain": jax.numpy.asarray(_BASE)}
        safetensors.flax.save_file(arrays, tmp_path / "a.safetensors")
    for name, array in ow.load_file(tmp_path / "a.safetensors", framework="np").items():
        assert np.array_equal(array, arrays[name])


def test_safetensors_modules_that_are_imported_after_the_patch(script: Any) -> None:
    """If a module of safetensors is imported during the patch, its functions are replaced, and restored at the end."""
    script("""
import sys
import overwire as ow
with ow.patch_safetensors():
    assert "safetensors.numpy" not in sys.modules
    from safetensors.numpy import load_file
    import safetensors.numpy as module
    import numpy
    assert load_file is module.load_file and hasattr(load_file, "__wrapped__")
    ow.save_file({"a": numpy.arange(999)}, "a.safetensors")
    assert load_file("a.safetensors")["a"][5] == 5
assert not hasattr(module.load_file, "__wrapped__")
""")


def test_threads(tmp_path: Path) -> None:
    """Threads can begin and end patches at any time. Each patch works until its end. After the last one, nothing
    remains."""
    ow.save_file({"a": torch.arange(100)}, tmp_path / "a.safetensors")
    m = module("bound_threads")
    wrong: list[Any] = []

    def work() -> None:
        try:
            for _ in range(20):
                with ow.patch_safetensors():
                    assert bound(m)
                    assert m.read(tmp_path / "a.safetensors")["a"][7] == 7
        except BaseException as error:
            wrong.append(error)

    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong
        assert not bound(m)
    finally:
        sys.modules.pop("bound_threads")


def test_without_safetensors(script: Any) -> None:
    """Without the package safetensors, the patch says what is missing, and the drop-in works."""
    script("""
import sys
sys.modules["safetensors"] = None
import overwire as ow
try:
    ow.patch_safetensors()
except ow.MissingPackageError as error:
    assert "safetensors" in str(error)
else:
    raise AssertionError
import overwire.compat.safetensors as compat  # this import needs no other package
assert compat.SafetensorError.__mro__[1] is Exception
spec = compat.TensorSpec(dtype="uint8", shape=[0], data_ptr=0, data_len=0)
assert compat.deserialize(compat.serialize({"a": spec})) == [("a", {"dtype": "U8", "shape": [0], "data": bytearray()})]
assert "torch" not in sys.modules and "numpy" not in sys.modules
""")


def test_each_shard_is_opened_once(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers opens a shard for its metadata and again for its tensors, but the engine reads the header once, or
    twice if transformers 5 loads several shards in one pass."""
    import transformers

    five = int(transformers.__version__.split(".")[0]) >= 5

    model, one, many = llama
    opened: list[str] = []
    begin = opened_models._verbs.open

    def counted(spec: Any) -> Any:
        opened.extend(spec["uris"])
        return begin(spec)

    monkeypatch.setattr(opened_models._verbs, "open", counted)
    for folder in (one, many):
        opened.clear()
        with ow.patch_safetensors():
            equal(model, transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
        files = sorted(map(str, folder.glob("*.safetensors")))
        assert sorted(opened) == sorted(files * (2 if five and len(files) > 1 else 1))


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_that_is_replaced_is_opened_again(tmp_path: Path, compressed: bool) -> None:
    """Between two reads, the current version of a file stays open, but no older version, folder or index. When the
    patch ends, the file is closed."""
    path, links = tmp_path / "m.safetensors", Path("/proc/self/fd")

    def held() -> int:
        return sum(str(tmp_path) in os.path.realpath(link) for link in links.iterdir())

    with ow.patch_safetensors(device="cpu"):
        for value in range(4):
            ow.save_file({"a": torch.full((50_000,), float(value)).bfloat16()}, tmp_path / "next", compress=compressed)
            if value % 2:
                (tmp_path / "next").replace(path)
            else:
                path.write_bytes((tmp_path / "next").read_bytes())
            with safetensors.safe_open(path, "pt") as file:
                assert file.metadata() is None
            with safetensors.safe_open(path, "pt") as file:
                part = file.get_slice("a")
            assert part[7:9].tolist() == [value, value] and safetensors.torch.load_file(path)["a"][-1] == value
        path.unlink()
        with pytest.raises(FileNotFoundError):
            safetensors.safe_open(path, "pt")
        ow.save_file({"a": torch.zeros(3)}, path)
        for source in (tmp_path, path):
            assert safetensors.safe_open(source, "pt").keys() == ["a"]
        del file, part
        assert held()
    gc.collect()
    assert soon(lambda: not held())


def test_open_files_list_their_methods(tmp_path: Path) -> None:
    """For a file that is opened under the patch, plain or compressed, dir() and `inspect` show the same as for
    safetensors' own."""
    import inspect

    tensors = {"w": torch.arange(4)}
    plain, packed = tmp_path / "plain.safetensors", tmp_path / "packed.safetensors"
    ow.save_file(tensors, plain, compress=False)
    ow.save_file(tensors, packed)
    want = {name for name in dir(safetensors.safe_open(plain, "pt")) if not name.startswith("_")}
    assert "get_tensor" in want
    with ow.patch_safetensors():
        for path in (plain, packed):
            for framework in ("pt", "np"):
                file = safetensors.safe_open(path, framework)
                assert want <= set(dir(file)) and want <= {name for name, _ in inspect.getmembers(file)}

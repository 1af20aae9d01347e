"""Loads pipelines with this interpreter's diffusers and transformers, unpatched and under `patch_safetensors`, and
compares every parameter byte for byte. `test_transformers.py` runs this program. The arguments are an empty folder and,
to run only some cases, their names. The last line of output is "ok" and the releases of diffusers and transformers."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
warnings.filterwarnings("ignore")

import diffusers  # noqa: E402
import overwire as ow  # noqa: E402
import safetensors  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, StableDiffusionPipeline, UNet2DConditionModel  # noqa: E402
from overwire.compat.safetensors import _lazy  # noqa: E402

diffusers.utils.logging.disable_progress_bar()
gc.freeze()  # garbage collections then examine only objects of the cases
MODELS = ("text_encoder", "unet", "vae")


def load(folder: Path, **how: Any) -> Any:
    """Loads the pipeline with only its models."""
    return DiffusionPipeline.from_pretrained(folder, **{"tokenizer": None, "safety_checker": None, "feature_extractor": None, **how})


def tiny() -> Any:
    """Builds a small pipeline with Stable Diffusion's classes."""
    torch.manual_seed(3)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
        attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    text = transformers.CLIPTextConfig(
        vocab_size=99, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=20,
    )
    return StableDiffusionPipeline(
        vae=AutoencoderKL(block_out_channels=(8,), norm_num_groups=4), text_encoder=transformers.CLIPTextModel(text),
        tokenizer=None,
        unet=unet, scheduler=DDIMScheduler(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip


def same(want: Any, got: Any, what: Any) -> None:
    """Asserts that every parameter and buffer of each model has the same dtype, device and bytes."""
    for model in MODELS:
        a, b = getattr(want, model).state_dict(), getattr(got, model).state_dict()
        assert a.keys() == b.keys(), (what, model, a.keys() ^ b.keys())
        for name, left in a.items():
            right = b[name]
            assert type(left) is type(right) and (left.dtype, left.device, left.shape) == (
                right.dtype, right.device, right.shape,
            ), (what, name)
            assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), (
                what, model, name,
            )


class Passes:
    """Records each pass of the engine over a model: its folder and number of tensors, in the order in which the passes
    begin."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.streams: list[Any] = []

    @contextlib.contextmanager
    def counted(self) -> Iterator[Passes]:
        stream = ow.stream

        def begun(source: Any, *args: Any, **kwargs: Any) -> Any:
            one = source[0] if isinstance(source, list) else source.shared_model().uris[0]
            self.seen.append((Path(one).parent.name, len(kwargs["keys"])))
            self.streams.append(stream(source, *args, **kwargs))
            return self.streams[-1]

        ow.stream = begun  # type: ignore[assignment]
        try:
            yield self
        finally:
            ow.stream = stream

    def ended(self) -> bool:
        """Returns whether each pass has ended."""
        return all("ended" in repr(stream) for stream in self.streams)


def folders(folder: Path, **how: Any) -> None:
    """Writes the pipeline, plain and compressed."""
    pipeline = tiny()
    pipeline.save_pretrained(folder / "plain", **how)
    with ow.patch_safetensors(compress=True):
        pipeline.save_pretrained(folder / "packed", **how)
    assert {source["format"] for source in ow.inspect(folder / "packed")["sources"]} == {"overwire"}


def stored(folder: Path) -> int:
    """Returns the number of tensors in a model's files."""
    return sum(len(ow.safe_open(path).keys()) for path in folder.glob("*.safetensors"))


def whole(folder: Path) -> None:
    """Compares each way to load with the unpatched load. Each of diffusers' own models is read in one pass."""
    folders(folder)
    shards = folder / "shards"
    folders(shards, max_shard_size="30KB")
    assert len(list((shards / "packed" / "unet").glob("*.safetensors"))) > 2
    maps: list[Any] = [None, *(["cpu"] if "cpu" in diffusers.pipelines.pipeline_utils.SUPPORTED_DEVICE_MAP else [])]
    dtypes = (None, torch.bfloat16, {"unet": torch.float16, "default": torch.float32})
    forms = (("packed", None), ("plain", None), ("plain", "cpu"))
    # Every pair of values of map, dtype, form and home is tested, but not every combination of all four.
    for (at, where), (number, dtype) in itertools.product(enumerate(maps), enumerate(dtypes)):
        how: dict[str, Any] = {"torch_dtype": dtype} if dtype is not None else {}
        how |= {"device_map": where} if where else {}
        want = load(folder / "plain", **how)
        for one in {number, (number + 1 + at) % 3} if len(maps) > 1 else range(3):
            (kind, device), home = forms[one], (folder, shards)[(at + (one == number)) % 2]
            passes = Passes()
            with ow.patch_safetensors(device=device), passes.counted():
                got = load(home / kind, **how)
            same(want, got, (home.name, kind, device, where, dtype))
            read = dict.fromkeys(MODELS, 0)
            for name, count in passes.seen:
                read[name] += count
            ours = (kind, device) != ("plain", None)
            assert read == ({name: stored(home / kind / name) if ours else 0 for name in MODELS}), passes.seen
            assert sum(name != "text_encoder" for name, _ in passes.seen) == 2 * ours, passes.seen
            assert passes.ended()


@contextlib.contextmanager
def building(then: Any) -> Iterator[None]:
    """Calls `then` with the name of each model of the pipeline just before the model is built."""
    build = diffusers.configuration_utils.ConfigMixin.from_config.__func__
    begin = transformers.CLIPTextModel.__init__

    def from_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
        then({"UNet2DConditionModel": "unet", "AutoencoderKL": "vae"}[cls.__name__])
        return build(cls, *args, **kwargs)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        then("text_encoder")
        begin(self, *args, **kwargs)

    UNet2DConditionModel.from_config = AutoencoderKL.from_config = classmethod(from_config)
    transformers.CLIPTextModel.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        del UNet2DConditionModel.from_config, AutoencoderKL.from_config
        transformers.CLIPTextModel.__init__ = begin  # type: ignore[method-assign]


def ahead(folder: Path) -> None:
    """The engine begins to read each model, including the text encoder, before it is built, but stays only one model
    ahead. A model that the caller passes is not read."""
    folders(folder)
    built: list[str] = []
    passes = Passes()

    def then(name: str) -> None:
        built.append(name)
        assert not gc.isenabled()
        begun = [model for model, _ in passes.seen]
        assert len(set(begun)) == len(begun) and set(built) <= set(begun) and len(begun) == min(len(built) + 1, 3), (
            built, begun,
        )

    with building(then), ow.patch_safetensors(), passes.counted():
        pipeline = load(folder / "packed")
        assert gc.isenabled()
        assert sorted(built) == list(MODELS) and len(passes.seen) == 3, (built, passes.seen)
    for given in (("unet", "vae"), ("text_encoder",), ("vae", "text_encoder")):
        passes = Passes()
        with ow.patch_safetensors(), passes.counted():
            load(folder / "packed", **{name: getattr(pipeline, name) for name in given})
        assert sorted(name for name, _ in passes.seen) == sorted(set(MODELS) - set(given)), (given, passes.seen)
        assert passes.ended()
    passes = Passes()
    with ow.patch_safetensors(), passes.counted():
        assert load(folder / "packed", text_encoder=None).text_encoder is None
    assert sorted(name for name, _ in passes.seen) == ["unet", "vae"] and passes.ended(), passes.seen
    config = folder / "packed" / "text_encoder" / "config.json"  # transformers decides how to read it
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "none such"}}))
    passes = Passes()

    def unread(name: str) -> None:
        assert name != "text_encoder" or name not in {model for model, _ in passes.seen}, passes.seen

    with building(unread), ow.patch_safetensors(), passes.counted():
        load(folder / "packed")
    assert passes.ended()


def alone(folder: Path) -> None:
    """Loads single models: with device maps for several modules, with offload to disk, with low_cpu_mem_usage=False and
    other options, with load_state_dict, and in diffusers' worker threads."""
    folders(folder, max_shard_size="30KB")

    def unet(*args: Any, **kwargs: Any) -> Any:  # looks up the name while the patch is active
        return UNet2DConditionModel.from_pretrained(*args, **kwargs)

    parts = {"conv_in": "cpu", "time_embedding": torch.device("cpu"), "down_blocks": "cpu", "mid_block": "cpu", "up_blocks": "cpu"}
    parts |= {"conv_norm_out": "cpu", "conv_out": "cpu"}
    disk = parts | {"up_blocks": "disk"}
    ways: list[dict[str, Any]] = [{}, {"device_map": "cpu"}, {"device_map": parts}, {"device_map": disk, "offload_folder": folder / "off"}]
    ways += [{"low_cpu_mem_usage": False}, {"disable_mmap": True}, {"torch_dtype": torch.float64}]
    for how in ways:
        outputs, states = [], []
        for kind, patch in (("plain", contextlib.nullcontext), ("packed", ow.patch_safetensors), ("plain", ow.patch_safetensors)):
            with patch():
                model = unet(folder / kind / "unet", **how).eval()
            given = torch.ones(1, 4, 8, 8, dtype=model.dtype), 3, torch.ones(1, 5, 16, dtype=model.dtype)
            states.append({name: tensor for name, tensor in model.state_dict().items() if tensor.device.type != "meta"})
            # Parameters may be aligned differently than in the unpatched load, so results may be rounded differently.
            with torch.no_grad():
                outputs.append(model(*given).sample)
        for output, state in zip(outputs, states, strict=True):
            assert output.dtype == how.get("torch_dtype", torch.float32) and torch.allclose(output, outputs[0], atol=1e-5), how
            assert state.keys() == states[0].keys() and all(
                torch.equal(tensor, state[name]) for name, tensor in states[0].items()
            ), how
    with ow.patch_safetensors():
        modeling = sys.modules["diffusers.models.modeling_utils"]
        got = modeling.load_state_dict(next((folder / "packed" / "unet").glob("*.safetensors")))
        assert all(type(tensor) is torch.Tensor for tensor in got.values())  # lazy only in from_pretrained
        modeling.HF_ENABLE_PARALLEL_LOADING = True  # diffusers' worker threads read the shards
        passes = Passes()
        with passes.counted():
            model = unet(folder / "packed" / "unet")
        modeling.HF_ENABLE_PARALLEL_LOADING = False
    want = unet(folder / "plain" / "unet").state_dict()
    assert len(passes.seen) == 1, passes.seen
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in want.items())


def lazy(folder: Path) -> None:
    """Operations on a tensor that has not been read yet give the usual result. A tensor of another shape is refused as
    usual."""
    folders(folder)
    state: dict[str, Any] = {}

    def fix(self: Any, given: Any) -> None:
        state.update({name: tensor + 1 for name, tensor in given.items()})
        given["conv_out.bias"] = given["conv_out.bias"] * 2  # the result is an ordinary tensor

    before = diffusers.ModelMixin._fix_state_dict_keys_on_load
    diffusers.ModelMixin._fix_state_dict_keys_on_load = fix  # type: ignore[method-assign]
    try:
        with ow.patch_safetensors():
            got = UNet2DConditionModel.from_pretrained(folder / "packed" / "unet").state_dict()
    finally:
        diffusers.ModelMixin._fix_state_dict_keys_on_load = before  # type: ignore[method-assign]
    want = UNet2DConditionModel.from_pretrained(folder / "plain" / "unet").state_dict()
    assert torch.equal(got["conv_out.bias"], want["conv_out.bias"] * 2)
    assert state and all(
        torch.equal(state[name], tensor + 1) and type(state[name]) is torch.Tensor for name, tensor in want.items()
    )
    config = json.loads((folder / "packed" / "unet" / "config.json").read_text())
    (folder / "packed" / "unet" / "config.json").write_text(json.dumps(config | {"out_channels": 7}))
    with ow.patch_safetensors():
        try:
            UNet2DConditionModel.from_pretrained(folder / "packed" / "unet")
            raise AssertionError("a tensor of another shape was loaded")
        except ValueError as error:
            assert "conv_out.weight expected shape" in str(error) or "conv_out.bias expected shape" in str(error), error
        model, info = UNet2DConditionModel.from_pretrained(
            folder / "packed" / "unet", ignore_mismatched_sizes=True, low_cpu_mem_usage=False, output_loading_info=True
        )
    assert model.conv_out.out_channels == 7 and len(info["mismatched_keys"]) == 2


def damaged(folder: Path) -> None:
    """If a file is damaged, loading its model raises a typed error. Data that was read ahead is freed, and the patch is
    undone."""
    folders(folder)
    before = diffusers.ModelMixin.__dict__["from_pretrained"], DiffusionPipeline.__dict__["from_pretrained"], safetensors.safe_open

    def fails(kind: type[BaseException], read: bool = False) -> BaseException:
        passes = Passes()
        with ow.patch_safetensors(), passes.counted():
            try:
                load(folder / "packed")
            except kind as error:
                assert gc.isenabled()
                gc.collect()
                assert passes.ended() and (passes.seen or not read), passes.seen
                assert not any(one._names for one in gc.get_objects() if isinstance(one, _lazy._Pass) and one._landed)
                found = error
            else:
                raise AssertionError(f"no {kind.__name__}")
        assert before == (
            diffusers.ModelMixin.__dict__["from_pretrained"], DiffusionPipeline.__dict__["from_pretrained"], safetensors.safe_open
        )  # fmt: skip
        return found

    for name in ("unet", "vae"):
        path = folder / "packed" / name / "diffusion_pytorch_model.safetensors"
        good = path.read_bytes()
        broken = bytearray(good)
        broken[-len(good) // 4] ^= 1
        path.write_bytes(broken)
        error = fails(safetensors.SafetensorError, read=True)
        assert str(path) in str(error) and isinstance(error.__cause__, ow.CorruptError) and error.__cause__.tensor, (
            error
        )
        path.write_bytes(good[: len(good) // 2])
        assert str(path) in str(fails(safetensors.SafetensorError))
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        assert "git-lfs" in str(fails(OSError))
        path.unlink()
        fails(OSError)
        path.write_bytes(good)
    path = folder / "packed" / "text_encoder" / "model.safetensors"
    good = path.read_bytes()
    broken = bytearray(good)
    broken[-len(good) // 4] ^= 1
    path.write_bytes(broken)
    error = fails(safetensors.SafetensorError, read=True)
    assert str(path) in str(error) and isinstance(error.__cause__, ow.CorruptError) and error.__cause__.tensor, error
    path.write_bytes(good)
    for last in range(1, 4):
        built: list[str] = []

        def interrupt(name: str, built: list[str] = built, last: int = last) -> None:
            built.append(name)
            if len(built) == last:
                raise KeyboardInterrupt

        with building(interrupt):
            fails(KeyboardInterrupt, read=True)


def memory(folder: Path) -> None:
    """Before the load, torch's allocator is asked once for the GPU memory of all large tensors in the requested
    dtype."""
    from overwire.compat.safetensors import patching
    from overwire.integrations import diffusers as ours

    class Nothing:
        def want(self, *_: Any) -> Any:
            return lambda: None

        def begin(self) -> None:
            assert asked == [{"cuda:0": (4 << 20) + (1 << 20)}]  # before the load begins

        def close(self) -> None:
            pass

    tensors = {"cast": torch.zeros(1 << 10, 1 << 10).bfloat16(), "small": torch.zeros(9), "whole": torch.zeros(1 << 17, dtype=torch.int64)}
    asked: list[dict[str, int]] = []
    reserve, ours._reserve_memory = ours._reserve_memory, lambda sizes: asked.append(dict(sizes))
    path = str(folder / "model.safetensors")
    try:
        for compress in (False, True):
            ow.save_file(tensors, path, compress=compress)
            asked.clear()
            with ow.patch_safetensors():
                model = ours._Model([path], patching._LAZY._replace(ahead=Nothing))
                for name in [*tensors, *tensors]:
                    assert model.note_tensor(path, name, "cuda:0", torch.float32) is not None
                assert model.begin() and len(asked) == 1
                model.close()
    finally:
        ours._reserve_memory = reserve


CASES = (whole, ahead, alone, lazy, damaged, memory)

if __name__ == "__main__":
    for case in [case for case in CASES if case.__name__ in sys.argv[2:] or not sys.argv[2:]]:
        home = Path(sys.argv[1]) / case.__name__
        home.mkdir(parents=True)
        case(home)
    print("ok", diffusers.__version__, transformers.__version__)

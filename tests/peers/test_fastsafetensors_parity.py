"""Tests that each call of overwire.compat.fastsafetensors gives the same result as with the real package."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import every_dtype
from fastsafetensors_plain import plain

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
import overwire.compat.fastsafetensors as fst  # noqa: E402
from overwire.compat.fastsafetensors.st_types import DType  # noqa: E402


@pytest.fixture(scope="module")
def real() -> Any:
    package = pytest.importorskip("fastsafetensors")
    if not package.__version__.startswith("0.5."):
        pytest.skip(f"fastsafetensors {package.__version__} is installed; requirements/test.txt pins 0.5.0")
    return package


def answer(call: Any) -> Any:
    """Returns a call's result, or "raised" if it fails, because the texts of errors are not compared."""
    try:
        return plain(call())
    except Exception:
        return "raised"


def both(real: Any, call: Any) -> Any:
    """Asserts that a call gives the same result with both packages, and returns the result."""
    theirs, ours = answer(lambda: call(real)), answer(lambda: call(fst))
    assert ours == theirs
    return ours


def part(package: Any, name: str) -> Any:
    return importlib.import_module(f"{package.__name__}.{name}")


def test_devices_frames_and_settings_equal_the_real_packages(real: Any) -> None:
    for text in ("cpu", "cuda", "cuda:1", "gpu:0", "xpu", "cuda:x", "", "cuda:"):
        both(real, lambda p, text=text: part(p, "st_types").Device.from_str(text).as_str())
    names = [one.name for one in part(real, "st_types").DType]
    assert all(hasattr(DType, name) for name in names)
    for name in names:
        for op in ("get_dtype_size", "as_workaround_dtype"):
            if name != "AUTO":
                both(real, lambda p, op=op, name=name: getattr(get_op(p), op)(part(p, "st_types").DType[name]))
    indices = [
        slice(2, 4), (slice(None), 3), slice(3, 3), (slice(0, 9, 3), slice(1, 7, 2)), 5, (1, 2), 16, -17, (1, 2, 3),
        "x",
    ]
    # The real package is wrong for steps that do not divide the range, for negative steps and indices, and for ().
    assert (frame(fst)[::-1].shape, frame(fst)[::-1].offsets, frame(fst)[0:10:3].shape) == ([16, 8], [15, 0], [4, 8])
    assert frame(fst)[()] == frame(fst) and frame(fst)[-2:].offsets == [14, 0] and frame(fst)[-1].offsets == [15, 0]
    for index in indices:
        both(real, lambda p, index=index: frame(p)[index])
    both(real, lambda p: frame(p)[2:9][1:3])
    for shape in ([8, 16], [2, 4]):
        both(real, lambda p, shape=shape: get_op(p).get_native_shape(part(p, "st_types").DType.F4, shape))
        both(real, lambda p, shape=shape: get_op(p).get_storage_shape(part(p, "st_types").DType.F4, shape, [shape[1], 1]))
        both(real, lambda p, shape=shape: pairs(p, shape))
    settings: list[dict[str, Any]] = [
        {"loader": "3fs", "parallel": {"queue_size": 3, "use_pipeline": True}, "3fs": {"entries": 1, "set_numa": False}},
        {"debug": {"debug_log": True}},
        {},
        {"max_concurrent_producers": 2},
    ]
    known = [one.name for one in dataclasses.fields(real.LoaderConfig)]  # the drop-in also has the fields of 0.5
    for data in settings:
        both(real, lambda p, data=data: {name: getattr(p.LoaderConfig.from_dict(data), name) for name in known})
        both(real, lambda p, data=data: p.LoaderConfig.from_dict(data).get_extension_config("3fs"))
        both(real, lambda p, data=data: p.LoaderConfig.from_dict(data).create_parallel_kwargs())
    both(real, lambda p: part(p, "copier").create_copier_constructor("nope", part(p, "st_types").Device()))
    both(real, lambda p: part(p, "frameworks").get_framework_op("jax"))
    both(real, lambda p: get_op(p).get_process_group(3))
    both(real, lambda p: p.SafeTensorsFileLoader.process_extension_config({"copier_type": "gds", "bbuf_size_kb": 1}))
    both(real, lambda p: (p.SingleGroup().size(), p.SingleGroup().rank(), p.get_device_numa_node(None)))


def pairs(package: Any, shape: list[int]) -> list[Any]:
    return list(get_op(package).get_native_slices(part(package, "st_types").DType.F4, shape, (slice(0, 2), slice(2, 4))))


def get_op(package: Any) -> Any:
    return part(package, "frameworks").get_framework_op("pt")


def frame(package: Any) -> Any:
    return package.TensorFrame.from_buffer({"dtype": part(package, "st_types").DType.F32, "shape": [16, 8], "data_offsets": [0, 512]})


def header(entries: Any, data: bytes = b"", padding: bytes = b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    text += padding
    return len(text).to_bytes(8, "little") + text + data


def u8(begin: int, end: int, **more: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]} | more


HEADERS = {
    "good": header({"b": u8(0, 3), "a": u8(3, 4), "__metadata__": {"x": "y"}}, b"1234"),
    "padded": header({"a": u8(0, 1)}, b"1", b"   "),
    "nothing": header({}),
    "scalar": header({"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}}, b"1234"),
    "empty dimension": header({"a": {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]}}),
    "trailing bytes": header({"a": u8(0, 1)}, b"12345"),
    "metadata of numbers": header({"a": u8(0, 1), "__metadata__": {"x": 3}}, b"1"),
    "short": b"abc",
    "too large": (1 << 60).to_bytes(8, "little") + b"{}",
    "beyond the file": (100).to_bytes(8, "little") + b"{}",
    "no JSON": header(b"{x"),
    "overlap": header({"a": u8(0, 4), "b": u8(2, 6)}, b"123456"),
    "hole": header({"a": u8(0, 2), "b": u8(3, 4)}, b"1234"),
    "late start": header({"a": u8(2, 4)}, b"1234"),
    "truncated": header({"a": u8(0, 4)}, b"12"),
    "wrong size": header({"a": u8(0, 5, shape=[4])}, b"12345"),
    "unknown dtype": header({"a": u8(0, 4, dtype="XX")}, b"1234"),
    "backwards": header({"a": u8(4, 0)}, b"1234"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_are_read_as_by_the_real_package(real: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(HEADERS[name])

    def read(p: Any) -> Any:
        meta = p.SafeTensorsMetadata.from_file(str(path), get_op(p))
        frames = {key: (one.dtype, one.shape, one.data_offsets, one.strides) for key, one in meta.tensors.items()}
        return meta.header_length, meta.size_bytes, meta.metadata, list(frames), frames

    both(real, read)


def test_tensors_are_loaded_as_by_the_real_package(real: Any, tmp_path: Path) -> None:
    # The file has only dtypes that the real package knows.
    path = str(tmp_path / "both.safetensors")
    known = {one.name for one in part(real, "st_types").DType}
    ow.save_file({name: tensor for name, tensor in every_dtype().items() if name in known}, path, {"made": "here"}, compress=False)

    def load(p: Any) -> Any:
        loader = p.SafeTensorsFileLoader(p.SingleGroup(), "cpu", nogds=True)
        loader.add_filenames({0: [path]})
        buffer = loader.copy_files_to_device()
        kinds = part(p, "st_types").DType
        found = [
            loader.get_keys(), loader.get_shape("F4"),
            {name: buffer.get_tensor(name).clone() for name in loader.get_keys()},
            buffer.get_sharded("F32", 1).clone(), buffer.push_tensor("U8", 0).clone(), buffer.get_tensor("I32", dtype=kinds.F64),
            buffer.get_multi_cols(["I64", "I64"], 0).get_raw(), buffer.get_shape("BF16"),
            buffer.get_filename("U8"), answer(lambda: buffer.get_filename("nothing")), buffer.key_to_rank_lidx,
            {k: v.get_raw().clone() for k, v in buffer.as_dict({"I8": -1, "F16": 0}).items()},
            answer(lambda: buffer.get_tensor("nothing")), answer(lambda: buffer.get_shape("nothing")),
            answer(lambda: loader.get_shape("nothing")),
            buffer.auto_mem_delete, get_op(p).get_mem_used(),
        ]  # fmt: skip
        found = plain(found)
        buffer.close()
        found.append(get_op(p).get_mem_used())
        loader.close()
        found.append(loader.get_keys())
        return found

    both(real, load)

    def opened(p: Any) -> Any:
        with p.fastsafe_open(path, framework="pt") as file:
            return plain([sorted(file.keys()), file.metadata(), file.get_tensor("U16").clone()])

    both(real, opened)
    both(
        real,
        lambda p: [
            (n, t.clone())
            for n, t in p.ParallelLoader(p.SingleGroup(), [path], use_tqdm_on_load=False).iterate_weights()
        ],
    )
    both(real, lambda p: [(n, t.clone()) for n, t in p.AutoLoader(p.SingleGroup(), [path]).iterate_weights()])
    both(real, lambda p: p.ParallelLoader(p.SingleGroup(), [path], max_concurrent_producers=2))
    both(real, lambda p: twice(p, path))
    both(real, lambda p: p.SafeTensorsFileLoader(None, "cpu").add_filenames({0: [path + ".absent"]}))


def twice(package: Any, path: str) -> Any:
    copy = path.replace("both", "copy")
    Path(copy).write_bytes(Path(path).read_bytes())
    loader = package.SafeTensorsFileLoader(None, "cpu", nogds=True)
    loader.add_filenames({0: [path, copy]})
    return loader.copy_files_to_device()

"""Tests what plug-ins use of overwire.compat.fastsafetensors: copiers, readers, the extension, headers in memory, and
additions of later versions."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastsafetensors_plain import load, plain, two_files

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
import overwire.compat.fastsafetensors as fst  # noqa: E402
from overwire.compat.fastsafetensors import config, copier, cpp, dlpack, threefs_loader  # noqa: E402
from overwire.compat.fastsafetensors.copier import base  # noqa: E402
from overwire.compat.fastsafetensors.copier.base import CopierInterface  # noqa: E402
from overwire.compat.fastsafetensors.frameworks import get_framework_op  # noqa: E402
from overwire.compat.fastsafetensors.st_types import Device, DType  # noqa: E402


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    return two_files(tmp_path)


class Reader:
    """Has the interface of 3FS's reader, and reads ordinary files."""

    short = 0

    def __init__(self, mount_point: str, entries: int, io_depth: int, buffer_size: int) -> None:
        self.mount_point = mount_point

    def read_chunked(self, path: str, dev_ptr: int, file_offset: int, total_length: int, chunk_size: int) -> int:
        with open(path, "rb") as file:
            file.seek(file_offset)
            data = file.read(total_length - self.short)
        ctypes.memmove(dev_ptr, data, len(data))
        return len(data)


@pytest.fixture
def threefs(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Reader]]:
    module = types.ModuleType("fastsafetensor_3fs_reader")
    module.ThreeFSFileReader = Reader  # type: ignore[attr-defined]
    module.extract_mount_point = lambda path: "/mnt/" + path.split("/")[1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastsafetensor_3fs_reader", module)
    monkeypatch.setattr(Reader, "short", 0)
    yield Reader


def test_a_3fs_reader_reads_the_bytes(
    threefs: type[Reader], files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = ow.load_file(files[0])
    loader = threefs_loader.ThreeFSLoader(None, "cpu", mount_point="/mnt/3fs")
    loader.add_filenames({0: files[:1]})
    buffer = loader.copy_files_to_device()
    used = sum(t.numel() * t.element_size() for t in want.values())
    assert buffer.framework.get_mem_used() == used
    got = {name: buffer.get_tensor(name) for name in want}
    buffer.close()
    assert buffer.framework.get_mem_used() == 0
    gc.collect()
    assert plain(got) == plain(want)
    pipeline = threefs_loader.ParallelThreeFSLoader(None, files[:1], use_tqdm_on_load=False)
    assert plain(dict(pipeline.iterate_weights())) == plain(want)
    pipeline.close()
    threefs_loader.ParallelThreeFSLoader(None, files[:1]).close()
    for blank in (None, "", "  "):
        section = threefs_loader.ThreeFSLoader.process_extension_config({"mount_point": blank}, hf_weights_files=["/x/y"])
        assert section == {"mount_point": "/mnt/x"}
    # The same through a config file.
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"loader": "3fs", "3fs": {"entries": 8}, "parallel": {"use_pipeline": True, "use_tqdm_on_load": False}}))
    monkeypatch.setenv(config.CONFIG_ENV_VAR, str(settings))
    auto = fst.AutoLoader(None, files[:1])
    assert type(auto._loader) is threefs_loader.ThreeFSLoader and auto.config.use_pipeline
    assert plain(dict(auto.iterate_weights())) == plain(want)
    auto.close()
    # Here the reader returns too few bytes, or cannot read the file.
    monkeypatch.setattr(Reader, "short", 1)
    with pytest.raises(RuntimeError, match="truncated"):
        loader.copy_files_to_device()
    loader.reset()
    loader.add_filenames({0: files[1:]})
    with pytest.raises(ValueError, match="compressed"):
        loader.copy_files_to_device()
    assert buffer.framework.get_mem_used() == 0


def test_without_the_reader_3fs_fails_when_used(files: list[str]) -> None:
    assert threefs_loader.ThreeFSLoader.process_extension_config({}, hf_weights_files=files) == {}
    with pytest.raises(ModuleNotFoundError):
        threefs_loader.ThreeFSLoader(None, "cpu")


def test_a_users_copier(files: list[str]) -> None:
    """A user's copier can be registered by name, and can use the readers of `cpp` to read into the framework's
    memory."""

    class Mine(CopierInterface):
        def __init__(self, metadata: Any, device: Device, framework: Any) -> None:
            self.metadata, self.device, self.framework = metadata, device, framework
            self.reader = cpp.nogds_file_reader(False, 1024, 4, False, 0)

        def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
            length = self.metadata.size_bytes - self.metadata.header_length
            gbuf = self.framework.alloc_tensor_memory(length, self.device)
            fd = os.open(self.metadata.src, os.O_RDONLY)
            half = length // 2
            start = self.metadata.header_length
            self.reads = [
                self.reader.submit_read(fd, gbuf, start, half, 0),
                self.reader.submit_read(fd, gbuf, start + half, length - half, half),
            ]
            os.close(fd)  # reads use a descriptor of their own
            return gbuf

        def wait_io(self, gbuf: Any, dtype: DType = DType.AUTO, noalign: bool = False) -> Any:
            assert [self.reader.wait_read(number) > 0 for number in self.reads]
            return self.metadata.get_tensors(gbuf, self.device, self.metadata.header_length, dtype)

    @copier.register_copier_constructor("mine")
    def new(device: Device, **kwargs: Any) -> Any:
        assert kwargs == {"colour": "blue"}
        return Mine

    from overwire.compat.fastsafetensors.loader import BaseSafeTensorsFileLoader

    loader = BaseSafeTensorsFileLoader(None, "cpu", "mine", colour="blue")
    loader.add_filenames({0: files[:1]})
    buffer = loader.copy_files_to_device()
    got = {name: buffer.get_tensor(name) for name in loader.get_keys()}
    buffer.close()
    loader.close()
    del loader, buffer
    gc.collect()
    assert plain(got) == plain(ow.load_file(files[0]))
    assert cpp.get_cpp_metrics().bounce_buffer_bytes == 0


def test_the_names_of_the_extension(tmp_path: Path) -> None:
    """The functions and classes of `cpp` work as in the original's extension."""
    assert cpp.get_alignment_size() == 4096 and cpp.init_gds() == cpp.close_gds() == cpp.set_numa_node(0) == 0
    cpp.load_library_functions()
    cpp.set_gil_release(True)
    assert cpp.get_gil_release() is True
    cpp.set_gil_release(False)
    if not cpp.is_cuda_found():
        assert (
            cpp.get_device_pci_bus(0) == ""
            and not cpp.is_cufile_found()
            and cpp.cufile_version() == 0 == cpp.is_gds_supported(0)
        )
        assert get_framework_op("pt").get_cuda_ver() == "0.0"
        with pytest.raises(RuntimeError, match="100"):
            cpp.memcpy_h2d_async(1, 1, 1)

    class Buffer(cpp.gds_device_buffer):
        def __init__(self) -> None:
            super().__init__(0, 0, False)

    assert Buffer().get_length() == 0
    data = bytes(random.Random(1).randbytes(5000))
    (tmp_path / "data").write_bytes(data)
    address = cpp.cpu_malloc(5000)
    buffer = cpp.gds_device_buffer(address, 5000, False)
    reader = cpp.gds_file_reader(4, False, 0)
    handle = cpp.gds_file_handle(str(tmp_path / "data"), False, False)
    assert reader.wait_read(reader.submit_read(handle, buffer, 100, 4900, 50, 5000)) == address + 50
    assert cpp.read_buffer(address + 50, 4900) == data[100:]
    assert buffer.memmove(0, 50, buffer, 4900) == 0 and cpp.read_buffer(address, 4900) == data[100:]
    assert (
        buffer.memmove(1000, 0, buffer, 4900) == -1 and buffer.cufile_register(0, 0) == buffer.cufile_deregister(0) == 0
    )
    number = reader.submit_read(handle, buffer, 4000, 4000, 0, 5000)
    with pytest.raises(RuntimeError, match="truncated"):
        reader.wait_read(number)
    with pytest.raises(ValueError):
        reader.submit_read(handle, buffer, 0, 5001, 0, 5000)
    with pytest.raises(FileNotFoundError):
        cpp.gds_file_handle(str(tmp_path / "absent"), False, False)
    cpp.cpu_free(address)


def test_wait_for_the_first_bytes_of_a_read(tmp_path: Path) -> None:
    """wait_read_prefix waits for the first bytes of a read, as in 0.5. If bytes never arrive, it raises an error."""
    data = random.Random(3).randbytes(40 << 20)
    (tmp_path / "data").write_bytes(data)
    address = cpp.cpu_malloc(len(data) + 10)
    buffer = cpp.gds_device_buffer(address, len(data) + 10, False)
    reader = cpp.nogds_file_reader(False, 1024, 2, False, 0)
    with open(tmp_path / "data", "rb") as file:
        number = reader.submit_read(file.fileno(), buffer, 0, len(data), 0, track_progress=True)
        for length in (1, 17 << 20, len(data)):
            assert reader.wait_read_prefix(number, length) >= length
            assert cpp.read_buffer(address, length) == data[:length]
        with pytest.raises(ValueError, match="wait_read_prefix"):
            reader.wait_read_prefix(number, len(data) + 1)
        assert reader.wait_read(number) == address
        number = reader.submit_read(file.fileno(), buffer, 0, len(data) + 10, 0, track_progress=True)
        assert reader.wait_read_prefix(number, len(data)) == len(data)
        with pytest.raises(RuntimeError, match="truncated"):
            reader.wait_read_prefix(number, len(data) + 1)
        with pytest.raises(RuntimeError, match="truncated"):
            reader.wait_read(number)
        for wrong in (number, 12345, reader.submit_read(file.fileno(), buffer, 0, 10, 0)):
            with pytest.raises(ValueError, match="no read"):
                reader.wait_read_prefix(wrong, 1)
    gone = weakref.ref(reader)
    del reader  # waits for running reads
    assert gone() is None  # even after failed reads
    cpp.cpu_free(address)


def test_additions_of_later_versions(files: list[str]) -> None:
    """Methods, filters and settings that later versions have added are available."""
    loader, buffer = load(files)
    names = list(buffer.key_to_rank_lidx)
    for name, tensor in buffer.iter_local_tensors(iter(names)):
        assert plain(tensor) == plain(buffer.get_tensor(name))
        wrapped = buffer.get_tensor_wrapped(name)
        assert wrapped.get_shape() == loader.get_shape(name) and wrapped.get_nbytes() == tensor.nbytes
    buffer.close()
    loader.set_tensor_filter(keep_tensor=lambda name: name == "U8")
    loader.reset()
    loader.add_filenames({0: files[:1]})
    assert loader.get_keys() == ["U8"]
    with fst.fastsafe_open(files[0], use_fgds=False) as opened:
        assert "U8" in opened.keys()  # noqa: SIM118
    settings = fst.LoaderConfig.from_dict({"parallel": {"max_batch_bytes": 7, "device_memory_budget": 9}})
    limits = {"max_batch_bytes": 7, "device_memory_budget": 9, "use_chunk_budget_as_allocation_size": False}
    assert settings.create_parallel_kwargs() == {"queue_size": -1, **limits}
    kinds = [copier.registry.get_copier_class(kind) for kind in ("gds", "nogds", "unified", "3fs", "none")]
    assert kinds == [
        copier.GdsFileCopier, copier.NoGdsFileCopier, copier.UnifiedMemCopier, copier.ThreeFSFileCopier,
        CopierInterface,
    ]


def test_gds_is_requested_only_on_a_gpu(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """nogds=False means read="gds" on a GPU. test_gpu.py tests the result."""
    asked: list[Any] = []
    stream = ow.stream
    monkeypatch.setattr(base, "stream_tensors", lambda *args, read=None, **named: (asked.append(read), stream(*args, **named))[1])
    for nogds in (False, True):
        load(files[:1], nogds=nogds)
    op = get_framework_op("pt")
    meta = fst.SafeTensorsMetadata.from_file(files[0], op)
    for kind, want in ((copier.GdsFileCopier, "gds"), (copier.NoGdsFileCopier, None)):
        assert kind(meta, Device.from_str("cuda:0"), None, op).read == want
    assert asked == [None, None]


def test_calls_of_the_unified_copier(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that shares the CPU's memory, the copier pins anonymous memory, copies once through `cpp`, waits once
    through torch, and leaves nothing pinned. This test replaces the functions and records the calls."""
    from overwire.compat.fastsafetensors import loader as loaders
    from overwire.compat.fastsafetensors.copier import unified

    op, calls = get_framework_op("pt"), []
    alloc = op.alloc_tensor_memory
    monkeypatch.setattr(op, "alloc_tensor_memory", lambda length, device: alloc(length, Device()))
    monkeypatch.setattr(
        op, "view_of", lambda gbuf, begin, frame, device, owner, view=op.view_of: view(gbuf, begin, frame, Device())
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (calls.append("pin"), tensor)[1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append("wait"))
    monkeypatch.setattr(cpp, "memcpy_h2d_async", lambda to, at, size: (calls.append("copy"), ctypes.memmove(to, at, size))[0])
    meta = fst.SafeTensorsMetadata.from_file(files[0], op)
    one = unified.UnifiedMemCopier(meta, Device.from_str("cuda:0"), op)
    gbuf = one.submit_io(True, 1 << 30)
    got = one.wait_io(gbuf)
    assert calls == ["pin", "copy", "wait"] and one._pinned == []
    assert {name: plain(tensor.get_raw()) for name, tensor in got.items()} == {
        k: plain(v) for k, v in ow.load_file(files[0]).items()
    }

    op.free_tensor_memory(gbuf, Device())

    some = op.mmap_file_pinned(files[0], 100, 8)
    assert bytes(some.get_raw().numpy()) == Path(files[0]).read_bytes()[8:108] and some.dtype is DType.U8
    with pytest.raises(RuntimeError, match="truncated"):
        op.mmap_file_pinned(files[0], 100, os.path.getsize(files[0]) - 99)

    def fails(*_: Any) -> None:
        raise RuntimeError("memcpy_h2d_async: CUDA error 700")

    used = op.get_mem_used()
    monkeypatch.setattr(cpp, "memcpy_h2d_async", fails)
    with pytest.raises(RuntimeError, match="700"):
        one.submit_io(True, 1 << 30)
    assert one._pinned == [] and op.get_mem_used() == used
    # the copier is selected by FASTSAFETENSORS_UNIFIED_MEM or the name of the GPU
    for text, name, want in (("1", "", True), ("0", "NVIDIA GB10", False), (None, "NVIDIA GB10", True), (None, "NVIDIA H200", False)):
        monkeypatch.delenv("FASTSAFETENSORS_UNIFIED_MEM", raising=False)
        if text is not None:
            monkeypatch.setenv("FASTSAFETENSORS_UNIFIED_MEM", text)
        monkeypatch.setattr(op, "get_device_name", lambda index, name=name: name)
        assert unified.is_unified_memory_system(op) is want and unified.is_unified_memory_system() is (text == "1")
    # the loader finds copiers by names in its own module
    kinds: list[str] = []
    monkeypatch.setattr(loaders, "create_copier_constructor", lambda kind, device, **named: kinds.append(kind))
    for nogds in (True, False):
        fst.SafeTensorsFileLoader(None, "cpu", nogds=nogds)
    assert kinds == ["nogds", "gds"]


def test_names_and_messages_that_programs_use(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, attributes and error messages that programs rely on are those of the original."""
    from overwire.compat.fastsafetensors import auto_loader, common

    for text, words in (("xpu", "Unknown device type: xpu"), ("cuda:x", "Invalid index: x")):
        with pytest.raises(ValueError, match=words):
            Device.from_str(text)
    with pytest.raises(ValueError, match="Unknown framework name"):
        get_framework_op("jax")
    with pytest.raises(ValueError, match="max_concurrent_producers must be 1"):
        fst.ParallelLoader(None, files, max_concurrent_producers=2)
    with pytest.raises(ValueError, match="HeaderTooSmall"):
        fst.SafeTensorsMetadata.from_buffer(0, 7, "x", get_framework_op("pt"))
    op = get_framework_op("pt")
    assert op.get_storage_shape(DType.F4, [8, 16], [16, 1]) == ([64], [1]) and op.get_device_ptr_align() == 16
    for call in (
        lambda: op.get_native_shape(DType.F4, [3, 3]),
        lambda: op.get_native_slices(DType.F4, [2, 4], (slice(0, 2), slice(1, 4))),
    ):
        with pytest.raises(ValueError, match="F4"):
            call()
    frame = fst.TensorFrame.from_buffer({"dtype": DType.F32, "shape": [16, 8], "data_offsets": [0, 512]})
    assert (
        frame[()] == frame and frame[3].shape == [1, 8] and frame[4:4].shape == [] and frame[::-2].strides == [-16, 1]
    )
    assert (frame[2:9].sliced, frame[2:9].offsets, frame.data_offsets) == (True, [2, 0], [0, 512])
    meta = fst.SafeTensorsMetadata.from_file(files[0], op)
    assert (
        meta.size_bytes == os.path.getsize(files[0])
        and meta.header_length % 8 == 0
        and meta.src == files[0]
        and meta.aligned
    )
    assert common.resolve_cudart_lib_name is common.resolve_runtime_lib_name
    auto = fst.AutoLoader(fst.SingleGroup(), files)
    assert auto._pipeline is not None and auto._pipeline.loader is auto._loader
    auto.close()
    made: list[str] = []

    class Mine(fst.SafeTensorsFileLoader):
        def __init__(self, pg: Any, **named: Any) -> None:
            made.append(named["device"])
            super().__init__(pg, **named)

    monkeypatch.setattr(auto_loader, "SafeTensorsFileLoader", Mine)
    assert len(dict(fst.AutoLoader(None, files, "cpu").iterate_weights())) == len(meta.tensors) * 2 + 1 and made == ["cpu"]
    assert "overwire" in fst.__version__


def test_only_the_metadata_class_is_lenient(tmp_path: Path) -> None:
    """Like the original, the metadata class accepts trailing bytes and metadata that is not text. Loading applies the
    rules of the format."""
    head = json.dumps({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "__metadata__": {"x": 3}}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"1234")
    meta = fst.SafeTensorsMetadata.from_file(str(path), get_framework_op("pt"))
    assert meta.metadata == {"x": 3} and meta.tensors["a"].shape == [2]
    with pytest.raises(ow.FormatError):
        load([str(path)])
    assert ow.load_file(path, lenient=True)["a"].tolist() == [49, 50]


def test_capsules_of_addresses() -> None:
    """A capsule of a foreign address shares its memory, and releases the owner once, whether it is used or dropped."""
    values = (ctypes.c_float * 6)(*range(6))
    address = ctypes.addressof(values)
    held = sys.getrefcount(values)
    tensor = torch.utils.dlpack.from_dlpack(
        dlpack.from_cuda_buffer(address, [2, 3], [3, 1], DType.F32, Device(), values)
    )
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]] and tensor.data_ptr() == address
    dropped = dlpack.from_cuda_buffer(address, [6], [1], DType.F32, Device(), values)
    assert sys.getrefcount(values) == held + 2
    del dropped, tensor  # one capsule was used, one was not
    gc.collect()
    assert sys.getrefcount(values) == held
    capsule = dlpack.from_cuda_buffer(address, [24], [1], DType.F8_E4M3, Device())
    wrapped = get_framework_op("pt").from_dlpack(capsule, Device(), DType.F8_E4M3)
    assert wrapped.view(DType.F8_E4M3).get_raw().dtype == torch.float8_e4m3fn


def test_headers_from_memory_and_short_reads(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A header is read from memory, or by short reads. A file that ends early is refused."""
    op = get_framework_op("pt")
    whole = fst.SafeTensorsMetadata.from_file(files[0], op)
    data = Path(files[0]).read_bytes()
    memory = ctypes.create_string_buffer(data, len(data))
    asked: list[int] = []
    copy = cpp.read_buffer
    monkeypatch.setattr(cpp, "read_buffer", lambda address, size: (asked.append(size), copy(address, size))[1])
    again = fst.SafeTensorsMetadata.from_buffer(ctypes.addressof(memory), len(data), files[0], op)
    assert again.tensors == whole.tensors and sum(asked) == whole.header_length
    read = os.read
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, min(size, 7)))
    assert fst.SafeTensorsMetadata.from_file(files[0], op).tensors == whole.tensors
    monkeypatch.setattr(os, "read", lambda fd, size: read(fd, 0))
    with pytest.raises(ValueError, match="InvalidHeaderLength"):
        fst.SafeTensorsMetadata.from_file(files[0], op)


def test_both_names_have_the_same_classes(script: Any) -> None:
    done = script(
        "import sys, overwire.compat; overwire.compat.install('fastsafetensors'); import fastsafetensors\n"
        "print('torch' in sys.modules)\n"
        "assert fastsafetensors.dlpack.from_cuda_buffer and fastsafetensors.copier.base\n"
        "from fastsafetensors.frameworks._torch import TorchOp, TorchProcessGroup\n"
        "loader = fastsafetensors.SafeTensorsFileLoader(None)\n"
        "print(isinstance(loader.framework, TorchOp), isinstance(loader.pg, TorchProcessGroup))\n"
        "print(fastsafetensors is overwire.compat.fastsafetensors)\n"
        "import fastsafetensors.frameworks._torch as torch_, importlib, warnings; warnings.simplefilter('error')\n"
        "from overwire.compat.fastsafetensors.frameworks import _torch\n"
        "print(torch_ is _torch, _torch.__spec__.name == _torch.__name__ == 'overwire.compat.fastsafetensors.frameworks._torch')\n"
        "try: importlib.import_module('fastsafetensors.nothing')\n"
        "except ModuleNotFoundError as error: print(error.name)"
    )
    assert done.stdout.split() == ["False", *["True"] * 5, "fastsafetensors.nothing"]


def test_the_import_does_not_import_torch(script: Any) -> None:
    done = script(
        "import sys, overwire.compat.fastsafetensors as f; print('torch' in sys.modules, 'numpy' in sys.modules, f.SingleGroup().size())"
    )
    assert done.stdout.split() == ["False", "False", "1"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["nogds", "gds", "unified", "mine"])
def test_on_a_gpu(files: list[str], kind: str) -> None:
    """Every kind of copier, including a user's, loads the right tensors to a GPU and frees its buffers."""
    from overwire.compat.fastsafetensors.loader import BaseSafeTensorsFileLoader

    if kind == "mine":

        class Direct(copier.NoGdsFileCopier):
            def submit_io(self, use_buf_register: bool, max_copy_block_size: int) -> Any:
                length = self.metadata.size_bytes - self.metadata.header_length
                gbuf = self.framework.alloc_tensor_memory(length, self.device)
                reader = cpp.gds_file_reader(4, True, 0)
                handle = cpp.gds_file_handle(self.metadata.src, False, True)
                reader.wait_read(
                    reader.submit_read(handle, gbuf, self.metadata.header_length, length, 0, self.metadata.size_bytes)
                )
                return gbuf

            def wait_io(self, gbuf: Any, dtype: DType = DType.AUTO, noalign: bool = False) -> Any:
                return self.metadata.get_tensors(gbuf, self.device, self.metadata.header_length, dtype)

        copier.register_copier_constructor("mine")(
            lambda device, **kw: lambda meta, device, op: Direct(meta, device, None, op)
        )
    chosen = files[:1] if kind == "mine" else files
    want = {name: tensor for path in chosen for name, tensor in ow.load_file(path).items()}
    loader = BaseSafeTensorsFileLoader(None, torch.device("cuda:0"), kind)
    loader.add_filenames({0: chosen})
    buffer = loader.copy_files_to_device()
    got = {name: buffer.get_tensor(name) for name in want}
    buffer.close()
    assert all(tensor.is_cuda for tensor in got.values())
    assert plain({name: tensor.cpu() for name, tensor in got.items()}) == plain(want)
    assert cpp.get_cpp_metrics().bounce_buffer_bytes == 0 == buffer.framework.get_mem_used()
    assert cpp.get_device_pci_bus(0) and cpp.is_cuda_found()

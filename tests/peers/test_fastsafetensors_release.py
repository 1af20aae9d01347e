"""Tests that overwire.compat.fastsafetensors has the names, parameters, defaults and messages of the released
fastsafetensors 0.5.0, and that ranks can share F4 tensors."""

from __future__ import annotations

import ast
import ctypes
import enum
import importlib
import inspect
import mmap
import os
import pkgutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import warm
from fastsafetensors_plain import plain

torch = pytest.importorskip("torch")

import overwire as ow  # noqa: E402
import overwire.compat.fastsafetensors as fst  # noqa: E402
from overwire.compat.fastsafetensors import auto_loader, copier, cpp  # noqa: E402
from overwire.compat.fastsafetensors.copier import unified  # noqa: E402
from overwire.compat.fastsafetensors.frameworks import get_framework_op  # noqa: E402
from overwire.compat.fastsafetensors.st_types import Device  # noqa: E402

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def real() -> Any:
    package = pytest.importorskip("fastsafetensors")
    if not package.__version__.startswith("0.5."):
        pytest.skip(f"fastsafetensors {package.__version__} is installed; requirements/test.txt pins 0.5.0")
    return package


# Differences from the released package, with their reasons: modules, names, members, parameters.
_ENGINE = "the engine decides how files are read"
_WINDOWS = "only for Windows"
_WORDS = "only a log line or its own timing"
WITHOUT = {
    "_planner": "plans chunks, but parallel_loader plans device_memory_budget",
    "common.ODIRECT_HINT": _ENGINE, "common.get_fs_type": _ENGINE, "common.is_odirect_enabled": _ENGINE,
    "copier.dstorage": _WINDOWS,
    "copier.example_copier": "an example",
    "copier.fgds": _ENGINE, "copier.gds.init_gds": _ENGINE,
    "copier.nogds.ODIRECT_HINT": _ENGINE, "copier.nogds.load_library_func": _ENGINE,
    "cpp.close_fgds": _ENGINE, "cpp.cpp_metrics.bounce_buffer_bytes": "an attribute of the object here, not of its class",
    "cpp.dma_completion": _ENGINE, "cpp.dma_load_runs": _ENGINE, "cpp.dma_load_runs_progress": _ENGINE,
    "cpp.fgds_deregmem": _ENGINE, "cpp.fgds_device_buffer": _ENGINE, "cpp.fgds_file_handle": _ENGINE, "cpp.fgds_file_reader": _ENGINE,
    "cpp.fgds_regmem": _ENGINE, "cpp.gds_device_cache_size": _ENGINE, "cpp.init_fgds": _ENGINE, "cpp.is_fgds_found": _ENGINE,
    "cpp.is_hipfile_memory_budget_supported": _ENGINE, "cpp.load_fgds_library": _ENGINE,
    "dlpack.DLDevice": "capsules are made in C here", "dlpack.DLManagedTensor": "as DLDevice", "dlpack.DLTensor": "as DLDevice",
    "dlpack.c_DLDataType": "as DLDevice",
    "frameworks.FrameworkOpBase.broadcast_contiguous_run": "tensors are broadcast separately",
    "frameworks.FrameworkOpBase.iter_buffer_views": "each tensor has separate memory",
    "frameworks.K": "a type variable", "frameworks.T": "a type variable",
    "frameworks._torch.TorchOp.broadcast_contiguous_run": "tensors are broadcast separately",
    "frameworks._torch.TorchOp.iter_buffer_views": "each tensor has separate memory",
    "loader.gl_set_numa": _ENGINE, "loader.loaded_library": _ENGINE, "threefs_loader.loaded_library": _ENGINE,
    "parallel_loader.FileBatch": _WORDS, "parallel_loader.TimingContext": _WORDS, "parallel_loader.enable_tqdm": _WORDS,
    "parallel_loader.parse_time": _WORDS,
    "saver.DTYPE_SIZES": "is in st_types",
    "saver.ParallelSaver": "also has compress=",
}  # fmt: skip


def parameters(found: Any) -> list[Any] | None:
    """Returns the names, kinds and defaults of parameters, or None for an object without a signature."""
    try:
        return [
            (p.name, p.kind, p.default.name if isinstance(p.default, enum.Enum) else p.default)
            for p in inspect.signature(found).parameters.values()
        ]
    except (TypeError, ValueError):
        return None


def test_every_name_and_parameter(real: Any) -> None:
    """In every module, public classes, their members, and functions have the same names and parameters."""
    other: set[str] = set()
    compared = 0

    def compare(name: str, theirs: Any, ours: Any) -> None:
        nonlocal compared
        want = parameters(theirs)
        compared += want is not None
        if want is not None and want != parameters(ours):
            other.add(name)

    for at in ["", *(m.name.removeprefix("fastsafetensors") for m in pkgutil.walk_packages(real.__path__, "fastsafetensors."))]:
        try:
            theirs = importlib.import_module("fastsafetensors" + at)
        except ImportError:
            continue  # paddle is not installed
        try:
            ours = importlib.import_module("overwire.compat.fastsafetensors" + at)
        except ImportError:
            other.add(at[1:])
            continue
        for name, value in vars(theirs).items():
            own = getattr(value, "__module__", None) in (None, theirs.__name__) or at == ".cpp"
            if name.startswith("_") or inspect.ismodule(value) or not own or name == "TYPE_CHECKING":
                continue
            path = f"{at}.{name}"[1:]
            if not hasattr(ours, name):
                other.add(path)
                continue
            mine = getattr(ours, name)
            if inspect.isclass(value):
                compare(path, value, mine)
                for member, inner in vars(value).items():
                    if member.startswith("_"):
                        continue
                    if not hasattr(mine, member):
                        other.add(f"{path}.{member}")
                    elif inspect.isroutine(inner):
                        compare(f"{path}.{member}", getattr(value, member), getattr(mine, member))
            elif inspect.isroutine(value):
                compare(path, value, mine)
    assert other == set(WITHOUT), (sorted(other - set(WITHOUT)), sorted(set(WITHOUT) - other))
    assert compared > 150


def test_only_the_adapter_imports_torch() -> None:
    """Of the package's modules, only frameworks._torch imports torch when it is imported."""
    package = Path(fst.__file__).parent
    for path in package.rglob("*.py"):
        waiting: list[Any] = list(ast.parse(path.read_text()).body)
        while waiting:
            node = waiting.pop()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            test = getattr(node, "test", None)
            if isinstance(node, ast.If) and isinstance(test, ast.Name) and test.id == "TYPE_CHECKING":
                continue
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert path.name == "_torch.py" or not [name for name in names if name.split(".")[0] == "torch"], path
            waiting += ast.iter_child_nodes(node)
    adapter = importlib.import_module("overwire.compat.fastsafetensors.frameworks._torch")
    assert adapter.get_framework_op() is get_framework_op("pt") and adapter.fst_dtype(torch.int8).name == "I8"


def test_the_framework_tells_whether_memory_is_unified(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that the given framework has for GPU 0 decides whether memory is unified. A variable overrides this. The
    loader passes its framework."""
    monkeypatch.delenv("FASTSAFETENSORS_UNIFIED_MEM", raising=False)
    gpu = mock.Mock(spec_set=["get_device_name"])
    for name, want in (("NVIDIA GB10", True), ("NVIDIA H200", False), ("", False)):
        gpu.get_device_name.return_value = name
        assert unified.is_unified_memory_system(gpu) is want
        gpu.get_device_name.assert_called_with(0)
    assert unified.is_unified_memory_system() is False
    for text in ("1", "0", "", "yes"):
        monkeypatch.setenv("FASTSAFETENSORS_UNIFIED_MEM", text)
        assert unified.is_unified_memory_system() is unified.is_unified_memory_system(gpu) is (text == "1")
    assert get_framework_op("pt").get_device_name(99) == ""

    from overwire.compat.fastsafetensors import loader as loaders

    asked: list[Any] = []
    monkeypatch.setattr(loaders, "is_unified_memory_system", lambda framework: asked.append(framework) or True)
    kinds: list[str] = []
    monkeypatch.setattr(loaders, "create_copier_constructor", lambda kind, device, **named: kinds.append(kind))
    for device, nogds in (("cuda:0", True), ("cuda:0", False), ("cpu", True)):
        fst.SafeTensorsFileLoader(None, device, nogds=nogds)
    assert kinds == ["unified", "gds", "nogds"] and asked == [get_framework_op("pt")]


def test_auto_loader_passes_nogds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """AutoLoader passes nogds with and without a configured copier, and refuses unknown loaders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTSAFETENSORS_CONFIG", raising=False)
    cases: list[tuple[dict[str, Any], bool, bool]] = [({}, False, False), ({"bbuf_size_kb": 8, "use_fgds": True}, False, True)]
    cases += [({"copier_type": kind}, kind == "nogds", kind == "fgds") for kind in ("gds", "nogds", "fgds")]
    for section, nogds, fgds in cases:
        settings = fst.LoaderConfig(loader="base")
        settings._extensions["base"] = section
        with (
            mock.patch.object(auto_loader, "load_config", return_value=settings),
            mock.patch.object(auto_loader, "PipelineParallel") as pipeline,
            mock.patch.object(auto_loader, "SafeTensorsFileLoader") as kind,
        ):
            kind.process_extension_config = fst.SafeTensorsFileLoader.process_extension_config
            auto = fst.AutoLoader(None, ["x"], "cuda:0")
            args, named = kind.call_args
            assert args == (None,) and (named["nogds"], named["use_fgds"], named["device"]) == (nogds, fgds, "cuda:0")
            assert "copier_type" not in named and named.get("bbuf_size_kb") == section.get("bbuf_size_kb")
            auto.close()
            pipeline.return_value.close.assert_called_once()
            kind.return_value.close.assert_not_called()
    monkeypatch.setattr(auto_loader, "load_config", lambda: fst.LoaderConfig(loader="other"))
    with pytest.raises(ValueError, match="^Unknown loader type: 'other'"):
        fst.AutoLoader(None, ["x"])


def test_pipelines_of_one(real: Any) -> None:
    """Without a group, a pipeline has one rank, in both packages."""
    for package in (real, fst):
        kind = importlib.import_module(f"{package.__name__}.parallel_loader").PipelineParallel
        for group in (None, package.SingleGroup()):
            one = kind(group, mock.MagicMock(), ["a", "b"])
            assert one.need_clone is True and one.log_prefix == "PG0" and one.weight_files_batches == [["a"], ["b"]]
        with pytest.raises(ValueError):
            kind(None, mock.MagicMock(), ["a"], broadcast_run_bytes=-1)


@pytest.mark.imports_torch
def test_pairs_over_two_ranks(real: Any, tmp_path: Path) -> None:
    """F4 tensors on two ranks behave as in the real package: shapes as in the file, blocks of elements, whole and
    joined tensors. The cases are in fastsafetensors_pairs.py."""

    def pairs(*shape: int) -> Any:
        return torch.randint(0, 255, shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)

    e8m0 = torch.randint(1, 255, (6, 4), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    ow.save_file({"f4_a": pairs(8, 16)}, tmp_path / "a.safetensors", compress=False)
    ow.save_file({"f4_b": pairs(8, 16), "e8m0": e8m0}, tmp_path / "b.safetensors", compress=False)
    ow.save_file({"odd": pairs(4, 5)}, tmp_path / "odd.safetensors", compress=False)
    paths = [str(Path(real.__file__).parent.parent), str(Path(ow.__file__).parent.parent)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def rank(number: int) -> Any:
        return warm.fresh([HERE / "fastsafetensors_pairs.py", tmp_path, str(number), "2"], env=env, timeout=120)

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(rank, range(2)):
            assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr


def test_a_3fs_reader_on_a_gpu_fills_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that writes from the CPU gets memory that the CPU can write to, even if the tensors go to a GPU.
    Inaccessible pages simulate GPU memory here."""
    want = {"a": torch.arange(300_000), "b": torch.randn(70_000)}
    path = str(tmp_path / "x.safetensors")
    ow.save_file(want, path, compress=False)
    length = sum(t.nbytes for t in want.values())
    page = mmap.PAGESIZE
    pages = mmap.mmap(-1, -(-length // page) * page, prot=0)  # any access by the CPU is a SIGSEGV
    shadow = (ctypes.c_ubyte * length)()
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = libc.mmap(None, len(pages), 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    pages.close()
    op, calls = get_framework_op("pt"), []
    pieces: list[tuple[int, int]] = []

    class Reader:
        short = 0

        def read_chunked(self, path: str, dev_ptr: int, file_offset: int, total_length: int, chunk_size: int) -> int:
            assert not address <= dev_ptr < address + length
            pieces.append((file_offset, total_length))
            with open(path, "rb") as file:
                file.seek(file_offset)
                data = file.read(total_length - self.short)
            ctypes.memmove(dev_ptr, data, len(data))
            return len(data)

    def upload(to: int, at: int, size: int) -> int:
        ctypes.memmove(ctypes.addressof(shadow) + to - address, at, size)
        calls.append("copy")
        return 0

    monkeypatch.setattr(op, "alloc_tensor_memory", lambda size, device: op.lease(cpp.gds_device_buffer(address, size, True)))
    monkeypatch.setattr(op, "pinned", lambda size: op.wrap_tensor(torch.empty(size, dtype=torch.uint8)))
    monkeypatch.setattr(op, "synchronize_current_stream", lambda device: calls.append("wait"))
    monkeypatch.setattr(cpp, "memcpy_h2d_async", upload)
    monkeypatch.setattr(copier.threefs, "_PINNED_BYTES", 1 << 20)
    meta = fst.SafeTensorsMetadata.from_file(path, op)
    one = copier.ThreeFSFileCopier(meta, Device.from_str("cuda:0"), Reader(), op)
    used = op.get_mem_used()
    gbuf = one.submit_io(False, 16 << 30)
    assert len(pieces) == -(-length // (1 << 20)) and sum(size for _, size in pieces) == length
    assert calls == ["copy", "wait"] * len(pieces)  # the staging buffer is reused once the GPU has the data
    there = cpp.gds_device_buffer(ctypes.addressof(shadow), length, False)
    got = {name: tensor.get_raw() for name, tensor in meta.get_tensors(there, Device(), meta.header_length).items()}
    assert plain(got) == plain(want)
    op.free_tensor_memory(gbuf, Device.from_str("cuda:0"))
    monkeypatch.setattr(Reader, "short", 1)
    with pytest.raises(RuntimeError, match="truncated"):
        one.submit_io(False, 16 << 30)
    assert op.get_mem_used() == used

"""Compares overwire.compat.nvcomp with nvCOMP's Python API: names, lifetimes and errors, without a GPU."""

from __future__ import annotations

import ctypes
import gc
import json
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import overwire as ow
import overwire.compat
import overwire.compat.nvcomp as nvcomp
import pytest
import torch
from overwire.compat.nvcomp import original
from overwire.compat.nvcomp.external_memory import ExternalMemory
from test_codecs import OTHERS, SIZES, content

NAMES = ("LZ4", "Snappy", "Zstd", "Deflate", "Gzip", "GDeflate", "Cascaded", "X16")
KINDS = tuple(nvcomp.BitstreamKind)


# Names.


def test_every_name_of_the_api_pages_exists() -> None:
    """Every name on nvCOMP's API pages of 5.0, 5.3 and 6.0 exists."""
    for name in (
        "Array ArrayBufferKind BatchArray BitcompMode BitshuffleMode BitstreamKind CascadedCoarseGrainedEncoding "
        "CascadedFineGrainedEncoding CascadedMode CascadedTerminalCodec ChecksumPolicy Codec CompressConfig CudaStream "
        "DecompressBackend DecompressConfig ExecutionPolicy as_array as_arrays from_dlpack set_device_allocator "
        "set_host_allocator set_pinned_allocator ASYMMETRIC BITCOMP_LOSSLESS BITCOMP_LOSSY_FP_TO_SIGNED "
        "BITCOMP_LOSSY_FP_TO_UNSIGNED CASCADED_BITPACK COMPUTE_AND_NO_VERIFY COMPUTE_AND_VERIFY "
        "COMPUTE_AND_VERIFY_IF_PRESENT DELTA FOR NONE NO_COMPUTE_AND_VERIFY_IF_PRESENT NO_COMPUTE_NO_VERIFY "
        "NVCOMP_BITSHUFFLE_LSB_FIRST NVCOMP_BITSHUFFLE_MSB_FIRST NVCOMP_BITSHUFFLE_NONE NVCOMP_DECOMPRESS_BACKEND_CUDA "
        "NVCOMP_DECOMPRESS_BACKEND_DEFAULT NVCOMP_DECOMPRESS_BACKEND_HARDWARE RLE STRIDED_DEVICE STRIDED_HOST SYMMETRIC "
        "UNSPECIFIED"
    ).split():
        assert hasattr(nvcomp, name) and name in nvcomp.__all__, name
    assert isinstance(nvcomp.__version__, str) and isinstance(nvcomp.__cuda_version__, int)
    for kind, names in {
        nvcomp.Array: "__array_interface__ __cuda_array_interface__ __dlpack__ __dlpack_device__ buffer_kind buffer_size "
        "capacity cpu cuda dtype item_size ndim precision shape size strides to_dlpack",
        nvcomp.BatchArray: "__getitem__ __len__ __setitem__ buffer_sizes cpu cuda",
        nvcomp.Codec: "__enter__ __exit__ compression_config decode decompression_config encode get_max_comp_buffer_size "
        "get_required_compression_alignment get_required_decompression_alignment get_uncomp_buffer_size",
        nvcomp.CudaStream: "borrow device is_special make_new ptr",
    }.items():
        for name in names.split():
            assert hasattr(kind, name), (kind, name)


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        ("ArrayBufferKind", {"STRIDED_DEVICE": 1, "STRIDED_HOST": 2}),
        ("BitstreamKind", {"NVCOMP_NATIVE": 0, "RAW": 1, "WITH_UNCOMPRESSED_SIZE": 2}),
        ("ChecksumPolicy", dict(zip(
            ("NO_COMPUTE_NO_VERIFY", "COMPUTE_AND_NO_VERIFY", "NO_COMPUTE_AND_VERIFY_IF_PRESENT", "COMPUTE_AND_VERIFY_IF_PRESENT",
             "COMPUTE_AND_VERIFY"), range(5), strict=True))),
        ("ExecutionPolicy", {"CONCURRENCY": 0, "LATENCY": 1}),
        ("BitshuffleMode", {"NVCOMP_BITSHUFFLE_NONE": 0, "NVCOMP_BITSHUFFLE_MSB_FIRST": 1, "NVCOMP_BITSHUFFLE_LSB_FIRST": 2}),
    ],
)
def test_enums(kind: str, members: dict[str, int]) -> None:
    enum = getattr(nvcomp, kind)
    assert {name: int(m) for name, m in enum.__members__.items()} == members
    for name, value in members.items():
        member = enum(value)
        assert (member.name, member.value, hash(member)) == (name, value, value) and range(10, 15)[member] == 10 + value
        assert member == getattr(enum, name) and member != value
        assert repr(member) == f"<{kind}.{name}: {value}>" and str(member) == f"{kind}.{name}"
        assert pickle.loads(pickle.dumps(member)) is member


def test_unmodified_programs_import_it(tmp_path: Any) -> None:
    """Programs can import the module through the compat path or after install, even with other nvidia wheels."""
    (tmp_path / "nvidia" / "other").mkdir(parents=True)
    (tmp_path / "nvidia" / "other" / "__init__.py").write_text("here = True\n")
    folder, home = overwire.compat.path("nvcomp"), Path(overwire.__file__).parents[1]
    program = (
        "import nvidia.nvcomp as nvcomp, nvidia.other\n"
        "from nvidia import nvcomp as again\n"
        "from nvidia.nvcomp.external_memory import ExternalMemory\n"
        "assert again is nvcomp and nvidia.other.here and nvcomp.__name__ == 'overwire.compat.nvcomp'\n"
        "print(bytes(nvcomp.Codec().decode(nvcomp.Codec(algorithm='LZ4').encode(b'abc'))))\n"
    )
    for first, before in ((folder, ""), (".", "import overwire.compat; overwire.compat.install('nvcomp')\n")):
        env = {"PYTHONPATH": f"{first}:{tmp_path}:{home}", "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-c", before + program]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "b'abc'\n"), done.stderr


# Arrays.


def capsule(array: numpy.ndarray[Any, Any]) -> Any:
    return torch.utils.dlpack.to_dlpack(torch.from_numpy(array))


class _Ai:
    """An object that has only the array interface."""

    def __init__(self, array: numpy.ndarray[Any, Any]) -> None:
        self.keep, self.__array_interface__ = array, array.__array_interface__


@pytest.mark.parametrize("how", [capsule, torch.from_numpy, lambda a: a, _Ai, memoryview])
def test_arrays_share_memory_and_keep_it_alive(how: Callable[[Any], Any]) -> None:
    """Arrays made through every protocol share the source's memory, have its shape and type, and keep it alive."""

    class Watched(numpy.ndarray[Any, Any]):
        pass

    source = numpy.arange(12, dtype=numpy.int32).reshape(3, 4).view(Watched)
    address = source.ctypes.data
    array = nvcomp.as_array(how(source))
    gone = weakref.ref(source)
    del source
    gc.collect()
    assert array.__array_interface__["data"] == (address, False)
    assert (array.shape, array.ndim, array.size, array.item_size, array.buffer_size) == ((3, 4), 2, 12, 4, 48)
    assert array.dtype == numpy.int32 and array.strides == (16, 4) and array.precision == 0 and array.capacity == 48
    assert array.buffer_kind is nvcomp.ArrayBufferKind.STRIDED_HOST and array.cpu() is array
    numpy.testing.assert_array_equal(numpy.asarray(array), numpy.arange(12).reshape(3, 4))
    out = torch.from_dlpack(array)
    assert out.data_ptr() == address and out.shape == (3, 4)
    del array
    gc.collect()
    assert gone() is not None and out.sum() == 66
    del out
    gc.collect()
    assert gone() is None


def test_array_interfaces_and_the_buffer_protocol(tmp_path: Any) -> None:
    array = nvcomp.as_array(b"some bytes")
    assert array.__array_interface__ == {
        "shape": (10,), "typestr": "|u1", "data": (array.__array_interface__["data"][0], False), "strides": None, "version": 3,
    }  # fmt: skip
    assert array.__cuda_array_interface__["stream"] == 1 and array.__cuda_array_interface__["version"] == 3
    assert bytes(array) == b"some bytes" and memoryview(array).readonly and len(array) == 10
    with open(tmp_path / "f", "wb") as f:
        f.write(array)
    assert (tmp_path / "f").read_bytes() == b"some bytes"
    with pytest.raises(BufferError):
        array.__dlpack__()  # read-only memory, which DLPack cannot express
    writable = nvcomp.as_array(bytearray(b"abc"))
    memoryview(writable).cast("B")[0] = ord("x")
    assert bytes(writable) == b"xbc" and writable.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError):
        writable.__dlpack__(copy=True)
    for stream in (None, 0, 1, 2, -1):
        assert torch.from_dlpack(writable).tolist() == list(b"xbc")
        assert nvcomp.from_dlpack(writable.to_dlpack(stream)).size == 3
    taken = writable.to_dlpack()
    nvcomp.from_dlpack(taken)
    with pytest.raises(ValueError, match="has not been consumed"):
        nvcomp.from_dlpack(taken)
    for wrong in (3, None, object(), "text"):
        with pytest.raises(TypeError):
            nvcomp.as_array(wrong)
    with pytest.raises(TypeError):
        nvcomp.from_dlpack(b"no tensor")
    assert writable.cuda() is None and nvcomp.BatchArray([writable]).cuda() is None


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bool, torch.complex64]
)
def test_types_that_numpy_lacks(dtype: torch.dtype) -> None:
    """bf16 and fp8 pass through DLPack in both directions and through a Codec bit for bit."""
    source = torch.arange(64).reshape(8, 8).to(dtype)
    array = nvcomp.as_array(source)
    assert array.dtype.itemsize == source.element_size() == array.item_size
    assert torch.from_dlpack(array).dtype == dtype
    back = nvcomp.Codec().decode(nvcomp.Codec(algorithm="X16").encode(array), data_type=dtype)
    assert back.shape == (64,)
    assert torch.equal(torch.from_dlpack(back).view(torch.uint8), source.reshape(-1).view(torch.uint8))
    if dtype is torch.bfloat16:
        assert array.dtype == ml_dtypes.bfloat16 == nvcomp.as_array(numpy.zeros(2, ml_dtypes.bfloat16)).dtype


def test_strides_are_kept_and_not_encoded() -> None:
    array = nvcomp.as_array(torch.arange(12).reshape(3, 4).t())
    assert array.shape == (4, 3) and array.strides == (8, 32)
    assert numpy.asarray(array).tolist() == torch.from_dlpack(array).tolist()
    assert numpy.asarray(array).tolist() == numpy.arange(12).reshape(3, 4).T.tolist()
    with pytest.raises(ValueError, match="not contiguous"):
        nvcomp.Codec(algorithm="LZ4").encode(array)
    packed = numpy.zeros(4, dtype=[("a", "<i4"), ("b", "i1")])
    packed["a"] = range(4)
    array = nvcomp.as_array(packed["a"])
    assert array.strides == (5,) and numpy.asarray(array).tolist() == [0, 1, 2, 3]
    with pytest.raises(BufferError, match="not multiples of the element size"):
        torch.from_dlpack(array)


def test_batches_of_arrays() -> None:
    parts = nvcomp.as_arrays([b"ab", b"", bytearray(b"cde")])
    assert isinstance(parts, list) and [bytes(a) for a in parts] == [b"ab", b"", b"cde"]
    assert parts.buffer_sizes == [2, 0, 3] and parts.cpu() is parts and nvcomp.as_arrays([]) == []
    whole = bytearray(range(32))
    cut = nvcomp.as_arrays(whole, [0, 8, 30], [4, 0, 2])
    assert [bytes(a) for a in cut] == [bytes(range(4)), b"", bytes([30, 31])]
    assert nvcomp.as_arrays(whole, offsets=[1], sizes=[2])[0].shape == (2,)
    for offsets, sizes in (([31], [2]), ([-1], [1]), ([0, 1], [1])):
        with pytest.raises(ValueError, match="as_arrays"):
            nvcomp.as_arrays(whole, offsets, sizes)
    parts[0] = parts[2]
    assert bytes(parts[0]) == b"cde"


# Codecs.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_round_trips(name: str, kind: nvcomp.BitstreamKind) -> None:
    """Arrays, batches and empty data round-trip, with names in any case and with the header's algorithm."""
    codec = nvcomp.Codec(algorithm=name.swapcase(), bitstream_kind=kind)
    deduce = nvcomp.Codec() if kind is nvcomp.BitstreamKind.NVCOMP_NATIVE else codec
    for size in SIZES[:-1]:
        plain = content(size)
        made = codec.encode(plain)
        assert made.dtype == numpy.int8 and made.shape == (made.buffer_size,)
        back = deduce.decode(made)
        assert bytes(back) == plain and back.dtype == numpy.int8 and back.shape == (size,)
        assert deduce.get_uncomp_buffer_size(made) == size
        assert codec.get_max_comp_buffer_size(plain) >= made.buffer_size
    plains = [b"", b"x", content(100_000)]
    batch = codec.encode(nvcomp.as_arrays(plains))
    assert isinstance(batch, nvcomp.BatchArray)
    assert [bytes(a) for a in deduce.decode(batch)] == plains
    assert codec.encode([]) == deduce.decode([]) == []


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_streams_of_reference_libraries(name: str) -> None:
    """RAW and WITH_UNCOMPRESSED_SIZE streams work with liblz4, snap, libzstd and zlib. NATIVE contains RAW streams."""
    encode, decode = OTHERS[name]
    for size in SIZES:
        plain = content(size)
        raw = bytes(nvcomp.Codec(algorithm=name, bitstream_kind=nvcomp.BitstreamKind.RAW).encode(plain))
        assert decode(raw, size) == plain
        prefix = size.to_bytes(4 if name == "LZ4" else 8, "little")
        sized = nvcomp.Codec(algorithm=name, bitstream_kind=nvcomp.BitstreamKind.WITH_UNCOMPRESSED_SIZE)
        assert bytes(sized.encode(plain)) == prefix + raw
        assert bytes(sized.decode(prefix + encode(plain))) == plain
        native = bytes(nvcomp.Codec(algorithm=name, uncomp_chunk_size=1 << 24).encode(plain))
        if size:
            at = int.from_bytes(native[56:60], "little")
            assert decode(native[at : at + int.from_bytes(native[at - 8 : at], "little")], size) == plain


def test_data_types() -> None:
    plain = numpy.arange(16, dtype=numpy.float32)
    made = nvcomp.Codec(algorithm="zstd").encode(plain)
    for text in ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4"):
        back = nvcomp.Codec().decode(made, text)
        assert back.dtype == numpy.dtype(text) and bytes(back) == plain.tobytes(), text
    for same in ("float32", numpy.float32, numpy.dtype("<f4"), torch.float32):
        assert nvcomp.Codec().decode(made, data_type=same).dtype == numpy.float32
    assert nvcomp.Codec().decode(made, "bfloat16").dtype == ml_dtypes.bfloat16
    assert nvcomp.Codec().decode(made, "|f1").dtype == ml_dtypes.float8_e4m3fn
    assert nvcomp.Codec(data_type="<i2").decode(made).dtype == numpy.int16
    for wrong in ("f4", "f16", "|u2", "<u3", ">i4", "nope", 3):
        with pytest.raises(ValueError, match="Unknown output data type"):
            nvcomp.Codec().decode(made, wrong)
    with pytest.raises(ValueError, match="not a whole number"):
        nvcomp.Codec().decode(nvcomp.Codec(algorithm="lz4").encode(b"abc"), "<i2")


def test_arguments_that_are_refused() -> None:
    for kwargs, kind, text in (
        ({"foo": 1}, ValueError, 'Unsupported argument: "foo".'),
        ({"algorithm": "nope"}, ValueError, 'Unknown algorithm: "nope".'),
        ({"algorithm": 3}, RuntimeError, "Unable to cast"),
        ({"uncomp_chunk_size": "a"}, RuntimeError, "Unable to cast"),
        ({"algorithm": "LZ4", "uncomp_chunk_size": 0}, ValueError, "uncomp_chunk_size"),
        ({"algorithm": "LZ4", "uncomp_chunk_size": 1 << 30}, ValueError, "chunk size"),
        ({"algorithm": "Deflate", "algorithm_type": 6}, ValueError, "algorithm_type"),
        ({"algorithm": "LZ4", "data_type": "f4"}, ValueError, "Unknown output data type"),
        ({"algorithm": "LZ4", "bitshuffle_mode": nvcomp.NVCOMP_BITSHUFFLE_MSB_FIRST}, ow.NotSupportedError, "shuffling"),
        ({"decompress_backend": nvcomp.NVCOMP_DECOMPRESS_BACKEND_HARDWARE}, ow.NotSupportedError, "engine"),
    ):
        with pytest.raises(kind, match=text.replace(".", r"\.")):
            nvcomp.Codec(**kwargs)
    with pytest.raises(TypeError):
        nvcomp.Codec("LZ4")  # type: ignore[call-arg]
    nvcomp.Codec(algorithm="LZ4", num_rles=2)  # an option of another algorithm
    with pytest.raises(ValueError, match="can only decode"):
        nvcomp.Codec().encode(b"abc")
    with pytest.raises(ValueError, match="the stream is LZ4, expected Zstd"):
        nvcomp.Codec(algorithm="Zstd").decode(nvcomp.Codec(algorithm="LZ4").encode(b"abc"))
    assert nvcomp.Codec(algorithm="LZ4").get_required_compression_alignment() == 8
    assert nvcomp.Codec().get_required_decompression_alignment() == 16


def test_out() -> None:
    """A result with out= is in the caller's memory. If that is too small, only an overwire Array is resized."""
    plain = content(5000)
    codec = nvcomp.Codec(algorithm="lz4")
    made = codec.encode(plain)
    room = numpy.zeros(6000, numpy.uint8)
    back = codec.decode(made, out=room)
    assert back.__array_interface__["data"][0] == room.ctypes.data and back.capacity == 6000 and back.shape == (5000,)
    assert room[:5000].tobytes() == plain == bytes(back)
    exact = nvcomp.as_array(bytearray(5000))
    assert bytes(codec.decode(made, out=exact)) == plain == bytes(exact)
    for small in (bytearray(4999), nvcomp.as_array(bytearray(4999))):
        with pytest.raises(ValueError, match="4999 bytes, 5000 are needed"):
            codec.decode(made, out=small)
    with pytest.raises(ValueError, match="read-only"):
        codec.decode(made, out=bytes(5000))
    ours = codec.decode(codec.encode(content(9000)))
    address = ours.__array_interface__["data"][0]
    assert codec.decode(made, out=ours) is ours and bytes(ours) == plain
    assert ours.__array_interface__["data"][0] == address and ours.capacity == 9000
    grown = codec.decode(codec.encode(b"few"))
    assert codec.decode(made, out=grown) is grown and bytes(grown) == plain
    target = bytearray(codec.get_max_comp_buffer_size(plain))
    assert bytes(codec.decode(codec.encode(plain, out=target))) == plain
    outputs = [bytearray(5000), bytearray(5001)]
    assert [a.shape for a in codec.decode([made, made], out=outputs)] == [(5000,), (5000,)] and outputs[0] == plain
    shared = bytearray(bytes(made) + bytes(5000))
    with pytest.raises(ValueError, match="overlaps"):
        codec.decode(nvcomp.as_arrays(shared, [0], [made.buffer_size])[0], out=shared)
    with pytest.raises(ValueError, match="out"):
        codec.decode([made], out=[room, room])


def test_configs() -> None:
    codec, other = nvcomp.Codec(algorithm="zstd"), nvcomp.Codec(algorithm="zstd")
    config = codec.compression_config(1000)
    made = codec.encode(content(1000), compression_config=config)
    back = codec.decompression_config(config)
    assert bytes(codec.decode(made, decompression_config=back)) == content(1000)
    assert bytes(codec.decode(made, decompression_config=codec.decompression_config(made))) == content(1000)
    both = codec.compression_config([3, 4])
    batch = codec.encode([b"abc", b"defg"], compression_config=both)
    assert [bytes(a) for a in codec.decode(batch, decompression_config=codec.decompression_config(both))] == [b"abc", b"defg"]
    wrong = codec.encode(content(1001))
    for bad in (
        lambda: codec.encode(content(999), compression_config=config),
        lambda: codec.decode(wrong, decompression_config=back),
        lambda: codec.decode([made, made], decompression_config=back),
        lambda: other.decode(made, decompression_config=back),
        lambda: other.decompression_config(config),
        lambda: codec.compression_config(0),
        lambda: codec.compression_config([]),
        lambda: codec.compression_config([3, 0]),
    ):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(TypeError, match="No constructor defined"):
        nvcomp.CompressConfig()


def test_checksums() -> None:
    """A wrong checksum raises an error once, when its Array is first accessed, or during strict decoding."""
    codec = nvcomp.Codec(algorithm="snappy", checksum_policy=nvcomp.ChecksumPolicy.COMPUTE_AND_VERIFY)
    plain = content(100_000)
    good = codec.encode(plain)
    bad = bytearray(bytes(good))
    bad[-5000] ^= 1
    first, second, third = codec.decode([good, bad, good])
    assert bytes(first) == bytes(third) == plain
    assert second.shape == (100_000,) and second.buffer_size == 100_000
    with pytest.raises(RuntimeError, match=r"^Checksum doesn't match\.$"):
        second.cpu()
    assert second.cpu() is second and len(bytes(second)) == 100_000 and bytes(second) != plain
    for look in (bytes, lambda a: a.to_dlpack(), lambda a: a.__array_interface__):
        with pytest.raises((RuntimeError, BufferError), match="Checksum"):
            look(codec.decode(bad))
    strict = nvcomp.Codec(checksum_policy=nvcomp.ChecksumPolicy.COMPUTE_AND_VERIFY_IF_PRESENT, strict=True)
    with pytest.raises(ow.CorruptError, match="Checksum doesn't match"):
        strict.decode(bad)
    plainly = nvcomp.Codec(algorithm="snappy").encode(plain)
    assert bytes(strict.decode(plainly)) == plain
    with pytest.raises(RuntimeError, match="no checksums"):
        codec.decode(plainly)
    for policy in (nvcomp.ChecksumPolicy.NO_COMPUTE_NO_VERIFY, nvcomp.ChecksumPolicy.COMPUTE_AND_NO_VERIFY):
        assert bytes(nvcomp.Codec(checksum_policy=policy).decode(good)) == plain
    with pytest.raises(ValueError, match="NATIVE has checksums"):
        nvcomp.Codec(bitstream_kind=nvcomp.BitstreamKind.RAW, checksum_policy=nvcomp.ChecksumPolicy.COMPUTE_AND_VERIFY)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_streams_raise(name: str, seed: int) -> None:
    """A truncated or changed stream raises an error or gives as many bytes as it declares. It never crashes."""
    import random

    r = random.Random(seed)
    for kind in KINDS:
        codec = nvcomp.Codec(algorithm=name, bitstream_kind=kind, uncomp_chunk_size=4096)
        made = bytes(codec.encode(content(20_000)))
        cuts = [made[: r.randrange(len(made) - 8)] for _ in range(20)]
        flips = []
        for _ in range(60):
            bad = bytearray(made)
            bad[r.randrange(len(bad))] ^= 1 << r.randrange(8)
            flips.append(bad)
        for bad in cuts + flips:
            try:
                bytes(codec.decode(bad))
            except (ow.CorruptError, ow.FormatError, ow.NotSupportedError, ow.ArgumentError):
                pass


def test_algorithms_that_only_nvcomp_has() -> None:
    """For an algorithm that only nvCOMP has, the error names nvCOMP's wheel. X16 streams are not marked as ANS."""
    listed = nvcomp.backends()
    assert set(listed) == {*NAMES, *original.ALGORITHMS} and all(listed[n].startswith("cpu") for n in NAMES)
    if original._newest_wheel() is not None:
        pytest.skip("nvCOMP is installed and used")
    for name in original.ALGORITHMS:
        assert "nvidia-nvcomp-cu13" in listed[name]
        with pytest.raises(ow.NotSupportedError, match=f"{name}.*nvidia-nvcomp-cu13"):
            nvcomp.Codec(algorithm=name.lower())
    assert bytes(nvcomp.Codec(algorithm="X16").encode(b"abc"))[6] == ord("X")


# Streams and allocators.


def test_streams_without_a_gpu() -> None:
    streams = nvcomp.CudaStream
    for make in (lambda: streams.borrow(0), lambda: streams.make_new(), lambda: streams.borrow(7, 3)):
        with pytest.raises(RuntimeError, match="no CUDA device"):
            make()
    with pytest.raises(TypeError, match="No constructor defined"):
        nvcomp.CudaStream()


class Pool:
    """An allocator that uses ctypes and records the sizes of the memory in use."""

    def __init__(self) -> None:
        self.out: list[int] = []
        self.streams: list[Any] = []

    def __call__(self, nbytes: int, stream: Any) -> Any:
        pool = self

        class Memory:
            def __init__(self) -> None:
                self.block = ctypes.create_string_buffer(nbytes)
                self.ptr = ctypes.addressof(self.block)
                pool.out.append(nbytes)

            def __del__(self) -> None:
                pool.out.remove(nbytes)

        self.streams.append(stream)
        return ExternalMemory(Memory(), stream)


@pytest.fixture
def default_allocators() -> Any:
    yield
    for reset in (nvcomp.set_device_allocator, nvcomp.set_pinned_allocator, nvcomp.set_host_allocator):
        reset()


@pytest.mark.usefixtures("default_allocators")
def test_host_allocator() -> None:
    """Results are in the allocator's memory until their last holder is gone. Old buffers stay valid after a reset."""
    pool, codec = Pool(), nvcomp.Codec(algorithm="lz4")
    nvcomp.set_host_allocator(pool)
    made = codec.encode(content(3000))
    assert made.capacity == codec.get_max_comp_buffer_size(content(3000)) == pool.out[0] > made.buffer_size
    back = codec.decode([made, codec.encode(b"")])
    assert pool.out[-1] == 3000 and bytes(back[0]) == content(3000) and bytes(back[1]) == b""
    assert all(s.ptr == 0 and s.device == -1 and s.is_special for s in pool.streams)
    other = Pool()
    nvcomp.set_host_allocator(other)  # the first allocator's buffers are still in use
    held = torch.from_dlpack(back[0])
    nvcomp.set_host_allocator(None)
    assert not other.out and codec.decode(made).capacity == 3000
    del made, back
    gc.collect()
    assert pool.out == [3000] and bytes(held.numpy().tobytes()) == content(3000)
    del held
    gc.collect()
    assert pool.out == []


@pytest.mark.usefixtures("default_allocators")
def test_allocators_that_fail() -> None:
    """An allocator's error is raised unchanged, and the next call works."""

    def refuse(nbytes: int, stream: Any) -> Any:
        raise MemoryError(f"no {nbytes}")

    codec = nvcomp.Codec(algorithm="zstd")
    made = codec.encode(content(1000))
    nvcomp.set_host_allocator(refuse)
    with pytest.raises(MemoryError, match="no 1000"):
        codec.decode(made)
    nvcomp.set_host_allocator(lambda n, s: object())
    with pytest.raises(TypeError, match="no int ptr"):
        codec.decode(made)
    with pytest.raises(TypeError, match="callable"):
        nvcomp.set_host_allocator(3)  # type: ignore[arg-type]
    nvcomp.set_host_allocator()
    assert bytes(codec.decode(made)) == content(1000)


def test_external_memory_frees_the_stream_last() -> None:
    order: list[str] = []

    class Thing:
        ptr = 7

        def __init__(self, name: str) -> None:
            self.name = name

        def __del__(self) -> None:
            order.append(self.name)

    held = ExternalMemory(Thing("memory"), Thing("stream"))
    assert held.ptr == 7
    del held
    gc.collect()
    assert order == ["memory", "stream"]


# Lifetime.


def test_context_manager_and_threads() -> None:
    with nvcomp.Codec(algorithm="lz4") as codec:
        made = codec.encode(content(50_000))
        wrong: list[int] = []

        def work(n: int) -> None:
            for _ in range(20):
                if bytes(codec.decode(codec.encode(content(1000 + n)))) != content(1000 + n):
                    wrong.append(n)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not wrong
    with pytest.raises(RuntimeError, match="closed"):
        codec.decode(made)
    assert bytes(nvcomp.Codec().decode(made)) == content(50_000)


def test_exit_with_live_objects(torch_script: Any) -> None:
    """The interpreter exits cleanly with live codecs, arrays, capsules and tensors, even in cycles and threads."""
    done = torch_script(
        """
import threading
import torch, overwire.compat.nvcomp as nvcomp
codec = nvcomp.Codec(algorithm="zstd")
made = codec.encode(bytes(100000))
keep = [codec, made, codec.decode(made), made.to_dlpack(), torch.from_dlpack(codec.decode(made)), nvcomp.as_array(bytearray(9))]
keep.append(keep)
made.me = made
capsule = torch.from_dlpack(made)
def go():
    while True:
        codec.decode(made)
threading.Thread(target=go, daemon=True).start()
print("end")
"""
    )
    assert done.stdout == "end\n" and done.stderr == ""


def test_a_thousand_decodes_need_no_more_memory(script: Any) -> None:
    """The process does not grow over a thousand decodes."""
    done = script(
        """
import gc, json, os, overwire.compat.nvcomp as nvcomp
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * 4096
codec = nvcomp.Codec(algorithm="lz4")
made = codec.encode(os.urandom(1000) * 200)
for _ in range(100): codec.decode(made)
before = resident()
for _ in range(1000): codec.decode(made)
print(json.dumps([before, resident()]))
"""
    )
    before, after = json.loads(done.stdout)
    assert after - before < 24 << 20, (before, after)

"""Tests that overwire.codecs exchanges streams with other libraries, and uses all cores."""

from __future__ import annotations

import ctypes
import gzip
import os
import random
import threading
import time
import zlib
from importlib import metadata
from typing import Any

import cramjam
import lz4.block
import numcodecs
import overwire as ow
import pytest
import zstandard
from conftest import soon
from overwire import codecs

SIZES = (0, 1, 7, 65535, 65536, 65537, 10_000_000)

# Functions of the standard library and of reference libraries for a raw block: (encode, decode to n bytes).
OTHERS = {
    "LZ4": (
        lambda b: lz4.block.compress(b, store_size=False),
        lambda b, n: lz4.block.decompress(b, uncompressed_size=n),
    ),
    "Snappy": (
        lambda b: bytes(cramjam.snappy.compress_raw(b)),
        lambda b, n: bytes(cramjam.snappy.decompress_raw(b)),
    ),
    "Zstd": (
        lambda b: zstandard.ZstdCompressor().compress(b),
        lambda b, n: zstandard.ZstdDecompressor().decompress(b, max_output_size=max(n, 1)),
    ),
    "Deflate": (
        lambda b: zlib.compress(b, wbits=-15),
        lambda b, n: zlib.decompress(b, wbits=-15),
    ),
    "Gzip": (gzip.compress, lambda b, n: gzip.decompress(b)),
}


def content(size: int, seed: int = 3) -> bytes:
    """Returns moderately compressible bytes, with long and short runs."""
    r = random.Random(seed)
    words = [r.randbytes(r.randrange(3, 40)) for _ in range(300)]
    out = bytearray()
    while len(out) < min(size, 200_000):
        out += r.choice(words)
    while len(out) < size:
        out += out[: size - len(out)]
    return bytes(out[:size])


@pytest.fixture(scope="module")
def contents() -> dict[int, bytes]:
    return {size: content(size) for size in SIZES}


@pytest.mark.parametrize("algorithm", sorted(OTHERS))
def test_raw_streams_are_exchanged_with_other_libraries(algorithm: str, contents: dict[int, bytes]) -> None:
    """Blocks of every special size, raw or with a length prefix, can be exchanged with other libraries."""
    encode, decode = OTHERS[algorithm]
    for size, plain in contents.items():
        prefix = size.to_bytes(4 if algorithm == "LZ4" else 8, "little")
        ours = bytes(codecs.encode(plain, algorithm, bitstream="raw"))
        assert decode(ours, size) == plain, size
        theirs = encode(plain)
        assert codecs.decode(theirs, algorithm, bitstream="raw") == plain, size
        sized = bytes(codecs.encode(plain, algorithm, bitstream="with_size"))
        assert sized == prefix + ours, size
        assert len(sized) <= codecs.max_size(size, algorithm, bitstream="with_size")
        assert codecs.decode(prefix + theirs, algorithm, bitstream="with_size") == plain, size
        assert codecs.content_size(theirs, algorithm, bitstream="raw") == size


# Formats of numcodecs that are the same as a bitstream of overwire: (codec of numcodecs, algorithm, bitstream).
NUMCODECS = {
    "lz4": (numcodecs.LZ4(), "LZ4", "with_size"),
    "zstd": (numcodecs.Zstd(), "Zstd", "raw"),
    "gzip": (numcodecs.GZip(), "Gzip", "raw"),
}


@pytest.mark.parametrize("name", sorted(NUMCODECS))
def test_streams_are_exchanged_with_numcodecs(name: str, contents: dict[int, bytes]) -> None:
    """Zarr's codecs read overwire's streams, and overwire reads theirs. LZ4 has a length prefix of 4 bytes."""
    theirs, algorithm, kind = NUMCODECS[name]
    for size, plain in contents.items():
        if size:
            assert bytes(theirs.decode(codecs.encode(plain, algorithm, bitstream=kind))) == plain, size
        assert codecs.decode(theirs.encode(plain), algorithm, bitstream=kind) == plain, size


def test_numcodecs_zlib_streams_contain_deflate(contents: dict[int, bytes]) -> None:
    """numcodecs reads overwire's raw Deflate between a zlib header and its Adler-32. overwire reads the Deflate inside
    zlib streams of numcodecs."""
    for size, plain in contents.items():
        stored = bytes(codecs.encode(plain, "Deflate", bitstream="raw"))
        assert bytes(numcodecs.Zlib().decode(b"\x78\x9c" + stored + zlib.adler32(plain).to_bytes(4, "big"))) == plain, size
        assert codecs.decode(bytes(numcodecs.Zlib().encode(plain))[2:-4], "Deflate", bitstream="raw") == plain, size


@pytest.mark.parametrize("algorithm", codecs.algorithms())
def test_reference_libraries_decode_native_chunks(algorithm: str, contents: dict[int, bytes]) -> None:
    """The reference library decodes each chunk of a native stream at the offset in the header."""
    for size, plain in contents.items():
        made = bytes(codecs.encode(plain, algorithm, chunk_size=65536))
        assert codecs.decode(made) == plain and codecs.is_native(made) and not codecs.is_native(made[1:])
        u64 = [int.from_bytes(made[i : i + 8], "little") for i in range(0, 64, 8)]
        count = -(-size // 65536)
        assert (made[:4], u64[2], u64[3], u64[6]) == (b"OWBS", size, count, 65536)
        offset = int.from_bytes(made[56:60], "little")
        assert offset + u64[1] == len(made)
        if algorithm not in OTHERS:
            continue
        tables = [int.from_bytes(made[64 + 8 * i :][:8], "little") for i in range(2 * count)]
        for k in range(count):
            start = offset + tables[k]
            part = plain[k * 65536 : (k + 1) * 65536]
            assert OTHERS[algorithm][1](made[start : start + tables[count + k]], len(part)) == part


def _nvcomp_cpu() -> Any:
    """Returns (compress, decompress) of nvCOMP's GDeflate for the CPU, or None if no wheel of nvCOMP is installed. The
    functions are called as its public header nvcomp/native/gdeflate_cpu.h declares them."""
    for wheel in ("nvidia-libnvcomp-cu13", "nvidia-libnvcomp-cu12"):
        try:
            files = metadata.distribution(wheel).files or []
        except metadata.PackageNotFoundError:
            continue
        file = next(f for f in files if f.name.startswith("libnvcomp_cpu.so."))
        library = ctypes.CDLL(str(file.locate()))
        if file.name.endswith("5"):
            names = "_ZN8gdeflate11compressCPUEPKPKvPKmmmPKPvPmi", "_ZN8gdeflate13decompressCPUEPKPKvPKmmPKPvPmS9_"
        else:
            names = "_ZN6nvcomp8gdeflate11compressCPUEPKPKvPKmmmPKPvPmi", "_ZN6nvcomp8gdeflate13decompressCPUEPKPKvPKmmPKPvPmSA_"
        return getattr(library, names[0]), getattr(library, names[1])
    return None


def _one(buffer: Any) -> Any:
    return (ctypes.c_void_p * 1)(ctypes.addressof(buffer))


def _theirs(compress: Any, plain: bytes, level: int) -> bytes:
    size = ctypes.c_size_t
    source, target = ctypes.create_string_buffer(plain, len(plain)), ctypes.create_string_buffer(2 * len(plain) + 1024)
    made = (size * 1)(len(target))
    compress(_one(source), (size * 1)(len(plain)), size(len(plain)), size(1), _one(target), made, ctypes.c_int(level))
    return target.raw[: made[0]]


def _back(decompress: Any, stored: bytes, nbytes: int) -> bytes:
    size = ctypes.c_size_t
    source, target = ctypes.create_string_buffer(stored, len(stored)), ctypes.create_string_buffer(nbytes)
    made = (size * 1)(0)
    decompress(_one(source), (size * 1)(len(stored)), size(1), _one(target), (size * 1)(nbytes), made)
    return target.raw[: made[0]]


def test_gdeflate_streams_are_exchanged_with_nvcomp(seed: int) -> None:
    """nvCOMP's CPU library reads overwire's GDeflate streams, and overwire reads its streams, at all levels."""
    library = _nvcomp_cpu()
    if library is None:
        pytest.skip("nvidia-libnvcomp is not installed; go test covers streams of NVIDIA's libdeflate")
    compress, decompress = library
    r = random.Random(seed)
    for size in (1, 2, 7, 31, 32, 33, 1000, 65535, 65536):
        skewed = bytes(min(255, int(r.expovariate(0.1))) for _ in range(size))
        for plain in (bytes(size), r.randbytes(size), content(size), skewed):
            for level in (0, 1, 6, 12):
                assert codecs.decode(_theirs(compress, plain, level), "GDeflate", bitstream="raw") == plain, (size, level)
            for level in range(6):
                made = bytes(codecs.encode(plain, "GDeflate", bitstream="raw", level=level))
                assert _back(decompress, made, size) == plain, (size, level)


@pytest.mark.parametrize("dtype", ["I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"])
def test_cascaded_of_every_type(dtype: str) -> None:
    """Runs and ramps of integers are compressed without loss, with any number of layers."""
    import numpy

    numbers = numpy.repeat(numpy.arange(2000) // 3, 5).astype(dtype.replace("I", "int").replace("U", "uint"))
    plain = numbers.tobytes()
    assert codecs.encode(numbers, "Cascaded", dtype=dtype).nbytes < len(plain) // 5
    for layers in ((0, 0, True), (1, 0, False), (2, 1, True), (1, 2, True), (3, 3, False), (0, 0, False)):
        for kind in codecs.BITSTREAMS:
            made = codecs.encode(numbers, "Cascaded", bitstream=kind, dtype=dtype, cascaded=layers)
            assert codecs.decode(made, "Cascaded", bitstream=kind) == plain
            assert made.nbytes <= codecs.max_size(len(plain), "Cascaded", bitstream=kind)
    if numbers.itemsize > 1:
        with pytest.raises(ow.ArgumentError, match="not a multiple"):
            codecs.encode(plain[:-1], "Cascaded", dtype=dtype)
    with pytest.raises(ow.ArgumentError, match="at most 7"):
        codecs.encode(numbers, "Cascaded", dtype=dtype, cascaded=(8, 0, True))
    for wrong in ((1, 2), 5):
        with pytest.raises(ow.ArgumentError, match="cascaded"):
            codecs.encode(numbers, "Cascaded", dtype=dtype, cascaded=wrong)  # type: ignore[arg-type]


def test_frames_of_streaming_writers_decode() -> None:
    """Zstandard frames without a length, consecutive frames and consecutive gzip members are decoded, as in files."""
    plain = content(300_000)
    c = zstandard.ZstdCompressor().compressobj()
    unsized = c.compress(plain) + c.flush()
    assert zstandard.frame_content_size(unsized) == -1
    two = unsized + zstandard.ZstdCompressor().compress(plain)
    for stream, want in ((unsized, plain), (two, plain + plain)):
        assert codecs.decode(stream, "zstd", bitstream="raw") == want
    assert codecs.decode(gzip.compress(plain) * 3, "GZIP", bitstream="raw") == plain * 3


def test_padding_of_gzip() -> None:
    """Zeros after a gzip member are padding, as with Python's gzip. Other bytes after a member, or before the first
    one, raise an error."""
    plain = content(1000)
    one = gzip.compress(plain)
    padded = one + b"\0" + one + bytes(3)
    for stream in (one + b"\0", one + bytes(5000), one + bytes(511) + one, padded, one + bytes(70_000) + one):
        assert codecs.decode(stream, "gzip", bitstream="raw") == gzip.decompress(stream)
    for stream in (b"\0" + one, one + b"\0x", one + b"\0" + one[:-1], bytes(20)):
        with pytest.raises((EOFError, OSError)):
            gzip.decompress(stream)
        with pytest.raises(ow.CorruptError):
            codecs.decode(stream, "gzip", bitstream="raw")


def test_x16_compresses_weights_better_than_zstd() -> None:
    """X16 compresses bf16 weights better than zstd."""
    import torch

    torch.manual_seed(1)
    weights = (torch.randn(1 << 20) * 0.02).bfloat16().view(torch.uint8)
    made = {a: codecs.encode(weights, a) for a in ("X16", "Zstd")}
    assert codecs.decode(made["X16"]) == memoryview(weights.numpy())
    assert made["X16"].nbytes < 0.68 * weights.numel() < made["Zstd"].nbytes
    assert codecs.encode(weights, dtype="BF16").nbytes == made["X16"].nbytes


def test_lists_empty_lists_and_out() -> None:
    """Lists are encoded and decoded in order, also into given buffers. A buffer that is too small or read-only is
    refused."""
    parts = [b"", b"a", content(1000), content(100_000)]
    made = codecs.encode(parts, "lz4")
    assert codecs.decode(made) == parts
    assert codecs.encode([], "lz4") == codecs.decode([]) == []
    assert codecs.content_size(made) == [len(p) for p in parts]
    room = [bytearray(len(p) + 3) for p in parts]
    back = codecs.decode(made, out=room)
    assert [bytes(b) for b in back] == parts and [bytes(r[: len(p)]) for r, p in zip(room, parts, strict=True)] == parts
    with pytest.raises(ow.ArgumentError, match="the output has 5 bytes, 1000 are needed"):
        codecs.decode(made[2], out=bytearray(5))
    with pytest.raises(ow.ArgumentError):
        codecs.decode(made, out=[None])
    with pytest.raises(ow.ArgumentError, match="read-only|not writable"):
        codecs.decode(made[1], out=b"12345")
    assert codecs.max_size([10, 1000], "Snappy") == [codecs.max_size(10, "Snappy"), codecs.max_size(1000, "Snappy")]


def _parts(nbytes: int, *extents: tuple[int, int]) -> list[memoryview]:
    """Returns parts of a new buffer, given as (offset, size)."""
    whole = memoryview(bytearray(nbytes))
    return [whole[at : at + n] for at, n in extents]


@pytest.mark.parametrize("kind", codecs.BITSTREAMS)
@pytest.mark.parametrize("algorithm", codecs.algorithms())
def test_outputs_that_overlap_are_refused_before_anything_is_written(algorithm: str, kind: str) -> None:
    """An output that overlaps a source or another output, partly or completely, is refused before anything is written,
    also within lists."""
    plain = content(3000)
    stored = bytes(codecs.encode(plain, algorithm, bitstream=kind))
    most = codecs.max_size(len(plain), algorithm, bitstream=kind)
    n = len(stored)
    for work, source, need in (
        (lambda s, o: codecs.decode(s, algorithm, bitstream=kind, out=o), stored, 3000),
        (lambda s, o: codecs.encode(s, algorithm, bitstream=kind, out=o), plain, most),
    ):
        n = len(source)
        for at in (0, 1, n - 1, n // 2):  # out starts inside the source
            src, out = _parts(n + need, (0, n), (at, need))
            src[:] = source
            with pytest.raises(ow.ArgumentError, match="out overlaps the source"):
                work(src, out)
            assert src == source
        src, out = _parts(n + need, (need - 1, n), (0, need))  # out ends inside the source
        src[:] = source
        with pytest.raises(ow.ArgumentError, match="out overlaps the source"):
            work([src], [out])
        assert src == source and not any(out[:-1])
        a, b, first, second, over = _parts(
            2 * n + 2 * need, (0, n), (n, n), (2 * n, need), (2 * n + need - 1, need), (n, need)
        )
        a[:] = b[:] = source
        for outs in ([first, second], [second, first], [first, first]):
            with pytest.raises(ow.ArgumentError, match="two outputs overlap"):
                work([a, b], outs)
            assert not any(first) and not any(second) and a == b == source
        with pytest.raises(ow.ArgumentError, match="out overlaps the source"):  # out overlaps another source
            work([a, b], [over, None])
        assert a == b == source and not any(second)
        # These are allowed: adjacent buffers, a repeated source, an empty source inside an output, and no output.
        a, first, second = _parts(n + 2 * need, (0, n), (n, need), (n + need, need))
        a[:] = source
        made = work([a, a], [second, first])
        assert bytes(made[0]) == bytes(made[1]) == bytes(work(source, None)) and a == source
        assert work([a, a], [None, first])[1] == made[0]
    empty = memoryview(bytearray(200))
    assert codecs.decode(codecs.encode(empty[:0], algorithm, bitstream=kind, out=empty), algorithm, bitstream=kind) == b""


def test_overlaps_equal_those_found_by_comparing_every_pair(seed: int) -> None:
    """For random buffers, the overlap check gives the same verdict as comparing every pair."""
    from overwire._apart import apart

    r = random.Random(seed)
    refused = 0
    for _ in range(3000):
        def places(most: int) -> list[tuple[int, int]]:
            return [(r.randrange(60), r.choice((0, 1, 3, 9))) for _ in range(r.randrange(most))]

        sources, outs = places(5), places(5)

        def meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
            return bool(set(range(a[0], sum(a))) & set(range(b[0], sum(b))))

        wrong = any(meet(o, s) for o in outs for s in sources) or any(
            meet(a, b) for i, a in enumerate(outs) for b in outs[:i]
        )
        try:
            apart(sources, outs)
        except ow.ArgumentError:
            refused += 1
            assert wrong, (sources, outs)
        else:
            assert not wrong, (sources, outs)
    assert 300 < refused < 2700


def test_objects_that_count_as_buffers() -> None:
    """Contiguous tensors, arrays and byte objects can be sources and outputs. Strided memory and other objects are
    refused."""
    import numpy
    import torch

    grid = torch.arange(12).reshape(3, 4)
    made = codecs.encode(bytes(range(200)), "lz4")
    for out in (torch.zeros(300, dtype=torch.uint8), numpy.zeros(300, numpy.uint8), codecs.span(bytearray(300))):
        assert codecs.decode(made, out=out) == bytes(range(200)) == bytes(codecs.decode([made], out=[out])[0])
    assert codecs.decode(codecs.encode(b"", "lz4"), out=torch.zeros(9, dtype=torch.uint8)) == b""
    for source in (grid, grid.numpy(), memoryview(grid.numpy()), bytearray(grid.numpy().tobytes())):
        assert bytes(codecs.decode(codecs.encode(source, "lz4"))) == grid.numpy().tobytes()
    for wrong in (grid.t(), numpy.arange(9)[::2], 3, "text", None):
        with pytest.raises(ow.ArgumentError):
            codecs.encode(wrong, "lz4")


class OfAGPU:
    """Exposes GPU memory through __cuda_array_interface__ only, like numba and older CuPy."""

    __cuda_array_interface__ = {"shape": (64,), "typestr": "|u1", "data": (0x7F0000000000, False), "version": 3, "strides": None}


class ViewOfAGPU(OfAGPU):
    """Exposes GPU memory also through DLPack, like torch and CuPy."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("the codecs requested memory that they cannot use")


@pytest.mark.parametrize("kind", [OfAGPU, ViewOfAGPU])
def test_gpu_memory_is_refused(kind: type[OfAGPU]) -> None:
    """GPU memory is refused as a source and as an output before it is accessed. The error names the module that accepts
    it."""
    for work in (
        lambda: codecs.encode(kind(), "LZ4"),
        lambda: codecs.decode(kind(), "X16"),
        lambda: codecs.content_size(kind()),
        lambda: codecs.decode(codecs.encode(bytes(64), "LZ4"), out=kind()),
    ):
        with pytest.raises(ow.NotSupportedError, match=rf"{kind.__name__} is on a GPU.*overwire\.gpu"):
            work()


def test_results_outlive_their_sources_and_are_freed() -> None:
    """After hundreds of batches, no memory is left allocated. A view keeps its memory."""
    kept = codecs.decode(codecs.encode(content(500_000), "snappy"))
    before = _resident()
    made = codecs.encode(content(1_000_000), "snappy")
    for _ in range(300):
        codecs.decode([made, made])
    assert soon(lambda: _resident() - before < 40 << 20)
    assert kept == content(500_000)


def _resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_error_for_another_writers_stream_names_its_reader() -> None:
    """A stream that starts neither like overwire's nor like nvCOMP 2.2's is refused, and the error says what to
    install."""
    made = bytearray(codecs.encode(content(5000), "LZ4", checksums=True))
    made[:5] = b"\x01\x02\x03\x04\x06"
    for work in (codecs.decode, codecs.content_size):
        with pytest.raises(ow.FormatError, match="begins with 0102030406.*nvidia-nvcomp-cu13"):
            work(made)


def test_bad_bytes_are_typed_errors() -> None:
    made = bytes(codecs.encode(content(5000), "Zstd", chunk_size=1024))
    for n in range(0, len(made) - 8, 37):
        with pytest.raises((ow.CorruptError, ow.FormatError)):
            codecs.decode(made[:n])
    damaged = bytearray(codecs.encode(content(5000), "Zstd", checksums=True))
    damaged[-30] ^= 1
    with pytest.raises(ow.CorruptError, match="Checksum doesn't match") as error:
        codecs.decode(damaged)
    assert error.value.chunk == 0
    with pytest.raises(ow.ArgumentError, match="no checksums"):
        codecs.decode(codecs.encode(b"abc"), verify="always")
    for name in ("ANS", "Bitcomp"):
        with pytest.raises(ow.NotSupportedError, match=name):
            codecs.encode(b"abc", name)
    with pytest.raises(ow.ArgumentError, match="nope"):
        codecs.encode(b"abc", "nope")


def test_other_threads_run_during_encoding() -> None:
    """Encoding releases the GIL, so another thread can continue counting."""
    plain = content(10_000_000)
    ticks, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    counted = []
    while len(counted) < 20 and max(counted, default=0) < 5:  # a busy machine may pause any thread
        before = ticks[0]
        codecs.encode([plain] * 2, "Deflate", level=4)
        counted.append(ticks[0] - before)
    stop.set()
    thread.join()
    assert max(counted) >= 5, counted


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize("algorithm", ["LZ4", "GDeflate"])
def test_a_list_is_decoded_on_all_cores(algorithm: str) -> None:
    """At least two threads of the engine, and not Python's thread, decode the blocks of a raw list."""
    made = codecs.encode([content(1_000_000)] * 8, algorithm, bitstream="raw")

    def busy() -> dict[str, int]:
        times = {}
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/schedstat") as f:
                times[thread] = int(f.read().split()[0])
        return times

    codecs.decode(made[:2], algorithm, bitstream="raw")  # starts the engine's threads
    mine = str(threading.get_native_id())
    for _ in range(20):
        before = busy()
        for _ in range(2):
            codecs.decode(made, algorithm, bitstream="raw")
        took = {thread: n - before.get(thread, 0) for thread, n in busy().items()}
        workers = sorted(took, key=took.__getitem__)[-2:]
        if mine not in workers and all(took[w] for w in workers):  # Python's thread is not one of the two busiest
            break
    assert mine not in workers and min(took[w] for w in workers) > 0, (mine, took)


def test_buffers_work_in_a_forked_child() -> None:
    """Buffers and DLPack do not use Go, so they also work in a forked child while the engine runs in its parent."""
    import torch

    codecs.encode(b"abc")
    tensor = torch.arange(4)
    child = os.fork()
    if child == 0:
        try:
            ok = codecs.span(tensor).nbytes == 32 and torch.from_dlpack(_Holder(codecs.tensor_view(tensor))).sum() == 6
            try:
                codecs.encode(b"abc")
            except ow.ForkedError:
                os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class _Holder:
    """Exposes a TensorView through DLPack."""

    def __init__(self, view: codecs.TensorView) -> None:
        self.view = view

    def __dlpack__(self, **kwargs: object) -> object:
        t = self.view
        return codecs.dlpack(t, t.address, t.shape, t.strides or (1,), t.kind, t.device)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view.device

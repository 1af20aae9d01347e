"""Tests overwire.gpu and compat.nvcomp with Arrays on a GPU, real or fake.

`make fakepy` runs this on the fake driver, which runs the kernels on the CPU. Tests that need torch on a GPU are
skipped there.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import overwire.compat.nvcomp as nvcomp
import pytest
from overwire import _verbs, codecs, errors, gpu, save_file
from overwire.jobs import Job
from overwire.model.opened import Model, pack_requests

if gpu.count() == 0:
    pytest.skip("no CUDA device", allow_module_level=True)

torch: Any = pytest.importorskip("torch")
REAL = torch.cuda.is_available()
SIZES = (0, 1, 7, 65535, 65536, 65537, 10_000_000 if REAL else 200_001)
KINDS = tuple(nvcomp.BitstreamKind)
NAMES = codecs.algorithms()
RAW = nvcomp.BitstreamKind.RAW

needs_torch = pytest.mark.skipif(not REAL, reason="torch has no GPU")


def content(size: int, seed: int = 5) -> bytes:
    """Returns 2-byte words. The second byte takes only four values, like the exponents of weights."""
    r = random.Random(seed)
    piece = bytearray(r.randbytes(min(size, 70_000)))
    for i in range(1, len(piece), 2):
        piece[i] = 60 + (piece[i] & 3)
    return bytes((piece * (size // max(len(piece), 1) + 1))[:size])


@pytest.fixture(scope="module")
def contents() -> dict[int, bytes]:
    return {size: content(size) for size in SIZES}


def there(data: bytes) -> Any:
    array = nvcomp.as_array(data).cuda()
    assert array.buffer_kind is nvcomp.ArrayBufferKind.STRIDED_DEVICE
    return array


def back(array: Any) -> bytes:
    host = array.cpu()
    assert host.buffer_kind is nvcomp.ArrayBufferKind.STRIDED_HOST
    return bytes(host)


def test_backends_name_the_device() -> None:
    found = nvcomp.backends()
    assert set(gpu.algorithms()) >= {"X16", "LZ4", "Snappy"}
    for name in NAMES:
        assert found[name].startswith("decode: cuda" if name in gpu.algorithms() else "decode: cpu"), found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS, ids=[k.name for k in KINDS])
def test_device_memory_round_trips(name: str, kind: Any, contents: dict[int, bytes]) -> None:
    """Data of every length round-trips with every algorithm and bitstream, and the CPU decoder gives the same
    result."""
    codec = nvcomp.Codec(algorithm=name, bitstream_kind=kind, uncomp_chunk_size=65536)
    bitstream = codecs.BITSTREAMS[int(kind)]
    plain = list(contents.values())
    if name == "X16" and kind is not nvcomp.BitstreamKind.NVCOMP_NATIVE:
        plain = [p for p in plain if len(p) < 1 << 24]
    encoded = codec.encode([there(p) for p in plain])
    for p, e in zip(plain, encoded, strict=True):
        assert e.buffer_kind is nvcomp.ArrayBufferKind.STRIDED_DEVICE
        assert codecs.decode(back(e), name, bitstream=bitstream) == p, len(p)
    decoded = codec.decode(encoded)
    for p, d in zip(plain, decoded, strict=True):
        assert d.buffer_kind is nvcomp.ArrayBufferKind.STRIDED_DEVICE and d.buffer_size == len(p) and back(d) == p, len(
            p
        )
    # These streams are in CPU memory and decoded one at a time, with sizes from a config.
    for p, e in zip(plain, encoded, strict=True):
        stored = back(e)
        if p:
            config = codec.decompression_config(nvcomp.as_array(stored))
            assert back(codec.decode(stored, decompression_config=config)) == p
        assert back(codec.decode(stored)) == p
        assert codec.get_uncomp_buffer_size(e) == len(p)


def test_a_decoder_finds_the_algorithm_of_a_stream(contents: dict[int, bytes]) -> None:
    decoder = nvcomp.Codec()
    for name in NAMES:
        e = nvcomp.Codec(algorithm=name).encode(there(contents[65537]))
        assert back(decoder.decode(e)) == contents[65537], name


@pytest.mark.parametrize("name", ["X16", "LZ4", "Snappy"])
def test_decoding_with_a_config_does_not_wait(name: str, contents: dict[int, bytes]) -> None:
    """With a config, decoding never waits for the device."""
    codec = nvcomp.Codec(algorithm=name)
    plain = [contents[65536], contents[65537]]
    encoded = codec.encode([there(p) for p in plain])
    config = codec.decompression_config(codec.compression_config([len(p) for p in plain]))
    asked: list[str] = []
    real = gpu._verbs.gpu_peek, gpu._verbs.gpu_wait, gpu._verbs.gpu_stream_sync, gpu._verbs.gpu_copy
    names = ("gpu_peek", "gpu_wait", "gpu_stream_sync", "gpu_copy")
    try:
        for which, function in zip(names, real, strict=True):

            def watched(*args: Any, which: str = which, function: Callable[..., Any] = function) -> Any:
                asked.append(which)
                return function(*args)

            setattr(gpu._verbs, which, watched)
        made = codec.decode(encoded, decompression_config=config)
        assert asked == []
    finally:
        for which, function in zip(names, real, strict=True):
            setattr(gpu._verbs, which, function)
    assert [back(m) for m in made] == plain


def test_a_wrong_length_raises_and_nothing_is_written_past_the_output(contents: dict[int, bytes]) -> None:
    codec = nvcomp.Codec(algorithm="X16")
    e = codec.encode(there(contents[65537]))
    config = codec.decompression_config(codec.compression_config(65536))
    made = codec.decode(e, decompression_config=config)
    with pytest.raises(errors.CorruptError):
        made.cpu()
    assert made.cpu().buffer_size == 65536  # the error is raised only once
    with pytest.raises(errors.CorruptError):
        _strictly(e)
    small = there(bytes(100))
    with pytest.raises(ValueError, match="out has 100 bytes"):
        codec.decode(e, out=nvcomp.from_dlpack(small.to_dlpack()))


def _strictly(e: Any) -> None:
    strict = nvcomp.Codec(algorithm="X16", strict=True)
    strict.decode(e, decompression_config=strict.decompression_config(strict.compression_config(65536)))


@pytest.mark.parametrize("name", ["X16", "LZ4", "Snappy"])
def test_only_the_damaged_buffer_raises(name: str, contents: dict[int, bytes]) -> None:
    codec = nvcomp.Codec(algorithm=name, uncomp_chunk_size=16384)
    plain = contents[65537]
    good = back(codec.encode(there(plain)))
    r = random.Random(7)
    for _ in range(20):
        bad = bytearray(good)
        bad[r.choice((r.randrange(len(bad)), r.randrange(160)))] ^= 1 << r.randrange(8)
        if r.randrange(4) == 0:
            del bad[r.randrange(len(bad)) :]
        try:
            one, two, three = codec.decode([there(good), there(bytes(bad) or b"\0"), there(good)])
        except (ValueError, errors.OverwireError):
            continue  # here the header is refused
        assert back(one) == plain == back(three)
        try:
            back(two)
        except errors.CorruptError:
            pass
    assert back(codec.decode(there(good))) == plain


def test_out_and_capacity(contents: dict[int, bytes]) -> None:
    """A result is written to the caller's memory. An Array of overwire reuses its memory or grows."""
    for name in ("X16", "LZ4", "Zstd"):
        codec = nvcomp.Codec(algorithm=name)
        e = codec.encode(there(contents[65536]))
        held = there(bytes(70_000))
        outside = nvcomp.from_dlpack(held.to_dlpack())
        got = codec.decode(e, out=outside)
        assert got.__cuda_array_interface__["data"][0] == outside.__cuda_array_interface__["data"][0]
        assert back(got) == contents[65536] and got.buffer_size == 65536
        ours = codec.decode(e)
        place = ours.__cuda_array_interface__["data"][0]
        again = codec.decode(codec.encode(there(contents[7])), out=ours)
        assert again is ours and back(ours) == contents[7] and (name == "Zstd" or ours.capacity == 65536)
        if name != "Zstd":
            assert ours.__cuda_array_interface__["data"][0] == place
        assert back(codec.decode(e, out=ours)) == contents[65536]


def test_encoding_on_the_gpu_gives_the_bytes_of_the_cpu(contents: dict[int, bytes]) -> None:
    """If the dtype is known, the GPU encodes to the same X16 streams as the CPU, also into the caller's memory."""
    for kind, bitstream in zip(KINDS, codecs.BITSTREAMS, strict=True):
        codec = nvcomp.Codec(algorithm="X16", data_type="bfloat16", bitstream_kind=kind, uncomp_chunk_size=16384)
        for size in (0, 7, 65536, 65537):
            data = contents[size]
            e = codec.encode(there(data))
            host = bytes(codecs.encode(data, "X16", bitstream=bitstream, chunk_size=16384, dtype="BF16"))
            assert codecs.decode(back(e), "X16", bitstream=bitstream) == data
            assert abs(len(host) - e.buffer_size) <= len(host) // 100
        room = nvcomp.from_dlpack(there(bytes(100_000)).to_dlpack())
        e = codec.encode(there(contents[65536]), out=room)
        assert e.__cuda_array_interface__["data"][0] == room.__cuda_array_interface__["data"][0]
        assert codecs.decode(back(e), "X16", bitstream=bitstream) == contents[65536]
        with pytest.raises(ValueError, match="too small"):
            codec.encode(there(contents[65536]), out=nvcomp.from_dlpack(there(bytes(1000)).to_dlpack()))


def test_interfaces_share_the_memory(contents: dict[int, bytes]) -> None:
    """Arrays from DLPack and from the CUDA array interface share GPU memory and keep it alive."""
    array = there(contents[65536])
    place = array.__cuda_array_interface__["data"][0]
    assert array.__cuda_array_interface__["stream"] == 1 and array.__dlpack_device__() == (2, 0)
    with pytest.raises(AttributeError):
        _ = array.__array_interface__
    with pytest.raises(BufferError):
        memoryview(array)

    class Interface:
        __cuda_array_interface__ = array.__cuda_array_interface__ | {"typestr": "<f2", "shape": (32768,)}
        keep = array

    for other in (nvcomp.from_dlpack(array.to_dlpack()), nvcomp.as_array(Interface()), nvcomp.from_dlpack(array)):
        assert other.__cuda_array_interface__["data"][0] == place and other.buffer_size == 65536
        assert other.buffer_kind is nvcomp.ArrayBufferKind.STRIDED_DEVICE
        del array
        gc.collect()
        array = other
        assert back(other) == contents[65536]
    parts = nvcomp.as_arrays(array, [0, 1024], [1024, 64512])
    assert b"".join(back(p) for p in parts) == contents[65536]


class Pool:
    """A user's allocator that counts how much memory it has given out."""

    def __init__(self, device: bool) -> None:
        self.device, self.live, self.made = device, 0, 0

    def __call__(self, nbytes: int, stream: Any) -> Any:
        pool = self
        assert stream.device == 0 and isinstance(stream.ptr, int)

        class Piece:
            def __init__(self) -> None:
                pool.live += 1
                pool.made += 1
                if pool.device:
                    self.memory: Any = gpu.alloc(nbytes, 0)
                    self.ptr = self.memory.address
                else:
                    self.memory = bytearray(nbytes)
                    self.ptr = codecs.span(self.memory).address

            def __del__(self) -> None:
                pool.live -= 1

        return Piece()


def test_allocators(contents: dict[int, bytes]) -> None:
    """Device and pinned memory come from the user's allocators, and go back to them. An allocator's error is raised."""
    device, pinned = Pool(True), Pool(False)

    def failing(nbytes: int, stream: Any) -> Any:
        raise MemoryError("none left")

    codec = nvcomp.Codec(algorithm="X16")
    e = codec.encode(there(contents[65536]))
    try:
        nvcomp.set_device_allocator(device)
        nvcomp.set_pinned_allocator(pinned)
        a = codec.decode(e)
        assert device.made >= 1 and back(a) == contents[65536] and pinned.made == 1
        nvcomp.set_device_allocator(failing)
        with pytest.raises(MemoryError, match="none left"):
            codec.decode(e)
        nvcomp.set_device_allocator(None)
        b = codec.decode(e)
        made = device.made
        assert back(b) == contents[65536] == back(a) and device.made == made
        del a
        gc.collect()
        assert device.live == 0
    finally:
        nvcomp.set_device_allocator()
        nvcomp.set_pinned_allocator()
    gc.collect()
    assert pinned.live == 0


def test_streams(contents: dict[int, bytes]) -> None:
    """Codecs run on own, external and special streams, and on other GPUs. Streams of another GPU are refused."""
    made = nvcomp.CudaStream.make_new()
    assert made.device == 0 and not made.is_special and nvcomp.CudaStream.borrow(made.ptr).ptr == made.ptr
    for special in (0, 1, 2):
        assert nvcomp.CudaStream.borrow(special).is_special
    with pytest.raises(ValueError, match="the number of GPUs"):
        nvcomp.CudaStream.make_new(gpu.count())
    if gpu.count() > 1:
        other = nvcomp.CudaStream.make_new(1)
        with pytest.raises(ValueError):
            nvcomp.CudaStream.borrow(other.ptr, 0)
        with pytest.raises(ValueError):
            nvcomp.Codec(algorithm="X16", device_id=0, cuda_stream=other.ptr)
        on_other = nvcomp.Codec(algorithm="X16", device_id=1)
        e = on_other.encode(there(contents[65536]))
        d = on_other.decode(e)
        assert e.__dlpack_device__() == (2, 1) == d.__dlpack_device__() and back(d) == contents[65536]
    for stream in (made.ptr, 1, 2):
        codec = nvcomp.Codec(algorithm="X16", cuda_stream=stream)
        d = codec.decode(codec.encode(there(contents[65536])))
        assert d.__cuda_array_interface__["stream"] == stream
        assert back(nvcomp.from_dlpack(d)) == contents[65536]
        assert back(nvcomp.as_array(d, cuda_stream=made.ptr)) == contents[65536]


def test_threads_share_a_codec(contents: dict[int, bytes]) -> None:
    codec = nvcomp.Codec(algorithm="X16")
    e = [codec.encode(there(contents[n])) for n in (7, 65535, 65537)]
    wrong: list[Any] = []

    def work(k: int) -> None:
        for _ in range(20):
            if back(codec.decode(e[k])) != contents[(7, 65535, 65537)[k]]:
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_exit_with_live_objects(script: Any) -> None:
    """The interpreter exits without a message while codecs, streams and results exist."""
    done = script(
        "import overwire.compat.nvcomp as nvcomp\n"
        "codec = nvcomp.Codec(algorithm='X16')\n"
        "a = codec.decode(codec.encode(bytes(100000)))\n"
        "s = nvcomp.CudaStream.make_new()\n"
        "late = codec.decode([codec.encode(b'x' * 5000)] * 3)\n"
        "print(a.buffer_size)\n",
        PYTHONPATH=":".join(__import__("sys").path),
    )
    assert done.stdout == "100000\n" and done.stderr == ""


# Tests that need torch on a GPU.


@needs_torch
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_torch_tensors(dtype: str) -> None:
    """torch tensors of several dtypes are encoded from GPU memory, and decoded to GPU memory bit for bit."""
    kind = getattr(torch, dtype)
    t = torch.randn(300, 257, device="cuda").to(kind) if kind.is_floating_point else torch.ones(300, 257, device="cuda", dtype=kind)
    codec = nvcomp.Codec(algorithm="X16")
    a = nvcomp.as_array(t)
    assert a.shape == (300, 257) and a.__cuda_array_interface__["data"][0] == t.data_ptr()
    d = codec.decode(codec.encode(a), data_type=kind)
    got = torch.from_dlpack(d)
    assert got.dtype == kind and got.is_cuda and torch.equal(got.view(torch.uint8), t.reshape(-1).view(torch.uint8))
    if dtype == "bfloat16":
        out = torch.empty_like(t)
        codec.decode(codec.encode(a), data_type=kind, out=out)
        assert torch.equal(out.view(torch.int16), t.view(torch.int16))


@needs_torch
def test_torchs_current_stream_is_used() -> None:
    plain = torch.frombuffer(bytearray(content(1 << 20)), dtype=torch.uint8).cuda()
    codec = nvcomp.Codec(algorithm="X16")
    e = codec.encode(plain)
    stream = torch.cuda.Stream()
    out = torch.empty_like(plain)
    config = codec.decompression_config(e)
    for _ in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            out.fill_(1)
            d = codec.decode(e, out=out, decompression_config=config)
            assert d.__cuda_array_interface__["stream"] == stream.cuda_stream
            copy = out.clone()
        stream.synchronize()
        assert torch.equal(copy, plain)


@needs_torch
@pytest.mark.whole_gpu
def test_a_thousand_decodes_use_no_more_memory() -> None:
    plain = content(100_000)
    codec = nvcomp.Codec(algorithm="X16")
    e = codec.encode(there(plain))
    config = codec.decompression_config(e)

    def used() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    for _ in range(50):
        codec.decode(e, decompression_config=config)
    before = used()
    for _ in range(1000):
        codec.decode(e, decompression_config=config)
    assert used() <= before + (4 << 20)


# Overlapping outputs.


@pytest.mark.parametrize("name", NAMES)
def test_outputs_that_overlap_are_refused(name: str) -> None:
    """An output that overlaps a source or another output is refused, by kernels and by CPU codecs, and nothing is
    written."""
    plain = content(4096)
    codec = nvcomp.Codec(algorithm=name)
    stored = codec.encode(there(plain))
    n = -(-stored.buffer_size // 64) * 64
    most = -(-codec.get_max_comp_buffer_size(plain) // 64) * 64
    for work, source, need in ((codec.decode, back(stored), 4096), (codec.encode, plain, most)):
        n = -(-len(source) // 64) * 64
        before = source + bytes(n - len(source)) + bytes(2 * need)
        whole = nvcomp.from_dlpack(there(before).to_dlpack())

        def part(at: int, size: int, whole: Any = whole) -> Any:
            return nvcomp.as_arrays(whole, [at], [size])[0]

        src = part(0, len(source))
        for sources, outs in (
            ([src], [part(0, need)]),
            ([src], [part(16, need)]),
            ([src, there(source)], [part(n, need), part(n - 64, need)]),
            ([src, src], [part(n, need), part(n, need)]),
            ([src, src], [part(n + 64, need), part(n, need)]),
        ):
            with pytest.raises(errors.ArgumentError, match="overlap"):
                work(sources, out=outs)
            assert back(whole) == before
        made = work([src, src], out=[part(n, need), part(n + need, need)])
        assert back(made[0]) == back(made[1]) == back(work(src))


def test_gpu_functions_refuse_overlaps() -> None:
    """gpu.decode, gpu.encode and gpu.copy refuse overlapping memory."""
    plain = content(4096)
    stored = codecs.encode(plain, "X16", bitstream="native")
    room = gpu.alloc(1 << 16, 0)
    at = room.address
    gpu.copy(at, codecs.span(stored).address, stored.nbytes, device=0)
    for rows in (
        [(at, stored.nbytes, at + 16, 4096, 1 << 20)],
        [(at, stored.nbytes, at + 8192, 4096, 1 << 20), (at, stored.nbytes, at + 8192 + 4080, 4096, 1 << 20)],
    ):
        with pytest.raises(errors.ArgumentError, match="overlap"):
            gpu.decode(0, 1, rows, "X16")
    for contents in (
        [(at, 4096, at + 2048, 8192, 4096, 0)],
        [(at, 64, at + 4096, 512, 64, 0), (at, 64, at + 4096 + 496, 512, 64, 0)],
    ):
        with pytest.raises(errors.ArgumentError, match="overlap"):
            gpu.encode(0, 1, contents)
    with pytest.raises(errors.ArgumentError, match="overlap"):
        gpu.copy(at + 1, at, 100, device=0)
    assert gpu.decode(0, 1, [(at, stored.nbytes, at + 8192, 4096, 1 << 20)], "X16").wait() == [None]


def test_stored_chunks_of_a_file_decode_on_the_gpu(tmp_path: Path) -> None:
    """Chunks are loaded to the GPU as they are stored in a compressed file, and the GPU decodes them to the tensors."""
    tensors = {"a": torch.randn(700, 1001).bfloat16(), "b": torch.randn(3, 5).half(), "c": torch.tensor(0.5)}
    save_file(tensors, tmp_path / "m.safetensors", compress=True)
    model = Model(tmp_path / "m.safetensors")
    _, numbers, _, table, handle = _verbs.streams(model.handle)
    view = Model.held("m.safetensors", table or [], handle, "cuda:0")
    kept, requests, rows, outs = [], [], [], {}
    for at, (row, chunk) in enumerate(zip(view.table, memoryview(numbers).cast("q"), strict=True)):
        out, stream = (gpu.alloc(nbytes, 0) for nbytes in (tensors[row[0]].nbytes, row[3]))
        kept += [out, stream]
        requests.append((at, stream.address, 0, -1, 0, -1))
        rows.append((stream.address, row[3], out.address, out.nbytes, chunk))
        outs[row[0]] = out
    with Job(_verbs.load({"device": "cuda:0"}, handle, False, pack_requests(requests)), "load") as job:
        job.wait()
    assert gpu.decode(0, 1, rows, "X16").wait() == [None] * 3
    for name, out in outs.items():
        back = torch.empty(out.nbytes, dtype=torch.uint8)
        gpu.copy(back.data_ptr(), out.address, out.nbytes, device=0)
        assert torch.equal(back, tensors[name].reshape(-1).view(torch.uint8))
    view.close()
    model.close()

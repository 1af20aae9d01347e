"""Tests which calls overwire.compat.nvcomp passes to nvCOMP. Most tests use a stand-in for nvCOMP, so they also run on
the fake GPU of `make fakepy`. The last tests use nvCOMP itself on a real GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import overwire.compat.nvcomp as nvcomp
import pytest
from overwire import errors, gpu
from overwire.compat.nvcomp import original

if gpu.count() == 0:
    pytest.skip("no CUDA device", allow_module_level=True)

torch: Any = pytest.importorskip("torch")
from test_gpu_codecs import KINDS, back, content, needs_torch, there  # noqa: E402


@pytest.fixture(scope="module")
def plain() -> bytes:
    return content(65536)


MARK = b"\x01\x02\x03\x04\x06"


class StandIn:
    """Stands in for nvCOMP if it is not installed, and reads the streams that `marked` makes."""

    asked: list[dict[str, Any]] = []
    Array, CompressConfig = nvcomp.Array, nvcomp.CompressConfig
    BitstreamKind, ChecksumPolicy = nvcomp.BitstreamKind, nvcomp.ChecksumPolicy
    as_array, as_arrays = staticmethod(nvcomp.as_array), staticmethod(nvcomp.as_arrays)

    class Codec:
        def __init__(self, **kwargs: Any) -> None:
            StandIn.asked.append(kwargs)
            self.codec = nvcomp.Codec(**kwargs, ask_nvcomp=False)

        def _each(self, source: Any, work: Callable[[Any], Any]) -> Any:
            return work(
                [there(unmarked(back(a))) for a in source]
                if isinstance(source, list)
                else there(unmarked(back(source)))
            )

        def decode(self, source: Any, data_type: str = "", out: Any = None, decompression_config: Any = None) -> Any:
            return self._each(source, lambda s: self.codec.decode(s, data_type, out, decompression_config))

        def decompression_config(self, source: Any) -> Any:
            return self._each(source, self.codec.decompression_config)

        def get_uncomp_buffer_size(self, source: Any) -> int:
            return int(self._each(source, self.codec.get_uncomp_buffer_size))


def marked(stream: bytes) -> bytes:
    """Returns a stream that overwire does not recognise. A native stream gets another head, and other streams get a
    prefix."""
    return MARK + stream[5:] if stream[:4] == b"OWBS" else MARK + b"+" + stream


def unmarked(stream: bytes) -> bytes:
    assert stream.startswith(MARK)
    return stream[6:] if stream[5:6] == b"+" else b"OWBS\1" + stream[5:]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    monkeypatch.setattr(original, "_impl", StandIn)
    monkeypatch.setattr(original, "usable", lambda: True)
    StandIn.asked.clear()
    return StandIn


def test_native_streams_of_nvcomp_are_passed_to_nvcomp(stand_in: Any, plain: bytes) -> None:
    """nvCOMP gets its own native streams and not overwire's. A batch may mix overwire's and nvCOMP's streams. Outputs,
    types and configs work."""
    ours = nvcomp.Codec(algorithm="LZ4").encode(there(plain))
    theirs = marked(back(ours))
    for codec in (nvcomp.Codec(), nvcomp.Codec(algorithm="LZ4")):
        assert back(codec.decode(ours)) == plain and stand_in.asked == []
        for source in (theirs, there(theirs)):
            made = codec.decode(source, "<i2")
            assert back(made) == plain and (made.item_size, made.shape, made.strides) == (2, (32768,), (2,))
            assert codec.get_uncomp_buffer_size(source) == 65536
            config = codec.decompression_config(source)
            assert back(codec.decode(source, decompression_config=config)) == plain
        assert [back(a) for a in codec.decode([there(theirs), ours, theirs], "<f4")] == [plain] * 3
        assert {a.item_size for a in codec.decode([theirs, ours], "<f4")} == {4}
        outs = [nvcomp.from_dlpack(there(bytes(65536)).to_dlpack()) for _ in range(2)]
        codec.decode([ours, there(theirs)], out=outs)
        assert [back(o) for o in outs] == [plain, plain]
        with pytest.raises(errors.NotSupportedError, match="both overwire's and nvCOMP's streams"):
            codec.decompression_config([theirs, ours])
        assert len(stand_in.asked) == 1  # each of our Codecs makes one nvCOMP Codec
        stand_in.asked.clear()
    strict = nvcomp.Codec(ask_nvcomp=False)
    for source in (theirs, there(theirs)):
        with pytest.raises(errors.FormatError, match="begins with 0102030406"):
            strict.decode(source)
    damaged = bytearray(back(ours))
    del damaged[-300:]
    with pytest.raises(errors.CorruptError):
        back(nvcomp.Codec().decode(there(bytes(damaged))))
    assert stand_in.asked == []


def test_only_options_for_reading_are_passed_to_nvcomp(stand_in: Any) -> None:
    """Only options for decoding are passed to nvCOMP, because it refuses unknown options."""
    plain = bytes(range(256)) * 16
    policy = nvcomp.ChecksumPolicy.COMPUTE_AND_VERIFY_IF_PRESENT
    codec = nvcomp.Codec(
        algorithm="Cascaded", data_type="<i4", num_rles=1, uncomp_chunk_size=4096, checksum_policy=policy, strict=True, cuda_stream=1
    )
    made = codec.encode(there(plain))
    assert back(codec.decode(marked(back(made)))) == plain
    assert stand_in.asked == [{"algorithm": "Cascaded", "cuda_stream": 1, "checksum_policy": policy, "data_type": "<i4"}]


@pytest.mark.parametrize(("name", "kind"), [("Cascaded", 1), ("Cascaded", 2), ("LZ4", 2), ("Snappy", 2), ("Zstd", 2)])
def test_blocks_that_overwire_refuses_are_passed_to_nvcomp(name: str, kind: int, stand_in: Any, plain: bytes) -> None:
    """Cascaded and length-prefixed streams do not show who wrote them. nvCOMP gets those that overwire refuses."""
    codec = nvcomp.Codec(algorithm=name, bitstream_kind=nvcomp.BitstreamKind(kind), data_type="|u1")
    ours = back(codec.encode(there(plain)))
    bad = marked(ours)
    for source in (bad, there(bad)):
        assert back(codec.decode(source)) == plain
        assert [back(a) for a in codec.decode([there(ours), source])] == [plain, plain]
    assert len(stand_in.asked) == 1
    with pytest.raises(errors.CorruptError):
        back(
            nvcomp.Codec(algorithm=name, bitstream_kind=nvcomp.BitstreamKind(kind), ask_nvcomp=False).decode(there(bad))
        )


# Tests with nvCOMP itself.


@needs_torch
@pytest.mark.parametrize("kind", KINDS[:2], ids=[k.name for k in KINDS[:2]])
@pytest.mark.parametrize("name", ["ANS", "Bitcomp"])
def test_results_of_nvcomp_outlive_codecs(name: str, kind: Any, plain: bytes) -> None:
    """A result of nvCOMP lives as long as the overwire Array that wraps it, even if Codecs and other Arrays are
    dropped."""
    theirs = pytest.importorskip("nvidia.nvcomp")
    named = {"algorithm": name, "data_type": "|u1" if name == "ANS" else "<i4", "bitstream_kind": kind}
    data = plain
    stored = [nvcomp.Codec(**named).encode(source) for source in (there(data), data, bytearray(data))]
    gc.collect()
    noise = [torch.full((1 << 20,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    assert all(back(nvcomp.Codec(**named).decode(e)) == data for e in stored)
    out = torch.zeros(len(data), dtype=torch.uint8, device="cuda")
    nvcomp.Codec(**named).decode(stored[0], out=out)
    assert bytes(out.cpu().numpy()) == data
    codec = nvcomp.Codec(**named)
    assert [back(x) for x in codec.decode(codec.encode([there(data), there(data)]))] == [data, data]
    if theirs is not nvcomp:
        named["bitstream_kind"] = theirs.BitstreamKind(int(kind))
        again = theirs.Codec(**named).decode(theirs.as_array(stored[0]))
        assert bytes(again.cpu()) == data
    del noise


@needs_torch
@pytest.mark.parametrize("name", ["LZ4", "Snappy", "Zstd", "Deflate", "GDeflate", "Cascaded"])
def test_nvcomp_reads_the_streams_that_it_wrote(name: str, plain: bytes) -> None:
    """nvCOMP reads its own native streams with checksums and its own length-prefixed streams. Damage raises an
    error."""
    theirs = pytest.importorskip("nvidia.nvcomp")
    if theirs is nvcomp:
        pytest.skip("nvidia.nvcomp is overwire's own module")
    data = plain
    policies = theirs.ChecksumPolicy
    stored = theirs.Codec(algorithm=name, checksum_policy=policies.COMPUTE_AND_NO_VERIFY).encode(
        theirs.as_array(data).cuda()
    )
    stream = bytes(stored.cpu())
    codec = nvcomp.Codec(checksum_policy=nvcomp.ChecksumPolicy.COMPUTE_AND_VERIFY)
    ours = nvcomp.Codec(algorithm=name, checksum_policy=nvcomp.ChecksumPolicy.COMPUTE_AND_VERIFY).encode(there(data))
    assert [back(a) for a in codec.decode([stream, ours, there(stream)])] == [data] * 3
    damaged = bytearray(stream)
    for at in range(len(stream) // 2, len(stream) // 2 + 16):
        damaged[at] ^= 1
    with pytest.raises((RuntimeError, ValueError)):
        back(codec.decode(bytes(damaged)))
    sized = theirs.Codec(algorithm=name, bitstream_kind=theirs.BitstreamKind.WITH_UNCOMPRESSED_SIZE)
    stream = bytes(sized.encode(theirs.as_array(data).cuda()).cpu())
    again = nvcomp.Codec(algorithm=name, bitstream_kind=nvcomp.BitstreamKind.WITH_UNCOMPRESSED_SIZE)
    assert back(again.decode(stream)) == data == back(again.decode(there(stream)))

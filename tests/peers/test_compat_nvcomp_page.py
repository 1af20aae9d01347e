"""Tests the calls on nvCOMP's API page, the checksum policies, and which versions of nvCOMP are used or refused."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import numpy
import overwire as ow
import overwire.compat.nvcomp as nvcomp
import pytest
from conftest import ROOT
from overwire.compat.nvcomp import original
from test_codecs import content
from test_compat_nvcomp import NAMES


def test_the_api_page_of_5_0() -> None:
    """Every call on the page of 5.0 works, with the argument names, positions and defaults that the page gives."""
    array = nvcomp.as_array(source=bytearray(b"some bytes"), cuda_stream=0)
    page: dict[Any, tuple[str, ...]] = {
        nvcomp.Codec.encode: ("self", "array"),
        nvcomp.Codec.decode: ("self", "src", "data_type=''"),
        nvcomp.Array.cpu: ("self",),
        nvcomp.Array.cuda: ("self", "synchronize=True", "cuda_stream=0"),
        nvcomp.Array.to_dlpack: ("self", "cuda_stream=None"),
        nvcomp.Array.__dlpack__: ("self", "stream=None"),
        nvcomp.Array.__dlpack_device__: ("self",),
        nvcomp.as_array: ("source", "cuda_stream=0"),
        nvcomp.from_dlpack: ("source", "cuda_stream=0"),
        nvcomp.CudaStream.borrow: ("cuda_stream", "device_idx=-1"),
        nvcomp.CudaStream.make_new: ("device_idx=-1",),
        nvcomp.set_device_allocator: ("allocator=None",),
        nvcomp.set_pinned_allocator: ("allocator=None",),
        nvcomp.set_host_allocator: ("allocator=None",),
    }
    for function, arguments in page.items():
        has = [str(p).split(":")[0] + (f"={p.default!r}" if p.default is not p.empty else "")
               for p in inspect.signature(function).parameters.values()]  # fmt: skip
        assert tuple(has[: len(arguments)]) == arguments, function
    assert bytes(nvcomp.as_arrays([array], 0)[0]) == bytes(nvcomp.as_arrays(sources=[array], cuda_stream=0)[0]) == b"some bytes"
    for name in "__cuda_array_interface__ buffer_kind buffer_size dtype item_size ndim precision shape size strides".split():
        getattr(array, name)
    options: dict[str, dict[str, Any]] = {
        "LZ4": {"data_type": "|u1"},
        "GDeflate": {"algorithm_type": 4},
        "Deflate": {"algorithm_type": 0},
        "Cascaded": {"data_type": "<i4", "num_rles": 2, "num_deltas": 1, "use_bitpack": True},
        "Snappy": {},
        "Zstd": {},
        "Gzip": {"algorithm_type": 5},
    }
    plain = numpy.arange(5000, dtype=numpy.int32)
    for name, own in options.items():
        codec = nvcomp.Codec(
            algorithm=name, device_id=0, cuda_stream=0, uncomp_chunk_size=65536,
            bitstream_kind=nvcomp.BitstreamKind.NVCOMP_NATIVE,
            checksum_policy=nvcomp.ChecksumPolicy.NO_COMPUTE_NO_VERIFY, **own,
        )  # fmt: skip
        made = codec.encode(array=nvcomp.as_array(plain))
        back = nvcomp.Codec().decode(src=made, data_type="<i4")
        numpy.testing.assert_array_equal(numpy.asarray(back), plain)
        many = codec.decode(codec.encode([nvcomp.as_array(plain)]), "<i4")
        assert [bytes(a) for a in many] == [plain.tobytes()]


@pytest.mark.parametrize("name", NAMES)
def test_every_checksum_policy(name: str) -> None:
    """Each policy writes and checks checksums as documented, with and without strict."""
    policies = nvcomp.ChecksumPolicy
    plain = content(70_000)
    for policy in policies:
        made = bytes(nvcomp.Codec(algorithm=name, checksum_policy=policy).encode(plain))
        flags = made[44:46]
        assert flags == (b"\1\1" if policy.name.startswith("COMPUTE") else b"\0\0"), policy
        damaged = bytearray(made)
        damaged[-300] ^= 1
        for other in policies:
            codec = nvcomp.Codec(checksum_policy=other)
            strict = nvcomp.Codec(checksum_policy=other, strict=True)
            if other is policies.COMPUTE_AND_VERIFY and not any(flags):
                with pytest.raises(RuntimeError, match="no checksums"):
                    codec.decode(made)
                continue
            assert bytes(codec.decode(made)) == bytes(strict.decode(made)) == plain
            if any(flags) and "AND_VERIFY" in other.name:
                late = codec.decode(damaged)
                with pytest.raises(RuntimeError, match="^Checksum doesn't match"):
                    bytes(late)
                assert late.buffer_size == len(plain) == len(bytes(late))
                with pytest.raises(ow.CorruptError, match="Checksum"):
                    strict.decode(damaged)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_that_overlap_are_refused(name: str) -> None:
    """An output that overlaps another output or a source, and one Array for two results, raise ArgumentError before
    anything is written."""
    plain = content(3000)
    codec = nvcomp.Codec(algorithm=name)
    made = codec.encode(plain)
    most = codec.get_max_comp_buffer_size(plain)
    for work, source, need in ((codec.decode, bytes(made), 3000), (codec.encode, plain, most)):
        room = bytearray(2 * need)
        whole = memoryview(room)
        with pytest.raises(ow.ArgumentError, match="two outputs overlap"):
            work([source, source], out=[whole[:need], whole[need - 1 : 2 * need - 1]])
        assert not any(room)
        sources = [source, bytearray(source)]
        with pytest.raises(ow.ArgumentError, match="out overlaps the source"):
            work(sources, out=[memoryview(sources[1]), whole[:need]])
        assert sources[1] == source and not any(room)
        for few in (b"few", plain):  # the first Array would be resized, the second is large enough
            ours = codec.decode(codec.encode(few))
            with pytest.raises(ow.ArgumentError, match="two results have the same Array"):
                work([source, source], out=[ours, ours])
            assert bytes(ours) == few
        two = work([source, source], out=[whole[:need], whole[need:]])
        assert bytes(two[0]) == bytes(two[1]) == bytes(work(source))


def test_strides_are_a_tuple() -> None:
    """`strides` is a tuple, as in nvCOMP, even for dense and empty Arrays and for results. In the array interfaces it
    is None."""
    codec = nvcomp.Codec(algorithm="LZ4", data_type="<i4")
    for array, want in (
        (nvcomp.as_array(numpy.zeros((2, 3, 4), numpy.int16)), (24, 8, 2)),
        (nvcomp.as_array(b"abc"), (1,)),
        (nvcomp.as_array(numpy.zeros(0, numpy.int64)), (8,)),
        (nvcomp.as_array(numpy.float32(3)), ()),
        (codec.decode(codec.encode(bytes(64))), (4,)),
        (nvcomp.as_arrays(bytearray(9), [1], [3])[0], (1,)),
    ):
        assert array.strides == want and array.__array_interface__["strides"] is None
        assert array.__cuda_array_interface__["strides"] is None
        assert numpy.asarray(array).strides == want


def test_errors_for_nvcomps_streams_name_its_wheel() -> None:
    """nvCOMP's native and Cascaded streams, and those with a length prefix, are refused without nvCOMP. The error has
    the class for its kind and names nvCOMP's wheel."""
    if original.usable():
        pytest.skip("nvCOMP is installed and reads them")
    theirs = bytearray(bytes(nvcomp.Codec(algorithm="lz4").encode(content(1000))))
    theirs[:5] = b"\x01\x02\x03\x04\x06"
    raw, sized = nvcomp.BitstreamKind.RAW, nvcomp.BitstreamKind.WITH_UNCOMPRESSED_SIZE
    for codec, stream, kind in (
        (nvcomp.Codec(), theirs, ow.FormatError),
        (nvcomp.Codec(algorithm="LZ4"), theirs, ow.FormatError),
        (nvcomp.Codec(algorithm="Cascaded", bitstream_kind=raw), b"\0\0\0\x90" + bytes(20), ow.CorruptError),
        (nvcomp.Codec(algorithm="Snappy", bitstream_kind=sized), (5).to_bytes(8, "little") + bytes(20), ow.CorruptError),
    ):
        works = [codec.decode, lambda s, c=codec: c.decode([s])]
        if codec._bitstream != "with_size":  # the length is checked before the stream
            works += [codec.get_uncomp_buffer_size, codec.decompression_config]
        for work in works:
            with pytest.raises(kind, match=r"if nvCOMP wrote this.*nvidia-nvcomp-cu13"):
                work(stream)
    with pytest.raises(ow.FormatError) as error:
        nvcomp.Codec(ask_nvcomp=False).decode(theirs)
    assert "if nvCOMP wrote this" not in str(error.value)
    with pytest.raises(ow.CorruptError) as damaged:  # a damaged stream of ours
        nvcomp.Codec().decode(bytes(nvcomp.Codec(algorithm="lz4").encode(content(1000)))[:-200])
    assert "nvCOMP" not in str(damaged.value)


def test_versions_of_nvcomp_that_are_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of nvCOMP that is older than 5, or newer than the known ones, counts as missing, and the error says
    why."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for version, text in (("4.2.0", "too old"), ("7.0.1", "too new"), ("6.0.0", "no extension for this Python")):
        folder = tmp_path / f"nvidia_nvcomp_cu13-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-nvcomp-cu13\nVersion: {version}\n")
        assert original.backend() == f"nvcomp {version}" or text in original.backend()
        with pytest.raises(ow.NotSupportedError, match=text):
            nvcomp.Codec(algorithm="Bitcomp")
        (folder / "METADATA").unlink()
        folder.rmdir()


@pytest.mark.skipif(original._newest_wheel() is None, reason="nvCOMP's wheels are not installed")
@pytest.mark.parametrize("first", ["", "import nvidia.nvcomp", "import overwire.compat; overwire.compat.install('nvcomp')"])
def test_nvcomp_is_loaded_once(first: str, script: Any) -> None:
    """nvCOMP is loaded only once, whether a program imports it before or after overwire. A second copy would crash."""
    done = script(
        f"{first}\n"
        "from overwire.compat.nvcomp import original\n"
        "impl = original._load_codec('ANS')\n"
        "import nvidia.nvcomp\n"
        "assert original._load_codec('ANS') is impl and impl.Codec and nvidia.nvcomp.Codec\n"
        "print(impl.__version__)"
    )
    assert original._newest_wheel().version.startswith(done.stdout.strip()), done.stdout


@pytest.mark.skipif(original._newest_wheel() is not None, reason="nvCOMP is installed: bench/gpu/device_nvcomp.py uses it")
def test_the_script_for_real_nvcomp_works() -> None:
    """bench/gpu/device_nvcomp.py reports right and wrong cases. It needs a GPU, so here the drop-in takes the place of
    nvCOMP."""
    command = [sys.executable, str(ROOT / "bench/gpu/device_nvcomp.py"), "--json", "--module", "overwire.compat.nvcomp"]
    command += ["--sizes", "0,7,65537", "--only", "LZ4,ANS"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert (done.returncode, report["wrong"], len(report["results"]["LZ4"])) == (1, 1, 16), done.stdout + done.stderr
    assert "nvidia-nvcomp-cu13" in report["results"]["ANS"]["the process"]

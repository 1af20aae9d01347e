"""Tests that overwire applies every rule of the safetensors format as the original does.

``goldens/container/vectors.json`` holds small files with two verdicts, one by the ``safetensors`` package and one by
overwire. Go tests compare the parser with the second verdict. These tests compare the package with the first and the
built library with the second, so neither verdict can be wrong. Where the two differ, overwire is stricter, and STRICTER
gives the reason.
"""

import base64
import ctypes
import json
import pathlib

import pytest

VECTORS = json.loads(
    (pathlib.Path(__file__).parents[1] / "goldens" / "container" / "vectors.json").read_text()
)

# Files that the original reads and overwire refuses.
STRICTER = {
    "a name twice": "the README forbids it, and the name is ambiguous",
    "a name twice, once escaped": "the README forbids it, and the name is ambiguous",
    "a metadata key twice": "the README forbids it",
    "an ignored field twice": "the README forbids it",
    "a key twice in an ignored value": "the README forbids it",
    "an entry as an array": "only serde reads it as an object",
    "a dtype as an object": "only serde reads it as a string",
    "2^63 x 0": "sizes are signed 64-bit everywhere else",
    "rank 65": "no framework has such tensors, and the limit bounds the work",
}

ids = [v["name"] for v in VECTORS]


def engine():
    """Returns the built library, or skips with the reason."""
    try:
        from overwire import _verbs
    except ImportError as e:
        pytest.skip(f"overwire is not installed: {e}")
    try:
        _verbs.knobs()  # this loads _core
    except (ImportError, OSError) as e:
        pytest.skip(f"overwire._core is not built: {e}")
    return _verbs


@pytest.mark.parametrize("vector", VECTORS, ids=ids)
def test_the_package_gives_the_recorded_verdicts(vector):
    """The safetensors package accepts or refuses each file as the vectors say."""
    safetensors = pytest.importorskip("safetensors", minversion="0.8")
    try:
        safetensors.deserialize(base64.b64decode(vector["file"]))
        reads = True
    except safetensors.SafetensorError:
        reads = False
    assert reads == vector["reference"]


def test_overwire_is_never_more_lenient():
    """overwire refuses all files that the original refuses. STRICTER lists the other files that it refuses."""
    differ = {v["name"] for v in VECTORS if v["reference"] != (v["ours"] == "")}
    assert differ == set(STRICTER)


@pytest.mark.parametrize("vector", VECTORS, ids=ids)
def test_overwire_gives_the_recorded_verdicts(vector, tmp_path):
    """The built library accepts or refuses each file as the vectors say, with the error class and the file's name."""
    eng = engine()
    path = tmp_path / "model.safetensors"
    path.write_bytes(base64.b64decode(vector["file"]))
    spec = {"uris": [str(path)]}
    if vector["ours"] == "":
        eng.open(spec)
        return
    with pytest.raises(Exception) as caught:
        eng.open(spec)
    assert type(caught.value).__name__ == vector["ours"]
    assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("vector", VECTORS, ids=ids)
def test_switch(vector, tmp_path):
    """The public API is strict by default, and accepts the listed files with `lenient=True`."""
    engine()
    import overwire as ow

    path = tmp_path / "model.safetensors"
    path.write_bytes(base64.b64decode(vector["file"]))
    for lenient, reads in ((False, vector["ours"] == ""), (True, vector["lenient"])):
        if reads:
            names = list(ow.load_file(path, framework="bytes", lenient=lenient))
            with ow.safe_open(path, "bytes", lenient=lenient) as f:
                assert f.offset_keys() == names
                meta = f.metadata() or {}
                assert all(isinstance(text, str) for text in (*meta, *meta.values()))
            assert [t.name for t in ow.plan(path, framework="bytes", lenient=lenient).tensors] == names
            continue
        with pytest.raises((ow.FormatError, ow.CorruptError)) as caught:
            ow.load_file(path, framework="bytes", lenient=lenient)
        assert "model.safetensors" in str(caught.value)
    if vector["lenient"] and vector["name"] == "a name twice":
        assert bytes(ow.load_file(path, framework="bytes", lenient=True)["a"]) == b"abcd"


def test_writers_order():
    """Both writers put tensors in the same order, so overwire's tensors are also aligned.

    The order is by the dtype codes in docs/format.md section 5, largest first, and then by name.
    """
    safetensors = pytest.importorskip("safetensors", minversion="0.8")
    codes = ("BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ "
             "I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64").split()
    serial = {
        "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32",
        "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
        "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E5M2": "float8_e5m2",
        "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    }
    size = {
        "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
        "C64": 8, "F64": 8, "I64": 8, "U64": 8,
    }
    data = ctypes.create_string_buffer(64)
    try:
        out = safetensors.serialize({
            prefix + name: safetensors.TensorSpec(
                dtype=dtype, shape=[8], data_ptr=ctypes.addressof(data), data_len=8 * size.get(name, 1))
            for name, dtype in serial.items() for prefix in "ba"
        })
    except safetensors.SafetensorError as e:
        pytest.skip(f"this release of safetensors cannot write every dtype: {e}")
    n = int.from_bytes(out[:8], "little")
    header = json.loads(out[8 : 8 + n])
    got = list(header)
    by_code = sorted(header, key=lambda k: (-codes.index(header[k]["dtype"]), k))
    assert got == by_code

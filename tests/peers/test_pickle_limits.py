"""Tests that without trust=True a bundle's pickle cannot reach outside its blobs, change checked data, or take more
memory and time than its size justifies.

Each case runs overwire's pickle interpreter on blobs in memory. Cases that crashed it also run in another process.
"""

from __future__ import annotations

import collections
import functools
import pickle
import struct
import warnings
from pathlib import Path
from typing import Any

import overwire as ow
import pytest
import warm
from overwire.bundles import unpickling
from pickle_cases import named, push
from pickle_fuzz import Fenced

REFUSED = (ow.UntrustedPickleError, ow.FormatError)
V2 = named("torch._utils", "_rebuild_tensor_v2")
DEFAULT = named("collections", "defaultdict")


@pytest.fixture(scope="module")
def fenced() -> Fenced:
    return Fenced(4, 1 << 14)


def load(body: bytes, fenced: Fenced, *blobs: bytes) -> Any:
    fenced.lay(list(blobs), True)
    return unpickling.load(b"\x80\x05" + body + b".", fenced, "x.pkl", False)


def tensor(blob: int, dtype: str, nbytes: int, size: tuple[int, ...], stride: tuple[int, ...], at: int = 0) -> bytes:
    storage = push(("storage", blob, dtype, nbytes)) + b"Q"
    return V2 + b"(" + storage + push(at) + push(size) + push(stride) + b"\x89}tR"


def array(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, spec: Any = "|u1", size: int = 4096) -> bytes:
    return push(("array", 0, spec, shape, strides, offset, True, 0, size)) + b"Q"


# -- memory


def test_an_array_with_strides_that_overflow_is_refused(fenced: Fenced) -> None:
    # numpy computes the extent modulo 2**64, where 2**60 steps of 16 are 0.
    wraps = [
        ((1 << 60) + 1, 16),
        ((1 << 61) + 1, 8),
        ((1 << 62) + 1, 4),
        ((1 << 63) + 1, 2),
        ((1 << 59) + 1, 32),
        ((1 << 60) + 1, -16),
        ((1 << 63), 1),
        (1 << 64, 1),
        (2, 1 << 64),
        (2, 1 << 63),
        (2, -(1 << 63)),
        (3, 1 << 63),
    ]
    for d, s in wraps:
        for shape, strides in (((d,), (s,)), ((2, d), (1, s)), ((d, 1), (s, 0)), ((1, d, 1), (5, s, 7))):
            with pytest.raises(ow.FormatError):
                load(array(shape, strides), fenced, bytes(4096))
    # Only the sum overflows, not its parts.
    with pytest.raises(ow.FormatError):
        load(array(((1 << 61) + 1,) * 4, (2, 2, 2, 2)), fenced, bytes(4096))


def test_extents_of_arrays_in_both_directions(fenced: Fenced) -> None:
    """An array loads only if its first and last elements are inside its blob, whatever the signs of its strides."""
    inside = [
        ((4096,), (1,), 0),
        ((4096,), (-1,), 4095),
        ((2, 3), (-3, 1), 3),
        ((1 << 40,), (0,), 4095),
        ((), (), 4095),
        ((0, 9), (99, 9), 4096),
        ((2, 2), (4095, -0), 0),
        ((3, 3), (1, -1), 2),
    ]
    outside = [
        ((4097,), (1,), 0),
        ((4096,), (-1,), 4094),
        ((2,), (-1,), 0),
        ((2, 3), (-3, 1), 2),
        ((1,), (1,), 4096),
        ((1,), (1,), -1),
        ((0,), (1,), 4097),
        ((2, 2), (4095, 1), 0),
        ((3, 3), (1, -1), 1),
        ((1 << 40,), (0,), 4096),
        ((1,) * 65, (1,) * 65, 0),
    ]
    for shape, strides, offset in inside:
        assert load(array(shape, strides, offset), fenced, bytes(4096)).shape == shape
    for shape, strides, offset in outside:
        with pytest.raises(ow.FormatError):
            load(array(shape, strides, offset), fenced, bytes(4096))


def test_sizes_that_torch_cannot_multiply_are_refused(fenced: Fenced) -> None:
    big = 1 << 62
    for size, stride in [
        ((0, big, big), (1, 1, 1)),
        ((1 << 40, 1 << 40), (0, 0)),
        ((big,), (0,)),
        ((2, 2), (big - 1, big - 1)),
        ((0, 4), (1, big)),
    ]:
        with pytest.raises(ow.FormatError):
            load(tensor(0, "float32", 16, size, stride), fenced, bytes(16))
        meta = (
            named("torch._utils", "_rebuild_meta_tensor_no_storage")
            + b"("
            + named("torch", "float32")
            + push(size)
            + push(stride)
            + b"\x89tR"
        )
        with pytest.raises(ow.FormatError):
            load(meta, fenced)
    with pytest.raises(ow.FormatError):  # an empty tensor with an offset outside its storage
        load(tensor(0, "float32", 16, (0,), (1,), 1 << 61), fenced, bytes(16))


# -- checked data cannot change


def sparse(layout: str, parts: bytes, size: tuple[int, ...]) -> bytes:
    coded = named("torch.serialization", "_get_layout") + push((f"torch.{layout}",)) + b"R"
    return named("torch._utils", "_rebuild_sparse_tensor") + b"(" + coded + b"(" + parts + named("torch", "Size") + push((size,)) + b"RttR"


def test_items_can_be_set_only_in_dicts_and_added_only_to_sequences(fenced: Fenced) -> None:
    things = {
        "a tensor": tensor(0, "int64", 32, (4,), (1,)),
        "an array": array((4,), (1,), size=32),
        "a storage": push(("storage", 0, "int64", 32)) + b"Q",
        "a bytearray": b"\x96" + struct.pack("<Q", 3) + b"abc",
        "a module": named("torch.nn.modules.container", "Sequential") + b")\x81",
        "a class": named("builtins", "dict"),
        "a guard": V2,
        "a frozenset": b"(\x91",
        "text": push("x"),
        "an int": push(3),
    }
    ops = {"SETITEM": b"K\x00K\x01s", "SETITEMS": b"(K\x00K\x01u", "APPEND": b"K\x00a", "APPENDS": b"(K\x00e", "ADDITEMS": b"(K\x00\x90"}
    empty = {"SETITEM": "}", "APPEND": "]", "ADDITEMS": "\x8f"}
    for thing in things.values():
        for op in ops.values():
            with pytest.raises(ow.UntrustedPickleError, match="allow-list"):
                load(thing + op, fenced, bytes(32))
    for op, opcode in ops.items():
        for good, other in empty.items():
            body = other.encode("latin-1") + opcode
            if op.startswith(good) or op[:-1].startswith(good):
                load(body, fenced)
            else:
                with pytest.raises(ow.UntrustedPickleError):
                    load(body, fenced)
    assert load(named("collections", "OrderedDict") + b")RK\x01K\x02s", fenced) == {1: 2}
    assert load(named("collections", "deque") + b")R(K\x01K\x02e", fenced) == collections.deque([1, 2])


def test_sparse_tensors_have_their_own_indices(fenced: Fenced) -> None:
    warnings.simplefilter("ignore")
    index, values = tensor(0, "int64", 32, (1, 4), (4, 1)), tensor(1, "float32", 16, (4,), (1,))
    whole = tensor(0, "int64", 32, (4,), (1,))
    cases = {"sparse_coo": (struct.pack("<4q", 0, 1, 2, 3), index + values, (4,), whole)}
    for layout in ("sparse_csr", "sparse_csc"):
        parts = tensor(0, "int64", 64, (4,), (1,)) + tensor(0, "int64", 64, (4,), (1,), 4) + values
        cases[layout] = (struct.pack("<8q", 0, 2, 3, 4, 0, 1, 2, 1), parts, (3, 3), tensor(0, "int64", 64, (8,), (1,)))
    for layout in ("sparse_bsr", "sparse_bsc"):
        parts = tensor(0, "int64", 64, (4,), (1,)) + tensor(0, "int64", 64, (4,), (1,), 4) + tensor(1, "float32", 16, (4, 1, 1), (1, 1, 1))
        cases[layout] = (struct.pack("<8q", 0, 2, 3, 4, 0, 1, 2, 1), parts, (3, 3), tensor(0, "int64", 64, (8,), (1,)))
    for layout, (blob, parts, size, view) in cases.items():
        made, dense = load(sparse(layout, parts, size) + view + b"\x86", fenced, blob, struct.pack("<4f", 1, 2, 3, 4))
        before = made.to_dense()
        dense.fill_(1 << 36)
        assert made.to_dense().equal(before), layout
        # Two sparse tensors with the same indices share them.
        pair = sparse(layout, parts, size) * 2 + b"\x86"
        one, two = load(pair, fenced, blob, struct.pack("<4f", 1, 2, 3, 4))
        of = {"sparse_coo": "_indices", "sparse_csr": "col_indices", "sparse_bsr": "col_indices"}.get(layout, "row_indices")
        assert getattr(one, of)().data_ptr() == getattr(two, of)().data_ptr()
        for bad in (1 << 36, -1, 9):
            with pytest.raises(ow.FormatError):
                load(sparse(layout, parts, size), fenced, blob[:-8] + struct.pack("<q", bad), bytes(16))


def test_the_stride_of_a_single_entry_is_not_used(fenced: Fenced) -> None:
    # torch takes the first stride of the values for the length of a row.
    warnings.simplefilter("ignore")
    for stride in ((1 << 32, 3), (1 << 61, 1), (64, 64), (0, 0)):
        parts = tensor(0, "int64", 16, (2, 1), (1, 1 << 40)) + tensor(1, "int32", 16, (1, 1), stride)
        made = load(sparse("sparse_coo", parts, (3, 5, 1)), fenced, bytes(16), struct.pack("<4i", 7, 0, 0, 0))
        assert made.to_dense().sum() == 7 and (made + made).to_dense().sum() == 14
        assert made._values().stride() == (1, 1) and made._indices().stride() == (1, 1)


def test_blocks_without_a_size_are_refused(fenced: Fenced) -> None:
    # torch divides by these sizes, which would end the process.
    for layout in ("sparse_bsr", "sparse_bsc"):
        for block, size in (((0, 0), (2, 2)), ((0, 1), (2, 2)), ((1, 0), (2, 2)), ((0, 0), (0, 0))):
            parts = (
                tensor(0, "int64", 24, (3,), (1,)) + tensor(0, "int64", 24, (0,), (1,)) + tensor(1, "float32", 16, (0, *block), (1, 1, 1))
            )
            with pytest.raises(ow.FormatError):
                load(sparse(layout, parts, size), fenced, bytes(24), bytes(16))


def test_rows_that_lead_out_of_a_sparse_tensor_are_refused(fenced: Fenced) -> None:
    # torch's own check reads the plain indices to which the rows point before it checks the rows.
    far = 1 << 40
    for rows in ((0, far, 0), (0, -far, 0), (0, 1, 0), (far, far, 0), (0, 0, far), (0, -(1 << 63), 0)):
        for layout, shape in (("sparse_csr", (0,)), ("sparse_csc", (0,)), ("sparse_bsr", (0, 4, 1)), ("sparse_bsc", (0, 4, 1))):
            stride = (1,) if len(shape) == 1 else (4, 1, 1)
            parts = tensor(0, "int64", 24, (3,), (1,)) + tensor(1, "int64", 8, (0,), (1,)) + tensor(2, "float64", 32, shape, stride)
            with pytest.raises(ow.FormatError):
                load(sparse(layout, parts, (8, 4)), fenced, struct.pack("<3q", *rows), bytes(8), bytes(32))


def test_quantised_tensors_have_their_own_parameters(fenced: Fenced) -> None:
    scales, zeros = tensor(0, "float64", 16, (2,), (1,)), tensor(1, "int64", 16, (2,), (1,))
    storage = push(("storage", 2, "quint8", 6)) + b"Q"
    blobs = (struct.pack("<2d", 1, 2), bytes(16), bytes(range(6)))

    def quantised(scales: bytes = scales, axis: int = 0, size: tuple[int, ...] = (2, 3)) -> bytes:
        params = b"(" + named("torch", "per_channel_affine") + scales + zeros + push(axis) + b"t"
        stride = tuple(push_stride(size))
        return named("torch._utils", "_rebuild_qtensor") + b"(" + storage + push(0) + push(size) + push(stride) + params + b"\x89}tR"

    def push_stride(size: tuple[int, ...]) -> list[int]:
        out = [1]
        for d in size[:0:-1]:
            out.insert(0, out[0] * d)
        return out

    made, dense = load(quantised() + scales + b"\x86", fenced, *blobs)
    dense.fill_(9)
    assert made.dequantize().tolist() == [[0, 1, 2], [6, 8, 10]]
    for bad in (
        quantised(axis=1),
        quantised(axis=-1),
        quantised(axis=1 << 40),
        quantised(tensor(0, "float64", 16, (1,), (1,))),
        quantised(size=(1, 3)),
        quantised(tensor(0, "int64", 16, (2,), (1,))),
        quantised(push((1.0, 2.0))),
        quantised(size=(3, 2)),
    ):
        with pytest.raises(ow.FormatError):
            load(bad, fenced, *blobs)
    # A large size over few bytes allocates no memory.
    params = b"(" + named("torch", "per_tensor_affine") + push(1.0) + push(0) + b"t"
    wide = named("torch._utils", "_rebuild_qtensor") + b"(" + storage + push(0) + push((1 << 40,)) + push((0,)) + params + b"\x89}tR"
    assert load(wide, fenced, *blobs).shape == (1 << 40,)


# -- states


def test_a_state_only_sets_attributes(fenced: Fenced) -> None:
    ordered = named("collections", "OrderedDict") + b")R"
    linear = named("torch.nn.modules.linear", "Linear") + b")\x81"
    parameter = named("torch._utils", "_rebuild_parameter_with_state") + b"(" + tensor(0, "float32", 16, (4,), (1,)) + b"\x89}%btR"
    tensor_class = named("torch", "Tensor")
    for name in (
        "__setstate__",
        "__class__",
        "__dict__",
        "__reduce__",
        "__len__",
        "__init__",
        "__x",
        "update",
        "items",
        "forward",
        "append",
        "extend",
        "add",
        "_call_impl",
        "register_hook",
        "state_dict",
        "data_ptr",
    ):
        state = b"}" + push(name) + tensor_class + b"s"
        for target in (ordered + state + b"b", linear + state + b"b", parameter % state):
            kind = {ordered: collections.OrderedDict}.get(target[: len(ordered)])
            if name.startswith("__") or kind is not None and hasattr(kind, name):
                with pytest.raises(ow.UntrustedPickleError):
                    load(target, fenced, bytes(16))
    # The first state would set __setstate__ to torch.Tensor, so that the second would call torch.Tensor(123).
    with pytest.raises(ow.UntrustedPickleError):
        load(ordered + b"}" + push("__setstate__") + tensor_class + b"sbK\x7bb", fenced)
    for state in (push(123), push((None, {"x": 1})), push(({"x": 1}, {"y": 1})), push([1]), b"}K\x01K\x02s"):
        with pytest.raises(REFUSED):
            load(ordered + state + b"b", fenced)
    for parts in ("_modules", "_parameters", "_buffers"):
        for held in (
            push([1]),
            push({"x": 1}),
            b"}" + push("x") + tensor_class + b"s",
            b"}" + push("__deepcopy__") + linear + b"s",
            b"}K\x01Ns",
        ):
            with pytest.raises(REFUSED):
                load(linear + b"}" + push(parts) + held + b"sb", fenced)
    assert load(ordered + push({"_metadata": 1}) + b"b", fenced)._metadata == 1


def test_an_rnn_collects_no_methods(fenced: Fenced) -> None:
    def rnn(names: Any, rows: Any) -> bytes:
        parts: dict[str, Any] = {"_parameters": {"w": None}, "_buffers": {}, "_modules": {}}
        state = {"_flat_weights_names": names, "_all_weights": rows, "proj_size": 0, "_flat_weights": [None], **parts}
        return named("torch.nn.modules.rnn", "LSTM") + b")\x81" + push(state) + b"b"

    assert load(rnn(["w"], [["w"]]), fenced)._flat_weights == [None]
    for names, rows in (
        (["forward"], [["w"]]),
        (["w"], [["__reduce__"]]),
        ([3], [["w"]]),
        (["w"], []),
        (["w"], [3]),
        (3, [["w"]]),
        (["w"], "ab"),
    ):
        with pytest.raises(ow.FormatError):
            load(rnn(names, rows), fenced)


NAMED, MADE = {"_all_weights": [["w"]]}, {"all_weights": [[0]]}

@pytest.mark.parametrize(
    "state",
    [{**NAMED, **MADE, "num_layers": 10**12}, {**NAMED, "all_weights": [["w"]], "num_layers": 1}, {**MADE, "num_layers": 10**12},
     {**NAMED, "num_layers": 10**12}, {**NAMED, "num_layers": 1.0}],
)  # fmt: skip
def test_an_rnn_has_only_the_layers_in_its_pickle(fenced: Fenced, state: dict[str, Any]) -> None:
    """A number in the pickle cannot decide how many rows of names torch makes for an RNN."""
    parts: dict[str, Any] = {"_parameters": {"w": None}, "_buffers": {}, "_modules": {}, "bias": True, "proj_size": 0}
    data = push({"bidirectional": False, "_flat_weights_names": ["w"], "_flat_weights": [None], **parts, **state})
    data = named("torch.nn.modules.rnn", "LSTM") + b")\x81" + data + b"b"
    with pytest.raises(ow.FormatError, match="weights of an RNN"):
        load(data, fenced)


# -- memory, time and depth


@functools.cache
def bombs() -> dict[str, bytes]:
    """Returns, by name, small pickles that would need much memory or time."""
    big = push(1 << 26)
    ranged = named("builtins", "range") + b"(" + big + b"tR"
    doubled = b"K\x01" + b"".join(b"\x94h" + bytes((n,)) + b"\x86" for n in range(60))
    tower = b")" + b"\x85" * 300_000
    made = {
        f"{name} of a range": named("builtins", name) + ranged + b"\x85R"
        for name in ("list", "set", "tuple", "frozenset", "bytearray", "bytes")
    }
    made |= {
        "deque of a range": named("collections", "deque") + ranged + b"\x85R",
        "Size of a range": named("torch", "Size") + ranged + b"\x85R",
        "bytearray": named("builtins", "bytearray") + push((2 << 30,)) + b"R",
        "bytes": named("builtins", "bytes") + push((2 << 30,)) + b"R",
        "int of a Decimal": named("builtins", "int") + named("decimal", "Decimal") + push(("1e99999999",)) + b"R\x85R",
        "int of a text": named("builtins", "int") + push(("9" * 4000, 36)) + b"R",
        "wide array": named("overwire.rebuild", "array") + push(("<U300000000", (1,), False, ["x"])) + b"R",
        "wide array of objects": named("overwire.rebuild", "array")
        + push(([("o", "O", ()), ("s", "<U300000000", ())], (1,), False, [(1, "x")]))
        + b"R",
        "wide empty array": push(("array", -1, "<U300000000", (0,), (4,), 0, True, 0, 0)) + b"Q",
        "wide field": named("overwire.rebuild", "array")
        + push(([("o", "O", ()), ("s", "|u1", (1 << 31,))], (1,), False, [(1, "x")]))
        + b"R",
        "tower as a key": b"}" + tower + b"Ns",
        "tower in a set": b"\x8f(" + tower + b"\x90",
        "tower in a frozenset": b"(" + tower + b"\x91",
        "tower of frozensets as a key": b"}(" + b"(" * 5000 + b"\x91" * 5000 + b"Nu",
        "doubled key": b"}" + doubled + b"Ns",
        "doubled in a set": b"\x8f(" + doubled + b"\x90",
        "doubled dtype": named("overwire.rebuild", "dtype")
        + b"("
        + push("|u1")
        + b"".join(b"\x940](" + b"".join(push(f"f{i}") + b"h" + bytes((n,)) + b")\x87" for i in (0, 1)) + b"e" for n in range(28))
        + b"tR",
        "dtype of itself": named("overwire.rebuild", "dtype") + b"(]\x94(" + push("a") + b"h\x00)\x87etR",
        "defaultdicts": b"".join(DEFAULT + b")RK\x01" for _ in range(100_000)) + b"N" + b"s" * 100_000,
        "slices": named("builtins", "slice") + b"\x94" + b"h\x00" * 100_000 + b"N" + b"\x85R" * 100_000 + b"\x85R",
        "arrays of objects": named("overwire.rebuild", "array") + b"\x940" + b"h\x00("
        b"\x8c\x01O"
        b"K\x01\x85\x89]" * 60_000 + b"N" + b"atR" * 60_000,
        "same hash": b"}(" + b"".join(push(n * ((1 << 61) - 1)) + b"N" for n in range(2000)) + b"u",
        "same hash in a set": b"\x8f(" + b"".join(push(n * ((1 << 61) - 1)) for n in range(2000)) + b"\x90",
        "huge key": b"\x8b" + struct.pack("<i", 1 << 20) + b"\x01" * (1 << 20) + b"\x94" + b"}(" + b"h\x00N" * 1000 + b"u",
        "long key": push((0,) * 20000) + b"\x94" + b"}(" + b"h\x00N" * 20000 + b"u",
        "range of huge numbers": b"\x8b"
        + struct.pack("<i", 1 << 17)
        + b"\x01" * (1 << 17)
        + b"\x94"
        + named("builtins", "range")
        + b"K\x00h\x00h\x00\x87R",
        "many states": b"}\x94("
        + b"".join(push(f"k{n}") + b"N" for n in range(2000))
        + b"u"
        + (named("collections", "OrderedDict") + b")Rh\x00b0") * 2000,
        "many sizes": push((0,) * 20000) + b"\x94" + (named("torch", "Size") + b"h\x00\x85R0") * 4000,
        "many scalars": push("|S65000")
        + b"\x94"
        + b"B"
        + struct.pack("<I", 65000)
        + bytes(65000)
        + b"\x94"
        + (named("overwire.rebuild", "scalar") + b"h\x00h\x01\x86R0") * 4000,
        "empty sparse entries": sparse(
            "sparse_coo", tensor(0, "int64", 8, (0, 1 << 50), (0, 0)) + tensor(0, "float32", 8, (1 << 50,), (0,)), ()
        ),
        "expanded indices": sparse(
            "sparse_coo", tensor(0, "int64", 8, (1, 1 << 50), (0, 0)) + tensor(0, "float32", 8, (1 << 50,), (0,)), (1,)
        ),
        "from type of from type": named("torch._tensor", "_rebuild_from_type_v2") + b"\x94h\x00" * 5 + b")tR",
    }
    for name, code in {"BYTEARRAY8": b"\x96", "BINBYTES8": b"\x8e", "BINUNICODE8": b"\x8d", "FRAME": b"\x95"}.items():
        for size in (5, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1):
            made[f"{name} of {size}"] = code + struct.pack("<Q", size) + b"abc"
    for name, code in {"BINBYTES": b"B", "BINUNICODE": b"X", "LONG4": b"\x8b"}.items():
        for size in (5, (1 << 31) - 1, (1 << 32) - 1):
            made[f"{name} of {size}"] = code + struct.pack("<I", size) + b"abc"
    return made


def drop_bombs() -> None:
    """Loads each bomb within 2 GiB of memory, and prints its name and the class of its error."""
    import resource

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fenced = Fenced(4, 1 << 14)
    load(tensor(0, "int64", 8, (1,), (1,)), fenced, bytes(8))
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, body in bombs().items():
        print(name, end=": ", flush=True)
        try:
            load(body, fenced, bytes(8))
            print("loaded", flush=True)
        except ow.OverwireError as error:
            print(type(error).__name__, flush=True)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin
        assert grown < 1 << 20, (name, grown)
    # The objects are built from the outside in: each is empty when it is stored in the previous one.
    for kind in (DEFAULT, named("collections", "OrderedDict")):
        body = (
            b"]"
            + kind
            + b"\x94"
            + b")R\x94a"
            + b"".join(b"h\x00)R\x940j" + struct.pack("<I", n) + b"K\x01j" + struct.pack("<I", n + 1) + b"s0" for n in range(1, 50_000))
        )
        try:
            load(body, fenced)
            print("outside in: loaded", flush=True)
        except ow.OverwireError as error:
            print(f"outside in: {type(error).__name__}", flush=True)


def test_small_pickles_need_little_memory_and_time() -> None:
    """Small pickles that would need much memory or time are refused. Only a hang can exceed the time limit."""
    done = warm.run(["-c", "import test_pickle_limits as t; t.drop_bombs()"], cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    outcomes = dict(line.rsplit(": ", 1) for line in done.stdout.splitlines())
    assert outcomes.keys() >= bombs().keys() | {"outside in"}
    wrong = {name: outcome for name, outcome in outcomes.items() if outcome not in ("UntrustedPickleError", "FormatError")}
    # Python frees ordered dicts without recursion.
    assert set(wrong) <= {"outside in"}, wrong


def test_deeply_nested_valid_objects_load(fenced: Fenced) -> None:
    deep: Any = None
    for _ in range(60):
        deep = [{"x": (deep,)}]
    tree: Any = collections.defaultdict(list)
    for _ in range(30):
        tree = collections.defaultdict(list, {"x": tree, "y": slice(1, 2)})
    parent: dict[str, Any] = {"children": []}
    parent["children"] += [{"parent": parent, "n": n} for n in range(2000)]
    keys = {((1, 2), ("a", frozenset({3}))): 1, 1 << 64: 2, 2.5: 3, None: 4, b"x": 5, -1: 6, -2: 7, (1 << 61) - 1: 8, 0: 9}
    for value in (deep, tree, keys, {(n, str(n)): {n} for n in range(5000)}, [1 << 4000, -1 << 9000]):
        data = pickle.dumps(value, 5)
        assert pickle.dumps(unpickling.load(data, fenced, "x", False), 5) == data
    again = unpickling.load(pickle.dumps(parent, 5), fenced, "x", False)
    assert all(child["parent"] is again for child in again["children"])


def test_errors_have_the_offset(fenced: Fenced) -> None:
    with pytest.raises(ow.FormatError, match=r"unpickle x\.pkl: the pickle is truncated \(at byte \d+\)") as caught:
        load(b"\x8e" + struct.pack("<Q", 1 << 40), fenced)
    assert caught.value.source == "x.pkl" and caught.value.offset is not None
    # The message does not contain an endless key.
    doubled = b"K\x01" + b"".join(b"\x94h" + bytes((n,)) + b"\x86" for n in range(60))
    with pytest.raises(REFUSED) as refused:
        load(named("torch.serialization", "_get_layout") + doubled + b"\x85R", fenced)
    assert len(str(refused.value)) < 400


def test_towers_that_python_frees_without_recursion_load(fenced: Fenced) -> None:
    ordered, module = named("collections", "OrderedDict"), named("torch.nn.modules.container", "Sequential")
    count = 60_000
    towers = {
        "list": b"]" * count + b"N" + b"a" * count,
        "tuple": b"N" + b"\x85" * count,
        "dict": b"}K\x01" * count + b"N" + b"s" * count,
        "OrderedDict": ordered + b"\x94" + b"h\x00)RK\x01" * count + b"N" + b"s" * count,
        "deque": named("collections", "deque") + b"\x94" + b"h\x00)R" * count + b"N" + b"a" * count,
        "attributes": ordered + b"\x94" + b"h\x00)R}\x8c\x01x" * count + b"N" + b"sb" * count,
        "modules": module + b"\x94" + b"h\x00)\x81}\x8c\x01x" * count + b"N" + b"sb" * count,
        "frozensets": b"(" * count + b"\x91" * count,
    }
    padding = b"B" + struct.pack("<I", 1 << 22) + bytes(1 << 22) + b"0"  # makes the pickle large enough for all modules
    for name, body in towers.items():
        if name == "frozensets":  # each frozenset is a key of the next
            with pytest.raises(ow.UntrustedPickleError):
                load(padding + body, fenced)
        else:
            load(padding + body, fenced)  # this also frees the object
    # If a tower ends halfway, its finished part is freed as well.
    for body in towers.values():
        with pytest.raises(REFUSED):
            load(body[: -count // 2] + b"\xff", fenced)


def test_a_tensor_that_crashes_torch_is_refused(fenced: Fenced) -> None:
    # The tensor is quantised to 32 bits with floats as zero points. torch has no kernel for this.
    floats = tensor(0, "float32", 8, (2,), (1,))
    params = b"(" + named("torch", "per_channel_affine") + floats + floats + b"K\x00t"
    for dtype in ("qint32", "quint8"):
        storage = push(("storage", 1, dtype, 8)) + b"Q"
        body = named("torch._utils", "_rebuild_qtensor") + b"(" + storage + push(0) + push((2,)) + push((1,)) + params + b"\x89}tR"
        if dtype == "qint32":
            with pytest.raises(ow.FormatError):
                load(body, fenced, bytes(8), bytes(8))
        else:
            assert load(body, fenced, bytes(8), bytes(8)).dequantize().tolist() == [0, 0]


def test_looking_up_names_imports_nothing(fenced: Fenced) -> None:
    """torch imports some of its modules when their names are looked up. A pickle cannot cause such an import."""
    source = """
import sys, torch, numpy, overwire
from overwire.bundles import unpickling
from test_pickle_limits import named, push
class Blobs:
    def storage(self, blob, size):
        return torch.UntypedStorage(size)
def load(body):
    try:
        unpickling.load(b"\\x80\\x05" + body + b".", Blobs(), "x", False)
    except overwire.OverwireError:
        pass
load(named("torch", "nothing"))
before = set(sys.modules)
for name in torch._lazy_modules:
    load(named("torch", name))
    load(named("torch._utils", "torch." + name))
    load(push(("storage", 0, name, 8)) + b"Q")
    load(named("torch.serialization", "_get_layout") + push(("torch." + name,)) + b"R")
    load(named("torch." + name, "x"))
assert torch._lazy_modules
print("NEW", sorted(set(sys.modules) - before))
"""
    done = warm.run(["-c", source], cwd=Path(__file__).parent)
    assert done.stdout == "NEW []\n", done.stdout + done.stderr


def test_plain_data_contains_no_globals() -> None:
    value = [{"a": (1, 2.5, None, True), "b": b"x"}, [[0], {3}, frozenset({4})]]
    assert unpickling.load_plain(pickle.dumps(value), "x") == value
    bad = [
        pickle.dumps(collections.OrderedDict()),
        pickle.dumps(Path),
        b"\x80\x05K\x01Q.",
        b"\x80\x05K\x01)\x81.",
        b"\x80\x05K\x01)R.",
        bombs()["tower as a key"] + b".",
    ]
    for data in bad:
        with pytest.raises(ow.UntrustedPickleError):
            unpickling.load_plain(data, "x")
    for name, body in bombs().items():
        with pytest.raises(REFUSED):
            unpickling.load_plain(b"\x80\x05" + body + b".", name)

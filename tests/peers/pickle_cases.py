"""Makes random hostile pickles and their blobs for `pickle_fuzz`.

A pickle is changed and recombined output of overwire's pickler, or a program that calls everything on the allow-list
with nearly right arguments.
"""

from __future__ import annotations

import math
import pickle
import random
import struct
from typing import Any

from pickle_seeds import seeds

NUMBERS = (
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    10,
    16,
    31,
    63,
    64,
    65,
    100,
    255,
    256,
    400,
    4096,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 60) + 1,
    1 << 61,
    (1 << 61) - 1,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    1 << 64,
    1 << 70,
    10**40,
    -1,
    -2,
    -3,
    -4,
    -8,
    -16,
    -400,
    -(1 << 31),
    -(1 << 60),
    -(1 << 63),
    -(1 << 64),
)
SMALL = (0, 1, 1, 2, 2, 3, 4, 5, 8, 10)


def push(value: Any) -> bytes:
    """Returns the opcodes that push a plain value, without the memo."""
    kind = type(value)
    if value is None or kind is bool:
        return b"N" if value is None else b"\x88" if value else b"\x89"
    if kind is int:
        if -(1 << 31) <= value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        data = pickle.encode_long(value)
        return b"\x8a" + bytes((len(data),)) + data
    if kind is float:
        return b"G" + struct.pack(">d", value)
    if kind is str:
        return text(value)
    if kind is bytes:
        return b"C" + bytes((len(value),)) + value
    parts = b"".join(push(part) for part in (value if kind is not dict else [x for pair in value.items() for x in pair]))
    return {tuple: b"(%bt", list: b"](%be", dict: b"}(%bu"}[kind] % parts


def text(s: str) -> bytes:
    data = s.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def _of(module: str, names: str) -> list[tuple[str, str]]:
    return [(module, name) for name in names.split()]


NAMES = [
    *_of("builtins", "bool bytearray bytes complex dict float frozenset int list object range set slice str tuple"),
    *_of("collections", "OrderedDict defaultdict deque"),
    *_of("datetime", "date datetime time timedelta timezone"),
    *_of("decimal", "Decimal"),
    *_of("overwire.rebuild", "array dtype scalar"),
    *_of("numpy", "float32 bool_"),
    *_of("torch._utils", "_rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_qtensor _rebuild_sparse_tensor"),
    *_of("torch._utils", "_rebuild_meta_tensor_no_storage _rebuild_parameter _rebuild_parameter_with_state"),
    *_of("torch", "Size device Tensor float32 int64 sparse_coo sparse_csr sparse_bsc strided relu channels_last"),
    *_of("torch", "per_channel_affine per_tensor_affine"),
    *_of("torch.serialization", "_get_layout"),
    *_of("torch._tensor", "_rebuild_from_type_v2"),
    *_of("torch.nn.parameter", "Parameter"),
    *_of("torch.nn.modules.linear", "Linear"),
    *_of("torch.nn.modules.rnn", "LSTM"),
    *_of("torch.nn.modules.container", "Sequential"),
]
DTYPES = (
    "float32 int64 uint8 bool complex64 float64 int32 qint8 quint8 qint32 bfloat16 float8_e4m3fn quint4x2 uint4 bits8 "
    "float4_e2m1fn_x2 complex32 uint64 int1"
).split() + ["", "Tensor", "load"]
SPECS: list[Any] = (
    "<f4 |u1 <i8 |b1 <U1 |S3 <M8[ns] <m8[25s] |V5 <c16 <f16 O =T bfloat16 int4 float4_e2m1fn <U300000000 |V2147483647 "
    "<U0 |V0 <f4,<i8 int float evil"
).split()
TEXTS = list(SPECS)
SPECS += [[("a", "<f4", ()), ("b", "|u1", (2,))], [("a", "O", ())], [], [("a", "<f4", (1 << 40,))], [("a", [("b", "|u1", (3,))], (2,))]]
LAYOUTS = "sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc strided".split()
KEYS = "__class__ __dict__ __setstate__ forward x _parameters _modules _flat_weights_names _all_weights note data".split()
# Opcodes without arguments, and some with missing lengths.
OPCODES = [bytes((code,)) for code in b"012RbsuaeQ(t)]}No\x81\x85\x8f\x90\x91\x92\x93\x94\x97"]
OPCODES += [code + struct.pack("<Q", size) for code in (b"\x8e", b"\x96", b"\x95") for size in (3, 1 << 20, 1 << 60)]


class Maker:
    """Makes cases from one source of random numbers."""

    def __init__(self, chance: random.Random) -> None:
        self.r = chance
        self.blobs: list[bytes] = []
        self.memos = 0

    def case(self) -> tuple[bytes, list[bytes], bool]:
        """Returns a pickle, its blobs, and whether each blob ends just before an inaccessible page."""
        last = self.r.random() < 0.7
        if self.r.random() < 0.55:
            data, blobs = self._mutant()
        else:
            data, blobs = self._program()
        if self.r.random() < 0.05 and data:
            flat = bytearray(data)
            for _ in range(self.r.randint(1, 4)):
                flat[self.r.randrange(len(flat))] = self.r.randrange(256)
            data = bytes(flat)
        return data, blobs, last

    # changed valid pickles

    def _mutant(self) -> tuple[bytes, list[bytes]]:
        r = self.r
        ops, blobs = (list(part) for part in r.choice(seeds()))
        if r.random() < 0.25:  # a combination of two pickles
            other, more = r.choice(seeds())
            at = r.randrange(len(ops))
            start = r.randrange(1, len(other))
            ops[at:at] = other[start : start + r.randint(1, 30)]
            blobs += more
        self.blobs = blobs
        self.memos = 40
        for _ in range(r.choice((1, 1, 1, 1, 1, 2, 2, 3, 6))):
            at = r.randrange(1, len(ops)) if len(ops) > 1 else 0
            kind = r.random()
            if kind < 0.45:
                # Most attacks change numbers, texts and references.
                tries = [n for n in (r.randrange(len(ops)) for _ in range(6)) if len(ops[n]) > 1]
                at = tries[0] if tries else at
                ops[at] = self._other(ops[at])
            elif kind < 0.55:
                del ops[at]
            elif kind < 0.65:
                ops.insert(at, r.choice(ops))
            elif kind < 0.75:
                a = r.randrange(len(ops))
                ops[at], ops[a] = ops[a], ops[at]
            elif kind < 0.85:
                ops.insert(at, r.choice(OPCODES))
            else:
                ops[at:at] = [self._hostile()]
        return b"".join(ops), [self._bytes(blob) for blob in blobs]

    def _other(self, op: bytes) -> bytes:
        r, code = self.r, op[:1]
        if code in b"KMJ\x8a\x8b":
            return push(r.choice(NUMBERS) if r.random() < 0.5 else r.choice(SMALL))
        if code in b"\x8cX\x8d":
            return text(r.choice((r.choice(NAMES)[r.randrange(2)], r.choice(DTYPES), r.choice(TEXTS), r.choice(KEYS))))
        if code in b"hj":
            return b"h" + bytes((r.randrange(256 if r.random() < 0.1 else 40),))
        if code == b"G":
            return b"G" + struct.pack(">d", r.choice((0.0, -1.0, float("nan"), float("inf"), 1e308, 2.0**62)))
        if code in b"CB\x8e\x96":
            return push(bytes(r.randrange(256) for _ in range(r.choice(SMALL))))
        return op

    def _hostile(self) -> bytes:
        return self.r.choice((self._call, self._pid, self._mutate, self._value))()

    def _bytes(self, blob: bytes) -> bytes:
        r = self.r
        kind = r.random()
        if kind < 0.6 or not blob:
            return blob
        flat = bytearray(blob)
        if kind < 0.8:
            for _ in range(r.randint(1, 3)):
                flat[r.randrange(len(flat))] = r.choice((0, 1, 2, 127, 128, 255))
        elif kind < 0.9 and len(flat) >= 8:
            at = r.randrange(len(flat) // 8) * 8
            flat[at : at + 8] = struct.pack("<q", max(min(r.choice(NUMBERS), (1 << 63) - 1), -(1 << 63)))
        elif kind < 0.95:
            flat = bytearray(r.randbytes(len(flat)))
        else:
            flat = flat[: r.randrange(len(flat))]
        return bytes(flat)

    # a program of calls

    def _program(self) -> tuple[bytes, list[bytes]]:
        r = self.r
        self.blobs = blobs = []
        for _ in range(r.randint(1, 3)):
            count = r.choice((2, 8, 16, 50, 125))
            kind = r.random()
            if kind < 0.5:  # often valid indices
                blobs.append(struct.pack(f"<{count}q", *sorted(r.choice(SMALL) for _ in range(count))))
            elif kind < 0.7:
                blobs.append(
                    struct.pack(
                        f"<{count}q", *(max(min(r.choice(NUMBERS), (1 << 63) - 1), -(1 << 63)) for _ in range(count))
                    )
                )
            else:
                blobs.append(r.randbytes(count * r.choice((1, 4, 8))))
        self.memos = 0
        parts = [b"\x80\x05]"]
        for _ in range(r.choice((1, 1, 2, 2, 3, 5))):
            parts.append(r.choice((self._call,) * 8 + (self._value, self._pid, self._mutate) * 2 + (self._nest,))())
            if r.random() < 0.6:
                parts.append(b"\x94")
                self.memos += 1
            parts.append(b"a")
        parts.append(b".")
        return b"".join(parts), blobs

    def _value(self, depth: int = 0) -> bytes:
        r = self.r
        kind = r.randrange(14 if depth < 3 else 7)
        if kind < 2:
            return push(r.choice(NUMBERS))
        if kind == 2:
            return push(r.choice((None, True, False, 0.0, 1.5, float("nan"), "x", "", b"", b"abcd", (), [], {}, "9" * 30)))
        if kind == 3 and self.memos:
            return b"h" + bytes((r.randrange(self.memos),))
        if kind in (3, 4):
            return named(*r.choice(NAMES))
        if kind == 5:
            return push(r.choice(KEYS + DTYPES))
        if kind == 6:
            return push(r.choice(SPECS))
        if kind == 7:
            return b"(" + b"".join(self._value(depth + 1) for _ in range(r.choice(SMALL))) + r.choice((b"t", b"t", b"\x91"))
        if kind == 8:
            return b"](" + b"".join(self._value(depth + 1) for _ in range(r.choice(SMALL))) + b"e"
        if kind == 9:
            body = b"".join(self._value(depth + 1) + self._value(depth + 1) for _ in range(r.choice((1, 2, 3))))
            return (
                r.choice((b"}", named("collections", "OrderedDict") + b")R", named("collections", "defaultdict") + b")R"))
                + b"("
                + body
                + b"u"
            )
        if kind == 10:
            return b"\x8f(" + b"".join(self._value(depth + 1) for _ in range(2)) + b"\x90"
        if kind == 11:
            return self._pid()
        return self._call(depth + 1)

    def _mutate(self) -> bytes:
        """Changes a value that the pickle has made earlier."""
        r = self.r
        target = b"h" + bytes((r.randrange(self.memos),)) if self.memos else self._value(2)
        kind = r.randrange(5)
        if kind == 0:
            return target + self._value(2) + self._value(2) + b"s"
        if kind == 1:
            return target + self._value(2) + b"a"
        if kind == 2:
            return target + b"(" + self._value(2) + self._value(2) + r.choice((b"u", b"e", b"\x90"))
        if kind == 3:
            body = b"".join(push(r.choice(KEYS)) + self._value(2) for _ in range(r.choice((1, 2))))
            return target + b"}(" + body + b"ub"
        return target + self._value(2) + b"b"

    def _nest(self) -> bytes:
        """Makes a small input that expands to a large amount of data."""
        r = self.r
        many = r.choice((3, 30, 300, 3000))
        kind = r.randrange(7)
        if kind == 0:
            return b")" + b"\x85" * many + r.choice((b"", b"(", b"\x85" * 3)) + r.choice((b"", b"N\x86"))
        if kind < 3:  # keys are tuples that contain the previous tuple twice
            doubled = b"".join(b"\x94" + b"h" + struct.pack("B", (self.memos + n) % 256) + b"\x86" for n in range(min(many, 60)))
            return b"}" + b"K\x01" + doubled + b"Ns"
        if kind == 3:
            return b"".join(named("collections", "defaultdict") + b")RK\x01" for _ in range(min(many, 300))) + b"N" + b"s" * min(many, 300)
        if kind == 4:
            return b"".join(named("builtins", "slice") for _ in range(min(many, 300))) + b"N" + b"\x85R" * min(many, 300)
        if kind == 5:
            count = min(many, 300)
            return (
                b"".join(named("overwire.rebuild", "array") + b"(" + push("O") + push((1,)) + b"\x89]" for _ in range(count))
                + b"N"
                + b"atR" * count
            )
        # These numbers have the same hash.
        return b"}(" + b"".join(push(n * ((1 << 61) - 1)) + b"N" for n in range(min(many, 300))) + b"u"

    def _dims(self, n: int) -> tuple[int, ...]:
        r = self.r
        return tuple(r.choice(NUMBERS) if r.random() < 0.03 else r.choice(SMALL) for _ in range(n))

    def _strides(self, size: tuple[int, ...], item: int = 1) -> tuple[int, ...]:
        r = self.r
        if r.random() < 0.92:
            out, step = [], item
            for d in reversed(size):
                out.append(step)
                step *= max(d, 1)
            return tuple(reversed(out))
        return tuple(item * r.choice((0, 1, 1, 2, 3, -1)) if r.random() < 0.8 else r.choice(NUMBERS) for _ in size)

    def _blob(self, least: int = 0) -> tuple[int, int]:
        r = self.r
        fits = [at for at, blob in enumerate(self.blobs) if len(blob) >= least] or range(len(self.blobs))
        if fits and r.random() < 0.98:
            at = r.choice(fits)
            return at, len(self.blobs[at])
        return r.choice(NUMBERS), r.choice(NUMBERS)

    def _pid(self) -> bytes:
        r = self.r
        blob, size = self._blob()
        if r.random() < 0.4:
            return push(("storage", blob, r.choice(DTYPES), size)) + b"Q"
        shape = self._dims(r.choice((0, 1, 1, 2, 3)))
        strides = self._strides(shape, r.choice((1, 4, 8)))
        offset = r.choice((0, 0, 0, 0, 4, 8, r.choice(NUMBERS)))
        return push(("array", blob, r.choice(SPECS[:17]), shape, strides, offset, r.random() < 0.5, r.choice(SMALL), size)) + b"Q"

    def _tensor(
        self, dtype: str | None = None, size: tuple[int, ...] | None = None, blob: tuple[int, int] | None = None
    ) -> bytes:
        """Makes a tensor, which is valid in most cases."""
        r = self.r
        dtype = dtype or r.choice(DTYPES[:7])
        if size is None:
            size = self._dims(r.choice((0, 1, 1, 2, 2, 3)))
        if blob is None:
            blob = self._blob(math.prod(size) * 8)
        storage = push(("storage", blob[0], dtype, blob[1])) + b"Q"
        offset = 0 if r.random() < 0.96 else r.choice(NUMBERS)
        rest = push(offset) + push(size) + push(self._strides(size))
        flags = b"\x89" if r.random() < 0.985 else r.choice((b"\x88", b"N"))
        metadata = push(r.choice((None, {}, {"conj": True}, {"neg": True}, {"evil": 1}))) if r.random() < 0.02 else b""
        return named("torch._utils", "_rebuild_tensor_v2") + b"(" + storage + rest + flags + b"}" + metadata + b"tR"

    def _index(self, dtype: str, size: tuple[int, ...], numbers: list[int]) -> bytes:
        """Makes a tensor of indices. In most cases, the given numbers get a blob of their own."""
        r = self.r
        if numbers and r.random() < 0.3:
            numbers = list(numbers)
            numbers[r.randrange(len(numbers))] = r.choice(NUMBERS)
        bits = 64 if dtype == "int64" else 32
        numbers = [max(min(n, (1 << bits - 1) - 1), -(1 << bits - 1)) for n in numbers]
        if not numbers or r.random() < 0.1 or len(self.blobs) > 20:
            return self._tensor(dtype, size)
        self.blobs.append(struct.pack(f"<{len(numbers)}{'q' if bits == 64 else 'i'}", *numbers))
        return self._tensor(dtype, size, (len(self.blobs) - 1, len(self.blobs[-1])))

    def _sparse(self) -> bytes:
        r = self.r
        layout = r.choice(LAYOUTS[:5]) if r.random() < 0.98 else "strided"
        coded = named("torch.serialization", "_get_layout") + push((f"torch.{layout}",)) + b"R"
        nnz, index = r.choice((0, 1, 1, 2, 3, 4)), r.choice(("int64", "int64", "int64", "int32"))
        if layout == "sparse_coo":
            dims, dense = r.choice((0, 1, 1, 2, 2, 3)), r.choice((0, 0, 1))
            size = tuple(r.randint(1, 5) for _ in range(dims + dense))
            places = sorted(tuple(r.randrange(d) for d in size[:dims]) for _ in range(nnz))
            parts = self._index("int64", (dims, nnz), [place[at] for at in range(dims) for place in places])
            values = (nnz, *size[dims:])
            tail = r.choice((b"", b"\x89", b"\x89", b"\x88", b"N"))
        else:
            block = (r.choice((0, 1, 1, 2, 2, 3)), r.choice((1, 2, 2, 3))) if layout in ("sparse_bsr", "sparse_bsc") else ()
            grid = (r.randint(1, 4), r.randint(1, 4))
            size = tuple(n * b for n, b in zip(grid, block or (1, 1), strict=True))
            rows, columns = grid if layout in ("sparse_csr", "sparse_bsr") else grid[::-1]
            counts = [r.randint(0, columns) for _ in range(rows)]
            nnz = sum(counts)
            ends = [sum(counts[:at]) for at in range(rows + 1)]
            within = [c for n in counts for c in sorted(r.sample(range(columns), n))]
            parts = self._index(index, (rows + 1,), ends) + self._index(index, (nnz,), within)
            values = (nnz, *block)
            tail = b""
        if r.random() < 0.1:
            size, values = self._dims(len(size)), self._dims(len(values))
        parts += self._tensor(None, values)
        shaped = r.choice((named("torch", "Size") + push((size,)) + b"R", push(size), push(list(size))))
        made = named("torch._utils", "_rebuild_sparse_tensor") + b"(" + coded + b"(" + parts + shaped + tail + b"ttR"
        if r.random() < 0.2:  # the program also gets the indices
            blob = (len(self.blobs) - 1, len(self.blobs[-1])) if self.blobs else self._blob()
            made = b"(" + made + self._tensor("int64", None, blob) + b"t"
        return made

    def _call(self, depth: int = 0) -> bytes:
        r = self.r
        kind = r.randrange(15)
        if kind < 3:
            return self._tensor()
        if kind < 6:
            return self._sparse()
        if kind == 6:
            blob, length = self._blob()
            size = self._dims(r.choice((1, 2)))
            storage = push(("storage", blob, r.choice(("qint8", "quint8", "qint32", "quint4x2", "float32")), length)) + b"Q"
            if r.random() < 0.5:
                params = (
                    b"("
                    + named("torch", "per_tensor_affine")
                    + push(r.choice((0.5, 0.0, float("nan"), 1)))
                    + push(r.choice(NUMBERS))
                    + b"t"
                )
            else:
                channels = (r.choice((size[0], size[0], size[-1], r.choice(SMALL))),)
                params = b"(" + named("torch", "per_channel_affine") + self._tensor(r.choice(("float64", "float32")), channels)
                params += self._tensor(r.choice(("int64", "float32")), channels) + push(r.choice((0, 0, 1, -1, 1 << 40))) + b"t"
            rest = push(0) + push(size) + push(self._strides(size))
            return named("torch._utils", "_rebuild_qtensor") + b"(" + storage + rest + params + b"\x89}tR"
        if kind == 7:
            size = self._dims(r.choice((0, 1, 2)))
            dtype = named("torch", r.choice(DTYPES[:20]))
            return (
                named("torch._utils", "_rebuild_meta_tensor_no_storage") + b"(" + dtype + push(size) + push(self._strides(size)) + b"\x89tR"
            )
        if kind == 8:
            state = b"}(" + push(r.choice(KEYS)) + self._value(3) + b"u"
            return named("torch._utils", "_rebuild_parameter_with_state") + b"(" + self._tensor() + b"\x89}" + state + b"tR"
        if kind == 9:
            inner = named("torch._utils", r.choice(NAMES)[1] if r.random() < 0.1 else "_rebuild_tensor_v2")
            kinds = named(*r.choice((("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), r.choice(NAMES))))
            args = self._tensor()
            return (
                named("torch._tensor", "_rebuild_from_type_v2")
                + b"("
                + inner
                + kinds
                + args.partition(b"(")[2].removesuffix(b"R").join((b"(", b""))
                + b"}tR"
            )
        if kind == 10:
            spec, count = r.choice(SPECS), r.choice(SMALL)
            items = [r.choice((None, 1, "x", (1, 2), (1, None))) for _ in range(count)]
            args = (spec, (count,) if r.random() < 0.8 else self._dims(2), r.random() < 0.3, items)
            return named("overwire.rebuild", "array") + push(args) + b"R"
        if kind == 11:
            spec = r.choice(SPECS)
            return named("overwire.rebuild", "scalar") + push((spec, r.randbytes(r.choice((0, 1, 2, 3, 4, 5, 6, 8, 16))))) + b"R"
        if kind == 12:
            module = named(*NAMES[-r.randint(1, 3)]) + b")\x81"
            state = b"".join(push(r.choice(KEYS)) + self._value(2) for _ in range(r.choice((1, 2, 4))))
            return module + b"}(" + state + b"ub"
        if kind == 13:
            args = b"".join(self._value(3) for _ in range(r.choice((0, 1, 1, 2, 3))))
            return named(*r.choice(NAMES)) + b"(" + args + b"t" + r.choice((b"R", b"R", b"R", b"\x81"))
        simple: list[tuple[str, str, tuple[Any, ...]]] = [
            ("builtins", "range", tuple(r.choice(NUMBERS) for _ in range(r.randint(1, 3)))),
            ("builtins", "complex", (1.0, r.choice((2.0, "9" * 99, 1 << 70)))),
            ("datetime", "datetime", (r.randbytes(10),)),
            ("datetime", "date", (r.randbytes(4),)),
            ("datetime", "time", (r.randbytes(6),)),
            ("datetime", "timedelta", tuple(r.choice(NUMBERS) for _ in range(3))),
            ("decimal", "Decimal", (r.choice(("1e99999999", "NaN", "sNaN", "1" * 50, "x", "-1e-99999")),)),
            ("collections", "deque", (r.choice(((), [], [1])), r.choice(NUMBERS))),
            ("torch", "Size", (self._dims(3),)),
            ("torch", "device", (r.choice(("cpu", "cuda", "meta", "evil", "cuda:9")), r.choice(NUMBERS))),
        ]
        module, name, values = r.choice(simple)
        return named(module, name) + push(values) + b"R"

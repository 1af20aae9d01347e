"""Makes valid bundles of every kind, as lists of opcodes for `pickle_cases` to change."""

from __future__ import annotations

import collections
import ctypes
import datetime
import decimal
import functools
import pickle
import pickletools
from typing import Any


@functools.cache
def seeds() -> list[tuple[list[bytes], list[bytes]]]:
    """Returns pickles of overwire's writer as lists of opcodes, with their blobs."""
    import numpy as np
    import torch
    from overwire.bundles.pickling import described, dump
    from torch import nn

    torch.manual_seed(1)
    dense = torch.randn(4, 6) * (torch.rand(4, 6) > 0.4)
    base = torch.arange(24.0)
    loop: list[Any] = [1]
    loop.append(loop)
    with_state = nn.Parameter(torch.randn(3))
    with_state.note = {"x": [1, 2]}
    tree: dict[Any, Any] = collections.defaultdict(list, {1: [2]})
    tree["in"] = collections.defaultdict(dict, {"a": {}})
    objects: list[Any] = [
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU()).state_dict(),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU()),
        nn.LSTM(2, 3),
        nn.TransformerEncoderLayer(4, 2, 4, activation=nn.functional.relu),
        nn.MultiheadAttention(4, 2),
        dense.to_sparse(),
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        dense.to_sparse_bsr((2, 3)),
        dense.to_sparse_bsc((2, 2)),
        torch.stack([dense, dense]).to_sparse_csr(),
        dense.to_sparse(1),
        dense.to_sparse().to(torch.complex64),
        torch.quantize_per_tensor(dense, 0.1, 3, torch.qint8),
        torch.quantize_per_channel(dense, torch.rand(4).double(), torch.zeros(4, dtype=torch.long), 0, torch.quint8),
        torch.quantize_per_channel(dense, torch.rand(6), torch.zeros(6), 1, torch.quint8),
        [
            base, base.view(4, 6).t(), base[3:7], base.view(torch.uint8), base.expand(3, 24), torch.empty(0),
            torch.empty(3, 0, 5),
        ],
        [
            torch.empty(3, 2, device="meta"), torch.ones(3, dtype=torch.complex64).conj(),
            torch.ones(3, requires_grad=True),
        ],
        [
            with_state, nn.Buffer(torch.ones(2)) if hasattr(nn, "Buffer") else None,
            torch.ones(3).as_subclass(nn.Parameter),
        ],
        [
            torch.float8_e4m3fn, torch.Size([1, 2]), torch.device("cuda", 1), torch.channels_last, torch.strided,
            torch.per_tensor_affine,
        ],
        [torch.ones(2).untyped_storage(), torch.tensor([True, False]), torch.ones(3).bfloat16()],
        [
            np.arange(30.0).reshape(5, 6)[1:, ::2], np.arange(9)[::-1], np.asfortranarray(np.ones((2, 3))), np.array(3),
            np.empty((0, 3), np.int8),
        ],
        np.zeros(3, dtype=[("a", "<i4"), ("b", "<f8", (2,))]),
        [np.array(["a", "bc"]), np.array(["2024-01-01"], "M8[D]"), np.array([None, {"x": 1}, 2], dtype=object)],
        [
            np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("xyz"), np.datetime64("2024-01-01"), np.dtype("f4"),
            np.float32,
        ],
        [
            None, True, 1 << 80, 1.5, 2j, "\u00e9", b"\0", bytearray(b"x"), (), {1, 2}, frozenset({3, (1, 2)}),
            range(3), slice(1, 2),
        ],
        [
            collections.OrderedDict(a=1), tree, collections.deque([1, 2], 5), collections.deque([3]), loop,
            {(1, (2, "a")): 3},
        ],
        [
            datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc), datetime.timedelta(3),
            datetime.date(2024, 1, 1), datetime.time(3),
        ],
        [
            decimal.Decimal("1.5"), datetime.timezone(datetime.timedelta(hours=1), "x"),
            {decimal.Decimal(3): 1, 3.5: 2, 2j: 3},
        ],
    ]
    made = []
    for obj in objects:
        data, blobs = dump(obj, {})
        cuts = [at for _, _, at in pickletools.genops(data)] + [len(data)]
        ops = [data[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
        contents = []
        for blob in blobs:
            one = described(blob)
            contents.append(ctypes.string_at(one.pointer, one.nbytes))
        # Removes frames, because their lengths would be wrong after a change.
        made.append(([op for op in ops if op[:1] != pickle.FRAME], contents))
    return made

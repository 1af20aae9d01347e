"""Rebuilds tensors for untrusted pickles, instead of torch's functions.

The functions return the same tensors as torch's functions, but check their arguments. Only exact types are accepted,
and each argument is read once. Extents are computed in Python integers before torch is called. Memory and work are
charged to the budget.

The indices of a sparse tensor and the parameters of a quantised tensor are copied before they are checked, so that
other tensors of the pickle cannot change them afterwards.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

from ..errors import FormatError
from .budget import Budget, attributes

# The limit for sizes, strides and offsets, and for their products in bytes, because torch multiplies them.
_LIMIT = 1 << 62
_DIMS = 64


def _refuse_malformed(what: str) -> FormatError:
    return FormatError(f"{what} is malformed")


def _check_dims(dims: Any) -> tuple[int, ...]:
    """Returns a size or stride as a tuple. Raises FormatError for anything else."""
    import torch

    if type(dims) is not tuple and type(dims) is not list and type(dims) is not torch.Size or len(dims) > _DIMS:
        raise _refuse_malformed("a tensor's size")
    sizes = tuple(dims)
    for d in sizes:
        if type(d) is not int or not 0 <= d < _LIMIT:
            raise _refuse_malformed("a tensor's size")
    return sizes


def check_extent(
    nbytes: int | None, item: int, offset: Any, size: Any, stride: Any, per: int = 1
) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """Returns the size and stride of a view. Raises FormatError if the view is not inside a storage of `nbytes` (None:
    no storage). item: the bytes of an item. per: the number of elements per item."""
    size, stride = _check_dims(size), _check_dims(stride)
    if type(offset) is not int or not 0 <= offset < _LIMIT or len(size) != len(stride):
        raise _refuse_malformed("a tensor")
    last, count = offset, 1
    for d, s in zip(size, stride, strict=True):
        if d > 1:
            last += (d - 1) * s
            count *= d
    if last * item >= _LIMIT or count * item >= _LIMIT:
        raise _refuse_malformed("a tensor's size")
    if nbytes is not None and 0 not in size and (last // per + 1) * item > nbytes:
        raise _refuse_malformed("a tensor that extends beyond its storage")
    return size, stride


def _check_flag(flag: Any) -> bool:
    if type(flag) is not bool:
        raise _refuse_malformed("a tensor's flag")
    return flag


def _check_metadata(metadata: Any, dtype: Any) -> Any:
    """Returns the conj and neg bits of a view. torch only asserts that the dtype allows them."""
    if metadata is None:
        return None
    if type(metadata) is not dict or len(metadata) > 2:
        raise _refuse_malformed("a tensor's metadata")
    fields = dict(metadata)
    for name, bit in fields.items():
        if type(name) is not str or name not in ("conj", "neg") or type(bit) is not bool:
            raise _refuse_malformed("a tensor's metadata")
    if fields.get("conj") and not dtype.is_complex:
        raise _refuse_malformed("a tensor's metadata")
    return fields


def _tensor_v2(budget: Budget, storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any = None,
               metadata: Any = None) -> Any:  # fmt: skip
    import torch

    if type(storage) is not torch.storage.TypedStorage:
        raise _refuse_malformed("a tensor's storage")
    raw, dtype = storage._untyped_storage, storage.dtype
    size, stride = check_extent(raw.nbytes(), dtype.itemsize, offset, size, stride)
    make: Any = torch._utils._rebuild_tensor_v2
    return make(
        storage, offset, size, stride, _check_flag(grad), collections.OrderedDict(), _check_metadata(metadata, dtype)
    )


def tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any,
              dtype: Any, metadata: Any = None) -> Any:  # fmt: skip
    """Implements torch's `_rebuild_tensor_v3` for the untyped storages of bundles."""
    import torch

    if type(storage) is not torch.UntypedStorage or type(dtype) is not torch.dtype:
        raise _refuse_malformed("a tensor's storage")
    size, stride = check_extent(storage.nbytes(), dtype.itemsize, offset, size, stride)
    # torch's function needs a typed storage of any dtype.
    storage_class: Any = torch.storage.TypedStorage
    make: Any = torch._utils._rebuild_tensor_v3
    return make(
        storage_class(wrap_storage=storage, dtype=torch.uint8, _internal=True), offset, size, stride, _check_flag(grad),
        collections.OrderedDict(), dtype, _check_metadata(metadata, dtype),
    )  # fmt: skip


def _check_dense(tensor: Any) -> Any:
    """Returns the tensor if it is a dense plain tensor with memory. Raises FormatError otherwise."""
    import torch

    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _refuse_malformed("a part of a tensor")
    return tensor


def _private_copy(budget: Budget, tensor: Any) -> Any:
    """Returns a copy of a tensor. Nothing else in the pickle can refer to the copy. Equal views get the same copy, so
    sparse tensors with the same mask share one."""
    import torch

    view = _check_dense(tensor).detach()
    key = (
        view.untyped_storage()._cdata, view.storage_offset(), tuple(view.shape), view.stride(), view.dtype,
        view.is_conj(), view.is_neg(),
    )  # fmt: skip
    owner = budget.private.get(key)
    if owner is None:
        budget.charge_memory(view.numel() * view.element_size())
        # The view keeps its storage alive, so that no other storage gets its address.
        owner = budget.private[key] = (view.clone(memory_format=torch.contiguous_format), view)
    return owner[0]


def _qtensor(budget: Budget, storage: Any, offset: Any, size: Any, stride: Any, params: Any, grad: Any,
             hooks: Any) -> Any:  # fmt: skip
    import torch

    if type(storage) is not torch.storage.TypedStorage or type(params) is not tuple:
        raise _refuse_malformed("a quantised tensor")
    raw, dtype = storage._untyped_storage, storage.dtype
    per = 2 if dtype is torch.quint4x2 else 4 if dtype is torch.quint2x4 else 1
    size, stride = check_extent(raw.nbytes(), dtype.itemsize, offset, size, stride, per)
    scheme = params[0] if params else None
    make: Any
    # The tensor is created empty and then attached to the storage, so torch allocates no memory for it.
    if scheme is torch.per_tensor_affine and len(params) == 3:
        _, scale, zero = params
        if type(scale) is not float or type(zero) is not int or zero.bit_length() > 63:
            raise _refuse_malformed("a quantised tensor")
        make = torch._empty_affine_quantized
        tensor = make((0,), scale=scale, zero_point=zero, dtype=dtype, device=raw.device)
    elif (scheme is torch.per_channel_affine or scheme is torch.per_channel_affine_float_qparams) and len(params) == 4:
        _, scales, zeros, axis = params
        if type(axis) is not int or not 0 <= axis < len(size):
            raise _refuse_malformed("a quantised tensor")
        # torch has no kernel for floating-point zero points of qint32, and aborts the process if it needs one.
        floating = () if dtype is torch.qint32 else (torch.float32,)
        for part, kinds in ((scales, (torch.float32, torch.float64)), (zeros, (torch.int32, torch.int64, *floating))):
            if _check_dense(part).dtype not in kinds or tuple(part.shape) != (size[axis],):
                raise _refuse_malformed("a quantised tensor's parameter")
        tensor = torch._empty_per_channel_affine_quantized(
            tuple(d if at == axis else 0 for at, d in enumerate(size)) if len(size) > 1 else size,
            scales=_private_copy(budget, scales), zero_points=_private_copy(budget, zeros),
            axis=axis, dtype=dtype, device=raw.device,
        )  # fmt: skip
    else:
        raise _refuse_malformed("a quantised tensor")
    tensor.set_(storage, offset, size, stride)
    tensor.requires_grad = _check_flag(grad)
    tensor._backward_hooks = collections.OrderedDict()
    return tensor


def _rebuild_sparse(budget: Budget, layout: Any, data: Any) -> Any:
    import torch

    if type(data) is not tuple or type(layout) is not torch.layout or len(data) not in (3, 4):
        raise _refuse_malformed("a sparse tensor")
    if layout is torch.sparse_coo:
        indices, values, size = data[:3]
        is_coalesced = data[3] if len(data) == 4 else None
        if is_coalesced is not None:
            _check_flag(is_coalesced)
        size = _check_shape(size)
        values = _sparse_parts(budget, [indices], values)
        # torch checks the invariants of the final tensor, so that no later use reads out of bounds.
        return torch.sparse_coo_tensor(
            _private_copy(budget, indices), values, size, check_invariants=True, is_coalesced=is_coalesced
        )
    kinds = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    if len(data) != 4 or not any(layout is kind for kind in kinds):
        raise _refuse_malformed("a sparse tensor")
    outer, plain, values, size = data
    size = _check_shape(size)
    values = _sparse_parts(budget, [outer, plain], values)
    if layout is torch.sparse_bsr or layout is torch.sparse_bsc:
        blocks = values.shape[outer.dim() : outer.dim() + 2]
        if len(blocks) != 2 or 0 in blocks:  # torch divides by these
            raise _refuse_malformed("a sparse tensor's block")
    rows = _private_copy(budget, outer)
    if not _rows_ascend(rows, plain.shape[-1]):
        raise _refuse_malformed("a sparse tensor's rows")
    return torch.sparse_compressed_tensor(
        rows, _private_copy(budget, plain), values, size, layout=layout, check_invariants=True
    )


def _rows_ascend(rows: Any, count: int) -> bool:
    """Returns whether compressed row indices ascend from 0 to count. This is checked here because torch's own check
    uses the row indices as positions before it checks their values."""
    import torch

    if rows.dtype not in (torch.int32, torch.int64) or rows.shape[-1] == 0:
        return False
    if rows.device.type == "meta":
        return True
    if not ((rows >= 0) & (rows <= count)).all() or not (rows[..., 1:] >= rows[..., :-1]).all():
        return False
    return bool((rows[..., 0] == 0).all() and (rows[..., -1] == count).all())


def _check_shape(size: Any) -> tuple[int, ...]:
    """Returns the size of a tensor without strides. Raises FormatError if its number of elements overflows."""
    dims = _check_dims(size)
    if math.prod(max(d, 1) for d in dims) >= _LIMIT:
        raise _refuse_malformed("a tensor's size")
    return dims


def _sparse_parts(budget: Budget, indices: list[Any], values: Any) -> Any:
    """Checks the parts of a sparse tensor, except the contents of the indices, and returns its values."""
    values = _without_gaps(_check_dense(values))
    for part in indices:
        if _check_dense(part).device != values.device or part.dim() == 0:
            raise _refuse_malformed("a sparse tensor")
        # torch's check may sort the indices. The second term charges for empty index tensors.
        budget.charge_work(part.numel() + part.shape[-1])
    return values


def _without_gaps(values: Any) -> Any:
    """Returns a view of the same values with dense strides for dimensions of at most one element. torch's sparse
    kernels use the first stride as the length of a row."""
    strides: list[int] = []
    step = 1
    for d, s in zip(reversed(values.shape), reversed(values.stride()), strict=True):
        strides.insert(0, s if d > 1 else step)
        step = max(d, 1) * strides[0]
    return values if tuple(strides) == values.stride() else values.as_strided(values.shape, strides)


def _rebuild_meta(budget: Budget, dtype: Any, size: Any, stride: Any, grad: Any) -> Any:
    import torch

    if type(dtype) is not torch.dtype:
        raise _refuse_malformed("a tensor's dtype")
    size, stride = check_extent(None, dtype.itemsize, 0, size, stride)
    return torch.empty_strided(size, stride, dtype=dtype, device="meta", requires_grad=_check_flag(grad))


def _parameter(budget: Budget, data: Any, grad: Any, hooks: Any = None, state: Any = None) -> Any:
    import torch

    if not isinstance(data, torch.Tensor):
        raise _refuse_malformed("a parameter")
    parameter = torch.nn.Parameter(data, _check_flag(grad))
    _set_attributes(budget, parameter, state)
    return parameter


def subclassed(budget: Budget, made: Any, kind: Any, state: Any) -> Any:
    """Returns the tensor as a `kind`, with the attributes in `state`."""
    if type(made) is not kind:
        made = made.as_subclass(kind)
    if type(state) is tuple and len(state) == 2 and (state[1] is None or type(state[1]) is dict and not state[1]):
        state = state[0]
    _set_attributes(budget, made, state)
    return made


def _set_attributes(budget: Budget, made: Any, state: Any) -> None:
    if state is None:
        return
    own = attributes(budget, made, state)
    budget.nest(made, own.values())
    made.__dict__.update(own)


REBUILDERS: dict[str, Callable[..., Any]] = {
    "_rebuild_tensor_v2": _tensor_v2,
    "_rebuild_tensor_v3": lambda budget, *args: tensor_v3(*args),
    "_rebuild_qtensor": _qtensor,
    "_rebuild_sparse_tensor": _rebuild_sparse,
    "_rebuild_meta_tensor_no_storage": _rebuild_meta,
    "_rebuild_parameter": _parameter,
    "_rebuild_parameter_with_state": _parameter,
}

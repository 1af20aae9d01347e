"""Implements tensorizer.protobuf: modules and tensors as messages of tensors.proto.

This is a separate format, older than .tensors files. torch and the package protobuf are only
imported when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

from . import tensors_pb2

if TYPE_CHECKING:
    import torch

__all__ = ["deserialize_model", "deserialize_tensor", "serialize_model", "serialize_tensor"]

# torch's names in the order of DT_*. The last four dtypes are quantised.
_TORCH = (
    "float32 float64 float16 bfloat16 complex32 complex64 complex128 uint8 int8 int16 int32 int64 bool quint8 qint8 "
    "qint32 quint4x2"
).split()

# The numpy dtypes that the original uses for these, in the same order.
_NUMPY = (
    "float32 float64 float16 float16 complex64 complex64 complex128 uint8 int8 int16 int32 int64 bool uint8 int8 "
    "int32 uint8"
).split()


def _dtypes() -> dict[Any, int]:
    import torch

    return {getattr(torch, name): number for number, name in enumerate(_TORCH, start=1)}


def __getattr__(name: str) -> Any:
    if name == "DtypePbs":
        return _dtypes()
    if name == "PbDtypes":
        return {number: dtype for dtype, number in _dtypes().items()}
    if name == "TensorPb":
        return tensors_pb2.Tensor
    if name == "PbNpyDtypes":
        import numpy

        return {number: bool if form == "bool" else getattr(numpy, form) for number, form in enumerate(_NUMPY, start=1)}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "DtypePbs", "PbDtypes", "TensorPb", "PbNpyDtypes"})


def serialize_tensor(t: torch.Tensor, attribute: int | None = None) -> Any:
    """Converts a tensor to a message `Tensor`. The bits are preserved for every dtype.

    attribute: AT_PARAMETER, AT_BUFFER, or None for neither. Raises NotImplementedError for
    quantised tensors, and for dtypes that tensors.proto lacks.
    """
    import torch

    if attribute not in (None, tensors_pb2.AT_PARAMETER, tensors_pb2.AT_BUFFER):
        raise ValueError("Unknown attribute type")
    number = _dtypes().get(t.dtype, tensors_pb2.DT_INVALID)
    if t.is_quantized or not tensors_pb2.DT_INVALID < number < tensors_pb2.DT_QUINT8:
        raise NotImplementedError(f"tensors.proto does not have the dtype {t.dtype}")
    dense = t.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    message = tensors_pb2.Tensor(dtype=number, shape=t.shape, data=data)
    if attribute is not None:
        message.attr_type = attribute
    return message


def deserialize_tensor(t: Any) -> Any:
    """Converts a message `Tensor` to a tensor on the host with its own memory. Returns (tensor,
    type) if the message has an attribute type.

    Raises ValueError if the number of bytes does not match the shape.
    """
    import math

    import torch

    if not tensors_pb2.DT_INVALID < t.dtype < tensors_pb2.DT_QUINT8:
        raise NotImplementedError(f"dtype {t.dtype} of tensors.proto is not supported")
    dtype = getattr(torch, _TORCH[t.dtype - 1])
    shape = tuple(t.shape)
    if any(d < 0 for d in shape) or math.prod(shape) * dtype.itemsize != len(t.data):
        raise ValueError(f"{len(t.data)} bytes do not fit shape {shape} of {dtype}")
    flat = torch.frombuffer(bytearray(t.data), dtype=torch.uint8).view(dtype) if t.data else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    return (tensor, t.attr_type) if t.HasField("attr_type") else tensor


def serialize_model(model: torch.nn.Module, file_stream: BinaryIO) -> None:
    """Writes all parameters and buffers of a module to a binary file, as one message `Module`."""
    whole = tensors_pb2.Module(name="")
    for name, module in model.named_modules():
        part = whole.attributes.add(name=name)
        part.module.SetInParent()
        for kind, members in (
            (tensors_pb2.AT_PARAMETER, module.named_parameters(recurse=False)),
            (tensors_pb2.AT_BUFFER, module.named_buffers(recurse=False)),
        ):
            for own, tensor in members:
                part.module.attributes.add(name=own, tensor=serialize_tensor(tensor, kind))
    file_stream.write(whole.SerializeToString())


def deserialize_model(model: torch.nn.Module, file_stream: BinaryIO) -> None:
    """Loads a file of `serialize_model` into a module of the same structure.

    Raises KeyError for a submodule that the module lacks, and ValueError for unknown attributes.
    """
    import torch

    whole = tensors_pb2.Module()
    whole.ParseFromString(file_stream.read())
    modules = dict(model.named_modules())
    for part in whole.attributes:
        module = modules[part.name]
        for attribute in part.module.attributes:
            if not attribute.tensor.HasField("attr_type"):
                continue
            tensor, kind = deserialize_tensor(attribute.tensor)
            if kind == tensors_pb2.AT_PARAMETER:
                gradient = tensor.dtype.is_floating_point or tensor.dtype.is_complex
                module._parameters[attribute.name] = torch.nn.Parameter(tensor, requires_grad=gradient)
            elif kind == tensors_pb2.AT_BUFFER:
                module._buffers[attribute.name] = tensor
            else:
                raise ValueError("Unknown attribute type")

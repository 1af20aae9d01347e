"""Implements tensorizer.tensors_pb2: the messages of its tensors.proto.

The enum numbers are always defined. The message classes `Tensor`, `Attribute` and `Module`, and `DESCRIPTOR`, are built
on first use with the package protobuf. Without this package, using them raises MissingPackageError.
"""

from __future__ import annotations

from typing import Any

from ...errors import MissingPackageError

_DTYPES = (
    "INVALID FLOAT32 FLOAT64 FLOAT16 BFLOAT16 COMPLEX32 COMPLEX64 COMPLEX128"
    " UINT8 INT8 INT16 INT32 INT64 BOOL QUINT8 QINT8 QINT32 QUINT4_2"
).split()

(
    DT_INVALID, DT_FLOAT32, DT_FLOAT64, DT_FLOAT16, DT_BFLOAT16, DT_COMPLEX32, DT_COMPLEX64, DT_COMPLEX128,
    DT_UINT8, DT_INT8, DT_INT16, DT_INT32, DT_INT64, DT_BOOL, DT_QUINT8, DT_QINT8, DT_QINT32, DT_QUINT4_2,
) = range(len(_DTYPES))  # fmt: skip
AT_PARAMETER, AT_BUFFER = range(2)

# Fields of the messages: number, name, type (or the name of a message or enum).
_MESSAGES: dict[str, list[tuple[int, str, str]]] = {
    "Tensor": [(1, "dtype", "Dtype"), (2, "shape", "*int64"), (3, "data", "bytes"), (4, "attr_type", "?AttributeType")],
    "Attribute": [
        (1, "name", "string"),
        (3, "module", "|Module"),
        (4, "tensor", "|Tensor"),
        (5, "string", "|string"),
        (6, "int64", "|int64"),
        (7, "float", "|float"),
        (8, "bool", "|bool"),
    ],
    "Module": [(1, "name", "string"), (2, "names", "*string"), (3, "attributes", "*Attribute")],
}
_ENUMS = {"Dtype": [f"DT_{name}" for name in _DTYPES], "AttributeType": ["AT_PARAMETER", "AT_BUFFER"]}


def _build() -> dict[str, Any]:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped,unused-ignore]
        from google.protobuf.internal import enum_type_wrapper  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise MissingPackageError("overwire: tensorizer.protobuf: the package protobuf is not installed") from error
    file = descriptor_pb2.FileDescriptorProto(name="tensors.proto", package="tensors", syntax="proto3")
    file.options.go_package = "github.com/coreweave/tensorizer/tensors"
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        optional = []
        for number, field, kind in fields:
            field_proto = message.field.add(
                name=field, number=number, label=kinds.LABEL_REPEATED if kind[0] == "*" else kinds.LABEL_OPTIONAL
            )
            plain = kind.lstrip("*|?")
            if plain in _ENUMS or plain in _MESSAGES:
                field_proto.type_name = f".tensors.{plain}"
                field_proto.type = kinds.TYPE_ENUM if plain in _ENUMS else kinds.TYPE_MESSAGE
            else:
                field_proto.type = getattr(kinds, f"TYPE_{plain.upper()}")
            if kind[0] == "|":
                if not message.oneof_decl:
                    message.oneof_decl.add(name="value")
                field_proto.oneof_index = 0
            elif kind[0] == "?":
                field_proto.proto3_optional = True
                optional.append(field_proto)
        for field_proto in optional:  # after the others, as protoc orders them
            field_proto.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field_proto.name}")
    # Uses a separate pool, because the original's messages are in the default pool if it is also imported.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    namespace: dict[str, Any] = {"DESCRIPTOR": pool.FindFileByName("tensors.proto")}
    for name in _MESSAGES:
        namespace[name] = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"tensors.{name}"))
    for name in _ENUMS:
        namespace[name] = enum_type_wrapper.EnumTypeWrapper(pool.FindEnumTypeByName(f"tensors.{name}"))
    return namespace


def __getattr__(name: str) -> Any:
    if name not in (*_MESSAGES, *_ENUMS, "DESCRIPTOR"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update(_build())
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MESSAGES, *_ENUMS, "DESCRIPTOR"})

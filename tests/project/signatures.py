"""Structs of the protocol as docs/PROTOCOL.md writes them."""

import enum
import re
import types

import msgspec

from kvpin import protocol

_UNIONS = {protocol.RequestBody: "RequestBody", protocol.ReplyBody: "ReplyBody"}


def signature(struct: type[msgspec.Struct]) -> str:
    """Name(field: type = default, ...)"""
    return f"{struct.__name__}({', '.join(map(_field, msgspec.structs.fields(struct)))})"


def _field(field: msgspec.structs.FieldInfo) -> str:
    spelled = f"{field.name}: {_type_name(field.type)}"
    if field.default is not msgspec.NODEFAULT:
        return f"{spelled} = {_value(field.default)}"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"{spelled} = {_value(field.default_factory())}"
    return spelled


def _value(value: object) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    return repr(value).replace("'", '"')


def _type_name(kind: object) -> str:
    if kind in _UNIONS:
        return _UNIONS[kind]
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
        return kind.__name__
    return re.sub(r"\bkvpin\.protocol\.", "", str(kind))

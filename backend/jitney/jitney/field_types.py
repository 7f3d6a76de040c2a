"""Says in words what a field of a msgspec struct may hold, for messages about a wrong value.

Used for the engine's options and for the parameters of requests.
"""

import re

import msgspec
from msgspec import inspect


def field_at_fault(error: msgspec.ValidationError) -> str:
    """The name of the field whose value has a wrong type, out of msgspec's error."""
    match = re.search(r"`\$\.(\w+)", str(error))
    assert match is not None, f"a field is at fault: {error}"
    return match[1]


def describe_type(struct: type[msgspec.Struct], name: str) -> str:
    """The type of a field for an error message: ``an integer``, ``a list of strings``, …"""
    return _describe(kind_of(struct, name))


def describe_range(struct: type[msgspec.Struct], name: str) -> str:
    """The bounds of a field: ``at least 1``, ``from 0 to 10``, …; empty if it has none."""
    kind = kind_of(struct, name)
    if not isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return ""
    if kind.gt is not None:
        return f"above {kind.gt} and at most {kind.le}"
    return f"at least {kind.ge}" if kind.le is None else f"from {kind.ge} to {kind.le}"


def kind_of(struct: type[msgspec.Struct], name: str) -> inspect.Type:
    """What a field is if it is not None."""
    (field,) = (each for each in msgspec.structs.fields(struct) if each.encode_name == name)
    kind = inspect.type_info(field.type)
    if isinstance(kind, inspect.UnionType):
        (kind,) = (each for each in kind.types if not isinstance(each, inspect.NoneType))
    return kind


def _describe(kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType():
            return "one of " + ", ".join(repr(value) for value in kind.values)
        case inspect.VarTupleType():
            return f"a list of {_describe(kind.item_type).split()[-1]}s"
        case inspect.DictType():
            key, value = (_describe(each).split()[-1] for each in (kind.key_type, kind.value_type))
            return f"an object of {key}s and {value}s"
    return _DESCRIPTIONS[type(kind)]


_DESCRIPTIONS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "an integer",
    inspect.FloatType: "a number",
    inspect.StrType: "a string",
    inspect.StructType: "an object",
}

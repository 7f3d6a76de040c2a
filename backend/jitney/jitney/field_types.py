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
    """The bounds of a field: ``at least 1``, ``from 0 to 10``, …; empty if it is neither a number
    nor a string with bounds. Every number among the options has a lower bound, and a string has
    both bounds or none."""
    kind = kind_of(struct, name)
    if isinstance(kind, inspect.StrType) and kind.min_length is not None:
        return f"a string of {kind.min_length} to {kind.max_length} characters"
    if not isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return ""
    if kind.gt is not None:
        return f"above {kind.gt} and at most {kind.le}"
    if kind.le is None:
        return f"at least {kind.ge}"
    return f"from {kind.ge} to {kind.le}"


def kind_of(struct: type[msgspec.Struct], name: str) -> inspect.Type:
    """The type of a field, without None: T for ``T | None``. Apart from None, a field must have one
    type only."""
    kind = _type_of(struct, name)
    if isinstance(kind, inspect.UnionType):
        members = [member for member in kind.types if not isinstance(member, inspect.NoneType)]
        assert len(members) == 1, f"the field {name} may be of several types"
        return members[0]
    return kind


def may_be_none(struct: type[msgspec.Struct], name: str) -> bool:
    """Whether the type of a field is ``T | None``."""
    kind = _type_of(struct, name)
    return isinstance(kind, inspect.UnionType) and kind.includes_none


def _type_of(struct: type[msgspec.Struct], name: str) -> inspect.Type:
    (field,) = (field for field in msgspec.structs.fields(struct) if field.encode_name == name)
    return inspect.type_info(field.type)


def _describe(kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType():
            return "one of " + ", ".join(repr(value) for value in kind.values)
        case inspect.VarTupleType():
            return f"a list of {_plural(kind.item_type)}"
        case inspect.DictType():
            return f"an object of {_plural(kind.key_type)} and {_plural(kind.value_type)}"
    return _DESCRIPTIONS[type(kind)]


def _plural(kind: inspect.Type) -> str:
    return _PLURALS[type(kind)]


_DESCRIPTIONS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "an integer",
    inspect.FloatType: "a number",
    inspect.StrType: "a string",
    inspect.StructType: "an object",
}
_PLURALS: dict[type[inspect.Type], str] = {
    inspect.IntType: "integers",
    inspect.FloatType: "numbers",
    inspect.StrType: "strings",
    inspect.StructType: "objects",
}

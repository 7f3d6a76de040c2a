"""Whether the branches of a ``oneOf`` exclude each other: then it means the same as ``anyOf``.
Pure.

``schema_alternatives.py`` asks, for grammars that can keep no other ``oneOf``: they would allow a
value that fits two branches, and the schema forbids it.
"""

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Rules = tuple[Mapping[str, Any], ...]
"""Schemas without references and branches: a value must fit all of them."""

_KINDS = {
    "string": ("string",),
    "integer": ("integer",),
    "number": ("integer", "fraction"),
    "boolean": ("boolean",),
    "null": ("null",),
    "array": ("array",),
    "object": ("object",),
}
"""Type -> the kinds of values that it allows. A fraction is a number that is no integer."""
_ALL_KINDS = frozenset(itertools.chain.from_iterable(_KINDS.values()))
_MOST_PAIRS = 100_000
"""Of alternatives that are compared. That takes some tenths of a second."""
_Values = frozenset[tuple[str, Hashable]]


class _Summary(NamedTuple):
    """What tells an alternative apart from others."""

    kinds: frozenset[str]
    values: _Values | None
    """The values that it lists; None if it lists none."""
    members: Mapping[str, _Values]
    """Member that an object must have -> the values that are listed for it, if they are."""
    required: frozenset[str]
    forbidden: frozenset[str]
    """Members that an object must not have."""


def exclude_each_other(branches: Sequence[Sequence[Rules]]) -> bool:
    """Whether surely no value fits two of the branches, each of which has alternatives. Raises
    ValueError, TypeError or AttributeError for what is no JSON schema."""
    summaries = [[_summary(rules) for rules in branch] for branch in branches]
    num_pairs = 0
    for one, other in itertools.combinations(summaries, 2):
        num_pairs += len(one) * len(other)
        if num_pairs > _MOST_PAIRS:
            return False
        if not all(_excluded(*pair) for pair in itertools.product(one, other)):
            return False
    return True


def alternatives_of_one_required(branches: Sequence[Any]) -> list[list[Rules]] | None:
    """The alternatives of a ``oneOf`` whose branches each require one member and say nothing else:
    an object has exactly one of these members. None for any other ``oneOf``."""
    names: list[str] = []
    for branch in branches:
        if not isinstance(branch, dict) or list(branch) != ["required"]:
            return None
        if len(branch["required"]) != 1:
            return None
        names += branch["required"]
    if len(names) < 2 or len(set(names)) < len(names):
        return None
    alternatives: list[list[Rules]] = []
    for name in names:
        others = {other: False for other in names if other != name}
        alternatives.append([({"type": "object", "required": [name], "properties": others},)])
    return alternatives


def _excluded(one: _Summary, other: _Summary) -> bool:
    """Whether surely no value fits both."""
    if one.values is not None and other.values is not None:
        return one.values.isdisjoint(other.values)
    common = one.kinds & other.kinds
    if not common:
        return True
    if common != {"object"}:
        return False
    if one.required & other.forbidden or other.required & one.forbidden:
        return True
    shared = one.members.keys() & other.members.keys()
    return any(one.members[name].isdisjoint(other.members[name]) for name in shared)


def _summary(rules: Rules) -> _Summary:
    kinds = _ALL_KINDS
    values: _Values | None = None
    required: set[str] = set()
    forbidden: set[str] = set()
    members: dict[str, _Values] = {}
    for rule in rules:
        if "type" in rule:
            kinds &= _kinds_of(rule["type"])
        listed = _listed(rule)
        if listed is not None:
            values = listed if values is None else values & listed
        required.update(rule.get("required", ()))
        for name, schema in rule.get("properties", {}).items():
            of_member = _listed(schema)
            if schema is False:
                forbidden.add(name)
            elif of_member is not None:
                members[name] = members.get(name, of_member) & of_member
    if values is not None:
        kinds &= frozenset(kind for kind, _ in values)
    required_members = {name: members[name] for name in required if name in members}
    return _Summary(kinds, values, required_members, frozenset(required), frozenset(forbidden))


def _kinds_of(named: Any) -> frozenset[str]:
    """What the keyword ``type`` allows. Raises ValueError for what is no type."""
    types = [named] if isinstance(named, str) else named
    kinds: set[str] = set()
    for each in types:
        if each not in _KINDS:
            raise ValueError(f"{each!r} is no type")
        kinds.update(_KINDS[each])
    return frozenset(kinds)


def _listed(schema: Any) -> _Values | None:
    """The values that a schema lists; None if it lists none."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return _keys([schema["const"]])
    if schema.get("enum") is not None:
        return _keys(schema["enum"])
    return None


def _keys(values: Iterable[Any]) -> _Values:
    return frozenset(map(_key, values))


def _key(value: Any) -> tuple[str, Hashable]:
    """A value's kind, and something that is equal for equal JSON only. For Python, ``True`` equals
    ``1``."""
    if value is None:
        return "null", None
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, str):
        return "string", value
    if isinstance(value, (int, float)):
        return ("integer" if value == value // 1 else "fraction"), value
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    return "object", frozenset((name, _key(part)) for name, part in value.items())

"""What a value of a JSON schema may be: the schema's alternatives, without references. Pure.

Needed for formats of calls that are not JSON. The grammar of a call asks here which members the
arguments may have. In formats that write a string without quotes, the parser asks whether a value
may be a string, and the grammar asks which strings it may be.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jitney.errors import InvalidArgumentError
from jitney.text.schema_references import References

from jitney_gateway.exclusive_branches import (
    Rules,
    alternatives_of_one_required,
    exclude_each_other,
)

_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords whose schemas are about the same value."""
_MOST_ALTERNATIVES = 1000
_MOST_EXPANDED = 4096
"""Most schemas that are visited for one value. A few references in ``allOf`` can lead to the same
schema millions of times."""


class Alternative(NamedTuple):
    """One way for a value to fit a schema: it must fit all of the ``rules``. A rule is a schema
    without references, ``allOf``, ``anyOf`` and ``oneOf``."""

    rules: Rules

    def values(self) -> list[Any] | None:
        """The values that all rules with an ``enum`` or a ``const`` list; None if there is no such
        rule."""
        lists = []
        for rule in self.rules:
            if "const" in rule:
                lists.append([rule["const"]])
            elif rule.get("enum") is not None:
                lists.append(rule["enum"])
        if not lists:
            return None
        return [value for value in lists[0] if all(value in others for others in lists[1:])]

    def allows_string(self) -> bool:
        """Whether a value may be a string. It may also be one if no rule has a type or lists
        values."""
        listed = self.values()
        if listed is not None and not any(isinstance(each, str) for each in listed):
            return False
        return all("string" in _types_of(rule) for rule in self.rules if "type" in rule)

    def names_null(self) -> bool:
        """Whether a value may be ``null`` because a rule says so, by its type or by its list."""
        listed = self.values()
        if listed is not None and None not in listed:
            return False
        typed = [rule for rule in self.rules if "type" in rule]
        if listed is None and not typed:
            return False
        return all("null" in _types_of(rule) for rule in typed)

    def allows_object(self) -> bool:
        """Whether a value may be an object."""
        return all("object" in _types_of(rule) for rule in self.rules if "type" in rule)

    def members(self) -> "Members":
        """The members of a value that is an object."""
        required: list[str] = []
        names: list[str] = []
        for rule in self.rules:
            names += rule.get("properties", {})
            required += rule.get("required", ())
        properties: dict[str, list[Any]] = {}
        for name in dict.fromkeys([*names, *required]):
            properties[name] = self._schemas_of_member(name)
        return Members(
            properties,
            required=list(dict.fromkeys(required)),
            others=[rule.get("additionalProperties", True) for rule in self.rules],
        )

    def _schemas_of_member(self, name: str) -> list[Any]:
        """What the rules say of a member. A rule that does not name it has a schema for others."""
        schemas = []
        for rule in self.rules:
            of_others = rule.get("additionalProperties", True)
            schema = rule.get("properties", {}).get(name, of_others)
            if schema is not True:
                schemas.append(schema)
        return schemas


def _types_of(rule: Mapping[str, Any]) -> list[str]:
    types = rule["type"]
    return [types] if isinstance(types, str) else types


class Members(NamedTuple):
    """The members of an object that fits an alternative."""

    properties: dict[str, list[Any]]
    """Name -> the schemas that its value must fit, all of them. One that is ``false`` allows no
    such member."""
    required: list[str]
    """Each of them is in ``properties``, too."""
    others: list[Any]
    """The schemas that the value of any other member must fit."""


def all_of(schemas: Sequence[Any]) -> Any:
    """The schema of the values that fit each of ``schemas``."""
    if not schemas:
        return {}  # any value
    return schemas[0] if len(schemas) == 1 else {"allOf": list(schemas)}


def alternatives_of(schema: Any, whole: Any, *, exact: bool = False) -> list[Alternative]:
    """The alternatives of ``schema``, a part of ``whole``: a value fits the schema if it fits one
    of them.

    A reference that leads back to itself, or to nothing, allows any value. A ``oneOf`` is read as
    ``anyOf`` if its branches may overlap; with ``exact`` that raises InvalidArgumentError. Raises
    ValueError, TypeError or AttributeError for what is no JSON schema.
    """
    expansion = _Expansion(References(whole), exact=exact)
    return [Alternative(rules) for rules in expansion.expand(schema, frozenset())]


def schema_of_member(name: str, whole: Mapping[str, Any]) -> Any:
    """The schema of an object's member: it allows what any alternative of ``whole`` allows. Raises
    as :func:`alternatives_of`."""
    branches: list[Any] = []
    for alternative in alternatives_of(whole, whole):
        properties = alternative.members().properties
        if name in properties:
            branches.append(all_of(properties[name]))
    if not branches:
        return {}  # any value
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


def listed_texts(alternatives: Sequence[Alternative]) -> list[str] | None:
    """The strings that a value may be, if the schema lists them, and if it also allows values that
    are neither strings nor ``null``. None for any other schema.

    For such a schema the text ``1`` may be the string or the number: only the list tells.
    """
    texts: list[str] = []
    for alternative in alternatives:
        if not alternative.allows_string():
            continue
        listed = alternative.values()
        if listed is None:
            return None
        texts += [each for each in listed if isinstance(each, str)]
    has_others = bool(others_than_strings(alternatives))
    return texts if texts and has_others else None


def others_than_strings(alternatives: Sequence[Alternative]) -> list[Any]:
    """Schemas of the values that are neither strings nor ``null``."""
    schemas: list[Any] = []
    for alternative in alternatives:
        if not alternative.allows_string() and not alternative.names_null():
            schemas.append({"allOf": list(alternative.rules)})
    return schemas


class _Expansion:
    """Finds the alternatives of schemas whose references ``references`` follows. ``exact``: as in
    :func:`alternatives_of`."""

    def __init__(self, references: References, *, exact: bool) -> None:
        self._references = references
        self._exact = exact
        self._num_expanded = 0

    def expand(self, schema: Any, passed: frozenset[int]) -> list[Rules]:
        """The alternatives of a schema. ``passed``: the id() of each target of a reference that led
        here; the whole schema keeps them alive."""
        self._num_expanded += 1
        if self._num_expanded > _MOST_EXPANDED:
            raise ValueError(f"more than {_MOST_EXPANDED} schemas for one value")
        if schema is False:
            return []
        if not isinstance(schema, dict):
            return [()]  # ``true``: any value
        # A value must fit one alternative of each list.
        lists = self._lists_of(schema, passed)
        expanded = []
        for chosen in itertools.product(*lists):
            expanded.append(tuple(itertools.chain.from_iterable(chosen)))
            if len(expanded) > _MOST_ALTERNATIVES:
                raise ValueError(f"more than {_MOST_ALTERNATIVES} alternatives")
        return expanded

    def _lists_of(self, schema: dict[str, Any], passed: frozenset[int]) -> list[list[Rules]]:
        """A list of alternatives for each thing that an object says about the same value."""
        own = {key: value for key, value in schema.items() if key not in _IN_PLACE}
        lists: list[list[Rules]] = [[(own,)]]
        if "$ref" in schema:
            lists.append(self._expand_reference(schema, passed))
        for part in schema.get("allOf", ()):
            lists.append(self.expand(part, passed))
        for key in ("anyOf", "oneOf"):
            if key not in schema:
                continue
            branches = [self.expand(part, passed) for part in schema[key]]
            if key == "oneOf":
                # A discriminator may be required outside of the branches.
                beside = [each[0] for each in lists if len(each) == 1]
                around = tuple(itertools.chain.from_iterable(beside))
                branches = self._settled(schema[key], branches, around)
            lists.append(list(itertools.chain.from_iterable(branches)))
        return lists

    def _settled(
        self, one_of: Sequence[Any], branches: list[list[Rules]], around: Rules
    ) -> list[list[Rules]]:
        """The branches of a ``oneOf``, written so that no value fits two of them and the rules
        ``around`` it."""
        rewritten = alternatives_of_one_required(one_of)
        if rewritten is not None:
            return rewritten
        if not self._exact:
            return branches
        whole = [[(*around, *rules) for rules in branch] for branch in branches]
        if not exclude_each_other(whole):
            raise InvalidArgumentError(
                "'oneOf' is supported only if surely no value fits two of its branches"
            )
        return branches

    def _expand_reference(self, schema: dict[str, Any], passed: frozenset[int]) -> list[Rules]:
        target = self._references.find(schema, schema["$ref"])
        if target is None or id(target) in passed:
            return [()]  # any value
        return self.expand(target, passed | {id(target)})

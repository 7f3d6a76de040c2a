"""What a value of a JSON schema may be: the schema's alternatives, without its references.

For formats that write a string without quotes. The parser asks whether a value may be a string, the
grammar of a forced call which strings it may be.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jitney.text.schema_references import References

_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords whose schemas are about the same value."""
_MOST_ALTERNATIVES = 1000
_Rules = tuple[Mapping[str, Any], ...]


class Alternative(NamedTuple):
    """A value fits if it keeps all of these schemas, which have no references and branches."""

    rules: _Rules

    def values(self) -> list[Any] | None:
        """The values that it lists; None if it lists none."""
        listed: list[Any] | None = None
        for rule in self.rules:
            here = rule.get("enum")
            if "const" in rule:
                here = [rule["const"]]
            if here is not None:
                listed = list(here) if listed is None else [each for each in listed if each in here]
        return listed

    def allows_string(self) -> bool:
        """Whether a value may be a string. It may, if no rule says what it is."""
        listed = self.values()
        if listed is not None and not any(isinstance(each, str) for each in listed):
            return False
        return all("string" in _types_of(rule) for rule in self.rules if "type" in rule)

    def names_null(self) -> bool:
        """Whether a value may be ``null``, and a rule says so."""
        listed = self.values()
        if listed is not None and None not in listed:
            return False
        typed = [rule for rule in self.rules if "type" in rule]
        if listed is None and not typed:
            return False
        return all("null" in _types_of(rule) for rule in typed)


def _types_of(rule: Mapping[str, Any]) -> list[str]:
    types = rule["type"]
    return [types] if isinstance(types, str) else types


def alternatives_of(schema: Any, whole: Any) -> list[Alternative]:
    """The alternatives of ``schema``, a part of ``whole``: a value that fits the schema fits one of
    them, and one that fits one of them fits the schema, but for a ``oneOf`` with several that it
    fits. A reference that leads back to itself, or to nothing, allows any value.

    Raises ValueError, TypeError or AttributeError for what is no JSON schema.
    """
    expansion = _Expansion(References(whole))
    return [Alternative(rules) for rules in expansion.expand(schema, frozenset())]


def listed_texts(alternatives: Sequence[Alternative]) -> list[str] | None:
    """The strings that a value may be, if they are listed and it may be something else, too. None:
    it may be other strings, or strings and ``null`` alone."""
    texts: list[str] = []
    others = others_than_strings(alternatives)
    for alternative in alternatives:
        if not alternative.allows_string():
            continue
        listed = alternative.values()
        if listed is None:
            return None
        texts += [each for each in listed if isinstance(each, str)]
    return texts if texts and others else None


def others_than_strings(alternatives: Sequence[Alternative]) -> list[Any]:
    """Schemas of the values that are neither strings nor ``null``."""
    schemas: list[Any] = []
    for alternative in alternatives:
        if not alternative.allows_string() and not alternative.names_null():
            schemas.append({"allOf": list(alternative.rules)})
    return schemas


class _Expansion:
    def __init__(self, references: References) -> None:
        self._references = references

    def expand(self, schema: Any, passed: frozenset[int]) -> list[_Rules]:
        """``passed`` has the targets of the references that led here, by id()."""
        if schema is False:
            return []
        if not isinstance(schema, dict):
            return [()]  # ``true``: any value
        own = {key: value for key, value in schema.items() if key not in _IN_PLACE}
        factors: list[list[_Rules]] = [[(own,)]]
        if "$ref" in schema:
            target = self._references.find(schema, schema["$ref"])
            if target is None or id(target) in passed:
                factors.append([()])
            else:
                factors.append(self.expand(target, passed | {id(target)}))
        for part in schema.get("allOf", ()):
            factors.append(self.expand(part, passed))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                branches = [self.expand(part, passed) for part in schema[key]]
                factors.append(list(itertools.chain.from_iterable(branches)))
        expanded = []
        for chosen in itertools.product(*factors):
            expanded.append(tuple(itertools.chain.from_iterable(chosen)))
            if len(expanded) > _MOST_ALTERNATIVES:
                raise ValueError(f"more than {_MOST_ALTERNATIVES} alternatives")
        return expanded

"""Grammars of values in Gemma's notation: JSON with bare names and a marker around strings. Pure.

    {city:<escape>Rome<escape>,days:[1,2],deep:{sure:true}}

llguidance's own grammar of JSON has no such notation. So here the rules are made from the schema;
``lark.py`` says how they are written.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jitney.errors import InvalidArgumentError
from jitney.text.json_schema import ALLOWS_ALL

from jitney_gateway.lark import ANY_TEXT_IN_LARK, Spell, without_text
from jitney_gateway.schema_alternatives import Alternative, alternatives_of
from jitney_gateway.string_rules import lark_of_string

_NOT_KEPT = (
    "not", "if", "contains", "uniqueItems", "prefixItems", "additionalItems", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "dependencies", "dependentRequired",
    "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
"""Keywords that these rules cannot keep."""
_ALLOWS_ALL = {**ALLOWS_ALL, "minProperties": (0,)}
"""Their values that allow everything."""
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_READ_BARE = re.compile(r"[\w.$-]+")
"""The names that the parser reads without markers."""
_BARE_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
"""Any name of a property, in Lark."""
_COMMA = '","'


class ValueRules:
    """Makes the rules for the values of one function's arguments."""

    def __init__(
        self,
        whole: Mapping[str, Any],
        prefix: str,
        quote: str,
        spell: Spell,
        *,
        quote_is_token: bool,
    ) -> None:
        """``whole`` is the schema of the arguments. The names of the rules begin with ``prefix``,
        in small letters. ``quote`` is the marker before and after a string."""
        self.rules: list[str] = []
        """The rules that were made."""
        self._whole = whole
        self._prefix = prefix
        self._quote = quote
        self._spell = spell
        self._quote_is_token = quote_is_token
        # A schema that refers to itself must find its own rule. Schemas are told apart by id(),
        # because equal ones may refer to different schemas: that depends on the `$id` around them.
        self._names: dict[int, str] = {}
        """id() of a schema -> the name of its rule."""
        self._schemas: list[Any] = []
        """Keeps these schemas alive, so that no other object gets the id() of one."""
        self._joined: dict[tuple[int, ...], dict[str, Any]] = {}
        """id() of each of several schemas -> the schema of the values that fit all of them."""

    def value(self, schema: Any) -> str:
        """The name of the rule for a value of ``schema``. Raises InvalidArgumentError for what no
        grammar keeps."""
        if id(schema) in self._names:
            return self._names[id(schema)]
        name = f"{self._prefix}_v{len(self._names)}"
        self._names[id(schema)] = name
        self._schemas.append(schema)
        options: list[str] = []
        for alternative in alternatives_of(schema, self._whole, exact=True):
            options += self._options_of(alternative, f"{name}_{len(options)}")
        if not options:
            raise InvalidArgumentError("no value fits")
        self.rules.append(f"{name}: {' | '.join(dict.fromkeys(options))}")
        return name

    def _value_of_all(self, schemas: Sequence[Any]) -> str:
        """The name of the rule for a value that fits each of several schemas."""
        schemas = [schema for schema in schemas if schema is not True]
        if not schemas:
            return self.value(True)
        if len(schemas) == 1:
            return self.value(schemas[0])
        # The joined schema is made once, so that its rule is found again (by id()). Else a schema
        # that refers to itself would get rule after rule, without end.
        key = tuple(map(id, schemas))
        if key not in self._joined:
            self._joined[key] = {"allOf": schemas}
        return self.value(self._joined[key])

    def _options_of(self, alternative: Alternative, name: str) -> list[str]:
        """What a value of an alternative may be: a listed value, or any value of a type."""
        for rule in alternative.rules:
            for keyword in _NOT_KEPT:
                if keyword in rule and rule[keyword] not in _ALLOWS_ALL.get(keyword, ()):
                    raise InvalidArgumentError(f"{keyword!r} is not supported")
            if isinstance(rule.get("items"), list):  # as prefixItems was called before 2020-12
                raise InvalidArgumentError("'items' with a list is not supported")
        types = _types_of(alternative)
        listed = alternative.values()
        if listed is None:
            return [self._value_of_type(type_, alternative, name) for type_ in types]
        options = []
        for value in listed:
            if isinstance(value, str) or not _is_of(value, types):
                continue
            if all(_keeps_bounds(value, rule) for rule in alternative.rules):
                options.append(self._spell(self._written(value)))
        if "string" in types and alternative.allows_string():
            options.append(self._string(alternative, name))
        return options

    def _value_of_type(self, type_: str, alternative: Alternative, name: str) -> str:
        """Any value of one type that fits the alternative."""
        match type_:
            case "string":
                return self._string(alternative, name)
            case "null":
                return '"null"'
            case "boolean":
                return '"true" | "false"'
            case "array":
                return self._array(alternative)
            case "object":
                return self._object(alternative, name)
        bounds = []
        for rule in alternative.rules:
            bounds.append({key: value for key, value in rule.items() if key in _OF_NUMBERS})
        return f"%json {json.dumps({'type': type_, 'allOf': bounds})}"

    def _string(self, alternative: Alternative, name: str) -> str:
        text = lark_of_string(
            alternative, self._quote, ends_inside=lambda listed: self._quote in listed
        )
        mark = self._spell(self._quote)
        terminal = name.upper()
        if self._quote_is_token:
            # The marker's text may come as other tokens, too. The parser would end the string
            # there, so no string has that text.
            self.rules.append(f"{terminal}: {text or without_text(self._quote)}")
            return f"{mark} {terminal} {mark}"
        if text is None:
            self.rules.append(f"{name}_text[suffix={mark}]: {ANY_TEXT_IN_LARK}")
            return f"{mark} {name}_text"
        self.rules.append(f"{terminal}: {text} {mark}")
        return f"{mark} {terminal}"

    def _array(self, alternative: Alternative) -> str:
        items = [rule["items"] for rule in alternative.rules if "items" in rule]
        item = self._value_of_all(items)
        bounds_below = [rule["minItems"] for rule in alternative.rules if "minItems" in rule]
        bounds_above = [rule["maxItems"] for rule in alternative.rules if "maxItems" in rule]
        least = max(bounds_below, default=0)
        most = min(bounds_above, default=None)
        if most == 0:
            return '"[" "]"'
        # One item, and then the others with a comma before each.
        least_others = max(least - 1, 0)
        most_others = "" if most is None else most - 1
        items_in_lark = f"{item} ({_COMMA} {item}){{{least_others},{most_others}}}"
        if most == 1:
            items_in_lark = item  # Lark has no {0,0}
        if least == 0:
            items_in_lark = f"({items_in_lark})?"
        return f'"[" {items_in_lark} "]"'

    def _object(self, alternative: Alternative, prefix: str) -> str:
        """The names of its rules begin with ``prefix``."""
        members = alternative.members()
        if not members.properties and False not in members.others:
            pair = f'{_BARE_NAME} ":" {self._value_of_all(members.others)}'
            return f'"{{" ({pair} ({_COMMA} {pair})*)? "}}"'
        arguments = {}
        for name, schemas in members.properties.items():
            is_impossible = False in schemas
            if is_impossible and name not in members.required:
                continue
            key = self._spell(f"{self._name(name)}:")
            arguments[name] = f"{key} {self._value_of_all(schemas)}"
        listed = argument_list(arguments, members.required, separator=_COMMA, prefix=prefix)
        self.rules += listed.rules
        return f'"{{" {listed.lark} "}}"'

    def _name(self, name: str) -> str:
        """The name of a property: between markers, if the parser could not read it without."""
        return name if _READ_BARE.fullmatch(name) else f"{self._quote}{name}{self._quote}"

    def _written(self, value: Any) -> str:
        """A value in Gemma's notation."""
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, dict):
            pairs = [f"{self._name(name)}:{self._written(part)}" for name, part in value.items()]
            return f"{{{','.join(pairs)}}}"
        return json.dumps(value)


class ArgumentList(NamedTuple):
    """Arguments that are written one by one, in Lark."""

    lark: str
    rules: list[str]
    """The rules that it uses."""


def argument_list(
    arguments: Mapping[str, str], required_names: Sequence[str], *, separator: str, prefix: str
) -> ArgumentList:
    """The list of a function's arguments, or of an object's members.

    ``arguments`` has the Lark of each argument by its name. ``separator`` is Lark, too. Those that
    are required come first, then any of the others in their order. The names of the rules begin
    with ``prefix``. With ``,`` as the separator and two arguments ``a`` and ``b`` this gives:

    - both required: ``a , b``
    - ``a`` required: ``a (, b)?``
    - none required: ``(a (, b)? | b)?``, because the first one has no separator before it
    """
    required = [name for name in dict.fromkeys(required_names) if name in arguments]
    is_required = set(required)
    optional = [lark for name, lark in arguments.items() if name not in is_required]
    if required or not separator:
        begin = f" {separator} ".join(arguments[name] for name in required)
        more = [f"({separator} {lark})?" for lark in optional]
        return ArgumentList(" ".join([begin, *more]), [])
    if not optional:
        return ArgumentList("", [])
    rules: list[str] = []
    return ArgumentList(f"({_at_least_one(optional, separator, prefix, rules)})?", rules)


def _at_least_one(arguments: Sequence[str], separator: str, prefix: str, rules: list[str]) -> str:
    """One or more of the arguments, in their order. Adds the rules for it to ``rules``."""
    if len(arguments) == 1:
        return arguments[0]
    # Each half has a rule, because the second one is needed twice. So the grammar grows with the
    # number of arguments, and not with its square.
    middle = len(arguments) // 2
    halves = []
    for half in (arguments[:middle], arguments[middle:]):
        lark = _at_least_one(half, separator, prefix, rules)
        if len(half) > 1:
            name = f"{prefix}_part{len(rules)}"
            rules.append(f"{name}: {lark}")
            lark = name
        halves.append(lark)
    first, second = halves
    return f"{first} ({separator} {second})? | {second}"


def _types_of(alternative: Alternative) -> list[str]:
    """The types that all of its rules allow. ``number`` stands for ``integer``, too."""
    types = list(_TYPES)
    for rule in alternative.rules:
        named = rule.get("type", _TYPES)
        allowed = [named] if isinstance(named, str) else list(named)
        if "number" in allowed:
            allowed.append("integer")
        types = [type_ for type_ in types if type_ in allowed]
    if "number" in types:
        types.remove("integer")
    return types


def _is_of(value: Any, types: Sequence[str]) -> bool:
    """Whether a value that is no string has one of these types."""
    if value is None:
        return "null" in types
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int):
        return "integer" in types or "number" in types
    if isinstance(value, float):
        return "number" in types
    if isinstance(value, list):
        return "array" in types
    return "object" in types


def _keeps_bounds(value: Any, rule: Mapping[str, Any]) -> bool:
    """Whether a listed value lies within the rule's bounds for numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    multiple = rule.get("multipleOf")
    if multiple and value % multiple != 0:
        return False
    return (
        rule.get("minimum", value) <= value <= rule.get("maximum", value)
        and rule.get("exclusiveMinimum", -math.inf) < value
        and value < rule.get("exclusiveMaximum", math.inf)
    )

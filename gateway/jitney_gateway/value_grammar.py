"""Grammars of values in Gemma's notation: JSON with bare names and a marker around strings.

    {city:<escape>Rome<escape>,days:[1,2],deep:{sure:true}}

llguidance's own grammar of JSON cannot write it, so here the rules are made from the schema.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jitney.errors import InvalidArgumentError

from jitney_gateway.schema_alternatives import Alternative, alternatives_of
from jitney_gateway.string_rules import lark_of_string, lark_without

_NOT_KEPT = (
    "not", "if", "contains", "uniqueItems", "prefixItems", "additionalItems", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "dependencies", "dependentRequired",
    "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_READ_BARE = re.compile(r"[\w.$-]+")
"""The names that the parser reads without markers."""
_BARE_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


class ValueRules:
    """The rules of Lark for the values of one function's arguments."""

    def __init__(
        self,
        whole: Mapping[str, Any],
        prefix: str,
        quote: str,
        spelt: Callable[[str], str],
        *,
        quote_is_token: bool,
    ) -> None:
        """``whole`` is the schema of the arguments. The names of rules begin with ``prefix``, in
        small letters. ``quote`` is the marker before and after a string, and ``spelt`` makes Lark
        of a fixed text."""
        self.rules: list[str] = []
        self._whole = whole
        self._prefix = prefix
        self._quote = quote
        self._spelt = spelt
        self._quote_is_token = quote_is_token
        self._names: dict[int, str] = {}  # by id() of the schema, which may refer to itself
        self._schemas: list[Any] = []  # keeps them alive
        self._joined: dict[tuple[int, ...], dict[str, Any]] = {}

    def value(self, schema: Any) -> str:
        """The name of the rule for a value of ``schema``. Raises InvalidArgumentError for what no
        grammar keeps."""
        if id(schema) in self._names:
            return self._names[id(schema)]
        name = f"{self._prefix}_v{len(self._names)}"
        self._names[id(schema)] = name
        self._schemas.append(schema)
        options: list[str] = []
        for alternative in alternatives_of(schema, self._whole):
            options += self._options(alternative, f"{name}_{len(options)}")
        if not options:
            raise InvalidArgumentError("no value fits")
        self.rules.append(f"{name}: {' | '.join(dict.fromkeys(options))}")
        return name

    def _value_of_all(self, schemas: Sequence[Any]) -> str:
        """The same for a value that keeps all of several schemas."""
        schemas = [schema for schema in schemas if schema is not True]
        if len(schemas) < 2:
            return self.value(schemas[0] if schemas else True)
        key = tuple(map(id, schemas))
        if key not in self._joined:  # one for all, or a tree would have no end of them
            self._joined[key] = {"allOf": schemas}
        return self.value(self._joined[key])

    def _options(self, alternative: Alternative, name: str) -> list[str]:
        for rule in alternative.rules:
            for keyword in _NOT_KEPT:
                if keyword in rule:
                    raise InvalidArgumentError(f"{keyword!r} is not supported")
        types = _types_of(alternative)
        listed = alternative.values()
        if listed is not None:
            others = [each for each in listed if not isinstance(each, str)]
            options = [self._literal(each) for each in others if _is_of(each, types)]
            types = [kind for kind in types if kind == "string" and alternative.allows_string()]
        else:
            options = []
        for kind in types:
            options.append(self._option(kind, alternative, name))
        return options

    def _option(self, kind: str, alternative: Alternative, name: str) -> str:
        match kind:
            case "string":
                return self._string(alternative, name)
            case "null":
                return '"null"'
            case "boolean":
                return '"true" | "false"'
            case "array":
                return self._array(alternative)
            case "object":
                return self._object(alternative)
        bounds = []
        for rule in alternative.rules:
            bounds.append({key: value for key, value in rule.items() if key in _OF_NUMBERS})
        return f"%json {json.dumps({'type': kind, 'allOf': bounds})}"

    def _string(self, alternative: Alternative, name: str) -> str:
        text = lark_of_string(alternative, self._quote)
        mark = self._spelt(self._quote)
        terminal = name.upper()
        if self._quote_is_token:
            # A token that is not special could be read as text, too.
            self.rules.append(f"{terminal}: {text or lark_without(self._quote)}")
            return f"{mark} {terminal} {mark}"
        if text is None:
            self.rules.append(f"{name}_text[suffix={mark}]: /(?s:.*)/")
            return f"{mark} {name}_text"
        self.rules.append(f"{terminal}: {text} {mark}")
        return f"{mark} {terminal}"

    def _array(self, alternative: Alternative) -> str:
        items = [rule["items"] for rule in alternative.rules if "items" in rule]
        item = self._value_of_all(items)
        least = max([0, *(rule.get("minItems", 0) for rule in alternative.rules)])
        mosts = [rule["maxItems"] for rule in alternative.rules if "maxItems" in rule]
        if mosts and min(mosts) == 0:
            return '"[" "]"'
        most = str(min(mosts) - 1) if mosts else ""
        some = f'{item} ("," {item}){{{max(least - 1, 0)},{most}}}'
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'

    def _object(self, alternative: Alternative) -> str:
        properties: dict[str, list[Any]] = {}
        required: list[str] = []
        others: list[Any] = []
        for rule in alternative.rules:
            for name, schema in rule.get("properties", {}).items():
                properties.setdefault(name, []).append(schema)
            required += rule.get("required", ())
            others.append(rule.get("additionalProperties", True))
        for name in required:
            properties.setdefault(name, others)
        if not properties and False not in others:
            pair = f'{_BARE_NAME} ":" {self._value_of_all(others)}'
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        arguments = {}
        for name, schemas in properties.items():
            if False in schemas and name not in required:
                continue
            value = self._value_of_all(schemas)
            arguments[name] = f"{self._spelt(self._name(name) + ':')} {value}"
        return f'"{{" {argument_list(arguments, required, separator=_COMMA)} "}}"'

    def _literal(self, value: Any) -> str:
        """A value that is no string, as it is written."""
        return self._spelt(self._written(value))

    def _name(self, name: str) -> str:
        """The name of a property: between markers, if the parser could not read it without."""
        return name if _READ_BARE.fullmatch(name) else f"{self._quote}{name}{self._quote}"

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote}{value}{self._quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, dict):
            pairs = [f"{self._name(name)}:{self._written(part)}" for name, part in value.items()]
            return f"{{{','.join(pairs)}}}"
        return json.dumps(value)


_COMMA = '","'


def argument_list(
    arguments: Mapping[str, str], required_names: Sequence[str], *, separator: str
) -> str:
    """Arguments that are written one by one, in Lark.

    ``arguments`` has the Lark of each argument by its name. ``separator`` is Lark, too. Those that
    are required come first, then any of the others in their order. With ``,`` as the separator and
    two arguments ``a`` and ``b`` this gives:

    - both required: ``a , b``
    - ``a`` required: ``a (, b)?``
    - none required: ``(a (, b)? | b)?``, because the first one has no separator before it
    """
    required = [name for name in dict.fromkeys(required_names) if name in arguments]
    optional = [name for name in arguments if name not in required]
    more = [f"({separator} {arguments[name]})?" for name in optional]
    if required:
        begin = f" {separator} ".join(arguments[name] for name in required)
        return " ".join([begin, *more])
    lists = []
    for index, name in enumerate(optional):
        lists.append(" ".join([arguments[name], *more[index + 1 :]]))
    return f"({' | '.join(lists)})?" if lists else ""


def _types_of(alternative: Alternative) -> list[str]:
    """The types that all of its rules allow. Each integer is a number too."""
    types = list(_TYPES)
    for rule in alternative.rules:
        named = rule.get("type", _TYPES)
        named = [named] if isinstance(named, str) else list(named)
        if "number" in named:
            named.append("integer")
        types = [kind for kind in types if kind in named]
    return [kind for kind in types if kind != "integer" or "number" not in types]


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
    return ("array" if isinstance(value, list) else "object") in types

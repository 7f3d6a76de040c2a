"""Grammars of a call's arguments, which follow the JSON schema of the tool. Pure.

``tool_grammar.py`` puts them into the grammars of calls.
"""

import json
import keyword
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jitney.errors import InvalidArgumentError

from jitney_gateway.formats import ToolFormat
from jitney_gateway.lark import (
    ANY_TEXT_IN_LARK,
    WRONG_SCHEMA,
    Spell,
    json_property,
    json_value,
)
from jitney_gateway.schema_alternatives import (
    alternatives_of,
    listed_texts,
    others_than_strings,
)
from jitney_gateway.string_rules import lark_of_string, with_known_formats
from jitney_gateway.value_grammar import ValueRules, argument_list

_COMMA = json.dumps(", ")
_END_OF_PARAMETER = "</parameter>"
_END_OF_VALUE = json.dumps(f"\n{_END_OF_PARAMETER}")
_TEXT_RULE = "text"
"""The name of the rule for any text up to the end of a parameter."""


class Arguments(NamedTuple):
    """A function's arguments in Lark."""

    lark: str
    rules: list[str]
    """The rules that it uses."""


FindArguments = Callable[[Mapping[str, Any], ToolFormat, str, Spell], Arguments]
"""Writes the arguments of a function. Its parameters are the function, the format of calls, what
the names of its rules begin with, and what writes fixed texts."""


def shared_rules(row: ToolFormat) -> list[str]:
    """The rules that the arguments of all functions use."""
    if row.body != "xml":
        return []
    return [f"{_TEXT_RULE}[suffix={json.dumps(_END_OF_PARAMETER)}]: {ANY_TEXT_IN_LARK}"]


def checked_arguments(
    function: Mapping[str, Any], row: ToolFormat, prefix: str, spell: Spell
) -> Arguments:
    """The arguments of a function. Raises InvalidArgumentError, with the function's name, for a
    schema that no grammar can keep."""
    try:
        return arguments_of_function(function, row, prefix, spell)
    except InvalidArgumentError as error:
        reason = f"tools: function {function['name']!r}: {error}"
        raise InvalidArgumentError(reason) from None
    except WRONG_SCHEMA:
        reason = f"tools: the parameters of {function['name']!r} are no JSON schema"
        raise InvalidArgumentError(reason) from None


def arguments_if_kept(
    function: Mapping[str, Any], row: ToolFormat, prefix: str, spell: Spell
) -> Arguments:
    """The arguments of a function; if no grammar can keep its schema, any arguments. Raises
    InvalidArgumentError if the function is strict."""
    try:
        return checked_arguments(function, row, prefix, spell)
    except InvalidArgumentError:
        if function.get("strict"):
            raise
    if row.body == "python":
        # Any names, with JSON as the values.
        argument = "/[A-Za-z_][A-Za-z0-9_]*=/ %json {}"
        return Arguments(f"({argument} ({_COMMA} {argument})*)?", [])
    # For the other formats a tool that is not strict has a schema that allows any object
    # (`strict_grammar._with_free_arguments`), and a grammar keeps that one.
    assert row.body == "xml"
    # Any tags, with any texts between them.
    return Arguments(f'(/<parameter=[^>\\n]+>\\n/ {_TEXT_RULE} "\\n")*', [])


def schema_of_function(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a function's arguments follow: an object, without unknown formats."""
    schema = {"type": "object", **(function.get("parameters") or {})}
    return with_known_formats(schema)


def arguments_of_function(
    function: Mapping[str, Any], row: ToolFormat, prefix: str, spell: Spell
) -> Arguments:
    """The arguments of a function. The names of their rules begin with ``prefix``.

    Raises InvalidArgumentError for a schema that no grammar can keep, and one of WRONG_SCHEMA for
    what is no JSON schema.
    """
    schema = schema_of_function(function)
    match row.body:
        case "json":
            return Arguments(json_value(schema), [])
        case "gemma":
            quote_is_token = spell(row.quote) != json.dumps(row.quote)
            rules = ValueRules(schema, prefix, row.quote, spell, quote_is_token=quote_is_token)
            return Arguments(rules.value(schema), rules.rules)
        case "python":
            check_python_name(function["name"])
            return _python_arguments(schema, prefix)
        case _:
            return _tagged_arguments(schema, prefix)


def _possible_properties(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The properties of an object, without those that it must not have: their schema is
    ``false``."""
    properties = schema.get("properties", {})
    return {name: value for name, value in properties.items() if value is not False}


# ------------------------------------------------------------------------------- Python


def is_name_of_python(name: str) -> bool:
    """Whether a function or an argument can have that name in Python."""
    return name.isidentifier() and not keyword.iskeyword(name)


def check_python_name(name: str) -> None:
    """Raises InvalidArgumentError for what is no name in Python."""
    if not is_name_of_python(name):
        raise InvalidArgumentError(f"{name!r} is no name that Python allows")


def _python_arguments(schema: Mapping[str, Any], prefix: str) -> Arguments:
    """Arguments such as ``city="Rome", days=[1]``."""
    arguments = {}
    for name, value in _possible_properties(schema).items():
        check_python_name(name)
        begin = json.dumps(f"{name}=")
        arguments[name] = f"{begin} {json_property(name, value, schema)}"
    required = schema.get("required", ())
    listed = argument_list(arguments, required, separator=_COMMA, prefix=prefix)
    return Arguments(listed.lark, listed.rules)


# ------------------------------------------------------------------------------- tags


class _TaggedValue(NamedTuple):
    """The value of a parameter, with the tag that ends it. At least one of the fields is set. If
    both are, the value may be either."""

    rule: str | None = None
    """The right side of a rule: for JSON, or for any text."""
    terminal: str | None = None
    """The right side of a terminal: for certain texts."""


def _tagged_arguments(schema: Mapping[str, Any], prefix: str) -> Arguments:
    """Arguments such as ``<parameter=city>\\nRome\\n</parameter>\\n``."""
    arguments = {}
    terminals = []
    for index, (name, schema_of_value) in enumerate(_possible_properties(schema).items()):
        value = _tagged_value(name, schema_of_value, schema)
        choices = []
        if value.terminal is not None:
            name_of_terminal = f"{prefix}_{index}".upper()
            terminals.append(f"{name_of_terminal}: {value.terminal}")
            choices.append(name_of_terminal)
        if value.rule is not None:
            choices.append(value.rule)
        begin = json.dumps(f"<parameter={name}>")
        arguments[name] = f'{begin} "\\n" ({" | ".join(choices)}) "\\n"'
    required = schema.get("required", ())
    listed = argument_list(arguments, required, separator="", prefix=prefix)
    return Arguments(listed.lark, [*terminals, *listed.rules])


def _tagged_value(name: str, schema: Any, whole: Mapping[str, Any]) -> _TaggedValue:
    """The parser reads a value as a string if the schema allows one: then it is written without
    quotes. Any other value is JSON."""
    alternatives = alternatives_of(schema, whole)
    may_be_string = any(each.allows_string() for each in alternatives)
    if not may_be_string:
        return _TaggedValue(rule=f"{json_property(name, schema, whole)} {_END_OF_VALUE}")
    texts = []
    for alternative in alternatives:
        if alternative.names_null():
            texts.append('"null"')
        if not alternative.allows_string():
            continue
        try:
            text = lark_of_string(alternative, forbidden=_END_OF_PARAMETER)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"parameter {name!r}: {error}") from None
        if text is None:  # any string
            return _TaggedValue(rule=_TEXT_RULE)
        texts.append(text)
    terminal = f"({' | '.join(texts)}) {_END_OF_VALUE}"
    if listed_texts(alternatives) is None:
        # The parser reads every value as text, so there is no JSON beside it.
        return _TaggedValue(terminal=terminal)
    others = {"anyOf": others_than_strings(alternatives)}
    return _TaggedValue(
        rule=f"{json_property(name, others, whole)} {_END_OF_VALUE}",
        terminal=terminal,
    )

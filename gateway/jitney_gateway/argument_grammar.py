"""Grammars of a call's arguments, which follow the JSON schema of the tool. Pure.

``tool_grammar.py`` puts them into the grammars of calls.
"""

import json
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jitney.errors import InvalidArgumentError
from jitney.text.json_schema import ALLOWS_ALL
from jitney.text.schema_finiteness import leave_out_infinite
from jitney.text.schema_references import References

from jitney_gateway.formats import ToolFormat
from jitney_gateway.lark import (
    ANY_TEXT_IN_LARK,
    WRONG_SCHEMA,
    Spell,
    json_part,
    json_value,
)
from jitney_gateway.schema_alternatives import (
    Alternative,
    Members,
    all_of,
    alternatives_of,
    listed_texts,
    others_than_strings,
    schema_of_member,
)
from jitney_gateway.string_rules import lark_of_string, with_known_formats
from jitney_gateway.tagged_arguments import END_OF_VALUE
from jitney_gateway.tagged_value import is_surely_text, lists_without_type, may_be_null
from jitney_gateway.value_grammar import ValueRules, argument_list

_COMMA = json.dumps(", ")
_END_OF_PARAMETER = "</parameter>"
_LAST_TAG = json.dumps(f"\n{_END_OF_PARAMETER}")
_NOT_KEPT = (
    "enum", "const", "not", "if", "patternProperties", "propertyNames", "dependencies",
    "dependentRequired", "dependentSchemas",
)  # fmt: skip
"""Keywords of the parameters that arguments which are written one by one cannot keep."""
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
    if row.body == "json":
        return Arguments(json_value(schema), [])
    # A model that begins an argument that nothing finite fits could not end it.
    if not leave_out_infinite(schema, References(schema)):
        raise InvalidArgumentError("no arguments fit the parameters")
    match row.body:
        case "gemma":
            quote_is_token = spell(row.quote) != json.dumps(row.quote)
            rules = ValueRules(schema, prefix, row.quote, spell, quote_is_token=quote_is_token)
            return Arguments(rules.value(schema), rules.rules)
        case "python":
            check_python_name(function["name"])
            return _python_arguments(schema, prefix)
        case _:
            return _tagged_arguments(schema, prefix)


# ------------------------------------------------------------------------------- one by one

WriteArgument = Callable[[str, Any], str]
"""Writes an argument in Lark. Its parameters are the argument's name and its schema."""


def _listed_arguments(
    schema: Mapping[str, Any], prefix: str, *, separator: str, write: WriteArgument
) -> Arguments:
    """Arguments that are written one by one, for formats in which they are no JSON object."""
    ways: list[str] = []
    rules: list[str] = []
    for alternative in alternatives_of(schema, schema, exact=True):
        if not alternative.allows_object():
            continue
        members = alternative.members()
        _check_kept(alternative, members)
        # A member whose schema is ``false`` must not be there.
        possible = {name: of for name, of in members.properties.items() if False not in of}
        if not possible.keys() >= set(members.required):
            continue
        arguments = {name: write(name, all_of(schemas)) for name, schemas in possible.items()}
        listed = argument_list(
            arguments,
            members.required,
            separator=separator,
            prefix=f"{prefix}_way{len(ways)}",
        )
        ways.append(listed.lark)
        rules += listed.rules
    if not ways:
        raise InvalidArgumentError("no arguments fit the parameters")
    if len(ways) == 1:
        return Arguments(ways[0], rules)
    return Arguments(f"({' | '.join(dict.fromkeys(ways))})", rules)


def _check_kept(alternative: Alternative, members: Members) -> None:
    """Raise InvalidArgumentError for what the schema says of the arguments together, and a list of
    them cannot keep. Each listed argument is named by the schema."""
    for rule in alternative.rules:
        for name in _NOT_KEPT:
            if name in rule and rule[name] not in ALLOWS_ALL.get(name, ()):
                raise InvalidArgumentError(f"{name!r} of the parameters is not supported")
        if rule.get("minProperties", 0) > len(members.required):
            raise InvalidArgumentError("'minProperties' of the parameters is not supported")
        if rule.get("maxProperties", len(members.properties)) < len(members.properties):
            raise InvalidArgumentError("'maxProperties' of the parameters is not supported")


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

    def write(name: str, of_value: Any) -> str:
        check_python_name(name)
        return f"{json.dumps(f'{name}=')} {json_part(of_value, schema)}"

    return _listed_arguments(schema, prefix, separator=_COMMA, write=write)


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
    terminals: list[str] = []
    has_branches = len(alternatives_of(schema, schema)) > 1

    def write(name: str, of_value: Any) -> str:
        _check_tag(name)
        if has_branches:
            _check_read_alike(name, of_value, schema)
        value = _tagged_value(name, of_value, schema)
        choices = []
        if value.terminal is not None:
            name_of_terminal = f"{prefix}_{len(terminals)}".upper()
            terminals.append(f"{name_of_terminal}: {value.terminal}")
            choices.append(name_of_terminal)
        if value.rule is not None:
            choices.append(value.rule)
        begin = json.dumps(f"<parameter={name}>", ensure_ascii=False)
        return f'{begin} "\\n" ({" | ".join(choices)}) "\\n"'

    arguments = _listed_arguments(schema, prefix, separator="", write=write)
    return Arguments(arguments.lark, [*terminals, *arguments.rules])


def _check_tag(name: str) -> None:
    """Raise InvalidArgumentError for a name that ends its tag."""
    if not name or ">" in name or "\n" in name:
        raise InvalidArgumentError(f"parameter {name!r}: a name between tags has no > or newline")


def _check_read_alike(name: str, schema: Any, whole: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError for an argument that ``schema`` allows in one of several forms of
    the arguments, if the parser would read it differently because of the other forms."""
    read_by = schema_of_member(name, whole)
    if _reading(schema, whole) != _reading(read_by, whole):
        reason = "its types differ between the branches of the parameters"
        raise InvalidArgumentError(f"parameter {name!r}: {reason}")


def _reading(schema: Any, whole: Mapping[str, Any]) -> tuple[object, ...]:
    """What decides how the parser reads a value."""
    listed = listed_texts(alternatives_of(schema, whole))
    return is_surely_text(schema, whole), may_be_null(schema, whole), listed


def _tagged_value(name: str, schema: Any, whole: Mapping[str, Any]) -> _TaggedValue:
    """The parser reads a value as a string if the schema allows one: then it is written without
    quotes. Any other value is JSON."""
    alternatives = alternatives_of(schema, whole, exact=True)
    may_be_string = any(each.allows_string() for each in alternatives)
    if not may_be_string:
        return _TaggedValue(rule=f"{json_part(schema, whole)} {_LAST_TAG}")
    texts = []
    for alternative in alternatives:
        if alternative.names_null():
            texts.append('"null"')
        if not alternative.allows_string():
            continue
        try:
            text = lark_of_string(alternative, _END_OF_PARAMETER, ends_inside=END_OF_VALUE.search)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"parameter {name!r}: {error}") from None
        if text is None:  # any string
            return _TaggedValue(rule=_TEXT_RULE)
        texts.append(text)
    terminal = f"({' | '.join(texts)}) {_LAST_TAG}"
    others = _read_as_json(schema, alternatives)
    if not others:
        return _TaggedValue(terminal=terminal)
    return _TaggedValue(
        rule=f"{json_part({'anyOf': others}, whole)} {_LAST_TAG}",
        terminal=terminal,
    )


def _read_as_json(schema: Any, alternatives: Sequence[Alternative]) -> list[Any]:
    """Schemas of the values that the parser reads as JSON, where it reads others as text."""
    if lists_without_type(schema):
        values = [each for each in schema["enum"] if not isinstance(each, str | None)]
        return [{"enum": values}] if values else []
    if listed_texts(alternatives) is None:
        return []  # every value is text
    return others_than_strings(alternatives)

"""Grammars of answers that must call a tool or must keep to a constraint after their reasoning.

They are values of the sampling parameter ``structured_outputs``. A call is in the model's own
syntax, and its arguments follow the tool's JSON schema. ``token_ids`` has the ids of markers that
are single tokens of the model. Other markers are spelt.

A grammar is written in llguidance's dialect of Lark. There ``<[5]>`` is the token 5, ``%json`` is a
JSON value of a schema, and ``%lark`` is a grammar inside another. A rule with ``[suffix="x"]``
takes any text up to the first ``x``, and that too.
"""

import contextlib
import json
import keyword
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from jitney.errors import InvalidArgumentError
from jitney.text.schema_references import DEFINITIONS

from jitney_gateway.formats import TOOL_FORMATS, ToolFormat, find_reasoning
from jitney_gateway.schema_alternatives import alternatives_of
from jitney_gateway.string_rules import lark_of_string
from jitney_gateway.value_grammar import ValueRules, argument_list

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Space only where chat templates write it: small models lose themselves in free space."""
_IDENTIFIER = "urn:jitney:parameters"
"""Of a schema that has no ``$id``."""
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')
_END_OF_PARAMETER = "</parameter>"
_END_OF_VALUE = f"\n{_END_OF_PARAMETER}"
_COMMA_IN_LARK = json.dumps(", ")
_WRONG_SCHEMA = (ValueError, TypeError, AttributeError, RecursionError)
"""What reading a value that is no JSON schema may raise."""


# ------------------------------------------------------------------------------- forced calls


def grammar_of_calls(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: Any,
    parallel: bool,
    tool_format: str,
    token_ids: Mapping[str, int] | None = None,
) -> dict[str, str] | None:
    """The grammar of an answer that must call; None if it need not.

    ``tool_choice`` is ``required``, for a call of any tool (or several calls, if ``parallel``), or
    a tool with the name of the one function to call once. Raises InvalidArgumentError for a
    function that is not among the tools, and for a name that the format cannot write.
    """
    if tool_choice in (None, "none", "auto"):
        return None
    functions = [tool["function"] for tool in tools]
    if tool_choice != "required":
        name = tool_choice["function"]["name"]
        functions = [function for function in functions if function["name"] == name]
        parallel = False
    if not functions:
        raise InvalidArgumentError.of("tool_choice", tool_choice, "one of the request's tools")

    row = TOOL_FORMATS[tool_format]
    syntax = row.syntax
    ids = token_ids or {}
    more_calls = ""
    if parallel and syntax.between_calls is not None:
        more_calls = f"({_spelt(syntax.between_calls, ids)} call)*"
    begin = _spelt(syntax.before_all, ids)
    end = _spelt(syntax.after_all, ids)
    names_of_rules = [f"call{index}" for index in range(len(functions))]
    rules = [
        f"start: {begin} call {more_calls} {end}",
        f"call: {' | '.join(names_of_rules)}",
    ]
    if row.body == "xml":
        rules.append(f"text[suffix={json.dumps(_END_OF_PARAMETER)}]: /(?s:.*)/")
    for name_of_rule, function in zip(names_of_rules, functions, strict=True):
        before = _spelt(syntax.before_call.replace("NAME", function["name"]), ids)
        after = _spelt(syntax.after_call.replace("NAME", function["name"]), ids)
        arguments = _checked_arguments(function, row, name_of_rule, ids)
        rules.append(f"{name_of_rule}: {before} {arguments.lark} {after}")
        rules += arguments.rules
    return {"grammar": "\n".join(rules)}


class _Arguments(NamedTuple):
    """A function's arguments in Lark, and the rules that they use."""

    lark: str
    rules: list[str]


def _checked_arguments(
    function: Mapping[str, Any], row: ToolFormat, prefix: str, ids: Mapping[str, int]
) -> _Arguments:
    """The names of its rules begin with ``prefix``. Raises InvalidArgumentError."""
    try:
        return _arguments(function, row, prefix, ids)
    except InvalidArgumentError as error:
        reason = f"tools: function {function['name']!r}: {error}"
        raise InvalidArgumentError(reason) from None
    except _WRONG_SCHEMA:
        reason = f"tools: the parameters of {function['name']!r} are no JSON schema"
        raise InvalidArgumentError(reason) from None


def _arguments(
    function: Mapping[str, Any], row: ToolFormat, prefix: str, ids: Mapping[str, int]
) -> _Arguments:
    schema = {"type": "object", **(function.get("parameters") or {})}
    if row.body == "json":
        return _Arguments(_json_value(schema), [])
    if row.body == "gemma":
        spelt = partial(_spelt, token_ids=ids)
        rules = ValueRules(schema, prefix, row.quote, spelt, quote_is_token=row.quote in ids)
        return _Arguments(rules.value(schema), rules.rules)
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    properties = {name: value for name, value in properties.items() if value is not False}
    arguments = {}
    if row.body == "python":
        _check_python_name(function["name"])
        for name, value in properties.items():
            _check_python_name(name)
            arguments[name] = f"{json.dumps(f'{name}=')} {_json_property(name, value, schema)}"
        return _Arguments(argument_list(arguments, required, separator=_COMMA_IN_LARK), [])
    terminals = []
    for index, (name, value) in enumerate(properties.items()):
        written = _xml_value(name, value, schema)
        terminal = f"{prefix}_{index}".upper()
        if written.terminal is not None:
            terminals.append(f"{terminal}: {written.terminal}")
        lark = written.lark or terminal
        arguments[name] = f'{json.dumps(f"<parameter={name}>")} "\\n" {lark} "\\n"'
    return _Arguments(argument_list(arguments, required, separator=""), terminals)


def _check_python_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise InvalidArgumentError(f"{name!r} is no name that Python allows")


class _Value(NamedTuple):
    """The value of a parameter up to the tag that ends it. One of the two is set."""

    lark: str | None = None
    terminal: str | None = None
    """The right side of a terminal."""


def _xml_value(name: str, schema: Any, whole: Mapping[str, Any]) -> _Value:
    """What the parser reads as a string is written as one, without quotes; any other value is
    JSON."""
    alternatives = alternatives_of(schema, whole)
    if not any(each.allows_string() for each in alternatives):
        return _Value(lark=f"{_json_property(name, schema, whole)} {json.dumps(_END_OF_VALUE)}")
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
        if text is None:
            return _Value(lark="text")  # the rule of that name, which ends with the tag
        texts.append(text)
    return _Value(terminal=f"({' | '.join(texts)}) {json.dumps(_END_OF_VALUE)}")


# ------------------------------------------------------------------------------- after reasoning


def after_reasoning(
    constraint: Mapping[str, Any],
    reasoning_format: str | None,
    token_ids: Mapping[str, int] | None = None,
    *,
    is_call: bool = False,
) -> Mapping[str, Any]:
    """The same constraint for a model that may reason first: what follows its reasoning must keep
    to it. ``is_call``: it is what :func:`grammar_of_calls` has made."""
    reasoning = find_reasoning(reasoning_format)
    if reasoning is None:
        return constraint
    ids = token_ids or {}
    end = _spelt(reasoning.end, ids)
    if any(reasoning.end.startswith(marker) for marker in ids):
        # No text can spell a special token: any text is reasoning, and the token ends it.
        before_answer = f"thoughts {end} SPACE?"
        thoughts_rule = "thoughts: /(?s:.*)/"
    else:
        # The marker is text: reasoning goes up to its first occurrence.
        before_answer = "thoughts SPACE?"
        thoughts_rule = f"thoughts[suffix={end}]: /(?s:.*)/"
    if not reasoning.is_open:
        before_answer = f"({_spelt(reasoning.begin, ids)} {before_answer})?"
    if reasoning.before_answer and not is_call:
        before_answer = f"{before_answer} {_spelt(reasoning.before_answer, ids)}"
    ((kind, value),) = constraint.items()  # it has one key
    rules = [
        f"start: {before_answer} answer",
        thoughts_rule,
        r"SPACE: /\s{1,4}/",
        f"answer: {_constrained_answer(kind, value)}",
    ]
    return {"grammar": "\n".join(rules)}


def _constrained_answer(kind: str, value: Any) -> str:
    """A constraint in Lark: ``kind`` is its only key in ``structured_outputs``."""
    if kind == "json":
        return _json_of_schema(value)
    if kind == "json_object":
        return _json_of_schema({"type": "object"})
    if kind == "regex":
        # A slash ends a regular expression of Lark, unless there is a backslash before it.
        escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", value)
        return f"/{escaped}/"
    if kind == "choice":
        return f"({' | '.join(map(json.dumps, value))})"
    assert kind == "grammar", kind
    return f"%lark {{\n{value}\n}}"


# ------------------------------------------------------------------------------- parts of both


def _spelt(text: str, token_ids: Mapping[str, int]) -> str:
    """A fixed text in Lark: markers as their tokens, all else as strings."""
    if not token_ids:
        return json.dumps(text, ensure_ascii=False)
    markers = "|".join(map(re.escape, token_ids))
    parts = []
    for part in re.split(f"({markers})", text):
        if part in token_ids:
            parts.append(f"<[{token_ids[part]}]>")
        else:
            parts.append(json.dumps(part, ensure_ascii=False))
    return " ".join(parts)


def _json_of_schema(schema: Any) -> str:
    """JSON that follows a schema, which may itself be given as a text of JSON."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        bound = "a JSON schema that is an object"
        raise InvalidArgumentError.of("structured_outputs.json", schema, bound)
    return _json_value(schema)


def _json_value(schema: Mapping[str, Any]) -> str:
    """JSON that follows a whole schema."""
    return "%json " + json.dumps({"x-guidance": _SPACING, **schema})


def _json_property(name: str, schema: Any, whole: Mapping[str, Any]) -> str:
    """JSON that follows ``schema``, which is that of a property in ``whole``."""
    own = schema if isinstance(schema, Mapping) else {}
    definitions = {key: whole[key] for key in DEFINITIONS if key in whole}
    references = _REFERENCE.findall(json.dumps([own, definitions]))
    if not references:
        return _json_value(own)
    if all(reference.startswith(("#/$defs/", "#/definitions/")) for reference in references):
        return _json_value({**definitions, **own})
    # With an id, the whole schema stays the root of what its references point to.
    identifier = whole.get("$id", _IDENTIFIER)
    pointer = quote(name.replace("~", "~0").replace("/", "~1"), safe="~")
    reference = f"{identifier}#/properties/{pointer}"
    return _json_value({"$ref": reference, "$defs": {"all": {"$id": identifier, **whole}}})

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
from typing import Any

from jitney.errors import InvalidArgumentError

from jitney_gateway.call_body import may_be_string
from jitney_gateway.formats import TOOL_FORMATS, find_reasoning

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Space only where chat templates write it: small models lose themselves in free space."""
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
    more_calls = f"({_spelt(syntax.between_calls, ids)} call)*" if parallel else ""
    begin = _spelt(syntax.before_all, ids)
    end = _spelt(syntax.after_all, ids)
    names_of_rules = [f"call{index}" for index in range(len(functions))]
    rules = [
        f"start: {begin} call {more_calls} {end}",
        f"call: {' | '.join(names_of_rules)}",
    ]
    if row.body == "xml":
        rules.append('text[suffix="</parameter>"]: /(?s:.*)/')
    for name_of_rule, function in zip(names_of_rules, functions, strict=True):
        before = _spelt(syntax.before_call.replace("NAME", function["name"]), ids)
        after = _spelt(syntax.after_call.replace("NAME", function["name"]), ids)
        arguments = _checked_arguments(function, row.body)
        rules.append(f"{name_of_rule}: {before} {arguments} {after}")
    return {"grammar": "\n".join(rules)}


def _checked_arguments(function: Mapping[str, Any], body: str) -> str:
    """The arguments of a function in Lark. Raises InvalidArgumentError."""
    try:
        return _arguments(function, body)
    except _WRONG_SCHEMA:
        reason = f"tools: the parameters of {function['name']!r} are no JSON schema"
        raise InvalidArgumentError(reason) from None


def _arguments(function: Mapping[str, Any], body: str) -> str:
    schema = {"type": "object", **(function.get("parameters") or {})}
    if body == "json":
        return _json_value(schema, schema)
    arguments = {}
    if body == "python":
        _check_python_name(function["name"])
        for name, value in schema.get("properties", {}).items():
            _check_python_name(name)
            arguments[name] = _python_argument(name, value, schema)
        return _argument_list(arguments, schema, separator=_COMMA_IN_LARK)
    for name, value in schema.get("properties", {}).items():
        arguments[name] = _xml_argument(name, value, schema)
    return _argument_list(arguments, schema, separator="")


def _argument_list(
    arguments: Mapping[str, str], schema: Mapping[str, Any], *, separator: str
) -> str:
    """Arguments that are written one by one, in Lark.

    ``arguments`` has the Lark of each argument by its name. ``separator`` is Lark, too. Those that
    ``schema`` requires come first, then any of the others in their order. With ``,`` as the
    separator and two arguments ``a`` and ``b`` this gives:

    - both required: ``a , b``
    - ``a`` required: ``a (, b)?``
    - none required: ``(a (, b)? | b)?``, because the first one has no separator before it
    """
    required = [name for name in dict.fromkeys(schema.get("required", ())) if name in arguments]
    optional = [name for name in arguments if name not in required]
    more = [f"({separator} {arguments[name]})?" for name in optional]
    if required:
        begin = f" {separator} ".join(arguments[name] for name in required)
        return " ".join([begin, *more])
    lists = []
    for index, name in enumerate(optional):
        lists.append(" ".join([arguments[name], *more[index + 1 :]]))
    return f"({' | '.join(lists)})?" if lists else ""


def _check_python_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise InvalidArgumentError(f"tools: {name!r} is no name that Python allows")


def _python_argument(name: str, schema: Any, whole: Mapping[str, Any]) -> str:
    return f"{json.dumps(f'{name}=')} {_json_value(schema, whole)}"


def _xml_argument(name: str, schema: Any, whole: Mapping[str, Any]) -> str:
    """A parameter between its tags. A value that may be a string is any text up to the first
    ``</parameter>``."""
    choices = schema.get("enum", ()) if isinstance(schema, Mapping) else ()
    if choices and all(isinstance(choice, str) for choice in choices):
        value = f'({" | ".join(map(json.dumps, choices))}) "\\n</parameter>"'
    elif not may_be_string(schema, whole):
        value = f'{_json_value(schema, whole)} "\\n</parameter>"'
    else:
        value = "text"  # the rule of that name, which ends with the tag
    begin = json.dumps(f"<parameter={name}>\n")
    return f'{begin} {value} "\\n"'


# ------------------------------------------------------------------------------- after reasoning


def after_reasoning(
    constraint: Mapping[str, Any],
    reasoning_format: str | None,
    token_ids: Mapping[str, int] | None = None,
) -> Mapping[str, Any]:
    """The same constraint for a model that may reason first: what follows its reasoning must keep
    to it."""
    reasoning = find_reasoning(reasoning_format)
    if reasoning is None:
        return constraint
    ids = token_ids or {}
    end = _spelt(reasoning.end, ids)
    if reasoning.end in ids:
        # No text can spell a special token: any text is reasoning, and the token ends it.
        before_answer = f"thoughts {end} SPACE?"
        thoughts_rule = "thoughts: /(?s:.*)/"
    else:
        # The marker is text: reasoning goes up to its first occurrence.
        before_answer = "thoughts SPACE?"
        thoughts_rule = f"thoughts[suffix={end}]: /(?s:.*)/"
    if not reasoning.is_open:
        before_answer = f"({_spelt(reasoning.begin, ids)} {before_answer})?"
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
        return json.dumps(text)
    markers = "|".join(map(re.escape, token_ids))
    parts = []
    for part in re.split(f"({markers})", text):
        if part in token_ids:
            parts.append(f"<[{token_ids[part]}]>")
        else:
            parts.append(json.dumps(part))
    return " ".join(parts)


def _json_of_schema(schema: Any) -> str:
    """JSON that follows a schema, which may itself be given as a text of JSON."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        bound = "a JSON schema that is an object"
        raise InvalidArgumentError.of("structured_outputs.json", schema, bound)
    return _json_value(schema, schema)


def _json_value(schema: Any, whole: Mapping[str, Any]) -> str:
    """JSON that follows ``schema``, a part of ``whole``, whose definitions it may refer to."""
    definitions = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    own = schema if isinstance(schema, Mapping) else {}
    return "%json " + json.dumps({"x-guidance": _SPACING, **definitions, **own})

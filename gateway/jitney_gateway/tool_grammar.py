"""Constraints (``structured_outputs``) of answers that must call a tool: in the model's own syntax,
with arguments that follow the tool's JSON schema. Written in llguidance's dialect of Lark.

``token_ids`` are ids of markers that are single tokens of the model; other markers are spelt.
"""

import contextlib
import json
import keyword
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jitney.errors import InvalidArgumentError

from jitney_gateway.call_body import MALFORMED, types_of
from jitney_gateway.formats import OPENED, TOOL_FORMATS, reasoning_markers

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates write JSON; free space is where small models lose themselves."""


def schema_of(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: Any,
    parallel: bool,
    tool_format: str,
    token_ids: Mapping[str, int] | None = None,
) -> dict[str, str] | None:
    """For ``required`` one call or, if ``parallel``, several; for a named function one; else None.
    InvalidArgumentError for a function that is not among the tools, and for a name that the format
    cannot write."""
    if tool_choice in (None, "none", "auto"):
        return None
    functions = [tool["function"] for tool in tools]
    if tool_choice != "required":
        name = tool_choice["function"]["name"]
        functions = [each for each in functions if each["name"] == name]
        parallel = False
    if not functions:
        raise InvalidArgumentError.of("tool_choice", tool_choice, "one of the request's tools")

    row = TOOL_FORMATS[tool_format]
    ids = token_ids or {}
    before_all, before_one, after_one, between, after_all = row.syntax
    calls = " | ".join(f"call{index}" for index in range(len(functions)))
    more = f"({_text(between, ids)} call)*" if parallel else ""
    rules = [
        f"start: {_text(before_all, ids)} call {more} {_text(after_all, ids)}",
        f"call: {calls}",
    ]
    if row.body == "xml":
        rules.append('text[suffix="</parameter>"]: /(?s:.*)/')
    for index, function in enumerate(functions):
        before = _text(before_one.replace("NAME", function["name"]), ids)
        after = _text(after_one.replace("NAME", function["name"]), ids)
        try:
            arguments = _arguments(function, row.body)
        except MALFORMED:
            said = f"tools: the parameters of {function['name']!r} are no JSON schema"
            raise InvalidArgumentError(said) from None
        rules.append(f"call{index}: {before} {arguments} {after}")
    return {"grammar": "\n".join(rules)}


def after_reasoning(
    constraint: Mapping[str, Any],
    reasoning_format: str | None,
    token_ids: Mapping[str, int] | None = None,
) -> Mapping[str, Any]:
    """The same constraint for a model that may reason first: on what follows its reasoning."""
    markers = reasoning_markers(reasoning_format)
    if not markers:
        return constraint
    begin, end = markers
    ids = token_ids or {}
    if end in ids:  # a token ends the thoughts, which text cannot do
        thoughts = f"thoughts {_text(end, ids)} SPACE?"
        lazy = ""
    else:
        thoughts = "thoughts SPACE?"
        lazy = f"[suffix={_text(end, ids)}]"
    if not (reasoning_format or "").endswith(OPENED):
        thoughts = f"({_text(begin, ids)} {thoughts})?"
    ((kind, value),) = constraint.items()
    rules = [
        f"start: {thoughts} answer",
        f"thoughts{lazy}: /(?s:.*)/",
        r"SPACE: /\s{1,4}/",
        f"answer: {_answer(kind, value)}",
    ]
    return {"grammar": "\n".join(rules)}


def _answer(kind: str, value: Any) -> str:
    """A constraint in Lark."""
    if kind == "json":
        return _whole(value)
    if kind == "json_object":
        return _whole({"type": "object"})
    if kind == "regex":
        # A slash ends a regular expression of Lark, unless there is a backslash before it.
        escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", value)
        return f"/{escaped}/"
    if kind == "choice":
        return f"({' | '.join(map(json.dumps, value))})"
    assert kind == "grammar", kind
    return f"%lark {{\n{value}\n}}"


def _text(text: str, token_ids: Mapping[str, int]) -> str:
    """A text in Lark."""
    markers = "|".join(map(re.escape, token_ids)) or "(?!)"
    pieces = re.split(f"({markers})", text)
    return " ".join(
        f"<[{token_ids[each]}]>" if each in token_ids else json.dumps(each) for each in pieces
    )


def _whole(schema: Any) -> str:
    """A value of a schema, which may be text."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        schema = json.loads(schema)
    if not isinstance(schema, Mapping):
        bound = "a JSON schema that is an object"
        raise InvalidArgumentError.of("structured_outputs.json", schema, bound)
    return _json(schema, schema)


def _json(schema: Any, whole: Mapping[str, Any]) -> str:
    """A value of ``schema``, which is part of ``whole``."""
    shared = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    own = schema if isinstance(schema, Mapping) else {}
    return "%json " + json.dumps({"x-guidance": _SPACING, **shared, **own})


def _arguments(function: Mapping[str, Any], body: str) -> str:
    """The arguments in Lark. Where they are written one by one, the required ones come first."""
    schema = {"type": "object", **(function.get("parameters") or {})}
    if body == "json":
        return _json(schema, schema)
    properties = schema.get("properties", {})
    python = body == "python"
    for name in (function["name"], *properties):
        if python and (not name.isidentifier() or keyword.iskeyword(name)):
            raise InvalidArgumentError(f"tools: {name!r} is no name that Python allows")
    write, comma = (_keyword, '", "') if python else (_tag, "")
    fields = {name: write(name, each, schema) for name, each in properties.items()}
    required = [fields.pop(name) for name in schema.get("required", ()) if name in fields]
    others = [f"({comma} {field})?" for field in fields.values()]
    if required:
        return " ".join([f" {comma} ".join(required), *others])
    firsts = [" ".join([field, *others[n:]]) for n, field in enumerate(fields.values(), 1)]
    return f"({' | '.join(firsts)})?" if firsts else ""


def _keyword(name: str, schema: Any, whole: Mapping[str, Any]) -> str:
    return f"{json.dumps(f'{name}=')} {_json(schema, whole)}"


def _tag(name: str, schema: Any, whole: Mapping[str, Any]) -> str:
    """A text that may be a string is free up to the tag that ends it."""
    types = types_of(schema)
    choices = schema.get("enum", ()) if isinstance(schema, Mapping) else ()
    if choices and all(isinstance(each, str) for each in choices):
        value = f'({" | ".join(map(json.dumps, choices))}) "\\n</parameter>"'
    elif types and "string" not in types:
        value = f'{_json(schema, whole)} "\\n</parameter>"'
    else:
        value = "text"
    begin = json.dumps(f"<parameter={name}>\n")
    return f'{begin} {value} "\\n"'

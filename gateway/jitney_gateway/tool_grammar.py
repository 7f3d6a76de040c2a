"""Grammars of answers that must call a tool, may call one, or must keep to a constraint after their
reasoning.

They are values of the sampling parameter ``structured_outputs``. A call is in the model's own
syntax, and its arguments follow the tool's JSON schema. ``token_ids`` has the ids of markers that
are single tokens of the model. Other markers are spelt.

A grammar is written in llguidance's dialect of Lark. There ``<[5]>`` is the token 5, ``%json`` is a
JSON value of a schema, and ``%lark`` is a grammar inside another. A rule with ``[suffix="x"]``
takes any text up to the first ``x``, and that too; so does a rule with ``[lazy]`` that ends in it.
"""

import contextlib
import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jitney.errors import InvalidArgumentError

from jitney_gateway.call_body import may_be_string
from jitney_gateway.formats import TOOL_FORMATS, ToolFormat, find_reasoning

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Space only where chat templates write it: small models lose themselves in free space."""
ANY_TEXT: Mapping[str, str] = {"regex": "(?s:.*)"}
"""The constraint that allows any answer."""
_COMMA_IN_LARK = json.dumps(", ")
Spell = Callable[[str], str]
"""Writes a fixed text in Lark."""
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

    grammar = _calls_of_functions(
        functions,
        parallel=parallel,
        row=TOOL_FORMATS[tool_format],
        spell=partial(_spelt, token_ids=token_ids or {}),
    )
    return {"grammar": grammar}


def _calls_of_functions(
    functions: Sequence[Mapping[str, Any]], *, parallel: bool, row: ToolFormat, spell: Spell
) -> str:
    """The grammar of an answer that calls one of the functions; or several, if ``parallel``."""
    syntax = row.syntax
    more_calls = f"({spell(syntax.between_calls)} call)*" if parallel else ""
    rules = [
        f"start: {spell(syntax.before_all)} call {more_calls} {spell(syntax.after_all)}",
        *_rules_of_calls("call", functions, row, syntax.before_call, spell),
    ]
    return "\n".join(rules)


def _rules_of_calls(
    rule: str,
    functions: Sequence[Mapping[str, Any]],
    row: ToolFormat,
    before_call: str,
    spell: Spell,
) -> list[str]:
    """The ``rule`` for a call of any of the functions, and those that it refers to.
    ``before_call``: as CallSyntax has it, or another text up to the arguments."""
    names_of_rules = [f"{rule}{index}" for index in range(len(functions))]
    rules = [f"{rule}: {' | '.join(names_of_rules)}"]
    if row.body == "xml":
        rules.append('text[suffix="</parameter>"]: /(?s:.*)/')
    for name_of_rule, function in zip(names_of_rules, functions, strict=True):
        before = spell(before_call.replace("NAME", function["name"]))
        after = spell(row.syntax.after_call.replace("NAME", function["name"]))
        arguments = _checked_arguments(function, row.body)
        rules.append(f"{name_of_rule}: {before} {arguments} {after}")
    return rules


# ------------------------------------------------------------------------------- possible calls


def calls_or(
    constraint: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    tool_format: str,
    token_ids: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """The grammar of an answer that is either calls of the tools, or what ``constraint`` says."""
    ((kind, value),) = constraint.items()  # it has one key
    row = TOOL_FORMATS[tool_format]
    spell: Spell = partial(_spelt, token_ids=token_ids or {})
    is_json = kind in ("json", "json_object")
    if is_json and row.syntax.before_call.startswith("{") and not row.syntax.before_all:
        # Both begin with the same brackets and quotes. The lexer takes the longest text that any
        # rule allows, so both must be divided into the same ones.
        spell = _spelt_as_json
    functions = [tool["function"] for tool in tools]
    calls = _calls_of_functions(functions, parallel=parallel, row=row, spell=spell)
    rules = [
        "start: calls | answer",
        f"calls: {_inside_another(calls)}",
        f"answer: {_constrained_answer(kind, value)}",
    ]
    return {"grammar": "\n".join(rules)}


def grammar_of_strict_tools(
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    tool_format: str,
    token_ids: Mapping[str, int] | None = None,
) -> dict[str, str] | None:
    """The grammar of an answer that may call, if one of the tools is ``strict``; else None.

    Any text is allowed up to what begins a call. From there on it must be a call of one of the
    tools, and the arguments of a strict one follow its schema. Raises InvalidArgumentError.
    """
    functions = [tool["function"] for tool in tools]
    if not any(function.get("strict") for function in functions):
        return None
    row = TOOL_FORMATS[tool_format]
    syntax = row.syntax
    ids = token_ids or {}
    if row.body == "json":
        functions = [_loosened(function) for function in functions]
    begin = syntax.before_all or syntax.before_call
    trigger = next((marker for marker in row.markers if begin.startswith(marker)), None)
    spell: Spell = partial(_spelt, token_ids=ids)
    if trigger is None:
        return {"grammar": _calls_at_beginning(functions, parallel=parallel, row=row, spell=spell)}

    before_all = syntax.before_all.removeprefix(trigger)
    before_call = syntax.before_call
    if not syntax.before_all:
        before_call = before_call.removeprefix(trigger)  # each call has it
    more_calls = ""
    if parallel and syntax.before_all:
        more_calls = f"({spell(syntax.between_calls)} call)*"
    if trigger in ids:
        # No text can spell a special token: the text ends there.
        before_calls = f"before_calls: ANY_TEXT {spell(trigger)}"
    else:
        before_calls = f"before_calls[lazy]: ANY_TEXT {spell(trigger)}"
    rules = [
        "start: (before_calls calls)* last_text",
        f"calls: {spell(before_all)} call {more_calls} {spell(syntax.after_all)}",
        before_calls,
        "last_text: ANY_TEXT",
        "ANY_TEXT: /(?s:.*)/",
        *_rules_of_calls("call", functions, row, before_call, spell),
    ]
    return {"grammar": "\n".join(rules)}


def _loosened(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function with a schema that allows any object, unless it is strict."""
    return function if function.get("strict") else {**function, "parameters": {}}


def _calls_at_beginning(
    functions: Sequence[Mapping[str, Any]], *, parallel: bool, row: ToolFormat, spell: Spell
) -> str:
    """The grammar for a format whose calls have no marker: an answer is calls from its beginning,
    or a text that does not begin like one."""
    syntax = row.syntax
    # The lexer takes the longest text that any rule allows. So what begins a call must be one text
    # up to the function's name, where the other kind of text ends.
    before_first = f"{syntax.before_all}{syntax.before_call}"
    begin, _, after_name = before_first.partition("NAME")
    names = "|".join(re.escape(function["name"]) for function in functions)
    # A model may put space where the format has none.
    like_a_call = rf"\s*{_freely_spaced(begin)}\s*({names})\s*{_freely_spaced(after_name[0])}"
    escaped = f"{like_a_call}(?s:.*)".replace("/", r"\/")
    more_calls = f"({spell(syntax.between_calls)} call)*" if parallel else ""
    rules = [
        "start: calls | OTHER_TEXT",
        f"calls: first {more_calls} {spell(syntax.after_all)}",
        # Without the first part it would be any bytes, those that are no text included.
        f"OTHER_TEXT: /(?s:.*)/ & ~/{escaped}/",
        *_rules_of_calls("first", functions, row, before_first, spell),
        *_rules_of_calls("call", functions, row, syntax.before_call, spell),
    ]
    return "\n".join(rules)


def _freely_spaced(text: str) -> str:
    """A regular expression for the same words and signs, with any space between them."""
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", text)))


# ------------------------------------------------------------------------------- arguments


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
    budget: int | None = None,
) -> Mapping[str, Any]:
    """The same constraint for a model that may reason first: what follows its reasoning must keep
    to it.

    ``budget``: most tokens of the reasoning, after which its end marker comes. For that the markers
    must be in ``token_ids``.
    """
    reasoning = find_reasoning(reasoning_format)
    if reasoning is None:
        return constraint
    ids = token_ids or {}
    end = _spelt(reasoning.end, ids)
    if reasoning.end in ids:
        # No text can spell a special token: any text is reasoning, and the token ends it.
        before_answer = f"thoughts {end} SPACE?"
        limit = "" if budget is None else f"[max_tokens={budget}]"
        thoughts_rule = f"thoughts{limit}: /(?s:.*)/"
        if budget == 0:
            thoughts_rule = 'thoughts: ""'
    else:
        assert budget is None
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
    return _inside_another(value)


def _inside_another(grammar: str) -> str:
    """A whole grammar as a part of another."""
    return f"%lark {{\n{grammar}\n}}"


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


def _spelt_as_json(text: str) -> str:
    """A fixed text in Lark, divided as ``%json`` divides JSON."""
    parts = re.findall(r'"[^"]*"|: |, |[{}]|[^"{}:, ]+|[ :,]', text)
    return " ".join(map(json.dumps, parts)) or '""'


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

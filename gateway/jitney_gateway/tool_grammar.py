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
from typing import Any, NamedTuple
from urllib.parse import quote

from jitney.errors import InvalidArgumentError
from jitney.text.schema_references import DEFINITIONS

from jitney_gateway.formats import TOOL_FORMATS, Reasoning, ToolFormat, find_reasoning
from jitney_gateway.schema_alternatives import (
    alternatives_of,
    listed_texts,
    others_than_strings,
)
from jitney_gateway.string_rules import lark_of_string, with_known_formats
from jitney_gateway.value_grammar import ValueRules, argument_list

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Space only where chat templates write it: small models lose themselves in free space."""
ANY_TEXT: Mapping[str, str] = {"regex": "(?s:.*)"}
"""The constraint that allows any answer."""
_IDENTIFIER = "urn:jitney:parameters"
"""Of a schema that has no ``$id``."""
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')
_END_OF_PARAMETER = "</parameter>"
_END_OF_VALUE = f"\n{_END_OF_PARAMETER}"
_COMMA_IN_LARK = json.dumps(", ")
Spell = Callable[[str], str]
"""Writes a fixed text in Lark."""
FindArguments = Callable[[Mapping[str, Any], ToolFormat, str, Spell], "Arguments"]
"""Writes the arguments of a function, with rules whose names begin with a prefix."""
WRONG_SCHEMA = (ValueError, TypeError, AttributeError, RecursionError)
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
        spell=partial(spelt, token_ids=token_ids or {}),
    )
    return {"grammar": grammar}


def _calls_of_functions(
    functions: Sequence[Mapping[str, Any]], *, parallel: bool, row: ToolFormat, spell: Spell
) -> str:
    """The grammar of an answer that calls one of the functions; or several, if ``parallel``."""
    syntax = row.syntax
    more_calls = ""
    if parallel and syntax.between_calls is not None:
        more_calls = f"({spell(syntax.between_calls)} call)*"
    rules = [
        f"start: {spell(syntax.before_all)} call {more_calls} {spell(syntax.after_all)}",
        *_rules_of_calls("call", functions, row, syntax.before_call, spell, _checked_arguments),
    ]
    return "\n".join(rules)


def _rules_of_calls(
    rule: str,
    functions: Sequence[Mapping[str, Any]],
    row: ToolFormat,
    before_call: str,
    spell: Spell,
    find_arguments: FindArguments,
) -> list[str]:
    """The ``rule`` for a call of any of the functions, and those that it refers to.
    ``before_call``: as CallSyntax has it, or another text up to the arguments."""
    names_of_rules = [f"{rule}{index}" for index in range(len(functions))]
    rules = [f"{rule}: {' | '.join(names_of_rules)}"]
    if row.body == "xml":
        rules.append(f"text[suffix={json.dumps(_END_OF_PARAMETER)}]: /(?s:.*)/")
    for name_of_rule, function in zip(names_of_rules, functions, strict=True):
        before = spell(before_call.replace("NAME", function["name"]))
        after = spell(row.syntax.after_call.replace("NAME", function["name"]))
        arguments = find_arguments(function, row, name_of_rule, spell)
        rules.append(f"{name_of_rule}: {before} {arguments.lark} {after}")
        rules += arguments.rules
    return rules


# ------------------------------------------------------------------------------- possible calls


def calls_or(
    constraint: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    tool_format: str,
    token_ids: Mapping[str, int] | None = None,
    before_text: str = "",
) -> dict[str, str]:
    """The grammar of an answer that is either calls of the tools, or what ``constraint`` says.
    ``before_text``: what stands before the latter in the model's format."""
    ((kind, value),) = constraint.items()  # it has one key
    row = TOOL_FORMATS[tool_format]
    spell: Spell = partial(spelt, token_ids=token_ids or {})
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
        f"answer: {spell(before_text)} {_constrained_answer(kind, value)}",
    ]
    return {"grammar": "\n".join(rules)}


def grammar_of_strict_tools(
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    tool_format: str,
    token_ids: Mapping[str, int] | None = None,
    before_text: str = "",
) -> dict[str, str] | None:
    """The grammar of an answer that may call, if one of the tools is ``strict``; else None.

    Any text is allowed up to what begins a call. From there on it must be a call of one of the
    tools, and the arguments of a strict one follow its schema. ``before_text``: see
    :func:`calls_or`. Raises InvalidArgumentError.
    """
    functions = [tool["function"] for tool in tools]
    if not any(function.get("strict") for function in functions):
        return None
    row = TOOL_FORMATS[tool_format]
    syntax = row.syntax
    ids = token_ids or {}
    if row.body in ("json", "gemma"):
        functions = [_loosened(function) for function in functions]
    if row.body == "python":
        # The parser reads no call of another name, so the model may not begin one.
        functions = [each for each in functions if _is_name_of_python(each["name"])]
    if syntax.between_calls is None:
        # Text and call are two kinds of messages, and either is the last one.
        loosened = [{"function": function} for function in functions]
        return calls_or(ANY_TEXT, loosened, parallel, tool_format, ids, before_text)
    before_first = f"{syntax.before_all}{syntax.before_call}"
    trigger = next((marker for marker in row.markers if before_first.startswith(marker)), None)
    spell: Spell = partial(spelt, token_ids=ids)
    if trigger is not None:
        trigger_in_lark = spell(trigger)
    elif row.bare_head is not None:
        return {"grammar": _calls_at_beginning(functions, parallel=parallel, row=row, spell=spell)}
    else:
        # The marker is a word, which may stand in a text: the call's first bracket makes it one.
        # The model may put space where the format has none.
        trigger = before_first[: 1 + before_first.index("{")]
        trigger_in_lark = f"/{_freely_spaced(trigger)}/"

    more_calls = ""
    if parallel and syntax.before_all:
        more_calls = f"({spell(syntax.between_calls)} call)*"
    before_calls = f"before_calls[lazy]: ANY_TEXT {trigger_in_lark}"
    if trigger in ids:
        # No text can spell a special token: the text ends there.
        before_calls = f"before_calls: ANY_TEXT {trigger_in_lark}"
    if syntax.before_all.startswith(trigger):
        begin = spell(syntax.before_all.removeprefix(trigger))
        first = f"{begin} call"
        rules_of_calls = _rules_of_calls(
            "call", functions, row, syntax.before_call, spell, _arguments_if_kept
        )
    else:
        first = "first"
        before_call = before_first.removeprefix(trigger)
        rules_of_calls = _rules_of_calls(
            "first", functions, row, before_call, spell, _arguments_if_kept
        )
        if more_calls:
            rules_of_calls += _rules_of_calls(
                "call", functions, row, syntax.before_call, spell, _arguments_if_kept
            )
    rules = [
        "start: (before_calls calls)* last_text",
        f"calls: {first} {more_calls} {spell(syntax.after_all)}",
        before_calls,
        "last_text: ANY_TEXT",
        "ANY_TEXT: /(?s:.*)/",
        *rules_of_calls,
    ]
    return {"grammar": "\n".join(rules)}


def with_free_calls(tool_format: str, token_ids: Mapping[str, int]) -> Mapping[str, str]:
    """The constraint of an answer that may call as it likes, for a model whose reasoning has a
    budget. ANY_TEXT would be none: no text can spell the special tokens around a call."""
    row = TOOL_FORMATS[tool_format]
    markers = [f"<[{token_ids[marker]}]>" for marker in row.markers if marker in token_ids]
    if not markers:
        return ANY_TEXT
    any_marker = " | ".join(markers)
    rules = [f"start: ANY_TEXT (({any_marker}) ANY_TEXT)*", "ANY_TEXT: /(?s:.*)/"]
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
    more_calls = ""
    if parallel and syntax.between_calls is not None:
        more_calls = f"({spell(syntax.between_calls)} call)*"
    rules = [
        "start: calls | OTHER_TEXT",
        f"calls: first {more_calls} {spell(syntax.after_all)}",
        # Without the first part it would be any bytes, those that are no text included.
        f"OTHER_TEXT: /(?s:.*)/ & ~/{escaped}/",
        *_rules_of_calls("first", functions, row, before_first, spell, _arguments_if_kept),
        *_rules_of_calls("call", functions, row, syntax.before_call, spell, _arguments_if_kept),
    ]
    return "\n".join(rules)


def _freely_spaced(text: str) -> str:
    """A regular expression for the same words and signs, with any space between them."""
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", text)))


# ------------------------------------------------------------------------------- arguments


class Arguments(NamedTuple):
    """A function's arguments in Lark, and the rules that they use."""

    lark: str
    rules: list[str]
    schema: Mapping[str, Any]
    """What they follow."""


def _checked_arguments(
    function: Mapping[str, Any], row: ToolFormat, prefix: str, spell: Spell
) -> Arguments:
    """The names of its rules begin with ``prefix``. Raises InvalidArgumentError."""
    try:
        return arguments_of_function(function, row, prefix, spell)
    except InvalidArgumentError as error:
        reason = f"tools: function {function['name']!r}: {error}"
        raise InvalidArgumentError(reason) from None
    except WRONG_SCHEMA:
        reason = f"tools: the parameters of {function['name']!r} are no JSON schema"
        raise InvalidArgumentError(reason) from None


def _arguments_if_kept(
    function: Mapping[str, Any], row: ToolFormat, prefix: str, spell: Spell
) -> Arguments:
    """The same; any arguments for a function that is not strict, if no grammar keeps its schema."""
    try:
        return _checked_arguments(function, row, prefix, spell)
    except InvalidArgumentError:
        if function.get("strict"):
            raise
    if row.body == "python":
        argument = "/[A-Za-z_][A-Za-z0-9_]*=/ %json {}"
        return Arguments(f"({argument} ({_COMMA_IN_LARK} {argument})*)?", [], {})
    return Arguments('(/<parameter=[^>\\n]+>\\n/ text "\\n")*', [], {})


def arguments_of_function(
    function: Mapping[str, Any], row: ToolFormat, prefix: str, spell: Spell
) -> Arguments:
    """The names of its rules begin with ``prefix``. Raises InvalidArgumentError, and one of
    WRONG_SCHEMA for what is no JSON schema."""
    schema = with_known_formats({"type": "object", **(function.get("parameters") or {})})
    if row.body == "json":
        return Arguments(_json_value(schema), [], schema)
    if row.body == "gemma":
        is_token = spell(row.quote) != json.dumps(row.quote)
        rules = ValueRules(schema, prefix, row.quote, spell, quote_is_token=is_token)
        return Arguments(rules.value(schema), rules.rules, schema)
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    properties = {name: value for name, value in properties.items() if value is not False}
    arguments = {}
    if row.body == "python":
        _check_python_name(function["name"])
        for name, value in properties.items():
            _check_python_name(name)
            arguments[name] = f"{json.dumps(f'{name}=')} {_json_property(name, value, schema)}"
        listed = argument_list(arguments, required, separator=_COMMA_IN_LARK)
        return Arguments(listed, [], schema)
    terminals = []
    for index, (name, value) in enumerate(properties.items()):
        written = _xml_value(name, value, schema)
        terminal = f"{prefix}_{index}".upper()
        if written.terminal is not None:
            terminals.append(f"{terminal}: {written.terminal}")
        lark = terminal if written.lark is None else written.lark
        if written.lark is not None and written.terminal is not None:
            lark = f"({terminal} | {written.lark})"
        arguments[name] = f'{json.dumps(f"<parameter={name}>")} "\\n" {lark} "\\n"'
    listed = argument_list(arguments, required, separator="")
    return Arguments(listed, terminals, schema)


def _is_name_of_python(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _check_python_name(name: str) -> None:
    if not _is_name_of_python(name):
        raise InvalidArgumentError(f"{name!r} is no name that Python allows")


class _Value(NamedTuple):
    """The value of a parameter up to the tag that ends it: one of the two, if both are set."""

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
    end = json.dumps(_END_OF_VALUE)
    terminal = f"({' | '.join(texts)}) {end}"
    if listed_texts(alternatives) is None:
        return _Value(terminal=terminal)
    others = {"anyOf": others_than_strings(alternatives)}
    return _Value(lark=f"{_json_property(name, others, whole)} {end}", terminal=terminal)


# ------------------------------------------------------------------------------- after reasoning


def bounds_reasoning(reasoning: Reasoning, token_ids: Mapping[str, int]) -> bool:
    """Whether a budget can bound the reasoning: both of its markers must begin with tokens of
    ``token_ids``, which no text can spell."""
    if reasoning.before_answer:
        # The answer begins with the same tokens as the reasoning, in which llguidance finds the
        # reasoning only, if that has a budget.
        return False
    markers = (reasoning.begin, reasoning.end)
    return all(marker.startswith(tuple(token_ids)) for marker in markers)


def after_reasoning(
    constraint: Mapping[str, Any],
    reasoning_format: str | None,
    token_ids: Mapping[str, int] | None = None,
    budget: int | None = None,
    *,
    has_header: bool = False,
) -> Mapping[str, Any]:
    """The same constraint for a model that may reason first: what follows its reasoning must keep
    to it.

    ``budget``: most tokens of the reasoning, after which its end marker comes; see
    :func:`bounds_reasoning`. ``has_header``: the constraint has what stands before an answer's
    content, where the format has such a thing.
    """
    reasoning = find_reasoning(reasoning_format)
    if reasoning is None:
        return constraint
    ids = token_ids or {}
    end = spelt(reasoning.end, ids)
    if any(reasoning.end.startswith(marker) for marker in ids):
        # No text can spell a special token: any text is reasoning, and the token ends it.
        before_answer = f"thoughts {end} SPACE?"
        limit = "" if budget is None else f"[max_tokens={budget}]"
        thoughts_rule = f"thoughts{limit}: /(?s:.*)/"
        if budget == 0:
            thoughts_rule = 'thoughts: ""'
    else:
        assert budget is None  # without_effect.py has left it out
        # The marker is text: reasoning goes up to its first occurrence.
        before_answer = "thoughts SPACE?"
        thoughts_rule = f"thoughts[suffix={end}]: /(?s:.*)/"
    if not reasoning.is_open:
        before_answer = f"({spelt(reasoning.begin, ids)} {before_answer})?"
    if reasoning.before_answer and not has_header:
        before_answer = f"{before_answer} {spelt(reasoning.before_answer, ids)}"
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


def spelt(text: str, token_ids: Mapping[str, int]) -> str:
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

"""Grammars of answers that may call a tool. ``lark.py`` says how grammars are written. Pure.

The answer is any text up to what begins a call. From there on it must be a call of one of the
tools. The arguments of a strict tool follow its schema, and those of any other tool are free.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jitney_gateway.argument_grammar import arguments_if_kept, is_name_of_python, shared_rules
from jitney_gateway.formats import TOOL_FORMATS, ToolFormat
from jitney_gateway.lark import (
    ANY_TEXT,
    ANY_TEXT_IN_LARK,
    between_slashes,
    spelt,
)
from jitney_gateway.tool_grammar import CallWriter


def grammar_of_strict_tools(
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    tool_format: str,
    token_ids: Mapping[str, int] | None = None,
    before_text: str = "",
) -> dict[str, str] | None:
    """The grammar of an answer that may call, if one of the tools is ``strict``; else None.
    ``before_text``: what stands before an answer that is text, in the model's format. Raises
    InvalidArgumentError."""
    if not any(tool["function"].get("strict") for tool in tools):
        return None
    return grammar_of_possible_calls(tools, parallel, tool_format, token_ids, before_text)


def grammar_of_possible_calls(
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    tool_format: str,
    token_ids: Mapping[str, int] | None = None,
    before_text: str = "",
) -> dict[str, str]:
    """The grammar of an answer that may call, whether or not one of the tools is strict. The
    parameters are those of :func:`grammar_of_strict_tools`. Raises InvalidArgumentError."""
    row = TOOL_FORMATS[tool_format]
    ids = token_ids or {}
    writer = CallWriter(row, partial(spelt, token_ids=ids), arguments_if_kept)
    functions = [_with_free_arguments(tool["function"], row) for tool in tools]
    if row.body == "python":
        # The parser reads no call of another name, so the model may not begin one.
        functions = [each for each in functions if is_name_of_python(each["name"])]

    if row.preamble is not None:
        return {"grammar": _messages(functions, writer, before_text, ids)}
    marker = _marker_of_calls(row)
    if marker is not None:
        # No text can spell a special token: the text before a call ends there.
        ends_text = marker in ids
        grammar = _text_and_calls(functions, writer, marker, parallel=parallel, is_token=ends_text)
    elif row.bare_head is None:
        # The marker is a word that may stand in a text, such as `functools` in `functools[{`. With
        # the first bracket behind it, it begins a call.
        before_first = f"{row.syntax.before_all}{row.syntax.before_call}"
        before_bracket, bracket, _ = before_first.partition("{")
        word = before_bracket + bracket
        grammar = _text_and_calls(functions, writer, word, parallel=parallel, is_word=True)
    else:
        grammar = _calls_at_beginning(functions, writer, parallel=parallel)
    return {"grammar": grammar}


def _with_free_arguments(function: Mapping[str, Any], row: ToolFormat) -> Mapping[str, Any]:
    """The function with a schema that allows any object, unless it is strict. Arguments in Python
    or between tags are written one by one, and keep the schema as far as a grammar can."""
    if function.get("strict") or row.body not in ("json", "gemma"):
        return function
    return {**function, "parameters": {}}


def _marker_of_calls(row: ToolFormat) -> str | None:
    """The marker with which the calls of an answer begin; None if they begin with none."""
    before_first = f"{row.syntax.before_all}{row.syntax.before_call}"
    for marker in row.markers:
        if before_first.startswith(marker):
            return marker
    return None


def _text_and_calls(
    functions: Sequence[Mapping[str, Any]],
    writer: CallWriter,
    trigger: str,
    *,
    parallel: bool,
    is_token: bool = False,
    is_word: bool = False,
) -> str:
    """An answer of texts and calls. ``trigger``: the beginning of a call, which ends a text.
    ``is_token``: it is a special token. ``is_word``: the model may put space between its parts."""
    syntax = writer.row.syntax
    trigger_in_lark = writer.spell(trigger)
    if is_word:
        trigger_in_lark = between_slashes(_freely_spaced(trigger))
    before_calls = "before_calls" if is_token else "before_calls[lazy]"

    if syntax.before_all.startswith(trigger):
        # [TOOL_CALLS] [{"name": …}, {"name": …}]: the trigger stands before the list of calls, and
        # all calls are alike.
        rest_of_list_head = writer.spell(syntax.before_all.removeprefix(trigger))
        first = f"{rest_of_list_head} call"
        rules_of_calls = writer.rules("call", functions, syntax.before_call)
    else:
        # <tool_call>{"name": …}: the trigger is the beginning of the first call. That call has a
        # rule of its own, without this beginning.
        before_first = f"{syntax.before_all}{syntax.before_call}"
        first = "first"
        rules_of_calls = writer.rules("first", functions, before_first.removeprefix(trigger))
        if parallel and syntax.before_all:
            rules_of_calls += writer.rules("call", functions, syntax.before_call)
    # Without such a list, each call has a trigger, and the rule `start` allows more of them.
    more_calls = writer.more_calls(parallel=parallel) if syntax.before_all else ""
    rules = [
        "start: (before_calls calls)* last_text",
        f"calls: {first} {more_calls} {writer.spell(syntax.after_all)}",
        f"{before_calls}: ANY_TEXT {trigger_in_lark}",
        "last_text: ANY_TEXT",
        f"ANY_TEXT: {ANY_TEXT_IN_LARK}",
        *rules_of_calls,
        *shared_rules(writer.row),
    ]
    return "\n".join(rules)


def _calls_at_beginning(
    functions: Sequence[Mapping[str, Any]], writer: CallWriter, *, parallel: bool
) -> str:
    """An answer in a format whose calls have no marker: calls from the beginning on, or a text that
    does not begin like a call."""
    syntax = writer.row.syntax
    before_first = f"{syntax.before_all}{syntax.before_call}"
    # The lexer takes the longest text that any rule allows. So `OTHER_TEXT` leaves out every text
    # that begins like a call: with what the format has before the name, the name of a function, and
    # the first sign behind it.
    begin, _, behind_name = before_first.partition("NAME")
    sign = behind_name[0]
    names = "|".join(re.escape(function["name"]) for function in functions)
    # A model may put space where the format has none.
    like_a_call = rf"\s*{_freely_spaced(begin)}\s*({names})\s*{_freely_spaced(sign)}"
    other_text = f"{ANY_TEXT_IN_LARK} & ~{between_slashes(f'{like_a_call}(?s:.*)')}"
    more_calls = writer.more_calls(parallel=parallel)
    rules = [
        "start: calls | OTHER_TEXT",
        f"calls: first {more_calls} {writer.spell(syntax.after_all)}",
        f"OTHER_TEXT: {other_text}",
        *writer.rules("first", functions, before_first),
        *writer.rules("call", functions, syntax.before_call),
        *shared_rules(writer.row),
    ]
    return "\n".join(rules)


def _messages(
    functions: Sequence[Mapping[str, Any]],
    writer: CallWriter,
    before_text: str,
    token_ids: Mapping[str, int],
) -> str:
    """An answer in a format in which a text and a call are two kinds of messages: preambles, and
    then one call or the last text."""
    preamble = writer.row.preamble
    assert preamble is not None
    begin = writer.spell(preamble.begin)
    end = writer.spell(preamble.end)
    ends_with_token = any(preamble.end.startswith(marker) for marker in token_ids)
    if ends_with_token:
        rules_of_preamble = [f"preamble: {begin} ANY_TEXT {end}"]
    else:
        rules_of_preamble = [
            f"preamble: {begin} preamble_text",
            f"preamble_text[suffix={end}]: {ANY_TEXT_IN_LARK}",
        ]
    rules = [
        "start: preamble* (call | last_text)",
        *rules_of_preamble,
        f"last_text: {writer.spell(before_text)} ANY_TEXT",
        f"ANY_TEXT: {ANY_TEXT_IN_LARK}",
        *writer.rules("call", functions, writer.row.syntax.before_call),
    ]
    return "\n".join(rules)


def with_free_calls(tool_format: str, token_ids: Mapping[str, int]) -> Mapping[str, str]:
    """The constraint of an answer with any text and any calls, for a model whose reasoning has a
    budget. ANY_TEXT alone would allow no call: its markers may be special tokens, which are no
    text."""
    row = TOOL_FORMATS[tool_format]
    markers = [f"<[{token_ids[marker]}]>" for marker in row.markers if marker in token_ids]
    if not markers:
        return ANY_TEXT
    any_marker = " | ".join(markers)
    rules = [
        f"start: ANY_TEXT (({any_marker}) ANY_TEXT)*",
        f"ANY_TEXT: {ANY_TEXT_IN_LARK}",
    ]
    return {"grammar": "\n".join(rules)}


def _freely_spaced(text: str) -> str:
    """A regular expression for the same words and signs, with any space between them."""
    return r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", text)))

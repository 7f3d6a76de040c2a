"""Grammars of answers that must call a tool. ``lark.py`` says how grammars are written. Pure.

A call is in the model's own syntax, and its arguments follow the tool's JSON schema.
``strict_grammar.py`` has the grammars of answers that may call. In all of them, ``token_ids`` has
the ids of the markers that are single tokens of the model. Other markers are spelt.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from jitney.errors import InvalidArgumentError

from jitney_gateway.argument_grammar import FindArguments, checked_arguments, shared_rules
from jitney_gateway.formats import TOOL_FORMATS, ToolFormat
from jitney_gateway.lark import (
    Spell,
    constrained_answer,
    inside_another,
    spelt,
    spelt_as_json,
)


class CallWriter(NamedTuple):
    """Writes calls in the syntax of one model."""

    row: ToolFormat
    spell: Spell
    find_arguments: FindArguments

    def rules(
        self, rule: str, functions: Sequence[Mapping[str, Any]], before_arguments: str
    ) -> list[str]:
        """The ``rule`` for a call of any of the functions, with the rules that it needs.
        ``before_arguments``: what stands before the arguments; see CallSyntax.before_call."""
        names = [f"{rule}{index}" for index in range(len(functions))]
        rules = [f"{rule}: {' | '.join(names)}"]
        for name, function in zip(names, functions, strict=True):
            before = self.spell(before_arguments.replace("NAME", function["name"]))
            after = self.spell(self.row.syntax.after_call.replace("NAME", function["name"]))
            arguments = self.find_arguments(function, self.row, name, self.spell)
            rules.append(f"{name}: {before} {arguments.lark} {after}")
            rules += arguments.rules
        return rules

    def more_calls(self, *, parallel: bool) -> str:
        """What may follow a call of the rule ``call``; empty if nothing may."""
        between = self.row.syntax.between_calls
        if not parallel or between is None:
            return ""
        return f"({self.spell(between)} call)*"


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

    writer = CallWriter(
        row=TOOL_FORMATS[tool_format],
        spell=partial(spelt, token_ids=token_ids or {}),
        find_arguments=checked_arguments,
    )
    return {"grammar": calls_of_functions(functions, writer, parallel=parallel)}


def calls_of_functions(
    functions: Sequence[Mapping[str, Any]], writer: CallWriter, *, parallel: bool
) -> str:
    """The grammar of an answer that calls one of the functions; or several, if ``parallel``."""
    syntax = writer.row.syntax
    begin = writer.spell(syntax.before_all)
    more_calls = writer.more_calls(parallel=parallel)
    end = writer.spell(syntax.after_all)
    rules = [
        f"start: {begin} call {more_calls} {end}",
        *writer.rules("call", functions, syntax.before_call),
        *shared_rules(writer.row),
    ]
    return "\n".join(rules)


def grammar_of_calls_or_answer(
    constraint: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    tool_format: str,
    token_ids: Mapping[str, int] | None = None,
    before_text: str = "",
) -> dict[str, str]:
    """The grammar of an answer that is either calls of the tools, or what ``constraint`` says.
    ``before_text``: what stands before the latter in the model's format."""
    row = TOOL_FORMATS[tool_format]
    spell: Spell = partial(spelt, token_ids=token_ids or {})
    answer_is_json = "json" in constraint or "json_object" in constraint
    call_is_json = row.syntax.before_call.startswith("{") and not row.syntax.before_all
    if answer_is_json and call_is_json:
        # The lexer takes the longest text that any rule allows. So the fixed beginning of a call,
        # such as `{"name": "find", `, would hide an answer in JSON. Spelt in the parts in which
        # `%json` writes JSON, a call begins with the same texts as such an answer.
        spell = spelt_as_json
    writer = CallWriter(row, spell, checked_arguments)
    functions = [tool["function"] for tool in tools]
    calls = calls_of_functions(functions, writer, parallel=parallel)
    rules = [
        "start: calls | answer",
        f"calls: {inside_another(calls)}",
        f"answer: {spell(before_text)} {constrained_answer(constraint)}",
    ]
    return {"grammar": "\n".join(rules)}

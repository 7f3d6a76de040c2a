"""The constraint on the answer to a chat: what the client's fields say, calls of tools, or one of
the two. Reasoning may come before. Pure.

``structured.py`` reads what the client says, and three modules make the grammars:
``tool_grammar.py``, ``strict_grammar.py`` and ``reasoning_grammar.py``.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from jitney_gateway.answer_formats import formats_of_answer, ids_of_markers
from jitney_gateway.formats import TOOL_FORMATS, AnswerFormats, find_reasoning
from jitney_gateway.lark import ANY_TEXT
from jitney_gateway.model_description import ModelDescription
from jitney_gateway.reasoning_grammar import after_reasoning, bounds_reasoning
from jitney_gateway.refusals import FieldError
from jitney_gateway.strict_grammar import (
    grammar_of_possible_calls,
    grammar_of_strict_tools,
    with_free_calls,
)
from jitney_gateway.structured import OutputConstraint, constraint_of_body
from jitney_gateway.tool_grammar import grammar_of_calls, grammar_of_calls_or_answer
from jitney_gateway.wire import ChatRequest, ContentPart, Message

BUDGET = "thinking_token_budget"
"""The field that bounds the reasoning of a chat."""


def constraint_of_chat(
    body: ChatRequest, model: ModelDescription, formats: AnswerFormats
) -> OutputConstraint | None:
    """What the answer must be; None if it may be anything. Raises FieldError."""
    token_ids = ids_of_markers(formats, model)
    constraint = constraint_of_body(body)
    if constraint is not None and body.continue_final_message:
        _check_continued(constraint, body.messages[-1])
    if formats.tool is not None:
        constraint = _with_calls(constraint, body, formats, token_ids)
    budget = _budget_with_effect(body, formats, is_constrained=constraint is not None)
    if constraint is None:
        if budget is None:
            return None
        # Only the reasoning is bounded.
        constraint = OutputConstraint(BUDGET, _any_answer(body, formats, token_ids))
    # Grammars with calls have a header of their own before each text and each call.
    has_header = formats.tool is not None
    parameter = after_reasoning(
        constraint.structured_outputs,
        formats.reasoning,
        token_ids,
        budget,
        has_header=has_header,
    )
    return OutputConstraint(constraint.field, parameter)


def _check_continued(constraint: OutputConstraint, last: Message) -> None:
    """Raise FieldError if the text that is continued is the beginning of JSON, and the answer must
    be JSON: a constraint is for the answer alone, so the two together would be no JSON."""
    is_json = not {"json", "json_object"}.isdisjoint(constraint.structured_outputs)
    parts = last.content or ""
    text = parts if isinstance(parts, str) else "".join(map(_text_of_part, parts))
    is_open = text.count("{") > text.count("}") or text.count("[") > text.count("]")
    if is_json and is_open:
        field = constraint.field
        reason = f"the answer alone is whole JSON, but continues {text[-64:]!r}, which begins it"
        raise FieldError(field, f"{field}: {reason}")


def _text_of_part(part: str | ContentPart) -> str:
    return part if isinstance(part, str) else part.text or ""


def _budget_with_effect(
    body: ChatRequest, formats: AnswerFormats, *, is_constrained: bool
) -> int | None:
    """The budget of the reasoning; None if the chat has none, or if it could not change the
    answer."""
    budget = body.thinking_token_budget
    if budget is None or find_reasoning(formats.reasoning) is None:
        return None
    limit = body.max_completion_tokens or body.params.get("max_tokens")
    ends_before = isinstance(limit, int) and 0 < limit <= budget
    # A grammar costs time, so none is made for such a budget alone.
    if ends_before and not is_constrained:
        return None
    return budget


def _any_answer(
    body: ChatRequest, formats: AnswerFormats, token_ids: Mapping[str, int]
) -> Mapping[str, Any]:
    """The constraint that allows any answer, with calls if the body allows them."""
    if formats.tool is None:
        return ANY_TEXT
    if TOOL_FORMATS[formats.tool].preamble is None:
        return with_free_calls(formats.tool, token_ids)
    # Reasoning, texts and calls are messages, each with a header. So the grammar must name the
    # kinds of messages that may follow the reasoning.
    return grammar_of_possible_calls(
        tools=msgspec.to_builtins(body.tools),
        parallel=body.parallel_tool_calls is not False,
        tool_format=formats.tool,
        token_ids=token_ids,
        before_text=_before_text(formats),
    )


def _with_calls(
    constraint: OutputConstraint | None,
    body: ChatRequest,
    formats: AnswerFormats,
    token_ids: Mapping[str, int],
) -> OutputConstraint | None:
    """What the answer must be, for a body with tools:

    ====================  ==========================  =====================
    ``tool_choice``       ``constraint``              the answer
    ====================  ==========================  =====================
    a forced call         none, ``response_format``   calls
    a forced call         any other                   FieldError
    ``auto``              any                         calls, or what it says
    ``auto``              none, a tool is strict      text, and strict calls
    ``auto``              none                        anything
    ====================  ==========================  =====================
    """
    assert formats.tool is not None
    tools = msgspec.to_builtins(body.tools)
    parallel = body.parallel_tool_calls is not False
    choice = msgspec.to_builtins(body.tool_choice)
    forced = grammar_of_calls(
        tools=tools,
        tool_choice=choice,
        parallel=parallel,
        tool_format=formats.tool,
        token_ids=token_ids,
    )
    if forced is not None:
        if constraint is not None and constraint.field != "response_format":
            reason = f"tool_choice and {constraint.field} exclude one another"
            raise FieldError("tool_choice", reason)
        return OutputConstraint("tool_choice", forced)
    before_text = _before_text(formats)
    if constraint is not None:
        either = grammar_of_calls_or_answer(
            constraint=constraint.structured_outputs,
            tools=tools,
            parallel=parallel,
            tool_format=formats.tool,
            token_ids=token_ids,
            before_text=before_text,
        )
        return OutputConstraint(constraint.field, either)
    strict = grammar_of_strict_tools(
        tools=tools,
        parallel=parallel,
        tool_format=formats.tool,
        token_ids=token_ids,
        before_text=before_text,
    )
    return None if strict is None else OutputConstraint("tools", strict)


def _before_text(formats: AnswerFormats) -> str:
    """What stands before an answer that is text."""
    reasoning = find_reasoning(formats.reasoning)
    return "" if reasoning is None else reasoning.before_answer


def honours_budget(body: ChatRequest, model: ModelDescription) -> bool:
    """Whether a budget of the reasoning is kept: also by a model that does not reason. Raises as
    ``formats_of_answer``."""
    formats = formats_of_answer(body, model)
    reasoning = find_reasoning(formats.reasoning)
    if reasoning is None:
        return True
    if "structured_outputs" not in model.sampling_parameters:
        return False
    return bounds_reasoning(reasoning, ids_of_markers(formats, model))

"""Grammars of answers before which the model may reason. Pure. ``lark.py`` says how grammars are
written."""

from collections.abc import Mapping
from typing import Any

from jitney_gateway.formats import Reasoning, find_reasoning
from jitney_gateway.lark import ANY_TEXT_IN_LARK, constrained_answer, spelt


def bounds_reasoning(reasoning: Reasoning, token_ids: Mapping[str, int]) -> bool:
    """Whether a budget can bound the reasoning: both of its markers must begin with special tokens,
    which no text can spell. ``token_ids``: text of such a token -> its id."""
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
    """The same constraint for a model that may reason first: the constraint is for what follows.

    ``budget``: the most tokens of reasoning, after which its end marker comes. It must be None if
    :func:`bounds_reasoning` says no. ``has_header``: the constraint already has what stands before
    the answer's content (``Reasoning.before_answer``).
    """
    reasoning = find_reasoning(reasoning_format)
    if reasoning is None:
        return constraint
    ids = token_ids or {}
    parts = [_reasoning_part(reasoning, ids, budget)]
    if reasoning.before_answer and not has_header:
        parts.append(spelt(reasoning.before_answer, ids))
    parts.append("answer")
    rules = [
        f"start: {' '.join(parts)}",
        _thoughts_rule(reasoning, ids, budget),
        r"SPACE: /\s{1,4}/",
        f"answer: {constrained_answer(constraint)}",
    ]
    return {"grammar": "\n".join(rules)}


def _ends_with_token(reasoning: Reasoning, token_ids: Mapping[str, int]) -> bool:
    return any(reasoning.end.startswith(marker) for marker in token_ids)


def _thoughts_rule(reasoning: Reasoning, token_ids: Mapping[str, int], budget: int | None) -> str:
    """The rule ``thoughts``, for the reasoning without its markers. The end marker is a part of it
    if that is text."""
    if not _ends_with_token(reasoning, token_ids):
        assert budget is None  # without_effect.py has left it out
        end = spelt(reasoning.end, token_ids)
        return f"thoughts[suffix={end}]: {ANY_TEXT_IN_LARK}"
    if budget is None:
        return f"thoughts: {ANY_TEXT_IN_LARK}"
    if budget == 0:
        return 'thoughts: ""'
    return f"thoughts[max_tokens={budget}]: {ANY_TEXT_IN_LARK}"


def _reasoning_part(reasoning: Reasoning, token_ids: Mapping[str, int], budget: int | None) -> str:
    """What comes before the answer, with the markers that the prompt does not have."""
    part = "thoughts SPACE?"
    if _ends_with_token(reasoning, token_ids):
        part = f"thoughts {spelt(reasoning.end, token_ids)} SPACE?"
    if reasoning.is_open:
        return part
    part = f"{spelt(reasoning.begin, token_ids)} {part}"
    if reasoning.before_answer and budget is not None:
        # Here the reasoning and the answer begin with the same token. If both may follow,
        # llguidance takes that token for the beginning of the reasoning, because that has a budget.
        # So the choice is made here: a budget demands reasoning, and the budget 0 forbids it.
        return part if budget > 0 else '""'
    return f"({part})?"

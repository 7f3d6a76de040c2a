"""Reasoning before what is constrained, and its budget."""

from typing import Any

import pytest
from jitney.errors import InvalidArgumentError
from jitney_gateway.formats import TOOL_FORMATS, AnswerFormats, find_reasoning, special_markers
from jitney_gateway.lark import ANY_TEXT
from jitney_gateway.reasoning_grammar import after_reasoning, bounds_reasoning
from jitney_gateway.strict_grammar import grammar_of_possible_calls, with_free_calls
from jitney_gateway.tool_grammar import grammar_of_calls

from tests.gateway.written_calls import (
    BEFORE_TEXT,
    TOOLS,
    accepts,
    known_tokens,
    tokenizer,
    written,
)


@pytest.mark.parametrize("single", [False, True], ids=["spelt", "single tokens"])
@pytest.mark.parametrize(
    ("constraint", "fits", "other"),
    [
        ({"json": {"type": "integer"}}, "12", "x"),
        ({"json": '{"type": "integer"}'}, "12", "x"),
        ({"json_object": True}, '{"a": 1}', "[]"),
        ({"regex": r"a/[bc]\/"}, "a/b/", "a/"),
        ({"choice": ["a", 'b"']}, 'b"', "c"),
        ({"grammar": 'start: a "}"\na: /x+/'}, "xx}", "x"),
        (
            grammar_of_calls(TOOLS, "required", True, "llama3_json"),
            '{"name": "g", "parameters": {}}',
            "{}",
        ),
    ],
)
def test_a_model_reasons_before_what_is_forced(
    constraint: Any, fits: str, other: str, single: bool
) -> None:
    tokens = tokenizer(special_markers(AnswerFormats("hermes", "think")) if single else [])
    ids = {marker: tokens.token_to_id(marker) for marker in tokens.get_vocab() if "think" in marker}
    opened = after_reasoning(constraint, "think_opened", ids)
    assert accepts(opened, tokens, f"a <b> é\n</think>\n\n{fits}")
    assert not accepts(opened, tokens, f"a\n</think>\n\n{other}")
    assert not accepts(opened, tokens, fits)
    free = after_reasoning(constraint, "think", ids)
    assert accepts(free, tokens, f"<think>a</think>{fits}")
    assert accepts(free, tokens, fits)
    assert not accepts(free, tokens, f"a</think>{fits}")
    assert after_reasoning(constraint, None) == constraint


@pytest.mark.parametrize("single", [False, True], ids=["spelt", "single tokens"])
def test_harmony_names_the_channel_of_what_is_forced(single: bool) -> None:
    formats = AnswerFormats("harmony", "harmony")
    tokens = tokenizer(special_markers(formats) if single else [])
    ids = {marker: tokens.token_to_id(marker) for marker in special_markers(formats) if single}
    thoughts = "<|channel|>analysis<|message|>a <b> é<|end|><|start|>assistant"

    schema = after_reasoning({"json": {"type": "integer"}}, "harmony", ids)
    assert accepts(schema, tokens, "<|channel|>final<|message|>12")
    assert accepts(schema, tokens, f"{thoughts}<|channel|>final<|message|>12")
    assert not accepts(schema, tokens, "12")
    assert not accepts(schema, tokens, f"{thoughts}<|channel|>final<|message|>x")

    grammar = grammar_of_calls(TOOLS, "required", True, "harmony", ids)
    forced = after_reasoning(grammar, "harmony", ids, has_header=True)
    call = "<|channel|>commentary to=functions.g <|constrain|>json<|message|>"
    assert accepts(forced, tokens, f'{thoughts}{call}{{"b": 1}}')
    assert accepts(forced, tokens, f'{call}{{"b": 1}}')
    assert not accepts(forced, tokens, f'{call}{{"b": "x"}}')
    assert not accepts(forced, tokens, f"{thoughts}<|channel|>final<|message|>no")


def test_json_after_reasoning_is_written_as_without() -> None:
    for constraint in ({"json": {"type": "object"}}, {"json": "{}"}, {"json_object": True}):
        rules = after_reasoning(constraint, "think")
        assert accepts(rules, tokenizer([]), '{"a": 1, "b": [2, 3]}'), constraint
        assert not accepts(rules, tokenizer([]), '{"a": 1,\n"b": [2, 3]}'), constraint
    for text in ("[1]", "[", "[" * 100_000):
        with pytest.raises(InvalidArgumentError, match=r"structured_outputs.json is "):
            after_reasoning({"json": text}, "think")


@pytest.mark.parametrize("single", [False, True], ids=["spelt", "single tokens"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_budget_leaves_a_model_its_calls(tool_format: str, single: bool) -> None:
    markers = special_markers(AnswerFormats(tool_format, "think")) if single else ["</think>"]
    tokens = tokenizer(markers)
    ids = {marker: tokens.token_to_id(marker) for marker in markers}
    free = after_reasoning(with_free_calls(tool_format, ids), "think_opened", ids, 5)
    call = written(tool_format, "1")
    for text in ("", "Hello <b>", call, f"So:\n\n{call}\n{call} Bye."):
        assert accepts(free, tokens, f"abcde</think>{text}"), text
    assert not accepts(free, tokens, f"abcdef</think>{call}")


def test_a_budget_bounds_gemma() -> None:
    markers = special_markers(AnswerFormats("gemma", "gemma"))
    tokens = tokenizer(markers)
    ids = {marker: tokens.token_to_id(marker) for marker in markers}
    bound = after_reasoning(with_free_calls("gemma", ids), "gemma", ids, 5)
    call = written("gemma", "1")
    for text in ("So.", call):
        assert accepts(bound, tokens, text)
        assert accepts(bound, tokens, f"<|channel>thought\nabcde<channel|>{text}")
        assert not accepts(bound, tokens, f"<|channel>thought\nabcdef<channel|>{text}")


def test_a_budget_bounds_gpt_oss() -> None:
    tokens, ids = known_tokens("harmony", single=True)
    final = BEFORE_TEXT["harmony"]
    analysis = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    call = written("harmony", "1")
    text = after_reasoning(ANY_TEXT, "harmony", ids, 5)
    calls = grammar_of_possible_calls(TOOLS, True, "harmony", ids, final)
    call_or_text = after_reasoning(calls, "harmony", ids, 5, has_header=True)
    for bound, answers in (
        (text, [f"{final}So."]),
        (call_or_text, [f"{final}So.", call, preamble + call]),
    ):
        for answer in answers:
            assert accepts(bound, tokens, analysis.format("abcde") + answer)
            assert not accepts(bound, tokens, analysis.format("abcdef") + answer)
            twice = analysis.format("abc") + analysis.format("abc")
            assert not accepts(bound, tokens, twice + answer)
    none = after_reasoning(ANY_TEXT, "harmony", ids, 0)
    assert accepts(none, tokens, f"{final}So.")
    assert not accepts(none, tokens, analysis.format("a") + f"{final}So.")


def test_a_budget_needs_markers_that_are_tokens() -> None:
    for name in ("gemma", "harmony"):
        reasoning = find_reasoning(name)
        assert reasoning is not None
        markers = special_markers(AnswerFormats(None, name))
        ids = {marker: index for index, marker in enumerate(markers)}
        assert bounds_reasoning(reasoning, ids)
        assert not bounds_reasoning(reasoning, {})


def test_reasoning_has_a_budget() -> None:
    tokens = tokenizer(["<think>", "</think>"])
    ids = {marker: tokens.token_to_id(marker) for marker in ("<think>", "</think>")}
    opened = after_reasoning(ANY_TEXT, "think_opened", ids, 5)
    assert accepts(opened, tokens, "abcde</think>So.")
    assert accepts(opened, tokens, "ab</think>\n\nSo: abcdefgh")
    assert not accepts(opened, tokens, "abcdef</think>So.")
    assert not accepts(opened, tokens, "abcdef")
    closed = after_reasoning({"regex": "a+"}, "think", ids, 5)
    assert accepts(closed, tokens, "aaaaaaaaaa")
    assert accepts(closed, tokens, "<think>abcde</think>aa")
    assert not accepts(closed, tokens, "<think>abcdef</think>aa")
    none = after_reasoning(ANY_TEXT, "think_opened", ids, 0)
    assert accepts(none, tokens, "</think>So.")
    assert not accepts(none, tokens, "a</think>So.")


@pytest.mark.parametrize(
    ("tool_format", "call"),
    [
        ("mistral", '[TOOL_CALLS]g[CALL_ID]a1[ARGS]{"b": 1}'),
        ("mistral_args", '[TOOL_CALLS]g[CALL_ID]a1[ARGS]{"b": 1}'),
        ("pythonic", "<|python_start|>[g(b=1)]<|python_end|>"),
        ("llama3_json", '<|python_tag|>{"name": "g", "parameters": {"b": 1}}'),
    ],
)
def test_a_budget_leaves_a_model_all_tokens_of_a_call(tool_format: str, call: str) -> None:
    markers = special_markers(AnswerFormats(tool_format, "think"))
    tokens = tokenizer(markers)
    ids = {marker: tokens.token_to_id(marker) for marker in markers}
    assert accepts(with_free_calls(tool_format, ids), tokens, call)

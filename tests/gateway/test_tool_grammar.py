"""Forced calls: whatever the grammar lets a model say is read as calls of the tools."""

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest
from jitney.errors import InvalidArgumentError
from jitney_gateway.answer_parser import make_parser
from jitney_gateway.formats import TOOL_FORMATS, AnswerFormats, special_markers
from jitney_gateway.tool_grammar import grammar_of_calls, grammar_of_calls_or_answer
from tokenizers import Tokenizer

from tests.gateway.written_calls import (
    BEFORE_TEXT,
    SCHEMAS,
    TOOLS,
    accepts,
    known_tokens,
    tokenizer,
    written,
)


def said(constraint: Any, tokens: Tokenizer, seed: int, quote: str = '"') -> str:
    """A random text that the grammar allows; it seeks the end of strings and of itself."""
    end_of_string = "</parameter>" if quote == '"' else quote
    eos = tokens.token_to_id("<eos>")
    known = llguidance.LLTokenizer(tokens.to_str(), eos_token=eos)
    grammar = llguidance.LLMatcher.grammar_from_lark(constraint["grammar"])
    matcher = llguidance.LLMatcher(known, grammar, log_level=0)
    chance = random.Random(seed)
    ids: list[int] = []
    while not matcher.is_stopped():
        assert not matcher.is_error(), matcher.get_error()
        assert len(ids) < 5000
        allowed = [i for i, bit in enumerate(matcher.compute_logit_bias()) if bit and i != eos]
        text = tokens.decode(ids, skip_special_tokens=False)
        if matcher.is_accepting() and chance.random() < 0.5:
            break
        sizes = range(len(end_of_string) - 1, -1, -1)
        size = next(n for n in sizes if text.endswith(end_of_string[:n]))
        free = text.rpartition("<parameter=")[2].startswith("text>")
        if quote != '"':
            free = text.count(quote) % 2 == 1
        seeking = end_of_string[size] if free else ""
        ends = [i for i in allowed if i >= 256 or tokens.id_to_token(i) in ('"', "}", "]", ")")]
        last = [i for i in allowed if tokens.id_to_token(i) == seeking]
        wanted = (last or ends) if chance.random() < (0.95 if last else 0.6) else allowed
        ids.append(chance.choice(wanted or allowed))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
    assert not matcher.is_error(), matcher.get_error()
    return tokens.decode(ids, skip_special_tokens=False)


def calls(tool_format: str, text: str, reasoning_format: str | None = None) -> list[Any]:
    """All calls of a text that has nothing else, but for reasoning."""
    parser = make_parser(AnswerFormats(tool_format, reasoning_format), TOOLS)
    made = [each for each in parser.push(text) + parser.finish() if each.kind != "reasoning"]
    assert all(each.kind == "call" for each in made), text
    return [(str(each.name), json.loads(each.text)) for each in made]


@pytest.mark.parametrize("single", [False, True], ids=["spelt", "single tokens"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_what_the_grammar_allows_are_calls(tool_format: str, single: bool) -> None:
    markers = special_markers(AnswerFormats(tool_format, None)) if single else []
    tokens = tokenizer(markers)
    ids = {marker: tokens.token_to_id(marker) for marker in markers}
    constraint = grammar_of_calls(TOOLS, "required", True, tool_format, ids)
    named, most = set(), 0
    for seed in range(12):
        text = said(constraint, tokens, seed, TOOL_FORMATS[tool_format].quote)
        found = calls(tool_format, text)
        assert found
        for name, arguments in found:
            jsonschema.validate(arguments, {"type": "object", **SCHEMAS[name]})
        named |= {name for name, _ in found}
        most = max(most, len(found))
    assert named == set(SCHEMAS)
    several = TOOL_FORMATS[tool_format].syntax.between_calls is not None
    assert (most > 1) == several


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_named_function_is_called_once(tool_format: str) -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    constraint = grammar_of_calls(TOOLS, choice, True, tool_format)
    for seed in range(6):
        text = said(constraint, tokenizer([]), seed, TOOL_FORMATS[tool_format].quote)
        assert [name for name, _ in calls(tool_format, text)] == ["g"]


def test_one_call_where_parallel_ones_are_not_wanted() -> None:
    constraint = grammar_of_calls(TOOLS, "required", False, "hermes")
    assert {len(calls("hermes", said(constraint, tokenizer([]), seed))) for seed in range(6)} == {1}


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_nothing_is_forced_otherwise(choice: str | None) -> None:
    assert grammar_of_calls(TOOLS, choice, True, "hermes") is None


def test_what_cannot_be_called_is_refused_by_name() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"tool_choice is .*h.*one of the request's tools"
    ):
        grammar_of_calls(TOOLS, {"type": "function", "function": {"name": "h"}}, True, "hermes")
    for name, schema in [("g-h", {}), ("g", {"properties": {"from": {}}})]:
        tool = {"function": {"name": name, "parameters": schema}}
        with pytest.raises(InvalidArgumentError, match=r"g-h|from"):
            grammar_of_calls([tool], "required", True, "pythonic")


@pytest.mark.parametrize("single", [False, True], ids=["spelt", "single tokens"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_with_a_constraint_an_answer_is_calls_or_what_it_says(
    tool_format: str, single: bool
) -> None:
    tokens, ids = known_tokens(tool_format, single)
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    schema |= {"required": ["answer"], "additionalProperties": False}
    before = BEFORE_TEXT.get(tool_format, "")
    for constraint in ({"json": schema}, {"regex": r"\{.answer.: .a b.\}"}):
        both = grammar_of_calls_or_answer(constraint, TOOLS, True, tool_format, ids, before)
        assert accepts(both, tokens, before + '{"answer": "a b"}')
        assert accepts(both, tokens, written(tool_format, "1"))
        assert not accepts(both, tokens, written(tool_format, '"x"'))
        assert not accepts(both, tokens, f"{before}So: a b")
        assert not accepts(both, tokens, before + '{"answer": "a b"}' + written(tool_format, "1"))


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_any_object_is_an_answer_beside_calls(tool_format: str) -> None:
    before = BEFORE_TEXT.get(tool_format, "")
    both = grammar_of_calls_or_answer({"json_object": True}, TOOLS, True, tool_format, None, before)
    for text in ('{"name": "Ann", "a": [1]}', '{"name": "g", "arguments": 5}', "{}"):
        assert accepts(both, tokenizer([]), before + text), text
    assert accepts(both, tokenizer([]), written(tool_format, "1"))

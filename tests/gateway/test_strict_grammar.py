"""Answers that may call: text and calls, in which a strict tool keeps its schema."""

import json

import pytest
from jitney_gateway.formats import TOOL_FORMATS
from jitney_gateway.strict_grammar import grammar_of_strict_tools

from tests.gateway.written_calls import (
    BEFORE_TEXT,
    TOOLS,
    accepts,
    known_tokens,
    tokenizer,
    written,
)

ONLY_AT_BEGINNING = ("pythonic", "llama3_json")


@pytest.mark.parametrize("single", [False, True], ids=["spelt", "single tokens"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_strict_tool_is_called_as_its_schema_says(tool_format: str, single: bool) -> None:
    tokens, ids = known_tokens(tool_format, single)
    before = BEFORE_TEXT.get(tool_format, "")
    assert grammar_of_strict_tools(TOOLS, True, tool_format, ids, before) is None
    strict = json.loads(json.dumps(TOOLS))
    strict[1]["function"]["strict"] = True
    free = grammar_of_strict_tools(strict, True, tool_format, ids, before)
    call = written(tool_format, "1")
    wrong = written(tool_format, '"x"')
    for text in ("", "Hello <b>", "[1] {", "functools [0]"):
        assert accepts(free, tokens, before + text), text
    assert accepts(free, tokens, call)
    assert not accepts(free, tokens, wrong)
    if tool_format in ONLY_AT_BEGINNING:
        assert not accepts(free, tokens, wrong.replace(" ", "").replace('{"', '{ "'))
        assert accepts(free, tokens, f"So: {wrong}"), "no call"
    elif before:
        assert not accepts(free, tokens, call + call), "a call ends the answer"
        assert accepts(free, tokens, f"{before}So:{wrong}") is not single
    else:
        assert accepts(free, tokens, f"So:\n\n{call}")
        assert accepts(free, tokens, f"{call}\n{call} Bye.")
        assert not accepts(free, tokens, f"So:\n\n{wrong}")
    if tool_format not in ("pythonic", "qwen_xml"):
        other = written(tool_format, '"x"', "now")
        assert accepts(free, tokens, other), "this tool is not strict"


@pytest.mark.parametrize("tool_format", ["qwen_xml", "pythonic"])
def test_a_strict_tool_allows_others_beside_it(tool_format: str) -> None:
    free = {"name": "now", "parameters": {"properties": {"b": {"type": "string", "not": {}}}}}
    if tool_format == "pythonic":
        free["parameters"] = {"properties": {"b-c": {}}}
    strict = json.loads(json.dumps(TOOLS))[1]
    strict["function"]["strict"] = True
    dashed = {"function": {"name": "b-c", "parameters": {}}}
    tools = [strict, {"function": free}, dashed]
    constraint = grammar_of_strict_tools(tools, True, tool_format, {})
    assert constraint is not None
    tokens = tokenizer([])
    assert accepts(constraint, tokens, written(tool_format, "1"))
    assert not accepts(constraint, tokens, written(tool_format, '"x"'))
    assert accepts(constraint, tokens, written(tool_format, '"x"', "now"))


@pytest.mark.parametrize("single", [False, True], ids=["spelt", "single tokens"])
def test_with_harmony_a_preamble_comes_before_a_strict_call(single: bool) -> None:
    tokens, ids = known_tokens("harmony", single)
    strict = json.loads(json.dumps(TOOLS))
    strict[1]["function"]["strict"] = True
    final = BEFORE_TEXT["harmony"]
    free = grammar_of_strict_tools(strict, True, "harmony", ids, final)
    preamble = "<|channel|>commentary<|message|>I look <b>.<|end|><|start|>assistant"
    call = written("harmony", "1")
    assert accepts(free, tokens, preamble + call)
    assert accepts(free, tokens, preamble + preamble + call)
    assert accepts(free, tokens, f"{preamble}{final}Done.")
    assert not accepts(free, tokens, preamble + written("harmony", '"x"'))
    assert not accepts(free, tokens, preamble), "what comes next is missing"

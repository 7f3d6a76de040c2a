"""Forced calls: whatever the grammar lets a model say is read as calls of the tools."""

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest
from jitney.errors import InvalidArgumentError
from jitney_gateway.formats import TOOL_FORMATS, AnswerFormats, special_markers
from jitney_gateway.parsers import Parser
from jitney_gateway.tool_grammar import (
    ANY_TEXT,
    after_reasoning,
    calls_or,
    grammar_of_calls,
    grammar_of_strict_tools,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FIND = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "maximum": 9, "minimum": 0},
        "where": {
            "type": "object",
            "properties": {"deep": {"type": "boolean"}, "s": {"type": "string"}},
            "required": ["deep"],
            "additionalProperties": False,
        },
        "sure": {"type": "boolean"},
        "unit": {"enum": ["km", "mile"]},
        "text": {"type": "string"},
        "choice": {"anyOf": [{"$ref": "#/$defs/choice"}, {"type": "null"}]},
    },
    "required": ["text", "where"],
    "additionalProperties": False,
    "$defs": {"choice": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "find": FIND,
    "g": {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "integer"}}},
    "now": {},
}
SCHEMAS["g"]["additionalProperties"] = False
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def tokenizer(markers: list[str]) -> Tokenizer:
    """A token for each byte, one for each of ``markers`` and the end's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    made.add_special_tokens(["<eos>"])
    return made


def said(constraint: Any, tokens: Tokenizer, seed: int) -> str:
    """A random text that the grammar allows; it seeks the end of strings and of itself."""
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
        size = next(n for n in range(11, -1, -1) if text.endswith("</parameter>"[:n]))
        free = text.rpartition("<parameter=")[2].startswith("text>")
        seeking = "</parameter>"[size] if free else ""
        ends = [i for i in allowed if i >= 256 or tokens.id_to_token(i) in ('"', "}", "]", ")")]
        last = [i for i in allowed if tokens.id_to_token(i) == seeking]
        wanted = (last or ends) if chance.random() < (0.95 if last else 0.6) else allowed
        ids.append(chance.choice(wanted or allowed))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
    assert not matcher.is_error(), matcher.get_error()
    return tokens.decode(ids, skip_special_tokens=False)


def calls(tool_format: str, text: str, reasoning_format: str | None = None) -> list[Any]:
    """All calls of a text that has nothing else, but for reasoning."""
    parser = Parser(tool_format, reasoning_format, TOOLS)
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
        found = calls(tool_format, said(constraint, tokens, seed))
        assert found
        for name, arguments in found:
            jsonschema.validate(arguments, {"type": "object", **SCHEMAS[name]})
        named |= {name for name, _ in found}
        most = max(most, len(found))
    assert named == set(SCHEMAS)
    assert most > 1


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_named_function_is_called_once(tool_format: str) -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    constraint = grammar_of_calls(TOOLS, choice, True, tool_format)
    for seed in range(6):
        assert [name for name, _ in calls(tool_format, said(constraint, tokenizer([]), seed))] == [
            "g"
        ]


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


def accepts(constraint: Any, tokens: Tokenizer, text: str) -> bool:
    """Whether ``text`` is whole."""
    known = llguidance.LLTokenizer(tokens.to_str(), eos_token=tokens.token_to_id("<eos>"))
    grammar = llguidance.LLMatcher.grammar_from_lark(constraint["grammar"])
    matcher = llguidance.LLMatcher(known, grammar, log_level=0)
    ids = tokens.encode(text).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


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


def test_what_a_definition_allows_is_written_as_it_is_read() -> None:
    optional = {"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}
    definitions = {"Code": {"type": "string", "enum": ["5"]}, "Number": {"type": "integer"}}
    properties = {"a": optional, "b": {"$ref": "#/$defs/Number"}}
    schema = {"properties": properties, "required": ["a", "b"], "$defs": definitions}
    tool = {"function": {"name": "g", "parameters": schema}}
    constraint = grammar_of_calls([tool], "required", False, "qwen_xml")

    def call(a: str, b: str) -> str:
        parameters = f"<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n{b}\n</parameter>\n"
        return f"<tool_call>\n<function=g>\n{parameters}</function>\n</tool_call>"

    assert accepts(constraint, tokenizer([]), call("5", "5"))
    assert not accepts(constraint, tokenizer([]), call("5", "x"))


def test_json_after_reasoning_is_written_as_without() -> None:
    for constraint in ({"json": {"type": "object"}}, {"json": "{}"}, {"json_object": True}):
        rules = after_reasoning(constraint, "think")
        assert accepts(rules, tokenizer([]), '{"a": 1, "b": [2, 3]}'), constraint
        assert not accepts(rules, tokenizer([]), '{"a": 1,\n"b": [2, 3]}'), constraint
    for text in ("[1]", "[", "[" * 100_000):
        with pytest.raises(InvalidArgumentError, match=r"structured_outputs.json is "):
            after_reasoning({"json": text}, "think")


@pytest.mark.parametrize(
    ("tool_formats", "schema"),
    [
        (("pythonic", "qwen_xml"), {"properties": [1]}),
        (("pythonic", "qwen_xml"), {"properties": None}),
        (("pythonic", "qwen_xml"), {"required": 5}),
        (("qwen_xml",), {"properties": {"a": {"type": 5}}}),
        (("qwen_xml",), {"properties": {"a": {"anyOf": 5}}}),
    ],
)
def test_parameters_that_are_no_schema_are_refused_by_name(
    tool_formats: tuple[str, ...], schema: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for tool_format in tool_formats:
        with pytest.raises(InvalidArgumentError, match=r"^tools: .*'f' are no JSON"):
            grammar_of_calls([tool], "required", True, tool_format)


CALLS = {  # tool format -> how a call of g is written: ARGUMENTS stand for {"b": 1}
    "qwen_xml": "<tool_call>\n<function=g>\nARGUMENTS</function>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "g", "arguments": ARGUMENTS}\n</tool_call>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n"
    "ARGUMENTS\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>ARGUMENTS"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral_args": "[TOOL_CALLS]g[ARGS]ARGUMENTS",
    "mistral": '[TOOL_CALLS][{"name": "g", "arguments": ARGUMENTS}]',
    "pythonic": "[g(ARGUMENTS)]",
    "llama3_json": '{"name": "g", "parameters": ARGUMENTS}',
}
ONLY_AT_BEGINNING = ("pythonic", "llama3_json")


def written(tool_format: str, value: str) -> str:
    """A call of g with an argument b."""
    arguments = f'{{"b": {value}}}'
    if tool_format == "qwen_xml":
        arguments = f"<parameter=b>\n{value}\n</parameter>\n"
    elif tool_format == "pythonic":
        arguments = f"b={value}"
    return CALLS[tool_format].replace("ARGUMENTS", arguments)


def known_tokens(tool_format: str, single: bool) -> tuple[Tokenizer, dict[str, int]]:
    markers = special_markers(AnswerFormats(tool_format, None)) if single else []
    tokens = tokenizer(markers)
    return tokens, {marker: tokens.token_to_id(marker) for marker in markers}


@pytest.mark.parametrize("single", [False, True], ids=["spelt", "single tokens"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_with_a_constraint_an_answer_is_calls_or_what_it_says(
    tool_format: str, single: bool
) -> None:
    tokens, ids = known_tokens(tool_format, single)
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    schema |= {"required": ["answer"], "additionalProperties": False}
    for constraint in ({"json": schema}, {"regex": r"\{.answer.: .a b.\}"}):
        both = calls_or(constraint, TOOLS, True, tool_format, ids)
        assert accepts(both, tokens, '{"answer": "a b"}')
        assert accepts(both, tokens, written(tool_format, "1"))
        assert not accepts(both, tokens, written(tool_format, '"x"'))
        assert not accepts(both, tokens, "So: a b")
        assert not accepts(both, tokens, '{"answer": "a b"}' + written(tool_format, "1"))


@pytest.mark.parametrize("single", [False, True], ids=["spelt", "single tokens"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_strict_tool_is_called_as_its_schema_says(tool_format: str, single: bool) -> None:
    tokens, ids = known_tokens(tool_format, single)
    assert grammar_of_strict_tools(TOOLS, True, tool_format, ids) is None
    strict = json.loads(json.dumps(TOOLS))
    strict[1]["function"]["strict"] = True
    free = grammar_of_strict_tools(strict, True, tool_format, ids)
    call = written(tool_format, "1")
    wrong = written(tool_format, '"x"')
    for text in ("", "Hello <b>", "[1] {", call):
        assert accepts(free, tokens, text), text
    assert not accepts(free, tokens, wrong)
    if tool_format in ONLY_AT_BEGINNING:
        assert not accepts(free, tokens, wrong.replace(" ", "").replace('{"', '{ "'))
        assert accepts(free, tokens, f"So: {wrong}"), "no call"
    else:
        assert accepts(free, tokens, f"So:\n\n{call}")
        assert accepts(free, tokens, f"{call}\n{call} Bye.")
        assert not accepts(free, tokens, f"So:\n\n{wrong}")
    if tool_format not in ("pythonic", "qwen_xml"):
        other = CALLS[tool_format].replace("ARGUMENTS", '{"b": "x"}')
        for name in ('"g"', "g\n", "]g[", ">g<"):
            other = other.replace(name, name.replace("g", "now"))
        other = other.replace("｜>g<｜", "｜>now<｜")
        assert accepts(free, tokens, other), "this tool is not strict"


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_any_object_is_an_answer_beside_calls(tool_format: str) -> None:
    both = calls_or({"json_object": True}, TOOLS, True, tool_format)
    for text in ('{"name": "Ann", "a": [1]}', '{"name": "g", "arguments": 5}', "{}"):
        assert accepts(both, tokenizer([]), text), text
    assert accepts(both, tokenizer([]), written(tool_format, "1"))


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

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
from jitney_gateway.tool_grammar import after_reasoning, grammar_of_calls
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

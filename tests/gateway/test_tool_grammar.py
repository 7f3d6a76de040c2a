"""Forced calls: whatever the grammar lets a model say is read as calls of the tools."""

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest
from jitney.errors import InvalidArgumentError
from jitney.sampling_params import StructuredOutputs
from jitney.text.grammar import prove_grammar
from jitney_gateway.formats import TOOL_FORMATS, AnswerFormats, find_reasoning, special_markers
from jitney_gateway.harmony import make_parser
from jitney_gateway.parsers import Parser
from jitney_gateway.strict_tools import why_not_kept
from jitney_gateway.tool_grammar import (
    ANY_TEXT,
    after_reasoning,
    bounds_reasoning,
    calls_or,
    grammar_of_calls,
    grammar_of_strict_tools,
    with_free_calls,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.json_schema_suite import allows, byte_compiler

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


ENUM = {"type": "string", "enum": ["red", "green"]}
VALUES = {
    "a reference": ({"$ref": "#/$defs/Color"}, ["red", "green"], ["blue", "null"]),
    "a reference to a property": ({"$ref": "#/properties/other"}, ["7"], ["x"]),
    "an anchor": ({"$ref": "#code"}, ["5"], ["6"]),
    "optional": ({"anyOf": [ENUM, {"type": "null"}]}, ["red", "null"], ["blue", "5", '"red"']),
    "optional reference": (
        {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}], "default": None},
        ["green", "null"],
        ["blue"],
    ),
    "types": ({"type": ["string", "null"], "maxLength": 2}, ["ab", "null"], ["abc"]),
    "an enum of several types": ({"enum": ["a", 'é/"😀', None]}, ["a", 'é/"😀', "null"], ["b"]),
    "const": ({"const": "a"}, ["a"], ["b", "null", '"a"']),
    "const that is no string": ({"const": 5}, ["5"], ["6"]),
    "pattern": (
        {"type": "string", "pattern": r"^\d{2}/[a\]\d[]+$"},
        ["12/a"],
        ["12/", "x12/a", "12/ax"],
    ),
    "pattern that is searched": (
        {"type": "string", "pattern": "b|^c|d$"},
        ["abc", "ca", "ad"],
        ["ac", "da"],
    ),
    "maxLength": ({"type": "string", "maxLength": 3}, ["", "äöü", "\n<a"], ["abcd"]),
    "minLength": ({"type": "string", "minLength": 2}, ["ab"], ["a", ""]),
    "format": ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-02-30", "x"]),
    "allOf": (
        {"type": "string", "allOf": [{"pattern": "^a"}, {"maxLength": 2}]},
        ["ab"],
        ["b", "abc"],
    ),
    "rules beside a reference": ({"$ref": "#/$defs/Color", "maxLength": 3}, ["red"], ["green"]),
    "a union of strings": (
        {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"const": "b"}]},
        ["aa", "b"],
        ["ab"],
    ),
    "a number or a word": ({"anyOf": [{"type": "integer"}, {"const": "all"}]}, ["all", "5"], ["x"]),
    "a word or a list": (
        {"anyOf": [{"const": "*"}, {"type": "array", "items": {"$ref": "#/$defs/Color"}}]},
        ["*", '["red"]'],
        ["x", "[5]", '"*"'],
    ),
    "any": ({}, ["x", "5"], []),
}


@pytest.mark.parametrize("case", VALUES)
def test_a_parameter_between_tags_keeps_its_schema(case: str) -> None:
    """What the grammar allows is read as a value of the schema, and what the schema forbids is not
    allowed."""
    value, fits, others = VALUES[case]
    schema = {
        "type": "object",
        "properties": {"a/b": value, "other": {"type": "integer"}},
        "required": ["a/b"],
        "additionalProperties": False,
        "$defs": {"Color": {**ENUM, "title": "Color"}, "Code": {"$anchor": "code", "const": "5"}},
    }
    tool = {"function": {"name": "g", "parameters": schema}}
    constraint = grammar_of_calls([tool], "required", False, "qwen_xml")
    # References are what the engine makes of them.
    compiler = byte_compiler()
    structured = StructuredOutputs(grammar=constraint["grammar"])
    grammar = prove_grammar(structured, compiler, max_bytes=100_000, max_depth=64)

    def call(text: str) -> str:
        parameter = f"<parameter=a/b>\n{text}\n</parameter>\n"
        return f"<tool_call>\n<function=g>\n{parameter}</function>\n</tool_call>"

    assert [text for text in fits if not allows(compiler, grammar, call(text))] == []
    assert [text for text in others if allows(compiler, grammar, call(text))] == []
    for text in fits:
        parser = Parser("qwen_xml", None, [tool])
        (piece,) = parser.push(call(text)) + parser.finish()
        jsonschema.validate(json.loads(piece.text), schema)


GEMMA = {
    "strings": ({"type": "string", "maxLength": 2}, ['"ab"'], ['"abc"', "5"]),
    "a reference": ({"$ref": "#/$defs/Color"}, ['"red"'], ['"blue"']),
    "optional": ({"anyOf": [ENUM, {"type": "null"}]}, ['"red"', "null"], ['"blue"', "red"]),
    "constants": ({"enum": [5, True, None, [1, "a"], {"b": 1}]}, ["5", '[1,"a"]', "{b:1}"], ["6"]),
    "numbers": ({"type": "integer", "minimum": 3}, ["3"], ["2", "3.5"]),
    "arrays": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
        ["[true]", "[true,false]"],
        ["[]", "[1]", "[true,true,true]"],
    ),
    "a tree": (
        {"$ref": "#/$defs/Tree"},
        ["{n:1}", "{n:1,kids:[{n:2,kids:[]}]}"],
        ["{}", "{n:1,m:1}"],
    ),
    "names": (
        {"properties": {"first name": {"const": 1}}, "required": ["first name"], "type": "object"},
        ['{"first name":1}'],
        ["{first name:1}"],
    ),
    "any object": ({"type": "object"}, ["{}", '{a:1,b:{c:[null,"x"]}}'], ["[]"]),
    "allOf": (
        {"type": "object", "allOf": [{"required": ["a"]}, {"properties": {"a": {"const": 1}}}]},
        ["{a:1}"],
        ["{}", "{a:2}"],
    ),
}


@pytest.mark.parametrize("single", [False, True], ids=["spelt", "single tokens"])
@pytest.mark.parametrize("case", GEMMA)
def test_a_value_in_gemmas_notation_keeps_its_schema(case: str, single: bool) -> None:
    """The values here have double quotes for Gemma's marker."""
    value, fits, others = GEMMA[case]
    tree = {
        "type": "object",
        "properties": {
            "n": {"type": "integer"},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
        },
        "required": ["n"],
        "additionalProperties": False,
    }
    schema = {"properties": {"a": value}, "required": ["a"], "$defs": {"Color": ENUM, "Tree": tree}}
    tool = {"function": {"name": "g", "parameters": schema}}
    markers = special_markers(AnswerFormats("gemma", None)) if single else []
    tokens = tokenizer(markers)
    ids = {marker: tokens.token_to_id(marker) for marker in markers}
    constraint = grammar_of_calls([tool], "required", False, "gemma", ids)

    def call(text: str) -> str:
        marked = text.replace('"', '<|"|>')
        return f"<|tool_call>call:g{{a:{marked}}}<tool_call|>"

    assert [text for text in fits if not accepts(constraint, tokens, call(text))] == []
    assert [text for text in others if accepts(constraint, tokens, call(text))] == []
    for text in fits:
        parser = Parser("gemma", None, [tool])
        (piece,) = parser.push(call(text)) + parser.finish()
        jsonschema.validate(json.loads(piece.text), schema)


def test_a_parameter_that_no_grammar_keeps_is_refused_by_name() -> None:
    for value, reason in [
        ({"type": "string", "not": {"const": "a"}}, "parameter 'a': 'not' of a string"),
        ({"type": "string", "pattern": "a(^b|c)"}, r"parameter 'a': pattern .* has \^ inside"),
    ]:
        tool = {"function": {"name": "g", "parameters": {"properties": {"a": value}}}}
        with pytest.raises(InvalidArgumentError, match=f"^tools: function 'g': {reason}"):
            grammar_of_calls([tool], "required", True, "qwen_xml")


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


CALLS = {  # tool format -> how a call of NAME is written: ARGUMENTS stand for {"b": 1}
    "qwen_xml": "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n"
    "ARGUMENTS\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral_args": "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": ARGUMENTS}]',
    "pythonic": "[NAME(ARGUMENTS)]",
    "llama3_json": '{"name": "NAME", "parameters": ARGUMENTS}',
    "harmony": "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS",
    "phi4_functools": 'functools[{"name": "NAME", "arguments": ARGUMENTS}]',
    "phi4_mini": '<|tool_call|>[{"name": "NAME", "arguments": ARGUMENTS}]<|/tool_call|>',
    "gemma": "<|tool_call>call:NAMEARGUMENTS<tool_call|>",
    "function_gemma": "<start_function_call>call:NAMEARGUMENTS<end_function_call>",
}
ONLY_AT_BEGINNING = ("pythonic", "llama3_json")
BEFORE_TEXT = {"harmony": "<|channel|>final<|message|>"}
"""Tool format -> what stands before an answer's content."""


def written(tool_format: str, value: str, name: str = "g") -> str:
    """A call with an argument b."""
    arguments = f'{{"b": {value}}}'
    if tool_format == "qwen_xml":
        arguments = f"<parameter=b>\n{value}\n</parameter>\n"
    elif tool_format == "pythonic":
        arguments = f"b={value}"
    elif tool_format in ("gemma", "function_gemma"):
        quote = TOOL_FORMATS[tool_format].quote
        arguments = f"{{b:{value}}}".replace('"', quote)
    return CALLS[tool_format].replace("NAME", name).replace("ARGUMENTS", arguments)


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
    before = BEFORE_TEXT.get(tool_format, "")
    for constraint in ({"json": schema}, {"regex": r"\{.answer.: .a b.\}"}):
        both = calls_or(constraint, TOOLS, True, tool_format, ids, before)
        assert accepts(both, tokens, before + '{"answer": "a b"}')
        assert accepts(both, tokens, written(tool_format, "1"))
        assert not accepts(both, tokens, written(tool_format, '"x"'))
        assert not accepts(both, tokens, f"{before}So: a b")
        assert not accepts(both, tokens, before + '{"answer": "a b"}' + written(tool_format, "1"))


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


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_any_object_is_an_answer_beside_calls(tool_format: str) -> None:
    before = BEFORE_TEXT.get(tool_format, "")
    both = calls_or({"json_object": True}, TOOLS, True, tool_format, None, before)
    for text in ('{"name": "Ann", "a": [1]}', '{"name": "g", "arguments": 5}', "{}"):
        assert accepts(both, tokenizer([]), before + text), text
    assert accepts(both, tokenizer([]), written(tool_format, "1"))


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


def test_a_budget_bounds_gemma_and_not_gpt_oss() -> None:
    markers = special_markers(AnswerFormats("gemma", "gemma"))
    tokens = tokenizer(markers)
    ids = {marker: tokens.token_to_id(marker) for marker in markers}
    bound = after_reasoning(with_free_calls("gemma", ids), "gemma", ids, 5)
    call = written("gemma", "1")
    for text in ("So.", call):
        assert accepts(bound, tokens, text)
        assert accepts(bound, tokens, f"<|channel>thought\nabcde<channel|>{text}")
        assert not accepts(bound, tokens, f"<|channel>thought\nabcdef<channel|>{text}")
    known = {marker: index for index, marker in enumerate(TOOL_FORMATS["harmony"].markers)}
    for name, token_ids, is_bound in (
        ("gemma", ids, True),
        ("gemma", {}, False),
        ("harmony", known, False),
    ):
        reasoning = find_reasoning(name)
        assert reasoning is not None
        assert bounds_reasoning(reasoning, token_ids) is is_bound


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


NOT_KEPT = {
    "a format": ({"type": "string", "format": "uuid4"}, True),
    "another format": ({"type": "string", "format": "path"}, True),
    "a look-ahead": ({"type": "string", "pattern": "^(?!a)"}, False),
    "a keyword": ({"type": "string", "not": {"const": "a"}}, False),
}


@pytest.mark.parametrize("tool_format", ["hermes", "qwen_xml", "pythonic", "gemma"])
@pytest.mark.parametrize("name", NOT_KEPT)
def test_a_tool_is_strict_as_far_as_a_grammar_can_keep_it(name: str, tool_format: str) -> None:
    schema, is_kept = NOT_KEPT[name]
    function = {"name": "g", "parameters": {"type": "object", "properties": {"a": schema}}}
    assert (why_not_kept(function, tool_format, {}) is None) == is_kept
    if is_kept:
        assert grammar_of_calls([{"function": function}], "required", True, tool_format)


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

"""The arguments of calls: a grammar keeps the schema of a tool, in each notation."""

import itertools
import json
from typing import Any

import jsonschema
import pytest
from jitney.errors import InvalidArgumentError
from jitney.sampling_params import StructuredOutputs
from jitney.text.grammar import prove_grammar
from jitney_gateway.formats import AnswerFormats, special_markers
from jitney_gateway.parsers import Parser
from jitney_gateway.strict_tools import why_not_kept
from jitney_gateway.tool_grammar import grammar_of_calls

from benchmarks.json_schema_suite import allows, byte_compiler
from tests.gateway.written_calls import (
    accepts,
    known_tokens,
    tokenizer,
    written_with,
)


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
    "an enum of words and numbers": (
        {"enum": ["auto", 5, True, [1]]},
        ["auto", "5", "true", "[1]"],
        ["6", '"auto"', "null", "false"],
    ),
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
    "one item at most": (
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
        ["[]", "[true]"],
        ["[true,true]"],
    ),
    "one item": (
        {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 1},
        ["[null]"],
        ["[]", "[null,null]"],
    ),
    "constants with bounds": (
        {"enum": [1, 5, 7, 2.5, True], "allOf": [{"maximum": 6}, {"exclusiveMinimum": 1}]},
        ["5", "2.5", "true"],
        ["1", "7"],
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


LISTED = {
    "qwen_xml": ["a </parameter> b", "\n</parameter>\n<parameter=b>\n", "</parameter></function>"],
    "gemma": ["a", 'a<|"|>', '<|"|>'],
}


@pytest.mark.parametrize("single", [False, True], ids=["spelt", "single tokens"])
@pytest.mark.parametrize("tool_format", LISTED)
def test_a_listed_text_that_would_be_read_as_its_end_is_left_out(
    tool_format: str, single: bool
) -> None:
    readable, *others = LISTED[tool_format]
    tokens, ids = known_tokens(tool_format, single)

    def constraint(listed: list[str]) -> dict[str, str] | None:
        properties = {"a": {"enum": listed}}
        tool = {"function": {"name": "g", "parameters": {"properties": properties}}}
        return grammar_of_calls([tool], "required", False, tool_format, ids)

    for text in (readable, *others):
        call = written_with("qwen_xml", {"a": text})
        if tool_format == "gemma":
            call = f'<|tool_call>call:g{{a:<|"|>{text}<|"|>}}<tool_call|>'
        grammar = constraint([readable, *others])
        assert accepts(grammar, tokens, call) == (text == readable)
    with pytest.raises(InvalidArgumentError, match="none of the listed strings may hold"):
        constraint(others)


@pytest.mark.parametrize("tool_format", ["qwen_xml", "gemma", "pythonic", "hermes"])
@pytest.mark.parametrize("value", [{"$ref": "#/$defs/Endless"}, {"enum": []}])
def test_an_argument_that_nothing_finite_fits_is_not_begun(value: Any, tool_format: str) -> None:
    endless = {
        "type": "object",
        "properties": {"e": {"$ref": "#/$defs/Endless"}},
        "required": ["e"],
    }
    schema = {
        "type": "object",
        "properties": {"a": value, "b": {"type": "integer"}},
        "required": ["b"],
        "additionalProperties": False,
        "$defs": {"Endless": endless},
    }
    tool = {"function": {"name": "g", "parameters": schema}}
    constraint = grammar_of_calls([tool], "required", False, tool_format)
    compiler = byte_compiler()
    structured = StructuredOutputs(grammar=constraint["grammar"])
    grammar = prove_grammar(structured, compiler, max_bytes=100_000, max_depth=64)
    assert allows(compiler, grammar, written_with(tool_format, {"b": 1}))
    assert not allows(compiler, grammar, written_with(tool_format, {"a": {"e": {}}, "b": 1}))


def test_a_tuple_in_gemmas_notation_is_refused() -> None:
    value = {"type": "array", "items": [{"type": "integer"}]}
    tool = {"function": {"name": "g", "parameters": {"properties": {"a": value}}}}
    with pytest.raises(InvalidArgumentError, match="'items' with a list is not supported"):
        grammar_of_calls([tool], "required", True, "gemma")


def optional(names: str, tool_format: str) -> dict[str, str] | None:
    """The grammar of a call whose arguments may all be left out."""
    properties = {name: {"const": 1} for name in names.split()}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    tool = {"function": {"name": "g", "parameters": schema}}
    return grammar_of_calls([tool], "required", False, tool_format)


def test_optional_arguments_come_in_their_order() -> None:
    tokens = tokenizer([])
    names = "a b c d e"
    constraint = optional(names, "pythonic")
    for number in range(6):
        for chosen in itertools.combinations(names.split(), number):
            arguments = ", ".join(f"{name}=1" for name in chosen)
            assert accepts(constraint, tokens, f"[g({arguments})]"), arguments
    for arguments in ("b=1, a=1", "a=1, a=1", "a=1,", ", a=1", "a=1 b=1", "c=1, e=1, d=1"):
        assert not accepts(constraint, tokens, f"[g({arguments})]"), arguments


@pytest.mark.parametrize("tool_format", ["pythonic", "qwen_xml", "gemma"])
def test_a_grammar_grows_with_the_number_of_optional_arguments(tool_format: str) -> None:
    sizes = []
    for number in (500, 1000):
        names = " ".join(f"a{index:03}" for index in range(number))
        sizes.append(len(str(optional(names, tool_format))))
    assert sizes[1] < 2.2 * sizes[0]  # its square would be four times as large


def test_a_parameter_that_no_grammar_keeps_is_refused_by_name() -> None:
    for value, reason in [
        ({"type": "string", "not": {"const": "a"}}, "parameter 'a': 'not' of a string"),
        ({"type": "string", "pattern": "a(^b|c)"}, r"parameter 'a': pattern .* has \^ inside"),
    ]:
        tool = {"function": {"name": "g", "parameters": {"properties": {"a": value}}}}
        with pytest.raises(InvalidArgumentError, match=f"^tools: function 'g': {reason}"):
            grammar_of_calls([tool], "required", True, "qwen_xml")


DOUBLING = {str(number): {"allOf": [{"$ref": f"#/$defs/{number + 1}"}] * 2} for number in range(16)}
"""Each definition refers to the next one twice: so 65,536 ways lead to the last one."""


@pytest.mark.parametrize(
    ("tool_formats", "schema"),
    [
        (("pythonic", "qwen_xml"), {"properties": [1]}),
        (("pythonic", "qwen_xml"), {"properties": None}),
        (("pythonic", "qwen_xml"), {"required": 5}),
        (("qwen_xml",), {"properties": {"a": {"type": 5}}}),
        (("qwen_xml",), {"properties": {"a": {"anyOf": 5}}}),
        (("qwen_xml", "gemma"), {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": DOUBLING}),
    ],
)
def test_parameters_that_are_no_schema_are_refused_by_name(
    tool_formats: tuple[str, ...], schema: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for tool_format in tool_formats:
        with pytest.raises(InvalidArgumentError, match=r"^tools: .*'f' are no JSON"):
            grammar_of_calls([tool], "required", True, tool_format)


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


A_AND_B = {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/Color"}}
PAIR = {"type": "object", "properties": A_AND_B, "required": ["a"], "additionalProperties": False}
SHAPES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = {
    "a reference": (
        {"$ref": "#/$defs/Pair"},
        [{"a": 1}, {"a": 1, "b": "red"}],
        [{}, {"b": "red"}, {"a": "x"}, {"a": 1, "b": "x"}],
    ),
    "allOf": (
        {
            "allOf": [{"$ref": "#/$defs/Pair"}, {"required": ["b"]}],
            "properties": {"a": {"maximum": 5}, "b": {}},
        },
        [{"a": 1, "b": "red"}],
        [{"a": 1}, {"a": 6, "b": "red"}],
    ),
    "anyOf of what is required": (
        {"properties": A_AND_B, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": "red"}, {"a": 1, "b": "red"}],
        [{}, {"b": "x"}],
    ),
    "oneOf with a discriminator": (
        {
            "oneOf": [
                {"properties": {"kind": {"const": "x"}, "n": {"type": "integer"}}},
                {"properties": {"kind": {"const": "y"}, "s": {"type": "null"}}},
            ],
            "required": ["kind"],
        },
        [{"kind": "x"}, {"kind": "x", "n": 1}, {"kind": "y", "s": None}],
        [{}, {"kind": "x", "s": None}, {"kind": "z"}],
    ),
    "required and nowhere described": (
        {"required": ["a"], "additionalProperties": {"type": "integer"}},
        [{"a": 1}],
        [{}, {"a": "x"}, {"b": 1}],
    ),
    "a branch that forbids a property of another": (
        {"properties": {"a": {}, "b": {}}, "allOf": [{**PAIR, "properties": {"a": {"const": 1}}}]},
        [{"a": 1}],
        [{"a": 1, "b": 1}, {"a": 2}],
    ),
}


@pytest.mark.parametrize("tool_format", ["qwen_xml", "pythonic", "gemma"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_arguments_keep_what_the_schema_says_of_all_of_them(
    shape: str, tool_format: str
) -> None:
    schema, fits, others = SHAPES[shape]
    schema = {**schema, "$defs": {"Pair": PAIR, "Color": ENUM}}
    tool = {"function": {"name": "g", "parameters": schema}}
    constraint = grammar_of_calls([tool], "required", False, tool_format)
    compiler = byte_compiler()
    structured = StructuredOutputs(grammar=constraint["grammar"])
    grammar = prove_grammar(structured, compiler, max_bytes=100_000, max_depth=64)
    for arguments in fits:
        text = written_with(tool_format, arguments)
        assert allows(compiler, grammar, text), arguments
        parser = Parser(tool_format, None, [tool])
        (piece,) = parser.push(text) + parser.finish()
        assert json.loads(piece.text) == arguments
    allowed = []
    for arguments in others:
        if allows(compiler, grammar, written_with(tool_format, arguments)):
            allowed.append(arguments)
    assert allowed == []


@pytest.mark.parametrize("tool_format", ["qwen_xml", "pythonic"])
@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"not": {"required": ["a"]}}, "'not' of the parameters"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "'if' of the parameters"),
        ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired' of the parameters"),
        ({"minProperties": 1}, "'minProperties' of the parameters"),
        ({"maxProperties": 1}, "'maxProperties' of the parameters"),
        ({"patternProperties": {"a": {}}}, "'patternProperties' of the parameters"),
        ({"allOf": [False]}, "no arguments fit"),
        ({"properties": {"a": False}, "required": ["a"]}, "no arguments fit"),
    ],
)
def test_what_a_list_of_arguments_cannot_keep_is_refused_by_name(
    more: dict[str, Any], reason: str, tool_format: str
) -> None:
    schema = {"properties": {"a": {}, "b": {}}, **more}
    tool = {"function": {"name": "g", "parameters": schema}}
    with pytest.raises(InvalidArgumentError, match=f"^tools: function 'g': {reason}"):
        grammar_of_calls([tool], "required", True, tool_format)


def test_keywords_that_allow_everything_are_kept_by_each_format() -> None:
    value = {"type": "array", "uniqueItems": False}
    schema = {"properties": {"a": value}, "propertyNames": {}, "minProperties": 0}
    tool = {"function": {"name": "g", "parameters": schema}}
    for tool_format in ("qwen_xml", "pythonic", "gemma"):
        assert grammar_of_calls([tool], "required", True, tool_format)


@pytest.mark.parametrize("name", ["a>b", "a\nb", ""])
def test_a_name_that_ends_its_tag_is_refused(name: str) -> None:
    tool = {"function": {"name": "g", "parameters": {"properties": {name: {}}}}}
    with pytest.raises(InvalidArgumentError, match="a name between tags has no > or newline"):
        grammar_of_calls([tool], "required", True, "qwen_xml")


def test_a_parameter_that_would_be_read_differently_is_refused() -> None:
    """The text 5 would be read as a string, which the first branch forbids."""
    branches = [{"properties": {"a": {"type": kind}}} for kind in ("integer", "string")]
    tool = {"function": {"name": "g", "parameters": {"anyOf": branches}}}
    with pytest.raises(InvalidArgumentError, match="'a': its types differ between the branches"):
        grammar_of_calls([tool], "required", True, "qwen_xml")

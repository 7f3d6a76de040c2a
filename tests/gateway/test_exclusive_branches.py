"""A ``oneOf`` is kept where its branches exclude each other, and refused where they may not."""

import random
from typing import Any

import jsonschema
import pytest
from jitney.errors import InvalidArgumentError
from jitney_gateway.schema_alternatives import alternatives_of
from jitney_gateway.tool_grammar import grammar_of_calls

from tests.gateway.written_calls import accepts, tokenizer, written_with


def member(value: Any, *, required: bool = True) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": {"k": value}}
    return {**schema, "required": ["k"]} if required else schema


EXCLUSIVE: list[list[Any]] = [
    [{"type": "string"}, {"type": "integer"}, {"type": "null"}],
    [{"enum": ["a", 1, None]}, {"enum": ["b", True, 0]}],
    [{"const": [1]}, {"const": [True]}, {"const": {"a": 1}}],
    [{"const": 5}, {"type": "string", "pattern": "^a"}],
    [{"type": ["string", "null"]}, {"anyOf": [{"type": "array"}, {"const": 1.5}]}],
    [member({"const": "a"}), member({"enum": ["b", "c"]})],
    [member({}), {"type": "object", "properties": {"k": False}}],
    [{"required": ["a"]}, {"required": ["b"]}],
]
OVERLAPPING: list[list[Any]] = [
    [{"type": "string"}, {"type": "string", "format": "date"}],
    [{"type": "integer"}, {"type": "number"}],
    [{"enum": ["a", 1.0]}, {"const": 1}],
    [{"type": "string"}, {"description": "anything"}],
    [{"const": "auto"}, {"type": "string"}],
    [member({"const": "a"}), member({"const": "b"}, required=False)],
    [{"required": ["k"], "properties": {"k": {"const": each}}} for each in "ab"],
    [{"required": ["a"]}, {"required": ["a"]}],
    [{"type": "array", "items": {"const": 1}}, {"type": "array", "items": {"const": 2}}],
]


@pytest.mark.parametrize("branches", EXCLUSIVE)
def test_branches_that_exclude_each_other_are_alternatives(branches: list[Any]) -> None:
    assert alternatives_of({"oneOf": branches}, {}, exact=True)


@pytest.mark.parametrize("branches", OVERLAPPING)
def test_branches_that_may_overlap_are_refused_by_name(branches: list[Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="'oneOf' is supported only if"):
        alternatives_of({"oneOf": branches}, {}, exact=True)
    assert alternatives_of({"oneOf": branches}, {})  # to read what a model wrote anyway


@pytest.mark.parametrize("branches", [[{"type": "text"}, {}], [{"required": 5}, {}], [{"enum": 5}]])
def test_branches_that_are_no_schemas_are_told_as_such(branches: list[Any]) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        alternatives_of({"oneOf": branches}, {}, exact=True)


VALUES: list[Any] = [
    None, True, False, 0, 1, 1.0, 1.5, "", "a", "b", [], [1], [True], {}, {"k": "a"}, {"k": "b"},
    {"k": 1}, {"k": None}, {"j": 1}, {"k": "a", "j": 1},
]  # fmt: skip


def random_schema(source: random.Random, depth: int = 2) -> Any:
    names = source.sample(["type", "enum", "const", "properties", "required", "anyOf"], 2)
    types = ["string", "integer", "number", "boolean", "null", "array", "object"]
    schema: dict[str, Any] = {}
    for name in names:
        match name:
            case "type":
                schema["type"] = source.choice([*types, source.sample(types, 2)])
            case "enum":
                schema["enum"] = source.sample(VALUES, 3)
            case "const":
                schema["const"] = source.choice(VALUES)
            case "required":
                schema["required"] = source.choice([["k"], ["j"], ["k", "j"]])
            case "properties" if depth:
                inner = source.choice([False, random_schema(source, depth - 1)])
                schema["properties"] = {source.choice("kj"): inner}
            case "anyOf" if depth:
                schema["anyOf"] = [random_schema(source, depth - 1) for _ in range(2)]
    return schema


def test_no_value_fits_two_of_the_branches_that_are_taken() -> None:
    source = random.Random(5)
    num_taken = 0
    for _ in range(4000):
        schema = {"oneOf": [random_schema(source), random_schema(source)]}
        try:
            alternatives_of(schema, schema, exact=True)
        except InvalidArgumentError:
            continue
        num_taken += 1
        one_of = jsonschema.Draft202012Validator(schema)
        any_of = jsonschema.Draft202012Validator({"anyOf": schema["oneOf"]})
        exclusive = list(schema["oneOf"][0]) != ["required"]
        if exclusive:
            assert [one_of.is_valid(each) for each in VALUES] == list(map(any_of.is_valid, VALUES))
    assert num_taken > 1000


@pytest.mark.parametrize("tool_format", ["qwen_xml", "gemma", "pythonic"])
def test_exactly_one_of_two_arguments(tool_format: str) -> None:
    number = {"type": "integer"}
    schema = {
        "type": "object",
        "properties": {"a": number, "b": number},
        "additionalProperties": False,
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    }
    tool = {"function": {"name": "g", "parameters": schema}}
    constraint = grammar_of_calls([tool], "required", False, tool_format)
    for arguments, fits in (
        ({"a": 1}, True),
        ({"b": 1}, True),
        ({"a": 1, "b": 1}, False),
        ({}, False),
    ):
        call = written_with(tool_format, arguments)
        assert accepts(constraint, tokenizer([]), call) == fits, arguments


@pytest.mark.parametrize("tool_format", ["qwen_xml", "gemma", "function_gemma"])
def test_a_forced_call_does_not_widen_an_overlapping_choice(tool_format: str) -> None:
    value = {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^a"}]}
    schema = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    tool = {"function": {"name": "g", "parameters": schema}}
    with pytest.raises(InvalidArgumentError, match="function 'g': 'oneOf' is supported only if"):
        grammar_of_calls([tool], "required", False, tool_format)

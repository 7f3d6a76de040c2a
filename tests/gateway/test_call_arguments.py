"""The arguments of calls: they leave while the model writes them, and are cut where they end."""

import json
from typing import Any

import pytest
from jitney_gateway import tagged_value
from jitney_gateway.answer_parser import make_parser
from jitney_gateway.formats import TOOL_FORMATS, AnswerFormats
from jitney_gateway.parsers import Parser
from jitney_gateway.pieces import Piece

from tests.gateway.read_pieces import (
    CALL,
    FIND,
    GEMMA_HEAD,
    HEAD,
    NESTED_JSON,
    ONE,
    TOOLS,
    V3,
    V31,
    XML,
    Read,
    read,
)

DEFINITIONS = {
    "Code": {"enum": ["5", "6"]},
    "Place": {"type": "object"},
    "Circle": {"allOf": [{"$ref": "#/$defs/Circle"}]},
}


@pytest.mark.parametrize(
    ("tool_format", "head"),
    [("hermes", HEAD + '{"n": '), ("gemma", "<|tool_call>call:find{n:")],
)
@pytest.mark.parametrize("begin", ["1", "-0.", "1e", "-1.5E+"])
def test_a_number_without_end_is_cut(tool_format: str, head: str, begin: str) -> None:
    """So it is not read anew for ever, with each piece of it."""
    for number, is_cut in ((100, False), (2000, True)):
        parser = Parser(tool_format, None, TOOLS)
        parser.push(head)
        parser.push(begin + "0" * number)
        more = parser.push("0")
        assert ("0" in "".join(piece.text for piece in more)) == is_cut, more


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"description": "any"}, "5", "5"),
        ({"const": "5"}, "5", "5"),
        ({"const": 5}, "5", 5),
        ({"enum": ["a", 5]}, "5", 5),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "5", "5"),
        ({"anyOf": [{"description": "any"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"$ref": "#/$defs/Code"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/Code"}, "5", "5"),
        ({"$ref": "#/$defs/Unknown"}, "5", "5"),
        ({"$ref": "#/$defs/Circle"}, "5", "5"),
        ({"$ref": "#/$defs/Place"}, '{"x": 1}', {"x": 1}),
        ({"allOf": [{"$ref": "#/$defs/Place"}]}, '{"x": 1}', {"x": 1}),
    ],
)
def test_a_parameter_between_tags_is_text_unless_its_schema_says_otherwise(
    schema: Any, text: str, value: Any
) -> None:
    parameters = {"properties": {"v": schema}, "$defs": DEFINITIONS}
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    parser = Parser("qwen_xml", None, tools)
    answer = f"<function=find>\n<parameter=v>\n{text}\n</parameter>\n</function>"
    (call,) = parser.push(answer) + parser.finish()
    assert json.loads(call.text) == {"v": value}


CUT = {  # tool format, text, what it says: calls that were certain, and end too early
    "in a number": ("hermes", HEAD + '{"n": 1', Read(cut=((FIND, '{"n": 1'),))),
    "in a string": ("hermes", HEAD + '{"zip": "a\\u00', Read(cut=((FIND, '{"zip": "a\\u00'),))),
    "before the arguments": ("hermes", HEAD, Read(cut=((FIND, ""),))),
    "in the second": (
        *("mistral", f'[TOOL_CALLS] [{{"name": "g", "arguments": {NESTED_JSON}}}, {{"nam'),
        Read(f'[TOOL_CALLS] [{{"name": "g", "arguments": {NESTED_JSON}}}, {{"nam'),
    ),
    "behind the first": (
        *("mistral", '[TOOL_CALLS] [{"name": "find", "arguments": {"n": 1}}, {"nam'),
        Read(', {"nam', ONE),
    ),
    "deepseek": ("deepseek", V3[: V3.index("1}")], Read(cut=((FIND, '{"n": '),))),
    "a name in the head": ("mistral_args", "[TOOL_CALLS]find[ARGS]{", Read(cut=((FIND, ""),))),
    "tags": ("qwen_xml", XML[: XML.index("1")] + "1", Read(cut=((FIND, ""),))),
    "tags, text": (
        *("qwen_xml", "<function=find>\n<parameter=n>\n1\n</parameter><parameter=zip>\n01\n</par"),
        Read(cut=((FIND, '{"n":1,"zip":"01'),)),
    ),
    "tags, last": ("qwen_xml", XML[:-14], Read(cut=((FIND, '{"n":1'),))),
    "python": ("pythonic", "[find(n=1, zip='01", Read(cut=((FIND, '{"n": 1'),))),
    "not a number": (
        *("hermes", HEAD + '{"n": NaN}}</tool_call>' + CALL),
        Read("NaN}}</tool_call>", ONE, "", ((FIND, '{"n": '),)),
    ),
    "a number that is too large": (
        *("hermes", HEAD + '{"n": 1e999}}</tool_call>'),
        Read("1e999}}</tool_call>", (), "", ((FIND, '{"n": '),)),
    ),
    "half a surrogate": (
        *("hermes", HEAD + '{"zip": "a\\ud83d"}}</tool_call>'),
        Read('\\ud83d"}}</tool_call>', (), "", ((FIND, '{"zip": "a'),)),
    ),
    "the wrong bracket": (
        *("hermes", HEAD + '{"n": [1}}</tool_call>'),
        Read("}}</tool_call>", (), "", ((FIND, '{"n": [1'),)),
    ),
    "a string without its end": (
        *("hermes", HEAD + '{"zip": "01}}</tool_call>' + CALL),
        Read("", ONE, "", ((FIND, '{"zip": "01}}'),)),
    ),
    "deep": (
        *("hermes", HEAD + f'{{"n": {"[" * 9000}{"]" * 9000}}}}}'),
        Read(f"{'[' * 8901}{']' * 9000}}}}}", (), "", ((FIND, '{"n": ' + "[" * 99),)),
    ),
    "harmony": (
        *("harmony", '<|channel|>commentary to=functions.find json<|message|>{"n": 1'),
        Read(cut=((FIND, '{"n": 1'),)),
    ),
    "phi": (
        *("phi4_mini", '<|tool_call|>[{"name": "find", "arguments": {"n": 1'),
        Read(cut=((FIND, '{"n": 1'),)),
    ),
    "phi, the end of its list": (
        *("phi4_mini", '<|tool_call|>[{"name": "find", "arguments": {"n": 1}'),
        Read("", ONE),
    ),
    "gemma, before the arguments": ("gemma", "<|tool_call>call:find{", Read(cut=((FIND, ""),))),
    "gemma, in a name": ("gemma", "<|tool_call>call:find{n:1,zi", Read(cut=((FIND, '{"n":1,'),))),
    "gemma, in a number": ("function_gemma", f"{GEMMA_HEAD}{{n:1", Read(cut=((FIND, '{"n":1'),))),
    "gemma, in a string": (
        *("function_gemma", f'{GEMMA_HEAD}{{zip:<escape>a "b"\n\\<esc'),
        Read(cut=((FIND, '{"zip":"a \\"b\\"\\n\\\\'),)),
    ),
    "gemma, no quotes": (
        *("gemma", "<|tool_call>call:find{q:Rome}<tool_call|>"),
        Read("Rome}<tool_call|>", (), "", ((FIND, '{"q":'),)),
    ),
    "gemma, a string without its end": (
        *(
            "gemma",
            '<|tool_call>call:find{q:<|"|>a}<tool_call|><|tool_call>call:find{n:1}<tool_call|>',
        ),
        Read("", ONE, "", ((FIND, '{"q":"a}'),)),
    ),
    "gemma, a string that ends in the next call": (
        *("gemma", '<|tool_call>call:find{q:<|"|>a}<tool_call|> <|tool_call>call:g{a:<|"|>b<|"|>}'),
        Read("", (("g", {"a": "b"}),), "", ((FIND, '{"q":"a}'),)),
    ),
    "no last bracket": ("hermes", HEAD + '{"n": 1}</tool_call>', Read("", ONE)),
    "python, behind a call": (
        *("pythonic", "[find(n=1) for x in y]"),
        Read("for x in y]", ONE),
    ),
    "python, in a list": ("pythonic", "[find(n=1), 1]", Read(", 1]", ONE)),
    "python, twice": (
        *("pythonic", "[find(n=1, n=2)]"),
        Read("n=2)]", (), "", ((FIND, '{"n": 1'),)),
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_a_call_that_is_certain_stays_one(name: str) -> None:
    tool_format, text, expected = CUT[name]
    assert read(tool_format, None, [text]) == expected
    if len(text) > 1000:
        return
    assert read(tool_format, None, text) == expected
    for cut in range(1, len(text)):
        assert read(tool_format, None, [text[:cut], text[cut:]]) == expected, cut


LONG = "zip code " * 20
LEAVING = {  # the beginning of a call, and what has left of its arguments
    "hermes": (HEAD + '{"zip": "' + LONG, '{"zip": "' + LONG),
    "llama3_json": ('{"name": "find", "parameters": {"zip": "' + LONG, '{"zip": "' + LONG),
    "mistral": ('[TOOL_CALLS][{"name": "find", "arguments": {"zip": "' + LONG, '{"zip": "' + LONG),
    "mistral_args": ('[TOOL_CALLS]find[ARGS]{"zip": "' + LONG, '{"zip": "' + LONG),
    "deepseek": (V3[: V3.index("1}")] + '1, "zip": "' + LONG, '{"n": 1, "zip": "' + LONG),
    "deepseek_v31": (V31[: V31.index("1}")] + '1, "zip": "' + LONG, '{"n": 1, "zip": "' + LONG),
    "qwen_xml": ("<function=find>\n<parameter=zip>\n" + LONG, '{"zip":"' + LONG),
    "pythonic": (f"[find(zip='{LONG}', n=", f'{{"zip": "{LONG}"'),
    "harmony": (
        '<|channel|>commentary to=functions.find json<|message|>{"zip": "' + LONG,
        '{"zip": "' + LONG,
    ),
    "phi4_functools": (
        'functools[{"name": "find", "arguments": {"zip": "' + LONG,
        '{"zip": "' + LONG,
    ),
    "phi4_mini": (
        '<|tool_call|>[{"name": "find", "arguments": {"zip": "' + LONG,
        '{"zip": "' + LONG,
    ),
    "gemma": ('<|tool_call>call:find{n:1,zip:<|"|>' + LONG, '{"n":1,"zip":"' + LONG),
    "function_gemma": ("<start_function_call>call:find{zip:<escape>" + LONG, '{"zip":"' + LONG),
}


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_arguments_leave_while_the_model_writes_them(tool_format: str) -> None:
    text, expected = LEAVING[tool_format]
    parser = make_parser(AnswerFormats(tool_format, None), TOOLS)
    pieces = [piece for character in text for piece in parser.push(character)]
    assert "".join(piece.text for piece in pieces) == expected
    assert [piece.name for piece in pieces if piece.name] == [FIND]
    most_at_once = max(len(piece.text) for piece in pieces)
    assert most_at_once < 12 or tool_format == "pythonic"


def test_an_optional_text_leaves_once_it_cannot_be_null() -> None:
    schema = {"properties": {"v": {"type": ["string", "null"]}}}
    tool = {"type": "function", "function": {"name": FIND, "parameters": schema}}
    parser = Parser("qwen_xml", None, [tool])
    assert parser.push("<function=find>\n<parameter=v>\nnul") == []
    assert parser.push("ls") == [Piece("call", '{"v":"nulls', FIND)]


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": None}}},
        {"properties": {"a": {"anyOf": None}}},
        {"properties": {"a": {"enum": None}}},
        {"properties": {"a": {"$ref": 5}}},
        {"properties": ["a"]},
        {"properties": {"a": {"allOf": [{"anyOf": [{}] * 40}] * 2}}},
    ],
)
def test_a_wrong_schema_makes_a_value_text(schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": schema}}
    parser = Parser("qwen_xml", None, [tool])
    text = "<tool_call>\n<function=find>\n<parameter=a>\n5\n</parameter>\n</function>"
    pieces = [piece for character in text for piece in parser.push(character)]
    assert "".join(piece.text for piece in pieces) == '{"a":"5"}'
    assert pieces[-1].completes_call


def test_a_schema_is_read_once_for_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    find = tagged_value.alternatives_of

    def counted(schema: Any, whole: Any) -> list[Any]:
        asked.append(schema)
        return find(schema, whole)

    monkeypatch.setattr(tagged_value, "alternatives_of", counted)
    parser = Parser("qwen_xml", None, TOOLS)
    parser.push("<tool_call>\n<function=find>\n<parameter=where>\n[")
    for _ in range(100):
        parser.push("1, ")
    assert len(asked) < 5

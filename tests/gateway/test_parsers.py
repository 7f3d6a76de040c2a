"""Tool calls and reasoning in a model's text: what the parser makes of it, however it is cut."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney_gateway import tagged_value
from jitney_gateway.formats import REASONING_FORMATS, TOOL_FORMATS, AnswerFormats, detect
from jitney_gateway.harmony import make_parser
from jitney_gateway.parsers import Parser
from jitney_gateway.pieces import Piece

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "properties": {
                    "n": {"type": "integer"},
                    "ratio": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "deep": {"type": "boolean"},
                    "where": {"type": ["object", "array"]},
                    "zip": {"type": "string"},
                    "unit": {"enum": ["1", 2]},
                    "any": True,
                }
            },
        },
    }
]


class Read(NamedTuple):
    """The deltas of an answer, joined."""

    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str = ""
    cut: tuple[tuple[str, str], ...] = ()
    """Calls that were cut, with their arguments to the letter."""


DEFINITIONS = {
    "Code": {"enum": ["5", "6"]},
    "Place": {"type": "object"},
    "Circle": {"allOf": [{"$ref": "#/$defs/Circle"}]},
}


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


def read(tool_format: str | None, reasoning_format: str | None, pieces: Iterable[str]) -> Read:
    parser = make_parser(AnswerFormats(tool_format, reasoning_format), TOOLS)
    made = [each for piece in pieces for each in parser.push(piece)] + parser.finish()
    calls: list[Piece] = []
    for number, each in enumerate(made):
        if each.kind != "call":
            continue
        if each.name is None:
            # Nothing comes between the pieces of a call.
            assert made[number - 1].kind == "call"
            begun = calls.pop()
            assert not begun.completes_call
            text = begun.text + each.text
            each = begun._replace(text=text, completes_call=each.completes_call)
        calls.append(each)
    return Read(
        "".join(each.text for each in made if each.kind == "text"),
        tuple((str(each.name), json.loads(each.text)) for each in calls if each.completes_call),
        "".join(each.text for each in made if each.kind == "reasoning"),
        tuple((str(each.name), each.text) for each in calls if not each.completes_call),
    )


FIND = "find"
NESTED = {"q": 'say "hi" {[(\\ </tool_call> 😀 é', "where": {"deep": [{}, [1.5, None, True], "]}"]}}
NESTED_JSON = json.dumps(NESTED, ensure_ascii=False)
CALL = '<tool_call>\n{"name": "find", "arguments": {"n": 1}}\n</tool_call>'
XML = "<tool_call>\n<function=find>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
V3 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{"n": 1}\n```'
    f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{NESTED_JSON}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
    f"<｜tool▁call▁begin｜>g<｜tool▁sep｜>{NESTED_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
ONE, BOTH = ((FIND, {"n": 1}),), ((FIND, {"n": 1}), ("g", NESTED))

READ = {  # tool format, reasoning format, text, what it says
    "plain": (None, None, f"<think> {CALL}", Read(f"<think> {CALL}")),
    "hermes": ("hermes", None, f"Let me see.\n\n{CALL}\n", Read("Let me see.", ONE)),
    "hermes, two": (
        *("hermes", None),
        f'a{CALL}\n<tool_call>{{"arguments": {NESTED_JSON}, "name": "g"}}</tool_call> b',
        Read("a b", BOTH),
    ),
    "hermes, no last tag": ("hermes", None, CALL[:-12], Read("", ONE)),
    "hermes, after a broken one": (
        *("hermes", None),
        f'<tool_call>{{"name": "f", "arguments": {{"n: 1}}}}</tool_call>{CALL}',
        Read('<tool_call>{"name": "f", "arguments": {"n: 1}}</tool_call>', ONE),
    ),
    "hermes, arguments as a string": (
        *("hermes", None),
        '<tool_call>{"name": "find", "arguments": "{\\"n\\": 1}"}</tool_call>',
        Read("", ONE),
    ),
    "hermes, a tag that is text": (
        *("hermes", None, f"The tag <tool_call> opens.{CALL}"),
        Read("The tag <tool_call> opens.", ONE),
    ),
    "llama": ("llama3_json", None, '\n{"name": "find", "parameters": {"n": 1}}', Read("", ONE)),
    "llama, two": (
        *("llama3_json", None),
        'So:<|python_tag|>{"name": "find", "parameters": {"n": 1}}; '
        '{"type": "function", "name": "find", "parameters": {"n": 1}}',
        Read("So:", ONE * 2),
    ),
    "llama, text": (
        *("llama3_json", None, ' {"n": 1} and {"name": "find", "parameters": {}}'),
        Read(' {"n": 1} and {"name": "find", "parameters": {}}'),
    ),
    "mistral": (
        "mistral",
        None,
        'Hm.[TOOL_CALLS] [{"name": "find", "arguments": {"n": 1}}, '
        f'{{"name": "g", "arguments": {NESTED_JSON}, "id": "x"}}]',
        Read("Hm.", BOTH),
    ),
    "mistral, newer": (
        *("mistral_args", "mistral"),
        '[THINK]no [TOOL_CALLS] yet[/THINK][TOOL_CALLS]find[ARGS]{"n": 1}'
        f"[TOOL_CALLS]g[CALL_ID]a1[ARGS]{NESTED_JSON}",
        Read("", BOTH, "no [TOOL_CALLS] yet"),
    ),
    "deepseek V3": (
        "deepseek",
        "think_opened",
        f"\nhm\n</think>\n\nSo{V3}",
        Read("So", BOTH, "hm"),
    ),
    "deepseek V3.1": ("deepseek_v31", "think", f"So {V31} x", Read("So x", BOTH, "")),
    "xml": ("qwen_xml", None, f"See:\n{XML}\n{XML} so", Read("See: so", ONE + ONE)),
    "xml, typed": (
        *("qwen_xml", None),
        "<function=find>"
        + "".join(
            f"<parameter={key}>\n{value}\n</parameter>\n"
            for key, value in [
                *(("n", "x"), ("ratio", "null"), ("deep", "True"), ("where", '{"a": [1]}')),
                *(("zip", "01 \n"), ("unit", "1"), ("any", "2"), ("other", "</function> é")),
            ]
        )
        + "</function>",
        Read(
            "",
            (
                (
                    FIND,
                    {
                        "n": "x",
                        "ratio": None,
                        "deep": True,
                        "where": {"a": [1]},
                        "zip": "01 \n",
                        "unit": "1",
                        "any": "2",
                        "other": "</function> é",
                    },
                ),
            ),
        ),
    ),
    "python": (
        *("pythonic", None),
        """[find(n=1), g(q='say "hi" {[(\\\\ </tool_call> 😀 é', """
        """where={"deep": [{}, [1.5, None, true], ']}']})]""",
        Read("", BOTH),
    ),
    "python, marked": (
        *("pythonic", None, "So <|python_start|>[a.find(n=-1)]<|python_end|> [find(n=1)]"),
        Read("So", (("a.find", {"n": -1}), (FIND, {"n": 1}))),
    ),
    "phi": (
        *("phi4_mini", None),
        'So <|tool_call|>[{"name": "find", "arguments": {"n": 1}}, '
        f'{{"name": "g", "arguments": {NESTED_JSON}}}]<|/tool_call|>',
        Read("So", BOTH),
    ),
    "gemma": (
        *("gemma", "gemma"),
        "<|channel>thought\nhm<channel|>So <|tool_call>call:find{n:1}<tool_call|><|tool_call>call:g"
        '{q:<|"|>say "hi" {[(\\ </tool_call> 😀 é<|"|>,'
        'where:{deep:[{},[1.5,null,true],<|"|>]}<|"|>]}}<tool_call|>',
        Read("So", BOTH, "hm"),
    ),
    "gemma, functions": (
        *("function_gemma", None),
        "<start_function_call>call:find{n:1}<end_function_call><start_function_response>",
        Read("", ONE),
    ),
    "phi, as text": (
        *("phi4_functools", None),
        'The functools are: functools[{"name": "find", "arguments": {"n": 1}}]',
        Read("The functools are:", ONE),
    ),
    "harmony": (
        *("harmony", "harmony"),
        "<|channel|>analysis<|message|>hm <b><|end|><|start|>assistant<|channel|>final<|message|>"
        "So <|x|> \n<|return|>",
        Read("So <|x|> \n", (), "hm <b>"),
    ),
    "harmony, a call": (
        *("harmony", "harmony"),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        "<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"n": 1}<|call|>'
        f"<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{NESTED_JSON}",
        Read("I look.", BOTH, "a\nb"),
    ),
    "harmony, two texts": (
        *("harmony", None),
        "<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done.",
        Read("I look.\nDone."),
    ),
    "harmony, no tools": (
        *(None, "harmony"),
        '<|channel|>commentary to=functions.find json<|message|>{"n": 1}<|call|>',
        Read('{"n": 1}'),
    ),
    "harmony, a tool of its own": (
        *("harmony", "harmony"),
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        Read("", (), "print(1)"),
    ),
    "harmony, text alone": ("harmony", "harmony", "to be or not", Read("to be or not")),
    "harmony, a role that it has not": (
        *("harmony", "harmony"),
        "<|channel|>final<|message|>a<|end|><|start|>user<|message|>b",
        Read("a\nuser<|message|>b"),
    ),
    "think": (
        "hermes",
        "think",
        f"\n<think>\na {CALL}\n</think>\n\nb{CALL}",
        Read("b", ONE, f"a {CALL}"),
    ),
    "think, later": (None, "think", "Use <think> and </think>.", Read("Use <think> and </think>.")),
    "think, opened twice": (
        None,
        "think_opened",
        "<think>\na</thinks></think>b",
        Read("b", (), "a</thinks>"),
    ),
    "think, unfinished": (None, "cohere_opened", "a<|END_THIN", Read("", (), "a<|END_THIN")),
}
HEAD = '<tool_call>{"name": "find", "arguments": '
GEMMA_HEAD = "<start_function_call>call:find"
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
LOST = [  # what is no call, or none yet
    ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call> so'),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": {...}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {"n": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {"n": 1'),
    ("hermes", f"<tool_call>{{{'[' * 9000}"),
    ("hermes", "a < b <tool_call"),
    ("harmony", '<|channel|>commentary to=functions.unknown json<|message|>{"n": 1'),
    ("harmony", "<|channel|>commentary to=functions.find json<|message|>[1]"),
    ("harmony", "<|channel|>commentary to=functions.find <|message|>no"),
    ("harmony", "a < b <|en"),
    ("gemma", '<|tool_call>call:unknown{q:<|"|>a}<tool_call|>'),
    ("gemma", "<|tool_call>call:unknown{q:Rome}<tool_call|>"),
    ("gemma", "<|tool_call>call:find{=1}<tool_call|>"),
    ("function_gemma", "<start_function_call>call:unknown{n:1"),
    ("phi4_mini", '<|tool_call|>[{"name": "unknown", "arguments": {"n": 1}'),
    ("phi4_mini", '<|tool_call|>[{"name": "find", "arguments": [1]}]'),
    ("hermes", "Space stays  \n "),
    ("llama3_json", '{"name": "Ann", "age": 3'),
    ("llama3_json", '<|python_tag|>search.call(query="x")'),
    ("mistral", "[TOOL_CALLS]find[ARGS][1]"),
    ("qwen_xml", XML[:-14].replace("find", "f")),
    ("qwen_xml", "<function=f>\n<parameter=n>\n1\n</parameter> text </function>"),
    ("qwen_xml", "Write <function=find> first."),
    ("pythonic", "[g(n=1), find("),
    ("pythonic", "[find(1)]"),
    ("pythonic", "[find(n=x)]"),
    ("pythonic", "[find(**{})]"),
    ("pythonic", "[find(n={**{}})]"),
    ("pythonic", "[find(n=1e999)]"),
    ("pythonic", "[find(n={1, 2})]"),
    ("pythonic", "[find(n=b'')]"),
    ("pythonic", "[g(n=1) for x in y]"),
    ("pythonic", "[find(n='\\ud800')]"),
    ("pythonic", "[g(n=1) g]"),
    ("pythonic", "[g(n=1), 1]"),
    ("pythonic", f"[find(n={'-' * 9000}1)]"),
    ("pythonic", f"[find(n={'[' * 300}1{']' * 300})]"),
]


@pytest.mark.parametrize("name", READ)
def test_an_answer_reads_the_same_however_it_is_cut(name: str) -> None:
    tool_format, reasoning_format, text, expected = READ[name]
    assert read(tool_format, reasoning_format, [text]) == expected
    assert read(tool_format, reasoning_format, text) == expected
    for cut in range(1, len(text)):
        assert read(tool_format, reasoning_format, [text[:cut], text[cut:]]) == expected, cut


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


@pytest.mark.parametrize(("tool_format", "text"), LOST)
def test_what_is_no_call_is_content_to_the_letter(tool_format: str, text: str) -> None:
    for pieces in ([text], text, [text[: len(text) // 2], text[len(text) // 2 :]]):
        assert read(tool_format, "think", pieces) == Read(text)


@pytest.mark.parametrize("name", READ)
def test_every_beginning_of_an_answer_reads_the_same_however_it_is_cut(name: str) -> None:
    """Cut off anywhere: nothing raises, and calls that were complete stay."""
    tool_format, reasoning_format, text, expected = READ[name]
    for end in range(0, len(text), 3):
        found = read(tool_format, reasoning_format, text[:end])
        assert found == read(tool_format, reasoning_format, [text[:end]]), end
        assert found.calls == expected.calls[: len(found.calls)]
        assert len(found.cut) <= 1


FRAGMENTS = sorted(
    {"<", "{", "[", "]", "}", '"', "\\", "\n", " ", "find", "a", ",", ":", "(", "=", "1", "'", ";"}
    | {
        '{"name": "find", "arguments": {"n": 1}}',
        '{"name": "find", "arguments": {',
        '{"n": 1}',
        "n=",
        "find(n=1)",
        "[find(n=1)]",
        "find[ARGS]",
    }
    | {"[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>"}
    | {"<|tool_call>call:find", "{n:", '<|"|>', "<tool_call|>"}
    | {"<|start|>", "<|channel|>", "final", "to=functions.find", "<|message|>", "<|end|>"}
    | {
        "<function=find>",
        "</function>",
        "<parameter=n>",
        "</parameter>",
        *V3[:70].partition("function"),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.sampled_from(["none", "think", "think_opened"]),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=25),
)
def test_any_text_reads_the_same_however_it_is_cut(
    tool_format: str, reasoning_format: str, pieces: list[str]
) -> None:
    whole = read(tool_format, reasoning_format, ["".join(pieces)])
    assert read(tool_format, reasoning_format, pieces) == whole
    assert read(tool_format, reasoning_format, "".join(pieces)) == whole


def test_only_what_may_be_a_marker_is_held_back() -> None:
    parser = Parser("hermes", "think_opened")
    sent = []
    for text in ("a", " <", "b>", "</think", "> ", "c", "<", "tool_call> ", "x", '<tool_call>{"n'):
        deltas = parser.push(text)
        sent.append("".join(each.text for each in deltas))
    assert sent == ["a", "", " <b>", "", "", "c", "", "", "<tool_call> x", ""]
    assert [each.text for each in parser.finish()] == ['<tool_call>{"n']


TURN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
HYBRID = (
    "{% if add_generation_prompt %}{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)
TEMPLATES = {  # as checkpoints of these families write it, shortened
    "qwen 2.5": (
        r"""{{ "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}" }}""",
        *("hermes", None),
    ),
    "qwen 3": (
        """{{ '<tool_call>{"name": "' + n + '", "arguments": ' }}{{ c.split('</think>')[-1] }}""",
        *("hermes", "think"),
    ),
    "qwen 3 coder": (
        r"{{ '<tool_call>\n<function=f>\n<parameter=p>\nvalue_1\n</parameter>' }}",
        *("qwen_xml", None),
    ),
    "qwen 3.5": (
        "{{ '<tool_call><function=f><parameter=p>' }}" + HYBRID,
        "qwen_xml",
        "think_opened",
    ),
    "glm": ("<tool_call>{function-name}\n<arg_key>{{ '<think></think>' }}", None, "think"),
    "llama 3.1": (
        """{{ 'Respond in the format {"name": function name, "parameters": dictionary of' }}""",
        *("llama3_json", None),
    ),
    "llama 4": ("Use [func_name1(param1=value1), func_name2(...)]", "pythonic", None),
    "mistral": ("{{ '[TOOL_CALLS] [' }}", "mistral", None),
    "magistral": ("{{ '[TOOL_CALLS]' + n + '[ARGS]' }}{{ '[/THINK]' }}", "mistral_args", "mistral"),
    "deepseek v3": (
        r"{{ '<｜tool▁call▁begin｜>' + t + '<｜tool▁sep｜>' + n + '\n```json\n' }}",
        *("deepseek", None),
    ),
    "deepseek v3.1": (
        "{% if t %}{{ '<｜tool▁call▁begin｜>' + n }}{% endif %}" + HYBRID,
        "deepseek_v31",
        "think_opened",
    ),
    "gpt-oss": (
        """{{ "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking + "<|end|>" }}"""
        """{{ "<|start|>assistant to=functions." + n + "<|channel|>commentary json<|message|>" }}"""
        """{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
        *("harmony", "harmony"),
    ),
    "gemma 4": ("{{ '<|tool_call>call:' + n + '{' }}{{ '<channel|>' }}", "gemma", "gemma"),
    "function gemma": ("{{ '<start_function_call>call:' + n }}", "function_gemma", None),
    "phi 4 mini": ("{{ '<|tool|>' + m.tools + '<|/tool|>' + '<|end|>' }}", "phi4_mini", None),
    "wants more": ("{{ raise_exception('no system message') }}</think>", None, "think"),
    "plain": (PROMPT, None, None),
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_chat_template_tells_the_formats(family: str) -> None:
    template, tool_format, reasoning_format = TEMPLATES[family]
    assert detect(TURN + template) == (tool_format, reasoning_format)


def test_whether_the_prompt_opens_the_reasoning_hangs_on_the_request() -> None:
    assert detect(TURN + HYBRID, {"enable_thinking": True}) == (None, "think_opened")
    assert detect(TURN + HYBRID, {"enable_thinking": False}) == (None, "think")


def test_every_reasoning_format_is_read() -> None:
    for name, reasoning in REASONING_FORMATS.items():
        if reasoning is None:
            assert read(None, name, "ab") == Read("ab")
            continue
        begin = "" if reasoning.is_open else reasoning.begin
        text = f"{begin}a{reasoning.end}{reasoning.before_answer}b"
        assert read(None, name, text) == Read("b", (), "a"), name


def test_the_page_names_every_format() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "openai.md").read_text(encoding="utf-8")
    for name in (*TOOL_FORMATS, *REASONING_FORMATS):
        assert f"`{name}`" in page, name


@pytest.mark.parametrize("reasoning", ["think", None])
@pytest.mark.parametrize(
    ("tool_format", "beginning"),
    [
        ("hermes", '<tool_call>\n{"name": "find", "arguments": {"a":'),
        ("gemma", "<|tool_call>call:find{a:"),
        ("hermes", ""),
        ("hermes", "<tool_call>"),
        ("llama3_json", "{"),
        ("qwen_xml", "<tool_call>\n<function=find>"),
    ],
)
def test_space_without_end_is_not_read_again_and_again(
    tool_format: str, beginning: str, reasoning: str | None
) -> None:
    parser = Parser(tool_format, reasoning, TOOLS)
    parser.push(beginning)
    begin = time.process_time()
    for _ in range(2000):
        parser.push("\n\n\n\n")
    assert time.process_time() - begin < 0.5  # it was 2 to 10 s


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ann", "age": 30}',
        '{"name": "find", "age": 30}',
        '{"name": "Ann", "parameters": {}}',
        '{"type": "object", "name": "find"}',
    ],
)
def test_an_answer_in_json_is_no_call_without_a_marker(text: str) -> None:
    assert read("llama3_json", None, [text]) == Read(text)
    assert read("llama3_json", None, text) == Read(text)


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

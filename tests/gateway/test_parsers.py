"""Content, reasoning and calls in a model's text: what a parser reads, however the text is cut."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jitney_gateway.formats import REASONING_FORMATS, TOOL_FORMATS
from jitney_gateway.parsers import Parser

from tests.gateway.read_pieces import (
    BOTH,
    CALL,
    FIND,
    NESTED_JSON,
    ONE,
    TOOLS,
    V3,
    V31,
    XML,
    Read,
    read,
)

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


def test_every_reasoning_format_is_read() -> None:
    for name, reasoning in REASONING_FORMATS.items():
        if reasoning is None:
            assert read(None, name, "ab") == Read("ab")
            continue
        begin = "" if reasoning.is_open else reasoning.begin
        text = f"{begin}a{reasoning.end}{reasoning.before_answer}b"
        assert read(None, name, text) == Read("b", (), "a"), name


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

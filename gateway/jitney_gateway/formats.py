"""The formats in which language models write tool calls and reasoning.

The parser (``parsers.py``) and the grammar of a forced call (``tool_grammar.py``) read the same row
of a format. The text of an answer must keep its special tokens: in some tokenizers the markers are
special tokens.
"""

from collections.abc import Mapping
from typing import NamedTuple


class CallSyntax(NamedTuple):
    """How a grammar writes the calls of an answer. ``NAME`` stands for the function's name."""

    before_all: str
    before_call: str
    """Up to the call's arguments."""
    after_call: str
    """From the end of the call's arguments."""
    between_calls: str | None
    """None: a call ends the answer."""
    after_all: str


class Preamble(NamedTuple):
    """What stands around a text that comes before a call, in a format in which each of the two is a
    message of its own."""

    begin: str
    end: str


class ToolFormat(NamedTuple):
    """How the calls in an answer look. A call is a head, a body and closing markers.

    A head is a regular expression that ends with a lookahead at the beginning of the body, which is
    no part of the match. It is matched partially while text comes: text is held back as long as it
    may be the beginning of a head.
    """

    body: str
    """``json`` (an object, or a list of them), ``python`` (a list of calls), ``xml`` (tags) or
    ``gemma`` (an object with bare names)."""
    head: str
    """Its group ``name`` is the function's name, in a format whose body does not have it."""
    bare_head: str | None
    """A head without a marker. It counts only where text begins: at the beginning of an answer,
    after reasoning, and after a call. None: each call has a marker."""
    closing: tuple[str, ...]
    """Markers that may follow a body. They are dropped."""
    syntax: CallSyntax
    markers: tuple[str, ...]
    """Markers in ``syntax`` or in ``head`` that are single tokens of many models."""
    hints: tuple[str, ...]
    """A model has this format if all of them stand in its chat template."""
    quote: str = '"'
    """What stands before and after a string, in a ``gemma`` body."""
    preamble: Preamble | None = None
    """None: text and calls stand beside each other."""


class Reasoning(NamedTuple):
    """How a model reasons: between two markers."""

    begin: str
    end: str
    is_open: bool = False
    """Whether the prompt ends with the begin marker: then the answer begins with reasoning."""
    before_answer: str = ""
    """What stands before an answer that is text, whether or not the model has reasoned."""
    markers: tuple[str, ...] = ()
    """The markers that are single tokens of many models. Empty: ``begin`` and ``end``."""


class AnswerFormats(NamedTuple):
    """How a model writes an answer."""

    tool: str | None
    """A key of TOOL_FORMATS. None: it calls no tools."""
    reasoning: str | None
    """A key of REASONING_FORMATS. None and the key ``none``: it does not reason."""


_NAME = r"(?P<name>[\w.:/-]{1,128})"
_SPACE = r"\s{0,64}+"
"""It has a bound, because a head is matched anew with each piece of text, and a model may write
space without end. The ``+`` at its end makes it possessive: it never tries a shorter match."""
_PYTHON_CALLS_FOLLOW = rf"(?=\[{_SPACE}[A-Za-z_][\w.]{{0,127}}{_SPACE}\()"
_JSON_CALL = '{"name": "NAME", "arguments": '

_DEEPSEEK_CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALLS_END = "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"

_DEEPSEEK = ToolFormat(
    body="json",
    head=(
        rf"(?:{_DEEPSEEK_CALLS_BEGIN}{_SPACE})?{_DEEPSEEK_CALL_BEGIN}{_SPACE}(?:"
        # V3: function<｜tool▁sep｜>find ```json {"n": 1}
        rf"function{_DEEPSEEK_SEPARATOR}{_NAME}{_SPACE}```json"
        # V3.1: find<｜tool▁sep｜>{"n": 1}
        rf"|{_NAME}{_DEEPSEEK_SEPARATOR}"
        rf"){_SPACE}(?=\{{)"
    ),
    bare_head=None,
    closing=("```", _DEEPSEEK_CALL_END, _DEEPSEEK_CALLS_END),
    syntax=CallSyntax(
        before_all=_DEEPSEEK_CALLS_BEGIN,
        before_call=f"{_DEEPSEEK_CALL_BEGIN}function{_DEEPSEEK_SEPARATOR}NAME\n```json\n",
        after_call=f"\n```{_DEEPSEEK_CALL_END}",
        between_calls="\n",
        after_all=_DEEPSEEK_CALLS_END,
    ),
    markers=(
        _DEEPSEEK_CALLS_BEGIN,
        _DEEPSEEK_CALLS_END,
        _DEEPSEEK_CALL_BEGIN,
        _DEEPSEEK_CALL_END,
        _DEEPSEEK_SEPARATOR,
    ),
    hints=(_DEEPSEEK_CALL_BEGIN, "```json"),
)
_DEEPSEEK_V31 = _DEEPSEEK._replace(
    syntax=CallSyntax(
        before_all=_DEEPSEEK_CALLS_BEGIN,
        before_call=f"{_DEEPSEEK_CALL_BEGIN}NAME{_DEEPSEEK_SEPARATOR}",
        after_call=_DEEPSEEK_CALL_END,
        between_calls="",
        after_all=_DEEPSEEK_CALLS_END,
    ),
    hints=(_DEEPSEEK_CALL_BEGIN,),
)
_MISTRAL = ToolFormat(
    body="json",
    head=(
        rf"\[TOOL_CALLS\]{_SPACE}(?:"
        # [TOOL_CALLS] [{"name": "find", "arguments": {"n": 1}}]
        rf"(?=\[{_SPACE}\{{)"
        # [TOOL_CALLS]find[CALL_ID]a1[ARGS]{"n": 1}, also without [CALL_ID]a1 or [ARGS]
        rf"|{_NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?{_SPACE}(?=\{{)"
        r")"
    ),
    bare_head=None,
    closing=(),
    syntax=CallSyntax(
        before_all="[TOOL_CALLS][",
        before_call=_JSON_CALL,
        after_call="}",
        between_calls=", ",
        after_all="]",
    ),
    markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    hints=("[TOOL_CALLS]",),
)
_MISTRAL_ARGS = _MISTRAL._replace(
    syntax=CallSyntax(
        before_all="",
        before_call="[TOOL_CALLS]NAME[ARGS]",
        after_call="",
        between_calls="",
        after_all="",
    ),
    hints=("[TOOL_CALLS]", "[ARGS]"),
)
_QWEN_XML = ToolFormat(
    body="xml",
    head=rf"(?:<tool_call>{_SPACE})?<function={_NAME}>{_SPACE}(?=<parameter=|</function>)",
    bare_head=None,
    closing=("</tool_call>",),
    syntax=CallSyntax(
        before_all="",
        before_call="<tool_call>\n<function=NAME>\n",
        after_call="</function>\n</tool_call>",
        between_calls="\n",
        after_all="",
    ),
    markers=("<tool_call>", "</function>", "</tool_call>"),
    hints=("<tool_call>", "<function=", "<parameter="),
)
_HERMES = ToolFormat(
    body="json",
    head=rf"<tool_call>{_SPACE}(?=\{{)",
    bare_head=None,
    closing=("</tool_call>",),
    syntax=CallSyntax(
        before_all="",
        before_call=f"<tool_call>\n{_JSON_CALL}",
        after_call="}\n</tool_call>",
        between_calls="\n",
        after_all="",
    ),
    markers=("<tool_call>", "</tool_call>"),
    hints=("<tool_call>", '"name":'),
)
_PYTHONIC = ToolFormat(
    body="python",
    head=rf"<\|python_(?:start|tag)\|>{_SPACE}{_PYTHON_CALLS_FOLLOW}",
    bare_head=_PYTHON_CALLS_FOLLOW,
    closing=("<|python_end|>",),
    syntax=CallSyntax(
        before_all="[",
        before_call="NAME(",
        after_call=")",
        between_calls=", ",
        after_all="]",
    ),
    markers=("<|python_start|>", "<|python_end|>", "<|python_tag|>"),
    hints=("[func_name1(",),
)
_LLAMA3_JSON = ToolFormat(
    body="json",
    head=rf"<\|python_tag\|>{_SPACE}(?=\{{)",
    bare_head=rf'(?=\{{{_SPACE}"(?:name|type|parameters)")',
    closing=(";",),
    syntax=CallSyntax(
        before_all="",
        before_call='{"name": "NAME", "parameters": ',
        after_call="}",
        between_calls="; ",
        after_all="",
    ),
    markers=("<|python_tag|>",),
    hints=('{"name": function name, "parameters":',),
)
_PHI4_MINI = ToolFormat(
    body="json",
    head=rf"(?:functools|<\|tool_call\|>){_SPACE}(?=\[{_SPACE}\{{)",
    bare_head=None,
    closing=("<|/tool_call|>",),
    syntax=CallSyntax(
        before_all="<|tool_call|>[",
        before_call=_JSON_CALL,
        after_call="}",
        between_calls=", ",
        after_all="]<|/tool_call|>",
    ),
    markers=("<|tool_call|>", "<|/tool_call|>"),
    hints=("<|tool|>", "<|/tool|>"),
)
# The templates of other servers ask the same model for another marker, which is text.
_PHI4_FUNCTOOLS = _PHI4_MINI._replace(
    syntax=CallSyntax(
        before_all="functools[",
        before_call=_JSON_CALL,
        after_call="}",
        between_calls=", ",
        after_all="]",
    ),
    markers=(),
    hints=("functools[",),
)
_GEMMA = ToolFormat(
    body="gemma",
    head=rf"<\|tool_call>{_SPACE}call:{_NAME}{_SPACE}(?=\{{)",
    bare_head=None,
    closing=("<tool_call|>", "<|tool_response>"),
    syntax=CallSyntax(
        before_all="",
        before_call="<|tool_call>call:NAME",
        after_call="<tool_call|>",
        between_calls="",
        after_all="",
    ),
    markers=("<|tool_call>", "<tool_call|>", '<|"|>'),
    hints=("<|tool_call>", "call:"),
    quote='<|"|>',
)
_FUNCTION_GEMMA = ToolFormat(
    body="gemma",
    head=rf"<start_function_call>{_SPACE}call:{_NAME}{_SPACE}(?=\{{)",
    bare_head=None,
    closing=("<end_function_call>", "<start_function_response>"),
    syntax=CallSyntax(
        before_all="",
        before_call="<start_function_call>call:NAME",
        after_call="<end_function_call>",
        between_calls="",
        after_all="",
    ),
    markers=("<start_function_call>", "<end_function_call>", "<escape>"),
    hints=("<start_function_call>",),
    quote="<escape>",
)
# gpt-oss: an answer is a row of messages, which ``harmony.py`` parses.
_HARMONY_MARKERS = (
    "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
_HARMONY = ToolFormat(
    body="json",
    head=r"(?!)",
    bare_head=None,
    closing=(),
    syntax=CallSyntax(
        before_all="",
        before_call="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        after_call="",
        between_calls=None,
        after_all="",
    ),
    markers=_HARMONY_MARKERS,
    hints=("<|channel|>", "<|message|>", "functions."),
    preamble=Preamble(
        begin="<|channel|>commentary<|message|>",
        end="<|end|><|start|>assistant",
    ),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "harmony": _HARMONY,
    "qwen_xml": _QWEN_XML,
    "hermes": _HERMES,
    "deepseek": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK_V31,
    "mistral_args": _MISTRAL_ARGS,
    "mistral": _MISTRAL,
    "pythonic": _PYTHONIC,
    "llama3_json": _LLAMA3_JSON,
    "phi4_functools": _PHI4_FUNCTOOLS,
    "phi4_mini": _PHI4_MINI,
    "gemma": _GEMMA,
    "function_gemma": _FUNCTION_GEMMA,
}
"""By the names that the option ``tool_format`` takes. The first format whose hints all stand in a
chat template is the model's: so one with more hints comes before one with some of the same."""

MARKED_REASONING = {
    "think": Reasoning("<think>", "</think>"),
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "seed_oss": Reasoning("<seed:think>", "</seed:think>"),
    "cohere": Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma": Reasoning("<|channel>thought\n", "<channel|>", markers=("<|channel>", "<channel|>")),
}
"""The formats whose markers stand around reasoning alone. Each of them also has a form for a prompt
that ends with the begin marker (``is_open``)."""
_HARMONY_REASONING = Reasoning(
    begin="<|channel|>analysis<|message|>",
    end="<|end|><|start|>assistant",
    before_answer="<|channel|>final<|message|>",
    markers=_HARMONY_MARKERS,
)


def name_if_open(reasoning_format: str) -> str:
    """The name of a format whose reasoning is open, such as ``think_opened`` for ``think``."""
    return f"{reasoning_format}_opened"


def _reasoning_formats() -> dict[str, Reasoning | None]:
    formats: dict[str, Reasoning | None] = {"none": None, **MARKED_REASONING}
    formats["harmony"] = _HARMONY_REASONING
    for name, reasoning in MARKED_REASONING.items():
        formats[name_if_open(name)] = reasoning._replace(is_open=True)
    return formats


REASONING_FORMATS: Mapping[str, Reasoning | None] = _reasoning_formats()
"""By the names that the option ``reasoning_format`` takes. None: the model does not reason."""


def find_reasoning(reasoning_format: str | None) -> Reasoning | None:
    """The format of that name; None for a model that does not reason."""
    return None if reasoning_format is None else REASONING_FORMATS[reasoning_format]


def special_markers(formats: AnswerFormats) -> list[str]:
    """Those markers of the formats that are single tokens in many tokenizers."""
    markers: list[str] = []
    reasoning = find_reasoning(formats.reasoning)
    if reasoning is not None:
        markers += reasoning.markers or (reasoning.begin, reasoning.end)
    if formats.tool is not None:
        markers += TOOL_FORMATS[formats.tool].markers
    return sorted(set(markers))

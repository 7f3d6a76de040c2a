"""How language models write tool calls and reasoning: one row a format, read by the parser
(``parsers.py``) and by the grammar of a forced call (``tool_grammar.py``).

The text of an answer must keep its special tokens: some tokenizers have markers among them.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jitney.errors import InvalidArgumentError
from jitney.text.chat_template import ChatTemplate


class ToolFormat(NamedTuple):
    """A call is a head, a body and closing markers. Heads end in a lookahead: so they match at one
    length only, and fail at the first character that cannot be a call's."""

    body: str
    """``json`` (an object, or a list of them), ``python`` (a list of calls) or ``xml`` (tags)."""
    head: str
    """Regular expression. Its group ``name`` names the function, where the body does not."""
    bare: str
    """A head that counts only where the answer, or what follows reasoning or a call, begins."""
    closing: tuple[str, ...]
    """Markers that may follow a body. They are dropped."""
    syntax: tuple[str, str, str, str, str]
    """As a grammar writes it: before all calls; before and after the arguments of one to ``NAME``;
    between two calls; after all."""
    hints: tuple[str, ...]
    """All of them stand in the chat templates of such models."""


_NAME = r"(?P<name>[\w.:/-]{1,128})"
_PYTHON = r"(?=\[\s*[A-Za-z_][\w.]{0,127}\s*\()"
_JSON = '{"name": "NAME", "arguments": '
_CALL = "<｜tool▁call▁begin｜>"
_SEP = "<｜tool▁sep｜>"
_END = "<｜tool▁call▁end｜>"
_CALLS = "<｜tool▁calls▁begin｜>"
_ENDS = "<｜tool▁calls▁end｜>"

_DEEPSEEK = ToolFormat(
    "json",
    rf"(?:{_CALLS}\s*)?{_CALL}\s*"
    rf"(?:function{_SEP}{_NAME}\s*```json|{_NAME}{_SEP})\s*(?=\{{)",
    "",
    ("```", _END, _ENDS),
    (_CALLS, f"{_CALL}function{_SEP}NAME\n```json\n", f"\n```{_END}", "\n", _ENDS),
    (_CALL, "```json"),
)
_MISTRAL = ToolFormat(
    "json",
    rf"\[TOOL_CALLS\]\s*(?:(?=\[\s*\{{)|{_NAME}(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?\s*(?=\{{))",
    "",
    (),
    ("[TOOL_CALLS][", _JSON, "}", ", ", "]"),
    ("[TOOL_CALLS]",),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {  # hints are looked for in this order
    "qwen_xml": ToolFormat(
        "xml",
        rf"(?:<tool_call>\s*)?<function={_NAME}>\s*(?=<parameter=|</function>)",
        "",
        ("</tool_call>",),
        ("", "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>", "\n", ""),
        ("<tool_call>", "<function=", "<parameter="),
    ),
    "hermes": ToolFormat(
        "json",
        r"<tool_call>\s*(?=\{)",
        "",
        ("</tool_call>",),
        ("", f"<tool_call>\n{_JSON}", "}\n</tool_call>", "\n", ""),
        ("<tool_call>", '"name":'),
    ),
    "deepseek": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK._replace(
        syntax=(_CALLS, f"{_CALL}NAME{_SEP}", _END, "", _ENDS), hints=(_CALL,)
    ),
    "mistral_args": _MISTRAL._replace(
        syntax=("", "[TOOL_CALLS]NAME[ARGS]", "", "", ""), hints=("[TOOL_CALLS]", "[ARGS]")
    ),
    "mistral": _MISTRAL,
    "pythonic": ToolFormat(
        "python",
        rf"<\|python_(?:start|tag)\|>\s*{_PYTHON}",
        _PYTHON,
        ("<|python_end|>",),
        ("[", "NAME(", ")", ", ", "]"),
        ("[func_name1(",),
    ),
    "llama3_json": ToolFormat(
        "json",
        r"<\|python_tag\|>\s*(?=\{)",
        r'(?=\{\s*"(?:name|type|parameters)")',
        (";",),
        ("", '{"name": "NAME", "parameters": ', "}", "; ", ""),
        ('{"name": function name, "parameters":',),
    ),
}
_REASONING = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
OPENED = "_opened"
"""Ends the name of a format whose first marker ends the prompt: the answer begins inside."""
REASONING_FORMATS = ("none", *_REASONING, *(name + OPENED for name in _REASONING))


def reasoning_markers(reasoning_format: str | None) -> tuple[str, str] | None:
    """The marker before reasoning and the one after it; None without reasoning."""
    if reasoning_format is None or reasoning_format == "none":
        return None
    return _REASONING[reasoning_format.removesuffix(OPENED)]


def special_markers(tool_format: str | None, reasoning_format: str | None) -> list[str]:
    """Those of their markers that are single tokens in many tokenizers."""
    syntax = "".join(TOOL_FORMATS[tool_format].syntax) if tool_format else ""
    found = re.findall(r"</?[\w|｜▁]+>|\[[A-Z_]+\]", syntax)
    return sorted({*found, *(reasoning_markers(reasoning_format) or ())})


def detect(
    chat_template: str, parameters: Mapping[str, Any] | None = None
) -> tuple[str | None, str | None]:
    """The tool and the reasoning format of a model by its chat template; None for what it lacks.

    ``parameters``: the request's ``chat_template_kwargs``. With some of them a prompt opens the
    reasoning itself, so a chat is rendered.
    """
    plain = chat_template.replace("\\", "").replace("'", '"')
    tools = [name for name, row in TOOL_FORMATS.items() if all(hint in plain for hint in row.hints)]
    reasoning = [name for name, (_, end) in _REASONING.items() if end in plain]
    if reasoning:
        begin, end = _REASONING[reasoning[0]]
        try:
            chat = [{"role": "user", "content": "."}]
            prompt = ChatTemplate(chat_template, {}).render(chat, parameters or {})
        except InvalidArgumentError:  # this template wants more of a chat
            prompt = ""
        if prompt.rfind(begin) > prompt.rfind(end):
            reasoning[0] += OPENED
    return next(iter(tools), None), next(iter(reasoning), None)

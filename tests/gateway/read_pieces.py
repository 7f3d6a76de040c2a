"""What the tests of parsers share: calls as models write them, and how an answer reads."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from jitney_gateway.answer_parser import make_parser
from jitney_gateway.formats import AnswerFormats
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
ONE = ((FIND, {"n": 1}),)
BOTH = (*ONE, ("g", NESTED))
HEAD = '<tool_call>{"name": "find", "arguments": '
GEMMA_HEAD = "<start_function_call>call:find"


class Read(NamedTuple):
    """The deltas of an answer, joined."""

    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str = ""
    cut: tuple[tuple[str, str], ...] = ()
    """Calls that were cut, with their arguments to the letter."""


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

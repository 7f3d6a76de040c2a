"""A JSON object that was cut off: those of its values that are there. Pure."""

from typing import Any

import msgspec
import regex

from jitney_gateway.json_syntax import IN_STRING, SPACE, JsonSyntax, NotJsonError, make_tokens

# A text that was cut off may end in a number. Clients that read a stream take such a number as it
# is, so it counts here, too.
_TOKENS = make_tokens(after_number=r"(?: [ \t\r\n,\]}] | \Z )")
_SPACE = regex.compile(SPACE)
_REST_OF_STRING = regex.compile(f'{IN_STRING} "', regex.VERBOSE)


def complete_members(text: str) -> dict[str, Any]:
    """The members of an object of which ``text`` is the JSON, or the beginning of the JSON.

    A member or item whose value is not complete is left out. Of an object or list that is not
    complete, the complete part counts. Empty if ``text`` does not begin like an object.
    """
    whole = _complete_part(text)
    if not whole.startswith("{"):
        return {}
    return msgspec.json.decode(whole, type=dict[str, Any])


def _complete_part(text: str) -> str:
    """The longest beginning of a text that becomes JSON if its open brackets are closed. It is
    returned with the brackets that close them."""
    syntax = JsonSyntax()
    end = 0
    closing = ""
    index = _skip_space(text, 0)
    begin = index
    while not syntax.is_complete:
        match = _TOKENS[syntax.expected].match(text, index)
        if match is None:
            break
        kind = str(match.lastgroup)
        index = match.end()
        if kind == "quote":
            string = _REST_OF_STRING.match(text, index)
            if string is None:
                break
            index = string.end()
        try:
            syntax.take(kind, match[kind])
        except NotJsonError:
            break
        # Where a bracket may close, all values before it are complete. It may not close behind a
        # key, a colon or a comma.
        if syntax.expected in ("next", "first item", "first key"):
            end = index
            closing = syntax.closing_brackets()
        index = _skip_space(text, index)
    return text[begin:end] + closing


def _skip_space(text: str, index: int) -> int:
    space = _SPACE.match(text, index)
    assert space is not None
    return space.end()

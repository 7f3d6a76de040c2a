"""The grammar of JSON, one token at a time. Pure.

``json_arguments.py`` follows it through a text that comes in pieces, and ``partial_json.py``
through a text that was cut off.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

# Unlike `re`, it finds a match of which the text has only the beginning.
import regex

Expected = Literal["value", "first item", "first key", "key", "colon", "next"]
"""What may come next. ``first item`` and ``first key``: or the bracket that closes."""
TokenPatterns = Mapping[Expected, regex.Pattern[str]]
"""What is expected -> the tokens that are possible there. The group that matches names the kind of
token."""

SPACE = r"[ \t\r\n]*+"
ESCAPE = r"""
    \\ (?: ["\\/bfnrt]
    | u (?: [0-9a-ce-fA-CE-F] [0-9a-fA-F]{3}
        | [dD] [0-7] [0-9a-fA-F]{2}
        # A surrogate and its pair: no client could read one alone.
        | [dD] [89abAB] [0-9a-fA-F]{2} \\u [dD] [c-fC-F] [0-9a-fA-F]{2} ) )
    """
"""An escape in a string. For a verbose regular expression, like the next ones."""
IN_STRING = rf"""(?: [^"\\\x00-\x1f] | {ESCAPE} )*+"""
"""The inside of a string. Verbose, too."""
_AFTER_NUMBER = r"[ \t\r\n,\]}]"
"""A number has ended where one of these follows."""
_MOST_DIGITS = 1000
"""Most digits before the point of a number, behind it, and in its exponent."""
_MAX_DEPTH = 100
"""Most brackets that may be open: clients' parsers have such a bound, too."""
_CLOSING = {"{": "}", "[": "]"}


def inside_quotes(text: str) -> str:
    """A text as a part of a JSON string."""
    return msgspec.json.encode(text).decode()[1:-1]


class NotJsonError(ValueError):
    """A text is not the beginning of any JSON."""


def make_tokens(
    *, quote: str = '"', other_key: str | None = None, after_number: str = _AFTER_NUMBER
) -> TokenPatterns:
    """The tokens of JSON, or of a notation that differs from it in a few places.

    The arguments are verbose regular expressions: ``quote`` for what begins a string, ``other_key``
    for a key that is no string, and ``after_number`` for what must follow a number.
    """
    string = f"(?P<quote> {quote} )"
    # Its digits have a bound, because a number is matched anew with each piece of text, and a model
    # may write digits without end.
    digits = rf"[0-9]{{1,{_MOST_DIGITS}}}+"
    number = rf"-? (?: 0 | (?=[1-9]) {digits} ) (?: \. {digits} )? (?: [eE][+-]? {digits} )?"
    scalar = f"(?P<scalar> true | false | null | {number} (?= {after_number} ) )"
    value = rf"(?P<open> [{{\[] ) | {string} | {scalar}"
    key = string if other_key is None else f"{other_key} | {string}"
    expressions: dict[Expected, str] = {
        "value": value,
        "first item": rf"{value} | (?P<close> \] )",
        "first key": rf"{key} | (?P<close> \}} )",
        "key": key,
        "colon": r"(?P<colon> : )",
        "next": r"(?P<comma> , ) | (?P<close> [}\]] )",
    }
    return {
        expected: regex.compile(expression, regex.VERBOSE)
        for expected, expression in expressions.items()
    }


class JsonSyntax:
    """Where a text stands in the grammar of JSON. :meth:`take` is given its tokens, in order."""

    def __init__(self) -> None:
        self.expected: Expected = "value"
        self.is_complete = False
        """The first bracket is closed."""
        self._brackets_to_close: list[str] = []

    def closing_brackets(self) -> str:
        """What closes all brackets that are open."""
        return "".join(reversed(self._brackets_to_close))

    def find_token(self, tokens: TokenPatterns, text: str, start: int) -> regex.Match[str]:
        """The token at the index ``start``: a partial match, if the text may have only its
        beginning. Raises NotJsonError for what is not expected there."""
        match = tokens[self.expected].match(text, start, partial=True)
        if match is None:
            raise NotJsonError(f"no {self.expected}")
        return match

    def take(self, kind: str, token: str) -> None:
        """Take the next token, which must be one of those that are expected. Raises NotJsonError,
        also for a first token that is not a bracket: only objects and lists are followed here."""
        if kind != "open" and not self._brackets_to_close:
            raise NotJsonError("neither an object nor a list")
        match kind:
            case "open":
                self._open(token)
            case "close":
                self._close(token)
            case "quote" | "name":  # the whole string, or a key without quotes
                is_key = self.expected in ("key", "first key")
                self.expected = "colon" if is_key else "next"
            case "scalar":
                _check_scalar(token)
                self.expected = "next"
            case "colon":
                self.expected = "value"
            case "comma":
                is_in_object = self._brackets_to_close[-1] == "}"
                self.expected = "key" if is_in_object else "value"

    def _open(self, bracket: str) -> None:
        if len(self._brackets_to_close) == _MAX_DEPTH:
            raise NotJsonError(f"more than {_MAX_DEPTH} open brackets")
        self._brackets_to_close.append(_CLOSING[bracket])
        self.expected = "first key" if bracket == "{" else "first item"

    def _close(self, bracket: str) -> None:
        if bracket != self._brackets_to_close[-1]:
            raise NotJsonError(f"{bracket} closes nothing")
        self._brackets_to_close.pop()
        self.expected = "next"
        if not self._brackets_to_close:
            self.is_complete = True


def _check_scalar(token: str) -> None:
    """Raises NotJsonError for a number that clients could not read, such as 1e999."""
    try:
        msgspec.json.decode(token)
    except msgspec.DecodeError as error:
        raise NotJsonError(str(error)) from None

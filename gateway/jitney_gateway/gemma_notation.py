"""Gemma's notation of a JSON object: bare names, and a marker around strings, without escapes.

    {city:<escape>Rome<escape>,days:[1,2]}

``value_grammar.py`` has its grammar.
"""

import json
from collections.abc import Sequence

import regex

from jitney_gateway.json_arguments import InsideOfString
from jitney_gateway.json_syntax import SPACE, Expected, inside_quotes, make_tokens

GEMMA_QUOTES = ("<escape>", '<|"|>')
"""The markers around strings: each model knows one of them."""
_QUOTES = {quote: regex.compile(regex.escape(quote)) for quote in GEMMA_QUOTES}
_ANY_QUOTE = "|".join(map(regex.escape, GEMMA_QUOTES))
_CUT_SCALAR = regex.compile(rf"{SPACE}[\w.+-]+")
"""A value that is no string, or the beginning of one."""


class GemmaNotation:
    """A notation for :class:`~jitney_gateway.json_arguments.ArgumentsLikeJson`."""

    tokens = make_tokens(
        quote=_ANY_QUOTE,
        # It has a bound, because a name is matched anew with each piece of text.
        other_key=rf"(?P<name> [\w.$-]{{1,1024}}+ (?= {SPACE} : ) )",
    )

    def json_of_space(self, space: str) -> str:
        """Nothing: space between tokens means nothing."""
        return ""

    def json_of_token(self, kind: str, token: str) -> str:
        """As in Notation."""
        if kind == "name":
            return json.dumps(token)
        return '"' if kind == "quote" else token

    def json_in_string(self, text: str) -> str:
        """As in Notation."""
        return inside_quotes(text)

    def find_end_of_string(self, text: str, start: int, quote: str) -> InsideOfString:
        """As in Notation."""
        match = _QUOTES[quote].search(text, start, partial=True)
        if match is None:
            return InsideOfString(len(text), None)
        return InsideOfString(match.start(), None if match.partial else quote)

    def json_of_cut_token(self, text: str, expected: Expected) -> str:
        """A number, or a word such as ``true``, as far as it is there. The beginning of a marker or
        of a property's name is left out: it would be no JSON."""
        is_scalar = expected in ("value", "first item") and _CUT_SCALAR.fullmatch(text) is not None
        return text if is_scalar else ""

    def without_quotes(self, markers: Sequence[str]) -> list[str]:
        """Those of the markers that do not stand around strings."""
        return [marker for marker in markers if marker not in GEMMA_QUOTES]
